"""Tables of docs/papers/codegemm.md: codebooks beside cuBLAS and AQLM, all from one run."""

from itertools import product

from results import (
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
)  # fmt: skip

# Linear layers of a decoder block, none merged: q, k, v, o, gate, up, down as (N, K).
BLOCKS = {
    "8B": [OUT, (1024, 4096), (1024, 4096), OUT, (14336, 4096), (14336, 4096), DOWN],
    "70B": [
        (8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192),
        (28672, 8192), (28672, 8192), (8192, 28672),
    ],
}  # fmt: skip
NAMED = "codebook:m=2,v=8,group=128"  # m2v8 in other packages' rows
PLAIN: list[tuple[str, Column]] = [  # bits of codes and scales, column
    ("16", CUBLAS),
    ("2", ("AQLM 2x8", "aqlm", ("codebook",), ("fp16",), "")),
    ("2", ("AQLM 1x16", "aqlm", ("codebook:m=1,b=16",), ("fp16",), "")),
    ("2.125", ("CodeGEMM m1v4", "codegemm", (M1V4,), ("fp16",), "")),
    ("2.125", ("CodeGEMM m2v8", "codegemm", (NAMED,), ("fp16",), "")),
    ("2.125", ("ours, m1v4 g128", OURS, (M1V4,), ("fp16",), "plain")),
    ("2.125", ("ours, m2v8 g128", OURS, (M2V8,), ("fp16",), "plain")),
]
OVERLAPPED: list[tuple[str, Column]] = [  # ours as they are launched in a model
    ("2.125", ("ours, m1v4 g128", OURS, (M1V4,), ("fp16",), "pdl")),
    ("2.125", ("ours, m2v8 g128", OURS, (M2V8,), ("fp16",), "pdl")),
    ("2.125", ("ours, int2 g128", OURS, ("int2:group=128",), ("fp16",), "")),
    ("4.125", ("ours, int4 g128", OURS, (FOUR,), ("fp16",), "")),
    ("6", ("ours, fp6", OURS, ("fp6",), ("fp16",), "")),
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
        "codebook_engine": engine(),
    }


def block(model: str, m: int, column: Column) -> float | None:
    """Sum of the times of a block's linear layers, us; None if one was not measured."""
    rows = [find(cells("h200_codebook")[n, k, m], column) for n, k in BLOCKS[model]]
    return sum(float(row["us"]) for row in rows if row) if all(rows) else None


def blocks() -> str:
    """The paper's table 2: one token. Launches that overlap stand below those that do not."""
    cublas = {model: block(model, 1, CUBLAS) for model in BLOCKS}
    out = []
    for launches, columns in (("plain", PLAIN), ("overlap", OVERLAPPED)):
        for bits, column in columns:
            row = [column[0], launches, bits]
            for model, base in cublas.items():
                time = block(model, 1, column)
                row += [number(time), f"{base / time:.2f}x"] if time and base else ["", ""]
            out.append(row)
    titles = ["kernel", "launches", "bits", "8B, us", "/ cuBLAS", "70B, us", "/ cuBLAS"]
    return markdown(titles, out if all(cublas.values()) else [], words=2)


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
