"""Rotated layers: blockwise Hadamard transforms between a layer's inputs and its stored weight."""

import dataclasses

import pytest
import torch
from torch import Tensor

import anybit
from anybit.core.packed import Packed, stack
from anybit.core.rotation import Rotation, block, hadamard, turned
from anybit.kernels.backend import Activations, LayerSpec
from anybit.kernels.registry import refusals
from anybit.nn.sharding import Piece, check_columns, same, shard
from tests.specs import NAMES

N, K = 96, 256  # blocks of 32 and 128


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(size: int) -> Tensor:
    """H of a size, from the recursion's closed form: the parity of the bits that i and j share."""
    b = block(size)
    small = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(b)] for i in range(b)])
    return torch.block_diag(*[small / b**0.5] * (size // b)).double()


@pytest.mark.parametrize("size", [16, 48, 128, 192, 384])
def test_h_is_sylvesters_and_its_own_inverse(size: int) -> None:
    h, x = matrix(size), random(3, size)
    assert torch.equal(
        torch.block_diag(*[hadamard(block(size)).double()] * (size // block(size))).float(),
        h.float(),
    )
    assert torch.allclose(turned(x.double()), x.double() @ h, atol=1e-12)
    assert torch.allclose(turned(turned(x)), x, atol=1e-5)
    assert torch.allclose(h @ h.T, torch.eye(size).double(), atol=1e-12)


@pytest.mark.parametrize("sides", ["k", "kn"])
def test_a_rotated_weight_is_the_stored_one_between_two_transforms(sides: str) -> None:
    plain = anybit.quantize_tensor(random(N, K), "int8")
    vector_in = random(K, seed=1).half().abs() + 0.5
    out = random(N, 1, seed=2).half() - 3 if sides == "kn" else None
    packed = plain.rotated_by(Rotation(vector_in, out))
    want = plain.dequantize().double() @ matrix(K) * vector_in.double()
    if out is not None:
        want = out.double() * (matrix(N) @ want)
    assert torch.allclose(packed.dequantize().double(), want, atol=1e-5)
    assert torch.allclose(
        Rotation.of(packed.grid).rotated(packed.dequantize()), plain.dequantize(), atol=1e-5
    )
    bias = random(N, seed=3)
    layer = anybit.QuantLinear(packed, bias)
    assert torch.allclose(layer(torch.eye(K)), packed.dequantize().T + bias, atol=1e-4)
    x = random(2, 5, K)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sides", ["k", "kn"])
def test_every_format_is_rotated(name: str, sides: str) -> None:
    spec = f"{name}:rotate={sides}"
    w, x = random(N, K), random(7, K, seed=1)
    packed = anybit.quantize_tensor(w, spec)
    assert packed.format.spec == spec == anybit.get_format(spec).spec
    own = anybit.quantize_tensor(Rotation.of(packed.grid).rotated(w), name)
    assert torch.equal(own.codes(), packed.codes())
    assert own.format == packed.stored().format == packed.format.plain()
    want = x @ packed.dequantize().T
    assert torch.allclose(anybit.linear(x, packed), want, atol=1e-3 * float(want.abs().max()))
    extra = (K + (N if sides == "kn" else 0)) * 16 / (N * K)
    assert packed.format.bits_per_weight((N, K)) == pytest.approx(
        own.format.bits_per_weight((N, K)) + extra
    )
    assert packed.nbytes() == own.nbytes() + extra * N * K / 8
    layer = anybit.QuantLinear(packed)
    empty = anybit.QuantLinear.empty(layer.scheme, (N, K), device="cpu")
    empty.load_state_dict(layer.state_dict())
    assert torch.equal(empty(x), layer(x))


def test_gradients_pass_through_rotated_layers() -> None:
    packed = anybit.quantize_tensor(random(N, K), "int8:rotate=kn")
    x = random(3, K, seed=1).requires_grad_()
    anybit.QuantLinear(packed)(x).backward(torch.ones(3, N))
    assert x.grad is not None
    assert torch.allclose(x.grad, torch.ones(3, N) @ packed.dequantize(), atol=1e-4)


def test_parts_are_whole_blocks() -> None:
    packed = anybit.quantize_tensor(random(256, 512), "int4:group=64,rotate=kn")
    w = packed.dequantize()
    for part, want in (
        (packed.rows(slice(128, 256)), w[128:]),
        (packed.columns(slice(128, 384)), w[:, 128:384]),
        (shard(packed, slice(0, 128), slice(256, 512)), w[:128, 256:]),
    ):
        assert torch.allclose(part.dequantize(), want, atol=1e-5)
    for cut in (
        lambda: packed.rows(slice(64, 192)),
        lambda: packed.rows(slice(0, 64)),
        lambda: packed.columns(slice(64, 192)),
        lambda: shard(packed, columns=slice(0, 64)),
        lambda: shard(packed, rows=slice(0, 64)),
        lambda: check_columns(packed.format, 512, 8),
    ):
        with pytest.raises(ValueError, match="split"):
            cut()
    with pytest.raises(ValueError, match="split"):  # blocks of 32 would be blocks of 64 in the part
        anybit.quantize_tensor(random(16, 96), "int8:rotate=k").columns(slice(0, 64))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_part_of_a_stored_weight(rank: int) -> None:
    packed = anybit.quantize_tensor(random(256, 512), "int4:group=64,rotate=kn")
    for piece, first, want in (
        (Piece("row", "int4:group=64,rotate=kn", 256, 512, slice(rank * 256, rank * 256 + 256)), 0,
         packed.dequantize()[:, rank * 256 : rank * 256 + 256]),
        (Piece("column", "int4:group=64,rotate=kn", 128, 512), rank * 128,
         packed.dequantize()[rank * 128 : rank * 128 + 128]),
    ):  # fmt: skip
        for key, tensor in packed.tensors().items():
            piece.take(key, tensor, first)
        part = piece.finish()
        assert isinstance(part, Packed)
        assert torch.allclose(part.dequantize(), want, atol=1e-5)


def test_layers_of_one_input_become_one_weight() -> None:
    parts = [
        anybit.quantize_tensor(random(n, K, seed=n), "int4:rotate=kn") for n in (256, 128, 128)
    ]
    assert same([*parts])
    whole = stack(parts).dequantize()
    assert torch.allclose(whole, torch.cat([p.dequantize() for p in parts]), atol=1e-5)
    small = anybit.quantize_tensor(random(64, K), "int4:rotate=kn")
    assert not same([small, small])  # its blocks of 64 would become one of 128
    grid = parts[1].grid | {"rotate_in": -parts[1].grid["rotate_in"]}
    assert not same([parts[2], dataclasses.replace(parts[1], grid=grid)])


def test_what_cannot_be_done_says_so() -> None:
    with pytest.raises(ValueError, match="K=40 cannot be rotated"):
        anybit.quantize_tensor(random(32, 40), "int4:rotate=k")
    with pytest.raises(ValueError, match="N=40 cannot be rotated"):
        anybit.quantize_tensor(random(40, 32), "int4:rotate=kn")
    with pytest.raises(ValueError, match="rotate=k or rotate=kn"):
        anybit.get_format("int4:rotate=n")
    with pytest.raises(ValueError, match="not rotated"):
        anybit.get_format("int4:order,rotate=k")
    fmt = anybit.get_format("int4:rotate=k")
    with pytest.raises(ValueError, match="quantize_tensor"):
        anybit.RTN().quantize(random(32, 64), fmt)
    with pytest.raises(ValueError, match=r"Packed\.stored"):
        refusals(LayerSpec(fmt, None, (N, K), torch.device("cpu")))
    codes = Activations(
        torch.ones(1, 64).to(torch.int8), torch.ones(1), torch.ones(1).int(), torch.float32
    )
    layer = anybit.QuantLinear(anybit.quantize_tensor(random(32, 64), fmt), activation="int8")
    with pytest.raises(ValueError, match="without a rotation"):
        layer(codes)
