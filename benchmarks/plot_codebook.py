"""Draw CodeGEMM's figures from the results: python benchmarks/plot_codebook.py --out docs/img

codebook_blocks.png: time of a decoder block's linear layers against tokens (the paper's table 9).
codebook_accuracy.png: that time for one token against bits, and a model's perplexity against one
weight's time (figure 4). What was not measured is left out.
"""

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "tables"))
from codebook_tables import BLOCKS, CONTESTANTS, Column, block
from plot import name_points
from results import CUBLAS, FOUR, OURS, cells, find, score

TOKENS = (1, 2, 4, 8, 16)
MICROSECONDS = (20, 30, 50, 100, 200, 300, 500, 1000, 2000, 5000)
MODEL = "pico"  # whose m1v4 and m2v8 were calibrated alike
WEIGHT = 8192, 8192  # whose time is figure 4's
SCORED = {"fp6": "fp6", "int4 g128": FOUR, "int2 g128": "int2:group=128"}
BOOKS = {
    "m1v4 g16": "codebook:m=1,v=4,group=16",
    "m1v4 g128": "codebook:m=1,v=4,group=128",
    "m1v4": "codebook:m=1,v=4",
    "m2v8 g16": "codebook:group=16",
    "m2v8 g128": "codebook:group=128",
    "m2v8": "codebook",
    "m3v16 g32": "codebook:m=3,v=16,group=32",
}
Points = dict[str, tuple[float, float]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    folder = parser.parse_args().out
    if not all(block(model, 1, column) for model in BLOCKS for _, column in CONTESTANTS[:1]):
        raise SystemExit("no block was measured whole; run benchmarks/codebook.py table")
    batches(folder / "codebook_blocks.png")
    accuracy(folder / "codebook_accuracy.png")


def batches(path: Path) -> None:
    figure, axes = plt.subplots(1, len(BLOCKS), figsize=(11, 4.2))
    for axis, model in zip(axes, BLOCKS, strict=True):
        for i, (_, column) in enumerate(CONTESTANTS):
            times = {m: us for m in TOKENS if (us := block(model, m, column))}
            if times:
                axis.plot(times.keys(), times.values(), "o-", label=column[0], color=f"C{i}")
        axis.set(title=f"linear layers of a block, {model}", xscale="log", yscale="log")
        axis.set(xlabel="tokens M", ylabel="microseconds")
        axis.set_xticks(TOKENS, map(str, TOKENS))
        low, high = axis.get_ylim()
        ticks = [t for t in MICROSECONDS if low <= t <= high]
        axis.set_yticks(ticks, map(str, ticks))
        axis.minorticks_off()
        axis.grid(True, alpha=0.3)
    axes[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, path)


def accuracy(path: Path) -> None:
    times = {
        column[0]: (float(bits), us)
        for bits, column in CONTESTANTS
        if (us := block("8B", 1, column))
    }
    points: list[tuple[Column, str, str]] = [(CUBLAS, "bf16", "dense")]
    points += [((n, OURS, (spec,), ("fp16",), ""), spec, "gptq") for n, spec in SCORED.items()]
    points += [
        ((n, OURS, (spec,), ("fp16",), "pdl"), spec, "additive") for n, spec in BOOKS.items()
    ]
    scores: Points = {}
    for column, spec, method in points:
        row, timed = score(spec, method, MODEL), find(cells("h200_codebook")[*WEIGHT, 1], column)
        if row and timed:
            scores[column[0]] = float(timed["us"]), float(row["perplexity"])
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    for axis, ticks in ((left, (2, 4, 6, 16)), (right, (8, 10, 15, 20, 30))):
        axis.set_xscale("log")
        axis.set_xticks(ticks, map(str, ticks), minor=False)
        axis.minorticks_off()
    scatter(left, times, "bits a weight", "microseconds, 8B block, one token")
    scatter(right, scores, "microseconds, 8192x8192, one token", f"perplexity, {MODEL}")
    save(figure, path)


def scatter(axis: plt.Axes, points: Points, x: str, y: str) -> None:
    for at, value in points.values():
        axis.plot(at, value, "o")
    axis.set(xlabel=x, ylabel=y)
    axis.margins(0.15)
    axis.grid(True, alpha=0.3)
    name_points(axis, [(name, *point) for name, point in points.items()])


def save(figure: plt.Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    print(path)


if __name__ == "__main__":
    main()
