"""Embeddings in few bits: looked up as they are stored, in transformers and in the engine."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import anybit
from anybit.checkpoint.calibrated import calibrate_checkpoint
from anybit.checkpoint.foreign.export import export_checkpoint
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from anybit.errors import InvalidInput, InvalidType
from anybit.nn.embedding import QuantEmbedding, embedding_layers, factor_of
from anybit.nn.linear import QuantLinear
from anybit.nn.plan import patterns_for
from anybit.quantizers.calibration.data import Calibration
from tests.engine.conftest import random_model
from tests.specs import SPECS

PICO = Path(__file__).parents[1] / "models" / "pico"
WORDS = "model.embed_tokens"
IDS = torch.tensor([[5, 0, 95], [31, 16, 5]])
PLAN = {"*": "int4:group=32", "*.embed_tokens": "int8"}


def table(spec: str, k: int = 256) -> anybit.Packed:
    w = torch.randn(96, k, generator=torch.Generator().manual_seed(0))
    return anybit.quantize_tensor(w, spec)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(12)[None] * 7).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS)
def test_rows_are_those_of_the_decoded_weight(spec: str, dtype: torch.dtype) -> None:
    packed = table(spec)
    q = QuantEmbedding(packed, dtype)
    want = packed.dequantize().to(dtype)
    assert torch.equal(q(IDS), want[IDS])
    assert torch.equal(q(torch.arange(96, dtype=torch.int32)), want)
    assert q(IDS[:0]).shape == (0, 3, 256)


def test_none_draws_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would import its compiler for that, 1.5 s of a start."""
    monkeypatch.delattr(nn.Embedding, "reset_parameters")
    QuantEmbedding(table("int8"))


def test_rotated_rows() -> None:
    q = QuantEmbedding(table("int4:rotate=k"))
    assert torch.allclose(q(IDS), q.dequantize()[IDS], atol=1e-6)
    with pytest.raises(InvalidInput, match="mixed by its rotation; use rotate=k"):
        QuantEmbedding(table("int4:rotate=kn"))(IDS)


def test_it_is_compiled_copied_cast_and_exported() -> None:
    q = QuantEmbedding(table("int6:group=64"), torch.bfloat16)
    assert torch.equal(torch.compile(q, fullgraph=True)(IDS), q(IDS))
    assert torch.equal(torch.export.export(q, (IDS,)).module()(IDS), q(IDS))
    assert torch.equal(copy.deepcopy(q)(IDS), q(IDS))
    assert (q.weight.dtype, q.weight.shape) == (torch.bfloat16, (96, 256))
    assert torch.equal(q.float()(IDS), q.dequantize()[IDS])
    assert q.scale.dtype == torch.float16


@pytest.mark.parametrize(
    ("ids", "error"),
    [(torch.tensor([96]), IndexError), (torch.tensor([-1]), IndexError)],
)
def test_ids_that_are_no_rows(ids: torch.Tensor, error: type[Exception]) -> None:
    with pytest.raises(error):
        QuantEmbedding(table("int8"))(ids)


def test_ids_that_are_no_numbers_of_rows() -> None:
    with pytest.raises(InvalidType, match=r"ids are torch\.float32; pass int32 or int64"):
        QuantEmbedding(table("int8"))(torch.zeros(2))


class Scaled(nn.Embedding):
    """As BART has it: the product is of a number that is not rounded."""

    embed_scale = 7.3

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.embed_scale


class Rounded(nn.Embedding):
    """As Gemma has it."""

    def __init__(self, *args: int):
        super().__init__(*args)
        self.register_buffer("embed_scale", torch.tensor(7.3), persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.embed_scale.to(self.weight.dtype)


class Positions(nn.Embedding):
    """As OPT has it: more than a look-up."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input + 2)


class Small(nn.Module):
    """A model of plain torch, whose head shares the embedding's weight."""

    def __init__(self, kind: type[nn.Embedding] = nn.Embedding, tied: bool = False):
        super().__init__()
        self.words, self.body = kind(96, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 96, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.words(ids)))


@pytest.mark.parametrize("kind", [Scaled, Rounded])
def test_a_subclass_that_scales_keeps_its_factor(kind: type[nn.Embedding]) -> None:
    plan = {"*": None, "words": "int8"}
    for dtype in (torch.bfloat16, torch.float32):
        model = anybit.quantize_(Small(kind).to(dtype), plan)
        plain = anybit.dequantize_(copy.deepcopy(model))
        assert isinstance(model.words, QuantEmbedding)
        assert type(plain.words) is kind
        assert torch.equal(model.words(IDS), plain.words(IDS))
    with torch.device("meta"):
        assert kind is not Rounded or factor_of(Rounded(96, 64)) is None  # a factor without value
    model = anybit.quantize_(Small(kind), plan).bfloat16()
    plain = Small(kind).bfloat16()
    plain.words.weight.data = model.words.dequantize(torch.bfloat16)
    assert torch.equal(model.words(IDS), plain.words(IDS))


def test_a_subclass_that_does_more_is_kept() -> None:
    assert factor_of(Positions(96, 64)) is None
    assert factor_of(nn.Embedding(96, 64, max_norm=1.0)) is None
    model = anybit.quantize_(Small(Positions), {"*": "int8", "body": "int8"})
    assert type(model.words) is Positions
    with pytest.raises(InvalidInput, match="no layer matches 'words'"):
        anybit.quantize_(Small(Positions), {"*": "int8", "words": "int8"})


def test_a_head_of_plain_torch_shares_the_codes() -> None:
    model = Small(tied=True)
    anybit.quantize_(model, {"*": "int4", "words": "int8", "head": "int8@int8"})
    head = model.head
    assert isinstance(head, QuantLinear)
    assert (head.scheme, head.is_copy) == ("int8@int8", True)
    assert head.codes8 is model.words.codes8
    assert "head.codes8" not in model.state_dict()
    other = anybit.quantize_(Small(tied=True), {"*": "int4", "words": "int8", "head": "int8@int8"})
    for assign in (False, True):
        other.load_state_dict(model.state_dict(), assign=assign)
        assert torch.equal(other(IDS), model(IDS))
        assert other.head.codes8 is other.words.codes8
    moved = copy.deepcopy(model).to("meta")
    assert moved.head.codes8 is moved.words.codes8
    with pytest.raises(InvalidInput, match="shares its weight with"):
        anybit.quantize_(Small(tied=True), {"*": "int4", "words": "int8", "head": "int4"})


def test_only_a_name_means_an_embedding() -> None:
    for pattern in ("*", "model.*", "*.*", "model.?*"):
        assert patterns_for(WORDS, {pattern: "int8"}, True) == []
    for pattern in (WORDS, "*.embed_tokens", "*embed*"):
        assert patterns_for(WORDS, {pattern: "int8"}, True) == [pattern]
    model = random_model("llama", {"vocab_size": 96})
    assert [*embedding_layers(model)] == [WORDS]
    anybit.quantize_(model, {"model.*": "int8"})
    assert type(model.get_input_embeddings()) is nn.Embedding


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("int8@int8", "quantizes activations, and an embedding looks up rows"),
        ("int8:rotate=kn", "mixes rows, and an embedding"),
        ("int4:group=48", "embed_tokens: K=64 is not a multiple of group=48"),
    ],
)
def test_schemes_that_no_embedding_has(scheme: str, message: str) -> None:
    model = random_model("llama", {"vocab_size": 96})
    with pytest.raises(InvalidInput, match=message):
        anybit.quantize_(model, {"*": "int8", WORDS: scheme})
    assert type(model.get_input_embeddings()) is nn.Embedding


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def dense(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    own = {"tie_word_embeddings": request.param, "vocab_size": 96}
    random_model("gemma", {"head_dim": 16, **own}).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def load(path: Path, **options: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)


def check_same(model: PreTrainedModel, want: PreTrainedModel) -> None:
    tied = model.config.tie_word_embeddings
    assert tied == want.config.tie_word_embeddings
    assert isinstance(model.get_input_embeddings(), QuantEmbedding)
    assert isinstance(model.lm_head, QuantLinear if tied else nn.Linear)
    if tied:
        assert model.lm_head.codes8 is model.get_input_embeddings().codes8
    assert model.num_parameters() == want.num_parameters()
    assert torch.equal(logits(model), logits(want))


def generated(source: Path, plan: dict[str, str | None] | None, count: int = 8) -> list[int]:
    llm = LLM(source, dtype="float32", quantization=plan)
    params = SamplingParams(max_tokens=count, temperature=0)
    return llm.generate([[5, 6, 7]], params)[0].tokens


def by_transformers(model: PreTrainedModel, count: int = 8) -> list[int]:
    out = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=count, do_sample=False)
    return out[0, 3:].tolist()


def test_every_way_makes_the_same_model(dense: Path, tmp_path: Path) -> None:
    """In memory, from disk, while it is loaded; saved and loaded; the engine from either."""
    want = anybit.quantize_(load(dense), PLAN)
    anybit.save(want, tmp_path / "saved")
    quantize_checkpoint(dense, tmp_path / "streamed", PLAN)
    on_load = load(dense, quantization_config=anybit.AnybitConfig(PLAN))
    check_same(on_load, want)
    anybit.save(on_load, tmp_path / "again")
    for name in ("saved", "streamed", "again"):
        check_same(anybit.load(tmp_path / name, dtype=torch.float32), want)
        tensors = load_file(tmp_path / name / "model.safetensors")
        assert f"{WORDS}.codes8" in tensors
        assert "lm_head.codes8" not in tensors
        assert ("lm_head.weight" in tensors) != want.config.tie_word_embeddings
    tokens = by_transformers(want)
    assert generated(tmp_path / "saved", None) == tokens
    assert generated(dense, PLAN) == tokens


def test_dequantized_again_it_is_as_before(dense: Path, tmp_path: Path) -> None:
    model = anybit.quantize_(load(dense), PLAN)
    want, kind = logits(model), type(load(dense).get_input_embeddings())
    anybit.dequantize_(model)
    assert type(model.get_input_embeddings()) is kind
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert tied == model.config.tie_word_embeddings
    model.save_pretrained(tmp_path / "plain")
    for found in (model, load(tmp_path / "plain")):
        assert torch.allclose(logits(found), want, atol=1e-4)


@pytest.mark.parametrize("head", ["int4:group=64", None])
def test_a_head_that_is_named_has_its_own_weight(
    dense: Path, tmp_path: Path, head: str | None
) -> None:
    plan = {**PLAN, "lm_head": head}
    want = anybit.quantize_(load(dense), plan)
    quantize_checkpoint(dense, tmp_path / "out", plan)
    model = anybit.load(tmp_path / "out", dtype=torch.float32)
    assert not model.config.tie_word_embeddings
    assert torch.equal(logits(model), logits(want))
    assert generated(tmp_path / "out", None) == by_transformers(want)


def test_calibrated_layers_see_the_rounded_embeddings(dense: Path, tmp_path: Path) -> None:
    texts = torch.randint(96, (6, 24), generator=torch.Generator().manual_seed(0))
    quantizer = anybit.GPTQ(Calibration(texts))
    want = anybit.quantize_(load(dense), PLAN, quantizer)
    words = load(dense).get_input_embeddings().weight
    rounded = anybit.quantize_tensor(words, "int8").dequantize()
    assert torch.equal(want.get_input_embeddings().dequantize(), rounded)
    calibrate_checkpoint(dense, tmp_path / "out", PLAN, quantizer)
    check_same(anybit.load(tmp_path / "out", dtype=torch.float32), want)


def test_quantizers_without_data_choose_their_codes(dense: Path, tmp_path: Path) -> None:
    plan = {"*": "int4:group=32", WORDS: "int3:group=32"}
    model = anybit.quantize_(load(dense), plan, anybit.Clip())
    words = load(dense).get_input_embeddings().weight
    want = anybit.quantize_tensor(words, "int3:group=32", anybit.Clip()).dequantize()
    assert not torch.equal(want, anybit.quantize_tensor(words, "int3:group=32").dequantize())
    assert torch.equal(model.get_input_embeddings().dequantize(), want)
    quantize_checkpoint(dense, tmp_path / "out", plan, anybit.Clip())
    again = anybit.load(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(again.get_input_embeddings().dequantize(), want)
    rotated = anybit.quantize_(load(dense), plan, anybit.Rotate(anybit.RTN()))
    assert rotated.get_input_embeddings().scheme == "int3:group=32"


def test_an_error_leaves_the_model_as_it_was(dense: Path) -> None:
    class Broken(anybit.RTN):
        def quantize(self, w: torch.Tensor, *args: object, **kwargs: object) -> anybit.Packed:
            if len(w) != 96:
                raise KeyboardInterrupt
            return super().quantize(w, *args, **kwargs)

    model, want = load(dense), logits(load(dense))
    with pytest.raises(KeyboardInterrupt):
        anybit.quantize_(model, PLAN, Broken())
    assert torch.equal(logits(model), want)
    assert bool(model.all_tied_weights_keys) == model.config.tie_word_embeddings


def test_damage_is_refused(tmp_path: Path, dense: Path) -> None:
    quantize_checkpoint(dense, tmp_path / "out", PLAN)
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["formats"] = {"*": "int4:group=32", "lm_head": None}
    path.write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match=r"says not quantized, but .* holds codes"):
        anybit.load(tmp_path / "out")


@pytest.mark.parametrize("spec", ["int8", "int4:group=32"])
def test_pico_says_the_same_in_transformers_and_the_engine(spec: str, tmp_path: Path) -> None:
    plan = {"*": "int8", WORDS: spec}
    quantize_checkpoint(PICO, tmp_path / "out", plan)
    want = by_transformers(load(tmp_path / "out"), 24)
    assert generated(tmp_path / "out", None, 24) == want
    assert generated(PICO, plan, 24) == want


def test_gguf_has(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model = random_model("llama", {"vocab_size": 96, "rms_norm_eps": 1e-5})
    anybit.quantize_(model, {"*": "int4:group=32", WORDS: "int8:group=32"})
    anybit.save(model, tmp_path / "out")
    export_checkpoint(tmp_path / "out", tmp_path / "a.gguf", "gguf")
    want, got = (anybit.load(tmp_path / p, dtype=torch.float32) for p in ("out", "a.gguf"))
    words = want.get_input_embeddings().dequantize(torch.bfloat16)  # as the file is read
    assert torch.equal(got.get_input_embeddings().weight.bfloat16(), words)


def test_a_running_engine_takes_new_weights(dense: Path, tmp_path: Path) -> None:
    llm, fresh = LLM(dense, dtype="float32", quantization=PLAN), load(dense)
    with torch.no_grad():
        for name, parameter in fresh.named_parameters():
            if "norm" not in name:
                parameter.copy_(parameter.flip(0))
    fresh.save_pretrained(tmp_path / "fresh")
    llm.load_weights((name, t.clone()) for name, t in fresh.state_dict().items())
    params = SamplingParams(max_tokens=8, temperature=0)
    got = llm.generate([[5, 6, 7]], params)[0].tokens
    assert got == generated(tmp_path / "fresh", PLAN) != generated(dense, PLAN)
