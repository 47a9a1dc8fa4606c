"""Draw the rows of `engine.py`: tokens per second by batch, and where a decode step's time goes.

python benchmarks/plot_engine.py benchmarks/results/h200_engine.csv --out docs/img
"""

import argparse
import csv
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

Row = dict[str, str]
COLORS = {
    "transformers bf16": "0.55",
    "bf16": "black",
    "fp6": "tab:orange",
    "int4:group=128": "tab:blue",
    "liquid@int8": "tab:green",
    "codebook:m=1,v=4,b=8,group=128": "tab:red",
}
PARTS = {"gemm_us": "tab:blue", "attention_us": "tab:orange", "rest_us": "0.7"}
LAYERS = {"llama-3-8b": 32, "llama-2-7b": 32}
NAMES = {"codebook:m=1,v=4,b=8,group=128": "m1v4 g128", "int4:group=128": "int4 g128"}
SPEEDS = (1, 1.2, 1.4, 1.6, 1.8, 2, 2.2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    args = parser.parse_args()
    models: dict[str, list[Row]] = defaultdict(list)
    with args.csv.open(newline="") as file:
        for row in csv.DictReader(file):
            models[row["model"]].append(row)
    args.out.mkdir(parents=True, exist_ok=True)
    for model, rows in models.items():
        throughput(model, rows, args.out / f"engine_{model}.png")
        shares(model, [row for row in rows if row["gemm_us"]], args.out / f"step_{model}.png")


def label(row: Row) -> str:
    name = NAMES.get(row["format"], row["format"])
    return f"{name}, KV {'int8' if row['kv'] == 'int8' else 'bf16'}"


def throughput(model: str, rows: list[Row], path: Path) -> None:
    """Decode tokens per second against the batch, and how many times those of bf16."""
    dense = {
        row["batch"]: float(row["tokens_per_s"])
        for row in rows
        if (row["format"], row["kv"]) == ("bf16", "model")
    }
    series: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        series[label(row)].append(row)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5))
    for name, own in series.items():
        own.sort(key=lambda row: int(row["batch"]))
        style = {
            "color": COLORS[own[0]["format"]], "linestyle": "--" if own[0]["kv"] == "int8" else "-",
            "marker": "o", "markersize": 4, "label": name,
        }  # fmt: skip
        speeds = {row["batch"]: float(row["tokens_per_s"]) for row in own}
        left.plot([int(b) for b in speeds], speeds.values(), **style)
        both = [b for b in speeds if b in dense and not name.startswith("transformers")]
        right.plot([int(b) for b in both], [speeds[b] / dense[b] for b in both], **style)
    for axes, batches in ((left, {row["batch"] for row in rows}), (right, dense)):
        axes.set(xscale="log", yscale="log", xlabel="sequences")
        axes.set_xticks(list(map(int, batches)), batches)
        axes.grid(alpha=0.3)
    left.set_ylabel("tokens/s")
    right.set_yticks(SPEEDS, map(str, SPEEDS))
    for axes in (left, right):
        axes.xaxis.minorticks_off()
    right.yaxis.minorticks_off()
    right.set_ylabel("times as fast as bf16, KV bf16")
    right.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(
        f"Decode, {model} shapes, {rows[0]['context']} tokens of context, {rows[0]['gpu']}"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def shares(model: str, rows: list[Row], path: Path) -> None:
    """Microseconds of a layer by kind of kernel, the output head with the products."""
    if not rows:
        return
    batches = sorted({int(row["batch"]) for row in rows})
    figure, panels = plt.subplots(1, len(batches), figsize=(3 * len(batches), 3.6), squeeze=False)
    for axes, batch in zip(panels[0], batches, strict=True):
        own = [row for row in rows if int(row["batch"]) == batch]
        bottom = [0.0] * len(own)
        for part, color in PARTS.items():
            values = [float(row[part]) / LAYERS[model] for row in own]
            axes.bar(range(len(own)), values, bottom=bottom, color=color, label=part[:-3])
            bottom = [a + b for a, b in zip(bottom, values, strict=True)]
        names = [label(row) for row in own]
        axes.set_xticks(range(len(own)), names, rotation=90, fontsize=7)
        axes.set_title(f"{batch} sequence{'s' * (batch > 1)}")
    panels[0][0].set_ylabel("us per layer")
    panels[0][0].legend(fontsize=8)
    figure.suptitle(f"A decode step of {model} by kind of kernel, {rows[0]['gpu']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
