"""Tables of docs/papers and docs/formats.md; `tables.py` puts them into the pages."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

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
    Row,
    cells,
    fastest,
    find,
    loss,
    number,
    read,
    score,
    shown,
)

T = TypeVar("T")
FOUR, M1V4, M2V8 = "int4:group=128", "codebook:m=1,v=4,group=128", "codebook:group=128"
CUBLAS: Column = ("cuBLAS", "cublas", HALVES, HALVES, "")
# Linear layers of a decoder block, none merged: q, k, v, o, gate, up, down as (N, K).
BLOCKS = {
    "8B": [OUT, (1024, 4096), (1024, 4096), OUT, (14336, 4096), (14336, 4096), DOWN],
    "70B": [
        (8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192),
        (28672, 8192), (28672, 8192), (8192, 28672),
    ],
}  # fmt: skip


def made() -> dict[str, str]:
    """Every table by its name in the pages; "" where nothing was measured."""
    return {
        "fp6": times([("ours", OURS, ("fp6",), HALVES, LAUNCHED),
                      ("humming", "humming", ("fp6",), HALVES, ""), CUBLAS],
                     [(*BIG, m) for m in (1, 64, 256, 1024)], ratio=True),
        "gemlite": times([("Hopper", OURS, (FOUR,), HALVES, LAUNCHED),
                          ("Triton", "anybit-triton", (FOUR,), HALVES, ""),
                          ("gemlite package", "gemlite", (FOUR,), HALVES, ""), CUBLAS],
                         [(*BIG, 1), (*BIG, 16), (*BIG, 64), (*OUT, 1)]),
        "liquid": liquid(),
        "experts": experts(),
        "formats": formats(),
        "speeds": speeds(),
        "engine_llama3": engine_steps("llama-3-8b"),
        "engine_llama2": engine_steps("llama-2-7b"),
        "codebook_layers": times(LAYERS, LAYER_CELLS, "h200_codebook", floor=True),
        "codebook_blocks": blocks(),
        "codebook_batch": batch(),
        "codebook_bits": bits(),
        "codebook_tiles": tile_sizes(),
        "codebook_share": share(),
        "codebook_power": power(),
        "codebook_blocks_plot": plot("Latency of a block", "codebook_blocks"),
        "codebook_accuracy_plot": plot("Latency, bits and perplexity", "codebook_accuracy"),
    }  # fmt: skip


def plot(title: str, name: str) -> str:
    """What benchmarks/plot_codebook.py drew."""
    drawn = (Path(__file__).parent / "img" / f"{name}.png").exists()
    return f"![{title}](../img/{name}.png)" if drawn else ""


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A table whose first columns are words and whose others are numbers; "" without rows."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if not lines:
        return ""
    rule = "|" + "---|" * words + "--:|" * (len(titles) - words)
    return "\n".join(["| " + " | ".join(titles) + " |", rule, *lines])


def times(
    columns: list[Column],
    wanted: Iterable[Cell],
    *files: str,
    ratio: bool = False,
    floor: bool = False,
) -> str:
    """Microseconds; and our speed in that of cuBLAS beside it, or our time in reading's."""
    titles = ["weight", "M", *(column[0] for column in columns)]
    titles += ["ours, times the speed of its run's cuBLAS fp16"] * ratio + [
        "m1v4, times the read floor"
    ] * floor
    out = []
    for n, k, m in wanted:
        found = [find(cells(*files)[n, k, m], column) for column in columns]
        if found[0] is None:
            continue
        row = [f"{n}x{k}", str(m), *map(shown, found)]
        if ratio:
            row.append(f"{float(found[0]['vs_cublas_fp16']):.2f}")
        if floor:
            row.append(f"{float(found[0]['vs_floor']):.2f}" if found[0]["vs_floor"] else "")
        out.append(row)
    return markdown(titles, out)


# LiquidGEMM.


def liquid() -> str:
    given = ("int8-given",), LAUNCHED
    ours: Column = ("liquid", OURS, ("liquid",), *given)
    int8: Column = ("our int8", OURS, ("int8",), *given)
    fp8: Column = ("cuBLAS fp8", "cublas", ("fp8 tensorwise",), ("fp8-given",), "")
    others: list[Column] = [
        ("", "humming", ("int4:group=64",), ("int8-given",), ""),
        ("", "humming", (FOUR,), ("fp8-given",), ""),
        ("", "quack", (FOUR, f"{FOUR} folded"), ("fp8-given",), ""),
    ]
    titles = ["weight", "M", "liquid", "our int8", "cuBLAS fp8", "best other with 4 bits"]
    out = []
    for n, k, m in [*((*BIG, m) for m in (1, 64, 256, 1024)), (*QKV, 256)]:
        here = cells()[n, k, m]
        best, name = fastest(here, others), ""
        if best:
            name = f" {best['peer']}" + (", folded" if "folded" in best["format"] else "")
        row = [shown(find(here, column)) for column in (ours, int8, fp8)]
        out.append([f"{n}x{k}", str(m), *row, shown(best) + name, shown(find(here, CUBLAS))])
    return markdown([*titles, "cuBLAS 16 bit"], out)


def experts() -> str:
    """8 experts, 2 a token: ours and the faster of humming's two ways."""
    columns: list[Column] = [
        ("liquid, int8 tokens", OURS, ("liquid",), ("int8-given",), ""),
        ("humming int4 g64, int8 tokens", "humming", ("int4:group=64",), ("int8-given",), ""),
        ("int8, int8 tokens", OURS, ("int8",), ("int8-given",), ""),
        ("int4 g128", OURS, (FOUR,), HALVES, ""),
        ("humming int4 g128", "humming", (FOUR,), HALVES, ""),
        ("fp6", OURS, ("fp6",), HALVES, ""),
        ("torch bf16", "torch", ("bf16",), HALVES, ""),
    ]
    out = []
    for (_, _, m), rows in sorted(cells("h200_experts").items()):
        found = [find(rows, column) for column in columns]
        ratio = float(found[1]["us"]) / float(found[0]["us"]) if found[0] and found[1] else None
        out.append([str(m), *map(shown, found), f"{ratio:.2f}" if ratio else ""])
    titles = ["tokens", *(column[0] for column in columns), "liquid, times humming's speed"]
    return markdown(titles, out, words=0)


# Which format.

CHOICES = [  # what one wants, its name, spec, quantizer
    ("no measurable loss", "`fp6`, GPTQ", "fp6", "gptq"),
    ("little loss, no text to calibrate on", "`fp6`", "fp6", "rtn"),
    ("4 bits", f"`{FOUR}`, GPTQ", FOUR, "gptq"),
    ("4 bits, many tokens at a time", "`liquid@int8`, smooth+gptq", "liquid@int8", "smooth+gptq"),
    ("3 bits", "`int3:group=128`, GPTQ", "int3:group=128", "gptq"),
    ("2 bits", "`codebook:m=2,v=8,group=128`, additive", M2V8, "additive"),
]


def formats() -> str:
    titles = ["you want", "take", "bits", "loss, study-105m", "loss, pico", "1 token", "64 tokens"]
    both = ("h200_gemm", "h200_codebook")
    out = [["bf16", "", "16", "0", "0", *(shown(find(cells()[*BIG, m], CUBLAS)) for m in (1, 64))]]
    for want, name, spec, method in CHOICES:
        fmt, _, activation = spec.partition("@")
        given = (f"{activation}-given",) if activation else HALVES
        column: Column = ("", OURS, (fmt,), given, LAUNCHED)
        found = [find(cells(*both)[*BIG, m], column) for m in (1, 64)]
        losses = [tried(loss, spec, method, model) for model in ("study-105m", "pico")]
        row = tried(score, spec, method) or tried(score, spec, "gptq") or {}
        bits = f"{float(row['bits']):.1f}" if row else ""
        out.append([want, name, bits, *(text or "" for text in losses), *map(shown, found)])
    return markdown(titles, out, words=2)


def tried(function: Callable[..., T], *args: str) -> T | None:
    """None where nothing was measured."""
    try:
        return function(*args)
    except LookupError:
        return None


# The engine.

BATCHES = (1, 16, 64, 128, 256)


def engine_steps(model: str) -> str:
    """Microseconds of a decode step by weights and cache, and what else a run says."""
    found: dict[tuple[str, str], dict[int, Row]] = {}
    for row in read("h200_engine"):
        if row["model"] == model:
            found.setdefault((row["format"], row["kv"]), {})[int(row["batch"])] = row
    titles = ["weights", "KV", *map(str, BATCHES), "times the floor at 1", "at 64", "at 256"]
    titles += ["prompts, tokens/s", "first token, ms", "sequences in 80 GB"]
    out = []
    for (name, kv), rows in found.items():
        first, own = rows[min(rows)], name.startswith("transformers")
        row = ["`generate`, bf16" if own else short(name), "int8" if kv == "int8" else "bf16"]
        row += [f"{int(rows[b]['step_us']):,}" if b in rows else "" for b in BATCHES]
        row += [rows[b]["vs_floor"] if b in rows else "" for b in (1, 64, 256)]
        speed = "" if own or kv == "int8" else f"{int(first['prefill_tokens_per_s']):,}"
        row += [speed, first["ttft_ms"] if speed else "", first["batch_in_80gb"]]
        out.append(row)
    return markdown(titles, out, words=2)


SPEEDS = [  # name, its step's, product's format, activations
    ("`liquid@int8`", "liquid@int8", "liquid", ("int8-given",)),
    ("`int4:group=128`", FOUR, FOUR, HALVES),
    ("`fp6`", "fp6", "fp6", HALVES),
    ("`codebook:m=1,v=4,group=128`", "codebook:m=1,v=4,b=8,group=128", M1V4, HALVES),
]


def speeds() -> str:
    """README's: speed in that of cuBLAS fp16, and steps in that of bf16 with its own cache."""
    steps = {
        (row["format"], row["kv"], row["batch"]): float(row["step_us"])
        for row in read("h200_engine")
        if row["model"] == "llama-3-8b"
    }
    cached = (("model", "1"), ("int8", "64"), ("int8", "128"), ("int8", "256"))
    out = []
    for name, weights, fmt, activation in SPEEDS:
        column: Column = ("", OURS, (fmt,), activation, LAUNCHED)
        found = [find(cells()[*BIG, m], column) for m in (1, 16, 64, 256)]
        row = [f"{float(f['vs_cublas_fp16']):.2f}" if f else "" for f in found]
        for kv, batch in cached:
            us = steps.get((weights, kv, batch))
            row.append(f"{steps['bf16', 'model', batch] / us:.2f}" if us else "")
        if any(row):
            out.append([name, *row])
    titles = ["", "product, 1 token", "16", "64", "256"]
    return markdown([*titles, "step, 1 text", "64, INT8", "128, INT8", "256, INT8"], out)


def short(name: str) -> str:
    return letters(name) if name.startswith("codebook") else name.replace(":group=", " g")


# CodeGEMM, all from one run.

LAYERS: list[Column] = [
    ("m1v4", OURS, (M1V4,), ("fp16",), "pdl"),
    ("plain", OURS, (M1V4,), ("fp16",), "plain"),
    ("m2v8", OURS, (M2V8,), ("fp16",), "pdl"),
    ("plain", OURS, (M2V8,), ("fp16",), "plain"),
    ("AQLM 2x8", "aqlm", ("codebook",), ("fp16",), ""),
    CUBLAS,
]
LAYER_CELLS = [(*shape, m) for shape in (BIG, DOWN, OUT, (57344, 8192)) for m in (1, 2, 4, 8, 16)]
CONTESTANTS: list[tuple[str, Column]] = [  # bits of codes and scales, column
    ("16", CUBLAS),
    ("6", ("fp6", OURS, ("fp6",), ("fp16",), "")),
    ("4.125", ("int4 g128", OURS, (FOUR,), ("fp16",), "")),
    ("2.125", ("int2 g128", OURS, ("int2:group=128",), ("fp16",), "")),
    ("2.125", ("m1v4 g128", OURS, (M1V4,), ("fp16",), "pdl")),
    ("2.125", ("m2v8 g128", OURS, (M2V8,), ("fp16",), "pdl")),
    ("2", ("AQLM 2x8", "aqlm", ("codebook",), ("fp16",), "")),
    ("2", ("AQLM 1x16", "aqlm", ("codebook:m=1,b=16",), ("fp16",), "")),
]


def block(model: str, m: int, column: Column) -> float | None:
    """Microseconds of all linear layers of a block, one after another; None if one is missing."""
    rows = [find(cells("h200_codebook")[n, k, m], column) for n, k in BLOCKS[model]]
    return sum(float(row["us"]) for row in rows if row) if all(rows) else None


def blocks() -> str:
    """The paper's table 2: one token."""
    dense = {model: block(model, 1, CUBLAS) for model in BLOCKS}
    out = []
    for bits, column in CONTESTANTS:
        row = [column[0], bits]
        for model in BLOCKS:
            us, base = block(model, 1, column), dense[model]
            row += [number(us), f"{base / us:.2f}"] if us and base else ["", ""]
        out.append(row)
    titles = ["kernel", "bits", "8B, us", "times cuBLAS's speed", "70B, us", "times cuBLAS's speed"]
    return markdown(titles, out if all(dense.values()) else [])


def batch() -> str:
    """Table 9: more tokens, 8B."""
    out = []
    for m in (1, 2, 4, 8, 16):
        values = [block("8B", m, column) for _, column in CONTESTANTS]
        out.append([str(m), *(number(us) if us else "" for us in values)])
    return markdown(["tokens", *(c[0] for _, c in CONTESTANTS)], out if "".join(out[0][1:]) else [])


def bits() -> str:
    """Table 8: other codebooks, one token, with the paper's uniform and binary weights."""
    shapes, out = (OUT, (8192, 8192)), []
    names = {row["format"] for row in read("h200_codebook") if row["format"].startswith("codebook")}
    names -= {row["format"] for row in read("h200_codebook") if row["peer"] == "aqlm"} - {
        "codebook"
    }
    for name in sorted(names, key=lambda name: (weight_bits(name), name)):
        column: Column = ("", OURS, (name,), ("fp16",), "pdl")
        found = [find(cells("h200_codebook")[n, k, 1], column) for n, k in shapes]
        if any(found):
            out.append([letters(name), f"{weight_bits(name):.3f}", *map(shown, found)])
    dense = [shown(find(cells("h200_codebook")[n, k, 1], CUBLAS)) for n, k in shapes]
    out += [["cuBLAS", "16", *dense]] if out else []
    return markdown(["codebooks", "bits", *(f"{n}x{k}" for n, k in shapes)], out)


def parameters(name: str) -> dict[str, int]:
    """m, v, b and group of a codebook's name."""
    return {"m": 2, "v": 8, "b": 8, "group": 0} | {
        key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", name)
    }


def weight_bits(name: str) -> float:
    p = parameters(name)
    return p["b"] * p["m"] / p["v"] + (16 / p["group"] if p["group"] else 0)


def letters(name: str) -> str:
    p, rest = parameters(name), name.partition(" ")[2]
    group = f" g{p['group']}" if p["group"] else ", a scale a row"
    return f"m{p['m']}v{p['v']}{group}" + (f", {rest}" if rest else "")


SWEPT = re.compile(
    r"(\w+) sweep: (\w+?)_\w+?_(\d+)tokens_(\d+)x(\d+)_(\d+)warps_(\d)stages.*r (\d+)"
)


def tile_sizes() -> str:
    """Table 7: columns that a CTA of Psumbook, or a warp of the other kernel, holds."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in read("h200_codebook"):
        match = SWEPT.match(row["note"])
        if match and match[1] == "pdl":
            _, kind, _, chunks, columns, warps, stages, cluster = match.groups()
            what = f"{chunks} x {columns}", warps, stages
            key = (letters(row["format"]), row["M"], kind, *what)
            found.setdefault(key, {})[f"{row['N']}x{row['K']}"] = shown(row) + f" ({cluster})"
    shapes = sorted({shape for times in found.values() for shape in times})
    titles = ["codebooks", "tokens", "kernel", "columns", "warps", "stages", *shapes]
    rows = [[*key, *(found[key].get(shape, "") for shape in shapes)] for key in sorted(found)]
    return markdown(titles, rows, words=6)


def share() -> str:
    """Table 6: what building the Psumbook takes of building and reading it."""
    titles = ["codebooks", "tokens", "weight", "columns", "CTAs", "whole", "without reading",
              "without building", "without both", "building", "reading"]  # fmt: skip
    out = []
    for row in read("h200_codebook_share"):
        times = [number(float(row[f"us_{p}"])) for p in ("whole", "unread", "unbuilt", "neither")]
        building = float(row["building"])
        where = f"{row['N']}x{row['K']}", row["columns"], row["CTAs"]
        parts = f"{building:.0%}", f"{1 - building:.0%}"
        out.append([letters(row["format"]), row["M"], *where, *times, *parts])
    return markdown(titles, out)


def power() -> str:
    """Table 3: what a product costs, 28672x8192, one token."""
    titles = ["kernel", "us", "watts", "GFLOPS per watt", "memory busy, %"]
    out = []
    for row in read("h200_codebook_power"):
        name = row["format"]
        if row["peer"] == "aqlm":
            name = "AQLM 1x16" if "b=16" in name else "AQLM 2x8"
        elif name.startswith("codebook"):
            name = letters(name)
        values = row["watts"], row["gflops_per_watt"], row["memory_busy"]
        out.append([f"{row['peer']} {name}".replace("aqlm ", ""), shown_us(row), *values])
    return markdown(titles, out)


def shown_us(row: Row) -> str:
    return number(float(row["us"]))
