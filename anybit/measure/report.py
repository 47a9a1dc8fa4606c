"""`anybit doctor --report`: what runs on this machine, and how fast, as one file for an issue."""

import importlib.metadata
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from anybit.files.directory import without_nan, write_json
from anybit.measure.bench import Row
from anybit.version import __version__

PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "llvmlite")
PATH = re.compile(r"(?<![\w.])(?:[A-Za-z]:|~)?(?:[\\/][^\s\\/'\":;,)]+)*[\\/](?=[^\s\\/'\":;,)]+)")
NVIDIA = Path("/sys/module/nvidia/version")


def write(
    path: Path,
    rows: Sequence[Row],
    answers: Mapping[str, Mapping[str, str | None]],
    device: torch.device,
) -> None:
    """Write a report, whole.

    Args:
        path: The file.
        rows: What was measured.
        answers: What each backend says to each scheme: None that it runs it, or why not.
        device: Which one it is about.
    """
    known = {"anybit": __version__, **machine(device), "backends": answers}
    measured = [without_nan(asdict(row)) for row in rows]
    write_json(path, unnamed({**known, "rows": measured}))


def unnamed(found: Any) -> Any:
    """The same without names of folders, of this machine and of its user, which errors may tell."""
    if isinstance(found, Mapping):
        return {unnamed(key): unnamed(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [unnamed(value) for value in found]
    if not isinstance(found, str):
        return found
    text = PATH.sub(".../", found)
    for name in filter(None, {platform.node(), Path.home().name}):
        text = re.sub(rf"\b{re.escape(name)}\b", "...", text)
    return text


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
        found["self_test"] = selftest.verdicts(device)
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
