"""`lookup.py`'s part of the main loop, in CuTe DSL: cells to shared memory, look-ups to registers."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from anybit.kernels.hopper.cells import CELL, ROWS, TABLE, WINDOW
from anybit.kernels.hopper.decode import K_TILE
from anybit.kernels.hopper.fragments import (
    bulk_copy,
    halves_to_float,
    insert_code,
    load_bytes,
    load_global,
    load_shared,
    store_shared,
)
from anybit.kernels.hopper.gemm import Gemm
from anybit.kernels.hopper.lookup import TILES_OF_BLOB, LookupDecoder
from anybit.kernels.hopper.ptx import half2, pack2, prmt
from anybit.kernels.hopper.tiles import Kernel

CONSUMERS = 256  # threads
CHUNK = 8  # columns whose words the four threads of a quad hold in one register each


class LookupGemm(Gemm):
    def __init__(self, kernel: Kernel):
        super().__init__(kernel)
        assert isinstance(kernel.decoder, LookupDecoder)
        assert self.blocks == 1
        self.lookup, self.cells = kernel.decoder, kernel.decoder.cells

    @cute.jit
    def begin(self, shared, book, thread):
        """Fill the table. It lies first in shared memory, so its address is known."""
        v, m = self.cells.v, self.cells.m
        to = Int32(shared.table.data_ptr().toint()) + thread % 8 * 16
        n = const_expr(min(v // 2, 4))  # words that a store repeats to fill 16 bytes
        half = thread % 8 // 4 * 16 if const_expr(v == 16) else Int32(0)
        for c in cutlass.range_constexpr(m):
            plane = const_expr(c // 2 * TABLE + c % 2 * 128)
            for i in cutlass.range_constexpr(0, CELL // 2, CONSUMERS // 8):
                entry = i + thread // 8
                source = Int64(book.toint()) + (c * 256 + entry) * (2 * v) + half
                words = load_global(source, n, Int32(1))
                store_shared(to + entry * 256 + plane, words * (4 // n))
        cute.arch.barrier(barrier_id=3, number_of_threads=CONSUMERS)

    @cute.jit
    def load_weights(self, w, s_w, full, stage, row_blob, k, k_tiles):
        """Arm the stage's barrier, and start the copies: a lane takes every 32nd."""
        d, cells = self.lookup, self.cells
        lane = cute.arch.lane_idx()
        total = const_expr(self.blob + self.tokens * K_TILE * self.b.width // 8)
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, total)
        pieces = const_expr(cells.m + 1 if d.k_tiles > 1 else 1)
        block, part = k // d.k_tiles, k % d.k_tiles
        tile, first = lane % TILES_OF_BLOB, lane // TILES_OF_BLOB
        row_tile = row_blob * TILES_OF_BLOB + tile
        source = w.toint() + (
            Int64(row_tile) * (k_tiles // d.k_tiles) + block
        ) * cells.block_bytes
        to = s_w + stage * self.blob + tile * d.tile_bytes
        for i in cutlass.range_constexpr(0, pieces, 32 // TILES_OF_BLOB):
            piece = first + i
            if piece < pieces:
                if const_expr(pieces == 1):
                    bulk_copy(to, source, Int32(d.tile_bytes), (full + stage).toint())
                else:
                    scales = Int32(piece == cells.m)
                    each = d.piece + scales * (2 * ROWS * d.groups - d.piece)
                    offset = part * d.piece
                    if scales == 1:
                        offset = part * cells.groups // d.k_tiles * (2 * ROWS)
                    bulk_copy(
                        to + piece * d.piece,
                        source + (piece * CELL + offset),
                        each,
                        (full + stage).toint(),
                    )

    def read_words(self, shared: Any, group: Any, t: Any, stage: Any) -> tuple:
        """(address of the codes of rows g and g + 8 of this warp, scales of its groups)."""
        d = self.lookup
        lane = t % 32
        g, quarter = lane // 4, lane % 4
        tile = Int32(shared.w.data_ptr().toint()) + stage * self.blob
        tile += (group * 4 + t // 32) * d.tile_bytes
        codes = tile + g * 2 + (quarter // 2 * 16 if self.cells.v == 4 else 0)
        entries = []
        for i in range(d.groups):
            at = self.cells.m * d.piece + 2 * ROWS * i
            both = load_shared(tile + g * 4, 1, at, True)[0]
            if d.operand == "float16":
                entries.append((prmt(both, 0x1010), prmt(both, 0x3232)))
            else:
                entries.append(tuple(pack2(f, f, d.operand) for f in halves_to_float(both)))
        # A lane's place in an entry: its copy, and there its word of a centroid.
        place = lane * 4 if self.cells.v < 16 else lane % 16 * 4
        table = Int32(shared.table.data_ptr().toint()) - WINDOW
        return (codes, Uint32(table) | Uint32(place)), entries

    def decode_half(self, words: Any, grid: Any, registers: Any, half: int) -> None:
        """64 columns: codes -> A registers of their WGMMAs."""
        d, v = self.lookup, self.cells.v
        codes, place = words
        for chunk in range(K_TILE // 2 // CHUNK):
            column = half * (K_TILE // 2) + chunk * CHUNK
            vector = column // v
            pairs = [load_bytes(codes, i * d.piece + vector * 16) for i in range(self.cells.m)]
            scales = grid[column * d.groups // K_TILE]
            for row in range(2):
                total = None
                for i, pair in enumerate(pairs):
                    plane = WINDOW + i // 2 * TABLE + i % 2 * 128
                    plane += column % v // CHUNK * 64
                    word = load_shared(insert_code(pair, place, row), 1, plane)[0]
                    total = word if total is None else half2("add.rn", d.operand, (total, word))
                register = half2("mul.rn", d.operand, (total, scales[row]))
                registers[(0, row, chunk % 2), 0, half * self.per_half + chunk // 2] = register
