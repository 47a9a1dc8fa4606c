"""Time anybit's kernels, cuBLAS and the kernels of other packages in one run, and write a CSV.

    python benchmarks/gemm.py --out benchmarks/results/h200_gemm.csv

Needs a GPU. Peers that are not installed are named and left out. See README.md beside this file.
"""

import argparse
import dataclasses
import multiprocessing
import time
from pathlib import Path

import peers
import torch

from anybit.kernels.backend import CODES, Activations, Prepared
from anybit.kernels.reference import quantize_tokens
from anybit.kernels.registry import BACKENDS
from anybit.measure import bench
from anybit.measure.timing import ReadFloor

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
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU; `anybit bench` measures on a CPU too")
    device = torch.device("cuda")
    cases, missing = all_cases(args.schemes, args.only, args.formats)
    for name, reason in missing.items():
        say(f"{name} is left out: {reason}")
    shapes = [bench.parse_shape(text) for text in args.shapes]
    if args.workers > 1:
        cases = [
            without(case, crashes) for case, crashes in zip(cases, warm(args, shapes), strict=True)
        ]
    say("measuring the read floor")
    floor = ReadFloor.measure(device)
    say("read floor: " + ", ".join(f"{b / 1e6:.0f} MB {us:.2f} us" for b, us in floor.points))
    rows = bench.read_csv(args.out) if args.append and args.out.exists() else []
    rows = [row for row in rows if (row.N, row.K) not in shapes]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    commit = args.commit or bench.current_commit()
    for row in bench.measure(cases, shapes, args.m, device, commit, floor):
        say(bench.line(row))
        if row.note.startswith("refused"):
            continue  # such a layer is not for that kernel, and there is nothing to measure
        rows.append(row)
        if len(rows) % 20 == 0:
            bench.write_csv(args.out, rows)
    bench.write_csv(args.out, rows)
    bad = [row for row in rows if row.us is None]
    say(f"{len(rows) - len(bad)} measurements in {args.out}, {len(bad)} failures")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("h200_gemm.csv"), help="the CSV to write")
    parser.add_argument("--append", action="store_true", help="keep its rows of other shapes")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="NxK")
    parser.add_argument("--m", type=bench.parse_counts, default=bench.parse_counts(MS), help=MS)
    parser.add_argument("--schemes", nargs="*", default=SCHEMES, help="anybit's formats")
    parser.add_argument("--only", nargs="+", help="peers, such as anybit-triton or humming")
    parser.add_argument("--formats", nargs="+", help="of other packages, such as fp6; all")
    parser.add_argument("--commit", help="written into the CSV; by default git is asked")
    parser.add_argument("--workers", type=int, default=1, help="processes that compile beforehand")
    return parser.parse_args()


def all_cases(
    schemes: list[str], only: list[str] | None, formats: list[str] | None
) -> tuple[list[bench.Case], dict[str, str]]:
    """anybit's GPU backends, and the peers."""
    gpu = [name for name, (_, devices) in BACKENDS.items() if "cuda" in devices]
    ours = [
        bench.anybit_case(scheme, torch.float16, backend) for scheme in schemes for backend in gpu
    ]
    ours += [given(case) for case in ours if case.activation in CODES]
    others, missing = peers.cases()
    others = [case for case in others if not formats or case.format in formats]
    cases = [c for c in (*others, *ours) if not only or c.peer in only]
    return cases, missing


def given(case: bench.Case) -> bench.Case:
    """The same product of activations that are quantized before, as a model's norms do it."""
    activation = case.activation

    def prepare(w: torch.Tensor) -> bench.Layer:
        layer = case.prepare(w)

        def inputs(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            codes, scale = quantize_tokens(x, activation)
            whole = activation == "int8"
            sums = codes.sum(1, dtype=torch.int32) if whole else scale.new_empty(0).int()
            return codes, scale.flatten(), sums

        def run(weight: Prepared, *quantized: torch.Tensor) -> torch.Tensor:
            return layer.run(weight, Activations(*quantized, case.dtype))

        return dataclasses.replace(layer, run=run, inputs=inputs)

    return dataclasses.replace(case, activation=f"{activation}-given", prepare=prepare)


Crashes = dict[tuple[int, int], str]  # shape (N, K): how a case ended there


def warm(args: argparse.Namespace, shapes: list[tuple[int, int]]) -> list[Crashes]:
    """Run every case once in other processes: fills the compilers' caches and finds crashes.

    A kernel that reads where it must not ends CUDA for its process; better there than here.
    """
    count = len(all_cases(args.schemes, args.only, args.formats)[0])
    say(f"compiling in {args.workers} processes")
    given = (args.schemes, args.only, args.formats)
    jobs = [(given, i, shape, args.m) for shape in shapes for i in range(count)]
    found: list[Crashes] = [{} for _ in range(count)]
    with multiprocessing.get_context("spawn").Pool(args.workers, maxtasksperchild=6) as pool:
        for index, shape, text, crash in pool.imap_unordered(compile_case, jobs):
            if text:
                say(text)
            if crash:
                found[index][shape] = text
    return found


def compile_case(
    job: tuple[
        tuple[list[str], list[str] | None, list[str] | None], int, tuple[int, int], list[int]
    ],
) -> tuple[int, tuple[int, int], str, bool]:
    """Run one case once for every M: its index and shape, what to say, whether CUDA broke."""
    given, index, shape, ms = job
    case = all_cases(*given)[0][index]
    name = f"{case.peer} {case.format} {case.activation} {shape[0]}x{shape[1]}"
    start = time.perf_counter()
    try:
        torch.cuda.synchronize()
    except Exception:  # an earlier case has ended CUDA in this process; this one is compiled later
        return index, shape, "", False
    try:
        w = torch.randn(shape, device="cuda") * 0.02
        layer = case.prepare(w)
        for m in ms:
            x = torch.randn(m, shape[1], device="cuda").to(case.dtype)
            layer.run(layer.weight, *layer.inputs(x))
        torch.cuda.synchronize()
    except bench.Refused:
        return index, shape, "", False
    except Exception as error:
        crash = "CUDA error" in str(error) or "illegal" in str(error)
        return index, shape, f"{name}: {bench.failure(error)}", crash
    seconds = time.perf_counter() - start
    return index, shape, f"{name}: compiled in {seconds:.0f} s" if seconds > 10 else "", False


def without(case: bench.Case, crashes: Crashes) -> bench.Case:
    """The same case, which is not run again at the shapes at which it crashed."""

    def prepare(w: torch.Tensor) -> bench.Layer:
        crash = crashes.get((w.shape[0], w.shape[1]))
        if crash is not None:
            raise RuntimeError(crash)
        return case.prepare(w)

    return dataclasses.replace(case, prepare=prepare)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    main()
