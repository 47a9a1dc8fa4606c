"""What lies between products: who does it is said in one place, and asked everywhere."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anybit import quantize_tensor
from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from anybit.kernels import between
from anybit.kernels.between import TORCH, Family, Repeated, of, outside
from anybit.kernels.cute.operands import tokens
from anybit.kernels.reference import prepare, quantize_tokens
from tests.engine.conftest import prompts

CPU = torch.device("cpu")
OPERATIONS = [
    "add_norm", "silu_mul", "gelu_mul", "quantize", "join", "rotate", "placed", "linear", "gated",
    "likeliest", "drawn", "choose", "sort", "spread", "combine", "clamped", "refuse_cache", "write",
    "attend", "recur", "gated_norm", "record", "paths", "columns",
]  # fmt: skip


def counting(base: type[Family], calls: Counter[str]) -> Family:
    """A family that does what another one does, and counts it."""

    def counted(name: str) -> Callable[..., Any]:
        def call(self: Family, *args: Any, **options: Any) -> Any:
            calls[name] += 1
            return getattr(super(other, self), name)(*args, **options)

        return call

    other = type("Other", (base,), {name: counted(name) for name in OPERATIONS})
    made: Family = other()
    return made


def register(monkeypatch: pytest.MonkeyPatch, *families: tuple[Family, str, str]) -> None:
    """Ask these before the others."""
    mine = {str(i): family for i, family in enumerate(families)}
    monkeypatch.setattr(between, "FAMILIES", mine | between.FAMILIES)
    monkeypatch.setattr(between, "chosen", {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="the engine takes the GPU")
@pytest.mark.parametrize(("name", "asked"), [
    ("qwen3_moe", {"choose", "sort", "spread", "combine"}), ("qwen3", {"record"}),
    ("gpt_oss", {"choose", "sort", "spread", "combine", "clamped"}),
    ("qwen3_5", {"recur", "gated_norm", "columns"}),
])  # fmt: skip
def test_a_new_family_does_all_that_lies_between_products(
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    asked: set[str],
) -> None:
    if of(torch.empty(0)) is TORCH:
        pytest.skip("no kernels for this processor, and the definition looks at the host")
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    want = LLM(checkpoint(name), "int8:rotate=k").generate(prompts(2), params)
    calls: Counter[str] = Counter()
    register(monkeypatch, (counting(type(of(torch.empty(0))), calls), "cpu", "torch"))
    got = LLM(checkpoint(name), "int8:rotate=k").generate(prompts(2), params)
    assert [o.tokens for o in got] == [o.tokens for o in want]
    everywhere = {"add_norm", "rotate", "linear", "likeliest", "refuse_cache", "write", "attend"}
    assert everywhere | asked <= set(calls)
    assert "clamped" in asked or "silu_mul" in calls


def test_formats_and_operands_ask_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    register(monkeypatch, (counting(type(of(torch.empty(0))), calls), "cpu", "torch"))
    packed = quantize_tensor(torch.randn(16, 16), "trellis:bits=1")
    x = torch.randn(3, 16)
    codes, scale, sums = tokens(x, prepare(packed, "int8"))
    wanted, steps = quantize_tokens(x, "int8")
    assert torch.equal(codes, wanted)
    assert torch.equal(scale, steps[:, 0])
    assert torch.equal(sums, wanted.sum(1, dtype=torch.int32))
    assert calls == {"paths": 1, "quantize": 1}


def test_the_first_that_runs_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(Family):
        def runs_on(self, device: torch.device) -> bool:
            return device.type == "meta"

    elsewhere, mine, other = Elsewhere(), Family(), Family()
    families = [(other, "cpu", "no_such_package"), (elsewhere, "cpu", "torch")]
    families += [(elsewhere, "meta", "torch"), (mine, "cpu", "torch"), (other, "cpu", "torch")]
    register(monkeypatch, *families)
    assert of(torch.empty(0)) is mine
    assert of(torch.empty(0, device="meta")) is elsewhere
    x = torch.ones(2, requires_grad=True)
    assert outside(x) is TORCH  # kernels have no gradients
    assert outside(torch.ones(2)) is mine
    with torch.no_grad():
        assert outside(x) is mine


def test_torch_traces_the_definition() -> None:
    def rows(chosen: Tensor) -> Tensor:
        return outside(chosen).sort(chosen, 4).rows

    chosen = torch.randint(0, 4, (5, 2))
    compiled = torch.compile(rows, backend="eager", fullgraph=True)
    assert torch.equal(compiled(chosen), rows(chosen))


def test_a_recording_is_a_step_that_runs_again() -> None:
    x = torch.ones(3)
    recording = TORCH.record(lambda: x * 2, {})
    assert type(recording) is Repeated
    x.fill_(5)
    recording.replay()
    assert recording.out.tolist() == [10] * 3
