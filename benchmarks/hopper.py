"""Correctness and speed of the Hopper kernels on this GPU.

    python benchmarks/hopper.py check [--schemes liquid@int8 fp6]
    python benchmarks/hopper.py sweep --out tiles.json [--m 1,16] [--shapes 6144x4096]
    python benchmarks/hopper.py table --out h200_gemm.csv

`check` reads weights back bit for bit and compares random products with exact ones; `stress`
repeats them under load; `experts` compares and times the grouped product. `brief` does a little of
each with the tiles that the rules choose, and compiles what is missing. `sweep` times every tile,
for the rules in `kernels/hopper/tiles.py`; `compare` those that its model ranks first, as they are
launched, beside cuBLAS. `table` times what they choose beside cuBLAS and the read floor, plain and
with programmatic dependent launch (pdl); `host`, what a launch costs the host. Activations are
quantized beforehand. Needs no CuTe DSL when ANYBIT_CACHE holds the kernels.
"""

import argparse
import json
import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from hopper_layers import (
    RandomLayer,
    dense_us,
    exact_product,
    exact_weight,
    more_tiles,
    outputs,
    right,
    time_copy,
    time_tile,
)
from torch import Tensor

from anybit.core.format import get_format
from anybit.core.scheme import parse_scheme
from anybit.kernels.cute import jit, operands
from anybit.kernels.cute.build import build
from anybit.kernels.cute.decode import MANTISSA
from anybit.kernels.hopper import scalar_linear, tiles
from anybit.kernels.hopper.chip import H200
from anybit.kernels.hopper.expert_tiles import choose_grouped
from anybit.kernels.hopper.tile import Kernel, Tile
from anybit.measure import bench
from anybit.measure.timing import ReadFloor, median_us, rotated

SHAPES = ["28672x4096", "4096x14336", "6144x4096", "4096x4096"]
SCHEMES = ["liquid@int8", "int8@int8", "fp6", "int4:group=128"]
MS = "1,16,32,64,128,256,1024"

# Correctness.


def check(schemes: list[str]) -> int:
    bad = total = 0
    for scheme in schemes:
        for dtype in outputs(scheme):
            if not RandomLayer(scheme, dtype, 128, 1024).tiles():
                print(f"check {scheme} {dtype}: no kernels are compiled", flush=True)
                continue
            wrong, done = check_scheme(scheme, dtype)
            bad, total = bad + wrong, total + done
            print(f"check {scheme} {dtype}: {wrong} of {done} wrong", flush=True)
    return bad


def check_scheme(scheme: str, dtype: torch.dtype) -> tuple[int, int]:
    bad = total = 0
    for n, k in ((208, 512), (1024, 1152), (6144, 4096)):
        p = RandomLayer(scheme, dtype, n, k)
        bias = torch.randn(n, device="cuda").to(dtype)
        weight = exact_weight(p)
        for m in (1, 7, 16, 33, 100, 300):
            x = p.tokens(m)
            want = exact_product(p, weight, *x)
            for tile in p.tiles():
                if tile.tokens >= 8 * max(m, 16):
                    continue
                y = p.run(*x, tile=tile)
                again = p.run(*x, tile=tile, overlap=False)
                ok = right(p, y, want) and torch.equal(y, again)
                with_bias = p.run(*x, tile=tile, bias=bias).float()
                ok &= bool((with_bias - want.float() - bias.float()).norm() <= 1e-2 * want.norm())
                bad, total = bad + (not ok), total + 1
                if not ok and bad < 9:
                    error = (y.double() - want.double()).norm() / want.double().norm()
                    print(f"WRONG {scheme} {dtype} {(m, n, k)} {tile.name} {error:.2e}")
        ok = one_hot(p, weight)
        bad, total = bad + (not ok), total + 1
        if not ok:
            print(f"WRONG one-hot {scheme} {dtype} {(n, k)}")
    return bad, total


def one_hot(p: RandomLayer, weight: Tensor) -> bool:
    """Activations with a single 1 read the weights back, column by column."""
    ok = True
    for start in range(0, p.k, 256):
        x = torch.zeros(min(256, p.k - start), p.k, device="cuda")
        x[torch.arange(len(x)), start + torch.arange(len(x))] = 1
        scale = torch.ones(len(x), device="cuda") if p.activation else None
        sums = torch.ones(len(x), device="cuda", dtype=torch.int32) if p.activation else None
        tile = (p.tiles() or [None])[-1]
        y = p.run(x.to(getattr(torch, p.operand)), scale, sums, tile=tile)
        want = weight[:, start : start + len(x)].T
        if p.decoder.grid_words and p.operand in MANTISSA:
            step = torch.finfo(p.dtype).eps * (1.51 * want.abs() + rounded(p)) + 1e-7
            ok &= bool(((y.double() - want).abs() <= step).all())
        else:
            ok &= torch.equal(y, want.float().to(p.dtype))
    return ok


def rounded(p: RandomLayer) -> float:
    """What else is rounded in a weight: a group's factor times a code, and its shift."""
    frame = p.fmt.frame(p.packed.grid)
    if frame is None:
        return 0.0
    shift = 0 if frame.shift is None else frame.shift.abs()
    most = frame.numbers.abs().max() * frame.factor.abs() + shift
    return float((most * p.packed.grid["scale"].float()).max())


def brief(schemes: list[str]) -> None:
    """Of each scheme: all weights read back, random products, times beside cuBLAS; experts."""
    n, k, counts = 4096, 4096, (1, 16, 64, 256, 1024)
    kernels = []
    for scheme in schemes:
        p = RandomLayer(scheme, torch.bfloat16, 256, 256)
        every = [(tiles.choose(p.decoder, m, n, k), False) for m in counts]
        every += [(choose_grouped(p.decoder, m, 14336, 4096, 8), True) for m in (64, 128, 256, 512)]
        every += [(tiles.choose(p.decoder, m, 14336, 4096), False) for m in (16, 32, 64, 128)]
        kernels += [Kernel(p.decoder, t, "bfloat16", grouped) for t, grouped in every]
    errors = build(kernels)
    print(f"{len(set(kernels))} kernels, {len(errors)} not compiled", *errors, sep="\n")
    dense = [dense_us(n, k, m, torch.bfloat16) for m in counts]
    print("us, M =", *counts, "\ncublas bf16", *(f"{us:.1f}" for us in dense), flush=True)
    for scheme in schemes:
        p = RandomLayer(scheme, torch.bfloat16, n, k, cold=True)
        weight = exact_weight(p)
        marks, times = [one_hot(p, weight)], []
        for m in counts:
            x = p.tokens(m)
            marks.append(right(p, p.run(*x), exact_product(p, weight, *x)))
            times.append(time_tile(p, m, None, True))
        print(scheme, *(f"{us:.1f}" for us in times), "right" if all(marks) else f"WRONG {marks}")
    for scheme in schemes:
        check_experts(scheme)


def stress(schemes: list[str], rounds: int = 100) -> int:
    """Chains of dependent and independent launches, plain and overlapped: always the same bits."""
    bad = 0
    for scheme in schemes:
        p = RandomLayer(scheme, outputs(scheme)[-1], 4096, 4096)
        cases = [(p.tokens(m), m) for m in (1, 16, 64, 128, 300)]
        every = p.tiles()
        first = [p.run(*x, tile=every[0], overlap=False).clone() for x, _ in cases]
        torch.cuda.synchronize()
        for i in range(rounds):
            got = [
                p.run(*x, tile=every[0], overlap=bool((i + j) % 3))
                for j, (x, _) in enumerate(cases)
            ]
            bad += sum(not torch.equal(a, b) for a, b in zip(got, first, strict=True))
        print(f"stress {scheme}: {bad} of {rounds * len(cases)} differ", flush=True)
    return bad


def check_experts(scheme: str) -> None:
    """The grouped product against one dense product for each expert, and its time."""
    n, k, experts = 14336, 4096, 8
    layers = [RandomLayer(scheme, torch.bfloat16, n, k) for _ in range(experts)]
    p = layers[0]
    prepared = scalar_linear.prepare_experts([q.packed for q in layers], p.activation)
    for m in (32, 64, 128, 256):
        chosen = torch.stack([torch.randperm(experts, device="cuda")[:2] for _ in range(m)])
        counts = torch.bincount(chosen.flatten(), minlength=experts)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        given = p.tokens(2 * m)

        def run(overlap: bool = True, given=given, starts=starts) -> Tensor:
            return scalar_linear.multiply(*given, prepared, None, p.dtype, None, overlap, starts)

        y, wrong = run(), 0
        for e, (a, b) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
            part = [None if t is None else t[a:b].contiguous() for t in given]
            want = layers[e].run(*part)  # another tile: floats are added in another order
            error = (y[a:b].double() - want.double()).norm() / want.double().norm()
            exact = p.operand == "int8" and not p.decoder.sums
            wrong += b > a and not error <= (0 if exact else 6e-3)
        us = [median_us([partial(run, overlap)], torch.device("cuda")) for overlap in (False, True)]
        print(f"experts {scheme} M={m}: {wrong} wrong, plain {us[0]:.1f} pdl {us[1]:.1f} us")


def check_many_experts(scheme: str, experts: int = 700) -> None:
    """More experts than a table has spans: each token beside its product with all weights."""
    n, k, m = 200, 512, 300
    layers = [RandomLayer(scheme, torch.bfloat16, n, k) for _ in range(3)]
    p = layers[0]
    some = scalar_linear.prepare_experts([q.packed for q in layers], p.activation)
    index = torch.arange(experts, device="cuda") % 3
    layout = tuple(
        part.view(torch.uint8).unflatten(0, (3, -1))[index].flatten(0, 1).view(part.dtype)
        for part in some.layout
    )
    owner = torch.randint(experts, (m,), device="cuda").sort().values
    owner[-20:] = experts - 1
    counts = torch.bincount(owner, minlength=experts)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    x = p.tokens(m)
    y = scalar_linear.multiply(
        *x, some._replace(layout=layout), None, p.dtype, None, None, starts
    ).double()
    every = torch.stack([exact_product(q, exact_weight(q), *x).double() for q in layers])
    want = every[index[owner], torch.arange(m, device="cuda")]
    error = (y - want).norm() / want.norm()
    print(f"{experts} experts {scheme}: {'right' if error <= 2e-2 else 'WRONG'} {error:.1e}")


# Speed.


def sweep(args: argparse.Namespace) -> None:
    out = []
    for n, k in args.shapes:
        dense = {m: dense_us(n, k, m, torch.bfloat16) for m in args.m}
        for scheme in args.schemes:
            for dtype in outputs(scheme)[-1:] if not args.all_dtypes else outputs(scheme):
                p = RandomLayer(scheme, dtype, n, k, cold=True)
                for m in args.m:
                    times = {}
                    for tile in p.tiles():
                        if not plausible(tile, m, n):
                            continue
                        times[tile] = time_tile(p, m, tile, overlap=False)
                    best = sorted(times, key=times.__getitem__)
                    pdl = {t: time_tile(p, m, t, overlap=True) for t in best[:3]}
                    chosen = tiles.choose(p.decoder, m, n, k)
                    text = " ".join(f"{t.name}={times[t]:.1f}" for t in best[:6])
                    print(
                        f"{scheme} {operands.NAMES[dtype]} {n}x{k} M={m} dense {dense[m]:.1f} "
                        f"best {times[best[0]]:.1f} pdl {min(pdl.values()):.1f} "
                        f"chosen {times.get(chosen, math.nan):.1f} | {text}",
                        flush=True,
                    )
                    out.append({
                        "scheme": scheme, "dtype": operands.NAMES[dtype],
                        "n": n, "k": k, "m": m,
                        "dense": dense[m], "plain": {t.name: v for t, v in times.items()},
                        "pdl": {t.name: v for t, v in pdl.items()},
                    })  # fmt: skip
                    args.out.write_text(json.dumps(out))


def compare(args: argparse.Namespace) -> None:
    """Time the tiles that the model ranks first, as launched, beside what it says and cuBLAS."""
    out = []
    if jit.dsl_version():
        kernels: list[jit.KernelSpec] = []
        for scheme in args.schemes:
            fmt, activation = parse_scheme(scheme)
            operand = operands.operand_of(activation, torch.bfloat16)
            d = operands.decoder_for(fmt, getattr(torch, operand))
            large = [t for t in (*tiles.family(d), *more_tiles(d)) if t.tokens >= 96]
            kernels += [Kernel(d, t, "bfloat16") for t in large]
            kernels += scalar_linear.copy_kernels(d)
        print("not compiled:", *build(kernels), sep="\n")
    for n, k in args.shapes:
        dense = {
            m: min(dense_us(n, k, m, dtype) for dtype in (torch.float16, torch.bfloat16))
            for m in args.m
        }
        for scheme in args.schemes:
            if (group := parse_scheme(scheme)[0].group) and k % group:
                print(f"{scheme} {n}x{k}: no whole groups", flush=True)
                continue
            p = RandomLayer(scheme, torch.bfloat16, n, k, cold=True, few=True)
            for m in args.m:
                times: dict[str, float] = {}
                chosen, said = tiles.choose(p.decoder, m, n, k), {}
                for tile in [chosen, *p.tiles()]:
                    count = -(-n // tile.rows) * -(-m // tile.tokens)
                    if tile.late != chosen.late and count <= H200.multiprocessors:
                        continue  # every CTA has one tile
                    if 2 * tile.tokens < min(m, 128) or tile.tokens >= 4 * max(m, 8):
                        continue
                    if tiles.fits_once(tile, p.decoder, m, n, k):
                        busy = tiles.cycles(tile, p.decoder, m, n, k)
                        said[tile] = max(busy, tiles.reading(tile, p.decoder, m, n, k)), busy
                first = sorted(said, key=said.__getitem__)[: args.most]
                for tile in dict.fromkeys([chosen, *first]):
                    overlap = tiles.overlaps(tile, p.decoder, m, n)
                    times[tile.name] = time_tile(p, m, tile, overlap)
                if scalar_linear.narrow(m, n, k, p.decoder):
                    times["narrow"] = time_tile(p, m, None, True)
                if p.activation is None and m > 256:
                    times["copy"] = time_copy(p, m)
                    times["copy in slices"] = time_copy(p, m, args.slice // (2 * k) // 128 * 128)
                cycles = {tile.name: round(both[0]) for tile, both in said.items()}
                for name, us in times.items():
                    out.append({
                        "scheme": scheme, "n": n, "k": k, "m": m, "tile": name,
                        "us": us, "cycles": cycles.get(name), "dense": dense[m],
                    })  # fmt: skip
                us = times[chosen.name]
                text = " ".join(f"{name.replace(' ', '_')}={us:.1f}" for name, us in times.items())
                print(
                    f"{scheme} {n}x{k} M={m} dense {dense[m]:.1f} chosen {us:.1f} "
                    f"(x{dense[m] / us:.2f}) best {min(times.values()):.1f} | {text}",
                    flush=True,
                )
                args.out.write_text(json.dumps(out))


def plausible(tile: Tile, m: int, n: int) -> bool:
    """Whether a tile is worth timing for m tokens: neither mostly empty, nor far too small."""
    if tile.tokens >= 2 * max(m, 8) or (tile.tokens < 64 and m > tile.tokens):
        return False
    if tile.tokens == 64 and m > 256:
        return False
    row_tiles = -(-n // tile.rows) * -(-m // tile.tokens)
    return tile.split == 1 or row_tiles * tile.split <= 132 * tile.ctas * 1.1


def table(args: argparse.Namespace) -> None:
    floor = ReadFloor.measure(torch.device("cuda"))
    blank = bench.blank(torch.device("cuda"), args.commit)
    rows: list[bench.Row] = []
    for n, k in args.shapes:
        rows += Table(blank, floor, n, k).rows(args.schemes, args.m)
        bench.write_csv(args.out, rows)


class Table:
    """The rows of one shape."""

    def __init__(self, blank: bench.Row, floor: ReadFloor, n: int, k: int):
        self.blank, self.floor = replace(blank, N=n, K=k), floor
        self.dense: dict[int, float] = {}  # of fp16, by M
        self.out: list[bench.Row] = []

    def add(self, m: int, us: float, nbytes: int, **fields) -> None:
        row = replace(self.blank, M=m, us=us, vs_cublas_fp16=self.dense[m] / us, **fields)
        self.out.append(bench.finish(row, nbytes, self.floor))
        print(bench.line(self.out[-1]), flush=True)

    def rows(self, schemes: list[str], counts: list[int]) -> list[bench.Row]:
        n, k = self.blank.N, self.blank.K
        for dtype in (torch.float16, torch.bfloat16):
            name = bench.short(dtype)
            for m in counts:
                us = dense_us(n, k, m, dtype)
                self.dense.setdefault(m, us)
                self.add(m, us, n * k * 2, peer="cublas", format=name, activation=name)
        for m in counts:
            if m > 16:
                us = int_mm_us(n, k, m)
                self.add(
                    m, us, n * k, peer="cublas", format="int8(_int_mm)", activation="int8-given"
                )
        layers = [
            RandomLayer(scheme, dtype, n, k, cold=True)
            for scheme in schemes
            for dtype in outputs(scheme)
        ]
        # Small products timed right behind large ones were 10 to 25 % slower.
        for m in sorted(counts):
            for p in layers:
                given = f"{p.activation}-given" if p.activation else bench.short(p.dtype)
                kind = {"peer": "anybit-hopper", "format": p.fmt.spec, "activation": given}
                for note, overlap in (("plain", False), ("pdl", True)):
                    us = time_tile(p, m, None, overlap)
                    self.add(m, us, p.nbytes, note=note, **kind)
        return self.out


def int_mm_us(n: int, k: int, m: int) -> float:
    """cuBLAS in int8, which stops at int32 sums."""
    w, x = (torch.randint(-127, 128, (rows, k), device="cuda").to(torch.int8) for rows in (n, m))
    calls = [lambda w=w: torch._int_mm(x, w.T) for w in rotated(w, w.nbytes)]
    return median_us(calls, torch.device("cuda"))


def host_us() -> None:
    """What a launch costs the host."""
    p = RandomLayer("fp6", torch.bfloat16, 4096, 4096)
    x = p.tokens(16)
    for _ in range(200):
        p.run(*x)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(400):
        p.run(*x)
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(400):
        torch.empty(16, 4096, dtype=torch.bfloat16, device="cuda")
    alone = time.perf_counter() - start
    print(
        f"host: {seconds / 400 * 1e6:.1f} us a product, of which the output's allocation "
        f"{alone / 400 * 1e6:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "modes",
        nargs="+",
        choices=["check", "brief", "stress", "experts", "sweep", "compare", "table", "host"],
    )
    parser.add_argument("--most", type=int, default=6, help="tiles of a cell that `compare` times")
    parser.add_argument("--slice", type=int, default=24 << 20, help="bytes of a decoded slice")
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--m", type=bench.parse_counts, default=bench.parse_counts(MS))
    parser.add_argument("--out", type=Path, default=Path("hopper.out"))
    parser.add_argument("--commit", default=None)
    parser.add_argument("--all-dtypes", action="store_true")
    args = parser.parse_args()
    args.shapes = [bench.parse_shape(text) for text in args.shapes]
    for scheme in args.schemes:
        get_format(scheme.partition("@")[0])
    for mode in args.modes:
        start = time.perf_counter()
        if mode == "check":
            check(args.schemes)
        elif mode == "brief":
            brief(args.schemes)
        elif mode == "stress":
            stress(args.schemes)
        elif mode == "experts":
            for scheme in args.schemes:
                check_many_experts(scheme)
                check_experts(scheme)
        elif mode == "sweep":
            sweep(args)
        elif mode == "compare":
            compare(args)
        elif mode == "table":
            table(args)
        else:
            host_us()
        print(f"{mode}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
