"""Formats whose columns are stored in an order of their own (GPTQ's act-order)."""

import dataclasses

import pytest
import torch

import anybit
from anybit.core.packed import Packed
from anybit.kernels.backend import LayerSpec
from anybit.kernels.registry import refusals

N, K, GROUP = 32, 128, 32


@pytest.fixture(params=["int4:group=32", "int3:group=32,zero", "int8"])
def pair(request: pytest.FixtureRequest) -> tuple[Packed, torch.Tensor]:
    """A weight with shuffled columns in stored order, and the dense weight that it stands for."""
    torch.manual_seed(0)
    plain = anybit.quantize_tensor(torch.randn(N, K), request.param)
    order = torch.randperm(K).to(torch.int32)
    fmt = dataclasses.replace(plain.format, order=True)  # type: ignore[call-arg]
    weight = torch.empty(N, K)
    weight[:, order.long()] = plain.dequantize()
    packed = Packed.from_tensors(fmt, (N, K), plain.tensors() | {"order": order})
    return packed, weight


def test_weights_are_in_their_own_order(pair: tuple[Packed, torch.Tensor]) -> None:
    packed, weight = pair
    assert torch.equal(packed.dequantize(), weight)
    assert torch.equal(packed.rows(slice(3, 9)).dequantize(), weight[3:9])
    assert torch.equal(packed.format.encode(weight, packed.grid), packed.codes())
    assert anybit.get_format(packed.format.spec) == packed.format


def test_a_layer_multiplies_by_them(pair: tuple[Packed, torch.Tensor]) -> None:
    packed, weight = pair
    layer = anybit.QuantLinear(packed)
    assert torch.equal(layer(torch.eye(K)), weight.T)
    assert layer.scheme == packed.format.spec
    empty = anybit.QuantLinear.empty(layer.scheme, (N, K), device="cpu")
    empty.load_state_dict(layer.state_dict())
    assert torch.equal(empty(torch.eye(K)), weight.T)
    x = torch.randn(3, 2, K)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))


def test_what_cannot_be_done_says_so(pair: tuple[Packed, torch.Tensor]) -> None:
    packed, weight = pair
    with pytest.raises(ValueError, match="cannot be cut along K"):
        packed.columns(slice(0, 64))
    with pytest.raises(ValueError, match=f"quantize to {packed.stored().format.spec}"):
        anybit.quantize_tensor(weight, packed.format)
    with pytest.raises(ValueError, match=r"Packed\.stored"):
        refusals(LayerSpec(packed.format, None, (N, K), torch.device("cpu")))
