"""Correctness and speed of the Hopper codebook kernels on this GPU.

    python benchmarks/codebook.py check [--schemes codebook:m=1,v=4,group=128]
    python benchmarks/codebook.py sweep --m 1,8 --shapes 28672x4096
    python benchmarks/codebook.py table --out h200_codebook.csv

`check` reads centroids back bit for bit, compares random products with exact ones, repeats them,
and drives outliers through. `sweep` times many kernels for a problem, `table` those that
`cells.choose` names, beside cuBLAS and the read floor, plain and with programmatic dependent
launch (pdl). Needs no CuTe DSL when ANYBIT_CACHE holds the kernels; `compile` fills it.
"""

import argparse
import math
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from anybit import bench
from anybit.format import Packed, get_format
from anybit.kernels.hopper import codebook_backend as backend
from anybit.kernels.hopper.build import build
from anybit.kernels.hopper.cells import Cells, CodebookKernel, cells_of
from anybit.kernels.hopper.codebook_build import kernel_file
from anybit.kernels.hopper.codebook_tiles import choose, family
from anybit.kernels.hopper.tiles import MAX_SHARED
from anybit.timing import ReadFloor, median_us

SHAPES = ["28672x4096", "4096x14336", "4096x4096", "57344x8192"]
TIMED = ["codebook:m=1,v=4,group=128", "codebook:m=2,group=128"]
CHECKED = [
    *TIMED,
    "codebook:m=1,v=8,group=128",
    "codebook:m=3,v=16,group=128",
    "codebook:m=4,v=8,group=128",
    "codebook:m=1,v=4",
]
DEVICE = torch.device("cuda")
LAUNCHES = 48  # in a graph: its own start is a few microseconds


class Problem:
    """A random layer and copies of it."""

    def __init__(self, scheme: str, n: int, k: int, cold: bool = False):
        self.fmt, self.n, self.k = get_format(scheme), n, k
        fmt = self.fmt
        codes = torch.randint(0, 256, (n, fmt.code_count(k)), device=DEVICE, dtype=torch.int16).to(
            torch.uint8
        )
        groups = k // fmt.group if fmt.group else 1
        grid = {
            "scale": (torch.rand(n, groups, device=DEVICE) * 0.05 + 0.01).half(),
            "codebook": torch.randn(fmt.books, 256, fmt.width, device=DEVICE).half(),
        }
        self.packed = Packed.from_codes(fmt, (n, k), codes, grid)
        self.prepared = backend.prepare(self.packed, None)
        self.nbytes = backend.read_floor(fmt, n, k)
        count = max(2, math.ceil(200e6 / self.nbytes)) if cold else 1
        self.copies = [self.prepared] + [
            [t.clone() for t in self.prepared] for _ in range(count - 1)
        ]

    def run(self, x, overlap=True, prepared=None, bias=None, plan=None) -> Tensor:
        return backend.multiply(x, prepared or self.prepared, bias, self.fmt, self.n, plan, overlap)

    def us(self, m: int, overlap: bool, plan=None, dtype=torch.float16) -> float:
        x = torch.randn(m, self.k, device=DEVICE).to(dtype)
        calls = [lambda w=w: self.run(x, overlap, w, plan=plan) for w in self.copies]
        return median_us(calls * -(-LAUNCHES // len(calls)), DEVICE)


# Correctness.


def check(schemes: list[str]) -> int:
    bad = total = 0
    for scheme in schemes:
        for dtype in (torch.float16, torch.bfloat16):
            wrong, done = check_scheme(scheme, dtype)
            bad, total = bad + wrong, total + done
            print(f"check {scheme} {dtype}: {wrong} of {done} wrong", flush=True)
    return bad


def check_scheme(scheme: str, dtype: torch.dtype) -> tuple[int, int]:
    bad = total = 0

    def tell(ok: bool, *what) -> None:
        nonlocal bad, total
        bad, total = bad + (not ok), total + 1
        if not ok:
            print("WRONG", scheme, dtype, *what, flush=True)

    for n, k in ((200, 512), (1032, 1536), (4096, 4096), (272, 14336), (528, 8192)):
        p = Problem(scheme, n, k)
        weight = p.packed.dequantize().double()
        bias = torch.randn(n, device=DEVICE).to(dtype)
        decoded = backend.dense(p.prepared, p.fmt, n, k, dtype).double()
        error = float((decoded - weight).norm() / weight.norm())
        tell(error < (4e-4 if dtype == torch.float16 else 4e-3), (n, k), f"dense {error:.2e}")
        for m in (1, 2, 3, 8, 9, 16):
            if choose(cells_of(p.fmt), m, n, k, backend.NAMES[dtype]) is None:
                continue
            x = torch.randn(m, k, device=DEVICE).to(dtype)
            x[:, :: k // 7] *= 1000  # as real activations have
            want = x.double() @ weight.T + bias.double()
            y = p.run(x, bias=bias)
            # The rounding of y; of centroids in bf16; of inner products in a Psumbook.
            error = float((y.double() - want).norm() / want.norm())
            tell(error < (1e-3 if dtype == torch.float16 else 6e-3), (m, n, k), f"{error:.2e}")
            again = [p.run(x, overlap=bool(i % 3), bias=bias) for i in range(100)]
            tell(all(torch.equal(y, other) for other in again), (m, n, k), "repeats")
            if n == 200:
                tell(one_hot(p, m, dtype), (m, n, k), "one-hot")
                tell(outliers(p, m, dtype), (m, n, k), "outliers")
    return bad, total


def one_hot(p: Problem, m: int, dtype: torch.dtype) -> bool:
    """Tokens with a single number read the weights back: rounded centroids, exactly summed."""
    book = p.prepared[2 + (dtype == torch.bfloat16)].float()
    values = p.fmt.values(p.packed.codes(), {"codebook": book})
    scale = p.packed.grid["scale"].float()
    scale = scale.repeat_interleave(p.k // scale.shape[1], 1)
    reach = p.packed.grid["codebook"].float().abs().max() / book.abs().max()
    reach = 2.0 ** float(reach.log2().round())
    want = values * scale * reach
    ok = True
    for start in range(0, p.k, m):
        count = min(m, p.k - start)
        x = torch.zeros(m, p.k, device=DEVICE, dtype=dtype)
        x[torch.arange(count), start + torch.arange(count)] = 1
        y = p.run(x)[:count].double()
        exact = want[:, start : start + count].T.double()
        # Psumbook rounds each codebook's product to the dtype, which one number leaves as it is.
        ok &= bool(((y - exact).abs() <= exact.abs() * torch.finfo(dtype).eps * 0.51 + 1e-7).all())
    return ok


def outliers(p: Problem, m: int, dtype: torch.dtype) -> bool:
    """Tokens near fp16's largest number, of which sums would overflow before their scale."""
    x = torch.full((m, p.k), 60000.0, device=DEVICE).to(dtype)
    x *= (torch.rand(m, p.k, device=DEVICE) < 0.5) * 2 - 1
    y = p.run(x * 0.5 if dtype == torch.bfloat16 else x)
    if dtype == torch.bfloat16:
        x = x * 0.5
    want = x.double() @ p.packed.dequantize().double().T
    fits = want.abs() < torch.finfo(dtype).max * 0.9
    error = (y.double() - want)[fits].norm() / want[fits].norm()
    return bool(y[fits].isfinite().all()) and float(error) < 6e-3


# Speed.


def variants(cells: Cells, m: int, k: int) -> list[tuple[CodebookKernel, int, int]]:
    """Kernels and cluster sizes that are worth timing; how many clusters is left to the backend."""
    tokens = 16 if m > 8 else 8
    shapes = [
        (tokens, 256, *rest) for rest in ((1, 16, 2), (2, 16, 2), (2, 8, 2), (4, 8, 2), (2, 8, 3))
    ]
    if m <= 2:
        shapes += [(m, 512, chunks, 16, stages) for chunks in (1, 2) for stages in (1, 2)]
    out = []
    for shape in shapes:
        kernel = CodebookKernel(cells, shape[0], "float16", *shape[1:])
        cluster = -(-k // kernel.reach)
        if kernel.blocks and cluster <= 16 and kernel.shared(cluster, 128) <= MAX_SHARED:
            out.append((kernel, cluster, 0))
    return out


def sweep(args: argparse.Namespace) -> None:
    for n, k in args.shapes:
        for scheme in args.schemes:
            p = Problem(scheme, n, k, cold=True)
            for m in args.m:
                times = {}
                for plan in variants(cells_of(p.fmt), m, k):
                    if kernel_file(plan[0]).exists():  # some need more registers than there are
                        times[plan] = [p.us(m, overlap, plan) for overlap in (False, True)]
                print(f"{scheme} {n}x{k} M={m}: plain, pdl", flush=True)
                for plan in sorted(times, key=lambda plan: times[plan][1]):
                    plain, pdl = times[plan]
                    print(f"   {plain:7.2f} {pdl:7.2f}  {plan[0].name}, cluster {plan[1]}")


def dense_us(n: int, k: int, m: int) -> float:
    weights = [
        torch.randn(n, k, device=DEVICE, dtype=torch.float16)
        for _ in range(max(2, 250_000_000 // (n * k * 2)))
    ]
    x = torch.randn(m, k, device=DEVICE).half()
    return median_us([lambda w=w: x @ w.T for w in weights], DEVICE)


def table(args: argparse.Namespace) -> None:
    floor = ReadFloor.measure(DEVICE)
    blank = bench.Row(
        torch.cuda.get_device_name(), time.strftime("%Y-%m-%d"), args.commit, "", "", "", 0, 0, 0
    )
    rows: list[bench.Row] = []
    for n, k in args.shapes:
        dense = {m: dense_us(n, k, m) for m in args.m}

        def add(m: int, us: float, nbytes: int, n=n, k=k, dense=dense, **fields) -> None:
            rows.append(replace(
                blank, M=m, N=n, K=k, us=round(us, 2), weight_gbps=round(nbytes / us / 1e3, 1),
                tflops=round(2 * m * n * k / us / 1e6, 1), activation="fp16",
                vs_cublas_fp16=round(dense[m] / us, 3), vs_floor=round(us / floor(nbytes), 3),
                **fields,
            ))  # fmt: skip
            print(bench.line(rows[-1]), flush=True)

        for m in args.m:
            add(m, dense[m], 2 * n * k, peer="cublas", format="fp16")
        for scheme in args.schemes:
            p = Problem(scheme, n, k, cold=True)
            for m in args.m:
                for note, overlap in (("plain", False), ("pdl", True)):
                    us = p.us(m, overlap)
                    add(m, us, p.nbytes, peer="anybit-hopper", format=p.fmt.spec, note=note)
        bench.write_csv(args.out, rows)


def compile_all(args: argparse.Namespace) -> None:
    """Every kernel that the other modes launch."""
    kernels = [k for scheme in CHECKED for k in family(cells_of(get_format(scheme)))]
    for scheme in args.schemes:
        for m, k in product((1, 2, 8, 16), (4096, 8192, 14336)):
            kernels += [plan[0] for plan in variants(cells_of(get_format(scheme)), m, k)]
    for error in build(kernels, verbose=True):
        print(error)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modes", nargs="+", choices=["check", "sweep", "table", "compile"])
    parser.add_argument("--schemes", nargs="*", default=None)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--m", type=bench.parse_counts, default=bench.parse_counts("1,2,4,8,16"))
    parser.add_argument("--out", type=Path, default=Path("codebook.csv"))
    parser.add_argument("--commit", default=None)
    args = parser.parse_args()
    args.shapes = [bench.parse_shape(text) for text in args.shapes]
    args.commit = args.commit or bench.current_commit()
    given = args.schemes
    for mode in args.modes:
        start = time.perf_counter()
        args.schemes = given or (CHECKED if mode == "check" else TIMED)
        if mode == "check":
            check(args.schemes)
        else:
            {"sweep": sweep, "table": table, "compile": compile_all}[mode](args)
        print(f"{mode}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
