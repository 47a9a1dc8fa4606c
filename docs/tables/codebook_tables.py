"""Tables of docs/papers/codegemm.md: codebooks beside cuBLAS and AQLM, all from one run."""

from itertools import product

import torch
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
    markdown,
    number,
    read,
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
CONTESTANTS: list[tuple[str, Column]] = [  # bits of codes and scales, column
    ("16", CUBLAS),
    ("6", ("fp6", OURS, ("fp6",), ("fp16",), "")),
    ("4.125", ("int4 g128", OURS, (FOUR,), ("fp16",), "")),
    ("2.125", ("int2 g128", OURS, ("int2:group=128",), ("fp16",), "")),
    ("2.125", ("m1v4 g128", OURS, (M1V4,), ("fp16",), "plain")),
    ("2.125", ("m2v8 g128", OURS, (M2V8,), ("fp16",), "plain")),
    ("2", ("AQLM 2x8", "aqlm", ("codebook",), ("fp16",), "")),
    ("2", ("AQLM 1x16", "aqlm", ("codebook:m=1,b=16",), ("fp16",), "")),
    ("2.125", ("CodeGEMM m1v4", "codegemm", (M1V4,), ("fp16",), "")),
    ("2.125", ("CodeGEMM m2v8", "codegemm", (NAMED,), ("fp16",), "")),
]
OVERLAPPED: list[tuple[str, Column]] = [  # launches overlap; those of the others do not
    ("2.125", ("m1v4 g128, overlapped", OURS, (M1V4,), ("fp16",), "pdl")),
    ("2.125", ("m2v8 g128, overlapped", OURS, (M2V8,), ("fp16",), "pdl")),
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
        "codebook_blocks": blocks(),
        "codebook_many": many(),
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
    for bits, column in (*CONTESTANTS, *OVERLAPPED):
        row = [column[0], bits]
        for model in BLOCKS:
            time, base = block(model, 1, column), dense[model]
            row += [number(time), f"{base / time:.2f}x"] if time and base else ["", ""]
        out.append(row)
    titles = ["kernel", "bits", "8B, us", "speed / cuBLAS", "70B, us", "speed / cuBLAS"]
    return markdown(titles, out if all(dense.values()) else [])


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
    for n, k, m in (cell for cell in found[0] if cell[:2] == BIG):
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
