"""GGUF files: small models of every family, converted, against transformers with the same weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import anybit
from anybit.checkpoint.foreign.convert import convert_checkpoint
from anybit.files.directory import read_json
from tests.foreign.gguf_models import LONG, MODELS, tiny, write

IDS = torch.arange(48)[None] * 7 % 90
K_MIX = {"attn_v|ffn_down": "Q6_K", "attn|ffn_(gate|up)": "Q4_K", "output|token_embd": "Q6_K"}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_decoded_model(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    file = tmp_path / "model.gguf"
    write(model, file, K_MIX)
    report = convert_checkpoint(file, tmp_path / "out")
    assert set(report.formats.values()) == {"q4_k", "q6_k"}
    assert not report.decoded
    again = anybit.load(tmp_path / "out", dtype=torch.float32)
    # The embedding is decoded to the model's dtype.
    embedding = model.get_input_embeddings().weight.data
    embedding.copy_(embedding.bfloat16())
    with torch.no_grad():
        wanted, got = model(IDS).logits, again(IDS).logits
    assert type(again) is type(model)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-4 * float(wanted.abs().max()))
