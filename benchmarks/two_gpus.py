"""A dense model's products on two GPUs, each of which has half of every weight, by NCCL.

    python benchmarks/two_gpus.py --out benchmarks/results/h200_two_gpus.csv

What FP6-LLM compares with: bf16 weights of Llama-3-70B do not fit one GPU of 80 or 141 GB. A row is
a decode step's products on one of the two, in microseconds: alone, and with the sum over both GPUs
after attention's output and after the MLP of each of 80 layers, all in one CUDA graph. Attention
and the head are left out.
"""

import argparse
import csv
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

GPUS, LAYERS, BATCHES = 2, 80, (1, 16, 64)
# (N, K) of a GPU's part of QKV, attention's output, gate and up, down.
SHAPES = ((5120, 8192), (8192, 4096), (28672, 8192), (8192, 14336))
SUMMED = (False, True, False, True)
REPLAYS = 20
COLUMNS = ("gpu", "date", "commit", "model", "gpus", "batch", "products_us", "with_sums_us")


def step(layers: list[list[Tensor]], tokens: dict[int, Tensor], sums: bool) -> None:
    for weights in layers:
        for w, summed in zip(weights, SUMMED, strict=True):
            y = tokens[w.shape[1]] @ w.T
            if sums and summed:
                dist.all_reduce(y)


def seconds(layers: list[list[Tensor]], batch: int, sums: bool) -> float:
    """Of a step, replayed from a graph; the median, on this GPU."""
    device = layers[0][0].device
    sizes = {k for _, k in SHAPES}
    tokens = {k: torch.randn(batch, k, device=device, dtype=torch.bfloat16) for k in sizes}
    step(layers[:1], tokens, True)  # what the first calls set up is no part of the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(layers, tokens, sums)
    times = []
    for _ in range(REPLAYS):
        dist.barrier()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]) / 1e3)
    return statistics.median(times[2:])


def work(rank: int, room: str, commit: str, out: Path | None, count: int) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{room}/meet", rank=rank, world_size=GPUS, device_id=device
    )
    layers = [
        [
            torch.empty(n, k, device=device, dtype=torch.bfloat16).normal_(std=0.02)
            for n, k in SHAPES
        ]
        for _ in range(count)
    ]
    rows = []
    for batch in BATCHES:
        times = [seconds(layers, batch, sums) for sums in (False, True)]
        rows.append(
            {
                "gpu": torch.cuda.get_device_name(),
                "date": time.strftime("%Y-%m-%d", time.gmtime()),
                "commit": commit,
                "model": "llama-3-70b",
                "gpus": GPUS,
                "batch": batch,
                "products_us": round(times[0] * 1e6),
                "with_sums_us": round(times[1] * 1e6),
            }
        )
        if rank == 0:
            print(*rows[-1].values(), flush=True)
    if rank == 0 and out:
        with out.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", default="", help="what is measured, for the rows")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--out", type=Path, help="the .csv file to write")
    args = parser.parse_args()
    if torch.cuda.device_count() < GPUS:
        raise SystemExit(f"needs {GPUS} GPUs; found {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as room:
        arguments = (room, args.commit, args.out, args.layers)
        multiprocessing.spawn(work, arguments, nprocs=GPUS)


if __name__ == "__main__":
    main()
