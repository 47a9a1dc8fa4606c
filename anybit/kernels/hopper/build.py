"""Compile the Hopper kernels of schemes ahead of time, without a GPU; see `jit.py`."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput
from anybit.kernels.hopper import codebook_tiles
from anybit.kernels.hopper.cells import Cells, cells_of
from anybit.kernels.hopper.decode import decoder
from anybit.kernels.hopper.jit import KernelSpec, compile_kernel, kernel_file
from anybit.kernels.hopper.lookup import kernels_of as lookup_kernels
from anybit.kernels.hopper.tiles import Kernel, family, family_grouped


def kernels_of(scheme: str) -> list[KernelSpec]:
    """Every kernel that a layer of this scheme may launch. ValueError when there is none."""
    fmt, activation = parse_scheme(scheme)
    cells = cells_of(fmt)
    if activation is None and isinstance(cells, Cells):
        return [*codebook_tiles.family(cells), *lookup_kernels(cells)]
    operands = {"int8": ["int8"], "fp8": ["float8_e4m3fn"], None: ["float16", "bfloat16"]}
    out: list[KernelSpec] = []
    for operand in operands[activation]:
        d = decoder(fmt, operand)
        if isinstance(d, str):
            raise InvalidInput(f"{scheme}: {d}")
        outputs = [operand] if activation is None else ["float16", "bfloat16"]
        out += [Kernel(d, tile, o) for tile in family(d) for o in outputs]
        out += [Kernel(d, tile, o, grouped=True) for tile in family_grouped(d) for o in outputs]
    return out


def build(
    kernels: Sequence[KernelSpec],
    folder: str | Path | None = None,
    jobs: int = 0,
    step: Callable[[int, str], object] = lambda count, name: None,
) -> list[str]:
    """Compile what is missing, in parallel processes.

    Args:
        kernels: Repeated ones count once.
        folder: Where the kernels go; None for the cache folder.
        jobs: Processes; 0 for one a core.
        step: Called with 1 and the file's name when a kernel is done.

    Returns:
        The errors, one line for each kernel that failed.
    """
    missing = [k for k in dict.fromkeys(kernels) if not kernel_file(k, folder).exists()]
    errors: list[str] = []
    if not missing:
        return errors
    with ProcessPoolExecutor(jobs or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(compile_kernel, kernel, folder) for kernel in missing]
        for kernel, future in zip(missing, futures, strict=True):
            try:
                path = future.result()
                step(1, path.name)
            except Exception as error:
                errors.append(f"{kernel}: {error}")
    return errors
