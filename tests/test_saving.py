"""`save_pretrained` of transformers, and classes other than the one that was saved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    PreTrainedModel,
)

import anybit
from anybit.errors import InvalidInput
from anybit.nn.model import quantized_layers
from tests.tiny import TOKENS, dense, llama, logits, same_state


def first_block(model: Any) -> None:
    anybit.quantize_(model.model.layers[0], "int4")


def attention(model: Any) -> None:  # whose config is the whole model's
    anybit.quantize_(model.model.layers[0].self_attn, "int4")


def one_by_one(model: Any) -> None:
    for block in model.model.layers:
        block.mlp.up_proj = anybit.quantize_(block.mlp.up_proj, "int4")


def all_but_a_part(model: Any) -> None:
    anybit.quantize_(model, "int4")
    anybit.dequantize_(model.model.layers[0].self_attn)


@pytest.mark.parametrize("change", [first_block, attention, one_by_one, all_but_a_part])
def test_parts_that_were_quantized_by_themselves(
    tmp_path: Path, change: Callable[[Any], None]
) -> None:
    model = llama()
    change(model)
    model.save_pretrained(tmp_path)
    same_state(AutoModelForCausalLM.from_pretrained(tmp_path), model)


def test_a_part_that_is_saved_by_itself(tmp_path: Path) -> None:
    model = llama()
    anybit.quantize_(model, {"*": None, "*.up_proj": "int4"})
    model.model.save_pretrained(tmp_path)
    same_state(type(model.model).from_pretrained(tmp_path), model.model)


def test_a_model_that_is_dense_again_in_parts(tmp_path: Path) -> None:
    model = anybit.quantize_(llama(), {"*": None, "*.self_attn.*": "int4"})
    for block in model.get_submodule("model.layers").children():
        block.self_attn = anybit.dequantize_(block.get_submodule("self_attn"))
        model.config.quantization_config = {"quant_method": "anybit"}  # type: ignore[union-attr]
    assert isinstance(model, PreTrainedModel)
    model.save_pretrained(tmp_path)
    same_state(AutoModelForCausalLM.from_pretrained(tmp_path), model)


def bert(kind: type[PreTrainedModel]) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 256}
    return kind(BertConfig(num_attention_heads=2, **sizes)).eval()


@pytest.mark.parametrize("labels", [3, 40])
@pytest.mark.parametrize("source", ["quantized", "dense"])
def test_a_head_for_another_task_is_new(tmp_path: Path, labels: int, source: str) -> None:
    """And dense, however many outputs it has; what was trained before is saved as it is."""
    options = {}
    if source == "dense":
        dense(tmp_path / "in")
        options = {"quantization_config": anybit.AnybitConfig("int4")}
    else:
        anybit.save(anybit.quantize_(llama(), "int4"), tmp_path / "in")
    kind = AutoModelForSequenceClassification
    model = kind.from_pretrained(tmp_path / "in", num_labels=labels, **options)
    model.config.pad_token_id = 0
    assert type(model.score) is torch.nn.Linear
    want = anybit.quantize_(llama(), "int4")
    same_state(model.model, want.get_submodule("model"))
    for name, save in (
        ("a", lambda d: anybit.save(model, d)),
        ("b", model.save_pretrained),
    ):
        save(tmp_path / name)
        again = kind.from_pretrained(tmp_path / name)
        same_state(again, model)
        assert logits(again).shape == (1, labels)


def test_between_a_model_and_its_base(tmp_path: Path) -> None:
    """BertModel has a pooler, which BertForMaskedLM has not, and no head."""
    for kind, other in (
        (BertForMaskedLM, AutoModelForTokenClassification),
        (BertModel, AutoModelForTokenClassification),
        (BertForMaskedLM, BertModel),
    ):
        model = anybit.quantize_(bert(kind), "int4")
        directory = tmp_path / f"{kind.__name__}-{other.__name__}"
        anybit.save(model, directory)
        found = other.from_pretrained(directory)
        layers = {name.rpartition("bert.")[2]: m for name, m in quantized_layers(model)}
        for name, layer in quantized_layers(found):
            same_state(layer, layers[name.rpartition("bert.")[2]])
        assert sum(1 for name in layers if name.startswith("encoder.")) == 6
        assert sum(1 for _ in quantized_layers(found)) >= 6
        found(TOKENS)


def test_what_the_saved_class_has_must_be_there(tmp_path: Path) -> None:
    anybit.save(anybit.quantize_(llama(), "int4"), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = {k: v for k, v in load_file(path).items() if "layers.1.mlp.up_proj" not in k}
    save_file(tensors, path, {"format": "pt"})
    for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        with pytest.raises(InvalidInput, match=r"layers\.1\.mlp\.up_proj: .* holds no codes"):
            kind.from_pretrained(tmp_path / "out")
