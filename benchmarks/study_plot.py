"""Draw the accuracy study; docs/tables/fill.py makes its tables.

    python benchmarks/study_plot.py benchmarks/results/h200_accuracy.csv --draw study-105m pico
    python benchmarks/study_plot.py benchmarks/results/h200_trellis.csv --families

Writes docs/img/accuracy_bits.png (KL against bits) and accuracy_methods.png (loss by quantizer,
with standard errors); with --families only accuracy_families.png, the best of each format.
"""

import argparse
import csv
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "tables"))
from accuracy_tables import best_of_each, label, short
from plot import name_points
from results import Row

COLORS = {
    "rtn": "0.6",
    "clip": "tab:olive",
    "hqq": "tab:brown",
    "smooth": "tab:purple",
    "gptq": "tab:blue",
    "smooth+gptq": "tab:cyan",
    "additive": "tab:red",
    "+pv": "tab:pink",
    "+tune": "tab:orange",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path, nargs="+")
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    parser.add_argument("--draw", nargs="+", help="models to draw (all)")
    parser.add_argument("--families", action="store_true", help="a line for each kind of format")
    args = parser.parse_args()
    models: dict[str, list[Row]] = defaultdict(list)
    for path in args.csv:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                models[row["model"]].append(row)
    drawn = {m: rows for m, rows in models.items() if not args.draw or m in args.draw}
    if args.families:
        draw(drawn, by_family, args.docs / "img" / "accuracy_families.png", (6.4, 5.4))
        return
    draw(drawn, by_bits, args.docs / "img" / "accuracy_bits.png", (6.0, 5.2))
    draw(drawn, by_method, args.docs / "img" / "accuracy_methods.png", (6.0, 8.0))


def draw(models: dict[str, list[Row]], panel: Any, path: Path, size: tuple[float, float]) -> None:
    """One PNG with a panel for each model."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(
        1, len(models), figsize=(size[0] * len(models), size[1]), squeeze=False
    )
    for axis, (model, rows) in zip(axes.flat, models.items(), strict=True):
        panel(axis, [row for row in rows if row["method"] != "dense"])
        about = rows[0]
        axis.set_title(f"{model}: {about['gpu']}, {about['date']}", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(True, axis="x" if panel is by_method else "both", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    print(path)


def by_bits(axis: plt.Axes, rows: list[Row]) -> None:
    """KL against stored bits; weights alone, calibrated on code if at all."""
    points = [r for r in rows if "@" not in r["spec"] and r["text"] in ("", "code")]
    for method in dict.fromkeys(r["method"] for r in points):
        own = [r for r in points if r["method"] == method]
        axis.plot(
            [float(r["bits"]) for r in own],
            [float(r["kl"]) for r in own],
            "o",
            color=color(method),
            label=method,
            markersize=5,
        )
    named = []
    for spec in dict.fromkeys(r["spec"] for r in points):
        best = min((r for r in points if r["spec"] == spec), key=lambda r: float(r["kl"]))
        named.append((short(spec), float(best["bits"]), float(best["kl"])))
    axis.set(yscale="log", xlabel="stored bits of a weight", ylabel="KL against bf16, nats a token")
    axis.margins(x=0.12)
    axis.legend(fontsize=7, frameon=False)
    name_points(axis, named, [(float(r["bits"]), float(r["kl"])) for r in points])


def by_family(axis: plt.Axes, rows: list[Row]) -> None:
    """KL against stored bits, of the quantizer with which each format has the least."""
    best = best_of_each(rows)
    lines: dict[str, list[Row]] = defaultdict(list)
    for row in best:
        lines[family(row["spec"])].append(row)
    for name, own in lines.items():
        points = [(float(r["bits"]), float(r["kl"])) for r in own]
        axis.plot(*zip(*points, strict=True), "o-", markersize=5, linewidth=1, label=name)
    axis.set(yscale="log", xlabel="stored bits of a weight", ylabel="KL against bf16, nats a token")
    axis.margins(x=0.12)
    axis.legend(fontsize=7, frameon=False)
    named = [(short(r["spec"]), float(r["bits"]), float(r["kl"])) for r in best]
    name_points(axis, named)


def family(spec: str) -> str:
    """What a line of the plot joins."""
    spec = spec.removeprefix("folded:")
    kinds = {"trellis": "trellis", "codebook": "codebooks", "int": "integers", "plan": "plans"}
    found = next((name for start, name in kinds.items() if spec.startswith(start)), "floats")
    return f"{found}, rotated" if "rotate" in spec and found != "trellis" else found


def by_method(axis: plt.Axes, rows: list[Row]) -> None:
    """Loss of every row with its standard error, format by format."""
    specs = list(dict.fromkeys(r["spec"] for r in rows))
    place = 0.0
    ticks = []
    for spec in sorted(specs, key=lambda s: next(float(r["bits"]) for r in rows if r["spec"] == s)):
        own = sorted((r for r in rows if r["spec"] == spec), key=lambda r: -float(r["loss"]))
        for row in own:
            value, error = max(float(row["loss"]), 1e-5), float(row["loss_error"])
            axis.barh(place, value, 0.8, color=color(row["method"]), left=0)
            axis.errorbar(value, place, xerr=error, color="black", linewidth=0.8)
            ticks.append((place, f"{short(spec)} {label(row)}"))
            place += 1
        place += 0.6
    axis.set_yticks([p for p, _ in ticks], [t for _, t in ticks], fontsize=6)
    axis.set_xscale("log")
    axis.set_xlim(left=1e-4)
    axis.invert_yaxis()
    axis.set_xlabel("loss against bf16, nats a token, with its standard error")


def color(method: str) -> str:
    if method in COLORS:
        return COLORS[method]
    return next((c for end, c in COLORS.items() if method.endswith(end)), "black")


if __name__ == "__main__":
    main()
