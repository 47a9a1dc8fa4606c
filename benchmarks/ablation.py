"""LiquidGEMM's figure 13 on this GPU: the same tile with three pipelines.

    python benchmarks/ablation.py --out h200_ablation.csv          measure (needs an H100 or H200)
    python benchmarks/ablation.py --plot h200_ablation.csv FILE    draw it

turns: a warpgroup decodes half a K tile, multiplies it, and waits; meanwhile only the other one can
use the matrix unit. explicit: one warpgroup decodes K tiles into shared memory, another multiplies
them (the paper's ExCP). implicit: a warpgroup decodes under its own products and the other one's
(ImFP; what is shipped). The results of the three must agree bit for bit. The first two are compiled
for this benchmark alone (`explicit.py`, with CuTe DSL) and lie beside the others in ANYBIT_CACHE.
"""

import argparse
import csv
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

PIPELINES = ("turns", "explicit", "implicit")
SCHEMES = ("liquid@int8", "fp6")
SHAPE = (28672, 4096)
COUNTS = (8, 16, 32, 64, 128, 256, 512)  # tokens
STAGES = {8: 5, 16: 3}  # by bits of an operand: what the explicit pipeline's buffers leave


def kernels(scheme: str) -> list:
    """One for each tile; dtype bf16, or fp16 where activations are not quantized."""
    from anybit.kernels.cute.operands import decoder_for, operand_of
    from anybit.kernels.hopper.tiles import Kernel, Tile

    fmt, activation = parse(scheme)
    d = decoder_for(fmt, getattr(torch, operand_of(activation, torch.float16)))
    output = "bfloat16" if activation else "float16"
    counts = (8, 16, 32, 64, 128)
    return [Kernel(d, Tile(tokens, stages=STAGES[d.slot]), output) for tokens in counts]


def compiled(kernel: Any, pipeline: str) -> Path:
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


def parse(scheme: str) -> tuple:
    from anybit.core.scheme import parse_scheme

    return parse_scheme(scheme)


def measure(out: Path) -> None:
    from hopper_layers import Problem

    from anybit.kernels.hopper import scalar_linear, tiles
    from anybit.kernels.hopper.launch import GemmLauncher
    from anybit.measure.timing import median_us

    n, k = SHAPE
    device = torch.device("cuda", torch.cuda.current_device())
    rows = []
    for scheme in SCHEMES:
        every = kernels(scheme)
        p = Problem(scheme, getattr(torch, every[0].output), n, k, cold=True)
        for m in COUNTS:
            x, scale, sums = p.tokens(m)
            results = []
            kernel = next(e for e in every if e.tile.tokens == min(m, 128))
            for pipeline in PIPELINES:
                function = GemmLauncher(compiled(kernel, pipeline), device.index)
                y = torch.empty(m, n, dtype=p.dtype, device=device)
                grid = tiles.grid(kernel.tile, m, n)

                def run(w, function=function, y=y, x=x, rest=(scale, sums), grid=grid):
                    tensors = (*w.layout, *rest, None, y, None)
                    pointers = tuple(0 if t is None else t.data_ptr() for t in tensors)
                    function.launch(x, pointers, n, grid, overlap=False)

                run(p.prepared)
                results.append(y.clone())
                us = median_us([lambda w=w, run=run: run(w) for w in p.copies], device)
                rows.append({
                    "gpu": torch.cuda.get_device_name(device), "scheme": scheme, "N": n, "K": k,
                    "M": m, "pipeline": pipeline, "us": round(us, 2),
                })  # fmt: skip
                print(*rows[-1].values(), flush=True)
            want = scalar_linear.multiply(x, scale, sums, p.prepared, None, p.dtype)
            if not all(torch.equal(y, results[-1]) for y in results):
                raise SystemExit(f"{scheme}, {m} tokens: the pipelines' results differ")
            if (results[-1].float() - want.float()).norm() > 1e-3 * want.float().norm():
                raise SystemExit(f"{scheme}, {m} tokens: wrong")
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def plot(source: Path, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = list(csv.DictReader(source.open()))
    figure, axes = plt.subplots(1, len(SCHEMES), figsize=(10, 3.6), sharey=True)
    for axis, scheme in zip(axes, SCHEMES, strict=True):
        us = {(int(r["M"]), r["pipeline"]): float(r["us"]) for r in rows if r["scheme"] == scheme}
        for i, name in enumerate(PIPELINES):
            places = [at + (i - 1) * 0.27 for at in range(len(COUNTS))]
            axis.bar(places, [us[m, "turns"] / us[m, name] for m in COUNTS], 0.25, label=name)
        axis.set_xticks(range(len(COUNTS)), [str(m) for m in COUNTS])
        axis.set_xlabel("tokens")
        axis.set_title(f"{scheme}, {SHAPE[0]} x {SHAPE[1]}")
    axes[0].set_ylabel('speed, "turns" = 1')
    figure.legend(*axes[0].get_legend_handles_labels(), loc="upper center", ncols=3)
    figure.tight_layout(rect=(0, 0, 1, 0.92))
    figure.savefig(target, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("h200_ablation.csv"))
    parser.add_argument("--plot", type=Path, nargs=2, metavar=("CSV", "FILE"))
    args = parser.parse_args()
    if args.plot:
        plot(*args.plot)
    else:
        measure(args.out)


if __name__ == "__main__":
    main()
