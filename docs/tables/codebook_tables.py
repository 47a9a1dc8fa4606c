"""Tables of docs/papers/codegemm.md: codebooks beside cuBLAS and AQLM, all from one run."""

import re
from itertools import product

import torch
from kernel_tables import times
from results import (
    BIG,
    CUBLAS,
    DOWN,
    FOUR,
    M1V4,
    M2V8,
    OURS,
    OUT,
    Column,
    cells,
    find,
    loss,
    markdown,
    number,
    read,
    score,
    us,
)

from anybit.core.format import get_format
from anybit.kernels.hopper.lookup import LookupDecoder, choose, lookup

# Linear layers of a decoder block, none merged: q, k, v, o, gate, up, down as (N, K).
BLOCKS = {
    "8B": [OUT, (1024, 4096), (1024, 4096), OUT, (14336, 4096), (14336, 4096), DOWN],
    "70B": [
        (8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192),
        (28672, 8192), (28672, 8192), (8192, 28672),
    ],
}  # fmt: skip
NAMED = "codebook:m=2,v=8,group=128"  # m2v8 in other packages' rows
LAYERS: list[Column] = [
    ("m1v4", OURS, (M1V4,), ("fp16",), "pdl"),
    ("plain", OURS, (M1V4,), ("fp16",), "plain"),
    ("m2v8", OURS, (M2V8,), ("fp16",), "pdl"),
    ("plain", OURS, (M2V8,), ("fp16",), "plain"),
    ("AQLM 2x8", "aqlm", ("codebook",), ("fp16",), ""),
    ("CodeGEMM m1v4", "codegemm", (M1V4,), ("fp16",), ""),
    ("CodeGEMM m2v8", "codegemm", (NAMED,), ("fp16",), ""),
    CUBLAS,
]
TOKENS = 1, 2, 4, 8, 16, 32, 64, 256
SHOWN = BIG, DOWN, OUT, (57344, 8192), (8192, 28672)
LAYER_CELLS = [(*shape, m) for shape in SHOWN for m in TOKENS]
GROUPS = 4, 8, 16, 32, 64, 128
CONTESTANTS: list[tuple[str, Column]] = [  # bits of codes and scales, column
    ("16", CUBLAS),
    ("6", ("fp6", OURS, ("fp6",), ("fp16",), "")),
    ("4.125", ("int4 g128", OURS, (FOUR,), ("fp16",), "")),
    ("2.125", ("int2 g128", OURS, ("int2:group=128",), ("fp16",), "")),
    ("2.125", ("m1v4 g128", OURS, (M1V4,), ("fp16",), "pdl")),
    ("2.125", ("m2v8 g128", OURS, (M2V8,), ("fp16",), "pdl")),
    ("2", ("AQLM 2x8", "aqlm", ("codebook",), ("fp16",), "")),
    ("2", ("AQLM 1x16", "aqlm", ("codebook:m=1,b=16",), ("fp16",), "")),
    ("2.125", ("CodeGEMM m1v4", "codegemm", (M1V4,), ("fp16",), "")),
    ("2.125", ("CodeGEMM m2v8", "codegemm", (NAMED,), ("fp16",), "")),
]
DECODED: list[Column] = [  # into a dense weight, in every product
    (f"{name} decoded", OURS, (spec,), ("fp16",), "decoded")
    for name, spec in (("m1v4", M1V4), ("m2v8", M2V8))
]
SERVED = [  # engine rows: kernels, format, backend
    ("bf16", "bf16", ""),
    ("m1v4 g128", "codebook:m=1,v=4,b=8,group=128", "hopper"),
    ("m2v8 g128", "codebook:m=2,v=8,b=8,group=128", "hopper"),
    ("AQLM 2x8", "codebook:m=2,v=8,b=8", "aqlm_backend"),
    ("AQLM 1x16", "codebook:m=1,v=8,b=16", "aqlm_backend"),
]


def tables() -> dict[str, str]:
    return {
        "codebook_layers": times(LAYERS, LAYER_CELLS, "h200_codebook", floor=True),
        "codebook_blocks": blocks(),
        "codebook_batch": batch(),
        "codebook_many": many(),
        "codebook_bits": bits(),
        "codebook_groups": groups(),
        "codebook_tiles": tile_sizes(),
        "codebook_share": share(),
        "codebook_power": power(),
        "codebook_accuracy": accuracy(),
        "codebook_engine": engine(),
    }


def block(model: str, m: int, column: Column) -> float | None:
    """Sum of the times of a block's linear layers, us; None if one was not measured."""
    rows = [find(cells("h200_codebook")[n, k, m], column) for n, k in BLOCKS[model]]
    return sum(float(row["us"]) for row in rows if row) if all(rows) else None


def blocks() -> str:
    """The paper's table 2: one token."""
    dense = {model: block(model, 1, CUBLAS) for model in BLOCKS}
    out = []
    for bits, column in CONTESTANTS:
        row = [column[0], bits]
        for model in BLOCKS:
            time, base = block(model, 1, column), dense[model]
            row += [number(time), f"{base / time:.2f}x"] if time and base else ["", ""]
        out.append(row)
    titles = ["kernel", "bits", "8B, us", "speed / cuBLAS", "70B, us", "speed / cuBLAS"]
    return markdown(titles, out if all(dense.values()) else [])


def batch() -> str:
    """Table 9: more tokens, 8B."""
    columns = [*(column for _, column in CONTESTANTS), *DECODED]
    found = {m: [block("8B", m, column) for column in columns] for m in TOKENS}
    some = [i for i in range(len(columns)) if any(values[i] for values in found.values())]
    out = [
        [str(m), *(number(time) if (time := values[i]) else "" for i in some)]
        for m, values in found.items()
        if any(values)
    ]
    return markdown(["tokens", *(columns[i][0] for i in some)], out)


def chosen(spec: str) -> dict[tuple[int, int, int], tuple[float, float]]:
    """(N, K, M) of more than 16 tokens -> us of the tile that is chosen, and of cuBLAS in turns."""
    decoder = lookup(get_format(spec), torch.float16)
    assert isinstance(decoder, LookupDecoder)
    timed: dict[tuple[int, int, int], dict[str, float]] = {}
    for row in read("h200_codebook_tiles"):
        if row["format"] == spec and int(row["M"]) > 16:
            cell = int(row["N"]), int(row["K"]), int(row["M"])
            timed.setdefault(cell, {})[row["note"]] = float(row["us"])
    out = {}
    for (n, k, m), of_cell in timed.items():
        tile = choose(decoder, m, n, k)
        assert tile is not None
        out[n, k, m] = of_cell[tile.name], of_cell["cublas"]
    return out


def many() -> str:
    """More than 16 tokens: the tiles that are chosen, in turns with cuBLAS."""
    found, out = [chosen(spec) for spec in (M1V4, M2V8)], []
    for n, k, m in found[0]:
        values = [f"{n}x{k}", str(m)]
        for time, dense in (of_spec[n, k, m] for of_spec in found):
            values += [number(time), f"{dense / time:.2f}x"]
        out.append(values)
    return markdown(["weight", "M", "m1v4", "/ cuBLAS", "m2v8", "/ cuBLAS"], out, words=2)


def engine() -> str:
    """Tables 4 and 5: tokens a second of a whole model, and how many times AQLM's 2x8."""
    rows = read("h200_codebook_engine")
    batches = sorted({int(row["batch"]) for row in rows})
    out = []
    for model in sorted({row["model"] for row in rows}, reverse=True):
        rates = {
            (name, batch): float(row["tokens_per_s"])
            for (name, spec, backend), batch in product(SERVED, batches)
            for row in rows
            if (row["model"], row["format"], int(row["batch"])) == (model, spec, batch)
            and backend in row["backends"]
        }
        for name, *_ in SERVED:
            values = [f"{rate:,.0f}" if (rate := rates.get((name, b))) else "" for b in batches]
            base, rate = rates.get(("AQLM 2x8", 1)), rates.get((name, 1))
            if any(values):
                times = f"{rate / base:.2f}x" if rate and base else ""
                out.append([model, name, *values, times])
    titles = ["shapes", "kernels", *(f"batch {batch}" for batch in batches)]
    return markdown([*titles, "/ AQLM 2x8, batch 1"], out, words=2)


def bits() -> str:
    """Table 8: other codebooks, one token, with the paper's uniform and binary weights."""
    shapes, out = (OUT, (8192, 8192)), []
    names = {row["format"] for row in read("h200_codebook") if row["format"].startswith("codebook")}
    names -= {row["format"] for row in read("h200_codebook") if row["peer"] == "aqlm"} - {
        "codebook"
    }
    swept = {name for *_, names_of in grouped() for name in names_of.values()}
    names -= {name for name in swept if 0 < parameters(name)["group"] < 128}
    for name in sorted(names, key=lambda name: (weight_bits(name), name)):
        column: Column = ("", OURS, (name,), ("fp16",), "pdl")
        found = [find(cells("h200_codebook")[n, k, 1], column) for n, k in shapes]
        if any(found):
            out.append([letters(name), f"{weight_bits(name):.3f}", *map(us, found)])
    dense = [us(find(cells("h200_codebook")[n, k, 1], CUBLAS)) for n, k in shapes]
    out += [["cuBLAS", "16", *dense]] if out else []
    return markdown(["codebooks", "bits", *(f"{n}x{k}" for n, k in shapes)], out)


def grouped() -> list[tuple[int, int, dict[int, str]]]:
    """(m, v, formats by group) of the codebooks whose groups were timed."""
    found = []
    for m, v in ((1, 4), (2, 8)):
        start = "codebook" if (m, v) == (2, 8) else f"codebook:m={m},v={v}"
        names = {g: f"{start}{',' if ':' in start else ':'}group={g}" for g in GROUPS if g >= v}
        found.append((m, v, names | {0: start}))
    return found


def groups() -> str:
    """Figure 4a: time over g, one token; 0 is a scale a row."""
    shapes, out = (OUT, (8192, 8192)), []
    of = grouped()
    for g in (*GROUPS, 0):
        row = []
        for (_, _, names), shape in product(of, shapes):
            column: Column = ("", OURS, (names.get(g, ""),), ("fp16",), "pdl")
            row.append(us(find(cells("h200_codebook")[*shape, 1], column)))
        if any(row):
            out.append([str(g or "a row"), *row])
    titles = [f"m{m}v{v}, {n}x{k}" for (m, v, _), (n, k) in product(of, shapes)]
    return markdown(["g", *titles], out)


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
            found.setdefault(key, {})[f"{row['N']}x{row['K']}"] = us(row) + f" ({cluster})"
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
        efficiency = row["gflops_per_watt"]
        if spread := row.get("spread"):
            efficiency += f" ± {spread}"
        values = row["watts"], efficiency, row["memory_busy"]
        out.append([f"{row['peer']} {name}".replace("aqlm ", ""), us(row), *values])
    return markdown(titles, out)


SCORED = [  # format, quantizer, model
    (M2V8, "additive", "study-105m"),
    ("int2:group=128", "gptq", "study-105m"),
    (M2V8, "rtn", "pico"),
    (M2V8, "additive", "pico"),
    (M1V4, "additive", "pico"),
    ("codebook:m=1,v=4,group=16", "additive", "pico"),
    ("codebook:m=2,v=8,group=16", "additive", "pico"),
    ("codebook:m=1,v=4", "additive", "pico"),
    ("codebook:m=2,v=8", "additive", "pico"),
    ("codebook:m=3,v=16,group=32", "additive", "pico"),
    (M2V8, "additive+pv", "pico"),
    ("int2:group=128", "gptq", "pico"),
]


def accuracy() -> str:
    out = []
    for spec, method, model in SCORED:
        row, dense = score(spec, method, model), score("bf16", "dense", model)
        if row and dense:
            name = letters(spec) if spec.startswith("codebook") else "int2 g128"
            ratio = float(row["perplexity"]) / float(dense["perplexity"])
            values = f"{float(row['bits']):.2f}", f"{float(row['perplexity']):.3f}"
            quantizer = "k-means" if method == "rtn" else method
            out.append([model, name, quantizer, *values, f"{ratio:.2f}", loss(row)])
    titles = ["model", "format", "quantizer", "bits", "perplexity", "/ bf16", "loss, nats"]
    return markdown(titles, out, words=3)
