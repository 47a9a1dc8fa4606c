"""What happens to a tile's sums: scales of groups, the cluster's exchange, scales, bias, stores.

D^T has channels along M and tokens along N, so pairs of tokens lie in a thread; `stmatrix`
transposes them into rows of channels on their way to memory.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from anybit.kernels.cute.decode import Decoder
from anybit.kernels.cute.lang import Word
from anybit.kernels.cute.pack import ROWS
from anybit.kernels.cute.pairs import added_up, offset_of_second, row_of_y
from anybit.kernels.cute.ptx import as_float, pack2
from anybit.kernels.hopper.ptx import stmatrix_transposed, store_to_cta

# A whole number below 2**22, which no sum of 128 products of bytes reaches, added to these bits is
# the number added to this fp32 number.
MAGIC_BITS, MAGIC = 0x4B400000, 1.5 * 2**23


class Epilogue:
    """The part of `gemm.Gemm` behind the main loop."""

    tokens: int  # of a tile
    blocks: int  # of 128 rows in a tile, of which a warp has 16 channels each
    split: int  # CTAs that share the tile
    finishers: int  # warps of a CTA that finish outputs, 16 channels each
    batch: int  # tokens that a warp stages for its stores at a time
    integer: bool  # sums are int32, and token sums correct unsigned weights
    quantized: bool  # tokens have a scale
    joins: bool  # outputs of some rows of tokens are added up
    acc: Any  # type of the sums
    products: Any  # of those of a group, before they have a scale
    decoder: Decoder
    out: str  # dtype of y

    def add_up(self, acc: Any, total: Any, grid: Any, group: int) -> None:
        """Add a group's sums to the total, times the scales of the thread's two rows."""
        first = group * self.decoder.sums
        found = self.decoder.scales([Word(grid[first + j, 0]) for j in range(self.decoder.sums)])
        scales = [as_float(word.bits) for word in found]
        for i in range(cute.size(acc)):
            added = acc[i]
            if self.products is Int32:  # a conversion takes twice as long
                added = as_float(Uint32(added + Int32(MAGIC_BITS))) - Float32(MAGIC)
            total[i] = total[i] + added * scales[i // 2 % 2]

    @cute.jit
    def fetch_tokens(self, given, start, end, t):
        """Scale and code sum of tokens start + t, start + t + 128, ..., as 32-bit words."""
        passes = const_expr(-(-self.tokens // 128))
        out = cute.make_rmem_tensor((2, passes), Int32)
        if const_expr(self.quantized):
            scale = cute.make_tensor(
                cute.recast_ptr(given.token_scale, dtype=Int32), cute.make_layout(end)
            )
            sums = cute.make_tensor(given.token_sum, cute.make_layout(end))
            for i in cutlass.range_constexpr(passes):
                token = cutlass.min(start + i * 128 + t, end - 1)
                out[0, i] = scale[token]
                if const_expr(self.integer):
                    out[1, i] = sums[token]
        return out

    @cute.jit
    def fetch_pairs(self, given):
        """How many pairs of rows of tokens have one of outputs."""
        count = Int32(0)
        if const_expr(self.joins):  # noqa: SIM102 - known when it is compiled
            if given.pairs.toint() != 0:
                count = cute.make_tensor(given.pairs, cute.make_layout(1))[0]
        return count

    @cute.jit
    def share_tokens(self, shared, tokens, group, t):
        """The tokens' words, for all threads of the warpgroup: (tokens, 2)."""
        base = shared.token.data_ptr() + group * (2 * self.tokens)
        table = cute.make_tensor(base, cute.make_layout((self.tokens, 2), stride=(1, self.tokens)))
        if const_expr(self.quantized):
            for i in cutlass.range_constexpr(-(-self.tokens // 128)):
                if i * 128 + t < self.tokens:
                    table[i * 128 + t, 0] = tokens[0, i]
                    table[i * 128 + t, 1] = tokens[1, i]
            cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
        return table

    @cute.jit
    def fetch_channels(self, given, row, channel):
        """Scale, zero point and bias of the two channels of this thread, for each blob.

        Rows count over all experts, each padded to whole tiles; channels over this one's outputs.
        """
        scale = cute.make_tensor(given.row_scale, cute.make_layout(row + 256))
        zero = cute.make_tensor(given.row_zero, cute.make_layout(row + 256))
        offset = cute.make_tensor(given.bias, cute.make_layout(given.n))
        scales = cute.make_rmem_tensor((2, self.blocks), Float32)
        zeros = cute.make_rmem_tensor((2, self.blocks), Int32)
        offsets = cute.make_rmem_tensor((2, self.blocks), Float32)
        offsets.fill(0.0)
        for i in cutlass.range_constexpr(self.blocks):
            for v in cutlass.range_constexpr(2):
                further = const_expr(i * ROWS + v * 8)
                scales[v, i] = scale[row + further]
                if const_expr(self.integer):
                    zeros[v, i] = zero[row + further]
                if given.bias.toint() != 0:
                    offsets[v, i] = offset[cutlass.min(channel + further, given.n - 1)].to(Float32)
        return scales, zeros, offsets

    @cute.jit
    def meet(self):
        """Wait for all threads of the cluster."""
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def exchange(self, acc, shared, warp, rank, lane):
        """Add the cluster's partial sums; the first `finishers` warps of each CTA own the result.

        The sums travel into the ring, which is idle then: every CTA waits until all are done with
        it. They are added in the order of ranks, so the result does not depend on timing.
        """
        chunks = const_expr(cute.size(acc) // 4)
        each = const_expr(self.finishers)
        base = cute.recast_ptr(shared.x.data_ptr(), dtype=self.acc)
        self.meet()
        slot = (rank * each + warp % each) * chunks
        for i in cutlass.range_constexpr(chunks):
            store_to_cta(
                base.toint() + (slot + i) * 512 + lane * 16,
                warp // each,
                [acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]],
            )
        self.meet()
        if warp < each:
            parts = cute.make_tensor(
                base.align(16),
                cute.make_layout(
                    (4, 32, chunks, each, self.split),
                    stride=(1, 4, 128, 128 * chunks, 128 * chunks * each),
                ),
            )
            part = cute.make_rmem_tensor((4, chunks), self.acc)
            acc.fill(0)
            for r in cutlass.range(self.split, unroll=1):  # unrolled, its loads would spill
                for i in cutlass.range_constexpr(chunks):
                    cute.autovec_copy(parts[None, lane, i, warp, r], part[None, i])
                for i in cutlass.range_constexpr(chunks):
                    for c in cutlass.range_constexpr(4):
                        acc[4 * i + c] = acc[4 * i + c] + part[c, i]

    @cute.jit
    def store(
        self,
        acc,
        block: cutlass.Constexpr[int],
        channels,
        table,
        count,
        given,
        channel,
        start,
        end,
        buffer,
        lane,
    ):
        """Scale, add the bias, round, and write 16 channels of every token."""
        scales, zeros, offsets = channels
        base = const_expr(block * (self.tokens // 2))
        scale_of = cute.make_tensor(
            cute.recast_ptr(table.iterator, dtype=Float32), cute.make_layout(self.tokens)
        )
        # Rows of 48 bytes hold 16 channels of a token and keep stmatrix free of bank conflicts.
        buffer = buffer.align(16)
        rows = cute.make_tensor(
            cute.recast_ptr(buffer, dtype=Uint32),
            cute.make_layout((4, 2, self.batch), stride=(1, 4, 12)),
        )
        for p in cutlass.range_constexpr(self.tokens // self.batch):
            packed = []
            for j in cutlass.range_constexpr(self.batch // 8):
                pairs = [[], []]  # two tokens of channel g, two of channel g + 8
                first = p * self.batch + j * 8 + lane % 4 * 2
                joined = start + first < 2 * count
                for c in cutlass.range_constexpr(2):
                    token = first + c
                    for v in cutlass.range_constexpr(2):
                        total = acc[base + (p * (self.batch // 8) + j) * 4 + c + 2 * v]
                        if const_expr(self.integer):
                            total = total - zeros[v, block] * table[token, 1]
                        factor = scales[v, block]
                        if const_expr(self.quantized):
                            factor = factor * scale_of[token]
                        offset = offsets[v, block]
                        if const_expr(self.joins and c == 1):
                            offset = offset_of_second(offset, joined)
                        pairs[v].append(total.to(Float32) * factor + offset)
                if const_expr(self.joins):
                    pairs = [added_up(pair, joined) for pair in pairs]
                packed += [pack2(*pair, self.out) for pair in pairs]
            n_matrices = const_expr(min(4, len(packed)))
            for i in cutlass.range_constexpr(0, len(packed), n_matrices):
                # Matrix lane // 8 of this store: 8 tokens, one half of the channels.
                token = i // 2 * 8 + (lane // 16 * 8 if n_matrices == 4 else 0) + lane % 8
                address = buffer + (token * 48 + lane // 8 % 2 * 16)
                stmatrix_transposed(address.toint(), packed[i : i + n_matrices])
            cute.arch.sync_warp()
            # Two lanes a token; all loads before the first store.
            rounds = const_expr(-(-2 * self.batch // 32))
            vectors = cute.make_rmem_tensor((4, rounds), Uint32)
            for i in cutlass.range_constexpr(rounds):
                token = cutlass.min(i * 16 + lane // 2, Int32(self.batch - 1))
                cute.autovec_copy(rows[None, lane % 2, token], vectors[None, i])
            for i in cutlass.range_constexpr(rounds):
                token = i * 16 + lane // 2
                at = start + p * self.batch + token
                column, row, whole = channel + lane % 2 * 8, at, True
                if const_expr(self.joins):
                    row, whole = row_of_y(at, count)
                if token < self.batch and at < end and column < given.n and whole:
                    target = (given.y + (Int64(row) * given.stride + column)).align(16)
                    target = cute.recast_ptr(target, dtype=Uint32)
                    cute.autovec_copy(
                        vectors[None, i], cute.make_tensor(target, cute.make_layout(4))
                    )
            cute.arch.sync_warp()
