"""Paged attention and the fused write against the definition in plain torch."""

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from anybit.engine import attention as reference
from anybit.engine.attention import Batch, LayerCache
from anybit.kernels.triton import attention as kernels

DEVICE = torch.device(os.environ.get("ANYBIT_TEST_DEVICE", "cpu"))
# The interpreter keeps bf16 in integers, so bf16 is tested on the GPU alone.
DTYPES = [torch.float32] if DEVICE.type == "cpu" else [torch.float16, torch.bfloat16]
BLOCK, BLOCKS = 8, 64


def make_cache(kv_heads: int, dim: int, kind: str, dtype: torch.dtype) -> LayerCache:
    scales = None
    if kind == "static":
        scales = tuple(torch.rand(kv_heads, dim) * 0.02 + 0.01 for _ in range(2))
    stored = dtype if kind == "model" else torch.int8
    return LayerCache.empty(BLOCKS, kv_heads, BLOCK, dim, stored, DEVICE, scales)


def tensors(cache: LayerCache) -> tuple:
    return cache.k, cache.v, cache.k_scale, cache.v_scale


def batch_of(queries: list[int], contexts: list[int]) -> Batch:
    """Sequences on random pages, and where this step's tokens go."""
    pages = torch.randperm(BLOCKS).tolist()
    widest = -(-max(contexts) // BLOCK)
    tables, slots, positions = [], [], []
    for count, context in zip(queries, contexts, strict=True):
        own = [pages.pop() for _ in range(-(-context // BLOCK))]
        tables.append(own + [0] * (widest - len(own)))
        for p in range(context - count, context):
            positions.append(p)
            slots.append(own[p // BLOCK] * BLOCK + p % BLOCK)
    at = torch.tensor([0, *queries]).cumsum(0)
    return Batch(
        positions=torch.tensor(positions, device=DEVICE),
        slots=torch.tensor(slots, device=DEVICE),
        tables=torch.tensor(tables, dtype=torch.int32, device=DEVICE),
        contexts=torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
        starts=at.to(DEVICE, torch.int32),
        queries=queries,
        lengths=contexts,
        decodes=sum(q == 1 for q in queries),
    )


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def fill(cache: LayerCache, kind: str) -> None:
    """Random contents, with NaN where no scale or value has been written is not allowed for."""
    if kind == "model":
        cache.k.normal_()
        cache.v.normal_()
        return
    cache.k.random_(-127, 128)
    cache.v.random_(-127, 128)
    if kind == "dynamic":
        cache.k_scale.uniform_(0.005, 0.02)
        cache.v_scale.uniform_(0.005, 0.02)


CASES = [  # queries, contexts (single tokens first)
    ([1, 1, 1], [1, 70, 130]),
    ([1], [100]),
    ([1, 5, 20], [9, 5, 83]),
    ([40], [40]),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["model", "dynamic", "static"])
@pytest.mark.parametrize(("queries", "contexts"), CASES)
@pytest.mark.parametrize(("heads", "kv_heads", "window", "splits"), [
    (4, 2, None, None), (3, 3, 30, None), (6, 1, None, 4), (4, 2, 30, 4),
])  # fmt: skip
def test_attend(
    dtype: torch.dtype, kind: str, queries: list[int], contexts: list[int], heads: int,
    kv_heads: int, window: int | None, splits: int | None,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    dim = 16
    cache = make_cache(kv_heads, dim, kind, dtype)
    fill(cache, kind)
    batch, q = batch_of(queries, contexts), random(sum(queries), heads, dim, dtype=dtype)
    wide = LayerCache(  # the definition in fp32
        *(t if t.dtype == torch.int8 else t.float() for t in (cache.k, cache.v)),
        cache.k_scale,
        cache.v_scale,
    )
    want = reference.gathered(q.float(), wide, batch, 0.3, window)
    got = kernels.attend(
        q, tensors(cache), batch.tables, batch.contexts, batch.starts, max(queries), 0.3, window,
        splits,
    )  # fmt: skip
    # Rounding Q (by the static scale) and P to the dtype, each once; the rest is fp32.
    eps = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]
    bound = 3 * float(wide.v.float().abs().max()) * (0.03 if kind != "model" else 1)
    assert (got.float() - want).abs().max() <= eps * bound
    assert want.abs().max() > 10 * eps * bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["model", "dynamic", "static"])
@pytest.mark.parametrize("norm", [False, True])
def test_write_equals_its_parts(dtype: torch.dtype, kind: str, norm: bool) -> None:
    """Bit for bit what rotation, norm, rounding and store do one after the other."""
    torch.manual_seed(0)
    heads, kv_heads, dim = 3, 2, 32
    batch = batch_of([1, 4, 9], [30, 4, 20])
    count = len(batch.slots)
    qkv = random(count, (heads + 2 * kv_heads) * dim + 5, dtype=dtype)[:, :-5]
    qkv[3, heads * dim : (heads + 1) * dim] = 0  # zeros have a scale, too
    angle = torch.rand(40, dim // 2) * 6
    rope = tuple(t.to(DEVICE) for t in (angle.cos(), angle.sin()))
    weights = [random(dim, dtype=dtype) for _ in range(2)]
    ours, theirs = (make_cache(kv_heads, dim, kind, dtype) for _ in range(2))
    for name in ("k_scale", "v_scale"):
        if kind != "model":
            getattr(ours, name).copy_(getattr(theirs, name))

    q, k, v = qkv.unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
    if norm:
        q, k = (
            w
            * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)).to(dtype)
            for w, x in zip(weights, (q, k), strict=True)
        )
    q, k = (rotate(x, rope, batch.positions) for x in (q, k))
    theirs.store(k, v, batch.slots)
    got = kernels.write(
        qkv, tensors(ours), rope, batch.positions, batch.slots, heads,
        (*weights, 1e-5) if norm else None,
    )  # fmt: skip
    if norm or DEVICE.type == "cuda":  # sums in another order, or fused multiply-adds
        close(got, q, dtype)
        for mine, other in zip(tensors(ours)[:2], tensors(theirs)[:2], strict=True):
            if kind == "model":
                close(mine, other, dtype)
            else:
                assert (mine.int() - other.int()).abs().max() <= 1
    else:
        assert torch.equal(got, q)
        for mine, other in zip(tensors(ours), tensors(theirs), strict=True):
            assert other is None or torch.equal(mine, other)


def rotate(x: Tensor, rope: tuple[Tensor, ...], positions: Tensor) -> Tensor:
    cos, sin = (t[positions, None] for t in rope)
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def close(a: Tensor, b: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(a, b, rtol=4 * torch.finfo(dtype).eps, atol=1e-5)


def test_padding_is_not_stored_and_attends_to_nothing() -> None:
    """A graph's unused rows: slot -1 and context 0."""
    cache = make_cache(2, 16, "model", DTYPES[0])
    qkv = random(3, 8 * 16, dtype=DTYPES[0])
    rope = tuple(torch.ones(4, 8, device=DEVICE) for _ in range(2))
    slots = torch.tensor([5, -1, -1], device=DEVICE)
    zeros = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    q = kernels.write(qkv, tensors(cache), rope, zeros, slots, 4)
    assert cache.k.flatten(2).any(-1).sum() == 2  # one slot of two heads
    contexts = torch.tensor([6, 0, 0], dtype=torch.int32, device=DEVICE)
    starts = torch.arange(4, dtype=torch.int32, device=DEVICE)
    tables = torch.zeros(3, 1, dtype=torch.int32, device=DEVICE)
    for splits in (1, 4):
        out = kernels.attend(q, tensors(cache), tables, contexts, starts, 1, 1.0, None, splits)
        assert torch.isfinite(out).all()
        assert not out[1:].any()
        assert out[0].any()


@pytest.mark.parametrize(("programs", "splits"), [(8, 64), (64, 8), (256, 2), (264, 1), (4096, 1)])
def test_splits_fill_the_gpu(programs: int, splits: int) -> None:
    assert kernels.choose_splits(programs) == splits
