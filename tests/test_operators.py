"""Who sees anybit's operators: torch's dispatcher is called where something may look at them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import anybit
from anybit.nn import op as ops

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::torch.jit.TracerWarning")
NO_GRADIENTS = (torch.no_grad, torch.inference_mode)


class Operators(TorchDispatchMode):
    """The names of operators that a dispatch mode sees."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **kwargs or {})


class Functions(TorchFunctionMode):
    """The functions that a function mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **kwargs or {})


@pytest.fixture(params=["int4:group=32", "liquid@int8", "int4:group=32,rotate=kn"])
def layer(request: pytest.FixtureRequest) -> anybit.QuantLinear:
    fmt, activation = anybit.core.scheme.parse_scheme(request.param)
    w = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    return anybit.QuantLinear(anybit.quantize_tensor(w, fmt), None, activation)


def tokens() -> Tensor:
    return torch.randn(3, 64, generator=torch.Generator().manual_seed(1))


@contextmanager
def undispatched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Operators whose functions are called without the dispatcher."""
    called: list[Any] = []

    def noting(operator: Any, function: Any) -> Any:
        def noted(*args: Any, **options: Any) -> Tensor:
            called.append(operator)
            result: Tensor = function(*args, **options)
            return result

        return noted

    with monkeypatch.context() as patch:
        patch.setattr(ops, "product", noting(ops.linear, ops.product))
        for operator, function in ops.FUNCTIONS.items():
            patch.setitem(ops.FUNCTIONS, operator, noting(operator, function))
        yield called


@pytest.mark.parametrize("context", NO_GRADIENTS)
def test_nobody_looks(
    layer: anybit.QuantLinear, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers with and without the dispatcher."""
    want = layer(tokens())
    with context(), undispatched(monkeypatch) as called:
        got = layer(tokens())
        several = layer(tokens().view(3, 1, 64))
    assert called.count(ops.linear) == 2
    assert called.count(ops.rotate) == (4 if layer.format.rotate else 0)
    assert torch.equal(got, want)
    assert torch.equal(several, want.view(3, 1, 32))


@pytest.mark.parametrize("context", [*NO_GRADIENTS, torch.enable_grad])
def test_modes_see_operators(layer: anybit.QuantLinear, context: Any) -> None:
    with context(), Operators() as mode:
        layer(tokens())
    assert mode.seen.count("anybit::linear") == 1
    assert mode.seen.count("anybit::rotate") == (2 if layer.format.rotate else 0)
    with context(), Functions() as functions:
        layer(tokens())
    assert ops.linear in functions.seen


@pytest.mark.parametrize("context", NO_GRADIENTS)
def test_traces_hold_operators(layer: anybit.QuantLinear, context: Any) -> None:
    """And no memory of the one call that was traced."""
    with context():
        traced = torch.jit.trace(layer, tokens())
        assert "anybit::linear" in str(traced.graph)
        x = 2 * tokens()
        torch.testing.assert_close(traced(x), layer(x))


@pytest.mark.parametrize("context", NO_GRADIENTS)
def test_tensors_of_another_kind(layer: anybit.QuantLinear, context: Any) -> None:
    with context(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(tokens())).shape == (3, 32)
