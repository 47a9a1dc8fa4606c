"""Experts as one product equal experts one by one, and nothing else is taken for it."""

import itertools
from collections.abc import Sequence
from importlib import import_module

import pytest
import torch
from torch import Tensor

from anybit.core.packed import Packed
from anybit.engine import experts
from anybit.engine.weights import Part, Weights
from anybit.kernels import dense, reference, registry
from anybit.kernels.backend import LayerSpec, Prepared
from anybit.nn import grouped
from anybit.nn.multiplier import Multiplier
from anybit.quantizers.quantize import quantize_tensor

E, N, K = 3, 32, 64
STARTS = torch.tensor([0, 4, 4, 9], dtype=torch.int32)  # the second expert gets nothing


class Kernels:
    """A backend that has a grouped product, or has none for such a layer, in plain torch."""

    def __init__(self, takes: bool = True):
        self.takes = takes

    def takes_experts(self, layer: LayerSpec) -> bool:
        return self.takes

    def prepare_experts(
        self, experts: Sequence[Packed], activation: str | None, dtype: torch.dtype | None = None
    ) -> Prepared:
        parts = [reference.prepare(p, activation) for p in experts]
        stacked = zip(*(p.layout for p in parts), strict=True)
        return parts[0]._replace(layout=tuple(torch.stack(tensors) for tensors in stacked))

    def linear_experts(self, x: Tensor, starts: Tensor, prepared: Prepared) -> Tensor:
        parts = zip(*prepared.layout, strict=True)
        return torch.cat([
            reference.linear(x[a:b], prepared._replace(layout=part), None)
            for (a, b), part in zip(itertools.pairwise(starts), parts, strict=True)
        ])  # fmt: skip


class Given(Weights):
    """Random experts in the given schemes (None: dense)."""

    def __init__(self, schemes: list[str | None], dtype: torch.dtype = torch.bfloat16):
        super().__init__(torch.device("cpu"), dtype)
        self.schemes = schemes

    def part(self, name: str, shape: tuple[int, int], bias: bool) -> Part:
        w = torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode())))
        scheme = self.schemes[int(name[-1])]
        if scheme is None:
            return w.to(self.dtype), None, None
        spec, _, activation = scheme.partition("@")
        return quantize_tensor(w, spec), None, activation or None


def module(schemes: list[str | None], dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    names = [[f"gate.{i}", f"up.{i}"] for i in range(E)]
    return experts.experts_of(Given(schemes, dtype), names, [N, N], K)


@pytest.fixture
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that no kernel takes are the reference's, as without memory for decoded copies."""
    monkeypatch.setattr(dense, "fits", lambda nbytes, device: False)


@pytest.mark.usefixtures("no_copies")
@pytest.mark.parametrize("scheme", ["liquid@int8", "fp6", "int4:group=32"])
def test_one_product_for_all_equals_one_by_one(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(9, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    single = module([scheme] * E)
    assert isinstance(single, experts.OneByOne)
    monkeypatch.setattr(grouped, "get_backend", lambda name: Kernels())
    whole = module([scheme] * E)
    assert isinstance(whole, grouped.QuantExperts)
    # Up to 29, and the reference rounds decoded weights to bf16, which not every kernel does.
    torch.testing.assert_close(whole(x, STARTS), single(x, STARTS), rtol=2**-6, atol=2**-5)


def test_experts_that_kernels_do_not_take_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "get_backend", lambda name: Kernels(takes=False))
    assert isinstance(module(["fp6"] * E), experts.OneByOne)


def test_experts_of_different_kinds_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "get_backend", lambda name: Kernels())
    for schemes in (["fp6", "fp6", None], ["fp6", "int4", "fp6"], ["int4", "int4@int8", "int4"]):
        assert isinstance(module(schemes), experts.OneByOne)
    assert isinstance(module(["fp6"] * E), grouped.QuantExperts)


def test_the_grouped_dense_product_is_the_layers_own() -> None:
    x = torch.randn(9, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    single = module([None] * E)
    assert isinstance(single, experts.OneByOne)  # on a CPU
    weight = torch.stack([layer.weight for layer in single.layers])
    got = experts.DenseExperts(weight)(x, STARTS)
    torch.testing.assert_close(got, single(x, STARTS), rtol=2**-6, atol=2**-6)


@pytest.mark.usefixtures("no_copies")
@pytest.mark.parametrize("scheme", ["liquid@int8", "fp6"])
def test_float32_experts_on_a_gpu_get_the_reference(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels for GPUs multiply 16 bits, so experts stay apart, each in float32."""
    device = torch.device("cuda")

    def choose_there(layer: LayerSpec) -> str:
        return registry.choose(layer._replace(device=device))

    for place in (experts, import_module("anybit.nn.multiplier")):
        monkeypatch.setattr(place, "choose", choose_there)
    x = torch.randn(9, K, generator=torch.Generator().manual_seed(1))
    found = module([scheme] * E, torch.float32)
    assert isinstance(found, experts.OneByOne)
    rows = []
    for layer, (a, b) in zip(found.layers, itertools.pairwise(STARTS), strict=True):
        assert isinstance(layer, Multiplier)
        assert layer.backend == "reference"
        rows.append(reference.linear(x[a:b], layer.prepared, None))
    y = found(x, STARTS)
    assert y.dtype == torch.float32
    assert torch.equal(y, torch.cat(rows))
