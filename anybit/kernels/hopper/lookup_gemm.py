"""The main loop's look-ups, in CuTe DSL: cells to shared memory, centroids to registers.

`lookup.py` says what lies where.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from anybit.kernels.cute import factors
from anybit.kernels.cute.cells import CELL, ROWS
from anybit.kernels.cute.decode import K_TILE
from anybit.kernels.cute.ptx import (
    half2,
    load_global,
    load_matrices,
    load_shared,
    store_shared,
)
from anybit.kernels.hopper.barriers import (
    add_code,
    arrive_after_copies,
    copy_async,
    insert_code,
    load_bytes,
)
from anybit.kernels.hopper.codebook_tiles import TABLE, WINDOW
from anybit.kernels.hopper.gemm import CONSUMERS, Gemm
from anybit.kernels.hopper.lookup import TILES_OF_BLOB, LookupDecoder
from anybit.kernels.hopper.ptx import bulk_prefetch
from anybit.kernels.hopper.tile import Kernel

VECTOR = 16  # bytes of a vector's codes, for 16 rows
CHUNK = 8  # columns whose words the four threads of a quad hold in one register each
PARTS = K_TILE // CHUNK


class LookupGemm(Gemm):
    def __init__(self, kernel: Kernel):
        super().__init__(kernel)
        assert isinstance(kernel.decoder, LookupDecoder)
        assert self.blocks == 1
        self.lookup, self.cells = kernel.decoder, kernel.decoder.cells
        self.arrivals = 1 + 32  # those of `arm`
        self.tokens_first = True
        self.joined = 4  # as registers allow

    def plane(self, i: int) -> int:
        """Where codebook i begins in the table."""
        return i // 2 * TABLE + i % 2 * 128

    def entry(self, i: int) -> int:
        """Bytes from one of its centroids to the next: two codebooks share an entry."""
        return 256 if i ^ 1 < self.cells.m else 128

    @cute.jit
    def begin(self, shared, book, thread):
        """Fill the table. It lies first in shared memory, so its address is known."""
        v, m = self.cells.v, self.cells.m
        to = Int32(shared.table.data_ptr().toint()) + thread % 8 * 16
        for c in cutlass.range_constexpr(m):
            plane, size = const_expr(self.plane(c)), const_expr(self.entry(c))
            for i in cutlass.range_constexpr(0, 256, CONSUMERS // 8):
                entry = i + thread // 8
                source = Int64(book.toint()) + (c * 256 + entry) * (2 * v)
                if const_expr(v == 16):  # columns j and j + 8, which one load of a lane brings
                    low = load_global(source + thread % 2 * 8, 2, Int32(1))
                    high = load_global(source + (16 + thread % 2 * 8), 2, Int32(1))
                    words = [low[0], high[0], low[1], high[1]]
                else:
                    words = load_global(source, v // 2, Int32(1)) * (8 // v)
                store_shared(to + entry * size + plane, words)
        cute.arch.barrier(barrier_id=3, number_of_threads=CONSUMERS)

    @cute.jit
    def arm(self, barrier):
        """For every stage: a lane arrives when its copies of weights so far are there."""
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.token_bytes)
        arrive_after_copies(barrier.toint())

    @cute.jit
    def load_weights(self, w, to, barrier, row_blob, k, k_tiles):
        """Start the weights' copies, 16 bytes a lane, and arm the stage's barrier for all.

        The bytes of 16 rows and a K tile lie in m + 1 places, too small for the copy engine: 24
        bulk copies of 256 bytes took 2000 cycles. Two K tiles in flight do not hide the memory's
        latency: what comes next is called into the L2.
        """
        d, cells = self.lookup, self.cells
        lane = cute.arch.lane_idx()
        row_stride = (k_tiles + (d.k_tiles - 1)) // d.k_tiles * cells.block_bytes
        part = k % d.k_tiles
        source = w.toint() + Int64(row_blob * TILES_OF_BLOB) * row_stride
        if const_expr(self.slots == 2):
            later = k + (1 + d.k_tiles)  # the last piece of a block that the next stages need
            if (later < k_tiles) & (lane < TILES_OF_BLOB):
                share = const_expr(cells.block_bytes // d.k_tiles)
                at = (later * cells.block_bytes // d.k_tiles) // 16 * 16
                bulk_prefetch(source + lane * row_stride + at, (share + 15) // 16 * 16)
        lanes = const_expr(32 // TILES_OF_BLOB)  # of a row tile
        tile, first = lane // lanes, lane % lanes * 16
        source += tile * row_stride + k // d.k_tiles * cells.block_bytes + first
        to += tile * d.tile_bytes + first
        codes = source + part * d.piece
        for book in cutlass.range_constexpr(cells.m):
            for at in cutlass.range_constexpr(0, d.piece, 16 * lanes):
                copy_async(to, codes, book * d.piece + at, book * CELL + at)
        scales = source + part * cells.groups // d.k_tiles * (2 * ROWS)
        for at in cutlass.range_constexpr(0, 2 * ROWS * d.groups, 16 * lanes):
            if first + at < 2 * ROWS * d.groups:
                copy_async(to, scales, cells.m * d.piece + at, cells.m * CELL + at)
        self.arm(barrier)

    def read_words(self, shared: Any, group: Any, t: Any, slot: Any) -> tuple:
        """((codes of every codebook, lane's place in an entry), scales).

        A word has the scales of rows g and g + 8 for a group in the K tile.
        """
        d = self.lookup
        lane = t % 32
        ring = Int32(shared.w.data_ptr().toint()) + slot * self.blob
        tile = ring + (group * 4 + t // 32) * d.tile_bytes
        codes = [self.read_codes(tile + i * d.piece, lane) for i in range(self.cells.m)]
        at = tile + self.cells.m * d.piece + lane // 4 * 4
        step = 1
        if d.groups > PARTS:  # vectors of four columns, of which a quad has two side by side
            at, step = at + lane % 4 // 2 * (2 * ROWS), 2
        scales = [load_shared(at, 1, 2 * ROWS * i, True)[0] for i in range(0, d.groups, step)]
        place = {4: lane * 4, 8: lane % 8 * 16, 16: lane % 16 * 8}[self.cells.v]
        table = Int32(shared.table.data_ptr().toint()) - WINDOW
        return (codes, Uint32(table) | Uint32(place)), scales

    def read_codes(self, cell: Any, lane: Any) -> list:
        """A K tile's codes of one codebook: (word, its byte for row g), the next for row g + 8."""
        v = self.cells.v
        if v == 8:  # of row g = lane % 8, and of every fourth vector, for `load_matrices`
            address = cell + lane // 8 * VECTOR + lane % 8 * 2
            return [(load_bytes(address, i * VECTOR), 0) for i in range(0, K_TILE // v, 4)]
        # `ldmatrix` hands a lane two rows of 16 bytes, which are vectors here; the four lanes of a
        # quad name the same ones, or those of their columns.
        vector = lane // 8 * 2 + lane % 2
        step = 8 * VECTOR
        if v == 4:
            vector, step = vector * 2 + lane % 8 // 4, 2 * step
        loads = [
            load_matrices(cell + vector * VECTOR, i, True)
            for i in range(0, self.lookup.piece, step)
        ]
        return [(word, byte) for load in loads for word in load for byte in (0, 2)]

    def decode_half(
        self, words: Any, scales: Any, registers: Any, half: int, block: int, first: int
    ) -> None:
        """64 columns: codes -> A registers of their WGMMAs, from `first` on."""
        d = self.lookup
        codes, place = words
        each = {4: 1, 8: 4, 16: 2}[self.cells.v]  # registers of a row that a look-up brings
        span = PARTS // len(scales)  # parts that share a scale
        here = range(half * PARTS // 2 // span, -(-(half + 1) * PARTS // 2 // span))
        pairs = {i: factors.pair(scales[i], d.operand) for i in here}
        for at in range(0, K_TILE // 2 // CHUNK, each):
            chunk = half * (K_TILE // 2 // CHUNK) + at
            for row in range(2):
                totals: list = []
                for i, of_book in enumerate(codes):
                    word, byte = of_book[chunk // each]
                    find = insert_code if self.entry(i) == 256 else add_code
                    found = self.centroid(find(word, place, byte + row), i)
                    if totals:
                        both = zip(totals, found, strict=True)
                        found = [half2("add.rn", d.operand, pair) for pair in both]
                    totals = found
                for j, total in enumerate(totals):
                    scale = pairs[(chunk + j) // span][row]
                    register = half2("mul.rn", d.operand, (total, scale))
                    registers[(0, row, (at + j) % 2), 0, first + (at + j) // 2] = register

    def centroid(self, address: Any, i: int) -> list:
        """The lane's words of centroids of codebook i.

        Centroids of 16 bytes are the rows of an operand's fragment: `ldmatrix` hands every lane its
        part of those that eight lanes look up.
        """
        plane = WINDOW + self.plane(i)
        if self.cells.v == 8:
            return load_matrices(address, plane)
        return load_shared(address, 1 if self.cells.v == 4 else 2, plane)
