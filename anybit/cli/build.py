"""`anybit build`: compile the Hopper kernels ahead of time."""

from collections.abc import Sequence
from pathlib import Path

from anybit.errors import Unsupported
from anybit.formats.presets import HOPPER
from anybit.kernels.cute.build import build as compile_missing
from anybit.kernels.cute.jit import dsl_version, kernel_folder
from anybit.kernels.hopper.build import kernels_of
from anybit.progress import progress


def build(schemes: Sequence[str], cache: Path | None, jobs: int) -> str:
    """Compile every kernel that layers of these schemes may launch; none: the usual ones.

    Returns:
        What was done, in words.

    Raises:
        InvalidInput: A scheme has no Hopper kernels.
        Unsupported: CuTe DSL is not installed, or kernels failed to compile.
    """
    kernels = list(dict.fromkeys(k for scheme in schemes or HOPPER for k in kernels_of(scheme)))
    if dsl_version() is None:
        raise Unsupported("CuTe DSL is not installed; pip install 'anybit[hopper]'")
    with progress("compiling", len(kernels)) as step:
        errors = compile_missing(kernels, cache, jobs, step)
    if errors:
        raise Unsupported(f"{len(errors)} of {len(kernels)} kernels failed: {errors[0]}")
    return f"{len(kernels)} kernels in {kernel_folder(cache)}"
