"""Compiled kernels in one file, for machines on which no compiler shall run.

A zip of `manifest.json` and of files as the caches hold them: `cute/NAME` (see `cute/jit.py`) and
`triton/KEY/NAME`, a file for each kernel whose name or folder is a hash of all that it was compiled
from. The manifest names versions, GPUs, a hash of the sources, and a SHA-256 of each file: so a
file that was cut or altered by accident is noticed. It is code: only take one that you trust.
"""

import hashlib
import json
import platform
import re
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from anybit.errors import AnybitError, InvalidInput, Unsupported, in_a_line
from anybit.files.directory import written_whole
from anybit.kernels.cute import jit
from anybit.version import __version__

MANIFEST = "manifest.json"
INSIDE = re.compile(r"(cute|triton/\w+)/\w[\w.=+-]*")  # names that stay in their folder
ROOM = Path(__file__).parent
SOURCES = ("cute", "hopper", "mma", "triton", "../formats")


def pack(
    file: Path, kernels: Iterable[jit.KernelSpec], folder: Path | None, gpus: Iterable[str]
) -> int:
    """Write kernels that are compiled, and those of Triton's cache, into a file: all, or nothing.

    Args:
        file: Its place.
        kernels: Those of CuTe DSL.
        folder: Where they are, as in `kernel_folder`.
        gpus: Compute capabilities that they are for, such as "9.0".

    Returns:
        How many files of Triton's cache are in it.
    """
    theirs = dict(triton_files(set(gpus)))
    paths = {f"cute/{path.name}": path for path in (jit.kernel_file(k, folder) for k in kernels)}
    found = {name: path.read_bytes() for name, path in sorted((paths | theirs).items())}
    facts = versions() | {"sources": sources(), "gpus": sorted(gpus)}
    facts["files"] = {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}
    with written_whole(file) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {MANIFEST: to_json(facts), **found}.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return len(theirs)


def unpack(file: Path, device: torch.device) -> None:
    """Put a file's kernels where kernels are looked for, after a look at all of it.

    Raises:
        InvalidInput: It is no such file, cut short, or altered.
        Unsupported: It is for other versions, or another GPU.
    """
    if not file.is_file():
        raise InvalidInput(f"kernels: there is no file {file}; `anybit build --pack` writes one")
    try:
        with zipfile.ZipFile(file) as archive:
            facts = json.loads(archive.read(MANIFEST))
            check(file, facts, archive.namelist(), device)
            found = {name: archive.read(name) for name in facts["files"]}
        for name, data in found.items():
            if hashlib.sha256(data).hexdigest() != facts["files"][name]:
                raise InvalidInput(f"{file}: {name} was altered; copy the file again")
    except AnybitError:
        raise
    except Exception as error:  # zipfile and zlib raise all kinds
        raise InvalidInput(
            f"{file} is no file of kernels, or not all of it ({in_a_line(error)}); copy it again, "
            "or write it anew with `anybit build --pack`"
        ) from None
    for name, data in found.items():
        kind, _, rest = name.partition("/")
        if kind == "cute":
            put(jit.kernel_folder() / rest, data)
        elif triton_version() is not None:
            path = triton_folder() / rest
            put(path, data)
            if path.suffix == ".json":  # what Triton looks for: files by their full paths
                group = {p.name: str(p) for p in (path, path.with_suffix(".cubin"))}
                put(path.with_name(f"__grp__{path.name}"), to_json({"child_paths": group}))


def put(path: Path, data: bytes) -> None:
    jit.store(path, lambda: data)


def to_json(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()


def check(file: Path, facts: dict[str, Any], names: list[str], device: torch.device) -> None:
    """Raise what `unpack` does, by the manifest and the files' names alone."""
    if outside := [name for name in facts["files"] if not INSIDE.fullmatch(name)]:
        raise InvalidInput(f"{file}: it names {outside[0]!r}, which is no place for a kernel")
    if sorted(names) != sorted([MANIFEST, *facts["files"]]):
        raise InvalidInput(f"{file}: it does not hold the files that it names; copy it again")
    here, again = versions(), "write it anew with `anybit build --pack`"
    for name, version_here in here.items():
        if version_here is not None and facts[name] != version_here:
            raise Unsupported(
                f"{file} was made with {name} {facts[name]}, and {version_here} is here; {again}"
            )
    if facts["sources"] != sources():
        raise Unsupported(f"{file} was made from other sources of anybit {__version__}; {again}")
    if device.type != "cuda":
        raise Unsupported(f"{file} holds kernels of GPUs, and the device is {device}; leave it out")
    capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
    if capability not in facts["gpus"]:
        raise Unsupported(
            f"{file} is for GPUs of compute capability {', '.join(facts['gpus'])}, and "
            f"{torch.cuda.get_device_name(device)} has {capability}; {again} and --gpu"
        )


def versions() -> dict[str, Any]:
    """Of what compiles kernels, and of anybit; None where it is absent, so that any will do."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {
        "anybit": __version__,
        "CuTe DSL": jit.dsl_version(),
        "Triton": triton_version(),
        "Python": python,
    }


def triton_version() -> str | None:
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def sources() -> str:
    """A hash of all that kernels may be compiled from."""
    text = "".join(jit.folder_hash((ROOM / folder).resolve()) for folder in SOURCES)
    return hashlib.sha256(text.encode()).hexdigest()


def triton_folder() -> Path:
    """Triton's cache."""
    from triton import knobs

    return Path(knobs.cache.dir)


def triton_files(gpus: set[str]) -> Iterator[tuple[str, Path]]:
    """What Triton's cache holds of this installation's kernels for some GPUs, and its launchers.

    A kernel's folder is a hash of its source, its options, Triton and the GPU, so one that is out
    of date is never found. A copy of its lines tells where it was compiled from.
    """
    if triton_version() is None:
        return
    ours = str(ROOM / "triton").encode()
    for meta in sorted(triton_folder().glob("*/*.json")):
        code, lines = meta.with_suffix(".cubin"), meta.with_suffix(".ttir")
        if not (code.is_file() and lines.is_file() and ours in lines.read_bytes()):
            continue
        arch = json.loads(meta.read_text())["target"]["arch"]
        if f"{arch // 10}.{arch % 10}" in gpus:
            yield from ((f"triton/{meta.parent.name}/{p.name}", p) for p in (code, meta))
    for name in (
        "cuda_utils",
        "__triton_launcher",
    ):  # of C; the second until 3.6
        for path in sorted(triton_folder().glob(f"*/{name}*.so")):
            yield f"triton/{path.parent.name}/{path.name}", path
