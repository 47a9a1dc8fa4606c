"""Rotation on GPUs: kernels against torch's definition, alone and before tokens are quantized."""

import os
from collections.abc import Callable
from concurrent.futures import Executor

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import anybit
from anybit.core.rotation import turned
from anybit.kernels import between
from anybit.kernels.backend import Activations
from anybit.kernels.between import Unturned, Wanted, rms_norm, seen_by
from anybit.kernels.kv.cache import Heads
from anybit.kernels.kv.formats import KV_FORMATS
from anybit.kernels.reference import quantize_tokens
from anybit.kernels.state import Room
from anybit.kernels.triton import activation as kernel
from anybit.kernels.triton.between import FAMILY
from tests.kernels.compiling import Job, Target, built
from tests.needs import EVERY_KERNEL

DEVICE = torch.device(os.environ.get("ANYBIT_TEST_DEVICE", "cpu"))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def rotated(x: Tensor, vector: Tensor, after: bool) -> Tensor:
    x, v = x.double(), vector.flatten().double()
    return turned(x) * v if after else turned(x * v)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("size", [16, 96, 128, 384])
def test_tokens(size: int, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "ALONE", 3)
    vector = random(size, 1, seed=1).half()
    eye = torch.eye(size, device=DEVICE)
    got = kernel.rotate(eye, vector, after)
    assert torch.allclose(got.double(), rotated(eye, vector, after), rtol=1e-6, atol=0)
    signs = vector.flatten().sign()
    whole = torch.randint(-64, 65, (5, size), device=DEVICE).float()  # sums are exact
    want = rotated(whole, signs, after)
    assert torch.allclose(kernel.rotate(whole, signs, after).double(), want, rtol=1e-6)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = random(37, 2 * size)[:, :size].to(dtype)
        want = rotated(x, vector, after)
        error = (kernel.rotate(x, vector, after).double() - want).norm() / want.norm()
        assert error < 2 * torch.finfo(dtype).eps
        one = kernel.rotate(x[:1], vector, after)
        assert torch.equal(one, kernel.rotate(x, vector, after)[:1])
    assert kernel.rotate(x[:0], vector, after).shape == (0, size)


def test_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """What layers see of several sequences is quantized as their tokens are."""
    monkeypatch.setitem(between.chosen, DEVICE, FAMILY)
    packed = anybit.quantize_tensor(random(16, 64), "int4:rotate=k")
    x = random(2, 3, 64)
    got = seen_by(packed, x, "int8")
    assert torch.equal(got.flatten(0, 1), seen_by(packed, x.flatten(0, 1), "int8"))
    assert (got - x).norm() < 0.01 * x.norm()


def close(got: Activations, want: Tensor) -> None:
    """Codes of rotated tokens, which sums in another order may move to the next one."""
    codes, scale = quantize_tokens(want, "int8")
    assert got.rotated
    assert torch.allclose(got.scale, scale[:, 0], rtol=2**-9)
    assert int((got.codes.int() - codes.int()).abs().max()) <= 1
    assert (got.codes == codes).float().mean() > 0.9
    assert torch.equal(got.sums, got.codes.int().sum(1, dtype=torch.int32))


@pytest.mark.parametrize(("k", "widest"), [(96, 4096), (640, 4096), (640, 512), (1152, 512)])
def test_norms_and_products_leave_rotated_and_quantized(
    monkeypatch: pytest.MonkeyPatch, k: int, widest: int
) -> None:
    """The engine's path on a GPU; elsewhere Triton's interpreter runs the same kernels.

    In float16, since the interpreter cuts bfloat16's last bits off.
    """
    monkeypatch.setattr(kernel, "WIDEST", widest)
    x, delta, weight, vector = (random(*s).half() for s in ((7, k), (7, k), (k,), (k,)))
    wanted = Wanted("int8", vector)
    codes, total = FAMILY.add_norm(x, delta, weight, 1e-5, wanted)
    other = FAMILY.silu_mul(x, delta, wanted)
    plain, _ = FAMILY.add_norm(x, delta, weight, 1e-5, Wanted("int8"))
    assert isinstance(codes, Activations)
    assert isinstance(other, Activations)
    assert isinstance(plain, Activations)
    assert not plain.rotated
    assert torch.equal(total, x + delta)
    norm = rms_norm(x + delta, weight, 1e-5)
    close(codes, rotated(norm, vector, False).half())
    close(other, rotated(torch.nn.functional.silu(x) * delta, vector, False).half())


def test_products_leave_rotated_alone() -> None:
    """For layers that quantize nothing, and for too wide tokens; gate and up are halves of one."""
    gate, up = random(5, 2 * 640).half().chunk(2, -1)
    vector = random(640, seed=1).half()
    want = rotated(torch.nn.functional.silu(gate) * up, vector, False)
    x = FAMILY.silu_mul(gate, up, Wanted(None, vector, rotated=True))
    experts = FAMILY.silu_mul(gate, up, Wanted(None, vector))
    assert isinstance(x, Activations)
    assert isinstance(experts, Tensor)
    assert x.rotated
    assert x.codes.dtype == x.dtype == torch.float16
    assert (x.codes.double() - want).norm() / want.norm() < 2e-3


def equal(got: object, want: object) -> None:
    """Tensors, or tuples of what is to be equal."""
    if isinstance(want, Tensor):
        assert isinstance(got, Tensor)
        assert torch.equal(got, want)
    elif isinstance(want, tuple):
        assert isinstance(got, tuple)
        for a, b in zip(got, want, strict=True):
            equal(a, b)


@pytest.mark.parametrize(("k", "widest", "biased"), [(96, 96, 1), (384, 384, 0), (384, 256, 1)])
def test_outputs_are_rotated_where_they_are_read(
    k: int, widest: int, biased: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as of a launch that rotates them, and by that where a token is too wide."""
    monkeypatch.setitem(between.chosen, DEVICE, FAMILY)
    monkeypatch.setattr(kernel, "WIDEST", widest)
    x, weight, vector = random(3, k).half(), random(k, seed=1).half(), random(k, seed=2).half()
    signs = random(2 * k, seed=3).sign().half()
    bias = random(2 * k, seed=4).half() if biased else None
    both = Unturned(random(3, 2 * k, seed=5).half(), signs, bias)
    gate, up = both.chunk(2, -1)
    assert isinstance(gate, Unturned) is (k % 128 == 0)  # else the rotation's blocks of 64 or 128
    delta = Unturned(both.y[:, :k], signs[:k], None if bias is None else bias[:k])
    every = Wanted(), Wanted("int8"), Wanted("int8", vector), Wanted(None, vector, rotated=True)
    for wanted in every:
        got = FAMILY.add_norm(x, delta, weight, 1e-5, wanted)
        want = FAMILY.add_norm(x, delta.turned, weight, 1e-5, wanted)
        equal(got[1], want[1])
        first, second = both.turned.chunk(2, -1)
        products = FAMILY.silu_mul(gate, up, wanted), FAMILY.silu_mul(first, second, wanted)
        for pair in ((got[0], want[0]), products):
            if DEVICE.type == "cpu":  # a GPU adds squares in another order
                equal(*pair)
            a, b = (y.codes if isinstance(y, Activations) else y for y in pair)
            assert (a.float() - b.float()).abs().max() <= (1 if a.dtype == torch.int8 else 2**-6)


@pytest.mark.parametrize(("heads", "dim"), [(4, 32), (1, 128), (3, 16)])
def test_projections_are_rotated_where_the_cache_is_written(heads: int, dim: int) -> None:
    """Also where a block is several heads, or lies across those of Q and K."""
    n = 3 * heads * dim
    qkv = Unturned(random(2, n).half(), random(n, seed=1).sign().half(), random(n, seed=2).half())
    tables = random(8, dim // 2, seed=3), random(8, dim // 2, seed=4)
    positions, slots = torch.tensor([[3, 5], [1, 17]], device=DEVICE)
    caches = [Heads(heads, dim).empty(Room(2, 16, 0, KV_FORMATS["int8"], DEVICE)) for _ in "ab"]
    got, want = (
        FAMILY.write(x, cache, tables, positions, slots, heads)
        for x, cache in zip((qkv, qkv.turned), caches, strict=True)
    )
    assert torch.equal(got, want)
    for a, b in zip(*(cache.of_tokens for cache in caches), strict=True):
        assert torch.equal(a, b)
    assert int(caches[0].k.count_nonzero()) > heads * dim


KINDS = dict.fromkeys(("x", "gate", "other", "weight", "residual"), "*bf16")
KINDS |= dict.fromkeys(
    ("K", "X_STRIDE", "OTHER_STRIDE", "UNITS", "ROW", "ROWS", "GATE_STRIDE", "LOW"), "i32"
)
KINDS |= dict.fromkeys(("vector", "x_turn", "gate_turn", "other_turn"), "*fp16")
KINDS |= {"scales": "*fp32", "most": "*fp32", "sums": "*i32", "EPS": "fp32"}
TARGETS: list[Target] = [("cuda", 80, 32), *[("hip", "gfx942", 64)] * EVERY_KERNEL]


@pytest.mark.parametrize("target", TARGETS)
def test_they_compile_without_a_gpu(compilers: Callable[..., Executor], target: Target) -> None:
    token = {"LARGEST": 127, "FUSE": "norm", "WIDE": kernel.WIDEST, "SIZE": 128, "MOST": 0}
    token["TURN"] = 128
    alone = {"AFTER": True, "SIZE": 128, "TILE": kernel.BLOCKS}
    for name, out, constants, warps in [
        ("_token", "*i8", token, 16), ("_rotate", "*bf16", alone, 4)
    ]:  # fmt: skip
        constants, options = constants | {"PDL": False}, {"num_warps": warps}
        job = Job(f"activation.{name}", KINDS | {"out": out}, constants, target, options)
        made = compilers(target[0]).submit(built, job).result()
        assert made.shared <= 99 << 10  # as much as any has
