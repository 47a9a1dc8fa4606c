"""A kernel that reads memory and does nothing else: the floor under every weight-bound kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from anybit.kernels.triton.lang import settle

# (words a program reads at a time, programs per multiprocessor, warps of a program)
CONFIGS = ((1024, 8, 4), (2048, 4, 4), (2048, 8, 4), (4096, 8, 8), (4096, 4, 8))


@triton.jit
def _read(data, out, words, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    mix = tl.zeros((BLOCK,), tl.int32)
    for start in range(tl.program_id(0) * BLOCK, words, tl.num_programs(0) * BLOCK):
        mix ^= tl.load(data + start + lanes, mask=start + lanes < words, other=0)
    tl.store(out + tl.program_id(0), tl.xor_sum(mix, 0))


def read(data: Tensor, config: tuple[int, int, int]) -> Tensor:
    """Xor of the parts of an int32 tensor, one for each program: every word is read once."""
    block, programs, warps = config
    count = torch.cuda.get_device_properties(data.device).multi_processor_count
    grid = min(count * programs, -(-data.numel() // block))
    out = data.new_empty(grid, dtype=torch.int32)
    _read[(grid,)](data, out, data.numel(), BLOCK=block, num_warps=warps)
    return out


settle(globals())
