"""`anybit doctor` and `anybit formats`: what is installed, what is known, and what runs where."""

import dataclasses
import inspect
import platform
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from anybit.core.format import Format, get_format, known_formats
from anybit.core.names import ALIASES
from anybit.core.scheme import parse_scheme
from anybit.files.directory import check_folder
from anybit.kernels import registry
from anybit.kernels.backend import LayerSpec, refuse_vendor
from anybit.kernels.between import family_of
from anybit.kernels.processor import processor
from anybit.measure import bench
from anybit.measure.report import about, version, write

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
Answers = Mapping[str, Mapping[str, str | None]]  # scheme -> backend -> why it refuses; None: not
ROTATE = (
    "Every format also has the option rotate=k or rotate=kn: the layer's inputs, or inputs and "
    "outputs, are rotated, which spreads outliers over 128 columns. Calibrate then (gptq)."
)

BEARS = (
    "What two small published models bear (SmolLM2 135M and Gemma 3 270M; KL divergence from the "
    "unquantized model, nats per token, rounded to nearest): 8 bits 0.003; 6 bits 0.04 to 0.07, "
    "fp:e2m3 0.02; 4 bits 0.2 to 0.4 with a scale for at most 64 columns, 0.1 calibrated with "
    "gptq; 3 bits 1 and more, 0.4 calibrated; 2 bits are lost. Larger models bear more."
)


TIMED = (
    "int4:group=128",
    "fp6",
    "liquid@int8",
    "fp8@fp8",
    "int2:group=64,zero",
    "trellis:code=look",
)
SHAPES, TOKENS = ((4096, 4096), (14336, 4096)), {"cuda": (1, 16, 256), "cpu": (1, 16)}
ABOUT = (
    "The report holds: the GPU's or CPU's model and properties, versions of the driver, of Python "
    "and of packages, what each backend says to each format, self-tests of kernels, and times of "
    "{count} formats. It holds no paths, no names of a machine or user, no serial numbers. "
    "It is written to {path} and sent nowhere; read it, and attach it to an issue. Measuring takes "
    "minutes; leave the machine alone meanwhile."
)


def report(schemes: Sequence[str], path: Path, console: Console | None = None) -> None:
    """Say what a report holds, measure, and write it.

    Args:
        schemes: To time; `TIMED` if there are none.
        path: The file.
        console: Where to say it.

    Raises:
        InvalidInput: A scheme is unknown.
        FileNotFoundError: The file's folder is not there.
        Exception: What has ended the measuring; the file is written all the same, and says it.
    """
    console = console or Console()
    check_folder(path)
    for scheme in schemes:
        parse_scheme(scheme)
    schemes = schemes or TIMED
    # With its number, torch knows the GPU's properties also after a kernel broke its context.
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    say(ABOUT.format(path=path, count=len(schemes)))
    measuring = bench.start(schemes, SHAPES, TOKENS[device.type], say, every=True)
    known = asked(device)
    rows: list[bench.Row] = []
    stopped: BaseException | None = None
    try:
        for row in measuring:
            rows.append(row)
    except BaseException as error:
        stopped = error
        raise
    finally:
        with suppress(Exception):  # a GPU that a kernel broke may not answer again
            known = asked(device)  # with the self-tests of this run
        write(path, known, rows, stopped)
        why = f", which says what stopped it after {len(rows)} rows; attach it" if stopped else ""
        say(f"wrote {path}, {path.stat().st_size / 1e3:.0f} KB{why}")


def asked(device: torch.device) -> dict[str, Any]:
    """What a report says beside rows, of every format."""
    return about(device, answers_of({spec: parse_scheme(spec) for spec in specs()}, str(device)))


def answers_of(layers: Mapping[str, tuple[Format, str | None]], device: str) -> Answers:
    """What each backend says to a weight of `SHAPE` in each scheme."""
    return {
        scheme: registry.refusals(LayerSpec(fmt.plain(), activation, SHAPE, torch.device(device)))
        for scheme, (fmt, activation) in layers.items()
    }


def doctor(schemes: Sequence[str] = (), console: Console | None = None) -> None:
    """Print the backends of all formats on each device, in short; of some schemes, in full.

    Raises:
        InvalidInput: A scheme is unknown.
    """
    console = console or Console()
    layers = {scheme: parse_scheme(scheme) for scheme in schemes or specs()}
    for device, what in devices().items():
        answers = answers_of(layers, device)
        console.print(f"[bold]{device}[/]: {what}")
        (in_full if schemes else in_short)(console, answers, device.partition(":")[0])
        if device != "cpu" and (tested := self_test(torch.device(device))):
            console.print(tested)
        console.print()
    console.print(
        f"Asked for a weight of {SHAPE[0]}x{SHAPE[1]}. `anybit doctor FORMAT...` shows every "
        "backend's answer; FORMAT may be a scheme such as liquid@int8.",
        style="dim",
    )
    found = (f"{name} {version(name) or '(not installed)'}" for name in PACKAGES)
    console.print(f"Python {platform.python_version()}, " + ", ".join(found), style="dim")


FEW = 8  # names that a line may hold


def in_short(console: Console, answers: Answers, kind: str) -> None:
    """A line for each backend with what runs on it, and why what it refuses does not.

    kind: the device's type.
    """
    by_backend: dict[str, list[str]] = {}
    reasons: dict[tuple[str, str], list[str]] = {}
    for scheme, found in answers.items():
        for backend, reason in found.items():
            if reason is None:
                by_backend.setdefault(backend, []).append(scheme)
                break
            if kind in (registry.BACKENDS[backend][1] or (kind,)):
                reasons.setdefault((backend, reason), []).append(scheme)
    for backend in sorted(by_backend, key=list(registry.BACKENDS).index):
        mine = by_backend[backend]
        others = [scheme for scheme in answers if scheme not in mine]
        which = ", ".join(mine)
        if len(others) < len(mine) > FEW:
            which = "all formats" + (f" but {', '.join(others)}" if others else "")
        console.print(f"  runs on [bold]{backend}[/]: {which}", highlight=False)
    for (backend, reason), refused in reasons.items():
        which = "" if len(refused) == len(answers) else f" ({', '.join(refused)})"
        console.print(f"  not on {backend}: {reason}{which}", highlight=False, markup=False)


def in_full(console: Console, answers: Answers, kind: str) -> None:
    """What each backend that is asked says to each scheme."""
    for scheme, found in answers.items():
        console.print(f"  {scheme}", highlight=False, markup=False)
        for backend, reason in found.items():
            text = f"    {backend}: {reason or 'runs it'}"
            console.print(text, highlight=False, markup=False)
            if reason is None:
                break


def self_test(device: torch.device) -> str | None:
    """What the self-test of the kernels for `mma.sync` has found on a GPU so far, in words."""
    from anybit.kernels.mma import selftest

    return None if refuse_vendor() else selftest.summary(device)


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
    for text in (ROTATE, BEARS):
        console.print(text, "\n", sep="", highlight=False, markup=False)
    own = Table("names of other tools", "here", box=None, padding=(0, 2))
    for name, spec in ALIASES.items():
        own.add_row(name, spec)
    console.print(own)


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
    options: dict[str, Any] = {
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


def devices() -> dict[str, str]:
    """Devices of this machine and what they are, in words."""
    kernels = family_of(torch.device("cpu")).about()
    out = {"cpu": f"{processor()}, {torch.get_num_threads()} threads, {kernels}"}
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        out[f"cuda:{index}"] = (
            f"{about.name}, compute capability {about.major}.{about.minor}, "
            f"{about.total_memory / 2**30:.0f} GiB"
        )
    return out
