"""Tables of what was wanted and what was measured; `tables.py` puts them into the pages."""

from collections.abc import Callable, Iterable

from paper_tables import BATCHES, FOUR, LAYERS, markdown
from results import (
    BIG,
    DOWN,
    HALVES,
    LAUNCHED,
    OURS,
    OUT,
    QKV,
    Cell,
    Column,
    against,
    cells,
    find,
    number,
    read,
)

SHAPES = (BIG, DOWN, QKV, OUT)
Ratio = Callable[[Cell], float | None]


def made() -> dict[str, str]:
    """Every table by its name in the pages; "" where nothing was measured."""
    return {"kernel_aims": kernels(), "codebook_aims": codebooks(), "engine_aims": engine()}


def verdict(met: bool) -> str:
    return "yes" if met else "**no**"


# Kernels of layers.

GIVEN = ("int8-given",)
LIQUID: Column = ("", OURS, ("liquid",), GIVEN, LAUNCHED)
INT8: Column = ("", OURS, ("int8",), GIVEN, LAUNCHED)
FP6: Column = ("", OURS, ("fp6",), HALVES, LAUNCHED)
INT4: Column = ("", OURS, (FOUR,), HALVES, LAUNCHED)
HUMMING8: Column = ("", "humming", ("int4:group=64",), GIVEN, "")
FOLDED: Column = ("", "quack", (f"{FOUR} folded",), ("fp8-given",), "")
HUMMING6: Column = ("", "humming", ("fp6",), HALVES, "")
BF16: Column = ("", "cublas", ("bf16",), ("bf16",), "")
FP16: Column = ("", "cublas", ("fp16",), ("fp16",), "")


def faster(ours: Column, *others: Column) -> Ratio:
    """Our speed in that of the fastest other."""

    def ratio(cell: Cell) -> float | None:
        mine = find(cells()[cell], ours)
        found = [row for column in others if (row := find(cells()[cell], column))]
        return min(1 / against(mine, row) for row in found) if mine and found else None

    return ratio


def reading(ours: Column) -> Ratio:
    """The read floor of a weight of 25 MB or more, over our time."""

    def ratio(cell: Cell) -> float | None:
        row = find(cells()[cell], ours)
        large = row and float(row["weight_gbps"]) * float(row["us"]) * 1e3 >= 25e6
        return 1 / float(row["vs_floor"]) if row and large else None

    return ratio


FEW, MANY = (1, 4, 16, 64), (256, 1024, 4096)
KERNELS: list[tuple[str, Ratio, tuple[int, ...], float]] = [  # what, ratio, tokens, least
    ("liquid, times humming's grouped W4A8", faster(LIQUID, HUMMING8), (1, 4, 16), 1.25),
    ("the same, 64 to 1024 tokens", faster(LIQUID, HUMMING8), (64, 256, 1024), 1.7),
    ("liquid, times quack's folded W4A8", faster(LIQUID, FOLDED), FEW + MANY, 1),
    ("liquid, times cuBLAS bf16", faster(LIQUID, BF16), MANY, 1.7),
    ("int8@int8, times the better of `_int_mm` and humming",
     faster(INT8, ("", "cublas", ("int8", "int8(_int_mm)"), GIVEN, ""),
            ("", "humming", ("int8",), GIVEN, "")), FEW + MANY, 1),
    ("fp6, times humming's, up to 64 tokens", faster(FP6, HUMMING6), FEW, 1.15),
    ("fp6, times humming's, more tokens", faster(FP6, HUMMING6), MANY, 1),
    ("fp6, times cuBLAS fp16", faster(FP6, FP16), FEW + MANY, 0.97),
    ("int4 g128, times the better of humming and quack",
     faster(INT4, ("", "humming", (FOUR,), HALVES, ""), ("", "quack", (FOUR,), HALVES, "")),
     FEW + MANY, 1),
    ("read floor over liquid's time, 25 MB or more", reading(LIQUID), (1, 16), 1 / 1.3),
    ("read floor over int4 g128's", reading(INT4), (1, 16), 1 / 1.3),
    ("read floor over fp6's", reading(FP6), (1, 16), 1 / 1.3),
    ("read floor over int8@int8's", reading(INT8), (1, 16), 1 / 1.3),
]  # fmt: skip


def kernels() -> str:
    """Cells that reach what was wanted, and the worst."""
    out = []
    for what, ratio, tokens, least in KERNELS:
        found = {(*s, m): r for s in SHAPES for m in tokens if (r := ratio((*s, m))) is not None}
        if not found:
            continue
        good = sum(value >= least for value in found.values())
        n, k, m = worst = min(found, key=lambda cell: found[cell])
        where = f"{found[worst]:.2f} ({n}x{k}, M={m})"
        out.append([what, f"{least:.2f}", f"{good} of {len(found)}", where])
    titles = ["speed", "asked", "cells that reach it", "lowest"]
    return markdown(titles, [*out, *experts()])


def experts() -> Iterable[list[str]]:
    ours: Column = ("", OURS, ("liquid",), GIVEN, "")
    others: list[Column] = [HUMMING8, ("", "humming", (FOUR,), HALVES, "")]
    found = {}
    for (_, _, m), rows in cells("h200_experts").items():
        mine, theirs = find(rows, ours), [row for c in others if (row := find(rows, c))]
        if mine and theirs:
            found[m] = min(1 / against(mine, row) for row in theirs)
    if found:
        worst = min(found, key=lambda m: found[m])
        good = f"{sum(value >= 1.4 for value in found.values())} of {len(found)}"
        what = "experts, liquid, times the better of humming's W4A8 and W4A16"
        yield [what, "1.40", good, f"{found[worst]:.2f} ({worst} tokens)"]


# Codebooks.

WANTED = {  # tokens: microseconds of m1v4 by weight
    1: (9.8, 7.6, 3.9, 31.5),
    2: (12.5, 9, 4.5, 36),
    8: (15, 10.5, 5.5, 40),
    16: (20, 16, 7.5, 60),
}
CODEBOOKS = (BIG, DOWN, OUT, (57344, 8192))


def codebooks() -> str:
    """Microseconds: m1v4 as asked, m2v8 within 1.1 (one token) or 1.45 times that."""
    m1v4, m2v8 = LAYERS[0], LAYERS[2]
    out = []
    for m, limits in WANTED.items():
        for (n, k), limit in zip(CODEBOOKS, limits, strict=True):
            rows = [find(cells("h200_codebook")[n, k, m], column) for column in (m1v4, m2v8)]
            second = limit * (1.1 if m == 1 else 1.45)
            row = [f"{n}x{k}", str(m)]
            for found, most in zip(rows, (limit, second), strict=True):
                us = float(found["us"]) if found else None
                row += [f"{most:.1f}", number(us), verdict(us <= most)] if us else ["", "", ""]
            if any(rows):
                out.append(row)
    return markdown(
        ["weight", "M", "m1v4, asked", "m1v4", "met", "m2v8, asked", "m2v8", "met"], out
    )


# The engine.

STEPS = [  # what, weights, cache, batch, least speed in bf16's
    ("one sequence, liquid", "liquid@int8", "model", 1, 2.3),
    ("one sequence, int4 g128", FOUR, "model", 1, 2.3),
    ("one sequence, fp6", "fp6", "model", 1, 1.8),
    ("128 sequences, liquid, INT8 cache", "liquid@int8", "int8", 128, 1.6),
    ("256 sequences, liquid, INT8 cache", "liquid@int8", "int8", 256, 1.6),
]


def engine() -> str:
    """What was wanted of the engine with Llama-3-8B's shapes, and what was measured."""
    rows = [r for r in read("h200_engine") if r["model"] == "llama-3-8b" and r["idle"]]
    found = {(r["format"], r["kv"], int(r["batch"])): r for r in rows}
    if not found:
        return ""
    dense = {b: found["bf16", "model", b] for b in BATCHES}
    floor = float(dense[1]["vs_floor"])
    what = "one sequence, bf16: step, times the read floor"
    out = [[what, "at most 1.25", f"{floor:.2f}", verdict(floor <= 1.25)]]
    for name, spec, kv, b, least in STEPS:
        value = float(dense[b]["step_us"]) / float(found[spec, kv, b]["step_us"])
        out.append(
            [f"{name}: times bf16's speed", f"{least}", f"{value:.2f}", verdict(value >= least)]
        )
    held = int(found["liquid@int8", "int8", 1]["batch_in_80gb"]) / int(dense[1]["batch_in_80gb"])
    what = "sequences in 80 GB, liquid, INT8 cache: times bf16's"
    out.append([what, "1.8", f"{held:.2f}", verdict(held >= 1.8)])
    for batch, limit in ((1, 5), (64, 3)):
        idle = max(float(r["idle"]) for (_, _, b), r in found.items() if b == batch) * 100
        what = f"idle share of a step, batch {batch}, the most of all formats"
        out.append([what, f"under {limit} %", f"{idle:.1f} %", verdict(idle < limit)])
    return markdown(["", "asked", "measured", "met"], out)
