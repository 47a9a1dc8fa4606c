"""GEMMs of a decoder layer on this GPU, by model, format and number of tokens.

    python benchmarks/layers.py --out benchmarks/results/h200_layers.csv

What LiquidGEMM shows in figures 5 and 12, FP6-LLM in its table of linear layers, and GemLite on
square weights. Q, K and V are one product, and gate and up. Times and checks are those of
`gemm.py`: cold weights, all contestants in turns, tokens quantized beforehand where a format takes
8 bits. A wrong product ends the run. Build the formats' kernels beforehand (`anybit build`).
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import peers
import torch
from csv_rows import write_rows
from gemm import given

from anybit.kernels.backend import CODES
from anybit.measure import bench
from anybit.measure.timing import ReadFloor

LIQUID = ("liquid@int8", "int8@int8", "fp8@fp8", "int4:group=128")
FP6 = ("fp6", "int8", "int4:group=128", "int4", "fp5", "int6")
BITS = ("int8", "int4:group=128", "int2:group=128", "sparse")
DEVICE, BACKEND = torch.device("cuda"), "hopper"
FEW, MANY = (8, 16, 32), (4, 8, 16, 32, 64, 128, 256)


def llama(hidden: int, inner: int, kv: int) -> tuple[tuple[int, int], ...]:
    """(N, K) of QKV, attention's output, gate and up, down."""
    return (hidden + 2 * kv, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)


# name: GEMMs, formats, numbers of tokens
MODELS = {
    "llama-2-7b": (llama(4096, 11008, 4096), LIQUID, MANY),
    "llama-2-13b": (llama(5120, 13824, 5120), LIQUID, MANY),
    "llama-2-70b": (llama(8192, 28672, 1024), LIQUID, MANY),
    "llama-3-8b": (llama(4096, 14336, 1024), LIQUID, MANY),
    "llama-65b": (llama(8192, 22016, 8192), FP6, FEW),
    "opt-30b": (((21504, 7168), (7168, 7168), (28672, 7168), (7168, 28672)), FP6, FEW),
    "llama-2-70b-fp6": (llama(8192, 28672, 1024), FP6, FEW),
    **{f"square-{size}": (((size, size),), BITS, (1,)) for size in (4096, 8192, 16384, 24576)},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=1e9, help="start no model after that")
    parser.add_argument("--commit", default="", help="what is measured, for the rows")
    parser.add_argument("--out", type=Path, default=Path("h200_layers.csv"))
    args = parser.parse_args()
    date = time.strftime("%Y-%m-%d", time.gmtime())
    facts = {"gpu": torch.cuda.get_device_name(), "date": date, "commit": args.commit}
    end = time.monotonic() + args.seconds
    floor = ReadFloor.measure(DEVICE)
    rows: list[dict[str, Any]] = []
    for model in args.models:
        if time.monotonic() > end:
            print(f"{model} was not begun: the time is up")
            continue
        shapes, formats, counts = MODELS[model]
        for n, k in shapes:
            for row in product((n, k), formats, counts, floor):
                rows.append({"model": model, **row, "us": round(row["us"], 2), **facts})
        print(f"{model}: {len(rows)} rows so far", flush=True)
        write_rows(args.out, rows)


def contestants(formats: Sequence[str]) -> dict[tuple[str, str, str], tuple[str, bench.Case]]:
    """What the rows call each, and its case, by the peer, format and activation of its rows."""
    theirs = {"bf16": "bf16"}
    if any("@" in name for name in formats):
        theirs["fp8 rowwise"] = "cublas fp8"
    cases = [(theirs[case.format], case) for case in peers.cublas() if case.format in theirs]
    for name in formats:
        case = bench.anybit_case(name, torch.bfloat16, BACKEND)
        cases.append((name, given(case) if case.activation in CODES else case))
    return {(case.peer, case.format, case.activation): (name, case) for name, case in cases}


def product(
    shape: tuple[int, int], formats: Sequence[str], counts: Sequence[int], floor: ReadFloor
) -> Iterator[dict[str, Any]]:
    """A row for each format and number of tokens."""
    found = contestants(formats)
    cases = [case for _, case in found.values()]
    for row in bench.measure(cases, [shape], counts, DEVICE, "", floor):
        key = row.peer, row.format, row.activation
        if key not in found:  # the unquantized layer that `measure` adds
            continue
        if row.us is None:
            raise SystemExit(f"{key[1]} {row.N}x{row.K}, {row.M} tokens: {row.note}")
        yield {"format": found[key][0], "N": row.N, "K": row.K, "M": row.M, "us": row.us}


if __name__ == "__main__":
    main()
