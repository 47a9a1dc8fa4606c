"""`anybit plan --roofline`: what the cost model says of one layer, beside measured times."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput
from anybit.files.picture import check_picture
from anybit.formats.presets import ROOFLINE
from anybit.planning.cost_model import DEVICES, Cost, Device, cost, instructions, operand_of

TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 4096)


@dataclass(frozen=True)
class Point:
    """One prediction beside a measured time, where there is one (seconds)."""

    scheme: str
    m: int
    n: int
    k: int
    cost: Cost
    measured: float | None = None


def roofline(
    device: Device,
    schemes: Iterable[str],
    ms: Sequence[int],
    shape: tuple[int, int],
    measured: dict[tuple[str, int], float] | None = None,
) -> list[Point]:
    """Predictions for every scheme and number of tokens; measured: (scheme, m) -> seconds."""
    n, k = shape
    out = []
    for scheme in schemes:
        fmt = parse_scheme(scheme)[0]
        alpha, bits = instructions(scheme), fmt.bits_per_weight(shape)
        for m in ms:
            predicted = cost(device, m, n, k, bits, operand_of(scheme), alpha)
            out.append(Point(scheme, m, n, k, predicted, (measured or {}).get((scheme, m))))
    return out


def show(
    device: str,
    shape: str,
    schemes: Sequence[str] | None = None,
    csv: Path | None = None,
    picture: Path | None = None,
) -> str:
    """The table for a device of `DEVICES` and a shape "NxK"; also drawn, if a file is given."""
    from anybit.measure.bench import parse_shape

    if device not in DEVICES:
        raise InvalidInput(f"unknown device {device!r}; known: {', '.join(DEVICES)}")
    n, k = parse_shape(shape)
    times = measured_times(csv, (n, k)) if csv else {}
    points = roofline(DEVICES[device], schemes or ROOFLINE, TOKENS, (n, k), times)
    if picture:
        plot(points, picture, f"{n} x {k} on {DEVICES[device].name}")
    return table(points)


def measured_times(path: Path, shape: tuple[int, int]) -> dict[tuple[str, int], float]:
    """(scheme, M) -> seconds of anybit's own kernels for a shape, from a CSV of `benchmarks/`.

    The fastest row counts, of products whose activations were quantized before.
    """
    from anybit.measure.bench import read_csv

    out: dict[tuple[str, int], float] = {}
    for row in read_csv(path):
        if row.us is None or not row.peer.startswith("anybit") or shape != (row.N, row.K):
            continue
        notation, _, given = row.activation.partition("-")
        if given or notation in ("fp16", "bf16"):
            scheme = row.format + (f"@{notation}" if given else "")
            out[scheme, row.M] = min(row.us * 1e-6, out.get((scheme, row.M), math.inf))
    return out


def table(points: Sequence[Point]) -> str:
    """Predicted and measured times as text, a line for each.

    "predicted" has loading, decoding and multiplying overlap; "in turns" is equation 6 as printed,
    in which decoding and multiplying alternate.
    """
    width = max(len(p.scheme) for p in points)
    lines = [
        f"{'format':{width}} {'M':>5} {'predicted':>10} {'in turns':>10} {'bound by':>12} "
        f"{'measured':>10}  ratio"
    ]
    for p in points:
        text = f"{p.scheme:{width}} {p.m:5} {p.cost.seconds * 1e6:7.1f} us"
        text += f" {p.cost.in_turns * 1e6:7.1f} us {p.cost.bound:>12}"
        if p.measured:
            text += f" {p.measured * 1e6:7.1f} us {p.measured / p.cost.seconds:6.2f}"
        lines.append(text)
    return "\n".join(lines)


def plot(points: Sequence[Point], path: str | Path, title: str = "") -> None:
    """Predicted (lines) and measured (dots) TFLOP/s over tokens, as PNG, SVG or PDF by `path`."""
    check_picture(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for scheme in dict.fromkeys(p.scheme for p in points):
        mine = [p for p in points if p.scheme == scheme]
        work = [2 * p.m * p.n * p.k / 1e12 for p in mine]
        rate = [w / p.cost.seconds for w, p in zip(work, mine, strict=True)]
        (line,) = axes.plot([p.m for p in mine], rate, label=scheme)
        dots = [(p.m, w / p.measured) for w, p in zip(work, mine, strict=True) if p.measured]
        if dots:
            axes.plot(*zip(*dots, strict=True), "o", color=line.get_color())
    axes.set(xscale="log", yscale="log", xlabel="tokens (M)", ylabel="TFLOP/s", title=title)
    axes.legend()
    figure.savefig(path)
