"""Codebook weights times 9 to 32 tokens: centroids are the second operand of a product.

As `codebook.py`, with the operands the other way round: tokens, which a warp keeps in registers,
are the 16 rows of an m16n8k16 product, and a look-up brings both registers of its B operand: four
columns of one row. So a lane loads 8 bytes at once, where an A operand takes a load for each word:
it wants words of two rows side by side, and to bring them there costs moves.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from anybit.kernels.cute import factors
from anybit.kernels.cute.ptx import halves_to_float, load_shared, store_shared
from anybit.kernels.hopper.codebook import Codebook
from anybit.kernels.hopper.codebook_tiles import MET, TABLE
from anybit.kernels.hopper.fragments import arrive, insert_code, mma


class Swapped(Codebook):
    copied = {4: 2, 8: 4, 16: 4}

    @cute.jit
    def share(self, base, acc, it, place, m):
        """Put this warp's sums of a tile where its CTA's meet."""
        _, _, _, _, warp, lane = place
        g, t = lane // 4, lane % 4
        part = base + self.sums_at + (it % 2 * self.warps + warp) * self.part
        eights = const_expr(self.tokens // 8)
        for u in cutlass.range_constexpr(self.deep * eights):
            token, r = u % eights * 8 + g, const_expr(u // eights)
            if token < m:
                for h in cutlass.range_constexpr(2):
                    at = const_expr(4 * (u // 2 * 2 + h) + u % 2 * 2)
                    to = part + self.spot(8 * h + 2 * t, token) + r * self.of_tile
                    store_shared(to, [acc[at], acc[at + 1]])
        cute.arch.sync_warp()
        if lane == 0:
            arrive(base + (MET + it % 2 * 8))

    def spot(self, row: Any, token: Any) -> Any:
        """Where a sum lies in a part: free of bank conflicts.

        For a warp that writes 4 tokens x 8 rows at a time, and for one that reads 2 x 16.
        """
        return (token * 16 + ((row // 8) ^ (token // 2 % 2)) * 8 + row % 8) * 4

    def scales_of_rows(self, scales: Any, g: Any, t: Any) -> list:
        """For every group a word for rows 2 t and 2 t + 8, and one for the next two."""
        groups = range(self.cells.groups)
        return [word for i in groups for word in load_shared(scales + t * 8, 2, 32 * i, True)]

    def multiply(
        self, words: list, acc: Any, vectors: list, lookup: Any, missing: Any, j: int, first: int
    ) -> None:
        """acc += scale * centroids x, from `first` on, for every block of chunk j."""
        groups = 1 if self.fine else self.cells.groups
        each = 4 // groups  # eights of vectors that share a scale
        for u, (codes, scales) in enumerate(words):
            here = Uint32(0) - Uint32(Int32(missing + u < 0))  # behind the end of K lie no scales
            scales = [word & here for word in scales]
            for group in range(groups):
                sums = [[Float32(0.0)] * 4 for _ in range(self.tokens // 8)]
                for i in range(group * each, (group + 1) * each):
                    tokens = vectors[j * self.spec.blocks + u][i]
                    scaled = factors.of_eight(scales, i, self.dtype) if self.fine else []
                    for c in range(self.cells.m):
                        self.add(codes[c][i], c, tokens, sums, lookup, scaled)
                rows = []
                if not self.fine:
                    rows = [halves_to_float(scales[2 * group + r]) for r in range(2)]
                for n, some in enumerate(sums):
                    for r in range(4):
                        more = some[r] * rows[r % 2][n % 2] if rows else some[r]
                        acc[first + 4 * n + r] = acc[first + 4 * n + r] + more

    def add(self, word: Any, c: int, tokens: list, sums: list, lookup: Any, scaled: list) -> None:
        """sums += the products of the four codes in a word: two vectors of rows g and g + 8.

        sums: [16 tokens][rows g or g + 8]. scaled: by vector, the factors of the two rows; none
        where sums are multiplied.
        """
        n = self.words
        for s in range(2):
            for h in range(2):
                found = self.look_up(insert_code(word, lookup, 2 * s + h), c)
                if scaled:
                    found = factors.times(found, scaled[s][h], self.dtype)
                for p in range(0, n, 2):
                    at = s * n + p
                    for i in range(0, len(tokens), 2):
                        low, high = tokens[i], tokens[i + 1]
                        a = [low[at], high[at], low[at + 1], high[at + 1]]
                        sums[i + h] = mma(sums[i + h], a, found[p : p + 2], self.dtype)

    def look_up(self, address: Any, c: int) -> list:
        """The words of a centroid of codebook c, at its entry's address."""
        if self.cells.v == 16:
            return super().look_up(address, c)
        at = self.spec.table_at + c // 2 * TABLE + c % 2 * 128
        return load_shared(address, self.words, at)
