"""An output head that shares the embeddings' weight is quantized when it is named."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import anybit
from anybit.checkpoint.calibrated import calibrate_checkpoint
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from anybit.nn.linear import QuantLinear
from anybit.quantizers.calibration.data import Calibration
from anybit.quantizers.quantize import quantize_tensor
from tests.engine.conftest import random_model

PLAN = {"*": "int4", "lm_head": "int8"}
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


def check(model: PreTrainedModel, words: torch.Tensor) -> None:
    """The head has the codes of the embeddings, which are as they were."""
    head = model.get_submodule("lm_head")
    assert isinstance(head, QuantLinear)
    assert torch.equal(model.get_input_embeddings().weight, words)
    assert torch.equal(head.packed.dequantize(), quantize_tensor(words, "int8").dequantize())
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
