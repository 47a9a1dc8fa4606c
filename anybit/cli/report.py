"""What the demo measured, and how it is shown: as a table, as a plot, as a page."""

import base64
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
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


def write(results: Results, out: Path) -> None:
    """Write `size_vs_kl.png` and the self-contained `report.html` into a directory."""
    light, dark = (plot(results.rows, dark=dark) for dark in (False, True))
    (out / "size_vs_kl.png").write_bytes(light)
    (out / "report.html").write_text(page(results, light, dark), encoding="utf-8")


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

FAMILIES = (  # name, marker, color on light ground, on dark ground; the first that fits
    ("integer, a scale per row", "o", "#2463b0", "#7db4f5"),
    ("integer, groups", "s", "#1b8a78", "#5fd0bd"),
    ("minifloat", "^", "#c2541b", "#f59b64"),
    ("liquid", "D", "#8a3fa8", "#cf93e6"),
    ("sparse", "P", "#7a6a12", "#d8c65a"),
    ("codebook", "v", "#b02a55", "#f28aa8"),
    ("other", "X", "#555555", "#bbbbbb"),
)


def family(spec: str) -> str:
    name, _, options = spec.partition(":")
    if name.startswith("int"):
        return "integer, groups" if options else "integer, a scale per row"
    if name.startswith("fp"):
        return "minifloat"
    return name if any(name == known for known, *_ in FAMILIES) else "other"


def plot(rows: Sequence[Row], dark: bool = False) -> bytes:
    """A PNG of KL divergence (log) against bits per weight, every point with its name."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patheffects import withStroke

    ink, ground, grid = ("#e8e8e8", "#16181d", "#343840") if dark else ("#222", "white", "#e2e2e2")
    points = [row for row in rows if row.kl > 0 and row.bits < 16]
    figure = Figure(figsize=(10.0, 6.0), dpi=144, facecolor=ground, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(facecolor=ground)
    for name, marker, *colors in FAMILIES:
        mine = sorted((r.bits, r.kl) for r in points if family(r.spec) == name)
        if mine:
            style = "-" if name.startswith(("integer", "minifloat")) else ""
            x, y = zip(*mine, strict=True)
            color = colors[dark]
            axes.plot(x, y, marker + style, color=color, label=name, markersize=8, linewidth=1.2)
    axes.set_yscale("log")
    axes.margins(x=0.09, y=0.09)
    axes.set_xlabel("stored bits per weight", fontsize=13, color=ink)
    axes.set_ylabel("KL divergence from bf16, nats per token", fontsize=13, color=ink)
    axes.tick_params(colors=ink, labelsize=12, which="both")
    axes.grid(True, color=grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(ink)
    if points:
        axes.legend(frameon=False, fontsize=11.5, labelcolor=ink, loc="best")
        label(axes, [(r.bits, r.kl, r.spec.replace(":", " ", 1).replace(",", " ")) for r in points])
        for text in axes.texts:
            text.set_color(ink)
            text.set_path_effects([withStroke(linewidth=3, foreground=ground)])
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


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
                name, (x, y), (dx, dy), textcoords="offset points", ha=align, va="center",
                arrowprops=line, fontsize=11.5,
            )  # fmt: skip
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


# The page.


def page(results: Results, light: bytes, dark: bytes) -> str:
    """One HTML file with everything in it."""
    code, styles = highlighted(results.completion)
    written = "".join(
        f"<h3>{escape(', '.join(names))}</h3>\n{highlighted(text)[0]}"
        for names, text in texts(results.rows)
    )
    dense = results.rows[0]
    return PAGE.format(
        styles=STYLE + styles,
        model=escape(results.model),
        parameters=f"{results.parameters / 1e6:.1f}",
        dense=escape(dense.spec),
        tokens=f"{results.tokens:,}",
        documents=results.documents,
        window=results.window,
        summary=escape(summary(results.rows)),
        perplexity=f"{dense.perplexity:.3f} ± {dense.perplexity_error:.3f}",
        head="".join(f"<th>{escape(name)}</th>" for name in COLUMNS),
        body="\n".join(map(table_row, results.rows)),
        light=base64.b64encode(light).decode(),
        dark=base64.b64encode(dark).decode(),
        prompt=highlighted(results.prompt)[0],
        written=written,
        saved=escape(results.saved),
        code=code,
        python=escape(results.python),
        torch=escape(results.torch),
        processor=escape(results.processor),
        threads=results.threads,
    )


def table_row(row: Row) -> str:
    named: Iterable[tuple[str, str]] = zip(COLUMNS, cells(row), strict=True)
    tds = (f'<td data-label="{escape(name)}">{escape(text)}</td>' for name, text in named)
    return f"<tr>{''.join(tds)}</tr>"


def highlighted(code: str) -> tuple[str, str]:
    """Python source as HTML, and the rules that color it on light and on dark ground."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    def rules(style: str) -> str:
        return str(HtmlFormatter(style=style).get_style_defs(".highlight"))

    html = highlight(code, PythonLexer(), HtmlFormatter())
    dark = f"@media (prefers-color-scheme: dark) {{\n{rules('github-dark')}\n}}"
    return html, f"{rules('friendly')}\n{dark}\n.highlight {{ background: none; }}\n"


STYLE = """
:root { color-scheme: light dark; --ink: #222; --ground: #fff; --line: #ddd; --soft: #f5f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --ground: #16181d; --line: #343840; --soft: #1f2229; }
}
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground);
  max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
h3 { font: 600 .9rem/1.4 ui-monospace, monospace; margin: 1rem 0 .3rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
tbody tr:first-child { font-weight: 600; }
tbody td:first-child { font-family: ui-monospace, monospace; }
img { width: 100%; height: auto; display: block; margin: 1.5rem 0; }
.highlight { background: var(--soft); border-radius: .5rem; padding: .1rem 1rem; overflow-x: auto; }
.highlight pre { font: .9rem/1.45 ui-monospace, monospace; }
.note { font-size: .9rem; opacity: .8; }
@media (max-width: 40rem) {
  thead { display: none; }
  tbody, tr, td { display: block; }
  tr { display: grid; grid-template-columns: repeat(3, 1fr); gap: .2rem .6rem; padding: .6rem 0;
    border-bottom: 1px solid var(--line); }
  td { border: 0; padding: 0; text-align: left; }
  td:first-child { grid-column: 1 / -1; font-weight: 600; }
  td:not(:first-child)::before { content: attr(data-label); display: block; font-size: .75rem;
    font-weight: 400; opacity: .7; }
}
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>anybit: {model} in every family of formats</title>
<style>{styles}</style>
</head>
<body>
<h1>{model} in every family of formats</h1>
<p>A language model of {parameters} million parameters, quantized without any data (round to
nearest) and compared with the {dense} model, whose perplexity is {perplexity} (standard
error). Scored on {tokens} tokens, the middle of each of {documents} modules of Python's standard
library that training left out, in windows of {window} tokens, computed in fp32.</p>
<p><strong>{summary}</strong></p>
<picture>
<source media="(prefers-color-scheme: dark)" srcset="data:image/png;base64,{dark}">
<img alt="KL divergence against bits per weight" src="data:image/png;base64,{light}">
</picture>
<table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>
<p class="note">bits: stored bits per weight of the quantized layers, scales and tables included.
MB: all tensors of the saved checkpoint, with the embeddings, which stay unquantized. KL: mean
divergence KL({dense} || quantized) over the whole vocabulary, nats per token. top-1: positions
where both models find the same token most likely.
A name without options has one scale for a whole row, which is little for 3 bits or fewer: compare
the rows with groups of 64.</p>
<h2>Completions of the same prompt</h2>
{prompt}
<p class="note">Greedily, by the engine. Formats under one heading write the same.</p>
{written}
<h2>Saved as {saved}, loaded in a fresh process through transformers</h2>
{code}
<p class="note">Python {python}, torch {torch}, {processor}, {threads} threads.</p>
</body>
</html>
"""
