"""A model that a GPU has no room for is refused before its weights are read."""

from pathlib import Path

import pytest
import torch

from anybit.engine import memory
from anybit.engine.llm import LLM
from anybit.engine.weights import Checkpoint
from anybit.errors import Unsupported

PICO = Path(__file__).parents[2] / "models" / "pico"
CARD = 24 << 30


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that a GPU of 24 GiB has left."""
    left = [CARD]
    monkeypatch.setattr(memory, "gpu_memory", lambda device: (left[0], CARD))
    return left


def test_what_does_not_fit_is_refused_before_it_is_read(
    free: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    real = Checkpoint.least_bytes
    monkeypatch.setattr(
        Checkpoint, "least_bytes", lambda self: found.append(real(self)) or found[-1]
    )
    LLM(PICO, device="cpu", dtype="bfloat16")
    stored = sum(path.stat().st_size for path in PICO.glob("*.safetensors"))  # in bf16
    assert 0.9 * stored < found[0] <= stored
    LLM(PICO, "int4:group=64", device="cpu", dtype="bfloat16")
    assert found[1] < 0.7 * found[0]

    free[0] = (found[0] + found[1]) // 2
    LLM(PICO, "int4:group=64", device="cpu", dtype="bfloat16")  # has room
    monkeypatch.setattr(Checkpoint, "_read", None)
    with pytest.raises(
        Unsupported, match=r"GiB or more, and .* of 24.0 GiB are free .* fewer bits"
    ):
        LLM(PICO, device="cpu", dtype="bfloat16")


def test_only_gpus_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.gpu_memory(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, CARD))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10)
    assert memory.gpu_memory(torch.device("cuda")) == (25, CARD)  # what torch would reuse is free
