"""Time the products of a mixture of experts in one run: anybit, humming and torch.

    python benchmarks/experts.py --out benchmarks/results/h200_experts.csv
    python benchmarks/experts.py --models --peers anybit --out h200_models.csv

The second one takes the experts of four models, both projections, from 1 to 4096 tokens. `--micro`
takes the formats in which such models are published, `--formats` some of humming's, and `--append`
keeps what the file has.

Tokens are sorted by expert beforehand, and quantized beforehand where they are 8 bits. Every result
is compared with one product for each expert before it is timed. Compiling (humming's kernels) comes
first. Needs kernels in ANYBIT_CACHE or CuTe DSL; humming is left out where it is not installed.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from experts_cases import (
    DEVICE,
    DIFFERENT,
    MODELS,
    Experts,
    ExpertShape,
    Routing,
    anybit,
    dense,
    humming,
    owners,
)
from torch import Tensor

from anybit.measure import bench
from anybit.measure.timing import ReadFloor, medians_in_turns, rotated

SCHEMES = ["liquid@int8", "int8@int8", "int4:group=128", "fp6"]
PEERS = ("torch", "anybit", "humming")
MODEL_SCHEMES = ["liquid@int8", "int4:group=64", "fp6"]
MICRO = ["mxfp4", "mxfp4@fp8", "nvfp4", "fp8:group=128@fp8"]
MODEL_TOKENS = [1, 4, 16, 64, 256, 1024, 4096]


def reference(experts: Experts, x: Tensor, routing: Routing) -> Tensor:
    """One product for each expert, fp32."""
    rows, starts = routing.sort(experts.seen(x)), routing.starts.tolist()
    weights = (experts.decoded[i] for i in owners(experts.decoded, routing.experts))
    parts = zip(starts[:-1], starts[1:], weights, strict=True)
    return torch.cat([rows[a:b] @ w.T for a, b, w in parts])


def measure(
    contestants: list[Experts], x: Tensor, routing: Routing, blank: bench.Row, floor: ReadFloor
) -> list[bench.Row]:
    """Check every contestant, then time all in turns, on a chip that is as warm for each."""
    rows, ready = [], []
    copies: dict[int, list[Any]] = {}  # of weights, which several contestants may share
    for experts in contestants:
        row = replace(
            blank, peer=experts.peer, format=experts.format, activation=experts.activation
        )
        try:
            run, check = experts.run(x, routing), checked(experts, x, routing)
            if id(experts.weight) not in copies:
                copies[id(experts.weight)] = rotated(experts.weight, experts.nbytes)
            weights = copies[id(experts.weight)]
            check(run(weights[-1]))
            ready.append((row, experts, [partial(run, w) for w in weights], check))
        except Exception as error:  # what other packages raise is a note, not an end
            rows.append(replace(row, note=f"{experts.note} {bench.failure(error)}".strip()))
    times = medians_in_turns([calls for _, _, calls, _ in ready], DEVICE)
    # Of the weights, those of experts that no token meets are not read.
    busy = int((routing.starts.diff() > 0).sum()) / routing.experts
    for (row, experts, calls, check), us in zip(ready, times, strict=True):
        note = experts.note
        try:
            if isinstance(us, Exception):
                raise us
            check(calls[-1]())
        except Exception as error:
            rows.append(replace(row, note=f"{note} {bench.failure(error)}".strip()))
            continue
        row = bench.finish(replace(row, us=us, note=note), round(experts.nbytes * busy), floor)
        rows.append(replace(row, tflops=row.tflops * routing.chosen.shape[1]))
    return rows


def checked(experts: Experts, x: Tensor, routing: Routing) -> Callable[[Tensor], None]:
    """Whether outputs are right; WrongResult if not."""
    extra = bench.TOLERANCE_QUANTIZED.get(experts.activation.removesuffix("-given"), 0.0)
    limit, want = bench.TOLERANCE[x.dtype] + extra, reference(experts, x, routing)

    def check(y: Tensor) -> None:
        y = y.view(want.shape)
        bench.check(y[routing.rows] if experts.by_token else y, want, limit)

    return check


def run(shape: ExpertShape, args: argparse.Namespace, floor: ReadFloor) -> Iterator[bench.Row]:
    """Rows of experts of one shape, for every contestant and number of tokens."""
    experts, top, n, k = shape.experts, shape.top, shape.n, shape.k
    w = torch.randn(min(experts, DIFFERENT), n, k, device=DEVICE) * 0.02
    inputs = []
    for m in args.m:
        choices = torch.rand(m, experts, device=DEVICE).topk(top).indices
        inputs.append((torch.randn(m, k, device=DEVICE).bfloat16(), Routing(choices, experts)))
    every = {
        "torch": lambda: dense(w, experts),
        "anybit": lambda: anybit(w, experts, args.schemes),
        "humming": lambda: humming(w, experts, args.m, top, args.formats),
    }
    blank = replace(bench.blank(DEVICE, args.commit), N=n, K=k)
    contestants: list[Experts] = []
    for peer in args.peers:
        try:
            contestants += every[peer]()
        except Exception as error:  # a package that is not there
            print(f"left out: {peer}: {type(error).__name__}: {error}", flush=True)
    for x, chosen in inputs:
        yield from measure(contestants, x, chosen, replace(blank, M=len(x)), floor)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("h200_experts.csv"))
    parser.add_argument("--append", action="store_true", help="keep what the file has")
    parser.add_argument("--shape", default="14336x4096", metavar="NxK", help="of an expert")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top", type=int, default=2, help="experts of a token")
    parser.add_argument("--m", type=bench.parse_counts)
    parser.add_argument("--schemes", nargs="*")
    parser.add_argument("--models", nargs="*", choices=MODELS, help="instead of a shape; all")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--formats", nargs="*", help="of humming's")
    parser.add_argument("--micro", action="store_true", help="MXFP4, NVFP4 and FP8 blocks")
    parser.add_argument("--commit")
    args = parser.parse_args()
    shapes = [ExpertShape(args.experts, args.top, *bench.parse_shape(args.shape))]
    if args.models is not None:
        shapes = [p for name in args.models or MODELS for p in MODELS[name]]
    args.m = args.m or ([32, 64, 128, 256] if args.models is None else MODEL_TOKENS)
    usual = SCHEMES if args.models is None else MODEL_SCHEMES
    args.schemes = args.schemes or (MICRO if args.micro else usual)
    micro = [s.partition("@")[0] for s in MICRO]
    args.formats = args.formats or (micro if args.micro else ["int4:group=64", "fp6"])
    torch.manual_seed(0)
    floor = ReadFloor.measure(DEVICE)
    rows = bench.read_csv(args.out) if args.append and args.out.exists() else []
    for shape in shapes:
        for row in run(shape, args, floor):
            rows.append(row)
            print(bench.line(row), flush=True)
            bench.write_csv(args.out, rows)


if __name__ == "__main__":
    main()
