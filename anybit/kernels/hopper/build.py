"""Which Hopper kernels layers of a scheme may launch: what is compiled ahead of time."""

from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput
from anybit.kernels.cute.cells import Cells, cells_of
from anybit.kernels.cute.decode import decoder
from anybit.kernels.cute.jit import KernelSpec
from anybit.kernels.hopper import codebook_tiles, scalar_linear
from anybit.kernels.hopper.chip import H200
from anybit.kernels.hopper.lookup import kernels_of as lookup_kernels
from anybit.kernels.hopper.tiles import gpu_for
from anybit.kernels.mma.build import every_rows


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
        out += scalar_linear.kernels_for(d, activation, H200, every_rows(gpu_for(H200)))
    return [*dict.fromkeys(out)]
