"""CodeGEMM's other tables on this GPU: what building and reading cost, and products per watt.

    python benchmarks/paper_codebook.py compile
    python benchmarks/paper_codebook.py share --out results/h200_codebook_share.csv
    python benchmarks/paper_codebook.py power --out results/h200_codebook_power.csv

`share` (the paper's table 6) times a Psumbook kernel beside versions of it that leave out the
building of the table, its reading, or both. They are wrong on purpose, are compiled for this
benchmark alone (`compile`, with CuTe DSL) and lie beside the others in ANYBIT_CACHE. `power` (table
3) runs a product for seconds, piece by piece, and reads the board's energy counter.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import codebook
import torch
from csv_rows import write_rows

from anybit.core.format import get_format
from anybit.files.directory import cache_folder
from anybit.kernels import registry
from anybit.kernels.backend import LayerSpec
from anybit.kernels.cute.cells import cells_of
from anybit.kernels.cute.jit import compile_kernel, kernel_file
from anybit.kernels.hopper import codebook_linear
from anybit.kernels.hopper.codebook_tiles import CodebookKernel, Plan
from anybit.kernels.hopper.launch import CodebookLauncher
from anybit.measure import bench
from anybit.measure.timing import rotated

PARTS = ("whole", "unread", "unbuilt", "neither")
SHARED = ("28672x4096", "8192x8192", "4096x4096")
ONE = (2048, 512)  # for one CTA alone: as many rows as the paper's tiles have
POWERED = (28672, 8192)  # the paper's layer, one token
SECONDS, PIECES = 0.6, 5  # of a measurement, and how many there are


# Building and reading.


def kernels(scheme: str) -> list[CodebookKernel]:
    """For one and two tokens, with tables of 512 columns, and of 1024 where they fit."""
    cells = cells_of(get_format(scheme))
    shapes = ((1, 512, 1, 16, 1), (1, 512, 2, 16, 2), (2, 512, 1, 16, 1))
    return [CodebookKernel(cells, m, "float16", *shape) for m, *shape in shapes]


def folder(part: str) -> Path | None:
    return None if part == "whole" else cache_folder() / "ablation" / part


def compile_parts() -> None:
    from anybit.kernels.hopper import psumbook

    class Unread(psumbook.Psumbook):
        def sum_up(self, *_: Any) -> None:
            """No look-ups, no sums."""

    class Unbuilt(psumbook.Psumbook):
        def build(self, *_: Any) -> None:
            """The table keeps what the memory held."""

    class Neither(Unread, Unbuilt):
        pass

    programs = zip(PARTS, (psumbook.Psumbook, Unread, Unbuilt, Neither), strict=True)
    for part, program in programs:
        with patch.object(psumbook, "Psumbook", program):
            for kernel in (k for scheme in codebook.TIMED for k in kernels(scheme)):
                if not kernel_file(kernel, folder(part)).exists():
                    print(part, compile_kernel(kernel, folder(part)).name, flush=True)


def share(about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    shapes = [(*bench.parse_shape(text), 0) for text in SHARED] + [(*ONE, 1)]
    for scheme in codebook.TIMED:
        for n, k, teams in shapes:
            p = codebook.RandomCodebook(scheme, n, k, cold=not teams)
            for kernel in kernels(scheme):
                cluster = -(-k // kernel.reach)
                if teams and kernel.chunks > 1:
                    continue
                times = {}
                for part in PARTS:
                    file = kernel_file(kernel, folder(part))
                    with patch.object(
                        codebook_linear,
                        "loaded",
                        lambda k, device, file=file: CodebookLauncher(file, device),
                    ):
                        codebook_linear.launch_of.cache_clear()
                        plan = Plan(kernel, cluster, teams=teams)
                        times[part] = p.us(kernel.tokens, False, plan)
                codebook_linear.launch_of.cache_clear()
                build = max(0.0, times["unread"] - times["neither"])
                read = max(0.0, times["unbuilt"] - times["neither"])
                yield about | {
                    "format": p.fmt.spec,
                    "M": kernel.tokens,
                    "N": n,
                    "K": k,
                    "columns": kernel.reach,
                    "CTAs": "one" if teams else "all",
                    **{f"us_{part}": f"{us:.2f}" for part, us in times.items()},
                    "building": f"{build / max(build + read, 1e-9):.3f}",
                }


# Energy.


def power(about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    import pynvml

    pynvml.nvmlInit()
    board = pynvml.nvmlDeviceGetHandleByIndex(0)
    device, fp16 = codebook.DEVICE, torch.float16
    n, k = POWERED
    cases = [bench.dense_case(fp16, device)]
    cases += [codebook.case(scheme, fp16, True) for scheme in codebook.TIMED]
    for scheme in codebook.OTHERS:
        backend = registry.choose(LayerSpec(get_format(scheme), None, POWERED, device, fp16))
        cases.append(bench.anybit_case(scheme, fp16, backend))
    cases += codebook.rivals()
    w, x = torch.randn(n, k, device=device), torch.randn(1, k, device=device).to(fp16)
    for case in cases:
        row = about | {"peer": case.peer, "format": case.format, "M": 1, "N": n, "K": k}
        try:
            layer = case.prepare(w)
            bench.check(
                layer.run(layer.weight, x),
                x.float() @ layer.decoded.float().T,
                bench.tolerance(case),
            )
            us, watts, spread, busy = energy(layer, x, board)
        except Exception as error:
            print(f"{case.peer} {case.format}: {bench.failure(error)}", flush=True)
            continue
        yield row | {
            "us": f"{us:.2f}",
            "watts": f"{watts:.0f}",
            "gflops_per_watt": f"{2 * n * k / us / 1e3 / watts:.2f}",
            "spread": f"{spread * 2 * n * k / us / 1e3 / watts:.2f}",
            "memory_busy": f"{busy}",
        }


def energy(layer: bench.Layer, x: torch.Tensor, board: Any) -> tuple[float, float, float, int]:
    """Of a product: microseconds, watts, its energy's deviation, percent of time memory is busy.

    The deviation is that of the pieces, as a fraction of their mean.
    """
    import pynvml

    copies = rotated(layer.weight, layer.nbytes)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer.run(copies[0], x)
        torch.cuda.synchronize()
        graph, rounds = torch.cuda.CUDAGraph(), -(-100 // len(copies))
        with torch.cuda.graph(graph, stream=stream):
            for copy in copies * rounds:
                layer.run(copy, x)

        def read(products: int, later: float) -> tuple[float, float, int]:
            """Time, joules and products when the counter, which is seldom renewed, next changes."""
            before = pynvml.nvmlDeviceGetTotalEnergyConsumption(board)
            while True:
                graph.replay()
                torch.cuda.synchronize()
                products += rounds * len(copies)
                now = time.perf_counter()
                joules = pynvml.nvmlDeviceGetTotalEnergyConsumption(board)
                if joules != before and now >= later:
                    return now, joules / 1e3, products
                before = joules

        marks, busy = [read(0, 0.0)], 0
        for _ in range(PIECES + 1):  # the first warms up
            marks.append(read(marks[-1][2], marks[-1][0] + SECONDS))
            busy = pynvml.nvmlDeviceGetUtilizationRates(board).memory
    pieces = []
    for (start, before, some), (end, after, all_of) in itertools.pairwise(marks):
        pieces.append(((end - start) / (all_of - some), (after - before) / (all_of - some)))
    seconds, each = (list(some) for some in zip(*pieces[1:], strict=True))
    spread = statistics.stdev(each) / statistics.mean(each)
    return statistics.mean(seconds) * 1e6, sum(each) / sum(seconds), spread, busy


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=["compile", "share", "power"])
    parser.add_argument("--out", type=Path, default=Path("h200_codebook.csv"))
    parser.add_argument("--commit", help="written into the CSV; by default git is asked")
    args = parser.parse_args()
    if args.mode == "compile":
        compile_parts()
        return
    run = bench.blank(codebook.DEVICE, args.commit)
    about = {"gpu": run.gpu, "date": run.date, "commit": run.commit}
    rows = []
    for row in {"share": share, "power": power}[args.mode](about):
        rows.append(row)
        print(" ".join(str(value) for value in list(row.values())[3:]), flush=True)
    write_rows(args.out, rows)


if __name__ == "__main__":
    main()
