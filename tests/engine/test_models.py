"""The engine's tokens are those of transformers' greedy `generate`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.conftest import ARCHITECTURES, PICO, prompts, reference
from tests.specs import SPECS
from transformers import AutoModelForCausalLM

import anybit
from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams

Checkpoint = Callable[[str], Path]
GREEDY = SamplingParams(max_tokens=24, temperature=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_equal_transformers(checkpoint: Checkpoint, name: str) -> None:
    directory = checkpoint(name)
    model = AutoModelForCausalLM.from_pretrained(directory)
    many = prompts(4)
    # A step of 16 tokens cuts the prompts into chunks.
    outputs = LLM(directory, max_tokens=16, block_size=4).generate(many, GREEDY)
    for prompt, output in zip(many, outputs, strict=True):
        assert output.tokens == reference(model, prompt, 24)


def test_pico_tokens_equal_transformers() -> None:
    llm = LLM(PICO, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(PICO, dtype=torch.float32)
    outputs = llm.generate(
        ["def main(", "import os\n"], SamplingParams(max_tokens=32, temperature=0)
    )
    for output in outputs:
        assert output.tokens == reference(model, output.prompt, 32)
