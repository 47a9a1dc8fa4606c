"""Paged attention and the fused write against the definition in plain torch."""

import os
from collections.abc import Callable
from concurrent.futures import Executor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from anybit.engine.graphs import Rows, StepGraphs
from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from anybit.kernels import attention as reference
from anybit.kernels import between
from anybit.kernels.attention import Batch, Scores
from anybit.kernels.kv.cache import LayerCache, token_bytes
from anybit.kernels.kv.format import plain
from anybit.kernels.kv.formats import KV_FORMATS
from anybit.kernels.kv.int4 import spread, unpack
from anybit.kernels.triton import activation, attention_int8, cache, likeliest
from anybit.kernels.triton import attention as kernels
from anybit.kernels.triton.between import FAMILY
from tests.engine.conftest import ARCHITECTURES, prompts, random_model
from tests.kernels.compiling import Job, built
from tests.needs import EVERY_KERNEL, first_of, pairs

DEVICE = torch.device(os.environ.get("ANYBIT_TEST_DEVICE", "cpu"))
# The interpreter keeps bf16 in integers, so bf16 is tested on the GPU alone.
DTYPES = [torch.float32] if DEVICE.type == "cpu" else [torch.float16, torch.bfloat16]
BLOCK, BLOCKS = 8, 64


@pytest.fixture(autouse=True)
def laid_out_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cache is one of the CPU's own kernels."""
    monkeypatch.setitem(between.chosen, torch.device("cpu"), between.TORCH)


def make_cache(kv_heads: int, dim: int, kind: str, dtype: torch.dtype) -> LayerCache:
    scales = None
    if kind == "static":
        scales = tuple(torch.rand(kv_heads, dim) * 0.02 + 0.01 for _ in range(2))
    format = plain(dtype) if kind == "model" else KV_FORMATS.get(kind, KV_FORMATS["int8"])
    if kv_heads == 2 and kind != "static":  # in memory of somebody else's
        room = torch.zeros(BLOCKS, 2, BLOCK, token_bytes(dim, format), dtype=torch.uint8)
        return LayerCache.within(room.to(DEVICE), dim, format)
    return LayerCache.empty(BLOCKS, kv_heads, BLOCK, dim, format, DEVICE, scales)


def batch_of(queries: list[int], contexts: list[int]) -> Batch:
    """Sequences on random pages, and where this step's tokens go.

    A single token of a context that is a token longer than the one before is a draft behind that.
    """
    pages = torch.randperm(BLOCKS).tolist()
    widest = -(-max(contexts) // BLOCK)
    lists, slots, positions, owners = [], [], [], []
    for i, (count, context) in enumerate(zip(queries, contexts, strict=True)):
        draft = i > 0 and count == queries[i - 1] == 1 and context == contexts[i - 1] + 1
        own = lists[-1] if draft else []
        lists.append(own)
        owners.append(owners[-1] if draft else i)
        own += [pages.pop() for _ in range(-(-context // BLOCK) - len(own))]
        for p in range(context - count, context):
            positions.append(p)
            slots.append(own[p // BLOCK] * BLOCK + p % BLOCK)
    at = torch.tensor([0, *queries]).cumsum(0)
    tables = [own + [0] * (widest - len(own)) for own in lists]
    drafted = None
    if len(set(owners)) < len(owners):
        drafted = torch.tensor(owners, dtype=torch.int32, device=DEVICE)
    return Batch(
        positions=torch.tensor(positions, device=DEVICE),
        slots=torch.tensor(slots, device=DEVICE),
        tables=torch.tensor(tables, dtype=torch.int32, device=DEVICE),
        contexts=torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
        starts=at.to(DEVICE, torch.int32),
        queries=queries,
        lengths=contexts,
        decodes=sum(q == 1 for q in queries),
        owners=drafted,
    )


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def fill(cache: LayerCache) -> None:
    """Random contents."""
    for how, codes, scales in cache.sides:
        if how.kind == "model":
            codes.normal_()
            continue
        codes.random_(*((0, 256) if how.kind == "int4" else (-127, 128)))
        if not how.static:
            scales.uniform_(0.005, 0.02)
        if how.kind == "int4":  # and what code 0 means
            scales.mul_(10)
            scales[..., 1].sub_(1.2)


CASES = [  # queries, contexts (single tokens first)
    ([1, 1, 1], [1, 70, 130]),
    ([1], [100]),
    ([1, 5, 20], [9, 5, 83]),
    ([1, 3, 2, 8], [30, 70, 2, 20]),  # a few of each, whose programs share contexts, too
    ([1] * 8, [1, 68, 69, 70, 71, 72, 33, 34]),  # with drafts
    ([40], [40]),
]


KINDS = ("model", "dynamic", "static", "int4", "k8v4")
SHAPES = [  # heads, KV heads, dim, window, splits, whether there are sinks
    (4, 2, 32, None, 1, True), (3, 3, 16, 30, 1, False), (6, 1, 32, None, 4, False),
    (4, 2, 32, 30, 4, True), (5, 1, 64, 30, 2, True), (2, 1, 256, None, 2, True),
]  # fmt: skip


IN_GROUPS = [  # single tokens, and two groups of V in half a head
    (((2, 1, 128, None, splits, False), "k8v4"), case) for splits, case in enumerate(CASES[:2], 1)
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("made", "texts"), [*pairs([*product(SHAPES, KINDS)], CASES), *IN_GROUPS])
def test_attend(
    dtype: torch.dtype, made: tuple[tuple[Any, ...], str], texts: tuple[list[int], list[int]]
) -> None:
    (heads, kv_heads, dim, window, splits, sunk), kind = made
    queries, contexts = texts
    torch.manual_seed(0)
    dim = max(dim, 32) if "4" in kind else dim  # as `refuse` has it
    cache = make_cache(kv_heads, dim, kind, dtype)
    fill(cache)
    batch, q = batch_of(queries, contexts), random(sum(queries), heads, dim, dtype=dtype)
    k, v = (t.float() if kind == "model" else t for t in (cache.k, cache.v))
    wide = LayerCache(cache.format, k, v, cache.k_scale, cache.v_scale)  # the definition in fp32
    sinks = torch.arange(heads, device=DEVICE).to(dtype) - 1 if sunk else None
    scores = Scores(0.3, window, sinks=None if sinks is None else sinks.float())
    want = reference.gathered(q.float(), wide, batch, scores)
    tables = batch.tables.long() if dtype == torch.float16 else batch.tables  # as where `is_wide`
    args = (tables, batch.contexts, batch.starts, max(queries), 0.3, window, splits)
    got = kernels.attend(q, cache, *args, sinks=sinks, owners=batch.owners)
    # Rounding Q (by the static scale) and P to the dtype, each once; the rest is fp32.
    eps = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-7}[dtype]
    if max(queries) == 1 and attention_int8.suits(heads // kv_heads, cache):
        eps = max(eps, 2**-13)  # two int8 digits hold 15 bits of Q and P
    bound = 3 * {"model": float(wide.v.float().abs().max()), "int4": 1.8, "k8v4": 1.8}.get(
        kind, 3.8
    )
    assert (got.float() - want).abs().max() <= eps * bound
    if batch.owners is not None and not attention_int8.suits(heads // kv_heads, cache):
        small = kernels.Tile(32, 2, 1, 16)  # where a GPU has little memory
        got = kernels.attend(q, cache, *args, tile=small, sinks=sinks, owners=batch.owners)
        assert (got.float() - want).abs().max() <= eps * bound
    if 1 < max(queries) <= kernels.TOGETHER:
        got = FAMILY.attend(q, cache, batch, scores)  # single tokens apart
        assert (got.float() - want).abs().max() <= eps * bound
    assert want.abs().max() > 3 * eps * bound


@pytest.mark.parametrize("kind", ["model", "dynamic", "int4"])
def test_a_window_of_131072_tokens(kind: str) -> None:
    """Bit for bit that of a short text with the same keys; two tokens, of which one is a draft."""
    cache, q = make_cache(2, 32, kind, DTYPES[0]), random(2, 4, 32, dtype=DTYPES[0])
    fill(cache)
    contexts, before = torch.tensor([127, 128]), 131072 - 128
    tables = torch.randperm(BLOCKS)[: 128 // BLOCK].expand(2, -1)
    far = torch.cat([torch.full((2, before // BLOCK), BLOCKS - 1), tables], 1)
    starts, owners = torch.arange(3), torch.zeros(2)
    out = [
        kernels.attend(
            q, cache, t.to(DEVICE, torch.int32), c.to(DEVICE, torch.int32),
            starts.to(DEVICE, torch.int32), 1, 0.3, 64, 2, owners=owners.to(DEVICE, torch.int32),
        )
        for t, c in ((tables, contexts), (far, contexts + before))
    ]  # fmt: skip
    assert torch.equal(*out)
    assert out[0].abs().max() > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("made", "counts"),
    [
        ((*which, dim), counts)
        for (which, dim), counts in pairs(
            pairs([*product(KINDS, [False, True])], [32, 256]), [(3, 2), (6, 2), (4, 4)]
        )
    ],
)
def test_write_equals_its_parts(
    dtype: torch.dtype, made: tuple[str, bool, int], counts: tuple[int, int]
) -> None:
    """Bit for bit what rotation, norm, rounding and store do one after the other."""
    (kind, norm, dim), (heads, kv_heads) = made, counts
    torch.manual_seed(0)
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
    if kind == "int4":
        q = spread(q).to(dtype)
    got = FAMILY.write(
        qkv, ours, rope, batch.positions, batch.slots, heads,
        (*weights, 1e-5) if norm else None,
    )  # fmt: skip
    if norm or DEVICE.type == "cuda":  # sums in another order, or fused multiply-adds
        # A rotation's sums are as large as the whole head, and what is left of them may be small.
        close(got, q, dtype, 1e-4 if kind == "int4" else 1e-5)
        for mine, other in zip((ours.k, ours.v), (theirs.k, theirs.v), strict=True):
            if kind == "model":
                close(mine, other, dtype)
            else:
                if mine.dtype == torch.uint8:
                    mine, other = unpack(mine), unpack(other)
                assert (mine.int() - other.int()).abs().max() <= 1
    else:
        assert torch.equal(got, q)
        for mine, other in zip(ours.of_tokens, theirs.of_tokens, strict=True):
            assert torch.equal(mine, other)


def rotate(x: Tensor, rope: tuple[Tensor, ...], positions: Tensor) -> Tensor:
    cos, sin = (t[positions, None] for t in rope)
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def close(a: Tensor, b: Tensor, dtype: torch.dtype, atol: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=4 * torch.finfo(dtype).eps, atol=atol)


def test_padding_is_not_stored_and_attends_to_nothing() -> None:
    """A graph's unused rows: slot -1 and context 0."""
    cache, other = (make_cache(2, 16, "model", DTYPES[0]) for _ in range(2))
    qkv = random(3, 8 * 16, dtype=DTYPES[0])
    slots = torch.tensor([5, -1, -1], device=DEVICE)
    q, k, v = qkv.split([64, 32, 32], 1)
    alone = FAMILY.write(q, other, None, slots, slots, 4, kv=(k.clone(), v))
    q = FAMILY.write(qkv, cache, None, slots, slots, 4)
    assert torch.equal(q, alone)
    assert torch.equal(q.flatten(1), qkv[:, :64])  # it was rotated before
    for mine, theirs in zip(cache.of_tokens, other.of_tokens, strict=True):
        assert torch.equal(mine, theirs)
    assert cache.k.flatten(2).any(-1).sum() == 2  # one slot of two heads
    contexts = torch.tensor([6, 0, 0], dtype=torch.int32, device=DEVICE)
    starts = torch.arange(4, dtype=torch.int32, device=DEVICE)
    tables = torch.zeros(3, 1, dtype=torch.int32, device=DEVICE)
    for splits in (1, 4):
        out = kernels.attend(q, cache, tables, contexts, starts, 1, 1.0, None, splits)
        assert torch.isfinite(out).all()
        assert not out[1:].any()
        assert out[0].any()


@pytest.mark.parametrize(
    ("kind", "dim", "group", "each"),
    [("model", 64, 4, 5), ("model", 128, 8, 2), ("model", 512, 4, 1), ("int8", 128, 4, 8),
     ("int8", 128, 8, 6), ("int8", 512, 8, 2)],
)  # fmt: skip
def test_programs_fill_a_multiprocessor(kind: str, dim: int, group: int, each: int) -> None:
    head = (2 * dim if kind == "model" else dim) + 8
    tile = kernels.tile_of(kind, 16)
    assert kernels.at_once(tile, head, group, torch.device("cpu")) == each * 132


@pytest.mark.parametrize(
    ("programs", "splits"),
    [(0, 64), (8, 64), (9, 58), (16, 32), (29, 18), (31, 16), (300, 1), (999, 1)],
)
def test_splits_fill_the_gpu(programs: int, splits: int) -> None:
    assert kernels.choose_splits(programs, 528, 1000) == splits
    assert kernels.choose_splits(programs, 528, 3) == min(splits, 3)


@pytest.mark.parametrize(("shape", "dtype", "reason"), [
    ((9, 2, 16, 64), torch.half, None),
    ((9, 2, 16, 24), torch.half, "head dimension is 24"),
    ((9, 2, 24, 64), torch.half, "block size is 24"),
    ((2**22, 32, 16, 64), torch.half, None),
    ((9, 2, 16, 16), torch.uint8, None),
    ((9, 2, 16, 8), torch.uint8, "head dimension is 16, not a power of two of at least 32"),
])  # fmt: skip
def test_what_is_left_to_torch(
    shape: tuple[int, ...], dtype: torch.dtype, reason: str | None
) -> None:
    k = torch.empty(shape, dtype=dtype, device="meta")
    format = KV_FORMATS["int4"] if dtype == torch.uint8 else plain(dtype)
    cache = LayerCache(format, k, k)
    assert kernels.is_wide(cache, kernels.kinds(cache)) == (shape[0] > 9)
    found = kernels.refuse(cache)
    assert found is None if reason is None else reason in str(found)


POINTERS = {"tables": "*i32", "contexts": "*i32", "starts": "*i32", "positions": "*i32",
            "slots": "*i32", "sums": "*fp32", "maxima": "*fp32", "cos": "*fp32", "sin": "*fp32",
            "k_scale": "*fp32", "v_scale": "*fp32", "TABLE_STRIDE": "i32", "STRIDE": "i32",
            "K_STRIDE": "i32", "V_STRIDE": "i32", "SCALE": "fp32", "EPS": "fp32", "K": "i32",
            "N": "i32", "X_STRIDE": "i32", "OTHER_STRIDE": "i32", "GATE_STRIDE": "i32",
            "UP_STRIDE": "i32", "BATCH": "i32", "SPLITS": "i32", "PARTS": "i32", "pairs": "*i32",
            "owners": "*i32", "V": "i32", "FIRST": "i32",
            "best": "*i32", "tokens": "*i32", "keys": "*i32", "temperature": "*fp32",
            "least": "*fp32", "largest": "*fp32", "most": "*fp32", "ROWS": "i32"}  # fmt: skip
SIZES = {"KV_HEADS": 8, "D": 128, "BLOCK": 16, "HEADS": 32, "HALF": 64, "GROUP": 4, "TOKENS": 64,
         "GROUPS": 1, "SEQUENCES": 64, "K_STEP": 2304, "V_STEP": 2304, "K_GRID": 576,
         "V_GRID": 576, "TURN": 128, "EACH": 1}  # fmt: skip

ROOM = 99 << 10  # bytes of shared memory of the smallest GPU from sm_80 on
WHOLE = {"WINDOW": 0, "sums": None, "maxima": None, "sinks": None, "owners": None}
DRAFTS = {"WINDOW": 64, "EACH": 4}
PLAIN = {"SIZE": 0, "vector": None}  # not rotated
PLAIN |= dict.fromkeys(("x_turn", "x_bias", "other_turn", "other_bias"))
NORM = PLAIN | {"FUSE": "norm", "LARGEST": 127, "WIDE": 4096, "MOST": 0, "most": None}
SILU = NORM | {"FUSE": "silu", "LARGEST": 0, "WIDE": 16384, "sums": None}
GREEDILY = {"WIDE": 4096} | dict.fromkeys(("best", "temperature", "least", "keys"))
KERNELS = [  # arch, name, kind of cache, constants, warps
    (80, "_attend", "model", {"ROWS": 128} | WHOLE, 8),
    (80, "_attend_int8", "static", WHOLE, 2),
    (80, "_attend_int8", "int4", WHOLE, 2),
    (80, "_attend", "int4", {"ROWS": 128} | WHOLE, 8),
    (80, "_write", "static", {"NORM": False, "TOGETHER": 1, "turn": None, "bias": None}, 1),
    (80, "_token", "model", SILU, 32),
    (90, "_attend", "dynamic", {"ROWS": 32, "WINDOW": 64}, 4),
    (90, "_attend", "static", {"ROWS": 128} | WHOLE, 8),
    (90, "_attend", "int4", {"ROWS": 32, "WINDOW": 64, "SEQUENCES": 0}, 4),
    (90, "_attend_int8", "dynamic", {"WINDOW": 64}, 2),
    (90, "_attend_int8", "int4", {"WINDOW": 64}, 2),
    (90, "_attend_int8", "dynamic", DRAFTS, 2),
    (80, "_attend_int8", "k8v4", DRAFTS | {"GROUPS": 2}, 2),
    (90, "_attend", "model", DRAFTS | {"ROWS": 16, "SEQUENCES": 0}, 2),
    (90, "_attend", "k8v4", {"D": 256, "GROUPS": 4, "ROWS": 128} | WHOLE, 8),
    (
        90,
        "_attend",
        "k8v4",
        {"ROWS": 32, "GROUPS": 2, "WINDOW": 64, "SEQUENCES": 0},
        4,
    ),
    (90, "_attend_int8", "k8v4", {"WINDOW": 64, "GROUPS": 2}, 2),
    (80, "_attend_int8", "k8v4", WHOLE | {"GROUPS": 2}, 2),
    (90, "_write", "k8v4", {"NORM": True, "TOGETHER": 4, "HALF": 128, "GROUPS": 4}, 4),
    (90, "_write", "dynamic", {"NORM": True, "TOGETHER": 4} | dict.fromkeys("kv"), 4),
    (90, "_write", "int4", {"NORM": True, "TOGETHER": 4} | dict.fromkeys(("cos", "sin")), 4),
    (90, "_combine", "model", {"MOST": 32} | DRAFTS, 4),
    (90, "_token", "model", NORM, 16),
    (90, "_token", "model", PLAIN | {"FUSE": "", "LARGEST": 127, "WIDE": 1024, "MOST": 14}, 4),
    (90, "_silu_mul", "model", {"WIDE": 1024}, 4),
    (90, "_largest", "model", {"WIDE": 4096}, 4),
    (80, "_largest", "model", GREEDILY, 4),
]


def test_compiles_for_gpus(compilers: Callable[..., Executor]) -> None:
    """In bf16, with the matrix unit and within every GPU's shared memory; needs no GPU."""
    for arch, name, *rest in first_of(KERNELS, lambda k: ((k[0], k[1]), (k[1], k[2]))):
        made = compilers().submit(built, job(arch, name, *rest)).result()
        assert made.shared <= ROOM, name
        assert ("mma." in made.text) == (name in ("_attend", "_attend_int8")), name
        assert ("griddepcontrol.wait" in made.text) == (arch >= 90), name  # for the kernel before


def job(arch: int, name: str, kind: str, more: dict, warps: int) -> Job:
    """A kernel of an architecture and a kind of cache."""
    k_kind, v_kind = {"k8v4": ("dynamic", "int4")}.get(kind, (kind, kind))
    modules = (kernels, attention_int8, cache, activation, likeliest)
    module = next(m for m in modules if hasattr(m, name))
    arguments = getattr(module, name).arg_names
    kinds = dict.fromkeys(arguments, "*bf16") | POINTERS | {"parts": "*fp32"}
    if "sums" not in more and name == "_attend_int8":
        kinds["out"] = "*fp32"
    for which, own in (("k", k_kind), ("v", v_kind)):
        kinds[f"{which}_cache"] = {"model": "*bf16", "int4": "*u8"}.get(own, "*i8")
        if own == "int4":
            kinds[f"{which}_scale"] = "*i32"
    if more.get("LARGEST"):
        kinds |= {"out": "*i8", "scales": "*fp32"}
    constants = SIZES | {"K_KIND": k_kind, "V_KIND": v_kind, "PDL": arch >= 90} | more
    if kind == "model":
        constants |= {"k_scale": None, "v_scale": None}
    tile = kernels.tile_of(k_kind, more.get("ROWS", 16))
    if more.get("ROWS") == 128:
        dim, groups = constants["D"], constants["GROUPS"]
        bytes_of = {"model": 2 * dim, "int4": dim // 2}
        head = bytes_of.get(k_kind, dim) + 8 * groups
        tile = kernels.fitted(tile._replace(rows=128), dim, 2, head, ROOM)
        constants["ROWS"] = tile.rows
    constants["TOKENS"] = tile.tokens
    options = {"num_warps": warps, "num_stages": tile.stages}
    place = module.__name__.rpartition(".")[2]
    return Job(f"{place}.{name}", kinds, constants, ("cuda", arch, 32), options)


class FakeGraph:
    """Stands for a CUDA graph where there is no GPU: runs the captured work again."""

    def __init__(self, work: Callable[[], Tensor], logits: Tensor):
        self.work, self.into = work, logits

    def replay(self) -> None:
        self.into.copy_(self.work())


@pytest.mark.skipif(DEVICE.type == "cuda", reason="engine tests use the GPU where there is one")
@pytest.mark.parametrize(("model", "kv", "scheme"), [
    ("llama-round", "model", "liquid@int8"), ("gpt_oss", "int8", None), ("qwen3", "int4", None),
    *[("qwen3", "int8", None), ("qwen3", "k8v4", None), ("mistral", "model", None)] * EVERY_KERNEL,
    *[("starcoder2", "model", None)] * EVERY_KERNEL,
])  # fmt: skip
def test_the_engine_on_these_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, kv: str, scheme: str | None
) -> None:
    """As on a GPU, kernels interpreted: graphs with padded rows, chunks, texts read later."""
    kind, options = ARCHITECTURES.get(model) or (model, {"sliding_window": 12})
    random_model(kind, options | {"num_hidden_layers": 1}).save_pretrained(tmp_path)
    many = prompts(3, longest=12)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    settings = {"block_size": 4, "max_tokens": 16, "max_running": 4, "kv_cache": kv}
    want = [o.tokens for o in LLM(tmp_path, scheme, **settings).generate(many, params)]

    llm = LLM(tmp_path, scheme, **settings)
    monkeypatch.setitem(between.chosen, torch.device("cpu"), FAMILY)
    runner = llm.engine.runner
    for layer in runner.states:
        layer.family = FAMILY
    runner.overlaps = True

    def capture(self: StepGraphs, rows: Rows, size: int) -> tuple[FakeGraph, Tensor]:
        out = self._forward(rows, size)
        return FakeGraph(lambda: self._forward(rows, size), out), out

    monkeypatch.setattr(StepGraphs, "_capture", capture)
    # Two splits; every program takes a while here.
    monkeypatch.setattr(kernels, "at_once", lambda *_: 16)
    sizes = () if kv == "int4" else (8, 16)  # one reads prompts without a graph
    runner.graphs = StepGraphs(runner.model, runner.states, 4, 4, 16, prompts=sizes)
    runner.graphs.reads = True
    assert [o.tokens for o in llm.generate(many, params)] == want
    assert set(runner.graphs.graphs) == {4}  # three texts in the next larger size
    read = runner.graphs.prompts
    assert set(read.graphs if read else ()) == set(sizes[-1:])
    manager = llm.engine.scheduler.blocks
    assert len(manager.free) == manager.count
