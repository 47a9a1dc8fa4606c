"""benchmarks/record.py: no time without the right tokens."""

import json
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Few tokens, in this process."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import record

    monkeypatch.setattr(record, "PROMPTS", 2)
    monkeypatch.setattr(record, "NEW", 6)

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        _, _, _, scheme, _, model, _, device = command
        found = json.dumps(record.written(model, scheme, device))
        return SimpleNamespace(stdout=f"what a library prints\n{found}\n".encode())

    monkeypatch.setattr(record, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))
    return record


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("record")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("scheme", ["bf16", "int4:group=32+int8", "bf16+int8"])
def test_a_row(scheme: str, model: str, record: Any) -> None:
    row = record.measure(model, scheme, "cpu")
    assert row["us_per_token"] > 0
    assert len(row["processes"].split()) == record.PROCESSES
    assert 0 <= row["regret"] <= row["apart"] < 0.1


def test_wrong_tokens_have_no_time(
    model: str, record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = record.written(model, "bf16", "cpu")
    other = {**right, "tokens": [[*tokens[:-1], 0] for tokens in right["tokens"]]}
    beside = {**right, "logprobs": [[p - 0.2 for p in each] for each in right["logprobs"]]}
    for runs in ([other] * 3, [beside] * 3, [right, right, other]):
        answers = iter(runs)
        monkeypatch.setattr(record, "written", lambda *_, answers=answers: next(answers))
        with pytest.raises(SystemExit, match="wrong tokens"):
            record.measure(model, "bf16", "cpu")
