"""Heads that classify, score or find answers stay unquantized, unless a pattern names them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import anybit
from anybit.nn.model import quantized_modules
from anybit.nn.tied import task_heads

TEXT = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "vocab_size": 64, "num_labels": 32, "pad_token_id": 0,
}  # fmt: skip
SPEECH = TEXT | {
    "conv_dim": [32], "conv_stride": [5], "conv_kernel": [5], "num_feat_extract_layers": 1,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
PICTURE = TEXT | {"image_size": 16, "patch_size": 8}
ENCODER = TEXT | {"num_mel_bins": 16, "subsampling_conv_channels": 16}
SOUNDS = {"vocab_size": 70, "decoder_hidden_size": 64, "encoder_config": ENCODER}
CASES = [
    ("BertForSequenceClassification", TEXT, {"classifier"}),
    ("BertForQuestionAnswering", TEXT, {"qa_outputs"}),
    ("LlamaForSequenceClassification", TEXT, {"score"}),
    ("Qwen2ForTokenClassification", TEXT, {"score"}),
    ("RobertaForSequenceClassification", TEXT, {"classifier.dense", "classifier.out_proj"}),
    ("ViTForImageClassification", PICTURE, {"classifier"}),
    ("CLIPForImageClassification", {"vision_config": PICTURE, "num_labels": 32}, {"classifier"}),
    ("Wav2Vec2ForSequenceClassification", SPEECH, {"projector", "classifier"}),
    ("ParakeetForTDT", SOUNDS, {"joint.head"}),
]


def made(architecture: str, fields: dict[str, Any]) -> nn.Module:
    kind = getattr(transformers, architecture)
    model: nn.Module = kind(kind.config_class(**fields)).eval()
    return model


@pytest.mark.parametrize(("architecture", "fields", "heads"), CASES)
def test_heads_stay(architecture: str, fields: dict[str, Any], heads: set[str]) -> None:
    model = made(architecture, fields)
    linears = {name for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    anybit.quantize_(model, "int8")
    coded = {name for name, _ in quantized_modules(model)}
    assert coded
    assert coded == linears - heads


def test_a_pattern_takes_one(tmp_path: Any) -> None:
    model = made("BertForSequenceClassification", TEXT)
    anybit.quantize_(model, {"*": "int8", "classifier": "int8"})
    assert "classifier" in dict(quantized_modules(model))
    model.save_pretrained(tmp_path)
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
    tokens = torch.arange(1, 9)[None]
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_blocks_behind_the_base_are_no_heads() -> None:
    """As of readers of texts and pages, whose base is of convolutions."""

    def linears(count: int) -> nn.ModuleList:
        return nn.ModuleList(nn.Linear(32, 32) for _ in range(count))

    model: Any = nn.Module()
    model.config, model.base_model_prefix = SimpleNamespace(num_labels=2), "base"
    model.base, model.classifier = nn.Conv2d(3, 32, 3), nn.Linear(32, 32)
    model.blocks = nn.ModuleList(linears(4) for _ in range(2))
    model.boxes = nn.ModuleList(linears(3) for _ in range(2))
    boxes = {f"boxes.{i}.{j}" for i in range(2) for j in range(3)}
    assert task_heads(model) == boxes | {"classifier"}
