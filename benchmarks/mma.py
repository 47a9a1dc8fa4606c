"""Correctness and speed of the `mma.sync` kernels, from PTX of several architectures, on an H200.

    python benchmarks/mma.py build                  # compile all that the others launch; no GPU
    python benchmarks/mma.py check --limit 90       # the self-test, long chains, ragged problems
    python benchmarks/mma.py time --limit 150 --out h200_mma.csv

Kernels for sm_80 and sm_89 are what an A100 and an RTX 4090 would choose; their PTX is assembled
for sm_90 by the ptxas that Triton brings. Kernels for sm_90 overlap launches. `time` compares them
with Hopper's kernels as launched, Triton's and cuBLAS, with cold weights, in CUDA graphs.
Kernels lie in $ANYBIT_CACHE, so that they can be built elsewhere and carried.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import hopper_layers
import torch
from torch import Tensor

from anybit.core.scheme import parse_scheme
from anybit.kernels.backend import LayerSpec
from anybit.kernels.cute import jit, operands
from anybit.kernels.cute.decode import decoder
from anybit.kernels.hopper import scalar_linear
from anybit.kernels.hopper import tile as hopper_tile
from anybit.kernels.hopper import tiles as hopper_tiles
from anybit.kernels.mma import linear, selftest, tiles
from anybit.kernels.mma.tiles import Gpu, Kernel
from anybit.kernels.reference import quantize_tokens
from anybit.measure import bench
from anybit.measure.timing import median_us, rotated

KB = 1024
A100 = Gpu((8, 0), 108, 163 * KB, 164 * KB)
RTX4090 = Gpu((8, 9), 128, 99 * KB, 100 * KB)
H200 = Gpu((9, 0), 132, 227 * KB, 228 * KB)
SCHEMES = ["liquid@int8", "int4:group=128", "fp6"]
CHECKED = [*SCHEMES, "int8@int8", "int3:group=64,zero", "int8", "sparse", "int4@fp8", "fp6@fp8"]
SHAPES = [(4096, 14336), (6144, 4096), (4096, 4096), (28672, 4096), (8192, 28672)]
DTYPE = torch.bfloat16
CHAINED = 4096  # rows and columns of the weight that chains multiply by
start = time.perf_counter()


# Kernels.


def decoder_of(scheme: str):
    fmt, activation = parse_scheme(scheme)
    return decoder(fmt, operands.operand_of(activation, DTYPE))


def checked_kernels(schemes: list[str]) -> Iterator[tuple[str, Kernel]]:
    """What `check` runs: families of an A100 and an RTX 4090, and an H200's for few tokens."""
    for scheme in schemes:
        d = decoder_of(scheme)
        gpus = [RTX4090] if scheme.endswith("fp8") else [A100]
        gpus += [RTX4090] * (scheme in SCHEMES)
        kernels = [k for gpu in gpus for k in tiles.family(d, gpu, CHAINED, "bfloat16")]
        if scheme in SCHEMES:
            kernels += [narrow(d, m, n) for m in (1, 16) for n in (CHAINED, 6144, 28672)]
        yield from ((scheme, kernel) for kernel in dict.fromkeys(kernels))


def narrow(d, m: int, n: int, architecture: str = "sm_90") -> Kernel:
    """The kernel for few tokens that an H200 gets; for sm_80 the same tile without overlap."""
    kernel = tiles.kernel_for(d, H200, m, n, "bfloat16")
    return replace(kernel, architecture=architecture, overlap=architecture == "sm_90")


def timed_kernels(schemes: list[str], counts: list[int]) -> list[Kernel]:
    found = [
        narrow(decoder_of(scheme), m, n, architecture)
        for scheme in schemes
        for m in counts
        for n, _ in SHAPES
        for architecture in ("sm_80", "sm_90")
    ]
    return list(dict.fromkeys(found))


def candidates(d, m: int) -> list[Kernel]:
    """Tiles that an H200 might get for few tokens, among them the rule's; all overlap."""
    shapes = [(2, 8, 1), (2, 8, 2), (1, 8, 2), (1, 8, 3), (2, 4, 2), (2, 4, 3), (1, 4, 4)]
    tokens = 8 if m <= 8 else 16
    wanted = [tiles.Tile(tokens, s, w, ctas=c, kind="narrow") for s, w, c in shapes]
    fit = [tiles.fitted(tile, d, H200, 3, 5) for tile in wanted]
    found = [narrow(d, m, n) for n, _ in SHAPES]
    found += [Kernel(d, tile, "bfloat16", "sm_90", overlap=True) for tile in fit if tile]
    return list(dict.fromkeys(found))


def hopper_kernels(schemes: list[str], counts: list[int]) -> list[hopper_tile.Kernel]:
    found = []
    for scheme in schemes:
        d = decoder_of(scheme)
        found += scalar_linear.copy_kernels(d, ["bfloat16"])
        for n, k in SHAPES:
            found += [
                hopper_tile.Kernel(d, hopper_tiles.choose(d, m, n, k), "bfloat16") for m in counts
            ]
    return list(dict.fromkeys(found))


def file_of(kernel) -> Path:
    """A kernel's file; of another architecture than sm_90's, one with a cubin for sm_90."""
    path = jit.kernel_file(kernel)
    if kernel.architecture.startswith("sm_90"):
        return path
    return path.with_name(path.name.partition("_dsl")[0].removesuffix(".kernel") + ".as_sm_90")


def compile_missing(kernel) -> str:
    """Compile a kernel's file unless it is there; returns a line about it."""
    path = file_of(kernel)
    if path.exists():
        return f"there  {path.name}"
    began = time.perf_counter()
    if kernel.architecture.startswith("sm_90"):
        jit.compile_kernel(kernel)
    else:
        compiled = kernel.generate()
        header, _, _ = jit.checked(kernel, compiled).partition(b"\n")
        content = header + b"\n" + assembled(compiled.ptx)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        Path(file.name).replace(path)
    return f"{time.perf_counter() - began:5.1f}s {path.name}"


def assembled(ptx: str) -> bytes:
    """A cubin for sm_90 of PTX for an older architecture, by CUDA's ptxas or else Triton's."""
    import triton

    ptxas = shutil.which("ptxas") or Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "a.ptx"), Path(folder, "a.cubin")
        source.write_text(ptx)
        command = [ptxas, "-arch=sm_90", source, "-o", out]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{ptxas}: {done.stderr}")
        return out.read_bytes()


def build(kernels: list, jobs: int) -> None:
    """Compile what is missing, in processes."""
    missing = [kernel for kernel in kernels if not file_of(kernel).exists()]
    if not missing:
        return
    print(f"compiling {len(missing)} of {len(kernels)} kernels", flush=True)
    with ProcessPoolExecutor(min(jobs, len(missing)), mp_context=get_context("spawn")) as pool:
        for kernel, future in [
            (kernel, pool.submit(compile_missing, kernel)) for kernel in missing
        ]:
            try:
                print(future.result(), flush=True)
            except Exception as error:
                print(f"FAILED {kernel.name}: {error}", flush=True)
    print(f"compiled ({elapsed():.0f} s)", flush=True)


def elapsed() -> float:
    return time.perf_counter() - start


# Correctness.


def check(schemes: list[str], limit: float) -> int:
    """Self-test of every kernel, then ragged problems with a bias; "N wrong" last."""
    bad = total = 0
    for scheme, kernel in checked_kernels(schemes):
        if elapsed() > limit:
            print(f"LIMIT of {limit} s: the kernels from {scheme} {kernel.name} on are unchecked")
            break
        fmt, activation = parse_scheme(scheme)
        layer = LayerSpec(fmt, activation, (0, 0), torch.device("cuda", 0), DTYPE)
        found = selftest.verdict(layer, kernel)
        if found == selftest.RIGHT:
            found = ragged(scheme, kernel) or found
        if found == selftest.RIGHT and kernel.overlap:
            found = chain(scheme, kernel) or found
        bad, total = bad + (found != selftest.RIGHT), total + 1
        print(f"{found:8} {scheme} {kernel.name}", flush=True)
    print(f"check: {bad} wrong of {total} ({elapsed():.0f} s)", flush=True)
    return bad


def ragged(scheme: str, kernel: Kernel) -> str | None:
    """Random numbers, a bias, tails of N, K and M, several grids; twice the same bits."""
    for n, k in ((208, 512), (1024, 1152)):
        p = hopper_layers.RandomLayer(scheme, DTYPE, n, k)
        bias = torch.randn(n, device="cuda").to(DTYPE)
        weight = hopper_layers.exact_weight(p)
        for m in (kernel.tile.tokens // 2 + 1, kernel.tile.tokens, 2 * kernel.tile.tokens + 3):
            x = p.tokens(m)
            want = hopper_layers.exact_product(p, weight, *x)
            if kernel.tile.kind == "decode":
                y = x[0] @ linear.decoded(x[0], kernel, p.prepared).T
                if not hopper_layers.right(p, y, want):
                    return f"wrong at {(m, n, k)}"
                continue
            count = tiles.tiles_of(kernel.tile, m, n)
            units = count * (k // 128)
            grids = {count, min(37, units), max(1, units // 5)} if count != units else {count}
            for grid in sorted(grids) if kernel.tile.kind == "gemm" else [count]:
                y, again, shifted = (
                    linear.multiply(*x, p.prepared, b, DTYPE, kernel, grid)
                    for b in (None, None, bias)
                )
                error = (shifted.float() - want.float() - bias.float()).norm() / want.norm()
                if not (
                    hopper_layers.right(p, y, want) and torch.equal(y, again) and error <= 1e-2
                ):
                    return f"wrong at {(m, n, k)}, {grid} CTAs"
    return None


def chain(scheme: str, kernel: Kernel, rounds: int = 40) -> str | None:
    """Products of products, in launches that overlap and in such that do not: the same bits."""
    p = hopper_layers.RandomLayer(scheme, DTYPE, CHAINED, CHAINED)
    first = torch.randn(kernel.tile.tokens, CHAINED, device="cuda").to(DTYPE)

    def last(overlapping: bool) -> Tensor:
        x = first
        for _ in range(6):
            given = operands.tokens(x, p.prepared)
            y = linear.multiply(*given, p.prepared, None, DTYPE, kernel)
            if not overlapping:
                torch.cuda.synchronize()
            x = y
        return x

    want = last(False)
    wrong = sum(not torch.equal(last(True), want) for _ in range(rounds))
    return f"{wrong} of {rounds} chains differ" if wrong else None


# Speed.


def times(schemes: list[str], counts: list[int], out: Path, limit: float, sweep: bool) -> None:
    """One CSV, and a table in the order of shapes: us of every contestant.

    sweep: every candidate as well; the table's last column is the fastest.
    """
    blank = bench.blank(torch.device("cuda"))
    rows: list[bench.Row] = []
    cells: dict[tuple, dict[str, float]] = {}

    def note(scheme: str, n: int, k: int, m: int, peer: str, call: Callable[[], float]) -> None:
        if elapsed() > limit:
            return
        try:
            us = call()
        except Exception as error:
            print(f"FAILED {peer} {scheme} {n}x{k} M={m}: {error!r}"[:300], flush=True)
            return
        cells.setdefault((f"{n}x{k}", scheme, m), {})[peer] = us
        fmt, _, given = scheme.partition("@")
        given = f"{given}-given" if given else "bf16"
        rows.append(replace(blank, peer=peer, format=fmt, activation=given, M=m, N=n, K=k, us=us))
        bench.write_csv(out, rows)

    late: list[tuple] = []  # Triton compiles while it is timed: last
    for n, k in SHAPES:
        for m in counts:
            note("bf16", n, k, m, "cublas", partial(hopper_layers.dense_us, n, k, m, DTYPE))
        for scheme in schemes:
            p = hopper_layers.RandomLayer(scheme, DTYPE, n, k, cold=True)
            for m in counts:
                x = p.tokens(m)
                note(scheme, n, k, m, "hopper", partial(hopper_us, p, x))
                for arch in ("sm_90", "sm_80"):
                    kernel = narrow(p.decoder, m, n, arch)
                    note(scheme, n, k, m, f"mma-{arch}", partial(mma_us, p, x, kernel))
                for kernel in candidates(p.decoder, m) if sweep else ():
                    peer = f"mma {kernel.tile.name}"
                    note(scheme, n, k, m, peer, partial(mma_us, p, x, kernel))
                late.append((scheme, n, k, m, p.packed))
            del p
        print(f"timed {n}x{k} ({elapsed():.0f} s)", flush=True)
    for scheme, n, k, m, packed in late:
        call = partial(triton_us, packed, scheme, m)
        note(scheme, n, k, m, "triton", call)
    peers = ("cublas", "triton", "hopper", "mma-sm_80", "mma-sm_90")
    print("| weight | scheme | M | " + " | ".join(peers) + " | hopper / mma-sm_90 | best |")
    print("|---|---|--:|" + "--:|" * (len(peers) + 1) + "---|")
    for (shape, scheme, m), found in cells.items():
        if scheme == "bf16":
            continue
        found = found | cells.get((shape, "bf16", m), {})
        texts = [f"{found[peer]:.2f}" if peer in found else "" for peer in peers]
        both = {"hopper", "mma-sm_90"} <= found.keys()
        gain = f"{found['hopper'] / found['mma-sm_90']:.2f}" if both else ""
        tried = {peer: us for peer, us in found.items() if peer.startswith("mma ")}
        best = min(tried, key=tried.__getitem__, default="")
        texts += [gain, f"{tried[best]:.2f} {best[4:]}" if best else ""]
        print(f"| {shape} | {scheme} | {m} | " + " | ".join(texts) + " |")
    print(f"time: {elapsed():.0f} s, {len(rows)} rows in {out}", flush=True)


def mma_us(p: hopper_layers.RandomLayer, x: tuple, kernel: Kernel) -> float:
    calls = [
        lambda w=w: linear.multiply(*x, w, None, DTYPE, kernel) for w in p.copies
    ]  # fmt: skip
    return median_us(calls, torch.device("cuda"))


def hopper_us(p: hopper_layers.RandomLayer, x: tuple) -> float:
    calls = [lambda w=w: scalar_linear.multiply(*x, w, None, DTYPE) for w in p.copies]
    return median_us(calls, torch.device("cuda"))


def triton_us(packed, scheme: str, m: int) -> float:
    from anybit.kernels.backend import Activations
    from anybit.kernels.triton import backend

    activation = parse_scheme(scheme)[1]
    prepared = backend.prepare(packed, activation, DTYPE)
    copies = rotated(prepared, sum(t.nbytes for t in prepared.layout))
    x = torch.randn(m, packed.shape[1], device="cuda").to(DTYPE)
    if activation:
        codes, scale = quantize_tokens(x, activation)
        sums = codes.sum(1, dtype=torch.int32)
        x = Activations(codes, scale.flatten(), sums, DTYPE)
    calls = [lambda w=w: backend.linear(x, w, None) for w in copies]
    return median_us(calls, torch.device("cuda"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=["build", "check", "time"])
    parser.add_argument("--schemes", nargs="*", help="instead of the usual ones")
    parser.add_argument("--m", type=bench.parse_counts, default=[1, 4, 16])
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=bench.parse_shape,
        default=list(SHAPES),
        help="NxK, as 8192x28672",
    )
    parser.add_argument("--out", type=Path, default=Path("mma.csv"))
    parser.add_argument("--limit", type=float, default=1e9, help="seconds; then it ends early")
    parser.add_argument("--sweep", action="store_true", help="time more tiles of the mma kernels")
    parser.add_argument("--jobs", type=int, default=16, help="processes that compile")
    args = parser.parse_args()
    SHAPES[:] = args.shapes
    scalar_linear.narrow = lambda *_: False  # Hopper's own kernels are a contestant
    linear.built = lambda kernel: jit.built(kernel) if kernel.overlap else file_of(kernel)
    checked, timed = args.schemes or CHECKED, args.schemes or SCHEMES
    kernels: list = []
    if args.mode in ("build", "check"):
        kernels += [kernel for _, kernel in checked_kernels(checked)]
    if args.mode in ("build", "time"):
        kernels += [*timed_kernels(timed, args.m), *hopper_kernels(timed, args.m)]
        if args.sweep:
            kernels += [k for s in timed for m in args.m for k in candidates(decoder_of(s), m)]
    build(list(dict.fromkeys(kernels)), args.jobs)
    if args.mode == "check":
        sys.exit(check(checked, args.limit) > 0)
    if args.mode == "time":
        times(timed, args.m, args.out, args.limit, args.sweep)


if __name__ == "__main__":
    main()
