"""What an engine compiles before its first step, on stand-ins for kernels."""

from functools import partial

import pytest
import torch

from anybit.engine import ready
from anybit.engine.graphs import StepGraphs
from anybit.engine.llm import LLM
from anybit.engine.weights import Dense
from anybit.kernels import ahead
from anybit.kernels.backend import Activations, Backend, Prepared
from anybit.kernels.between import of
from anybit.nn import op
from anybit.nn.multiplier import Multiplier
from tests.engine.conftest import PICO


class Graphs(StepGraphs):
    """Graphs whose steps run as they are, which a CPU can do."""

    def capture_all(self, show_progress: bool | None = None) -> dict[int, float]:
        for rows, size in self._todo():
            rows.fill(size, [])
            self._forward(rows, size)
        return {}


@pytest.mark.parametrize("scheme", ["int4:group=64", "int8@int8"])
def test_kernels_of_all_steps_are_compiled_together(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one behind another; what does not compile is left to its first use."""
    llm = LLM(PICO, {"*": scheme, "lm_head": scheme}, dtype="float32", length=128, max_running=2)
    runner = llm.engine.runner
    graphs = Graphs(runner.model, runner.states, runner.block_size, 2, 8, prompts=(16, 64))
    there: set[str] = set()
    together: list[set[str]] = []
    one_by_one: list[str] = []

    class Stand(Backend):
        def linear(self, x: torch.Tensor | Activations, prepared: Prepared, bias: None) -> object:
            codes = x.codes if isinstance(x, Activations) else x
            assert ("@" in scheme) == (prepared.activation is not None)
            m, n = len(codes), prepared.shape[0]
            for kernel in (f"{m} {n}", f"{m} behind"):
                if kernel in there:
                    continue
                if notes := ahead.notes():
                    raise notes.missing(kernel, partial(there.add, kernel))
                one_by_one.append(kernel)
                there.add(kernel)
            return torch.zeros(m, n, dtype=x.dtype, device=codes.device)

    def side_by_side(calls: list) -> list[str]:
        before, broken = set(there), [call.args[0] == "2 behind" for call in calls]
        for call, fails in zip(calls, broken, strict=True):
            if not fails:
                call()
        together.append(there - before)
        return ["it does not compile" if fails else "" for fails in broken]

    for layer in runner.model.modules():
        if isinstance(layer, Multiplier):
            layer.kernels = Stand()
    monkeypatch.setattr(op, "get_backend", lambda name: Stand())  # of steps that are recorded
    monkeypatch.setattr(ahead, "side_by_side", side_by_side)
    with torch.inference_mode():
        ready.captured(graphs)
    shapes = {layer.prepared.shape for layer in runner.model.modules() if hasattr(layer, "scheme")}
    vocabulary = len(runner.model.embed_tokens)
    sizes = {n: (1, 2) if n == vocabulary else (1, 2, 16, 64) for n, _ in shapes}
    assert together[0] == {f"{m} {n}" for n in sizes for m in sizes[n]}
    assert together[1] == {f"{m} behind" for m in (1, 16, 64)}
    assert one_by_one == ["2 behind"]
    with torch.inference_mode():
        ready.captured(graphs)
    assert len(together) == 2  # all are there
    assert one_by_one == ["2 behind"]


def test_layers_that_are_not_quantized_compile_too(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = LLM(PICO, dtype="float32", length=128, max_running=2).engine.runner
    graphs = Graphs(runner.model, runner.states, runner.block_size, 2, 8, prompts=(16,))
    layers = [m for m in runner.model.modules() if isinstance(m, Dense)]
    family = type(of(runner.model.embed_tokens))

    def lacking(self: object, x: torch.Tensor, weight: torch.Tensor, bias: object) -> None:
        notes = ahead.notes()
        assert notes is not None
        raise notes.missing(f"{len(x)} {len(weight)}", print)

    for name in ("linear", "gated"):
        monkeypatch.setattr(family, name, lacking)
    with torch.inference_mode(), ahead.collected() as found:
        for launch in graphs.launches():
            launch()
    vocabulary = len(runner.model.embed_tokens)
    rows = {len(layer.weight) for layer in layers}
    assert len(rows) > 2
    sizes = {n: (1, 2) if n == vocabulary else (1, 2, 16) for n in rows}
    assert set(found.kernels) == {f"{m} {n}" for n in rows for m in sizes[n]}
