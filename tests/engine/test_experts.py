"""Experts as one product equal experts one by one, and nothing else is taken for it."""

import itertools
import types
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from anybit import dispatch
from anybit.engine import experts
from anybit.engine.weights import Part, Weights
from anybit.format import Format, Packed
from anybit.kernels import reference
from anybit.linear import QuantLinear, quantize_tensor

E, N, K = 3, 32, 64
STARTS = torch.tensor([0, 4, 4, 9], dtype=torch.int32)  # the second expert gets nothing


def kernels(most: int = 256) -> types.SimpleNamespace:
    """A backend with a grouped product of at most so many experts, in plain torch."""

    def prepare_experts(packed: list[Packed], activation: str | None, dtype: torch.dtype) -> list:
        return [reference.prepare(p, activation) for p in packed]

    def linear_experts(
        x: Tensor, prepared: list, starts: Tensor, fmt: Format, n: int, activation: str | None
    ) -> Tensor:
        rows = [x[a:b] for a, b in itertools.pairwise(starts)]
        return torch.cat([
            reference.linear(r, p, None, fmt, n, activation)
            for r, p in zip(rows, prepared, strict=True)
        ])  # fmt: skip

    return types.SimpleNamespace(
        prepare_experts=prepare_experts,
        linear_experts=linear_experts,
        tiles=types.SimpleNamespace(MOST_EXPERTS=most),
    )


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


@pytest.mark.parametrize("scheme", ["liquid@int8", "fp6", "int4:group=32"])
def test_one_product_for_all_equals_one_by_one(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(9, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    single = module([scheme] * E)
    assert isinstance(single, experts.OneByOne)
    monkeypatch.setattr(experts, "get_backend", lambda name: kernels())
    grouped = module([scheme] * E)
    assert isinstance(grouped, experts.QuantExperts)
    torch.testing.assert_close(grouped(x, STARTS), single(x, STARTS), rtol=2**-6, atol=2**-6)


def test_more_experts_than_the_kernels_take_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "get_backend", lambda name: kernels(most=E - 1))
    assert isinstance(module(["fp6"] * E), experts.OneByOne)


def test_experts_of_different_kinds_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "get_backend", lambda name: kernels())
    for schemes in (["fp6", "fp6", None], ["fp6", "int4", "fp6"], ["int4", "int4@int8", "int4"]):
        assert isinstance(module(schemes), experts.OneByOne)
    assert isinstance(module(["fp6"] * E), experts.QuantExperts)


def test_the_grouped_dense_product_is_the_layers_own() -> None:
    x = torch.randn(9, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    single = module([None] * E)
    assert isinstance(single, experts.OneByOne)  # on a CPU
    weight = torch.stack([layer.weight for layer in single.layers])
    got = experts.DenseExperts(weight)(x, STARTS)
    torch.testing.assert_close(got, single(x, STARTS), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("scheme", ["liquid@int8", "fp6"])
def test_float32_experts_on_a_gpu_get_the_reference(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels for GPUs multiply 16 bits, so experts stay apart, each in float32."""
    device = torch.device("cuda")

    def choose_there(
        fmt: Format, activation: str | None, shape: tuple, _: object, dtype: Any
    ) -> str:
        return dispatch.choose(fmt, activation, shape, device, dtype)

    for place in (experts, import_module("anybit.linear")):
        monkeypatch.setattr(place, "choose", choose_there)
    x = torch.randn(9, K, generator=torch.Generator().manual_seed(1))
    found = module([scheme] * E, torch.float32)
    assert isinstance(found, experts.OneByOne)
    rows = []
    for layer, (a, b) in zip(found.layers, itertools.pairwise(STARTS), strict=True):
        assert isinstance(layer, QuantLinear)
        assert layer.backend == "reference"
        prepared = reference.prepare(layer.packed, layer.activation)
        args = (layer.format, 2 * N, layer.activation)
        rows.append(reference.linear(x[a:b], prepared, None, *args))
    y = found(x, STARTS)
    assert y.dtype == torch.float32
    assert torch.equal(y, torch.cat(rows))
