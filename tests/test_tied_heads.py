"""An output head that shares the embeddings' weight is quantized when it is named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import anybit
from anybit.checkpoint.architecture import bare_model
from anybit.checkpoint.calibrated import calibrate_checkpoint
from anybit.checkpoint.foreign.export import export_checkpoint
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from anybit.nn.linear import QuantLinear
from anybit.quantizers.calibration.data import Calibration
from anybit.quantizers.quantize import quantize_tensor
from tests.engine.conftest import random_model

PLAN = {"*": "int4", "lm_head": "trellis:bits=4,code=look"}
TIED = {"tie_word_embeddings": True, "vocab_size": 96}


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    random_model("llama", TIED).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def load(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(12)[None] * 7).logits


def coded(words: torch.Tensor) -> torch.Tensor:
    """What a head of these weights decodes to."""
    return quantize_tensor(words, PLAN["lm_head"]).dequantize()


def check(model: PreTrainedModel, words: torch.Tensor) -> None:
    """The head has the codes of the embeddings, which are as they were."""
    head = model.get_submodule("lm_head")
    assert isinstance(head, QuantLinear)
    assert torch.equal(model.get_input_embeddings().weight, words)
    assert torch.equal(head.packed.dequantize(), coded(words))
    assert model.config.tie_word_embeddings is False


def test_in_memory_saved_loaded_and_from_disk(dense: Path, tmp_path: Path) -> None:
    words = load(dense).get_input_embeddings().weight.detach().clone()
    model = anybit.quantize_(load(dense), PLAN)
    check(model, words)
    want = logits(model)
    anybit.save(model, tmp_path / "saved")
    quantize_checkpoint(dense, tmp_path / "streamed", PLAN)
    for path in (tmp_path / "saved", tmp_path / "streamed"):
        again = anybit.load(path, dtype=torch.float32)
        check(again, words)
        assert torch.equal(logits(again), want)
        assert torch.equal(logits(load(path)), want)
    params = SamplingParams(max_tokens=8, temperature=0)
    prompt = [5, 6, 7]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    for path, plan in ((tmp_path / "streamed", None), (dense, PLAN)):
        llm = LLM(path, dtype="float32", quantization=plan)
        assert llm.generate([prompt], params)[0].tokens == expected[0, 3:].tolist()


def test_calibrated(dense: Path, tmp_path: Path) -> None:
    texts = torch.randint(96, (6, 24), generator=torch.Generator().manual_seed(0))
    quantizer = anybit.GPTQ(Calibration(texts))
    model = anybit.quantize_(load(dense), PLAN, quantizer)
    assert torch.equal(
        model.get_input_embeddings().weight, load(dense).get_input_embeddings().weight
    )
    calibrate_checkpoint(dense, tmp_path / "out", PLAN, quantizer)
    assert torch.equal(logits(anybit.load(tmp_path / "out", dtype=torch.float32)), logits(model))


def test_an_error_ties_it_again(dense: Path) -> None:
    class Broken(anybit.RTN):
        def quantize(self, *args: object, **kwargs: object) -> anybit.Packed:
            raise KeyboardInterrupt

    model = load(dense)
    with pytest.raises(KeyboardInterrupt):
        anybit.quantize_(model, PLAN, Broken())
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.config.tie_word_embeddings
    assert model.all_tied_weights_keys


def test_a_plan_for_all_keeps_it(dense: Path) -> None:
    model = anybit.quantize_(load(dense), "int4")
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_a_flag_that_ties_more_is_left_alone() -> None:
    """T5's also ties the encoder's embeddings to the decoder's."""
    from transformers import T5Config, T5ForConditionalGeneration

    small = T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    with pytest.raises(ValueError, match="lm_head shares its weight"):
        anybit.quantize_(T5ForConditionalGeneration(small), PLAN)


def with_head(source: Path, out: Path, head: torch.Tensor, shards: bool = False) -> Path:
    """A copy of a tied model whose files also hold a head, in a file of its own with `shards`."""
    shutil.copytree(source, out)
    tensors = load_file(out / "model.safetensors")
    if not shards:
        save_file(tensors | {"lm_head.weight": head}, out / "model.safetensors", {"format": "pt"})
        return out
    (out / "model.safetensors").rename(out / "a.safetensors")
    save_file({"lm_head.weight": head}, out / "b.safetensors", {"format": "pt"})
    where = dict.fromkeys(tensors, "a.safetensors") | {"lm_head.weight": "b.safetensors"}
    index = {"metadata": {}, "weight_map": where}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return out


def generated(path: Path, plan: dict[str, str] | None = None) -> list[int]:
    llm = LLM(path, dtype="float32", quantization=plan)
    return llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0))[0].tokens


@pytest.fixture(params=[False, True], ids=["one file", "shards"])
def apart(dense: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A model whose config.json ties the head, and whose files have another one."""
    head = torch.randn(96, 64, generator=torch.Generator().manual_seed(1)) * 0.15
    return with_head(dense, tmp_path / "apart", head, request.param)


def test_a_stored_head_is_used_whatever_the_flag_says(apart: Path, tmp_path: Path) -> None:
    """As transformers does; in every way from one directory to another, and in the engine."""
    model = load(apart)
    head = model.get_submodule("lm_head").weight.detach().clone()
    want = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False)
    assert generated(apart) == want[0, 3:].tolist()
    kept = logits(anybit.quantize_(load(apart), "int4"))
    anybit.save(anybit.quantize_(load(apart), "int4"), tmp_path / "saved")
    quantize_checkpoint(apart, tmp_path / "streamed", "int4")
    named = logits(anybit.quantize_(load(apart), PLAN))
    quantize_checkpoint(apart, tmp_path / "named", PLAN)
    for name, logs in (("saved", kept), ("streamed", kept), ("named", named)):
        again = anybit.load(tmp_path / name, dtype=torch.float32)
        assert torch.equal(logits(again), logs)
        assert (
            json.loads((tmp_path / name / "config.json").read_text())["tie_word_embeddings"]
            is False
        )
        tokens = again.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False)
        assert generated(tmp_path / name) == tokens[0, 3:].tolist()
    found = anybit.load(tmp_path / "named", dtype=torch.float32).get_submodule("lm_head")
    assert torch.equal(found.packed.dequantize(), coded(head))
    assert generated(apart, PLAN) == generated(tmp_path / "named")


def test_a_stored_head_is_calibrated_and_exported(apart: Path, tmp_path: Path) -> None:
    texts = torch.randint(96, (6, 24), generator=torch.Generator().manual_seed(0))
    plan = {"*": "int8:group=32", "lm_head": None}
    for name, head in (("kept", None), ("coded", "int8:group=32")):
        quantizer = anybit.GPTQ(Calibration(texts))
        model = anybit.quantize_(load(apart), plan | {"lm_head": head}, quantizer)
        calibrate_checkpoint(apart, tmp_path / name, plan | {"lm_head": head}, quantizer)
        again = anybit.load(tmp_path / name, dtype=torch.float32)
        assert torch.equal(logits(again), logits(model))
    export_checkpoint(tmp_path / "kept", tmp_path / "ct")
    assert not json.loads((tmp_path / "ct/config.json").read_text())["tie_word_embeddings"]


def test_a_stored_head_goes_into_gguf(apart: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    raw = json.loads((apart / "config.json").read_text())
    (apart / "config.json").write_text(json.dumps(raw | {"rms_norm_eps": 1e-5}))
    plan = {"*": "int8:group=32", "*.mlp.*": None}
    quantize_checkpoint(apart, tmp_path / "out", plan)
    for path in (tmp_path / "out/config.json",):  # as an older release left it
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    export_checkpoint(tmp_path / "out", tmp_path / "a.gguf", "gguf")
    want, got = (anybit.load(tmp_path / p, dtype=torch.float32) for p in ("out", "a.gguf"))
    assert torch.allclose(logits(got), logits(want), atol=1e-2)


def test_equal_copies_stay_tied(dense: Path, tmp_path: Path) -> None:
    words = load(dense).get_input_embeddings().weight.detach().clone()
    for name, head in (("same", words), ("wider", words.double())):
        both = with_head(dense, tmp_path / name, head)
        assert bare_model(both).config.tie_word_embeddings
        assert generated(both) == generated(dense)


def test_the_summary_counts_a_shared_weight_once(dense: Path, tmp_path: Path) -> None:
    report = quantize_checkpoint(dense, tmp_path / "out", PLAN)
    stored = load_file(dense / "model.safetensors")
    assert report.bytes_before == sum(t.nbytes for t in stored.values())
