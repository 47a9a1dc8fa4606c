"""Attention over a paged KV cache: the model's dtype, int8 or int4, prompts and single tokens.

`attend` is flash attention over the pages, with int8 and int4 dequantized in registers: a static
scale of each K channel goes into the query and one of each V channel into the output, while dynamic
scales of each token multiply scores and probabilities; int4 becomes fp16. The query heads that
share a K head are rows of one tile, and so are those of drafts, so the cache is read once for all
of them. For a single token the context is split over programs whose parts `combine` adds up
(flash-decoding); those of a draft share what its text has to be read. Grids depend on sizes alone
and nothing waits for the device, so a CUDA graph can hold all of it.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from anybit.kernels.kv.cache import LayerCache
from anybit.kernels.triton import attention_int8
from anybit.kernels.triton.activation import after_previous, launch_next, overlap
from anybit.kernels.triton.attention_int8 import (
    fetch,
    grid_of,
    lying,
    nibbles,
    of_tokens,
    pages,
    rows_of,
    share,
    sunk,
)
from anybit.kernels.triton.cache import kinds, planes
from anybit.kernels.triton.gpu import multiprocessors, shared_memory
from anybit.kernels.triton.lang import NO_PTX, settle
from anybit.kernels.triton.tiles import next_power_of_2

MOST_SPLITS = 64
MOST_PROMPTS = 64  # sequences of a step with several queries, for which the kernel is compiled once
LEAST_TOKENS = 32  # what the int8 matrix unit multiplies at a time
FEW_ROWS, LEAST_ROWS = 32, 16
TOGETHER = 8  # tokens of a text that a program takes at most
LEAST_DRAFTED = 8  # rows of a step, for int8's drafts to go together; measured on an H200
# A multiprocessor reads as fast as it can with so many bytes on their way, or so many warps of
# programs that wait and multiply by turns: by heads of a program, up to 4, 8 and more, those that
# have registers. More programs than run at once take longer.
ON_THEIR_WAY, WARPS, WARPS_OF_MANY, WARPS_OF_TILES = 144 << 10, 16, 12, 8


class Tile(NamedTuple):
    """Keys that a program looks at together, its warps, and loads in flight.

    rows: queries of a program, tokens times the heads of one K head; 0: as many as there are, 128
    at most.
    """

    tokens: int
    warps: int
    stages: int
    rows: int = 0


# Measured on an H200: one query of 4 heads (of 8 K heads), 1,280 to 32,768 tokens, 1 to 256
# sequences.
DECODE = Tile(32, 2, 4)
DECODE_CODES = Tile(64, 2, 2)  # at most two warps: Triton 3.9 does not compile it for four
SEVERAL, PROMPT = Tile(64, 4, 3), Tile(64, 8, 2)


@triton.jit
def _float(codes, DTYPE: tl.constexpr):
    """int8 codes in a float dtype; to fp16 in 1.25 instructions a code."""
    PLAIN: tl.constexpr = NO_PTX or DTYPE != tl.float16
    if PLAIN:
        out = codes.to(DTYPE)
    else:  # a byte u below the bits of 1024 is 1024 + u; u is the code plus 128
        out = tl.inline_asm_elementwise(
            """{ .reg .b32 u, c;
            mov.b32 c, 0x64806480;
            xor.b32 u, $2, 0x80808080;
            prmt.b32 $0, u, 0x64646464, 0x4140;
            prmt.b32 $1, u, 0x64646464, 0x4342;
            sub.f16x2 $0, $0, c;
            sub.f16x2 $1, $1, c; }""",
            "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    return out


@triton.jit
def _of_channels(x, SIZE: tl.constexpr):
    """Numbers of groups (TOKENS, GROUPS) for each of their SIZE channels in all."""
    TOKENS: tl.constexpr = x.shape[0]
    GROUPS: tl.constexpr = x.shape[1]
    each = tl.broadcast_to(x[:, :, None], [TOKENS, GROUPS, SIZE // GROUPS])
    return tl.reshape(each, [TOKENS, SIZE])


@triton.jit
def _half(codes, at_grid, inside, GROUPS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """What codes (TOKENS, SIZE) of half a head in int4 mean. at_grid: of each token."""
    SIZE: tl.constexpr = codes.shape[1]
    words = at_grid[:, None] + tl.arange(0, GROUPS)[None, :] * BLOCK
    scale, low = grid_of(tl.load(words, inside[:, None], other=0))
    x = codes.to(tl.float32) * _of_channels(scale, SIZE) + _of_channels(low, SIZE)
    return x.to(DTYPE)


@triton.jit
def _decoded(
    codes, at_grid, inside, GROUPS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Heads (TOKENS, D) of bytes (TOKENS, D / 2) in int4. at_grid: of each token."""
    TOKENS: tl.constexpr = codes.shape[0]
    SIZE: tl.constexpr = codes.shape[1]
    codes, codes_high = nibbles(codes)
    half = _half(codes, at_grid, inside, GROUPS, BLOCK, DTYPE)
    high = _half(codes_high, at_grid + GROUPS * BLOCK, inside, GROUPS, BLOCK, DTYPE)
    both = tl.permute(tl.join(half, high), [0, 2, 1])
    return tl.reshape(both, [TOKENS, 2 * SIZE])


@triton.jit(do_not_specialize=["BATCH", "PARTS"])
def _attend(
    q, k_cache, v_cache, k_scale, v_scale, tables, contexts, starts, owners, out, sums, maxima,
    sinks, TABLE_STRIDE, BATCH, PARTS, SCALE, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, K_KIND: tl.constexpr,
    V_KIND: tl.constexpr, GROUPS: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr,
    K_GRID: tl.constexpr, V_GRID: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    SEQUENCES: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of queries (tokens x the heads of one K head) against its part of the context.

    SEQUENCES: 0 where each sequence has one query; `share` says which go together, and which part
    of PARTS a program has. Else tiles are numbered through all BATCH <= SEQUENCES sequences, and
    the last ones, which see most, go first. Programs beyond the last tile do nothing, so the grid
    depends on no sequence's length; every part of a query is written. out: of parts of contexts, in
    fp32, if there are sums.
    """
    launch_next(PDL)
    K_SIZE: tl.constexpr = D // 2 if K_KIND == "int4" else D
    V_SIZE: tl.constexpr = D // 2 if V_KIND == "int4" else D
    kv_head, split = tl.program_id(1), tl.program_id(2)
    if SEQUENCES == 0:
        PIECES: tl.constexpr = (EACH * GROUP + ROWS - 1) // ROWS
        query, tile = tl.program_id(0) // PIECES, tl.program_id(0) % PIECES
        seq, count, context, begin, each = share(
            owners, contexts, query, BATCH, tl.num_programs(2), PARTS, WINDOW, TOKENS, EACH
        )
        first, last = seq, context
        # Compiled with a count of 1, whole contexts take longer on an H200 (64 of 1,280 tokens in
        # bf16 90 us, not 84), and parts of them less (8 of 8,192 70, not 79).
        if sums is None:
            first = tl.load(starts + seq)
            count = tl.load(starts + seq + 1) - first
        split += (query - seq) * tl.num_programs(2)
    else:
        number = tl.num_programs(0) - 1 - tl.program_id(0)
        every = tl.arange(0, SEQUENCES)
        begins = tl.load(starts + every, every < BATCH, other=0)
        counts = tl.load(starts + every + 1, every < BATCH, other=0) - begins
        tiles = tl.cdiv(tl.maximum(counts, 0) * GROUP, ROWS)
        seq = tl.minimum(tl.sum((tl.cumsum(tiles, 0) <= number).to(tl.int32), 0), BATCH - 1)
        tile = number - tl.sum(tl.where(every < seq, tiles, 0), 0)
        first = tl.load(starts + seq)
        count = tl.load(starts + seq + 1) - first
        context = tl.load(contexts + seq)
        last = tl.minimum(context, context - count + (tile * ROWS + ROWS - 1) // GROUP + 1)
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(context - count + tile * ROWS // GROUP - WINDOW + 1, 0)
            begin = begin // TOKENS * TOKENS
        each = tl.cdiv(tl.cdiv(last - begin, TOKENS), tl.num_programs(2)) * TOKENS
    low = begin + split * each
    high = tl.minimum(low + each, last)
    if (tile * ROWS < count * GROUP) & ((sums is None) | (SEQUENCES > 0) | (low < high)):
        table = tables + seq.to(tl.int64) * TABLE_STRIDE
        ahead = pages(table, low, high, BLOCK, TOKENS)
        if PDL:  # K and V come from memory while the previous kernel ends
            fetch(k_cache, ahead, low, kv_head, KV_HEADS, K_STEP, K_SIZE, BLOCK, TOKENS)
            fetch(v_cache, ahead, low, kv_head, KV_HEADS, V_STEP, V_SIZE, BLOCK, TOKENS)
        after_previous(PDL)
        rows = tile * ROWS + tl.arange(0, ROWS)
        token = rows // GROUP
        live = token < count
        position = context - count + token
        d = tl.arange(0, D)
        head = (first + token).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + rows % GROUP
        x = tl.load(q + head[:, None] * D + d[None, :], mask=live[:, None], other=0)
        # Codes become fp16, which holds them and takes fewer instructions than bf16; so the largest
        # of a query and of a tile's V scales are taken out, or fp16 might overflow.
        DTYPE: tl.constexpr = x.dtype if K_KIND == "model" or x.dtype == tl.float32 else tl.float16
        unit = tl.full([ROWS], SCALE, tl.float32)
        if K_KIND != "model":
            x32 = x.to(tl.float32)
            if K_KIND == "static":
                x32 *= tl.load(k_scale + kv_head * D + d)[None, :]
            largest = tl.maximum(tl.max(tl.abs(x32), 1), 1e-30)
            x, unit = (x32 / largest[:, None]).to(DTYPE), unit * largest

        most = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D], tl.float32)
        for at in range(low, high, TOKENS):
            t = at + tl.arange(0, TOKENS)
            inside = t < last
            in_blocks = ahead * KV_HEADS + kv_head
            page = of_tokens(in_blocks, TOKENS)
            at_v = v_cache + in_blocks.to(tl.int64) * V_STEP
            ahead = pages(table, at + TOKENS, high, BLOCK, TOKENS)
            row = rows_of(page, t % BLOCK, K_STEP, K_SIZE)
            keys = tl.load(k_cache + row[:, None] + tl.arange(0, K_SIZE), inside[:, None], other=0)
            if K_KIND == "int4" or K_KIND == "dynamic":
                k_grids = k_scale + rows_of(page, t % BLOCK, K_GRID, 1)
            if V_KIND == "int4" or V_KIND == "dynamic":
                v_grids = v_scale + rows_of(page, t % BLOCK, V_GRID, 1)
            if K_KIND == "int4":
                keys = _decoded(keys, k_grids, inside, GROUPS, BLOCK, DTYPE)
            elif K_KIND != "model":
                keys = _float(keys, DTYPE)
            score = tl.dot(x, tl.trans(keys), input_precision="ieee") * unit[:, None]
            if K_KIND == "dynamic":
                score *= tl.load(k_grids, inside, other=0)[None, :]
            seen = t[None, :] <= position[:, None]  # position < last
            if WINDOW > 0:
                seen = seen & (t[None, :] > position[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
            new = tl.maximum(most, tl.max(score, 1))
            base = tl.where(new == float("-inf"), 0.0, new)
            p = tl.exp2(score - base[:, None])
            fade = tl.exp2(most - base)
            total = total * fade + tl.sum(p, 1)
            if V_KIND == "model":
                row = rows_of(page, t % BLOCK, V_STEP, D)
                values = tl.load(v_cache + row[:, None] + d[None, :], inside[:, None], other=0)
                acc = acc * fade[:, None]
                acc += tl.dot(p.to(DTYPE), values, input_precision="ieee")
            else:
                values = tl.trans(lying(at_v, at, V_SIZE, BLOCK, TOKENS))  # p is 0 past the last
                acc = acc * fade[:, None]
                if V_KIND == "int4":
                    values = _decoded(values, v_grids, inside, GROUPS, BLOCK, DTYPE)
                else:
                    values = _float(values, DTYPE)
                if V_KIND == "dynamic":
                    scale = tl.load(v_grids, inside, other=0)
                    most_scale = tl.maximum(tl.max(scale, 0), 1e-30)
                    p = (p * (scale / most_scale)[None, :]).to(DTYPE)
                    acc += tl.dot(p, values, input_precision="ieee") * most_scale
                else:
                    acc += tl.dot(p.to(DTYPE), values, input_precision="ieee")
            most = new
        if V_KIND == "static":
            acc *= tl.load(v_scale + kv_head * D + d)[None, :]
        if sums is None:
            if sinks is not None:
                total += sunk(sinks, kv_head * GROUP + rows % GROUP, most)
            acc = acc / tl.where(total == 0, 1.0, total)[:, None]
            tl.store(out + head[:, None] * D + d[None, :], acc, mask=live[:, None])
        else:
            part = head * PARTS + split
            tl.store(out + part[:, None] * D + d[None, :], acc, mask=live[:, None])
            tl.store(sums + part, total, mask=live)
            tl.store(maxima + part, most, mask=live)
    elif tl.program_id(2) == 0:  # see `_attend_int8`
        after_previous(PDL)


@triton.jit(do_not_specialize=["FIRST", "BATCH", "SPLITS", "PARTS"])
def _combine(
    parts, sums, maxima, contexts, owners, sinks, out, FIRST, HEADS, BATCH, SPLITS, PARTS,
    D: tl.constexpr, WINDOW: tl.constexpr, TOKENS: tl.constexpr, MOST: tl.constexpr,
    EACH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one token: the sum of its parts, each by its share of the probabilities.

    FIRST: the first head of all tokens. MOST: the power of two from PARTS on, of which those have
    parts that had keys. contexts: of single queries; None: all parts are there.
    """
    launch_next(PDL)
    head = tl.program_id(0).to(tl.int64) + FIRST
    s, d = tl.arange(0, MOST), tl.arange(0, D)
    at, there = head * PARTS + s, s < PARTS
    if contexts is not None:
        _, _, context, begin, each = share(
            owners, contexts, tl.program_id(0) // HEADS, BATCH, SPLITS, PARTS, WINDOW, TOKENS, EACH
        )
        there = begin + s * each < context
    after_previous(PDL)
    most = tl.load(maxima + at, there, other=float("-inf"))
    base = tl.max(most, 0)
    base = tl.where(base == float("-inf"), 0.0, base)
    weight = tl.exp2(most - base)
    total = tl.sum(weight * tl.load(sums + at, there, other=0), 0)
    if sinks is not None:
        total += sunk(sinks, head % HEADS, base)
    part = tl.load(parts + at[:, None] * D + d[None, :], there[:, None], other=0)
    acc = tl.sum(part * weight[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + head * D + d, acc)


def refuse(cache: LayerCache) -> str | None:
    """None when these kernels can be used on a cache, or why not."""
    block, dim, both = cache.k.shape[2], cache.head_dim, cache.kinds
    least = 32 if "int4" in both else 16  # the matrix unit takes 16 numbers at a time
    if None in both or ("model" in both and both != ("model", "model")):
        return f"they do not take K that is {both[0]} and V that is {both[1]}"
    if dim < least or dim & (dim - 1):
        return f"the head dimension is {dim}, not a power of two of at least {least}"
    if block & (block - 1):
        return f"the block size is {block}, not a power of two"
    room, size = shared_memory(cache.k.device), cache.k.element_size()
    smallest = Tile(LEAST_TOKENS, 1, 1, LEAST_ROWS)
    if (need := shared_bytes(smallest, dim, max(2, size), head_bytes(cache))) > room:
        return f"a head dimension of {dim} takes {need} bytes of shared memory, and it has {room}"
    return None


def is_wide(cache: LayerCache, steps: Mapping[str, Any]) -> bool:
    """Whether 32 bits hold no places of a cache, as `rows_of` counts them. steps: its `kinds`."""
    step = max(steps["K_STEP"] // cache.k.shape[3], steps["K_GRID"], steps["V_GRID"])
    return cache.k.shape[:2].numel() * step >= 2**31


def attend(
    q: Tensor,
    cache: LayerCache,
    tables: Tensor,
    contexts: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
    window: int | None = None,
    splits: int | None = None,
    out: Tensor | None = None,
    tile: Tile | None = None,
    sinks: Tensor | None = None,
    owners: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Causal attention of queries (T, heads, D) over the cache; `out` (T, heads, D), if given.

    tables (B, blocks) and contexts (B,): int32, each sequence's blocks, and tokens in them.
    starts (B + 1,) int32: where each sequence's queries begin in T; they are the last tokens of its
    context. longest: the most queries of one sequence. splits: programs that share the context of
    a query, or a few; by default as many as fill the GPU. sinks (heads,): scores of one more key of
    each head, whose value is zero. owners (B,) int32: of single queries, the first that has the
    same blocks; those that have lie side by side, each sees a token more than the one before, and
    some of them go through K and V together. None: all have blocks of their own. first: of the
    queries, the first that belongs to a sequence.
    """
    _, kv_heads, block, _ = cache.k.shape
    (_, heads, dim), batch = q.shape, len(tables)
    group = heads // kv_heads
    steps = kinds(cache)
    tables = tables.long() if is_wide(cache, steps) else tables
    single = longest == 1 and attention_int8.suits(group, cache)
    each = 1
    if owners is not None and longest == 1:
        each = together(cache.kinds[0], group, single, batch)
    owners = owners if each > 1 else None
    rows = max(LEAST_ROWS, min(128, next_power_of_2(max(longest, each * (not single)) * group)))
    tile = tile or tile_of(cache.kinds[0], rows)
    tile = fitted(
        tile._replace(rows=tile.rows or rows), dim, q.element_size(), head_bytes(cache),
        shared_memory(q.device),
    )  # fmt: skip
    rows = tile.rows
    if longest > TOGETHER:
        splits = 1
    elif splits is None:
        keys = len(cache.k) * block  # of the longest text that fits
        keys = min(keys, window + tile.tokens) if window else keys
        enough = at_once(tile, head_bytes(cache), max(longest, each) * group, q.device)
        splits = choose_splits(batch * kv_heads, enough, -(-keys // tile.tokens))
    out = torch.empty_like(q) if out is None else out
    most = min(MOST_SPLITS, splits * each)  # parts of a query: rows of a text share their programs
    shape = (*q.shape[:2], most)
    parts, sums, maxima = out, None, None
    if most > 1:
        parts = q.new_empty(*shape, dim, dtype=torch.float32)
        sums, maxima = (q.new_empty(shape, dtype=torch.float32) for _ in range(2))
    caches = q, *planes(cache), tables, contexts
    given = (
        owners, parts, sums, maxima, sinks if most == 1 else None, tables.stride(0), batch, most,
        scale * 1.4426950408889634,
    )  # fmt: skip
    options = {
        "KV_HEADS": kv_heads, "GROUP": group, "D": dim, "BLOCK": block, "WINDOW": window or 0,
        "EACH": each, "TOKENS": tile.tokens, "num_warps": tile.warps, "num_stages": tile.stages,
        **steps, **overlap(q.device),
    }  # fmt: skip
    if single:
        attention_int8._attend_int8[(kv_heads, batch, splits)](*caches, *given, **options)
    else:
        tiles = batch * -(-each * group // rows)
        if longest > 1:  # at most one tile of each sequence is not full
            tiles = -(-len(q) * group // rows) + batch
        sequences = next_power_of_2(max(batch, MOST_PROMPTS)) if longest > 1 else 0
        _attend[(tiles, kv_heads, splits)](
            *caches, starts, *given, ROWS=rows, SEQUENCES=sequences, **options
        )
    if most > 1:
        _combine[((len(q) - first) * heads,)](
            parts, sums, maxima, contexts if longest == 1 else None, owners, sinks, out,
            first * heads, heads, batch, splits, most, D=dim, WINDOW=window or 0,
            TOKENS=tile.tokens, MOST=next_power_of_2(most), EACH=each, num_warps=4,
            **overlap(q.device),
        )  # fmt: skip
    return out


def together(kind: str | None, group: int, single: bool, rows: int) -> int:
    """Tokens of a text that a program takes, of so many rows.

    kind: of K. group: query heads of a K head. single: whether `_attend_int8` takes them, for which
    a wide tile costs more than reading again what lies in the L2, where codes have to be unpacked
    or few programs run.
    """
    if single and (kind == "int4" or rows < LEAST_DRAFTED):
        return 1
    heads = attention_int8.MOST_COLUMNS if single else FEW_ROWS
    return 1 << max(1, min(TOGETHER, heads // group)).bit_length() - 1


def tile_of(kind: str | None, rows: int) -> Tile:
    """The tile for so many queries and a kind of K, on a GPU that has the memory."""
    if rows > LEAST_ROWS:
        return PROMPT if rows == 128 else SEVERAL
    return DECODE if kind == "model" else DECODE_CODES


@cache
def fitted(tile: Tile, dim: int, size: int, head: int, room: int) -> Tile:
    """The tile within `room` bytes of shared memory, or the smallest.

    Fewer keys at a time cost least, then fewer queries, for which the cache is read again; then no
    loads ahead.

    Args:
        tile: With its rows.
        dim: Of a head.
        size: Bytes of a query's number.
        head: Bytes of a token's head of K or V in the cache, with its scales.
        room: Bytes.
    """
    while shared_bytes(tile, dim, size, head) > room:
        if tile.tokens > LEAST_TOKENS:
            tile = tile._replace(tokens=tile.tokens // 2)
        elif tile.rows > FEW_ROWS:
            tile = tile._replace(rows=tile.rows // 2)
        elif tile.stages > 1:
            tile = tile._replace(stages=tile.stages - 1)
        elif tile.rows > LEAST_ROWS:
            tile = tile._replace(rows=tile.rows // 2)
        else:
            break
    return tile


def head_bytes(cache: LayerCache) -> int:
    """Of a token's head of K or V, with its scales, at most."""
    return cache.k.element_size() * cache.k.shape[3] + 8 * cache.groups


def shared_bytes(tile: Tile, dim: int, size: int, head: int) -> int:
    """Of a program, at most: queries, tiles of K and V, probabilities, scales of tokens."""
    tiles = max(1, 2 * (tile.stages - 1))
    keys = tiles * head + tile.rows * size
    return tile.rows * dim * size + tile.tokens * keys + 1024


def at_once(tile: Tile, head: int, heads: int, device: torch.device) -> int:
    """Programs of so many heads of single tokens that a GPU should run at once; see `fitted`."""
    loads = max(1, tile.stages - 1) * tile.tokens * 2 * head
    warps = WARPS if heads <= 4 else WARPS_OF_MANY if heads <= 8 else WARPS_OF_TILES
    return multiprocessors(device) * max(1, min(ON_THEIR_WAY // loads, warps // tile.warps))


def choose_splits(programs: int, enough: int, tiles: int) -> int:
    """Programs that share a context: as many as the GPU runs at once, and no more.

    A power of two, where that is at most a tenth fewer: `_combine` takes the next one's time.

    tiles: of keys, at most, for which there need be no more.
    """
    found = max(1, enough // max(1, programs))
    power = 1 << found.bit_length() - 1
    found = power if 10 * power >= 9 * found else found
    return max(1, min(MOST_SPLITS, tiles, found))


settle(globals())
