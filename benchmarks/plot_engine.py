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
    backend = f" {row['backends']}" if row["backends"] else ""
    return f"{row['format']}{backend}, KV {'int8' if row['kv'] == 'int8' else 'bf16'}"


def throughput(model: str, rows: list[Row], path: Path) -> None:
    """Decode tokens per second against the batch."""
    series: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        series[label(row)].append(row)
    figure, axes = plt.subplots(figsize=(8, 5))
    for name, own in series.items():
        own.sort(key=lambda row: int(row["batch"]))
        axes.plot(
            [int(row["batch"]) for row in own], [float(row["tokens_per_s"]) for row in own],
            color=COLORS[own[0]["format"]], linestyle="--" if own[0]["kv"] == "int8" else "-",
            marker="s" if own[0]["backends"] == "hopper" else "o", label=name,
        )  # fmt: skip
    axes.set(
        xscale="log", yscale="log", xlabel="sequences", ylabel="tokens/s",
        title=f"Decode, {model} shapes, {rows[0]['context']} tokens of context, {rows[0]['gpu']}",
    )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def shares(model: str, rows: list[Row], path: Path) -> None:
    """Microseconds of a layer by kind of kernel, the output head with the products."""
    if not rows:
        return
    batches = sorted({int(row["batch"]) for row in rows})
    figure, panels = plt.subplots(1, len(batches), figsize=(4 * len(batches), 4), squeeze=False)
    for axes, batch in zip(panels[0], batches, strict=True):
        own = [row for row in rows if int(row["batch"]) == batch]
        bottom = [0.0] * len(own)
        for part, color in PARTS.items():
            values = [float(row[part]) / LAYERS[model] for row in own]
            axes.bar(range(len(own)), values, bottom=bottom, color=color, label=part[:-3])
            bottom = [a + b for a, b in zip(bottom, values, strict=True)]
        names = [label(row).replace(", ", "\n") for row in own]
        axes.set_xticks(range(len(own)), names, rotation=90, fontsize=7)
        axes.set(title=f"batch {batch}", ylabel="us per layer")
    panels[0][0].legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    main()
