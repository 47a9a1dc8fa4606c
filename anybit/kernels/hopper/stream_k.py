"""Equal shares of tiles (stream-K): what a CTA multiplies, and how CTAs' sums of a tile meet.

A CTA has a list of units (tile, K tile). With as many CTAs as tiles, or a divisor of that, it is
whole tiles. Else the tiles that do not divide come first, and their units are divided evenly among
the CTAs that share: CTA c of C begins at unit c / C of all (`tiles.sharers`).

The last CTA to arrive at a tile adds the sums of all in the order of CTAs: results do not change
from run to run. Its own stay in registers: who finds all others there, as the CTA that begins a
tile mostly does, writes none.

Counters are zeros, which every launch leaves as zeros (`cute/counters.py`). Sums lie in a workspace
with two places for each CTA: for the tile that it begins, and for one that began before it.
"""

from collections import namedtuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from anybit.kernels.cute.ptx import count_up, fence, load_l2, peek, store_global
from anybit.kernels.hopper.tiles import EVEN, LEAST_UNITS, MOST_SHARERS

# The list of a CTA of `ctas`: `sharers` CTAs share the `common` tiles that do not divide; of those
# tiles' units, `piece` from `first` on are in this list.
Share = namedtuple("Share", "cta ctas sharers k_tiles common first piece", defaults=[None] * 5)


@cute.jit
def share_of(cta, ctas, tiles, k_tiles):
    """A CTA's list, and the number of its units."""
    common = tiles % ctas  # tiles whose units are divided
    units, sharers = common * k_tiles, ctas
    even = ctas // cutlass.max(common, 1) * common
    if even * 100 >= ctas * EVEN:
        sharers = even
    each = cutlass.min(cutlass.max(k_tiles // LEAST_UNITS, 1), Int32(MOST_SHARERS))
    sharers = cutlass.min(sharers, common * each)
    first, piece = Int32(0), Int32(0)
    if cta < sharers:
        first = cta * units // sharers
        piece = (cta + 1) * units // sharers - first
    share = Share(cta, ctas, sharers, k_tiles, common, first, piece)
    return share, piece + tiles // ctas * k_tiles


@cute.jit
def unit_of(unit, share):
    """(tile, K tile, the list's first unit behind that tile) of a unit of the list."""
    first, piece, k_tiles = share.first, share.piece, share.k_tiles
    tile, kt, end = Int32(0), Int32(0), piece
    if unit < piece:
        tile, kt = (first + unit) // k_tiles, (first + unit) % k_tiles
        end = cutlass.min(piece, unit + (k_tiles - kt))
    else:
        whole = unit - piece
        tile = share.common + share.cta + whole // k_tiles * share.ctas
        kt = whole % k_tiles
        end = unit + (k_tiles - kt)
    return tile, kt, end


@cute.jit
def join(sums, kind, most, work, counters, parts, part, share, tile, start, end, lane):
    """Whether this warp finishes its part of a tile, as an Int32; then `sums` are those of all K.

    Args:
        sums: This lane's, a multiple of 4; of K tiles `start` to `end`.
        kind: Their type.
        most: Of them / 4, that a lane loads before it adds them.
        work: Address of the workspace: parts * 32 lanes' sums for each of two places of a CTA.
        counters: Address of one word for each part of a tile.
        parts: Of a tile, and `part` that of this warp.
    """
    cta, _, sharers, k_tiles, common, _, _ = share
    whole = Int32(1)
    if (start > 0) | (end < k_tiles):
        chunks = cutlass.const_expr(cute.size(sums) // 4)
        place = cutlass.const_expr(parts * chunks * 512)
        counter = Int64(counters) + (tile * parts + part) * 4
        at = Int64(work) + (part * (chunks * 512) + lane * 16)
        # The CTAs of the tile's first and last unit: the largest c with c / C up to there.
        low = ((tile * k_tiles + 1) * sharers - 1) // (common * k_tiles)
        high = ((tile + 1) * k_tiles * sharers - 1) // (common * k_tiles)
        before = Int32(0)
        if lane == 0:
            before = peek(counter)
        before = cute.arch.make_warp_uniform(before)
        if before < high - low:  # others are still at work, and one of them may be the last
            to = at + Int64(cta * 2 + (1 if start == 0 else 0)) * place
            for i in cutlass.range_constexpr(chunks):
                store_global(to + i * 512, [sums[4 * i + j] for j in range(4)])
            fence()
            cute.arch.sync_warp()
            if lane == 0:
                before = count_up(counter)
            before = cute.arch.make_warp_uniform(before)
        whole = Int32(0)
        if before == high - low:
            whole = Int32(1)
            fence()
            if lane == 0:
                store_global(counter, [Uint32(0)])
            lower = cute.make_rmem_tensor((4 * most,), kind)
            for b in cutlass.range_constexpr(0, chunks, most):
                here = cutlass.const_expr(min(most, chunks - b))
                lower.fill(0)
                for c in cutlass.range(low, cta, unroll=1):
                    there = at + Int64(c * 2 + (1 if c == low else 0)) * place
                    found = []
                    for i in cutlass.range_constexpr(here):
                        found += load_l2(there + (b + i) * 512, 4, kind)
                    for i in cutlass.range_constexpr(len(found)):
                        lower[i] = lower[i] + found[i]
                for i in cutlass.range_constexpr(4 * here):
                    sums[4 * b + i] = lower[i] + sums[4 * b + i]
                for c in cutlass.range(cta + 1, high + 1, unroll=1):
                    there = at + Int64(c * 2) * place
                    found = []
                    for i in cutlass.range_constexpr(here):
                        found += load_l2(there + (b + i) * 512, 4, kind)
                    for i in cutlass.range_constexpr(len(found)):
                        sums[4 * b + i] = sums[4 * b + i] + found[i]
    return whole
