"""What limits long products: clock cycles, the clock, or power; kernels in turns on one GPU.

    python benchmarks/clocks.py --cells 28672x4096:1024 --schemes int4:group=128 fp6 [--most 3]
                                [--peers machete quack]

All kernels of a cell run in turns, some milliseconds each, for several rounds, so each sees a chip
as warm as the others do. Two stamps around the launches read a multiprocessor's cycles and the
time: cycles and clock are measured, not guessed. "cool" is one replay after a pause, "hot" the
median of the rounds. busy: cycles that the products alone would take of all tensor cores / cycles.
The watts are those of runs of a kernel alone, where the driver tells them.
"""

import argparse
import json
import math
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import peers
import torch
import triton
import triton.language as tl
from hopper_layers import RandomLayer, more_tiles
from torch import Tensor

from anybit.core.scheme import parse_scheme
from anybit.kernels.backend import Prepared
from anybit.kernels.cute import operands
from anybit.kernels.cute.build import build
from anybit.kernels.cute.jit import dsl_version
from anybit.kernels.hopper import tiles
from anybit.kernels.hopper.chip import H200
from anybit.kernels.hopper.tile import Kernel, Tile
from anybit.measure import bench
from anybit.measure.timing import rotated

SETTLED_MS = 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0
ROUND_MS, WARM, ROUNDS, ALONE_MS = 10.0, 3, 8, 800.0
SMI = ["nvidia-smi", "--query-gpu=power.draw.instant", "--format=csv,noheader,nounits", "-i", "0"]
FMAS = 132 * 2048  # of 16 bits, a cycle, of an H200


@triton.jit
def stamp(out):
    """Of every program: its multiprocessor, that one's cycles, nanoseconds."""
    program = tl.program_id(0)
    sm = tl.inline_asm_elementwise(
        "{ .reg .u32 s; mov.u32 s, %smid; cvt.u64.u32 $0, s; }",
        "=l,l", [tl.zeros((1,), tl.int64)], tl.int64, is_pure=False, pack=1,
    )  # fmt: skip
    cycles = tl.inline_asm_elementwise(
        "mov.u64 $0, %clock64;",
        "=l,l", [tl.zeros((1,), tl.int64)], tl.int64, is_pure=False, pack=1,
    )  # fmt: skip
    ns = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;",
        "=l,l", [tl.zeros((1,), tl.int64)], tl.int64, is_pure=False, pack=1,
    )  # fmt: skip
    at = out + program * 3 + tl.arange(0, 1)
    tl.store(at, sm)
    tl.store(at + 1, cycles)
    tl.store(at + 2, ns)


@dataclass
class Graph:
    """Launches of one kernel between two stamps."""

    name: str
    launches: int
    graph: torch.cuda.CUDAGraph
    stamps: Tensor
    keep: object

    def replay(self) -> tuple[float, float]:
        """(microseconds of a launch, GHz), by the stamps."""
        self.graph.replay()
        torch.cuda.synchronize()
        first, last = self.stamps.tolist()
        begun = {sm: (cycles, ns) for sm, cycles, ns in first}
        ghz, us = [], []
        for sm, cycles, ns in last:
            if sm in begun:
                ghz.append((cycles - begun[sm][0]) / (ns - begun[sm][1]))
                us.append((ns - begun[sm][1]) / 1e3 / self.launches)
        return median(us), median(ghz)


def capture(name: str, calls: list[Callable[[], object]], milliseconds: float) -> Graph:
    """A graph of about so long, in whole rounds of the calls."""
    stamps = torch.zeros(2, 264, 3, dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        stamp[(264,)](stamps[0], num_warps=1)
        for call in calls:
            call()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        times = max(1, round(milliseconds / begin.elapsed_time(end)))
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        stamp[(264,)](stamps[0], num_warps=1)
        for _ in range(times):
            for call in calls:
                call()
        stamp[(264,)](stamps[1], num_warps=1)
        graph.capture_end()
    torch.cuda.synchronize()
    return Graph(name, times * len(calls), graph, stamps, calls)


def cases(
    n: int, k: int, m: int, args: argparse.Namespace
) -> Iterator[tuple[str, list[Callable[[], object]]]]:
    """cuBLAS, peers; ours with the chosen tile and others worth it, in bf16 the chosen one."""
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randn(m, k, device="cuda").to(dtype)
        w = torch.randn(n, k, device="cuda").mul_(0.02).to(dtype)
        calls = [lambda w=w, x=x: x @ w.T for w in rotated(w, w.nbytes)]
        yield f"cublas {bench.short(dtype)}", calls
    for case in args.found:
        layer = case.prepare(torch.randn(n, k, device="cuda") * 0.02)
        inputs = layer.inputs(torch.randn(m, k, device="cuda").to(case.dtype))
        copies = rotated(layer.weight, layer.nbytes)
        yield (
            f"{case.peer} {case.format} {case.activation}",
            [partial(layer.run, copy, *inputs) for copy in copies],
        )
    for scheme in args.schemes:
        for dtype in (torch.float16, torch.bfloat16):
            p = RandomLayer(scheme, dtype, n, k, cold=True, few=True)
            given = p.tokens(m)
            some = [tiles.choose(p.decoder, m, n, k)]
            if dtype == torch.float16:
                some += [t for t in worth(p, m) if t.name.startswith(args.tiles)][: args.most]
            for tile in dict.fromkeys(some):
                early = tiles.overlaps(tile, p.decoder, m, n)
                name = f"{scheme} {bench.short(dtype)} {tile.name}"
                yield name, launches(p, given, tile, early)
                if not early and dtype == torch.float16:
                    yield f"{name} pdl", launches(p, given, tile, True)


def launches(
    p: RandomLayer, given: tuple[Tensor, Tensor | None, Tensor | None], tile: Tile, early: bool
) -> list[Callable[[], object]]:
    def call(weight: Prepared) -> Tensor:
        return p.run(*given, tile=tile, overlap=early, prepared=weight)

    return [partial(call, weight) for weight in p.copies]


def worth(p: RandomLayer, m: int) -> list[Tile]:
    """Compiled tiles by what products and bytes alone take, the shortest first; up to 1.5 times."""
    times = {}
    for tile in p.tiles():
        d, n, k = p.decoder, p.n, p.k
        if tile.tokens >= 32 and tile.tokens < 4 * m and tiles.fits_once(tile, d, m, n, k):
            steps = tiles.most_steps(tile, m, n, k, H200) * tiles.together(tile, m, n, H200)
            step = max(tile.rows * tile.tokens / 16 + 60, tiles.staged(tile, d) / 34)
            times[tile] = steps * step + 6000 + (8000 if tile.shared else 2500 * (tile.split > 1))
    best = sorted(times, key=times.__getitem__)
    late = {t for t in best if t.late}
    best = [t for t in best if t.late or replace(t, late=True) not in late]
    return [t for t in best if times[t] < 1.5 * times[best[0]]]


def watts(graph: Graph, us: float) -> float:
    """Power of a kernel alone, as nvidia-smi tells while it runs."""
    for _ in range(max(1, round(ALONE_MS * 1e3 / (us * graph.launches)))):
        graph.graph.replay()
    told = subprocess.run(SMI, capture_output=True, text=True, check=False).stdout.split()
    torch.cuda.synchronize()
    return float(told[0]) if told and told[0].replace(".", "").isdigit() else math.nan


def settle(graph: Graph) -> tuple[float, float]:
    """(microseconds, GHz) of a kernel alone, when its clock has settled; prints the way there."""
    found: list[tuple[float, float, float]] = []
    begun = time.perf_counter()
    while (since := (time.perf_counter() - begun) * 1e3) < SETTLED_MS[-1]:
        found.append((since, *graph.replay()))
    text, low = [], 0.0
    for high in SETTLED_MS:
        some = [(us, ghz) for at, us, ghz in found if low <= at < high]
        if some:
            us, ghz = (median(values) for values in zip(*some, strict=True))
            text.append(f"{high:.0f} ms {us:.1f} {ghz:.2f}")
        low = high
    print(f"{graph.name:58s} alone: {' | '.join(text)}", flush=True)
    return us, ghz


def cell(n: int, k: int, m: int, args: argparse.Namespace, power: bool) -> list[dict[str, object]]:
    """The rows of a table, which is printed as well."""
    rows: list[dict[str, object]] = []
    torch.cuda.empty_cache()
    milliseconds = ROUND_MS / 3 if args.quick else ROUND_MS
    graphs = [capture(*case, milliseconds) for case in cases(n, k, m, args)]
    cool = {}
    for graph in graphs:
        time.sleep(0 if args.quick else 0.05)
        cool[graph.name] = graph.replay()
    hot: dict[str, list[tuple[float, float]]] = {g.name: [] for g in graphs}
    for i in range(WARM + (ROUNDS // 2 if args.quick else ROUNDS)):
        for graph in graphs:
            found = graph.replay()
            if i >= WARM:
                hot[graph.name].append(found)
    ideal = n * k * m / FMAS
    best = min(median(us for us, _ in hot[g.name]) for g in graphs[:2])
    print(f"\n{n}x{k}, {m} tokens: {ideal:.0f} cycles of products")
    print(f"{'':58s} cool us  GHz  busy |  hot us  GHz  busy  TFLOP/s  W  speed")
    alone = {graph.name: settle(graph) for graph in graphs} if args.alone else {}
    for graph in graphs:
        us, ghz = (median(values) for values in zip(*hot[graph.name], strict=True))
        first, clock = cool[graph.name]
        drawn = watts(graph, us) if power else math.nan
        print(
            f"{graph.name:58s} {first:7.1f} {clock:.2f}  {ideal / (first * clock * 1e3):.2f} | "
            f"{us:7.1f} {ghz:.2f}  {ideal / (us * ghz * 1e3):.2f}  {2e-6 * n * k * m / us:7.0f} "
            f"{drawn:4.0f}  {best / us:.2f}",
            flush=True,
        )
        rows.append({
            "cell": f"{n}x{k}:{m}", "kernel": graph.name, "cool_us": first, "cool_ghz": clock,
            "us": us, "ghz": ghz, "watts": drawn, "alone": alone.get(graph.name),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", nargs="+", default=["28672x4096:1024"], metavar="NxK:M")
    parser.add_argument("--schemes", nargs="+", default=["int4:group=128", "fp6"])
    parser.add_argument("--peers", nargs="*", default=[], help="with 16-bit tokens, same formats")
    parser.add_argument("--most", type=int, default=6, help="tiles beside the chosen one")
    parser.add_argument("--tiles", nargs="+", default=[""], help="what their names begin with")
    parser.add_argument("--alone", action="store_true", help="each a third of a second, too")
    parser.add_argument("--quick", action="store_true", help="short turns, no pauses")
    parser.add_argument("--out", type=Path, default=Path("clocks.json"))
    parser.add_argument("--compile", action="store_true", help="and end")
    parser.add_argument("--watts", type=int, default=0, help="cells of which watts are asked, too")
    args = parser.parse_args()
    start = time.perf_counter()
    if dsl_version():
        ensure(args.schemes)
    if args.compile:
        return
    args.found, args.tiles = of_peers(args), tuple(args.tiles)
    found: list[dict[str, object]] = []
    for i, text in enumerate(args.cells):
        shape, _, m = text.partition(":")
        found += cell(*bench.parse_shape(shape), int(m), args, i < args.watts)
        args.out.write_text(json.dumps(found))
    print(f"clocks: {time.perf_counter() - start:.0f} s")


def of_peers(args: argparse.Namespace) -> list[bench.Case]:
    """The cases of the named peers that multiply one of the formats with 16-bit tokens."""
    cases, missing = peers.cases() if args.peers else ([], {})
    for name, why in missing.items():
        print(f"{name} is left out: {why}")
    return [
        case for case in cases
        if case.peer in args.peers
        and case.format in args.schemes
        and case.activation in ("fp16", "bf16")
    ]  # fmt: skip


def ensure(schemes: list[str]) -> None:
    """Compile what is missing."""
    kernels = []
    for scheme in schemes:
        fmt, activation = parse_scheme(scheme)
        for dtype in (torch.float16, torch.bfloat16):
            operand = operands.operand_of(activation, dtype)
            d = operands.decoder_for(fmt, getattr(torch, operand))
            every = [*tiles.family(d), *more_tiles(d)]
            kernels += [Kernel(d, t, operands.NAMES[dtype]) for t in every if t.tokens >= 32]
    for error in build(kernels):
        print("not compiled:", error[:300])


if __name__ == "__main__":
    main()
