"""`anybit bench --report`: what was measured, and on what, as one file to attach to an issue."""

import importlib.metadata
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from anybit.files.directory import check_folder, without_nan, write_json
from anybit.measure import bench
from anybit.measure.bench import Row
from anybit.version import __version__

PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "llvmlite")


def run(
    schemes: Sequence[str],
    shapes: Sequence[str],
    ms: str,
    csv: Path | None,
    report: Path | None,
    say: Callable[[str], None],
) -> None:
    """`anybit bench`: `bench.run`, with its words, and the report if there is to be one."""
    if report:
        check_folder(report)
    sizes = [bench.parse_shape(text) for text in shapes]
    rows = bench.run(schemes, sizes, bench.parse_counts(ms), csv, say, every=report is not None)
    if report:
        write(report, rows, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def write(path: Path, rows: Sequence[Row], device: torch.device) -> None:
    """Write a report, whole: the machine, versions, verdicts of self-tests, and every row."""
    measured = [without_nan(asdict(row)) for row in rows]
    write_json(path, {"anybit": __version__, **machine(device), "rows": measured})


def machine(device: torch.device) -> dict[str, Any]:
    """What a stranger must know of the machine; nothing names it or its user."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: version(name) for name in PACKAGES},
    }
    if device.type == "cuda":
        from anybit.kernels.cute.driver import driver_version
        from anybit.kernels.mma import selftest, tiles

        found["gpu"] = torch.cuda.get_device_name(device)
        found["properties"] = asdict(tiles.gpu_of(device))
        found["cuda_driver"] = driver_version()
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
