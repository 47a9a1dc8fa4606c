"""Who fills the main loop's ring: a warp that starts all copies of a CTA.

A stage has tokens, 128 or 64 columns of them; weights come a K tile at a time, with its first
tokens. So the ring is one of stages and one of slots, which a K tile's weights have for themselves.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from anybit.kernels.hopper.ptx import bulk_load
from anybit.kernels.hopper.tile import Tile


class Producer:
    """The part of `gemm.Gemm` that copies."""

    tile: Tile
    tokens: int  # of a tile
    columns: int  # of a stage
    parts: int  # stages of a K tile
    stages: int
    slots: int
    token_bytes: int  # of a stage
    blob: int  # bytes of 128 rows of a K tile
    blocks: int  # of 128 rows in a tile
    tokens_first = False  # whether many small copies of weights would hold the tokens' back

    @cute.jit
    def produce(self, x_copy, x_tma, s_x, s_w, full, empty, problem, turns):
        """Fill the ring. Weights of the first stages do not wait for the previous kernel."""
        w, k_tiles = problem.given.w, problem.k_tiles
        at, last, size = turns.first, turns.last, const_expr(self.blob * self.blocks)
        early = Int32(0)
        if at < last:
            tile, k_first, k_last, _ = self.turn(at, turns)
            early = cutlass.min(k_last - k_first, Int32(self.slots))
            _, row_blob, _, _, _ = self.locate(tile, problem)
            for i in cutlass.range(early, unroll=1):
                barrier = full + i * self.parts
                self.load_weights(w, s_w + i * size, barrier, row_blob, k_first + i, k_tiles)
        cute.arch.griddepcontrol_wait()
        stage, phase, slot = Int32(0), Int32(1), Int32(0)
        while at < last:
            tile, k, k_last, at = self.turn(at, turns)
            _, row_blob, _, start, _ = self.locate(tile, problem)
            g_x = cute.local_tile(
                cute.domain_offset((start, 0), x_tma), (self.tokens, self.columns), (0, None)
            )
            x_to, x_from = cpasync.tma_partition(
                x_copy,
                0,
                cute.make_layout(1),
                cute.group_modes(s_x, 0, 2),
                cute.group_modes(g_x, 0, 2),
            )
            while k < k_last:
                for part in cutlass.range_constexpr(self.parts):
                    if const_expr(part):
                        cute.arch.mbarrier_wait(empty + stage, phase)
                        self.arm(full + stage)
                    else:
                        fresh = early <= 0
                        early -= 1
                        if fresh:
                            cute.arch.mbarrier_wait(empty + stage, phase)
                            if const_expr(not self.tokens_first):
                                to = s_w + slot * size
                                self.load_weights(w, to, full + stage, row_blob, k, k_tiles)
                    cute.copy(
                        x_copy,
                        x_from[None, k * self.parts + part],
                        x_to[None, stage],
                        tma_bar_ptr=full + stage,
                    )
                    if const_expr(self.tokens_first and not part):  # noqa: SIM102
                        if fresh:
                            to = s_w + slot * size
                            self.load_weights(w, to, full + stage, row_blob, k, k_tiles)
                    stage, phase = self.next_stage(stage, phase)
                slot = self.next_slot(slot, stage)
                k += 1

    @cute.jit
    def arm(self, barrier):
        """A stage's barrier, for activations alone."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.token_bytes)

    @cute.jit
    def next_stage(self, stage, phase):
        stage += 1
        if stage == self.stages:
            stage = Int32(0)
            phase ^= 1
        return stage, phase

    @cute.jit
    def next_slot(self, slot, stage):
        """Where the next K tile's weights are; `stage`: of its first tokens."""
        if const_expr(self.parts == 1):
            slot = stage
        else:
            slot += 1
            if slot == self.slots:
                slot = Int32(0)
        return slot

    @cute.jit
    def load_weights(self, w, to, barrier, row_blob, k, k_tiles):
        """Arm a stage's barrier for weights and activations, and start the weights' copies."""
        total = const_expr(self.blob * self.blocks + self.token_bytes)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, total)
            for i in cutlass.range_constexpr(self.blocks):
                at = (row_blob + i) * k_tiles + k
                bulk_load(
                    to + i * self.blob,
                    w.toint() + Int64(at) * self.blob,
                    self.blob,
                    barrier.toint(),
                )
