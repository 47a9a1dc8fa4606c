"""What the demo measured, and how it is shown: as a table and as a plot."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anybit.files.picture import require_matplotlib


@dataclass(frozen=True)
class Row:
    """The figures of one format, or of the dense model (spec "bf16").

    bits: stored bits per weight over the quantized layers, scales and tables included. bytes: size
    of the checkpoint's tensors on disk. kl: nats per token. text: what the model writes behind the
    prompt of `Results`, greedily.
    """

    spec: str
    bits: float
    bytes: int
    perplexity: float
    perplexity_error: float
    kl: float
    agreement: float
    text: str = ""


@dataclass(frozen=True)
class Results:
    """All figures of a run, the dense model's row first, and what they depend on."""

    model: str
    parameters: int
    documents: int
    tokens: int
    window: int
    python: str
    torch: str
    processor: str
    threads: int
    rows: list[Row]
    prompt: str
    saved: str
    completion: str


COLUMNS = ("format", "bits", "MB", "perplexity", "KL", "top-1")


def cells(row: Row) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS."""
    return (
        row.spec,
        f"{row.bits:.2f}",
        f"{row.bytes / 1e6:.2f}",
        f"{row.perplexity:.3f}" if row.perplexity < 100 else f"{row.perplexity:.4g}",
        f"{row.kl:.5f}",
        f"{row.agreement:.1%}",
    )


def texts(rows: Sequence[Row]) -> list[tuple[list[str], str]]:
    """Which formats have written each text, the dense model's first."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row.text, []).append(row.spec)
    return [(names, text) for text, names in found.items()]


def summary(rows: Sequence[Row]) -> str:
    """What follows from the figures, in a sentence or two."""
    dense, rest = rows[0], sorted(rows[1:], key=lambda row: row.bits)
    wide = f"{dense.bits:.0f} bits a weight"
    near = next((r for r in rest if r.perplexity < 1.01 * dense.perplexity), None)
    same = next((r for r in rest if r.agreement > 0.95), None)
    out = []
    if near:
        out.append(
            f"{near.spec} is the smallest of these formats whose perplexity is within 1 % of the "
            f"unquantized model's: {near.bits:.2f} instead of {wide}."
        )
    if same and same is not near:
        out.append(
            f"{same.spec} ({same.bits:.2f} bits) is the smallest that finds the same token "
            "likeliest at over 95 % of all positions."
        )
    return " ".join(out) or f"None of these formats stays within 1 % of the perplexity at {wide}."


# The plot.

FAMILIES = (  # name, marker and color; the first that fits
    ("integer, a scale per row", "o", "#2463b0"),
    ("integer, groups", "s", "#1b8a78"),
    ("minifloat", "^", "#c2541b"),
    ("liquid", "D", "#8a3fa8"),
    ("sparse", "P", "#7a6a12"),
    ("codebook", "v", "#b02a55"),
    ("other", "X", "#555555"),
)


def family(spec: str) -> str:
    name, _, options = spec.partition(":")
    if name.startswith("int"):
        return "integer, groups" if options else "integer, a scale per row"
    if name.startswith("fp"):
        return "minifloat"
    return name if any(name == known for known, *_ in FAMILIES) else "other"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw KL divergence (log) against bits per weight, every point with its name."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patheffects import withStroke

    points = [row for row in rows if row.kl > 0 and row.bits < 16]
    figure = Figure(figsize=(10.0, 6.0), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, marker, color in FAMILIES:
        mine = sorted((r.bits, r.kl) for r in points if family(r.spec) == name)
        if mine:
            style = "-" if name.startswith(("integer", "minifloat")) else ""
            x, y = zip(*mine, strict=True)
            axes.plot(x, y, marker + style, color=color, label=name, markersize=8, linewidth=1.2)
    axes.set_yscale("log")
    axes.margins(x=0.09, y=0.09)
    axes.set_xlabel("stored bits per weight", fontsize=13)
    axes.set_ylabel("KL divergence from bf16, nats per token", fontsize=13)
    axes.tick_params(labelsize=12, which="both")
    axes.grid(True, color="#e2e2e2", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if points:
        axes.legend(frameon=False, fontsize=11.5, loc="best")
        label(axes, [(r.bits, r.kl, r.spec.replace(":", " ", 1).replace(",", " ")) for r in points])
        for text in axes.texts:
            text.set_path_effects([withStroke(linewidth=3, foreground="white")])
    figure.savefig(path)


def label(axes: Any, points: Sequence[tuple[float, float, str]]) -> None:
    """Write each point's name beside it, nearest to it, where it covers no point and no name."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    renderer = axes.figure.canvas.get_renderer()
    axes.figure.draw_without_rendering()
    pixels = axes.transData.transform([(x, y) for x, y, _ in points])
    taken = [Bbox.from_bounds(x - 9, y - 9, 18, 18) for x, y in pixels]
    if axes.get_legend():
        taken.append(axes.get_legend().get_window_extent(renderer))
    frame = axes.get_window_extent(renderer)
    places = [  # offset in points, and which end of the text lies there
        (side * 7 if abs(up) < 9 else side * 2, up, "left" if side > 0 else "right")
        for up in (0, 8, -8, 13, -13, 20, -20, 30, -30, 42, -42, 56, -56)
        for side in (1, -1)
    ]
    for x, y, name in sorted(points):
        here = axes.transData.transform((x, y))
        best, cost = None, math.inf
        for dx, dy, align in places:
            line = {"arrowstyle": "-", "color": "#999999", "lw": 0.7} if abs(dy) > 20 else None
            text = axes.annotate(
                name,
                (x, y),
                (dx, dy),
                textcoords="offset points",
                ha=align,
                va="center",
                arrowprops=line,
                fontsize=11.5,
            )
            text.update_positions(renderer)
            box = Text.get_window_extent(text, renderer)  # without the line
            outside = box.x1 > frame.x1 or box.x0 < frame.x0
            worse = sum(box.overlaps(other) for other in taken) + 3 * outside
            nearest = min(pixels, key=lambda at: distance(box, at))
            worse += 2 * bool(distance(box, nearest) < distance(box, here) - 1)
            if worse < cost:
                if best is not None:
                    best.remove()
                best, cost = text, worse
            else:
                text.remove()
            if not worse:
                break
        assert best is not None
        taken.append(Text.get_window_extent(best, renderer))


def distance(box: Any, at: Sequence[float]) -> float:
    """Pixels between a rectangle and a point."""
    across = max(box.x0 - at[0], 0, at[0] - box.x1)
    return math.hypot(across, max(box.y0 - at[1], 0, at[1] - box.y1))
