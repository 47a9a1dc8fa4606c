"""`anybit doctor --report`: what runs on this machine, and how fast, as one file for an issue."""

import getpass
import importlib.metadata
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from anybit.errors import in_a_line
from anybit.files.directory import without_nan, write_json
from anybit.measure.bench import Row
from anybit.version import __version__

PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "llvmlite")
# What may be a path: all between quotes with a slash in it; a word with one and, as names may have
# spaces, what follows up to a sign that ends a part of a sentence. Or the number of a GPU.
PRIVATE = re.compile(
    r"""'[^']*[\\/][^']*'|"[^"]*[\\/][^"]*"|[^\s'"]*[\\/][^:;'")]*[^:;'")\s]"""
    r"""|[^\s'"]*[\\/]|\b(?:GPU|MIG)-[0-9a-f]{8}[\w-]*"""
)
NVIDIA = Path("/sys/module/nvidia/version")


def write(
    path: Path,
    known: Mapping[str, Any],
    rows: Sequence[Row],
    error: BaseException | None = None,
) -> None:
    """Write a report, whole; no words of errors in it name a folder, this machine or its user.

    Args:
        path: The file.
        known: See `about`.
        rows: What was measured.
        error: What has ended the measuring before its end.
    """
    told = [without_nan(asdict(row)) | {"note": unnamed(row.note)} for row in rows]
    stopped = {"stopped": unnamed(in_a_line(error))} if error else {}
    write_json(path, {**known, "rows": told, **stopped})


def about(device: torch.device, answers: Mapping[str, Mapping[str, str | None]]) -> dict[str, Any]:
    """What a report says beside rows.

    Args:
        device: Which one it is about.
        answers: What each backend says to each scheme: None that it runs it, or why not.
    """
    backends = {scheme: unnamed_values(said) for scheme, said in answers.items()}
    return {"anybit": __version__, **machine(device), "backends": backends}


def unnamed_values(said: Mapping[str, str | None]) -> dict[str, str | None]:
    return {key: text and unnamed(text) for key, text in said.items()}


def unnamed(text: str) -> str:
    """An error's words without paths, and without names of this machine and its user."""
    text = PRIVATE.sub("...", text)
    for name in sorted(names(), key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "...", text, flags=re.IGNORECASE)
    return text


def names() -> set[str]:
    """Of this machine, with and without its domain, and of the user."""
    found = {platform.node(), platform.node().partition(".")[0]}
    with suppress(OSError, KeyError, ImportError):  # a container may run as a number
        found.add(getpass.getuser())
    with suppress(RuntimeError):
        found.add(Path.home().name)
    return found - {""}


def machine(device: torch.device) -> dict[str, Any]:
    """What a stranger must know of the machine; nothing names it or its user."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: version(name) for name in PACKAGES},
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    if torch.version.hip:
        found["rocm"] = torch.version.hip
    elif device.type == "cuda":
        from anybit.kernels.cute.driver import driver_version
        from anybit.kernels.mma import selftest, tiles

        found["properties"] = asdict(tiles.gpu_of(device))
        found["cuda_driver"] = driver_version()
        found["driver"] = NVIDIA.read_text("utf-8").strip() if NVIDIA.exists() else None
        verdicts = selftest.verdicts(device)
        wrong = {name: said for name, said in verdicts.items() if said != selftest.RIGHT}
        found["self_test"] = verdicts | unnamed_values(wrong)
    else:
        found["cpu"] = torch.backends.cpu.get_cpu_capability()
        found["threads"] = torch.get_num_threads()
    return found


def version(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
