"""Receipts: figures against naive loops, intervals, what a repetition detects, stored passes."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM as Auto
from transformers import Cohere2Config, Gemma2Config, GraniteConfig
from typer.testing import CliRunner

import anybit
from anybit.checkpoint.quantize import quantize_directory
from anybit.cli.app import app
from anybit.errors import InvalidInput, Unsupported
from anybit.evaluate.perplexity import COLUMNS, Tokens, measure
from anybit.evaluate.receipt import differences, figures, table, tail, writing
from anybit.evaluate.reference import VERSION, Recorder, Reference, read_reference
from anybit.evaluate.run import evaluate
from tests.test_evaluate import PICO, Bigram, documents


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("receipts") / "pico-int4"
    quantize_directory(PICO, out, "int4:group=64,zero", None, None, False)
    return out


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty documents of 60 to 250 tokens."""
    path = tmp_path_factory.mktemp("text") / "a.json"
    texts = ["def f(x):\n    return [y * 2 for y in x]\n\n" * (n + 3) for n in range(13)]
    path.write_text(json.dumps([{"text": t} for t in texts]))
    return path


@pytest.fixture
def few_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models go on for 8 tokens, not 64, which takes most of a short comparison's time."""
    monkeypatch.setattr("anybit.evaluate.generation.WRITTEN", 8)


def cli(*args: object, code: int = 0) -> str:
    got = CliRunner().invoke(app, [str(arg) for arg in args])
    assert got.exit_code == code, got.output
    return got.output


def test_every_column_equals_a_loop_over_positions_and_the_vocabulary() -> None:
    model, dense, texts = Bigram(seed=1), Bigram(seed=2), documents(9, 30)
    got = measure(model, texts, window=8, stride=3, dense=dense)
    row = 0
    for number, ids in enumerate(texts):
        for before, token in zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True):
            q, p = (m.table[before].double().tolist() for m in (model, dense))
            q, p = ([x - math.log(sum(map(math.exp, z))) for x in z] for z in (q, p))
            best = [sorted(range(50), key=z.__getitem__)[-5:] for z in (p, q)]
            want = {
                "nll": -q[token],
                "loss": p[token] - q[token],
                "kl": sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)),
                "kl_reverse": sum(math.exp(b) * (b - a) for a, b in zip(p, q, strict=True)),
                "agreement": float(best[0][-1] == best[1][-1]),
                "top5": len({*best[0]} & {*best[1]}) / 5,
            }
            found = dict(zip(COLUMNS, got.values[row].tolist(), strict=True))
            assert found == pytest.approx(want, rel=1e-4, abs=1e-5)
            assert got.document[row] == number
            row += 1
    assert row == len(got.values)
    assert got.context.tolist()[:8] == [1, 2, 3, 4, 5, 6, 7, 7]  # of 8 tokens, one is scored


def tokens(values: torch.Tensor, document: torch.Tensor) -> Tokens:
    """Scores whose KL and other columns are all the same numbers."""
    columns = values.float()[:, None].expand(-1, len(COLUMNS))
    return Tokens(columns, document, document, torch.ones_like(document))


def test_intervals_hold_the_truth_95_times_in_100() -> None:
    """Documents of many lengths whose means differ: tokens of one document are not independent."""
    generator, inside = torch.Generator().manual_seed(1), {"kl": 0, "share_over_0.1": 0}
    for _ in range(100):
        sizes = torch.randint(10, 60, (60,), generator=generator)
        document = torch.arange(60).repeat_interleave(sizes)
        means = torch.randn(60, generator=generator).mul(0.03).add(0.1)
        values = means[document] + 0.01 * torch.randn(len(document), generator=generator)
        ends = figures(tokens(values, document), 100)["intervals"]
        inside["kl"] += ends["kl"][0] < 0.1 < ends["kl"][1]
        inside["share_over_0.1"] += ends["share_over_0.1"][0] < 0.5 < ends["share_over_0.1"][1]
    assert all(88 <= count <= 99 for count in inside.values()), inside


def test_the_largest_thousandth() -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.rand(20_000, generator=generator)
    document = torch.arange(20_000) // 100
    got = figures(tokens(values, document), 100)
    assert got["kl_999"] == values.sort(descending=True).values[19].item()
    low, high = got["intervals"]["kl_999"]
    assert low < 0.999 < high < low + 0.003
    # By weights, as if the tokens stood there so many times.
    weights = torch.randint(0, 4, (5, 200), generator=generator).double()
    for found, row in zip(tail(values, document, weights).tolist(), weights, strict=True):
        many = values.repeat_interleave(row[document].long()).sort(descending=True).values
        assert found == many[math.ceil(len(many) / 1000) - 1].item()
    # All that is large in one document, which most draws have not.
    assert tail(values.double(), document, torch.eye(200).double()).shape == (200,)


def test_thirds_and_few_tokens(text: Path) -> None:
    found = tokens(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0, 0, 0, 0]))
    found = Tokens(found.values, found.document, found.window, torch.tensor([1, 33, 34, 99]))
    got = figures(found, 100)
    assert [(row["context"], row["tokens"]) for row in got["thirds"]] == [
        ([0, 33], 2), ([34, 66], 1), ([67, 99], 1)
    ]  # fmt: skip
    assert got["thirds"][0]["kl"] == pytest.approx(0.15)
    assert got["intervals"] == {}
    assert "kl_999" not in got  # it would be the largest of four


def test_logits_that_are_not_finite_or_of_another_vocabulary_are_refused() -> None:
    broken = Bigram()
    broken.table[3, 7] = math.nan
    with pytest.raises(InvalidInput, match="not finite"):
        measure(broken, documents(300), window=16)
    with pytest.raises(InvalidInput, match="60 logits, and 50 of the dense model"):
        measure(Bigram(60), documents(30), window=16, dense=Bigram())


def test_a_stored_pass_gives_the_figures_of_the_model_itself(
    int4: Path, text: Path, tmp_path: Path
) -> None:
    stored = tmp_path / "pico.reference"
    saved = evaluate(PICO, None, text, 4096, save=stored)
    alone = evaluate(PICO, None, text, 4096)
    assert saved["perplexity"] == alone["perplexity"]
    direct, through = evaluate(int4, PICO, text, 4096), evaluate(int4, stored, None, 9)
    written = ("same64", "repeated4", "repeated4_dense")
    for name in ("kl", "kl_reverse", "loss", "agreement", "top5", "perplexity", *written):
        assert through[name] == pytest.approx(direct[name], rel=1e-3), name
    assert not {*written} & {*alone}
    assert through["tokens"] == direct["tokens"] > 1000
    assert through["receipt"]["hashes"] == direct["receipt"]["hashes"]
    itself = evaluate(PICO, stored, None, 9)
    assert itself["kl"] <= 1e-5 >= itself["floor"]
    assert itself["agreement"] > 0.999
    assert itself["same64"] == 64
    assert itself["repeated4"] == itself["repeated4_dense"] == direct["repeated4_dense"]

    quantize_directory(PICO, tmp_path / "int2", "int2:group=64,zero", None, None, False)
    ruined = evaluate(tmp_path / "int2", stored, None, 9)
    low, high = ruined["intervals"]["same64"]
    assert 0 < low <= ruined["same64"] <= high < 32
    assert ruined["repeated4_dense"] == direct["repeated4_dense"] > 0.5  # the text is one function

    older = load_file(stored)
    del older["written"]
    with safe_open(stored, "pt") as file:
        save_file(older, stored, metadata=file.metadata())
    assert {*direct} - {*evaluate(int4, stored, None, 9)} == {*written}


def test_answers_in_a_stored_pass(int4: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    pairs = [("def add(a, b", "):\n    return a + b\n"), ("class A", ":\n    pass\n")] * 2
    path.write_text("\n".join(json.dumps({"prompt": p, "completion": c}) for p, c in pairs))
    evaluate(PICO, None, path, 4096, answers_only=True, save=tmp_path / "ref")
    got = evaluate(int4, tmp_path / "ref", None, 4096)
    want = evaluate(int4, PICO, path, 4096, answers_only=True)
    assert (got["tokens"], got["kl"]) == (want["tokens"], pytest.approx(want["kl"], rel=1e-3))
    assert (got["length"], got["length_dense"]) == (want["length"], want["length_dense"])
    assert "length" in got["intervals"]
    assert "| tokens of a greedy answer, cut at 256 |" in table(got)
    changed = got | {"length": got["intervals"]["length"][1] + 1.0}
    lines, same = differences(got, changed)
    assert [line.split(":")[0] for line in lines] == ["length"]
    assert not same


def test_lengths_are_of_answers_to_their_end() -> None:
    dense = torch.tensor([[4, 5, 6, -1], [4, -1, -1, -1]])
    longer = torch.tensor([[4, 5, 6, 7], [4, 9, 9, 2]])
    means, ends = writing(longer, dense, answers=True)
    assert (means["length"], means["length_dense"], means["same64"]) == (4, 2, 2)
    assert ends["length"] == [4, 4]
    assert ends["length_dense"] == [1, 3]
    assert "length" not in writing(longer, dense, answers=False)[0]


@pytest.mark.parametrize(
    ("config", "after"),
    [
        (
            Gemma2Config(head_dim=8, vocab_size=50, final_logit_softcapping=3.0),
            {"final_logit_softcapping": 3.0},
        ),
        (GraniteConfig(logits_scaling=7.0), {"logits_scaling": 7.0}),
        (Cohere2Config(logit_scale=0.3), {"logit_scale": 0.3}),
    ],
    ids=["gemma2", "granite", "cohere2"],
)
def test_models_that_change_the_heads_output(config, after, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    config.update(
        {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2}
    )  # fmt: skip
    config.layer_types = ["full_attention"] * 2
    torch.manual_seed(0)
    model, texts = Auto.from_config(config).eval(), documents(40, 25)
    recorder = Recorder(model, texts, None, {"window": 16, "begin": [], "words": {}})
    measure(recorder, texts, window=16)
    recorder.reference().save(tmp_path / "r")
    stored = read_reference(tmp_path / "r")
    assert stored.after == after
    got, want = (measure(Bigram(), texts, window=16, dense=d).values for d in (stored, model))
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_stored_is_refused(int4: Path) -> None:
    model = Auto.from_pretrained(PICO)
    forward = model.forward
    model.forward = lambda ids: forward(ids).logits * 3
    with pytest.raises(Unsupported, match="not known here; compare with the model itself"):
        measure(
            Recorder(model, documents(20), None, {"window": 8, "begin": [], "words": {}}),
            documents(20),
            window=8,
        )
    model = anybit.quantize_(Auto.from_pretrained(PICO), {"*": "int8", "lm_head": "int8"})
    if not isinstance(model.get_output_embeddings(), torch.nn.Linear):
        with pytest.raises(Unsupported, match="as its output head"):
            Recorder(model, documents(20), None, {"window": 8, "begin": [], "words": {}})


def test_a_file_that_is_no_reference_is_refused(tmp_path: Path) -> None:
    ids = documents(20)
    good = Reference(
        torch.ones(19, 4),
        torch.ones(50, 4),
        None,
        {},
        ids,
        None,
        {"window": 32, "begin": [], "words": {}},
    )
    path = tmp_path / "r"
    good.save(path)
    assert read_reference(path).rows(3, 5).shape == (2, 50)
    tensors = load_file(path)
    meta = {
        "anybit_reference": json.dumps(
            {"version": VERSION, "after": {}, "window": 32, "begin": [], "words": {}}
        )
    }
    for name, tensor in [
        ("hidden", torch.ones(18, 4)),
        ("hidden", torch.ones(19, 3)),
        ("head", torch.ones(20, 4)),
        ("lengths", torch.tensor([21])),
        ("written", torch.ones(1, 64).long()),
    ]:
        save_file(tensors | {name: tensor}, path, metadata=meta)
        with pytest.raises(InvalidInput, match="neither a model nor a reference"):
            read_reference(path)
    save_file(tensors, path)
    with pytest.raises(InvalidInput, match="neither a model nor a reference"):
        read_reference(path)
    path.write_text("x" * 99)
    with pytest.raises(InvalidInput, match="no safetensors file"):
        read_reference(path)
    assert not list(tmp_path.glob(".r*"))  # nothing half written stays


@pytest.mark.usefixtures("few_written")
def test_verify_detects_another_model_and_another_text(
    int4: Path, text: Path, tmp_path: Path
) -> None:
    model, own, receipt = tmp_path / "model", tmp_path / "a.json", tmp_path / "receipt.json"
    shutil.copytree(int4, model)
    own.write_text(json.dumps(json.loads(text.read_text())[:6]))
    cli("eval", model, "--against", PICO, "--text", own, "--tokens", 4096, "--json", receipt)
    assert "same64" in json.loads(receipt.read_text())["intervals"]
    assert cli("eval", "--verify", receipt).splitlines()[-1] == f"{receipt}: confirmed"
    moved = cli("eval", int4, "--verify", receipt)
    assert "model: " in moved  # the same files elsewhere
    assert "not confirmed" not in moved

    weights = load_file(model / "model.safetensors")
    name = next(n for n in weights if n.endswith("norm.weight"))
    weights[name][0] += 0.01
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    changed = cli("eval", "--verify", receipt, code=1)
    assert "receipt.hashes.model.model.safetensors: " in changed
    assert changed.splitlines()[-1].endswith("not confirmed")
    other = json.loads(own.read_text())
    own.write_text(json.dumps([*other[:-1], {"text": "class A:\n    pass\n" * 30}]))
    changed = cli("eval", int4, "--verify", receipt, code=1)
    assert "receipt.hashes.text: " in changed
    assert "receipt.hashes.tokens: " in changed


def test_a_figure_outside_its_interval_is_not_confirmed() -> None:
    then = {"kl": 0.5, "perplexity": 9.0, "intervals": {"kl": [0.4, 0.6]}, "seconds": 3}
    hashes = {"receipt": {"hashes": {"text": "a"}, "versions": {"torch": "1"}}}
    for change, lines, same in [
        ({}, 0, True),
        ({"kl": 0.55, "seconds": 5, "intervals": {"kl": [0.3, 0.7]}}, 1, True),
        ({"kl": 0.61}, 1, False),
        ({"kl": None}, 1, False),
        ({"same64": 9.0}, 0, True),  # a figure of a later version
        ({"perplexity": 9.1}, 1, False),
        ({"receipt": {"hashes": {"text": "b"}, "versions": {"torch": "1"}}}, 1, False),
        ({"receipt": {"hashes": {"text": "a"}, "versions": {"torch": "2"}}}, 1, True),
    ]:
        got = differences(then | hashes, then | hashes | change)
        assert (len(got[0]), got[1]) == (lines, same), change


@pytest.mark.usefixtures("few_written")
def test_the_card_tells_the_figures_once(int4: Path, text: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(int4, model)
    before = (model / "README.md").read_text()
    for count in (2000, 4096):
        options = ("--text", text, "--tokens", count, "--card", "--json", tmp_path / "r.json")
        cli("eval", model, "--against", PICO, *options)
    receipt = json.loads((tmp_path / "r.json").read_text())
    card = (model / "README.md").read_text()
    assert card.count("## Measured") == card.count("<!-- /anybit eval -->") == 1
    assert f"| {receipt['kl']:.4g} |" in card
    assert f"On {receipt['tokens']} tokens (a.json, 13 entries;" in card
    assert str(tmp_path) not in card
    own, _, rest = card.partition("<!-- anybit eval -->")
    assert own.rstrip() + rest.partition("<!-- /anybit eval -->")[2] == before
    (model / "README.md").unlink()
    cli("eval", model, "--text", text, "--tokens", 1500, "--card")
    assert (model / "README.md").read_text().startswith("<!-- anybit eval -->\n## Measured\n")


def test_options_that_do_not_go_together(int4: Path, text: Path, tmp_path: Path) -> None:
    stored, broken = tmp_path / "ref", tmp_path / "broken.json"
    stored.write_text("")
    broken.write_text("{}")
    for args, code, message in [
        (("eval",), 2, "name a model"),
        (("eval", int4, "--against", PICO, "--save-reference", "x"), 2, "leave --against out"),
        (("eval", int4, "--against", stored, "--tokens", 50), 2, "which holds its text"),
        (("eval", int4, "--against", stored), 1, "no safetensors file"),
        (("eval", "--verify", broken), 1, "is no receipt"),
        (("eval", "--verify", stored, "--tokens", 50), 2, "with --verify"),
        (("eval", int4, "--save-reference", tmp_path / "no/x"), 1, "is not a directory to write x"),
        (("eval", "org/name", "--card"), 1, "leave --card out"),
    ]:
        # The terminal breaks lines of usage errors inside a frame.
        said = " ".join(cli(*args, code=code).replace("│", " ").split())
        assert message in said, args


def test_an_interrupted_writing_leaves_the_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r"
    good = Reference(
        torch.ones(19, 4),
        torch.ones(50, 4),
        None,
        {},
        documents(20),
        None,
        {"window": 32, "begin": [], "words": {}},
    )
    good.save(path)
    before = path.read_bytes()

    def full(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="no space"):
        good.save(path)
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]
