"""Who fills the main loop's ring: a warp that starts all copies of a CTA.

A stage has tokens, 128 or 64 columns of them; weights come a K tile at a time, with its first
tokens. So the ring is one of stages and one of slots, which a K tile's weights have for themselves.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64, const_expr
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
    sides: int  # CTAs of a cluster that copy tokens for each other

    @cute.jit
    def produce(self, x_copy, x_tma, s_x, w, s_w, full, empty, problem, k_tiles, turns):
        """Fill the ring. Weights of the first stages do not wait for the previous kernel."""
        at, last, size = turns[0], turns[1], const_expr(self.blob * self.blocks)
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
                problem[6],
                cute.make_layout(self.sides),
                cute.group_modes(s_x, 0, 2),
                cute.group_modes(g_x, 0, 2),
            )
            while k < k_last:
                for part in cutlass.range_constexpr(self.parts):
                    if const_expr(part):
                        cute.arch.mbarrier_wait(empty + stage, phase)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.token_bytes)
                    elif early > 0:
                        early -= 1
                    else:
                        cute.arch.mbarrier_wait(empty + stage, phase)
                        to = s_w + slot * size
                        self.load_weights(w, to, full + stage, row_blob, k, k_tiles)
                    cute.copy(
                        x_copy,
                        x_from[None, k * self.parts + part],
                        x_to[None, stage],
                        tma_bar_ptr=full + stage,
                        **self.receivers(),
                    )
                    stage, phase = self.next_stage(stage, phase)
                slot = self.next_slot(slot, stage)
                k += 1

    def receivers(self) -> dict[str, Any]:
        """Which CTAs of the cluster a copy of tokens goes to."""
        return {"mcast_mask": Int16(0b11)} if self.tile.pair else {}

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
                    to + i * self.blob, w.toint() + Int64(at) * self.blob, self.blob,
                    barrier.toint(),
                )  # fmt: skip
