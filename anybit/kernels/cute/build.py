"""Compile many kernels in CuTe DSL ahead of time, in parallel and without a GPU; see `jit.py`."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from anybit.kernels.cute.jit import KernelSpec, compile_kernel, kernel_file
from anybit.kernels.processes import side_by_side


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
    calls = [partial(compile_kernel, k, folder) for k in missing]
    answers = side_by_side(calls, jobs, lambda at: step(1, kernel_file(missing[at], folder).name))
    return [f"{k}: {error}" for k, error in zip(missing, answers, strict=True) if error]
