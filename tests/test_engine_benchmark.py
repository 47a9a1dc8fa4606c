"""benchmarks/engine.py: random weights are numbers, and a step that did nothing has no time."""

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import engine

    return engine


@pytest.mark.parametrize("spec", ["fp8", "fp:e5m2", "mxfp8", "fp6", "int8", "liquid"])
def test_random_weights_are_numbers(engine: Any, spec: str) -> None:
    """A matrix unit reads some codes of 8 bits as NaN, which the reference reads as numbers."""
    packed, _, _ = engine.RandomWeights(torch.device("cpu"), spec).part("a", (64, 256), False)
    codes = packed.codes()
    if spec == "fp8":
        assert codes.view(torch.float8_e4m3fn).float().isfinite().all()
    if spec == "fp:e5m2":
        assert codes.view(torch.float8_e5m2).float().isfinite().all()
    assert codes.float().var() > 0.7 * (4**packed.format.bits - 1) / 12  # all codes are as likely
    assert packed.dequantize().isfinite().all()


def test_a_batch_fills_80_gb(engine: Any) -> None:
    per_token = 2 * 32 * 8 * 128  # Llama-3-8B, int8
    most, few = engine.batches_of("16,80gb", 5_000_000_000, per_token)
    assert few == 16
    assert 0 <= 72e9 - most * 1536 * per_token < 8 * 1536 * per_token
    assert engine.batches_of("80gb", 141_000_000_000, per_token) == []


def test_a_step_without_texts_has_no_time(engine: Any) -> None:
    running = [1, 2]
    scheduler = SimpleNamespace(running=running)
    llm = SimpleNamespace(engine=SimpleNamespace(scheduler=scheduler, step=lambda: None))
    assert engine.decode_time(llm, 2) > 0
    llm.engine.step = running.clear
    with pytest.raises(SystemExit, match="2 of 2 texts ended"):
        engine.decode_time(llm, 2)
