"""Time anybit's kernels, cuBLAS and the kernels of other packages in one run, and write a CSV.

    python benchmarks/gemm.py --out benchmarks/results/h200_gemm.csv

Needs a GPU. Peers that are not installed are named and left out. See README.md beside this file.
"""

import argparse
import multiprocessing
import time
from pathlib import Path

import peers
import torch

from anybit import bench
from anybit.dispatch import BACKENDS
from anybit.timing import ReadFloor

# Llama-3-8B: qkv, o, gate and up, down, as (N, K).
SHAPES = ["6144x4096", "4096x4096", "28672x4096", "4096x14336"]
MS = "1,4,16,64,256,1024,4096"
SCHEMES = [
    "int4:group=128",
    "int3:group=128",
    "int2:group=128",
    "int8",
    "fp6",
    "fp5",
    "sparse",
    "codebook:m=1,v=4,b=8,group=128",
    "codebook:m=2,v=8,b=8,group=128",
    "liquid@int8",
    "int8@int8",
    "int4:group=128@fp8",
]


def main() -> None:
    args = arguments()
    device = torch.device("cuda")
    cases, missing = all_cases(args.schemes, args.only)
    for name, reason in missing.items():
        say(f"{name} is left out: {reason}")
    shapes = [bench.parse_shape(text) for text in args.shapes]
    if args.workers > 1:
        warm(args, len(cases), shapes)
    say("measuring the read floor")
    floor = ReadFloor.measure(device)
    say("read floor: " + ", ".join(f"{b / 1e6:.0f} MB {us:.2f} us" for b, us in floor.points))
    rows: list[bench.Row] = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    commit = args.commit or bench.current_commit()
    for row in bench.measure(cases, shapes, args.m, device, commit, floor):
        say(bench.line(row))
        if row.note.startswith("refused"):
            continue  # such a layer is not for that kernel, and there is nothing to measure
        rows.append(row)
        if args.m[-1] == row.M:
            bench.write_csv(args.out, rows)
    bench.write_csv(args.out, rows)
    bad = [row for row in rows if row.us is None]
    say(f"{len(rows) - len(bad)} measurements in {args.out}, {len(bad)} failures")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("h200_gemm.csv"), help="the CSV to write")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="NxK")
    parser.add_argument("--m", type=bench.parse_counts, default=bench.parse_counts(MS), help=MS)
    parser.add_argument("--schemes", nargs="*", default=SCHEMES, help="anybit's formats")
    parser.add_argument("--only", nargs="+", help="peers, such as anybit-triton or humming")
    parser.add_argument("--commit", help="written into the CSV; by default git is asked")
    parser.add_argument("--workers", type=int, default=1, help="processes that compile beforehand")
    return parser.parse_args()


def all_cases(
    schemes: list[str], only: list[str] | None
) -> tuple[list[bench.Case], dict[str, str]]:
    """anybit as it chooses by itself, each of its GPU backends, and the peers."""
    gpu = [name for name, (_, devices) in BACKENDS.items() if "cuda" in devices]
    ours = [
        bench.anybit_case(scheme, torch.float16, backend)
        for scheme in schemes
        for backend in (None, *gpu)
    ]
    others, missing = peers.cases()
    cases = [c for c in (*others, *ours) if not only or c.peer in only]
    return cases, missing


def warm(args: argparse.Namespace, count: int, shapes: list[tuple[int, int]]) -> None:
    """Run every case once in other processes, which fills the compilers' caches on disk."""
    say(f"compiling in {args.workers} processes")
    jobs = [(args.schemes, args.only, i, shape, args.m) for shape in shapes for i in range(count)]
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        for done, text in enumerate(pool.imap_unordered(compile_case, jobs)):
            if text:
                say(f"{done + 1} of {len(jobs)}: {text}")


def compile_case(job: tuple[list[str], list[str] | None, int, tuple[int, int], list[int]]) -> str:
    """Prepare and run one case once for every M; returns what took long or failed."""
    schemes, only, index, (n, k), ms = job
    case = all_cases(schemes, only)[0][index]
    start = time.perf_counter()
    try:
        layer = case.prepare(torch.randn(n, k, device="cuda") * 0.02)
        for m in ms:
            layer.run(layer.weight, *layer.inputs(torch.randn(m, k, device="cuda").to(case.dtype)))
        torch.cuda.synchronize()
    except Exception as error:
        return f"{case.peer} {case.format} {n}x{k}: {bench.failure(error)}"
    finally:
        torch.cuda.empty_cache()
    seconds = time.perf_counter() - start
    return f"{case.peer} {case.format} {n}x{k}: {seconds:.0f} s" if seconds > 5 else ""


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    main()
