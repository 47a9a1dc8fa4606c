"""`anybit doctor` and `anybit formats`: what is installed, what is known, and what runs where."""

import dataclasses
import importlib.metadata
import inspect
import platform
import textwrap
from importlib.util import find_spec

import torch
from rich.console import Console
from rich.table import Table

from anybit.core.format import Format, get_format, known_formats
from anybit.kernels.backend import LayerSpec
from anybit.kernels.native.isa import is_x86, isa, processor
from anybit.kernels.registry import refusals

PACKAGES = (
    "anybit",
    "torch",
    "transformers",
    "safetensors",
    "numpy",
    "triton",
    "nvidia-cutlass-dsl",
    "llvmlite",
)
SHAPE = (4096, 4096)
WITHOUT_LLVM = (
    "pip install 'anybit\\[cpu]' adds `native`, kernels for this processor that multiply every "
    "format in its few bits. Without it, `cpu` multiplies integers with one scale a row as int8, "
    "and `dense` holds a decoded copy of every other weight, 16 bits or more for each."
)


def doctor(console: Console | None = None) -> None:
    """Print versions, devices, and the backend of every format on each kind of device."""
    console = console or Console()
    found = (f"{name} {version(name)}" for name in PACKAGES)
    console.print(f"Python {platform.python_version()}, " + ", ".join(found))
    for device, what in devices().items():
        console.print(f"\n[bold]{device}[/]: {what}")
        table = Table("format", "runs on", "refused by", title_justify="left")
        for spec in specs():
            answers = refusals(LayerSpec(get_format(spec), None, SHAPE, torch.device(device)))
            taken = next(name for name, reason in answers.items() if reason is None)
            before = list(answers)[: list(answers).index(taken)]
            table.add_row(spec, taken, "\n".join(f"{name}: {answers[name]}" for name in before))
        console.print(table)
        if device == "cpu" and is_x86() and find_spec("llvmlite") is None:
            console.print(WITHOUT_LLVM)
    console.print(
        f"Asked for a weight of {SHAPE[0]}x{SHAPE[1]}; weights only, no quantized activations."
    )


def formats(console: Console | None = None) -> None:
    """Print every registered format: names, bits per weight, options, and its source."""
    console = console or Console()
    families: dict[type[Format], list[str]] = {}
    for name, cls in known_formats():
        families.setdefault(cls, []).append(name)
    for cls, names in families.items():
        table = Table("spec", f"bits per weight at {SHAPE[0]}x{SHAPE[1]}", box=None, padding=(0, 2))
        for spec in examples_of(names):
            table.add_row(spec, f"{get_format(spec).bits_per_weight(SHAPE):.3f}")
        console.print(headline(cls), style="bold", highlight=False, markup=False)
        console.print(table)
        for line in options_of(cls):
            console.print(f"  {line}", style="dim", highlight=False, markup=False)
        console.print()


def specs() -> list[str]:
    """The registered names that are a whole spec."""
    return [name for name, _ in known_formats() if parses(name)]


def parses(spec: str) -> bool:
    try:
        get_format(spec)
    except ValueError:
        return False
    return True


def examples_of(names: list[str]) -> list[str]:
    """A family's names, and one of them with its options set."""
    whole = [name for name in names if parses(name)]
    if not whole:
        return []
    fmt = get_format(whole[len(whole) // 2])
    options: dict[str, object] = {
        field.name: 128 if field.name == "group" else True
        for field in dataclasses.fields(fmt)
        if field.name == "group" or isinstance(field.default, bool)
    }
    richer = dataclasses.replace(fmt, **options).spec
    return [*whole, richer] if richer not in whole else whole


def headline(cls: type[Format]) -> str:
    """The first sentence about a format: of its module, which names the source, or of its class."""
    text = inspect.getdoc(inspect.getmodule(cls)) or inspect.getdoc(cls) or cls.__name__
    return " ".join(text.split("\n\n")[0].split())


def options_of(cls: type[Format]) -> list[str]:
    """What the class's docstring says of its options: the lines of "Attributes:"."""
    section = (inspect.getdoc(cls) or "").partition("\nAttributes:\n")[2]
    return textwrap.dedent(section.partition("\n\n")[0]).splitlines()


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def devices() -> dict[str, str]:
    """Devices of this machine and what they are, in words."""
    level = isa() if find_spec("llvmlite") else None
    kernels = f"`native` compiles for {level.name}" if level else "no compiled kernels"
    out = {"cpu": f"{processor()}, {torch.get_num_threads()} threads, {kernels}"}
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        out[f"cuda:{index}"] = (
            f"{about.name}, compute capability {about.major}.{about.minor}, "
            f"{about.total_memory / 2**30:.0f} GiB"
        )
    return out
