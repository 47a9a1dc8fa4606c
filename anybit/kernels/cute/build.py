"""Compile many kernels ahead of time, in parallel and without a GPU; see `jit.py`."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from anybit.kernels.cute.jit import KernelSpec, compile_kernel, kernel_file


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
