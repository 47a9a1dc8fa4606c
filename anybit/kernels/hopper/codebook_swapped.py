"""Codebook weights times 9 to 16 tokens: centroids are the second operand of a product.

As `codebook.py`, with the operands the other way round: tokens, which a warp keeps in registers,
are the 16 rows of an m16n8k16 product, and a look-up brings both registers of its B operand: four
columns of one row. So a lane loads 8 bytes at once, where an A operand takes a load for each word:
it wants words of two rows side by side, and to bring them there costs moves.
"""

from typing import Any

import cutlass
import cutlass.cute as cute

from anybit.kernels.cute import factors
from anybit.kernels.cute.ptx import halves_to_float, load_shared, mma, store_shared
from anybit.kernels.hopper.barriers import insert_code
from anybit.kernels.hopper.codebook import Codebook
from anybit.kernels.hopper.codebook_tiles import TABLE


class Swapped(Codebook):
    copied = {4: 2, 8: 4, 16: 4}

    @cute.jit
    def leave(self, acc, part, m, g, t):
        """Write a warp's sums."""
        for i in cutlass.range_constexpr(self.tokens // 8):
            token = i * 8 + g
            if token < m:
                for h in cutlass.range_constexpr(2):
                    at = 4 * (i // 2 * 2 + h) + i % 2 * 2
                    store_shared(part + self.spot(8 * h + 2 * t, token), [acc[at], acc[at + 1]])

    def spot(self, row: Any, token: Any) -> Any:
        """Where a sum lies in a part: free of bank conflicts.

        For a warp that writes 4 tokens x 8 rows at a time, and for one that reads 2 x 16.
        """
        return (token * 16 + ((row // 8) ^ (token // 2 % 2)) * 8 + row % 8) * 4

    def scales_of_rows(self, scales: Any, g: Any, t: Any) -> list:
        """For every group a word for rows 2 t and 2 t + 8, and one for the next two."""
        groups = range(self.cells.groups)
        return [word for i in groups for word in load_shared(scales + t * 8, 2, 32 * i, True)]

    def scales_of_sums(self, scales: list, group: int) -> list:
        """Rows 2 t + 8 n and the next one, of each of two tokens."""
        even, odd = (halves_to_float(scales[2 * group + r]) for r in range(2))
        return [[even[n], odd[n]] * 2 for n in range(2)]

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
