"""`anybit build`: compile the Hopper kernels ahead of time."""

from collections.abc import Sequence
from pathlib import Path

from anybit.core.scheme import parse_scheme, scheme_name
from anybit.errors import InvalidInput, Unsupported
from anybit.files.directory import read_json
from anybit.formats.presets import HOPPER
from anybit.kernels.cute.build import build as compile_missing
from anybit.kernels.cute.jit import dsl_version, kernel_folder
from anybit.kernels.hopper.build import kernels_of
from anybit.nn.plan import METHOD, stored_plan
from anybit.progress import progress


def build(given: Sequence[str], cache: Path | None, jobs: int) -> str:
    """Compile every kernel that layers may launch.

    Args:
        given: Schemes, and directories of checkpoints (or their config.json), whose schemes count;
            none: the usual schemes.
        cache: Where the kernels go; None for the user's cache folder.
        jobs: Processes; 0 for one a core.

    Returns:
        What was done, in words.

    Raises:
        InvalidInput: A scheme has no Hopper kernels, or a checkpoint is not anybit's.
        Unsupported: CuTe DSL is not installed, or kernels failed to compile.
    """
    schemes = dict.fromkeys(s for each in given or HOPPER for s in schemes_of(each))
    kernels = list(dict.fromkeys(k for scheme in schemes for k in kernels_of(scheme)))
    if dsl_version() is None:
        raise Unsupported("CuTe DSL is not installed; pip install 'anybit[hopper]'")
    with progress("compiling", len(kernels)) as step:
        errors = compile_missing(kernels, cache, jobs, step)
    if errors:
        raise Unsupported(f"{len(errors)} of {len(kernels)} kernels failed: {errors[0]}")
    return f"{len(kernels)} kernels for {', '.join(schemes)} in {kernel_folder(cache)}"


def schemes_of(given: str) -> list[str]:
    """A scheme, or those of a checkpoint's layers as kernels see them."""
    path = Path(given)
    if not path.exists():
        return [given]
    path = path / "config.json" if path.is_dir() else path
    config = read_json(path).get("quantization_config") or {}
    if config.get("quant_method") != METHOD:
        raise InvalidInput(f"{path} names no formats of anybit's; name those that it will have")
    pairs = [parse_scheme(scheme) for scheme in stored_plan(config).values() if scheme]
    return [scheme_name(fmt.plain(), activation) for fmt, activation in pairs]
