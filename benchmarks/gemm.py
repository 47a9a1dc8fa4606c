"""Time anybit's kernels, cuBLAS and the kernels of other packages in one run, and write a CSV.

    python benchmarks/gemm.py --out benchmarks/results/h200_gemm.csv
    python benchmarks/gemm.py --models --seconds 500 --out benchmarks/results/h200_shapes.csv

The second one takes the weights of many models (weights_of_models.py), our formats and cuBLAS, and
in the end the first weights again, which shows how far times of one chip differ. Needs a GPU. Peers
that are not installed are named and left out. See README.md beside this file.
"""

import argparse
import dataclasses
import multiprocessing
import signal
import time
from pathlib import Path

import efficiency
import peers
import torch
from weights_of_models import MODELS, weights

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
    "sparse@int8",
    "codebook:m=1,v=4,b=8,group=128",
    "codebook:m=2,v=8,b=8,group=128",
    "liquid@int8",
    "int8@int8",
    "int4@fp8",
    "fp6@fp8",
    "int4:group=128@fp8",
    "int4:group=128@int8",
    "mxfp4",
    "mxfp4@fp8",
    "nvfp4",
    "fp8:group=128@fp8",
]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# With --models.
REPEATED = 2  # weights that are measured again at the end
MODEL_MS = "1,2,4,8,16,32,48,64,96,128,192,256,512,1024,2048,4096"
MODEL_SCHEMES = [
    "int4:group=128",
    "fp6",
    "liquid@int8",
    "codebook:m=1,v=4,group=128",
    "int8",
    "fp5",
]


def main() -> None:
    args = arguments()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a GPU; `anybit bench` measures on a CPU too")
    device = torch.device("cuda")
    for name, reason in all_cases(args, 0)[1].items():
        say(f"{name} is left out: {reason}")
    crashes = warm(args) if args.workers > 1 else {}
    start = time.perf_counter()
    say("measuring the read floor")
    floor = ReadFloor.measure(device)
    say("read floor: " + ", ".join(f"{b / 1e6:.0f} MB {us:.2f} us" for b, us in floor.points))
    rows = bench.read_csv(args.out) if args.append and args.out.exists() else []
    rows = [row for row in rows if (row.N, row.K) not in args.shapes]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    commit = args.commit or bench.current_commit()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    group: list[bench.Row] = []  # of one weight and number of tokens
    done = 0
    try:
        for shape, note in args.turns:
            cases = [without(c, crashes) for c in all_cases(args, shape[1])[0]]
            for row in bench.measure(cases, [shape], args.m, device, commit, floor):
                if group and row.M != group[0].M:
                    rows, group = rows + group, []
                say(bench.line(row))
                if not row.note.startswith("refused"):  # else the layer is not for that kernel
                    group.append(dataclasses.replace(row, note=note or row.note))
                if args.seconds and time.perf_counter() > start + args.seconds:
                    raise KeyboardInterrupt
            rows, group, done = rows + group, [], done + 1
            bench.write_csv(args.out, rows)
    except KeyboardInterrupt:
        say("stopped: groups that were not measured to the end are left out")
    bench.write_csv(args.out, rows)
    for row in rows:
        if row.us is None:
            print(bench.line(row)[:150])
    print(efficiency.report(rows))
    bad = sum(row.us is None for row in rows)
    seconds = time.perf_counter() - start
    say(
        f"{done} of {len(args.turns)} weights in {seconds:.0f} s, {len(rows) - bad} measurements "
        f"in {args.out}, {bad} failures"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("h200_gemm.csv"), help="the CSV to write")
    parser.add_argument("--append", action="store_true", help="keep its rows of other shapes")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="NxK")
    parser.add_argument("--models", nargs="*", choices=MODELS, help="instead of shapes; all")
    parser.add_argument("--m", type=bench.parse_counts, help=f"{MS}; of models {MODEL_MS}")
    parser.add_argument("--schemes", nargs="*", help="anybit's formats")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp16"], help="of ours")
    parser.add_argument("--only", nargs="+", help="peers, such as anybit-triton or humming")
    parser.add_argument("--formats", nargs="+", help="of other packages, such as fp6; all")
    parser.add_argument("--seconds", type=int, default=0, help="when to stop; 0: at the end")
    parser.add_argument("--commit", help="written into the CSV; by default git is asked")
    parser.add_argument("--workers", type=int, default=1, help="processes that compile beforehand")
    args = parser.parse_args()
    many = args.models is not None
    args.m = args.m or bench.parse_counts(MODEL_MS if many else MS)
    if args.schemes is None:
        args.schemes = MODEL_SCHEMES if many else SCHEMES
    if many:
        args.only = args.only or [efficiency.PEER, "cublas"]
        args.formats = args.formats or ["bf16"]
    args.shapes = weights(args.models) if many else [*map(bench.parse_shape, args.shapes)]
    again = args.shapes[:REPEATED] if many else []
    args.turns = [(s, "") for s in args.shapes] + [(s, efficiency.AGAIN) for s in again]
    return args


def all_cases(args: argparse.Namespace, k: int) -> tuple[list[bench.Case], dict[str, str]]:
    """anybit's GPU backends and the peers for K columns, and the peers that are missing."""
    gpu = [name for name, (_, devices) in BACKENDS.items() if "cuda" in devices]
    schemes = [s.replace("group=128", "group=64") if k % 128 else s for s in args.schemes]
    dtypes = [DTYPES[name] for name in args.dtypes]
    ours = [bench.anybit_case(s, dtypes[0], backend) for s in schemes for backend in gpu]
    ours += [given(case) for case in ours if case.activation in CODES]
    ours += [  # only tokens that are not quantized make a difference
        bench.anybit_case(s, dtype, backend)
        for dtype in dtypes[1:]
        for s in schemes
        for backend in gpu
        if "@" not in s
    ]
    others, missing = peers.cases()
    others = [case for case in others if not args.formats or case.format in args.formats]
    cases = [c for c in (*others, *ours) if not args.only or c.peer in args.only]
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


Crashes = dict[tuple[str, str, str, tuple[int, int]], str]  # how a case ended at a shape


def warm(args: argparse.Namespace) -> Crashes:
    """Run every case once in other processes: fills the compilers' caches and finds crashes.

    A kernel that reads where it must not ends CUDA for its process; better there than here.
    """
    say(f"compiling in {args.workers} processes")
    half = len(args.m) // 2
    jobs = [
        (args, i, shape, counts)
        for shape in args.shapes
        for i, case in enumerate(all_cases(args, shape[1])[0])
        for counts in (args.m[:half], args.m[half:])  # some compile for half a minute
        if case.peer != "cublas"
    ]
    found: Crashes = {}
    with multiprocessing.get_context("spawn").Pool(args.workers, maxtasksperchild=12) as pool:
        for case, text, crash in pool.imap_unordered(compile_case, jobs):
            if text:
                say(text)
            if crash:
                found[case] = text
    return found


def compile_case(
    job: tuple[argparse.Namespace, int, tuple[int, int], list[int]],
) -> tuple[tuple[str, str, str, tuple[int, int]], str, bool]:
    """Run one case once for each of some M: which one, what to say, whether CUDA broke."""
    args, index, shape, counts = job
    case = all_cases(args, shape[1])[0][index]
    key = case.peer, case.format, case.activation, shape
    name = f"{case.peer} {case.format} {case.activation} {shape[0]}x{shape[1]}"
    start = time.perf_counter()
    try:
        torch.cuda.synchronize()
    except Exception:  # an earlier case has ended CUDA in this process; this one is compiled later
        return key, "", False
    try:
        w = torch.randn(shape, device="cuda") * 0.02
        layer = case.prepare(w)
        for m in counts:
            x = torch.randn(m, shape[1], device="cuda").to(case.dtype)
            layer.run(layer.weight, *layer.inputs(x))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except bench.Refused:
        return key, "", False
    except Exception as error:
        crash = "CUDA error" in str(error) or "illegal" in str(error)
        return key, f"{name}: {bench.failure(error)}", crash
    seconds = time.perf_counter() - start
    return key, f"{name}: compiled in {seconds:.0f} s" if seconds > 10 else "", False


def without(case: bench.Case, crashes: Crashes) -> bench.Case:
    """The same case, which is not run again at the shapes at which it crashed."""

    def prepare(w: torch.Tensor) -> bench.Layer:
        shape = w.shape[0], w.shape[1]
        crash = crashes.get((case.peer, case.format, case.activation, shape))
        if crash is not None:
            raise RuntimeError(crash)
        return case.prepare(w)

    return dataclasses.replace(case, prepare=prepare)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    main()
