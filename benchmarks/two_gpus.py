"""Decode steps of a dense model on two GPUs, each of which has half of every weight.

    python benchmarks/two_gpus.py --out benchmarks/results/h200_two_gpus.csv

What FP6-LLM compares with: bf16 weights of Llama-3-70B fit no single GPU of 80 GB, and an H200 has
no room for a cache beside them. Each GPU runs the engine with half of the heads, of the MLP and of
the head's rows; attention's output and the MLP's are summed over both, and logits gathered, by NCCL
in the step's CUDA graph. sums: "no" leaves that out, so that the texts are wrong and the difference
is what it costs.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine import (
    MODELS,
    RandomWeights,
    config_of,
    decode_time,
    facts_of,
    fill,
    kv_bytes,
    randomize,
    writer,
)
from torch import Tensor, multiprocessing, nn

from anybit import LLM
from anybit.engine.loader import Loaded, build, model_class

GPUS, BLOCK = 2, 16
COLUMNS = (
    "model", "format", "gpus", "kv", "context", "batch", "sums", "step_us", "tokens_per_s_gpu",
    "gpu", "date", "commit", "versions",
)  # fmt: skip


class Together(nn.Module):
    """A layer of which each GPU has a part: outputs are summed, or put side by side."""

    active = True

    def __init__(self, layer: nn.Module, summed: bool):
        super().__init__()
        self.layer, self.summed = layer, summed

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if not Together.active:
            return y
        if self.summed:
            dist.all_reduce(y)
            return y
        parts = [torch.empty_like(y) for _ in range(GPUS)]
        dist.all_gather(parts, y)
        return torch.cat(parts, -1)


class Half(RandomWeights):
    """One GPU's part of the weights."""

    def linear(
        self, names: list[str], rows: list[int], columns: int, bias: bool = False
    ) -> nn.Module:
        layer = super().linear(names, rows, columns, bias)
        return Together(layer, True) if names[-1].endswith(("o_proj", "down_proj")) else layer

    def head(self, name: str, embedding: Tensor, tied: bool) -> nn.Module:
        return Together(super().head(name, embedding[: len(embedding) // GPUS], tied), False)


def work(rank: int, room: str, args: argparse.Namespace) -> None:
    """One GPU's process. Both take the same steps, since both sample from the same logits."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # it may not look while a graph is captured
    gpu = args.device == "cuda"
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if gpu else "gloo", init_method=f"file://{room}/meet", rank=rank, world_size=GPUS
    )
    config = config_of(args.model, args.layers)
    config.head_dim = config.hidden_size // config.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        setattr(config, name, getattr(config, name) // GPUS)
    contexts, batches = (
        [int(t) for t in text.split(",")] for text in (args.contexts, args.batches)
    )
    length = max(contexts) + 3 * args.steps
    torch.manual_seed(0)  # equal halves: both GPUs have the same residual stream
    decoder = build(model_class(config), config, Half(device, None), length)
    room_for = (max(batches) * -(-length // BLOCK) + 1) * BLOCK
    llm = LLM(
        Loaded(decoder, None, config, frozenset(), torch.bfloat16), kv_cache="model",
        max_running=max(batches), prefix_caching=False, block_size=BLOCK,
        kv_bytes=room_for * kv_bytes(decoder, "model"),
    )  # fmt: skip
    randomize(llm)
    runner = llm.engine.runner
    if not gpu:
        runner.graphs = None
    rows, file = (
        writer(args.out if rank == 0 else None, False, COLUMNS) if rank == 0 else (None,) * 2
    )
    for active in (True, False):
        Together.active = active
        if runner.graphs is not None:
            runner.graphs.replace(decoder)
        for context in contexts:
            for batch in batches:
                dist.barrier()
                step = timed(llm, batch, context, args.steps)
                row = {
                    "model": args.model, "format": "bf16", "gpus": GPUS, "kv": "model",
                    "context": context, "batch": batch, "sums": "yes" if active else "no",
                    "step_us": round(step), "tokens_per_s_gpu": round(batch / step * 1e6 / GPUS),
                }  # fmt: skip
                if rows is not None and file is not None:
                    rows.writerow(facts_of(args) | row)
                    file.flush()
                    print(row, flush=True)
    dist.barrier()
    os._exit(0)  # NCCL waits for graphs that hold its work


def timed(llm: Any, batch: int, context: int, steps: int) -> float:
    """Microseconds of a step over so many texts."""
    fill(llm, batch, context)
    step = decode_time(llm, steps)
    for name in list(llm.engine.requests):
        llm.engine.abort(name)
    while llm.engine.busy:
        llm.engine.step()
    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3-70b", choices=MODELS)
    parser.add_argument("--batches", default="64,16,1")
    parser.add_argument("--contexts", default="640,2560")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, help="instead of the model's")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", default="", help="what is measured, for the rows")
    parser.add_argument("--out", type=Path, help="the .csv file to write")
    args = parser.parse_args()
    if args.device == "cuda" and torch.cuda.device_count() < GPUS:
        raise SystemExit(f"needs {GPUS} GPUs; found {torch.cuda.device_count()}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as room:
        multiprocessing.spawn(work, (room, args), nprocs=GPUS)
    print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
