"""Drafts by a model's own head for further tokens: its guesses, and texts with them."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import anybit
from anybit.checkpoint.calibrated import calibrate_checkpoint
from anybit.checkpoint.foreign.convert import convert_checkpoint
from anybit.checkpoint.foreign.export import export_checkpoint
from anybit.checkpoint.save_load import load_dense, save
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.engine.head_draft import HeadDraft
from anybit.engine.llm import LLM
from anybit.engine.loader import load, model_class
from anybit.engine.sequence import Row, SamplingParams
from anybit.engine.weights import Checkpoint
from anybit.errors import InvalidInput
from anybit.files.directory import read_json, write_json
from anybit.files.safetensors import stored_tensors
from anybit.quantizers.calibration.data import Calibration
from anybit.quantizers.gptq import GPTQ
from tests.engine.conftest import prompts
from tests.engine.test_engine import assert_no_block_is_held, assert_same, mixed_params
from tests.engine.test_speculation import alone, drafting
from tests.needs import pairs

Made = Callable[[str], Path]
KINDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "deepseek_v3", "glm4_moe")
WHOLE = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def headed(checkpoint: Made, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A function from an architecture's name to a checkpoint that has a head, too."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = directory = tmp_path_factory.mktemp(f"mtp-{name}")
            for file in checkpoint(name).iterdir():
                (directory / file.name).write_bytes(file.read_bytes())
            save_file(
                load_file(directory / "model.safetensors") | head(directory),
                directory / "model.safetensors", {"format": "pt"},
            )  # fmt: skip
        return made[name]

    return make


def head(directory: Path) -> dict[str, Tensor]:
    """A random head: a decoder layer such as the model has, norms, and a projection."""
    config = AutoConfig.from_pretrained(directory)
    names = model_class(config).further(config)
    assert names is not None
    random, size = torch.Generator().manual_seed(7), config.hidden_size

    def like(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=random) * 0.15 + (tensor.ndim == 1)

    layer = f"model.layers.{names.like}."
    out = {
        f"{names.layer}.{name.removeprefix(layer)}": like(tensor)
        for name, tensor in load_file(directory / "model.safetensors").items()
        if name.startswith(layer)
    }
    for norm in (names.embedding, names.hidden, names.norm):
        out[f"{names.prefix}.{norm}.weight"] = like(torch.empty(size))
    out[f"{names.prefix}.{names.project}.weight"] = like(torch.empty(size, 2 * size))
    return out


def guesses(directory: Path, tokens: list[int], count: int) -> list[int]:
    """What a head guesses behind a text, by transformers' modules alone."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = copy.deepcopy(model.config)
    names = model_class(config).further(config)
    assert names is not None
    config.num_hidden_layers = 1
    alone = {"layer_types": ["full_attention"], "mlp_only_layers": [], "first_k_dense_replace": 0}
    for field, value in alone.items():
        if hasattr(config, field):
            setattr(config, field, value)
    stored = load_file(directory / "model.safetensors")
    layer = {
        f"model.layers.0.{name.removeprefix(f'{names.layer}.')}": tensor
        for name, tensor in stored.items()
        if name.startswith(f"{names.layer}.")
        and name.replace(names.layer, f"model.layers.{names.like}") in stored
    }
    one = directory / "head"
    one.mkdir(exist_ok=True)
    config.save_pretrained(one)
    kept = {n: t for n, t in stored.items() if n.startswith(("model.embed", "lm_head"))}
    norm = {"model.norm.weight": stored[f"{names.prefix}.{names.norm}.weight"]}
    save_file(layer | kept | norm, one / "model.safetensors", {"format": "pt"})
    block = AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32)
    norms = [copy.deepcopy(block.model.norm) for _ in range(2)]
    for own, name in zip(norms, (names.embedding, names.hidden), strict=True):
        own.weight.data = stored[f"{names.prefix}.{name}.weight"]
    project = stored[f"{names.prefix}.{names.project}.weight"]
    out: list[int] = []
    with torch.no_grad():
        hidden = model.model(torch.tensor([tokens])).last_hidden_state[0, :-1]
        words = tokens[1:]
        for _ in range(count):
            e = model.model.embed_tokens(torch.tensor(words))
            x = torch.cat([norms[0](e), norms[1](hidden)], -1) @ project.T
            after = block.model(inputs_embeds=x[None]).last_hidden_state[0, -1:]
            out.append(int(block.lm_head(after).argmax()))
            hidden, words = torch.cat([hidden, after]), [*words, out[-1]]
    return out


def in_memory(source: Path, out: Path) -> None:
    save(anybit.quantize_(load_dense(source), "int4"), out)


def by_transformers(source: Path, out: Path) -> None:
    anybit.quantize_(load_dense(source), "int4").save_pretrained(out)  # type: ignore[operator]


def over_itself(source: Path, out: Path) -> None:
    shutil.copytree(source, out)
    by_transformers(out, out)


def loaded_and_saved(source: Path, out: Path) -> None:
    quantize_checkpoint(source, f"{out}-once", "int4")
    save(anybit.load(f"{out}-once"), out)


def calibrated(source: Path, out: Path) -> None:
    tokens = torch.randint(2, 90, (4, 16))
    report = calibrate_checkpoint(source, out, "int4", GPTQ(Calibration(tokens)))
    assert report.dropped == {}
    assert "0 tensors dropped" in str(report)


def there_and_back(source: Path, out: Path) -> None:
    quantize_checkpoint(source, f"{out}-once", "int4")
    export_checkpoint(f"{out}-once", f"{out}-other")
    convert_checkpoint(f"{out}-other", out)


WRITERS = (
    in_memory, by_transformers, over_itself, loaded_and_saved, calibrated, there_and_back,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*fewer calibration tokens")
@pytest.mark.parametrize(("name", "write"), pairs(KINDS, WRITERS))
def test_what_writes_a_checkpoint_keeps_the_head(
    headed: Made, tmp_path: Path, name: str, write: Callable[[Path, Path], None]
) -> None:
    """Though transformers' class drops it."""
    write(headed(name), tmp_path / "out")
    stored = stored_tensors(tmp_path / "out")
    for key, tensor in head(headed(name)).items():
        assert torch.equal(stored[key].read(), tensor), key
    LLM(tmp_path / "out", draft="mtp", kv_bytes=1 << 20)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_a_head_in_codes(checkpoint: Made, tmp_path: Path, name: str) -> None:
    """As other tools quantize it: transformers loads the model without, and saves it with it."""
    shutil.copytree(checkpoint(name), tmp_path / "dense")
    plan = {"*": "int4", "*.layers.1.*": "int8"}
    quantize_checkpoint(tmp_path / "dense", tmp_path / "ours", plan)
    export_checkpoint(tmp_path / "ours", tmp_path / "theirs")
    config = read_json(tmp_path / "theirs/config.json") | {"num_hidden_layers": 1}
    config["first_k_dense_replace"] = 1
    if config.get("mlp_layer_types"):
        config["mlp_layer_types"] = config["mlp_layer_types"][:1]
    write_json(tmp_path / "theirs/config.json", config)
    convert_checkpoint(tmp_path / "theirs", tmp_path / "out")
    save(anybit.load(tmp_path / "out"), tmp_path / "again")
    before, after = (stored_tensors(tmp_path / one) for one in ("out", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor.read(), after[key].read()) for key, tensor in before.items())
    formats = read_json(tmp_path / "again/config.json")["quantization_config"]["formats"]
    assert dict(formats)["model.layers.1.mlp.experts.0.up_proj"] == "int8"


def test_a_head_that_is_not_saved_is_named(
    headed: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = anybit.quantize_(load_dense(headed("qwen3_5")), "int4")
    count = len(head(headed("qwen3_5")))
    model.save_pretrained(tmp_path / "variant", variant="v")  # type: ignore[operator]
    assert f"{count} tensors that no Qwen3_5ForCausalLM has, such as mtp.fc.weight" in caplog.text
    caplog.clear()
    model.model.save_pretrained(tmp_path / "base")  # type: ignore[operator, union-attr]
    assert f"{count} tensors that no Qwen3_5ForCausalLM has are not saved" in caplog.text


def watched(llm: LLM) -> list[tuple[list[int], list[int]]]:
    """Texts and what was guessed behind them, as an engine goes on."""
    assert llm.engine.speculation is not None
    drafter, seen = llm.engine.speculation.drafter, list[tuple[list[int], list[int]]]()
    assert isinstance(drafter, HeadDraft)
    usual = drafter.draft

    def draft(rows: list[Row], counts: list[int]) -> list[list[int]]:
        found = usual(rows, counts)
        seen.extend(
            (list(row.seq.tokens), guess) for row, guess in zip(rows, found, strict=True) if guess
        )
        return found

    drafter.draft = draft  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("name", KINDS)
def test_guesses_are_those_of_the_layers_by_themselves(headed: Made, name: str) -> None:
    """Behind prompts in chunks and cached ones, and after guesses that were right and wrong."""
    given = 1 << 20
    llm = LLM(headed(name), draft="mtp", block_size=4, max_tokens=16, kv_bytes=given)
    llm = drafting(llm)
    seen = watched(llm)
    assert llm.engine.speculation is not None
    own = llm.engine.speculation.drafter
    assert isinstance(own, HeadDraft)
    held = sum(state.nbytes for state in (*own.large.states, *own.runner.states))
    assert 0.9 * given < held <= given
    first = prompts(4, longest=30)
    llm.generate([*first, [*first[0], *first[1]], [*first[0], *first[2]]], WHOLE)
    llm.generate([[*first[0], *first[1], *first[3]]], WHOLE)
    assert not llm.engine.speculation.failed  # type: ignore[union-attr]
    assert llm.engine.scheduler.prefix_hits > 0
    assert len(seen) > 20
    for tokens, guess in seen[:: len(seen) // 8]:
        assert guess == guesses(headed(name), tokens, len(guess))


@pytest.mark.parametrize(
    ("name", "option"),
    pairs(KINDS, [
        {}, {"max_tokens": 7, "block_size": 4, "draft_tokens": 2}, {"max_running": 3},
        {"kv_cache": "int8"},
    ]),
)  # fmt: skip
def test_a_head_changes_no_token(headed: Made, name: str, option: dict[str, Any]) -> None:
    kind = {"kv_cache": option["kv_cache"]} if "kv_cache" in option else {}
    want = alone(headed, name, **kind)
    llm = drafting(LLM(headed(name), draft="mtp", **option))
    for _ in range(2):
        assert_same(llm.generate(prompts(10), mixed_params(10)), want)
        assert_no_block_is_held(llm.engine)
    stats, drafter = llm.engine.stats, llm.engine.speculation.drafter  # type: ignore[union-attr]
    assert not llm.engine.speculation.failed  # type: ignore[union-attr]
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    assert isinstance(drafter, HeadDraft)
    assert not drafter.texts
    assert drafter.blocks is not None
    assert drafter.blocks.holders == [0] * drafter.blocks.count
    for runner in (drafter.runner, drafter.large):
        captured = runner.graphs.graphs.values() if runner.graphs else ()
        assert not any(getattr(graph, "refused", None) for graph, _ in captured)


def changed(directory: Path, out: Path, tensors: dict[str, Tensor]) -> Path:
    """A checkpoint with other tensors."""
    (out / "config.json").write_bytes((directory / "config.json").read_bytes())
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def test_a_head_is_quantized_as_the_layer_that_it_is_like(headed: Made, tmp_path: Path) -> None:
    """While it is read, of a checkpoint whose layers are codes, and with experts in one tensor."""
    source = headed("qwen3_5_moe")
    quantize_checkpoint(source, tmp_path / "int8", "int8")
    stored = load_file(source / "model.safetensors")
    at, (gate, up, down) = "mtp.layers.0.mlp.experts", ("gate_proj", "up_proj", "down_proj")

    def together(*parts: str) -> Tensor:
        names = [[f"{at}.{e}.{part}.weight" for part in parts] for e in range(4)]
        return torch.stack([torch.cat([stored[n] for n in own]) for own in names])

    fused = {f"{at}.gate_up_proj": together(gate, up), f"{at}.down_proj": together(down)}
    rest = {n: t for n, t in stored.items() if not n.startswith(f"{at}.")}
    (tmp_path / "fused").mkdir()
    directory = changed(source, tmp_path / "fused", rest | fused)
    found = []
    for model, spec in [(source, "int8"), (tmp_path / "int8", None), (directory, "int8")]:
        llm = drafting(LLM(model, spec, draft="mtp"))
        found.append(watched(llm))
        outputs = llm.generate(prompts(3), WHOLE)
        drafter = llm.engine.speculation.drafter  # type: ignore[union-attr]
        layers = drafter.runner.model.layers[0].named_modules()  # type: ignore[attr-defined]
        schemes = {name: layer.scheme for name, layer in layers if hasattr(layer, "scheme")}
        assert len(schemes) == 2 + 2 * 4 + 2  # attention, experts, and the shared one
        assert set(schemes.values()) == {"int8"}
        assert llm.quantized["int8"] > 0
        assert [o.tokens for o in outputs] == [
            o.tokens for o in LLM(model, spec).generate(prompts(3), WHOLE)
        ]
    assert found[0] == found[1] == found[2] != []


def test_new_weights_of_the_model_leave_its_head(headed: Made) -> None:
    llm = drafting(LLM(headed("qwen3_5"), draft="mtp", block_size=2))
    seen = watched(llm)
    stored = load_file(headed("qwen3_5") / "model.safetensors")
    texts = []
    for factor in (1.0, 1.2, 1.0):
        llm.load_weights((name, tensor * factor) for name, tensor in stored.items())
        llm = drafting(llm)
        seen.clear()
        llm.generate(prompts(3), WHOLE)
        texts.append(list(seen))
    assert texts[0] == texts[2] != texts[1]
    for tokens, guess in texts[0][::5]:
        assert guess == guesses(headed("qwen3_5"), tokens, len(guess))


def test_what_has_no_head_is_refused(headed: Made, checkpoint: Made) -> None:
    with pytest.raises(InvalidInput, match="no head for further tokens is known for Llama"):
        LLM(checkpoint("llama"), draft="mtp")
    with pytest.raises(InvalidInput, match=r"has no tensors mtp\.\*; take files that"):
        LLM(checkpoint("qwen3_5"), draft="mtp")
    loaded = load(headed("qwen3_5"), torch.device("cpu"), torch.float32, None, None)
    with pytest.raises(InvalidInput, match="'mtp' reads the model's directory"):
        LLM(loaded, draft="mtp")
    assert LLM(headed("deepseek_v3")).generate([[5, 6]], WHOLE)[0].tokens  # it may stay


@pytest.mark.parametrize(
    ("tensor", "shape", "said"),
    [
        ("mtp.norm.weight", None, "tensor 'mtp.norm.weight' is missing"),
        ("mtp.fc.weight", (64, 64), r"mtp.fc.weight has shape \(64, 64\), but config.json asks"),
        ("mtp.layers.0.self_attn.k_proj.weight", (8, 64), r"k_proj.weight has shape \(8, 64\)"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_before_the_model_is_read(
    headed: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor: str,
    shape: tuple[int, ...] | None, said: str,
) -> None:  # fmt: skip
    stored = load_file(headed("qwen3_5") / "model.safetensors")
    stored.pop(tensor)
    if shape:
        stored[tensor] = torch.zeros(shape)
    directory = changed(headed("qwen3_5"), tmp_path, stored)
    monkeypatch.setattr(Checkpoint, "embedding", lambda *args: pytest.fail("it was read"))
    with pytest.raises(InvalidInput, match=said):
        LLM(directory, draft="mtp")
