"""Ablations on this GPU: LiquidGEMM's figure 13, dense and with experts, and FP6-LLM's decoding.

    python benchmarks/ablation.py --compile                        needs CuTe DSL, and no GPU
    python benchmarks/ablation.py --out h200_ablation.csv          measure (needs an H100 or H200)
    python benchmarks/ablation.py --plot h200_ablation.csv FILE    draw figure 13

The same tile, with one of three pipelines. turns: a warpgroup decodes half a K tile, multiplies it,
and waits; meanwhile only the other one can use the matrix unit. explicit: one warpgroup decodes K
tiles into shared memory, another multiplies them (the paper's ExCP). implicit: a warpgroup decodes
under its own products and the other one's (ImFP; what is shipped). And with one of the ways to
decode of `decoders.py`. All results of a comparison must agree bit for bit. What is not shipped is
compiled for this benchmark alone, and lies beside the others in ANYBIT_CACHE.
"""

import argparse
import csv
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import decoders
import torch
from csv_rows import write_rows

from anybit.core.scheme import parse_scheme
from anybit.kernels.backend import Prepared
from anybit.kernels.cute import operands
from anybit.kernels.cute.decode import Decoder
from anybit.kernels.hopper import tiles
from anybit.kernels.hopper.tile import Kernel, Tile

PIPELINES = ("turns", "explicit", "implicit")
SHAPE = (28672, 4096)
EXPERT, EXPERTS, TOP = (14336, 4096), 8, 2  # Mixtral's down projection, the other way round
COUNTS = (8, 16, 32, 64, 128, 256, 512)  # tokens
STAGES = {8: 5, 16: 3}  # by bits of an operand: what the explicit pipeline's buffers leave


@dataclass(frozen=True)
class Comparison:
    """What is multiplied in several ways, each a way to decode (of `decoders`) and a pipeline."""

    scheme: str
    shape: tuple[int, int]
    ways: tuple[tuple[str, str], ...]
    experts: int = 0

    def decoder(self, name: str) -> Decoder:
        fmt, activation = parse_scheme(self.scheme)
        operand = getattr(torch, operands.operand_of(activation, torch.float16))
        change: Callable[[Decoder], Decoder] = getattr(decoders, name)
        return change(operands.decoder_for(fmt, operand))

    @property
    def dtype(self) -> torch.dtype:
        """Of outputs."""
        return torch.bfloat16 if parse_scheme(self.scheme)[1] else torch.float16

    def kernel(self, decoder: str, m: int) -> Kernel:
        """For m tokens, or as many an expert."""
        d, count = self.decoder(decoder), max(1, m * TOP // EXPERTS) if self.experts else m
        tokens = next((t for t in (8, 16, 32, 64) if t >= count), 128)
        tile = Tile(tokens, stages=STAGES[d.slot])
        return Kernel(d, tile, operands.NAMES[self.dtype], grouped=self.experts > 0)


FIGURE13 = (("lanes", "turns"), *(("ours", name) for name in PIPELINES), ("lanes", "implicit"))
FP6 = tuple(("ours", name) for name in PIPELINES)
BARS = dict(zip(FIGURE13, ("baseline", "+LQQ", "+LQQ+ExCP", "+LQQ+ImFP"), strict=False))
COMPARISONS = (
    Comparison("liquid@int8", SHAPE, FIGURE13),
    Comparison("fp6", SHAPE, (*FP6, ("unshifted", "implicit"), ("four", "implicit"))),
    Comparison("liquid@int8", EXPERT, FIGURE13, EXPERTS),
)


def compiled(kernel: Kernel, pipeline: str) -> Path:
    """The file of a kernel with one of the pipelines, compiled if need be."""
    from anybit.files.directory import cache_folder
    from anybit.kernels.cute.jit import compile_kernel, file_hash, kernel_file

    if pipeline == "implicit":
        return compile_kernel(kernel)
    source = Path(__file__).with_name("explicit.py")
    folder = cache_folder() / "ablation" / f"{pipeline}_{file_hash(source)[:16]}"
    if (path := kernel_file(kernel, folder)).exists():
        return path
    import explicit

    from anybit.kernels.hopper import gemm

    program = {"turns": explicit.Turns, "explicit": explicit.Explicit}[pipeline]
    with patch.object(gemm, "Gemm", program):
        return compile_kernel(kernel, folder)


def compile_all() -> None:
    needed = {
        (p.kernel(decoder, m), pipeline) for p in COMPARISONS for decoder, pipeline in p.ways
        for m in COUNTS
    }  # fmt: skip
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        print(len(list(pool.map(compiled, *zip(*needed, strict=True)))), "kernels")


class Weights:
    """Random weights, laid out for each way to decode, as often as caches want them."""

    def __init__(self, case: Comparison):
        from hopper_layers import random_packed

        from anybit.measure.timing import rotated

        self.activation = parse_scheme(case.scheme)[1]
        packed = [random_packed(case.scheme, *case.shape) for _ in range(case.experts or 1)]
        self.copies: dict[str, list[Prepared]] = {}
        for name in {decoder for decoder, _ in case.ways}:
            own = case.decoder(name)
            with patch.object(operands, "decoder", lambda *_, own=own: own):
                one = operands.prepare_experts(packed, self.activation, case.dtype)
            self.copies[name] = rotated(one, sum(p.nbytes() for p in packed))


def measure(out: Path) -> None:
    """Rows are written comparison by comparison, those of a wrong product not at all."""
    device = torch.device("cuda", torch.cuda.current_device())
    rows = []
    for case in COMPARISONS:
        weights = Weights(case)
        for m in COUNTS:
            rows += times(case, weights, m, device)
        write_rows(out, rows)


def times(case: Comparison, weights: Weights, m: int, device: torch.device) -> list[dict[str, Any]]:
    """A row for each way; all products must be equal, and near to what layers compute."""
    from anybit.kernels.hopper import scalar_linear
    from anybit.kernels.hopper.launch import GemmLauncher
    from anybit.kernels.reference import quantize_tokens
    from anybit.measure.timing import median_us

    n, k = case.shape
    count, starts = m, None
    if case.experts:  # tokens lie sorted by expert
        met = torch.stack([torch.randperm(EXPERTS, device=device)[:TOP] for _ in range(m)])
        ends = torch.bincount(met.flatten(), minlength=EXPERTS).cumsum(0)
        count, starts = m * TOP, torch.nn.functional.pad(ends, (1, 0)).int()
    x = torch.randn(count, k, device=device).to(case.dtype)
    scale = sums = None
    if weights.activation:
        x, scale = quantize_tokens(x, weights.activation)
        scale, sums = scale.flatten(), x.sum(1, dtype=torch.int32)
    rows, results = [], []
    for decoder, pipeline in case.ways:
        kernel = case.kernel(decoder, m)
        function = GemmLauncher(compiled(kernel, pipeline), device.index)
        y = torch.empty(count, n, dtype=case.dtype, device=device)
        grid = tiles.grid(kernel.tile, count, n, case.experts)

        def run(w: Prepared, function=function, y=y, grid=grid) -> None:
            tensors = (*w.layout, scale, sums, None, y, starts)
            pointers = tuple(0 if t is None else t.data_ptr() for t in tensors)
            function.launch(x, pointers, n, grid, False, max(1, case.experts))

        copies = weights.copies[decoder]
        run(copies[0])
        results.append(y.clone())
        us = median_us([lambda w=w, run=run: run(w) for w in copies], device)
        rows.append({
            "gpu": torch.cuda.get_device_name(device), "scheme": case.scheme,
            "experts": case.experts, "N": n, "K": k, "M": m, "decoder": decoder,
            "pipeline": pipeline, "us": round(us, 2),
        })  # fmt: skip
        print(*rows[-1].values(), flush=True)
    given = x, scale, sums, weights.copies["ours"][0], None, case.dtype
    want = scalar_linear.multiply(*given, starts=starts).float()
    if not all(torch.equal(y, results[0]) for y in results):
        raise SystemExit(f"{case.scheme}, {m} tokens: results differ")
    if (results[0].float() - want).norm() > 1e-3 * want.norm():
        raise SystemExit(f"{case.scheme}, {m} tokens: wrong")
    return rows


def plot(source: Path, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = list(csv.DictReader(source.open()))
    shown = [p for p in COMPARISONS if p.ways == FIGURE13]
    figure, axes = plt.subplots(1, len(shown), figsize=(10, 3.6), sharey=True)
    for axis, p in zip(axes, shown, strict=True):
        us = {
            (int(r["M"]), r["decoder"], r["pipeline"]): float(r["us"]) for r in rows
            if (r["scheme"], int(r["experts"])) == (p.scheme, p.experts)
        }  # fmt: skip
        for i, (way, name) in enumerate(BARS.items()):
            places = [at + (i - 1.5) * 0.2 for at in range(len(COUNTS))]
            speed = [us[m, *FIGURE13[0]] / us[m, *way] for m in COUNTS]
            axis.bar(places, speed, 0.19, label=name)
        axis.set_xticks(range(len(COUNTS)), [str(m) for m in COUNTS])
        axis.set_xlabel("tokens")
        each = f"{p.experts} experts of " * bool(p.experts)
        axis.set_title(f"{p.scheme}, {each}{p.shape[0]} x {p.shape[1]}")
    axes[0].set_ylabel("speed, baseline = 1")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="upper center", ncols=4)
    figure.tight_layout(rect=(0, 0, 1, 0.92))
    figure.savefig(target, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("h200_ablation.csv"))
    parser.add_argument("--plot", type=Path, nargs=2, metavar=("CSV", "FILE"))
    parser.add_argument("--compile", action="store_true", help="the kernels, and measure nothing")
    args = parser.parse_args()
    if args.compile:
        compile_all()
    elif args.plot:
        plot(*args.plot)
    else:
        measure(args.out)


if __name__ == "__main__":
    main()
