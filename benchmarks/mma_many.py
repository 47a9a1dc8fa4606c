"""The `mma.sync` kernels for experts and for 17 to 128 tokens, from PTX of sm_80, on an H200.

    python benchmarks/mma_many.py build                      # compile all that is launched; no GPU
    python benchmarks/mma_many.py run --limit 55 --out h200_mma_many.csv

`run` checks every kernel for experts (self-test, and random problems against fp64), times them
beside Hopper's grouped kernels, and then times tiles for 64 tokens, each on as many CTAs as there
are tiles and on as many as find room. Weights are cold, launches are in CUDA graphs.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import hopper_layers
import mma
import torch
from torch import Tensor

from anybit.core.scheme import parse_scheme
from anybit.kernels.backend import LayerSpec, Prepared
from anybit.kernels.cute import jit
from anybit.kernels.hopper import expert_tiles, scalar_linear
from anybit.kernels.hopper import tile as hopper_tile
from anybit.kernels.hopper import tiles as hopper_tiles
from anybit.kernels.mma import linear, selftest, tiles
from anybit.kernels.mma.tiles import Gpu, Kernel, Tile
from anybit.measure import bench
from anybit.measure.timing import median_us, rotated

DTYPE = torch.bfloat16
SCHEMES = ["liquid@int8", "int4:group=128", "fp6"]
# Rows and columns of an expert, experts, experts of a token, tokens: Qwen3-30B-A3B, Mixtral-8x7B.
ROUTED = [(1536, 2048, 128, 8, (1, 8, 64)), (28672, 4096, 8, 2, (1, 16, 128))]
GPU = Gpu((8, 0), 132, 227 * mma.KB, 228 * mma.KB)  # an H200 that only knows what an A100 does
WIDE = [(2, 4, 2), (2, 8, 1), (4, 4, 1), (4, 4, 2)]  # slices, warps, CTAs of a multiprocessor
SHAPES = [(28672, 4096), (4096, 14336), (6144, 4096)]


# Kernels.


def experts_kernels(scheme: str, gpu: Gpu = GPU) -> list[Kernel]:
    return tiles.family_experts(mma.decoder_of(scheme), gpu, "bfloat16")


def wide_kernels(scheme: str, m: int) -> list[Kernel]:
    """The rule's and others."""
    d = mma.decoder_of(scheme)
    wanted = [Tile(m, slices, warps, ctas=ctas) for slices, warps, ctas in WIDE]
    fit = [found for t in wanted if (found := tiles.fitted(t, d, GPU, 2, 4))]
    rule = tiles.wide(d, GPU, m, "gemm")
    return [Kernel(d, t, "bfloat16", "sm_80") for t in dict.fromkeys([rule, *fit]) if t]


def hopper_experts(scheme: str) -> list[hopper_tile.Kernel]:
    d = mma.decoder_of(scheme)
    family = expert_tiles.family_grouped(d)
    return [hopper_tile.Kernel(d, tile, "bfloat16", grouped=True) for tile in family]


def kernels(schemes: list[str], m: int) -> Iterator:
    for scheme in schemes:
        yield from experts_kernels(scheme)
        yield from experts_kernels(scheme, mma.A100)
        yield from wide_kernels(scheme, m)
        yield from hopper_experts(scheme)


# Experts.


class Routed:
    """Weights of many experts, and the tokens of each."""

    def __init__(self, scheme: str, n: int, k: int, experts: int, cold: bool = True):
        self.n, self.k, self.experts = n, k, experts
        # Of whole blobs: the layout of all rows is that of one expert behind the other.
        assert n % 256 == 0
        self.all = hopper_layers.RandomLayer(scheme, DTYPE, experts * n, k)
        self.prepared = self.all.prepared._replace(shape=(n, k))
        self.copies = rotated(self.prepared, self.all.nbytes) if cold else [self.prepared]

    def tokens(self, m: int, top: int) -> tuple:
        """((codes, scale, sums), starts) of m tokens that chose at random."""
        choices = torch.rand(m, self.experts, device="cuda").topk(top).indices.flatten()
        counts = torch.bincount(choices, minlength=self.experts)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        return self.all.tokens(m * top), starts

    def product(self, x: tuple, starts: Tensor, kernel: Kernel | None, w: Prepared) -> Tensor:
        """kernel: None: Hopper's."""
        if kernel is None:
            return scalar_linear.multiply(*x, w, None, DTYPE, starts=starts)
        return linear.multiply(*x, w, None, DTYPE, kernel, starts=starts)

    def right(self, x: tuple, starts: Tensor, y: Tensor) -> bool:
        weight = hopper_layers.exact_weight(self.all)
        for e, (a, b) in enumerate(pairwise(starts.tolist())):
            rows = slice(e * self.n, (e + 1) * self.n)
            part = weight[rows]
            seen = x[0][a:b].double()
            want = seen @ part.T
            if x[1] is not None:
                want *= x[1][a:b, None].double()
            if b > a and not (y[a:b].double() - want).norm() <= 6e-3 * want.norm():
                return False
        return True


def check(schemes: list[str], limit: float) -> int:
    """How many kernels for experts are wrong."""
    bad = total = 0
    for scheme in schemes:
        fmt, activation = parse_scheme(scheme)
        layer = LayerSpec(fmt, activation, (0, 0), torch.device("cuda", 0), DTYPE)
        small = Routed(scheme, 512, 1152, 40, cold=False)
        both = [*experts_kernels(scheme), *experts_kernels(scheme, mma.A100)]
        for kernel in dict.fromkeys(both):
            if mma.elapsed() > limit:
                print(f"LIMIT: {scheme} {kernel.name} and what follows is unchecked")
                return bad
            found = selftest.verdict(layer, kernel)
            for m in (1, 9, 150):
                x, starts = small.tokens(m, 4)
                y, again = (small.product(x, starts, kernel, small.prepared) for _ in range(2))
                if not (small.right(x, starts, y) and torch.equal(y, again)):
                    found = f"wrong with {m} tokens of 40 experts"
            bad, total = bad + (found != selftest.RIGHT), total + 1
            print(f"{found:8} {scheme} {kernel.tile.name}", flush=True)
    print(f"check: {bad} wrong of {total} ({mma.elapsed():.0f} s)", flush=True)
    return bad


class Times:
    """Rows for a CSV, and a line for each cell."""

    def __init__(self, out: Path, limit: float):
        self.out, self.limit = out, limit
        self.blank = bench.blank(torch.device("cuda"))
        self.rows: list[bench.Row] = []

    def note(self, scheme: str, what: str, m: int, n: int, k: int, peers: dict) -> None:
        """peers: name -> what takes the microseconds."""
        if mma.elapsed() > self.limit:
            return
        fmt, _, activation = scheme.partition("@")
        given = f"{activation}-given" if activation else "bf16"
        row = replace(self.blank, format=fmt, activation=given, M=m, N=n, K=k, note=what)
        found = []
        for peer, take in peers.items():
            try:
                us = take()
            except Exception as error:
                print(f"FAILED {peer} {scheme} {n}x{k} M={m}: {error!r}"[:300], flush=True)
                continue
            found.append(f"{peer} {us:.1f}")
            self.rows.append(replace(row, peer=peer, us=us))
        print(f"{scheme:15} {n}x{k} {what} M={m}: {', '.join(found)}", flush=True)
        bench.write_csv(self.out, self.rows)


def us_of(call: Callable[[Prepared], Tensor], copies: list[Prepared]) -> float:
    return median_us([partial(call, w) for w in copies], torch.device("cuda"))


def time_experts(schemes: list[str], times: Times) -> None:
    for n, k, experts, top, counts in ROUTED:
        for scheme in schemes:
            routed = Routed(scheme, n, k, experts)
            d = mma.decoder_of(scheme)
            for m in counts:
                x, starts = routed.tokens(m, top)
                tile = tiles.choose_experts(d, GPU, m * top, experts)
                assert tile is not None
                peers: dict[str, Kernel | None] = {"hopper": None}
                peers["mma"] = Kernel(d, tile, "bfloat16", "sm_80")
                for kernel in experts_kernels(scheme):
                    if kernel.tile.tokens in (tile.tokens // 2, tile.tokens * 2):
                        peers[f"mma {kernel.tile.tokens} tokens"] = kernel
                calls = {
                    name: partial(us_of, partial(routed.product, x, starts, kernel), routed.copies)
                    for name, kernel in peers.items()
                }
                times.note(scheme, f"{top} of {experts} experts", m, n, k, calls)
            del routed


def shared_by(x: tuple, kernel: Kernel, grid: int, w: Prepared) -> Tensor:
    return linear.multiply(*x, w, None, DTYPE, kernel, grid)


def time_wide(schemes: list[str], m: int, times: Times) -> None:
    for n, k in SHAPES:
        for scheme in schemes:
            p = hopper_layers.RandomLayer(scheme, DTYPE, n, k, cold=True)
            x = p.tokens(m)
            calls = {"hopper": partial(mma.hopper_us, p, x)}
            for kernel in wide_kernels(scheme, m):
                places = kernel.tile.ctas * GPU.multiprocessors
                rule = tiles.grid(kernel.tile, GPU, m, n, k)
                for grid in dict.fromkeys([rule, tiles.tiles_of(kernel.tile, m, n), places]):
                    call = partial(shared_by, x, kernel, grid)
                    name = f"{kernel.tile.name.removeprefix('gemm_')}@{grid}"
                    calls[name] = partial(us_of, call, p.copies)
            times.note(scheme, "", m, n, k, calls)
            del p


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=["build", "run"])
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--m", type=int, default=64, help="tokens of the tiles that are compared")
    parser.add_argument("--out", type=Path, default=Path("mma_many.csv"))
    parser.add_argument("--limit", type=float, default=1e9, help="seconds; then it ends early")
    parser.add_argument("--jobs", type=int, default=16, help="processes that compile")
    args = parser.parse_args()
    scalar_linear.NARROW = False  # Hopper's own kernels are a contestant
    linear.built = mma.file_of
    hoppers = [
        hopper_tile.Kernel(d, hopper_tiles.choose(d, args.m, n, k), "bfloat16")
        for d in map(mma.decoder_of, args.schemes)
        for n, k in SHAPES
    ]
    wanted: list[jit.KernelSpec] = [*kernels(args.schemes, args.m), *hoppers]
    mma.build(list(dict.fromkeys(wanted)), args.jobs)
    if args.mode == "run":
        wrong = check(args.schemes, args.limit / 3)
        times = Times(args.out, args.limit)
        time_experts(args.schemes, times)
        time_wide(args.schemes, args.m, times)
        raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
