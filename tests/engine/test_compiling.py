"""What an engine compiles before its first step, on stand-ins for kernels."""

from types import SimpleNamespace

import pytest
import torch

from anybit.engine import ready
from anybit.engine.llm import LLM
from anybit.engine.weights import Dense
from anybit.kernels.backend import Activations, Prepared
from anybit.kernels.between import of
from anybit.kernels.cute import build as cute_build
from anybit.kernels.cute import jit
from tests.engine.conftest import PICO


def steps_of(*sizes: int) -> SimpleNamespace:
    """Steps of these sizes, as graphs hold them."""
    return SimpleNamespace(sizes=sizes, single=lambda size: size)


@pytest.mark.parametrize("scheme", ["int4:group=64", "int8@int8"])
def test_products_of_all_sizes_are_compiled_together(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a launch that comes behind another; what does not compile is left to its first use."""
    runner = LLM(PICO, {"*": scheme, "lm_head": scheme}, dtype="float32").engine.runner
    sizes = steps_of(1, 2), steps_of(16, 64)
    runner.graphs = SimpleNamespace(written=sizes[0], prompts=sizes[1])
    there: set[tuple] = set()
    together: list[list] = []
    seen: set[tuple[int, int]] = set()

    class Stand:
        def linear(self, x: torch.Tensor | Activations, prepared: Prepared, bias: None) -> None:
            codes = x.codes if isinstance(x, Activations) else x
            assert codes.dtype == (torch.int8 if "@" in scheme else torch.float32)
            seen.add((len(codes), prepared.shape[0]))
            for kernel in ((len(codes), *prepared.shape), (len(codes), "behind")):
                if kernel not in there:
                    jit._wanted.get()[kernel] = None
                    raise jit.Uncompiled

    def build(kernels: list) -> list[str]:
        together.append(kernels)
        there.update(kernels)
        return ["a kernel: it does not compile"]

    monkeypatch.setattr(ready, "get_backend", lambda name: Stand())
    monkeypatch.setattr(cute_build, "build", build)
    ready.compile_products(runner)
    shapes = {layer.prepared.shape for layer in runner.model.modules() if hasattr(layer, "scheme")}
    vocabulary = len(runner.model.embed_tokens)
    want = {(m, *s) for s in shapes for m in ((1, 2) if s[0] == vocabulary else (1, 2, 16, 64))}
    assert set(together[0]) == want
    assert set(together[1]) == {(m, "behind") for m in (1, 2, 16, 64)}
    assert len(together) == 2
    assert {m for m, n in seen if n == vocabulary} <= {1, 2}
    ready.compile_products(runner)
    assert len(together) == 2  # all are there


def test_layers_that_are_not_quantized_compile_too(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = LLM(PICO, dtype="float32").engine.runner
    runner.graphs = SimpleNamespace(written=steps_of(1, 2), prompts=None)
    seen: set[tuple] = set()

    def linear(self: object, x: torch.Tensor, weight: torch.Tensor, bias: object) -> None:
        seen.add((len(x), *weight.shape))

    monkeypatch.setattr(type(of(runner.model.embed_tokens)), "linear", linear)
    ready.compile_products(runner)
    shapes = {m.weight.shape for m in runner.model.modules() if isinstance(m, Dense)}
    assert len(shapes) > 3
    assert seen == {(m, *shape) for shape in shapes for m in (1, 2)}
