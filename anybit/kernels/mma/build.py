"""Which kernels of this family layers of a scheme may launch: what is compiled ahead of time."""

from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput
from anybit.kernels.cute.cells import Cells, cells_of
from anybit.kernels.cute.decode import Decoder, decoder
from anybit.kernels.cute.jit import KernelSpec
from anybit.kernels.mma import codebook_tiles, tiles
from anybit.kernels.mma.backend import OLDEST_FP8
from anybit.kernels.mma.tiles import Gpu, kernel_for

KB = 1024
SMALL_SHARED = ((8, 6), (8, 9), (12, 0), (12, 1))  # capabilities with 100 KB in a multiprocessor


def gpu_with(capability: tuple[int, int]) -> Gpu:
    """A GPU of a compute capability, by CUDA's table of them; of some number of multiprocessors."""
    shared = 100 if capability in SMALL_SHARED else 164 if capability[0] == 8 else 228
    return Gpu(capability, 128, (shared - 1) * KB, shared * KB)


def kernels_of(scheme: str, capability: tuple[int, int]) -> list[KernelSpec]:
    """Every kernel that layers and experts of this scheme may launch on such GPUs.

    Raises:
        InvalidInput: There is none.
    """
    fmt, activation = parse_scheme(scheme)
    gpu, cells = gpu_with(capability), cells_of(fmt)
    if activation is None and isinstance(cells, Cells):
        found = [codebook_tiles.kernel_for(cells, gpu, t) for t in ("float16", "bfloat16")]
        return [kernel for kernel in found if kernel]
    if activation == "fp8" and capability < OLDEST_FP8:
        has = "{}.{}".format(*capability)
        raise InvalidInput(f"{scheme}: fp8 products need compute capability 8.9, not {has}")
    operands = {"int8": ["int8"], "fp8": ["float8_e4m3fn"], None: ["float16", "bfloat16"]}
    out: list[KernelSpec] = []
    for operand in operands[activation]:
        d = decoder(fmt, operand)
        if isinstance(d, str) or d.sums:
            reason = d if isinstance(d, str) else "scales of groups cannot be multiplied into sums"
            raise InvalidInput(f"{scheme}: {reason}")
        outputs = [operand] if activation is None else ["float16", "bfloat16"]
        out += narrow_kernels(d, gpu, outputs)
        for output in outputs:
            wide = (kernel_for(d, gpu, m, 1, output) for m in (17, 32, 64, 128, tiles.DENSE_FROM))
            out += [kernel for kernel in wide if kernel]
            out += tiles.family_experts(d, gpu, output)
    return out


def narrow_kernels(d: Decoder, gpu: Gpu, outputs: list[str]) -> list[tiles.Kernel]:
    """Those for few tokens, whatever the number of rows."""
    found = [
        kernel_for(d, gpu, m, n, output)
        for m in tiles.FEW
        for n in every_rows(gpu)
        for output in outputs
    ]
    return [kernel for kernel in dict.fromkeys(found) if kernel is not None]


def every_rows(gpu: Gpu) -> list[int]:
    """Numbers of rows that have all tiles for few tokens.

    GPUs with other numbers of multiprocessors have the same ones: a tile follows from the rows of
    one, by the 16 of the smallest tile, and, where tiles differ in size alone, from which of them
    the last rows fill: the first 16 numbers of each count of CTAs have all cases.
    """
    units = 2 * tiles.NARROW_WARPS * gpu.multiprocessors
    starts = range(0, units, gpu.multiprocessors)
    return [16 * (start + i) for start in starts for i in range(1, 17)] + [1 << 24]
