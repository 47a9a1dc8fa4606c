"""Correctness and speed of the Hopper codebook kernels on this GPU.

    python benchmarks/codebook.py check [--schemes codebook:m=1,v=4,group=128]
    python benchmarks/codebook.py table sweep --out h200_codebook.csv

`check` reads centroids back bit for bit, compares random products with exact ones, repeats them,
and drives outliers through. `table` times the kernels that `codebook_tiles.choose` names, plain and
with programmatic dependent launch (pdl), beside cuBLAS, anybit's integers and fp6, AQLM's kernels
where the package is installed, and CodeGEMM's where CODEGEMM names a checkout. `sweep` times many
kernels for a problem; its rows are added to the table's. `tiles` times kernels and tiles for more
than 8 tokens in turns with cuBLAS (h200_codebook_tiles.csv). Needs no CuTe DSL when ANYBIT_CACHE
holds the kernels; `compile` fills it.
"""

import argparse
import time
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path

import peers
import torch
from torch import Tensor

from anybit.core.format import get_format
from anybit.core.packed import Packed
from anybit.kernels import registry
from anybit.kernels.backend import LayerSpec, Prepared
from anybit.kernels.cute.build import build
from anybit.kernels.cute.cells import ROWS, Cells, cells_of, dense, multiply_decoded
from anybit.kernels.cute.jit import kernel_file
from anybit.kernels.hopper import codebook_linear, lookup
from anybit.kernels.hopper.build import kernels_of
from anybit.kernels.hopper.codebook_tiles import CodebookKernel, Plan, choose
from anybit.kernels.hopper.tile import Kernel, Tile
from anybit.kernels.hopper.tiles import MAX_SHARED, fits_once, fitted
from anybit.measure import bench, timing
from anybit.measure.timing import median_us, medians_in_turns, rotated

# Llama-3's 8B and 70B, gate and up as one layer and as two; k and v are the smallest.
SHAPES = [
    "28672x4096", "4096x14336", "4096x4096", "57344x8192",
    "1024x4096", "14336x4096", "1024x8192", "8192x8192", "28672x8192", "8192x28672",
]  # fmt: skip
SQUARE = ["4096x4096", "8192x8192"]  # of the paper's tables of tiles and bits
SWEPT = [*SQUARE, "28672x4096", "57344x8192"]
TIMED = ["codebook:m=1,v=4,group=128", "codebook:m=2,group=128"]
OTHERS = ["int2:group=128", "int4:group=128", "fp6"]
BITS = [  # 0.5 to 4 bits a weight, and a scale a row
    "codebook:m=1,v=16,group=128", "codebook:m=1,v=8,group=128", "codebook:m=3,v=16,group=128",
    "codebook:m=3,v=8,group=128", "codebook:m=2,v=4,group=128", "codebook:m=4,v=8,group=128",
    "codebook", "codebook:m=1,v=4",
]  # fmt: skip
GROUPS = [  # the paper's figure 4: from a scale for every vector to one a row, and its table 1
    *(f"codebook:m=1,v=4,group={g}" for g in (4, 8, 16, 32, 64, 128)),
    *(f"codebook:m=2,v=8,group={g}" for g in (8, 16, 32, 64, 128)),
    "codebook:m=1,v=4", "codebook", "codebook:m=3,v=16,group=32", "codebook:m=1,v=8,group=32",
]  # fmt: skip
# The paper's uniform and binary weights as codebooks, section 5: vectors of all their values.
DIGITS = {
    "binary": ("codebook:m=1,v=8,group=128", (-1, 1)),
    "uniform 1 bit": ("codebook:m=1,v=8,group=128", (0, 1)),
    "uniform 2 bits": ("codebook:m=1,v=4,group=128", (-1, 0, 1, 2)),
}
CHECKED = [
    *TIMED,
    "codebook:m=1,v=8,group=32",
    "codebook:m=1,v=4,group=4",
    "codebook:m=3,v=16,group=32",
    "codebook:m=1,v=4,b=6,group=128",
    "codebook:m=1,v=8,group=128",
    "codebook:m=3,v=16,group=128",
    "codebook:m=4,v=8,group=128",
    "codebook:m=1,v=4",
]
DEVICE = torch.device("cuda")
MORE_TILES = [
    *(Tile(tokens, split=split) for tokens in (32, 64) for split in (3, 4)), Tile(128, split=3),
    Tile(32, shared=True),
    Tile(256), Tile(256, shared=True), Tile(256, columns=64, late=True),
    *(lookup.WideTile(192, shared=True, columns=columns) for columns in (64, 128)),
]  # fmt: skip
LAUNCHES = 48  # in a graph: its own start is a few microseconds


class RandomCodebook:
    """A random layer, and with `cold` copies of it. values: centroids are all their vectors."""

    def __init__(
        self, scheme: str, n: int, k: int, cold: bool = False, values: tuple[int, ...] = ()
    ):
        self.fmt, self.n, self.k = get_format(scheme), n, k
        fmt = self.fmt
        count, shape = 2**fmt.bits, (n, fmt.code_count(k))
        codes = torch.randint(0, count, shape, device=DEVICE, dtype=torch.int16).to(torch.uint8)
        groups = k // fmt.group if fmt.group else 1
        book = torch.randn(fmt.books, count, fmt.width, device=DEVICE)
        if values:
            digits = torch.tensor(values, device=DEVICE)
            book = torch.cartesian_prod(*[digits] * fmt.width)[None]
        grid = {
            "scale": (torch.rand(n, groups, device=DEVICE) * 0.05 + 0.01).half(),
            "codebook": book.half(),
        }
        self.packed = Packed.from_codes(fmt, (n, k), codes, grid)
        self.prepared = codebook_linear.prepare(self.packed, None)
        cells = cells_of(fmt)
        assert isinstance(cells, Cells)
        self.nbytes = -(-n // ROWS) * (k // cells.columns) * cells.block_bytes
        self.copies = rotated(self.prepared, self.nbytes) if cold else [self.prepared]

    def run(self, x, overlap=True, prepared=None, bias=None, plan=None) -> Tensor:
        args = (x, prepared or self.prepared, bias)
        product = self.fmt, len(x), self.n, self.k, x.dtype, x.device
        tile = codebook_linear.lookup_tile(*product) if plan is None else plan
        if isinstance(tile, Tile):
            return codebook_linear.multiply_many(*args, tile, overlap)
        if len(x) <= codebook_linear.MOST_TOKENS:
            return codebook_linear.multiply(*args, plan, overlap)
        return codebook_linear.linear(*args)

    def us(self, m: int, overlap: bool, plan=None) -> float:
        return median_us(self.calls(m, overlap, plan), DEVICE)

    def calls(self, m: int, overlap: bool, plan=None) -> list:
        x = torch.randn(m, self.k, device=DEVICE).half()
        calls = [lambda w=w: self.run(x, overlap, w, plan=plan) for w in self.copies]
        return calls * (-(-LAUNCHES // len(calls)) if m < 512 else 1)


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
    d = lookup.lookup(get_format(scheme), dtype)

    def tell(ok: bool, *what) -> None:
        nonlocal bad, total
        bad, total = bad + (not ok), total + 1
        if not ok:
            print("WRONG", scheme, dtype, *what, flush=True)

    # The last has clusters that share K.
    for n, k in ((200, 512), (1032, 1536), (4096, 4096), (272, 14336), (528, 8192), (1032, 28672)):
        p = RandomCodebook(scheme, n, k)
        weight = p.packed.dequantize().double()
        bias = torch.randn(n, device=DEVICE).to(dtype)
        decoded = dense(p.prepared, dtype).double()
        error = float((decoded - weight).norm() / weight.norm())
        tell(error < (4e-4 if dtype == torch.float16 else 4e-3), (n, k), f"dense {error:.2e}")
        for m in (1, 2, 3, 8, 9, 16, 17, 40, 100, 300, 2100):
            few = m <= codebook_linear.MOST_TOKENS
            if few and choose(cells_of(p.fmt), m, n, k, codebook_linear.NAMES[dtype]) is None:
                continue
            x = torch.randn(m, k, device=DEVICE).to(dtype)
            x[:, :: k // 7] *= 1000  # as real activations have
            want = x.double() @ weight.T + bias.double()
            y = p.run(x, bias=bias)
            # The rounding of y; of centroids in bf16; of inner products in a Psumbook, or of
            # weights times their scales for many tokens.
            error = float((y.double() - want).norm() / want.norm())
            tell(error < (1e-3 if dtype == torch.float16 else 6e-3), (m, n, k), f"{error:.2e}")
            again = [p.run(x, overlap=bool(i % 3), bias=bias) for i in range(100)]
            tell(all(torch.equal(y, other) for other in again), (m, n, k), "repeats")
            others = []
            if m == 300 and n in (1032, 4096):
                others = [t for t in lookup.candidates(d) if fits_once(t, d, m, n, k)]
            if m in (8, 9, 16) and dtype == torch.float16:
                others = [plan for plan in variants(cells_of(p.fmt), m, k) if there(plan.kernel)]
            for other in others:
                every = [p.run(x, bool(i % 3), None, bias, other) for i in range(20)]
                error = float((every[0].double() - want).norm() / want.norm())
                name = other.name if isinstance(other, Tile) else other.kernel.name
                tell(error < (1e-3 if dtype == torch.float16 else 6e-3), (m, n, k), name, error)
                tell(all(torch.equal(every[0], y) for y in every), (m, n, k), name, "repeats")
            if n == 200:
                tell(one_hot(p, m, dtype), (m, n, k), "one-hot")
                tell(outliers(p, m, dtype), (m, n, k), "outliers")
    return bad, total


def one_hot(p: RandomCodebook, m: int, dtype: torch.dtype) -> bool:
    """Tokens with a single number read the weights back: rounded centroids, exactly summed."""
    book = p.prepared.layout[2 + (dtype == torch.bfloat16)].float()
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
        # For many tokens, or fine groups, scales (in bf16), sums and weights are rounded too.
        eps = torch.finfo(dtype).eps
        bound = exact.abs() * eps * 0.51 + 1e-7
        if m > codebook_linear.MOST_TOKENS or cells_of(p.fmt).groups > 4:
            bound = exact.abs() * eps * 2.2 + exact.abs().max() * eps * (p.fmt.books > 1) + 1e-6
        ok &= bool(((y - exact).abs() <= bound).all())
    return ok


def outliers(p: RandomCodebook, m: int, dtype: torch.dtype) -> bool:
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


def variants(cells: Cells, m: int, k: int) -> list[Plan]:
    """Kernels and cluster sizes that are worth timing; how many clusters is left to the backend."""
    few = [(256, 1, 16, 2), (256, 2, 16, 2), (256, 2, 8, 2), (256, 4, 8, 2)]
    shapes = {1: [(512, chunks, 16, stages) for chunks in (1, 2) for stages in (1, 2)]}
    shapes |= {2: shapes[1][:2], 8: few, 16: few}
    out = []
    for tokens in (t for t in shapes if m <= t <= max(2, 4 * m)):
        for shape in shapes[tokens]:
            kernel = CodebookKernel(cells, tokens, "float16", *shape)
            cluster = -(-k // kernel.reach)
            if kernel.blocks and cluster <= 16 and kernel.shared(cluster, 128) <= MAX_SHARED:
                out.append(Plan(kernel, cluster))
    return out


def there(kernel: CodebookKernel | Kernel) -> bool:
    """Whether a kernel was built: some need more registers than there are."""
    return kernel_file(kernel).exists()


def sweep(args: argparse.Namespace, blank: bench.Row, rows: list[bench.Row]) -> None:
    """Every kernel worth timing for a few shapes; a row's note names it."""
    for (n, k), scheme in product(map(bench.parse_shape, SWEPT), args.schemes):
        p = RandomCodebook(scheme, n, k, cold=True)
        for m in (1, 8):
            label = replace(blank, peer="anybit-hopper", format=p.fmt.spec, activation="fp16")
            label = replace(label, M=m, N=n, K=k)
            for plan in variants(cells_of(p.fmt), m, k):
                if not there(plan.kernel):
                    continue
                for note, overlap in (("plain", False), ("pdl", True)):
                    us = round(p.us(m, overlap, plan), 2)
                    what = f"{note} sweep: {plan.kernel.name}, cluster {plan.cluster}"
                    rows.append(replace(label, us=us, note=what))
                    print(f"{scheme} {n}x{k} M={m} {us:7.2f} us  {what}", flush=True)
    bench.write_csv(args.out, rows)


def tiles_of(scheme: str) -> dict[Tile, Kernel]:
    """Tiles of look-ups for more than 16 tokens: those that are chosen from, and more."""
    d = lookup.lookup(get_format(scheme), torch.float16)
    fitting = [*lookup.candidates(d), *(fitted(tile, d) for tile in MORE_TILES)]
    return {tile: Kernel(d, tile, d.operand) for tile in fitting if tile.stages >= 2}


def dense_calls(n: int, k: int, m: int) -> list:
    w, x = (torch.randn(rows, k, device=DEVICE).half() for rows in (n, m))
    return [lambda w=w: x @ w.T for w in rotated(w, w.nbytes)]


def tiles(args: argparse.Namespace, blank: bench.Row, rows: list[bench.Row]) -> None:
    """Times of every kernel and tile that is worth it, in turns with cuBLAS's."""
    for (n, k), scheme in product(args.shapes, args.schemes):
        p = RandomCodebook(scheme, n, k, cold=True)
        for m in args.m:
            few = m <= codebook_linear.MOST_TOKENS
            plan = choose(cells_of(p.fmt), m, n, k, "float16") if few else None
            plans = [plan, *variants(cells_of(p.fmt), m, k)] if plan else []
            runs = {"cublas": dense_calls(n, k, m)}
            for some in dict.fromkeys(plans):
                if there(some.kernel):
                    runs[f"{some.kernel.name} c{some.cluster}"] = p.calls(m, True, some)
            chosen = codebook_linear.lookup_tile(
                p.fmt, m, n, k, torch.float16, torch.device("cuda", 0)
            )
            if not few and chosen is None:
                runs["decoded"] = p.calls(m, True)
            for tile, kernel in tiles_of(scheme).items() if m > lookup.FEW else []:
                least = 128 if m > 256 else 64
                small, large = tile.tokens < min(m, least), tile.tokens >= 2 * max(m, 32)
                fits = fits_once(tile, kernel.decoder, m, n, k)
                if there(kernel) and fits and not small | large:
                    runs[tile.name] = p.calls(m, True, tile)
            found = zip(runs, medians_in_turns(list(runs.values()), DEVICE), strict=True)
            times = {name: us for name, us in found if isinstance(us, float)}
            label = replace(blank, format=p.fmt.spec, activation="fp16", M=m, N=n, K=k)
            for name, us in times.items():
                peer = "cublas" if name == "cublas" else "anybit-hopper"
                rows.append(replace(label, peer=peer, us=round(us, 1), note=name))
            text = " ".join(f"{name}={times[name]:.1f}" for name in sorted(times, key=times.get))
            name = chosen.name if chosen else plan.kernel.name if plan else "dense"
            print(f"{scheme} {n}x{k} M={m} chosen {name} | {text}", flush=True)
    bench.write_csv(args.out, rows)


@lru_cache(maxsize=4)  # a layer is timed in several ways
def layer_of(scheme: str, n: int, k: int, values: tuple[int, ...] = ()) -> RandomCodebook:
    return RandomCodebook(scheme, n, k, values=values)


def case(
    scheme: str, dtype: torch.dtype, overlap: bool, name: str = "", values: tuple[int, ...] = ()
) -> bench.Case:
    """A codebook of random codes on the Hopper kernels."""

    def prepare(w: Tensor) -> bench.Layer:
        p = layer_of(scheme, w.shape[0], w.shape[1], values)

        def run(prepared: Prepared, x: Tensor) -> Tensor:
            return p.run(x, overlap, prepared)

        return bench.Layer(p.prepared, run, p.nbytes, p.packed.dequantize(), random=True)

    spec, half = f"{get_format(scheme).spec} {name}".strip(), bench.short(dtype)
    note = "pdl" if overlap else "plain"
    return bench.Case("anybit-hopper", spec, half, dtype, prepare, note)


def decoded_case(scheme: str) -> bench.Case:
    """The weight decoded in every product, for cuBLAS (the paper's table 9)."""

    def prepare(w: Tensor) -> bench.Layer:
        p = layer_of(scheme, w.shape[0], w.shape[1])

        def run(prepared: Prepared, x: Tensor) -> Tensor:
            return multiply_decoded(x, prepared, None)

        return bench.Layer(p.prepared, run, p.nbytes, p.packed.dequantize(), random=True)

    return bench.Case(
        "anybit-hopper",
        get_format(scheme).spec,
        "fp16",
        torch.float16,
        prepare,
        "decoded for cuBLAS",
    )


def rivals() -> list[bench.Case]:
    """AQLM's kernels and CodeGEMM's, where they are."""
    found = []
    for adapter in (peers.aqlm, peers.codegemm):
        try:
            found += adapter()
        except Exception as error:  # what is compiled at import fails in any way
            print(f"{adapter.__name__} is left out: {type(error).__name__}: {error}", flush=True)
    return found


def table(args: argparse.Namespace, blank: bench.Row, rows: list[bench.Row]) -> None:
    timing.LAUNCHES = LAUNCHES
    floor = timing.ReadFloor.measure(DEVICE)
    fp16 = torch.float16
    cases = [bench.dense_case(torch.bfloat16, DEVICE)]
    for scheme in OTHERS:
        backend = registry.choose(LayerSpec(get_format(scheme), None, (4096, 4096), DEVICE, fp16))
        cases.append(bench.anybit_case(scheme, fp16, backend))
    dtypes, overlaps = (fp16, torch.bfloat16), (False, True)
    cases += [case(*some) for some in product(args.schemes, dtypes, overlaps)]
    cases += [case(scheme, fp16, True, name, v) for name, (scheme, v) in DIGITS.items()]
    cases += [decoded_case(scheme) for scheme in args.schemes]
    cases += rivals()
    runs = [(cases, [shape], args.m) for shape in args.shapes]
    bits = [case(scheme, fp16, True) for scheme in dict.fromkeys([*BITS, *GROUPS])]
    runs += [(bits, [shape], [1]) for shape in map(bench.parse_shape, SQUARE) if args.bits]
    seen = set()
    for some, shapes, ms in runs:
        for row in bench.measure(some, shapes, ms, DEVICE, blank.commit, floor):
            key = replace(
                row, us=None, weight_gbps=None, tflops=None, vs_cublas_fp16=None, vs_floor=None
            )
            if key not in seen:
                rows.append(row)
                print(bench.line(row), flush=True)
            seen.add(key)
        bench.write_csv(args.out, rows)


def compile_all(args: argparse.Namespace) -> None:
    """Every kernel that the other modes launch."""
    kernels = [k for scheme in args.checked for k in kernels_of(scheme)]
    for scheme in args.schemes:
        for m, shape in product((1, 2, 8, 16), SWEPT):
            k = bench.parse_shape(shape)[1]
            kernels += [plan.kernel for plan in variants(cells_of(get_format(scheme)), m, k)]
    for scheme, (n, k) in product(BITS + GROUPS, map(bench.parse_shape, SQUARE)):
        plan = choose(cells_of(get_format(scheme)), 1, n, k, "float16")
        kernels += [plan.kernel] if plan else []
    kernels += [kernel for scheme in args.schemes for kernel in tiles_of(scheme).values()]
    for error in build(kernels):
        print(error)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modes", nargs="+", choices=["check", "sweep", "table", "tiles", "compile"])
    parser.add_argument("--schemes", nargs="*", default=None)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--m", type=bench.parse_counts, default=bench.parse_counts("1,2,4,8,16"))
    parser.add_argument("--out", type=Path, default=Path("codebook.csv"))
    parser.add_argument("--commit", default=None)
    parser.add_argument("--no-bits", dest="bits", action="store_false", help="fewer formats")
    args = parser.parse_args()
    args.shapes = [bench.parse_shape(text) for text in args.shapes]
    given = args.schemes
    rows: list[bench.Row] = []
    for mode in args.modes:
        start = time.perf_counter()
        args.schemes = given or (CHECKED if mode == "check" else TIMED)
        args.checked = given or CHECKED
        if mode == "check":
            check(args.schemes)
        elif mode == "compile":
            compile_all(args)
        else:
            run = {"sweep": sweep, "table": table, "tiles": tiles}[mode]
            run(args, bench.blank(DEVICE, args.commit), rows)
        print(f"{mode}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
