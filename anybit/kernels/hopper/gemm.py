"""The Hopper main loop, in CuTe DSL: Y^T = W X^T with W decoded in registers.

One producer warp keeps a ring of K tiles full: packed weights and their scales as one bulk copy for
128 rows x 128 columns, activations by TMA into swizzled shared memory. Two consumer warpgroups
decode their own A fragments and multiply them at once, so that the decoding of one warpgroup runs
under the products of the other (LiquidGEMM's implicit fine-grained pipeline, section 5.1). A tile's
K range may be split over the CTAs of a cluster; their sums meet in shared memory, in a fixed order.
Or CTAs have equal shares, and sums of tiles that they share meet in memory (`stream_k.py`).

Launches may overlap the previous kernel (programmatic dependent launch): weights are fetched at
once, and everything else after that kernel has finished. The consumers of every CTA wait for it,
with a tile or without. So a kernel ends after all before it: of two launches of one product, the
second's end is both's, and one has counters and workspace when the other is done with them.
"""

from collections import namedtuple
from math import gcd
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.common import OperandMajorMode

from anybit.kernels.cute.decode import K_TILE
from anybit.kernels.cute.jit import Compiled, compile_program
from anybit.kernels.cute.lang import Table
from anybit.kernels.cute.launch import GemmArguments
from anybit.kernels.cute.pack import ROW_MULTIPLE, ROWS
from anybit.kernels.cute.ptx import TYPES
from anybit.kernels.cute.table import load, store
from anybit.kernels.hopper import tile_order
from anybit.kernels.hopper.epilogue import Epilogue
from anybit.kernels.hopper.launch import ARCHITECTURE
from anybit.kernels.hopper.producer import Producer
from anybit.kernels.hopper.ptx import arrive_if
from anybit.kernels.hopper.stream_k import Share, join, share_of
from anybit.kernels.hopper.tile import Kernel
from anybit.kernels.hopper.tile_order import Order, Problem, Turns
from anybit.kernels.hopper.tiles import EXPERT_WORDS
from anybit.kernels.hopper.weight_words import Words

# Registers of a producer and a consumer thread when four producer warps give theirs away.
CONSUMERS = 256  # threads
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232


# Who a thread is: its warpgroup and warp, the 16 of 128 channels that the warp finishes, its CTA in
# the cluster, its number in the warpgroup.
Place = namedtuple("Place", "group warp slice_of_16 rank t")


# Registers of a warpgroup: `registers` are the words of the operand, `total` all groups' sums.
Fragments = namedtuple("Fragments", "mma operand registers x_fragment acc total")


# Where a warpgroup reads next: a stage, its barrier's phase, the slot of a K tile's weights.
RingAt = namedtuple("RingAt", "stage phase slot")


class Gemm(Order, Producer, Words, Epilogue):
    """The main loop of a kernel; what is not a parameter is known when it is compiled."""

    def __init__(self, kernel: Kernel):
        decoder, tile = kernel.decoder, kernel.tile
        self.decoder, self.tile = decoder, tile
        self.out, self.grouped, self.piece = kernel.output, kernel.grouped, kernel.piece
        self.tokens, self.stages = tile.tokens, tile.stages
        self.split = tile.split
        self.blocks = tile.rows // ROWS  # blobs of a K tile
        self.columns, self.slots = tile.columns, tile.slots  # of a stage; K tiles of weights
        self.parts = K_TILE // tile.columns  # stages of a K tile
        self.batches = 2 * self.blocks // self.parts  # of products of a stage
        self.near = tile_order.NEAR // tile.tokens if tile.tokens >= 128 else 0  # token tiles
        self.table_bytes, self.tables = decoder.table_bytes, ()
        self.a, self.b = TYPES[decoder.operand], TYPES[kernel.activation]
        self.quantized = kernel.activation in ("int8", "float8_e4m3fn")
        self.products = Int32 if kernel.activation == "int8" else Float32
        self.joins = kernel.activation == "int8" and not kernel.grouped
        self.acc = Float32 if decoder.sums else self.products
        self.integer = self.acc is Int32
        self.k_mma = 256 // self.b.width  # columns of one WGMMA
        self.per_half = K_TILE // 2 // self.k_mma
        self.steps = tile.columns // self.k_mma  # WGMMAs of a stage and block
        # WGMMAs whose sums have one scale.
        self.per_group = 2 * self.per_half // decoder.entries if decoder.sums else 0
        self.token_bytes = self.tokens * tile.columns * self.b.width // 8  # of a stage
        self.words = 2 * decoder.bits  # code words of a thread and K tile
        self.whole = self.words // 4  # chunks of 4 words; 2 words may remain
        self.grid_words = decoder.entries * decoder.grid_words
        self.blob = decoder.blob_bytes
        # Warps of a CTA that finish outputs, 16 channels each; the last CTA may have fewer.
        self.finishers = -(-8 // tile.split)
        self.arrivals = 1  # of the producer's threads, when a stage is loaded
        crowded = tile.ctas > 1 or tile.tokens == 192
        self.joined = 2 if crowded else 8  # chunks of sums, as registers allow
        self.batch = gcd(tile.tokens, 32)  # tokens that a warp stages for its stores at a time

    def compile(self) -> Compiled:
        """For sm_90a."""
        out = TYPES[self.out]
        fp32, word = (Float32, 4), (Int32, 4)
        pointers = {
            "x": (self.b, 16),
            "w": (Uint8, 128),
            "row_scale": fp32,
            "row_zero": word,
            "table": word,
            "token_scale": fp32,
            "token_sum": word,
            "bias": (out, 2),
            "y": (out, 16),
            "starts": word,
            "work": (Float32, 16),
            "counters": word,
            "pairs": word,
        }
        return compile_program(self, GemmArguments, pointers, ARCHITECTURE)

    def mma_op(self) -> Any:
        shape = (64, self.piece, self.k_mma)
        where = (warpgroup.OperandSource.RMEM, OperandMajorMode.K, OperandMajorMode.K)
        if self.products is Int32:
            return warpgroup.MmaI8Op(self.a, self.b, Int32, shape, *where)
        if self.quantized:
            return warpgroup.MmaF8Op(self.a, self.b, Float32, shape, *where)
        return warpgroup.MmaF16BF16Op(self.a, Float32, shape, *where)

    @cute.jit
    def __call__(self, given: GemmArguments, grid: Int32, stream: cuda.CUstream):
        m, k = given.m, given.k
        k_known = cute.assume(k, 128 // self.b.width)  # rows of whole 16 bytes
        x_all = cute.make_tensor(given.x, cute.make_layout((m, k_known), stride=(k_known, 1)))
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.b)
        shape = self.tokens, self.columns, self.stages
        x_layout = cute.tile_to_shape(atom, shape, order=(0, 1, 2))
        x_copy, x_tma = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            x_all,
            cute.slice_(x_layout, (None, None, 0)),
            (self.tokens, self.columns),
        )
        # Two warpgroups multiply.
        mma = cute.make_tiled_mma(cute.make_mma_atom(self.mma_op()), (2, 1, 1))

        @cute.struct
        class Shared:
            table: cute.struct.Align[cute.struct.MemRange[Uint8, self.table_bytes], 128]
            full: cute.struct.MemRange[Int64, self.stages]
            empty: cute.struct.MemRange[Int64, self.stages]
            ahead: cute.struct.MemRange[Int64, 1]
            x: cute.struct.Align[cute.struct.MemRange[self.b, cute.cosize(x_layout)], 1024]
            w: cute.struct.Align[
                cute.struct.MemRange[Uint8, self.slots * self.blob * self.blocks], 128
            ]
            outputs: cute.struct.Align[cute.struct.MemRange[Uint8, 8 * 48 * self.batch], 128]
            token: cute.struct.Align[cute.struct.MemRange[Int32, 2 * 2 * self.tokens], 16]
            starts: cute.struct.MemRange[Int32, EXPERT_WORDS if self.grouped else 1]

        self.shared = Shared
        self.kernel(x_copy, x_tma, given._replace(x=None), mma, x_layout).launch(
            grid=(grid, 1, 1),
            block=(self.tile.threads, 1, 1),
            cluster=(self.split, 1, 1) if self.split > 1 else None,
            min_blocks_per_mp=self.tile.ctas,
            preferred_smem_carveout=100,  # given, or the DSL asks the driver
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        x_copy: cute.CopyAtom,
        x_tma: cute.Tensor,
        given: GemmArguments,
        mma: cute.TiledMma,
        x_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = cutlass.memory.SmemAllocator().allocate(self.shared)
        full, empty = shared.full.data_ptr(), shared.empty.data_ptr()
        s_x = shared.x.get_tensor(x_layout.outer, swizzle=x_layout.inner)

        if warp == 8:
            cpasync.prefetch_descriptor(x_copy)
            if thread % 32 < self.stages:
                cute.arch.mbarrier_init(full + thread % 32, self.arrivals)
                cute.arch.mbarrier_init(empty + thread % 32, 256)  # all consumers
            if const_expr(self.tile.late) and thread % 32 == 0:
                cute.arch.mbarrier_init(shared.ahead.data_ptr(), 128)  # the first warpgroup
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()

        # A CTA takes every so many tiles, or a list of units; or a cluster splits a tile along K.
        k_tiles = (given.k + (K_TILE - 1)) // K_TILE
        table = cute.make_tensor(shared.starts.data_ptr(), cute.make_layout(EXPERT_WORDS))
        m_tiles = (given.m + (self.tokens - 1)) // self.tokens
        if const_expr(self.grouped):
            cute.arch.griddepcontrol_wait()
            m_tiles = self.count_tiles(given.starts, table, given.experts, thread)
        # What does not change from tile to tile.
        rows = const_expr(self.tile.rows)
        n_tiles = (given.n + (rows - 1)) // rows
        expert_tiles = (given.n + (ROW_MULTIPLE - 1)) // ROW_MULTIPLE
        problem = Problem(given, table, k_tiles, m_tiles, n_tiles, expert_tiles)
        rank, first, last = cta % self.split, cta // self.split, n_tiles * m_tiles
        share = Share(cta, ctas)
        if const_expr(self.split > 1):
            k_first = k_tiles * rank // self.split
            k_last = k_tiles * (rank + 1) // self.split
        else:
            k_first, k_last = Int32(0), k_tiles
        if const_expr(self.tile.stream_k):
            share, last = share_of(cta, ctas, n_tiles * m_tiles, k_tiles)
            first = Int32(0)
        turns = Turns(first, last, share, k_first, k_last)

        if warp >= 8:
            if const_expr(self.tile.wide):
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 8:
                s_w = shared.w.data_ptr().toint()
                self.produce(x_copy, x_tma, s_x, s_w, full, empty, problem, turns)
            if const_expr(self.split > 1):  # as in `exchange`
                self.meet()
                self.meet()
        else:
            if const_expr(self.tile.wide):
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.begin(shared, given.table, thread)
            cute.arch.griddepcontrol_wait()
            self.consume(mma, s_x, shared, problem, turns, rank, thread)

    def begin(self, shared: Any, table: Any, thread: Any) -> None:
        """What consumers do before the previous kernel has finished."""
        if self.table_bytes:
            to = Int32(shared.table.data_ptr().toint())
            self.tables = (Table(to),)
            store(to, load(table.toint(), thread, CONSUMERS), thread, CONSUMERS)
            cute.arch.barrier(barrier_id=3, number_of_threads=CONSUMERS)

    @cute.jit
    def consume(self, mma, s_x, shared, problem, turns, rank, thread):
        """Two warpgroups: 64 rows each of every 128, all tokens of the tile."""
        group = cute.arch.make_warp_uniform(thread // 128)
        t = thread % 128
        rows = self.tile.rows
        operand = mma.make_fragment_A(mma.partition_shape_A((ROWS, K_TILE)))
        registers = cute.recast_tensor(operand, Uint32)
        x_fragment = mma.make_fragment_B(mma.get_slice(thread).partition_B(s_x))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((rows, self.tokens)), self.products)
        total = acc  # or what sums of a group are added to, times their scales
        if const_expr(self.decoder.sums):
            total = cute.make_rmem_tensor_like(acc, self.acc)
        mma.set(warpgroup.Field.ACCUMULATE, True)

        warp = group * 4 + t // 32
        slice_of_16 = warp  # the 16 channels of every 128 that this warp finishes
        if const_expr(self.split > 1):
            slice_of_16 = cutlass.min(rank * self.finishers + warp % self.finishers, Int32(7))
        place = Place(group, warp, slice_of_16, rank, t)
        fragments = Fragments(mma, operand, registers, x_fragment, acc, total)
        ring = RingAt(Int32(0), Int32(0), Int32(0))
        at, last = turns.first, turns.last
        if const_expr(self.split > 1):
            self.multiply(fragments, shared, problem, at, turns, ring, place)
        else:
            if const_expr(self.tile.late) and at < last:  # noqa: SIM102
                if (group == 1) & (self.turn(at, turns).after < last):
                    cute.arch.mbarrier_wait(shared.ahead.data_ptr(), 0)
            while at < last:
                ring, at = self.multiply(fragments, shared, problem, at, turns, ring, place)

    @cute.jit
    def multiply(self, fragments, shared, problem, at, turns, ring, place):
        """One tile: a range of K, other CTAs' sums, the epilogue.

        Returns the ring's state and the next turn.
        """
        mma, operand, registers, x_fragment, acc, total = fragments
        given = problem.given
        tile, k_first, k_last, after = self.turn(at, turns)
        group, warp, slice_of_16, rank, t = place
        full, empty = shared.full.data_ptr(), shared.empty.data_ptr()
        rows = self.tile.rows
        expert_rows = problem.expert_tiles * ROW_MULTIPLE
        row_tile, _, expert, start, end = self.locate(tile, problem)
        # What the epilogue needs is fetched here: its latency hides under the main loop.
        tokens = self.fetch_tokens(given, start, end, t)
        channel = row_tile * rows + slice_of_16 * 16 + t % 32 // 4
        row = expert * expert_rows + channel
        channels = self.fetch_channels(given, row, channel)
        total.fill(0)
        stage, phase, slot = ring
        older, previous, k = Int32(0), Int32(0), k_first
        if const_expr(self.tile.late):  # the K tile at which the other warpgroup may begin
            ahead = Int32(-1)
            if (group == 0) & (at == turns.first):
                ahead = cutlass.min(k_first + self.tile.lag, k_last) - 1
        while k < k_last:
            for batch in cutlass.range_constexpr(2 * self.blocks):
                half, block = const_expr(batch // self.blocks), const_expr(batch % self.blocks)
                here = const_expr(batch % self.batches)  # of this stage
                if const_expr(batch and not here):
                    older, previous = previous, stage
                    stage, phase = self.next_stage(stage, phase)
                if const_expr(not here and (self.batches > 1 or not batch)):
                    cute.arch.mbarrier_wait(full + stage, phase)
                    if const_expr(self.batches == 1):  # a wait later makes ptxas wait for products
                        second, its_phase = self.next_stage(stage, phase)
                        cute.arch.mbarrier_wait(full + second, its_phase)
                if const_expr(not batch):
                    words, grid = self.read_words(shared, group, t, slot)
                sums, place_a = self.sums_of(acc, mma, block), const_expr(batch % 2 * self.per_half)
                # The batch before may still run; the registers of the one before it are free.
                if const_expr(not self.decoder.sums):
                    warpgroup.wait_group(1)
                used = const_expr(batch >= self.batches) or k > k_first  # the stage before
                if const_expr(here == 1):
                    self.release(empty + previous, used)
                elif const_expr(self.batches == 1):  # the stage before may still be read
                    self.release(empty + older, k > k_first)
                if const_expr(self.tile.late and batch == 1):
                    arrive_if(shared.ahead.data_ptr().toint(), k == ahead)
                self.decode_half(words, grid, registers, half, block, place_a)
                warpgroup.fence()
                for j in cutlass.range_constexpr(self.per_half):
                    a = operand[None, None, place_a + j]
                    step = const_expr(half * self.per_half + j)
                    b = x_fragment[None, None, step % self.steps, stage]
                    if const_expr(self.decoder.sums):
                        self.next_group(mma, step, acc, total, grid)
                    cute.gemm(mma, sums, a, b, sums)
                warpgroup.commit_group()
            if const_expr(self.decoder.sums):
                warpgroup.wait_group(0)
                self.add_up(acc, total, grid, self.decoder.entries - 1)
            older, previous = previous, stage
            stage, phase = self.next_stage(stage, phase)
            slot = self.next_slot(slot, stage)
            k += 1
        warpgroup.wait_group(0)
        if const_expr(self.batches == 1):
            self.release(empty + older, k_last > k_first)
        self.release(empty + previous, k_last > k_first)
        acc = total

        pairs = self.fetch_pairs(given)
        table = self.share_tokens(shared, tokens, group, t)
        finishes = True
        if const_expr(self.split > 1):
            self.exchange(acc, shared, warp, rank, t % 32)
            finishes = (warp < self.finishers) & (rank * self.finishers + warp < 8)
        if const_expr(self.tile.stream_k):
            finishes = (
                join(
                    acc,
                    self.acc,
                    self.joined,
                    given.work.toint(),
                    given.counters.toint(),
                    8,
                    warp,
                    turns.share,
                    tile,
                    k_first,
                    k_last,
                    t % 32,
                )
                > 0
            )
        if const_expr(self.grouped and self.tile.wide):  # again: the loop has no registers left
            row_tile, _, expert, start, end = self.locate(tile, problem)
        if finishes:
            for i in cutlass.range_constexpr(self.blocks):
                self.store(
                    acc,
                    i,
                    channels,
                    table,
                    pairs,
                    given,
                    row_tile * rows + i * ROWS + slice_of_16 * 16,
                    start,
                    end,
                    shared.outputs.data_ptr() + warp * (48 * self.batch),
                    t % 32,
                )
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)  # the table is read
        return RingAt(stage, phase, slot), after

    def next_group(self, mma: Any, step: int, acc: Any, total: Any, grid: Any) -> None:
        """Before WGMMA `step` of a K tile: where a group begins, its sums do, too."""
        begins = step % self.per_group == 0
        if begins and step:
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            self.add_up(acc, total, grid, step // self.per_group - 1)
            warpgroup.fence()
        mma.set(warpgroup.Field.ACCUMULATE, not begins)

    def sums_of(self, acc, mma, block):
        """The accumulators of one block of 128 rows."""
        layout = cute.make_layout(mma.partition_shape_C((ROWS, self.tokens)))
        return cute.make_tensor(acc.iterator + block * cute.size(layout), layout)

    @cute.jit
    def release(self, empty, when):
        """This thread is done with a stage.

        Without a branch, at which ptxas might wait for every single WGMMA of the loop. One lane for
        its warp is no faster, and racecheck follows only the arrivals of those that have read.
        """
        arrive_if(empty.toint(), when)
