"""Draw the pictures of the pages: python benchmarks/plot.py [--out docs/img]

At most four lines a picture, named at the line, legible at the 690 pixels of a page and on a phone.
A line joins points that differ in its x axis alone.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import geometric_mean

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "tables"))
import efficiency
from engine_tables import system_steps
from results import RESULTS, read

from anybit.measure import bench

ROOT = Path(__file__).parents[1]
COLORS = ["#1b6ca8", "#c8501e", "#2a8a4a", "#7a4fa3"]
SIZE = (6.4, 4.2)  # inches, at 14 points: as large as the text of a page that is 690 pixels wide
NUDGED = {  # names of points that would lie on others: points from theirs, side
    "IQ2_M": (-7, 0, "right"), "IQ4_XS": (-5, -11, "left"), "Q5_K_M": (-7, 0, "right"),
    "GPTQModel": (3, -8, "left"), "AutoRound": (7, -1, "left"),
}  # fmt: skip
LEFT = ("trellis",)  # names whose right side another line crosses
AXES = "bits a weight", "KL, nats a token"
GRIDS = ("int8", "fp:e2m3", "int5:group=64", "int4:group=64,zero", "int3:group=64,zero")
Lines = Mapping[str, Mapping[float, float]]  # name: x, y


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img")
    args = parser.parse_args()
    first(args.out)
    draw(engine(), "sequences", "decode speed over bf16", args.out / "engine.png", level=1)
    draw(gemm(), "tokens M", "speed over cuBLAS, 16 bits", args.out / "gemm.png", level=1)
    draw(models(), *AXES, args.out / "accuracy_models.png", bits=True)
    draw(calibrated(), *AXES, args.out / "accuracy_gptq.png", bits=True)
    draw(quality(), *AXES, args.out / "quality.png", bits=True, named=tools())
    bars(codes(), "error over the bound", args.out / "report_codes.png", at=1)
    bars(step(), "ms", args.out / "report_step.png", stacked=True)


def first(out: Path) -> None:
    """The picture of the first page, which `docs/tables/fill.py` draws with its tables."""
    plt.rcParams.update({"font.size": 14, "axes.spines.top": False, "axes.spines.right": False})
    draw(study(), *AXES, out / "study.png", bits=True)


def study() -> Lines:
    """The model of 1.5 billion parameters: formats without data and with, by bits."""
    rows = read("study_qwen2.5-coder-1.5b")
    trellis = ("trellis:rotate=kn", "trellis:bits=3,rotate=kn", "trellis:bits=4,rotate=kn")
    kinds = {
        "rounded": (GRIDS, "rtn"),
        "GPTQ": (GRIDS, "gptq"),
        "trellis": (trellis, "gptq+gradients"),
    }
    found = {
        name: points(row for row in rows if row["spec"] in specs and row["method"] == method)
        for name, (specs, method) in kinds.items()
    }
    return {name: line for name, line in found.items() if line}


def engine() -> Lines:
    """Speed of decode steps over bf16's, all with an INT8 cache, by batch."""
    found = system_steps()
    names = {"liquid@int8": "liquid@int8", "int4:group=128": "int4", "fp8@fp8": "fp8@fp8"}
    return {
        name: {
            batch: found["bf16"][batch] / ms
            for batch, ms in sorted(found[spec].items())
            if batch in found["bf16"]
        }
        for spec, name in names.items()
    }


def gemm() -> Lines:
    """Geometric means over the weights of many models, by tokens."""
    cells = efficiency.cells(bench.read_csv(RESULTS / "h200_shapes.csv"))
    names = {
        "liquid@int8": "liquid@int8",
        "int4:group=128": "int4",
        "fp6": "fp6",
        "codebook:m=1,v=4,group=128": "2 bits",
    }
    tokens = sorted({cell.m for cell in cells})
    return {
        name: {
            m: geometric_mean(c.speed for c in cells if (c.scheme, c.m) == (spec, m) and c.speed)
            for m in tokens
        }
        for spec, name in names.items()
    }


def models() -> Lines:
    """Integers and floats, one scale a row, rounded: a published model and one of this project."""
    sources = {"SmolLM2": list(read("h200_published")), "105M": list(read("h200_trellis"))}
    kinds = {"int": ("int4", "int6", "int8"), "fp": ("fp4", "fp5", "fp6")}
    return {
        f"{model}, {kind}": points(r for r in rows if r["spec"] in specs and r["method"] == "rtn")
        for model, rows in sources.items()
        for kind, specs in kinds.items()
    }


def calibrated() -> Lines:
    """Families with GPTQ on the same text, study-105m-60s."""
    families = {
        "int, groups": tuple(f"int{bits}:group=128" for bits in (2, 3, 4)),
        "floats": ("fp4", "fp5", "fp6"),
        "trellis": ("trellis:rotate=kn", *(f"trellis:bits={b},rotate=kn" for b in (3, 4))),
    }
    return {
        name: points(
            r for r in read("h200_trellis") if r["spec"] in specs and r["method"] == "gptq"
        )
        for name, specs in families.items()
    }


REFINED = ("gptq-gradients+tune", "gptq-gradients+pv")
BEST = (
    "trellis:rotate=kn", "trellis:bits=3,rotate=kn", "trellis:bits=4,rotate=kn", "fp:e2m3", "int8",
)  # fmt: skip


def quality() -> Lines:
    """The published model: anybit's format of least KL at each number of bits, by effort."""
    rows = [r for r in read("h200_published") if r["spec"] in BEST and r["tokens"] == "59957"]
    return {
        "anybit, GPTQ": points(r for r in rows if r["method"] == "gptq"),
        "refined": points(r for r in rows if r["method"] in REFINED),
    }


def tools() -> dict[str, Mapping[str, tuple[float, float]]]:
    """Bits and KL of other tools' files of that model, by tool and file."""
    others = [r for r in read("cpu_other_tools") if r["tool"].partition(" ")[0] in OTHERS]
    return {
        "llama.cpp": {r["file"]: point(r) for r in read("cpu_llama_cpp")},
        "others": {OTHERS[r["tool"].partition(" ")[0]]: point(r) for r in others},
    }


OTHERS = {
    "GPTQModel": "GPTQModel", "AutoRound": "AutoRound", "HQQ": "HQQ, torchao",
    "bitsandbytes": "NF4", "optimum-quanto": "quanto",
}  # fmt: skip


def codes() -> dict[str, dict[str, float]]:
    """Errors of trellis codes on Gaussian numbers over 4**-bits, by bits and code."""
    found: dict[str, dict[str, float]] = {}
    for row in read("cpu_trellis_codes"):
        if row["code"] in ("sum8", "look", "pair8", "3inst"):
            error = float(row["mse"]) * 4 ** int(row["bits"])
            found.setdefault(f"{row['bits']} bits", {})[row["code"]] = error
    return found


def step() -> dict[str, dict[str, float]]:
    """Parts of a decode step at batch 1, in milliseconds, by format."""
    names = {
        "int4:group=128": "int4", "liquid@int8": "liquid\n@int8", "trellis@int8": "sum8\n@int8",
        "trellis:code=look@int8": "look\n@int8", "trellis:bits=3,code=look@int8": "look, 3\n@int8",
    }  # fmt: skip
    parts = {"products": "gemm_us", "attention": "attention_us", "rest": "rest_us"}
    rows = {r["format"]: r for r in read("h200_engine_steps") if r["batch"] == "1"}
    return {
        name: {part: float(rows[spec][column]) / 1e3 for part, column in parts.items()}
        for spec, name in names.items()
    }


def point(row: Mapping[str, str]) -> tuple[float, float]:
    return float(row["bits"]), float(row["kl"])


def points(rows: object) -> dict[float, float]:
    found = {float(row["bits"]): float(row["kl"]) for row in rows}  # type: ignore[attr-defined]
    return dict(sorted(found.items()))


def draw(
    lines: Lines,
    x: str,
    y: str,
    path: Path,
    level: float | None = None,
    bits: bool = False,
    named: Mapping[str, Mapping[str, tuple[float, float]]] | None = None,
) -> None:
    """One picture.

    level: a dashed line, of what is compared with. bits: KL on a log axis. named: points beside
    the lines, by group and name.
    """
    figure, axes = plt.subplots(figsize=SIZE)
    if level is not None:
        axes.axhline(level, color="0.5", linestyle="--", linewidth=1)
    for color, found in zip(COLORS, lines.values(), strict=False):
        xs, ys = list(found), list(found.values())
        axes.plot(xs, ys, color=color, marker="o", markersize=5, linewidth=2)
    if bits:
        axes.set_yscale("log")
    else:
        axes.set_xscale("log", base=2)
        ticks = sorted({value for found in lines.values() for value in found})
        shown = [t for t in ticks if t in (1, 4, 16, 64, 256, 1024, 4096)]
        axes.set_xticks(shown, [f"{t:g}" for t in shown])
        axes.xaxis.minorticks_off()
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.25)
    if any(len(found) == 1 for found in lines.values()):
        axes.margins(x=0.25)  # for the name of a point
    name_lines(axes, lines)
    for color, (group, found) in zip(COLORS[len(lines) :], (named or {}).items(), strict=False):
        axes.plot(*zip(*found.values(), strict=True), "D", color=color, markersize=5, label=group)
        for name, at in found.items():
            x, y, side = NUDGED.get(name, (7, 0, "left"))
            axes.annotate(
                name, at, (x, y), textcoords="offset points", color=color, fontsize=10, ha=side,
                va="center",
            )  # fmt: skip
    if named:
        axes.legend(frameon=False, handletextpad=0.1, fontsize=12)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)
    print(path)


def bars(
    groups: Mapping[str, Mapping[str, float]],
    y: str,
    path: Path,
    at: float = 0.0,
    stacked: bool = False,
) -> None:
    """One picture of bars, by group and name. at: where they stand."""
    figure, axes = plt.subplots(figsize=SIZE)
    names = list(next(iter(groups.values())))
    width = 0.7 if stacked else 0.8 / len(names)
    heights = [at] * len(groups)
    for i, (name, color) in enumerate(zip(names, COLORS, strict=False)):
        values = [found[name] for found in groups.values()]
        places = [
            x + (0 if stacked else (i - (len(names) - 1) / 2) * width) for x in range(len(groups))
        ]
        tall = values if stacked else [value - at for value in values]
        axes.bar(places, tall, width, bottom=heights, color=color, label=name)
        if stacked:
            heights = [low + value for low, value in zip(heights, values, strict=True)]
    axes.set_xticks(range(len(groups)), list(groups), fontsize=12)
    axes.set_ylabel(y)
    axes.legend(
        frameon=False, fontsize=12, ncols=len(names), loc="lower center", bbox_to_anchor=(0.5, 1)
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)
    print(path)


def name_lines(axes: plt.Axes, lines: Lines) -> None:
    """Names at the right end of the lines, moved apart where they meet; LEFT: at the left of it."""
    axes.figure.subplots_adjust(left=0.16, right=0.74, bottom=0.15, top=0.97)
    ends = [(name, color, max(found), found[max(found)])
            for color, (name, found) in zip(COLORS, lines.items(), strict=False)]  # fmt: skip
    ends.sort(key=lambda end: end[3])
    at = [axes.transData.transform(end[2:]) for end in ends]
    heights = [y for _, y in at]
    for _ in range(200):
        for i in range(len(heights) - 1):
            overlap = 21 - (heights[i + 1] - heights[i])
            if overlap > 0 and abs(at[i][0] - at[i + 1][0]) < 100:
                heights[i] -= overlap / 2
                heights[i + 1] += overlap / 2
    for (name, color, *_), (x, _), height in zip(ends, at, heights, strict=True):
        left = name in LEFT
        axes.annotate(
            name, axes.transData.inverted().transform((x, height)), xytext=(-10 if left else 8, 0),
            textcoords="offset points", color=color, va="center", ha="right" if left else "left",
            fontweight="bold", annotation_clip=False,
        )  # fmt: skip


if __name__ == "__main__":
    main()
