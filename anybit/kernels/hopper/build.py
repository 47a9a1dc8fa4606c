"""Which Hopper kernels layers of a scheme may launch: what is compiled ahead of time."""

from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput
from anybit.kernels.cute.cells import Cells, cells_of
from anybit.kernels.cute.decode import decoder
from anybit.kernels.cute.jit import KernelSpec
from anybit.kernels.hopper import codebook_tiles, scalar_linear
from anybit.kernels.hopper.chip import H200
from anybit.kernels.hopper.expert_tiles import family_grouped
from anybit.kernels.hopper.lookup import kernels_of as lookup_kernels
from anybit.kernels.hopper.tile import Kernel
from anybit.kernels.hopper.tiles import family, gpu_for, has_mma
from anybit.kernels.mma.build import narrow_kernels


def kernels_of(scheme: str) -> list[KernelSpec]:
    """Every kernel that a layer of this scheme may launch. ValueError when there is none."""
    fmt, activation = parse_scheme(scheme)
    cells = cells_of(fmt)
    if activation is None and isinstance(cells, str) and fmt.lookup and not fmt.hopper_decode:
        raise InvalidInput(cells)
    if activation is None and isinstance(cells, Cells):
        return [*codebook_tiles.family(cells), *lookup_kernels(cells)]
    operands = {"int8": ["int8"], "fp8": ["float8_e4m3fn"], None: ["float16", "bfloat16"]}
    out: list[KernelSpec] = []
    for operand in operands[activation]:
        d = decoder(fmt, operand)
        if isinstance(d, str):
            raise InvalidInput(f"{scheme}: {d}")
        outputs = [operand] if activation is None else ["float16", "bfloat16"]
        out += scalar_linear.copy_kernels(d, outputs)
        out += [Kernel(d, tile, o) for tile in family(d) for o in outputs]
        if has_mma(d):
            out += narrow_kernels(d, gpu_for(H200), outputs)  # any chip has the same ones
        out += scalar_linear.small_kernels(d, outputs)
        out += [Kernel(d, tile, o, grouped=True) for tile in family_grouped(d) for o in outputs]
    return out
