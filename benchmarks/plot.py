"""Draw the measurements of a CSV: for each shape, speed against the number of tokens.

    python benchmarks/plot.py benchmarks/results/h200_gemm.csv --out docs/img

Writes one PNG for each shape: times as fast as cuBLAS fp16, both axes logarithmic. Every panel
holds one number of bits, so that kernels that read the same bytes stand together. Where a CSV has
several rows for a point (overlapping launches or not, fp16 or bf16), the fastest is drawn.
"""

import argparse
import itertools
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.transforms import Bbox

from anybit.measure.bench import Row, read_csv

NAMES = {
    (6144, 4096): "qkv",
    (4096, 4096): "o",
    (28672, 4096): "gate and up",
    (4096, 14336): "down",
}
COLORS = {
    "cublas": "0.55",
    "humming": "tab:orange",
    "quack": "tab:purple",
    "gemlite": "tab:olive",
    "tinygemm": "tab:brown",
    "bitsandbytes": "tab:pink",
    "anybit": "tab:blue",
    "anybit-triton": "tab:cyan",
    "anybit-hopper": "tab:green",
}
DASHES = ["-", "--", "-.", (0, (1, 1)), (0, (4, 1, 1, 1, 1, 1))]
PANELS = {
    "1 to 3 bits": ("int1", "int2", "int3", "codebook", "trellis"),
    "4 bits": ("int4", "nf4", "fp4bnb", "liquid", "fp4", "mxfp4", "nvfp4", "sparse"),
    "5 and 6 bits": ("int5", "int6", "fp5", "fp6", "mxfp6"),
    "7 and 8 bits": ("int7", "int8", "fp8", "mxfp8"),
    "GGUF": ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q4_1", "q5_1", "iq4_nl", "iq4_xs"),
}
QUANTIZED = {
    "4 bits, 8-bit activations": ("int4", "liquid", "sparse"),
    "6 and 8 bits, 8-bit activations": ("int8", "fp8", "fp6", "int8(_int_mm)"),
}
SPEEDS = (0.25, 0.5, 1, 2, 3, 4)
SLOWEST = 0.2  # slower points would press all others together
Key = tuple[str, str, str]  # peer, format, activation


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    args = parser.parse_args()
    shapes: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for path in args.csv:
        for row in read_csv(path):
            if row.us is not None:
                shapes[row.N, row.K].append(row)
    args.out.mkdir(parents=True, exist_ok=True)
    for (n, k), rows in shapes.items():
        path = args.out / f"gemm_{n}x{k}.png"
        draw(n, k, rows, path)
        print(path)


def panel_of(row: Row) -> str | None:
    """The panel that a row belongs to; None for the dense layers, which are in all of them."""
    if row.format in ("fp16", "bf16", "fp32"):
        return None
    panels = QUANTIZED if row.activation.startswith(("int8", "fp8")) else PANELS
    name = row.format.split(":")[0].split()[0]
    return next((panel for panel, names in panels.items() if name in names), "other formats")


def draw(n: int, k: int, rows: list[Row], path: Path) -> None:
    """One PNG with a panel for each kind of format."""
    panels: dict[str, dict[Key, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        panel = panel_of(row)
        if panel is None or row.vs_cublas_fp16 is None or row.vs_cublas_fp16 < SLOWEST:
            continue
        activation = "" if row.activation in ("fp16", "bf16") else row.activation
        points = panels[panel][row.peer, row.format, activation]
        points[row.M] = max(row.vs_cublas_fp16, points.get(row.M, 0.0))
    order = [name for name in (*PANELS, *QUANTIZED, "other formats") if name in panels]
    columns = min(len(order), 3)
    lines = -(-len(order) // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(5.2 * columns, 5.6 * lines), sharey=True, squeeze=False
    )
    for axis in grid.flat[len(order) :]:
        axis.set_visible(False)
    for axis, name in zip(grid.flat, order, strict=False):
        axis.axhline(1, color=COLORS["cublas"], linewidth=1.2)
        used: dict[str, int] = defaultdict(int)
        for key, points in sorted(panels[name].items()):
            line(axis, key, points, DASHES[used[key[0]] % len(DASHES)])
            used[key[0]] += 1
        axis.set(title=name, xscale="log", yscale="log", xlabel="tokens M")
        ticks = sorted({row.M for row in rows})
        axis.set_xticks(ticks, [str(m) for m in ticks], fontsize=7)
        axis.set_yticks(SPEEDS, [f"{speed:g}" for speed in SPEEDS])
        axis.minorticks_off()
        axis.grid(True, alpha=0.3)
        axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    for axis in grid[:, 0]:
        axis.set_ylabel("times as fast as cuBLAS fp16")
    about = rows[0]
    figure.suptitle(f"{NAMES.get((n, k), 'linear')} {n}x{k}, {about.gpu}, {about.date}")
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def line(axis: plt.Axes, key: Key, points: dict[int, float], dash: object) -> None:
    ms = sorted(points)
    axis.plot(
        ms,
        [points[m] for m in ms],
        linestyle=dash,
        color=COLORS.get(key[0], "black"),
        linewidth=2 if key[0].startswith("anybit") else 1.2,
        marker="o",
        markersize=3,
        label=" ".join((key[0], key[1].replace(":group=", " g"), key[2])),
    )


def name_points(
    axis: plt.Axes,
    points: Iterable[tuple[str, float, float]],
    others: Iterable[tuple[float, float]] = (),
) -> None:
    """Names (name, x, y) beside their points, clear of all points and names. To be called last."""
    axis.figure.tight_layout()
    axis.figure.canvas.draw()
    points, boxes = list(points), []
    for x, y in [*others, *((x, y) for _, x, y in points)]:
        at = axis.transData.transform((x, y))
        boxes.append(Bbox.from_bounds(at[0] - 3, at[1] - 3, 6, 6))
    for name, x, y in points:
        for up, right in itertools.product((4, -9, 13, -18), (5, -5)):
            text = axis.annotate(
                name, (x, y), xytext=(right, up), textcoords="offset points", fontsize=7,
                ha="left" if right > 0 else "right",
            )  # fmt: skip
            box = text.get_window_extent()
            if not box.count_overlaps(boxes):
                break
            text.remove()
        boxes.append(box)


if __name__ == "__main__":
    main()
