"""Draw CodeGEMM's figures from the results: python benchmarks/plot_codebook.py --out docs/img

codebook_blocks.png: time of a decoder block's linear layers against tokens (the paper's table 9).
codebook_accuracy.png: that time for one token against bits, and a model's perplexity against it
(figure 4). What was not measured is left out.
"""

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))
from codebook_tables import BLOCKS, CONTESTANTS, block
from plot import name_points
from results import FOUR, M2V8, score

TOKENS = (1, 2, 4, 8, 16)
MICROSECONDS = (20, 30, 50, 100, 200, 300, 500, 1000, 2000, 5000)
MODEL = "pico"  # whose m1v4 and m2v8 were calibrated alike
# Contestants with an accuracy, and how their weights were made.
SCORED = {
    "cuBLAS": ("bf16", "dense"),
    "fp6": ("fp6", "gptq"),
    "int4 g128": (FOUR, "gptq"),
    "int2 g128": ("int2:group=128", "gptq"),
    "m2v8 g128": (M2V8, "additive"),
    "m1v4 g128": ("codebook:m=1,v=4,group=128", "additive"),
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
    scores: Points = {}
    for name, key in SCORED.items():
        row = score(*key, MODEL)
        if row and name in times:
            scores[name] = times[name][1], float(row["perplexity"])
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    left.set_xscale("log")
    left.set_xticks((2, 4, 6, 16), ("2", "4", "6", "16"), minor=False)
    left.minorticks_off()
    scatter(left, times, "bits a weight", "microseconds, 8B block, one token")
    scatter(right, scores, "microseconds, 8B block, one token", f"perplexity, {MODEL}")
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
