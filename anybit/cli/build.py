"""`anybit build`: compile kernels ahead of time."""

from collections.abc import Sequence
from pathlib import Path

from anybit.core.scheme import parse_scheme, scheme_name
from anybit.errors import InvalidInput, Unsupported
from anybit.files.directory import check_folder, quantization_of, read_json
from anybit.formats.presets import HOPPER
from anybit.kernels.archive import pack
from anybit.kernels.cute.build import build as compile_missing
from anybit.kernels.cute.jit import KernelSpec, dsl_version, kernel_folder
from anybit.kernels.hopper import plain
from anybit.kernels.hopper.build import kernels_of
from anybit.kernels.hopper.chip import H200
from anybit.kernels.mma import build as mma
from anybit.nn.plan import METHOD, stored_plan
from anybit.planning.gpus import gpu
from anybit.progress import progress


def build(
    given: Sequence[str], cache: Path | None, jobs: int, gpus: Sequence[str], file: Path | None
) -> str:
    """Compile every kernel that layers may launch.

    Args:
        given: Schemes, and directories of checkpoints (or their config.json), whose schemes count;
            none: the usual schemes.
        cache: Where the kernels go; None for the user's cache folder.
        jobs: Processes; 0 for one a core.
        gpus: Names of GPUs.
        file: One file to write them to as well, with what Triton's cache has of anybit's kernels.

    Returns:
        What was done, in words.

    Raises:
        InvalidInput: A scheme has no kernels in CuTe DSL, or a checkpoint is not anybit's.
        Unsupported: CuTe DSL is not installed, or kernels failed to compile.
    """
    if file is not None:
        check_folder(file)
    capabilities = {gpu(name).capability for name in gpus}
    kernels: dict[KernelSpec, None] = {}
    schemes: dict[str, None] = {}
    every = dict.fromkeys(s for each in given or HOPPER for s in schemes_of(each))
    for scheme, demanded in every:
        for capability in sorted(capabilities):
            own = capability[0] == 9
            try:
                found = kernels_of(scheme) if own else mma.kernels_of(scheme, capability)
            except InvalidInput as error:  # another backend runs such layers
                refused = error
            else:
                kernels |= dict.fromkeys(found)
                schemes[scheme] = None
        if given and demanded and scheme not in schemes:
            raise refused
    if any(capability[0] == 9 for capability in capabilities):  # of layers that stay as they are
        kernels |= dict.fromkeys(plain.kernels(H200))
    if dsl_version() is None:
        raise Unsupported("CuTe DSL is not installed; pip install 'anybit[hopper]'")
    with progress("compiling", len(kernels)) as step:
        errors = compile_missing(list(kernels), cache, jobs, step)
    if errors:
        raise Unsupported(f"{len(errors)} of {len(kernels)} kernels failed: {errors[0]}")
    named = ", ".join(schemes) or "layers of no scheme that has any"
    said = f"{len(kernels)} kernels for {named} in {kernel_folder(cache)}"
    if file is None:
        return said
    more = pack(file, kernels, cache, [f"{a}.{b}" for a, b in capabilities])
    return f"{said}; with {more} files of Triton's cache in {file}"


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
