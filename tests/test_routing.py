"""Mixtures of experts around their products: what is computed, and how many launches that takes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from anybit.engine.experts import OneByOne
from anybit.kernels import between
from anybit.kernels.backend import Activations
from anybit.kernels.between import TORCH, Routing, Wanted, outside
from anybit.nn.grouped import QuantExperts
from anybit.nn.routing import mixture
from anybit.quantizers.quantize import quantize_tensor
from tests.engine.test_experts import Kernels

EXPERTS, TOP, HIDDEN, MIDDLE = 5, 2, 32, 64


class Plain:
    """A projection of all experts by a matrix each."""

    def __init__(self, n: int, k: int):
        self.weights = torch.randn(EXPERTS, n, k) / k**0.5

    def take(self, x: Tensor, where: Routing) -> Tensor:
        rows = TORCH.spread(x, where)
        assert isinstance(rows, Tensor)
        return rows

    def __call__(self, x: Tensor | Activations, starts: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        y = torch.full((len(x), self.weights.shape[1]), torch.nan)  # of rows that are no expert's
        for e, w in enumerate(self.weights):
            y[starts[e] : starts[e + 1]] = x[starts[e] : starts[e + 1]] @ w.T
        return y


@pytest.mark.parametrize("biased", [False, True])
def test_a_mixture_is_the_weighted_sum_of_its_experts(biased: bool) -> None:
    torch.manual_seed(0)
    up, down = Plain(MIDDLE, HIDDEN), Plain(HIDDEN, MIDDLE)
    bias = torch.randn(EXPERTS, HIDDEN) if biased else None
    x, weight = torch.randn(9, HIDDEN, requires_grad=True), torch.rand(9, TOP)
    chosen = torch.rand(9, EXPERTS).topk(TOP).indices
    chosen[3, 0], chosen[6] = -1, EXPERTS  # none of these experts
    got = mixture(x, weight, chosen, EXPERTS, up, down, lambda y, where: y.relu(), bias)
    wanted = torch.zeros(9, HIDDEN)
    for t in range(9):
        for j, e in enumerate(chosen[t].tolist()):
            if 0 <= e < EXPERTS:
                y = down.weights[e] @ (up.weights[e] @ x[t]).relu()
                wanted[t] += weight[t, j] * (y + bias[e] if bias is not None else y)
    torch.testing.assert_close(got, wanted)
    a, b = (torch.autograd.grad(y[:, 0].sum(), x, retain_graph=True)[0] for y in (got, wanted))
    torch.testing.assert_close(a, b)


class Launches:
    """The kernels' module, and the kernels in it, which are counted instead of run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        from anybit.kernels.triton import activation
        from anybit.kernels.triton import routing as kernels
        from anybit.kernels.triton.between import FAMILY

        self.names: list[str] = []
        self.module = kernels
        for module, names in (
            (kernels, ("_choose", "_sort", "_spread", "_combine", "_clamped")),
            (activation, ("_token", "_silu_mul")),
        ):
            for name in names:
                monkeypatch.setattr(module, name, self.kernel(name))
        monkeypatch.setitem(between.chosen, torch.device("cpu"), FAMILY)

    def kernel(self, name: str) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self.names.append(name)

        class Kernel:
            def __getitem__(self, grid: object) -> Callable[..., None]:
                return launch

        return Kernel()


class Operators(TorchDispatchMode):
    """Operators of torch that would launch something."""

    FREE = ("empty", "new_empty", "view", "slice", "split", "detach", "alias", "as_strided")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name not in self.FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class Counted(Kernels):
    """Products that return room for their outputs."""

    def linear_experts(self, x: Any, starts: Tensor, prepared: Any) -> Tensor:
        assert isinstance(x, Activations) == (prepared.activation is not None)
        rows = x.codes if isinstance(x, Activations) else x
        return torch.empty(len(rows), prepared.shape[0], dtype=x.dtype)


def test_choices_that_are_no_experts_have_no_rows() -> None:
    """Products may return the rows of experts alone."""
    where = TORCH.sort(torch.tensor([[0, 4], [1, 2], [4, 4]]), 4)
    y, weight = torch.arange(1.0, 7).view(3, 2), torch.ones(3, 2)
    assert TORCH.combine(y, where, weight).tolist() == [[1, 2], [8, 10], [0, 0]]
    none = TORCH.sort(torch.full((3, 2), 4), 4)
    assert TORCH.combine(y[:0], none, weight).tolist() == [[0, 0]] * 3
    layers = [torch.nn.Linear(2, 5) for _ in range(4)]
    assert OneByOne(layers)(torch.ones(6, 2), none.starts).shape == (0, 5)


@pytest.mark.parametrize("scheme", ["int4:group=32", "liquid:group=32@int8", "int8:rotate=k@int8"])
def test_five_launches_around_two_products(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the router's logits to the sum, quantization, SiLU and up included."""
    pytest.importorskip("triton")
    from anybit.nn.around import Around

    spec, _, kind = scheme.partition("@")
    products = []
    for n, k in ((2 * MIDDLE, HIDDEN), (HIDDEN, MIDDLE)):
        packed = [quantize_tensor(torch.randn(n, k), spec) for _ in range(EXPERTS)]
        kernels = Counted()
        prepared = kernels.prepare_experts([p.stored() for p in packed], kind or None)
        products.append(QuantExperts(kernels, prepared, Around.of(packed[0].grid)))
    first, last = products
    rotated: list[object] = []
    monkeypatch.setattr(Around, "before", lambda self, x: (rotated.append(self.rotate_in), x)[1])
    launches = Launches(monkeypatch)

    def between(y: Tensor, where: Routing) -> Any:
        gate, up = y.chunk(2, -1)
        return outside(up).silu_mul(gate, up, Wanted(kind or None, last.around.rotate_in))

    x, logits = torch.randn(4, HIDDEN).half(), torch.randn(4, EXPERTS).half()
    with torch.no_grad(), Operators() as operators:
        weight, chosen = outside(logits).choose(logits, TOP, True)
        y = mixture(x, weight, chosen, EXPERTS, first, last, between)
    assert y.shape == x.shape
    silu = "_token" if kind else "_silu_mul"
    assert launches.names == ["_choose", "_sort", "_spread", silu, "_combine"]
    assert operators.names == []
    if kind and "rotate" in spec:  # four tokens were rotated, not their eight choices
        assert len(rotated) == 1
