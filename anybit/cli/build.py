"""`anybit build`: compile the Hopper kernels ahead of time."""

from collections.abc import Sequence
from pathlib import Path

from anybit.core.scheme import parse_scheme, scheme_name
from anybit.errors import InvalidInput, Unsupported
from anybit.files.directory import quantization_of, read_json
from anybit.formats.presets import HOPPER
from anybit.kernels.cute.build import build as compile_missing
from anybit.kernels.cute.jit import KernelSpec, dsl_version, kernel_folder
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
    kernels: dict[KernelSpec, None] = {}
    schemes: list[str] = []
    for scheme, demanded in dict.fromkeys(s for each in given or HOPPER for s in schemes_of(each)):
        try:
            kernels |= dict.fromkeys(kernels_of(scheme))
        except InvalidInput:  # another backend runs such layers of a checkpoint
            if demanded:
                raise
        else:
            schemes.append(scheme)
    if dsl_version() is None:
        raise Unsupported("CuTe DSL is not installed; pip install 'anybit[hopper]'")
    with progress("compiling", len(kernels)) as step:
        errors = compile_missing(list(kernels), cache, jobs, step)
    if errors:
        raise Unsupported(f"{len(errors)} of {len(kernels)} kernels failed: {errors[0]}")
    named = ", ".join(schemes) or "layers of no scheme that has any"
    return f"{len(kernels)} kernels for {named} in {kernel_folder(cache)}"


def schemes_of(given: str) -> list[tuple[str, bool]]:
    """A scheme, or those of a checkpoint's layers as kernels see them; and whether it was named."""
    path = Path(given)
    try:
        parse_scheme(given)
    except InvalidInput:
        if not path.exists():
            if path.name != given:
                raise InvalidInput(f"no such directory or file: {given}") from None
            raise
    else:
        return [(given, True)]
    path = path / "config.json" if path.is_dir() else path
    config = quantization_of(read_json(path), path)
    if config.get("quant_method") != METHOD:
        raise InvalidInput(f"{path} names no formats of anybit's; name those that it will have")
    pairs = [parse_scheme(scheme) for scheme in stored_plan(config).values() if scheme]
    return [(scheme_name(fmt.plain(), activation), False) for fmt, activation in pairs]
