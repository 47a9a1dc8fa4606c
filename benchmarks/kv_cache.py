"""The KV cache in the model's dtype and in others: memory, accuracy, and time of attention.

    python benchmarks/kv_cache.py time --out benchmarks/results/cpu_kv_cache.csv
    python benchmarks/kv_cache.py time --device cuda --sequences 1,8,64,128,256 --out ...
    python benchmarks/kv_cache.py time --device cuda --sequences 2,8 --contexts 131072 --out ...
    python benchmarks/kv_cache.py accuracy models/pico --out benchmarks/results/kv_accuracy.csv
    python benchmarks/kv_cache.py accuracy MODEL.gguf --prose --windows 4 --out ...

`time` is of one layer: the write of a token's K and V, and attention over random contents. Layers
take turns, as in a model, and together are more than caches hold. All kinds of cache run in each
round, and the fastest round counts. On a GPU a round is a CUDA graph; on a CPU, time is that of the
process over its threads, so that other processes count little.

`accuracy` reads held-out text through the cache and compares with a cache in the model's dtype:
KL divergence in nats a token, in all and in the second half of windows, where contexts are long,
and the rise of the loss with its standard error.
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from csv_rows import add_rows
from torch import Tensor

from anybit.engine.llm import LLM
from anybit.engine.model_runner import state_bytes
from anybit.engine.models.layers import Decoder
from anybit.evaluate.corpus import held_out_text, prose
from anybit.kernels.attention import Batch, Scores
from anybit.kernels.kv.cache import LayerCache
from anybit.kernels.kv.format import KvFormat, Numbers, plain
from anybit.kernels.kv.formats import KV_FORMATS
from anybit.kernels.processor import processor
from anybit.kernels.state import LayerState, Room

KINDS = ("model", *KV_FORMATS)
BLOCK = 16
WHOLE = plain(torch.float32)
COLD = {"cpu": 160 << 20, "cuda": 512 << 20}  # bytes of all layers' K and V, at least


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(required=True)
    timing = parts.add_parser("time")
    timing.add_argument("--sequences", default="1,8,64")
    timing.add_argument("--contexts", default="512,1024,2048,4096")
    timing.add_argument("--heads", default="32x8x128", help="of Q, of K, and their dimension")
    timing.add_argument("--rounds", type=int, default=9)
    timing.add_argument("--device", default="cpu")
    timing.set_defaults(run=times)
    scoring = parts.add_parser("accuracy")
    scoring.add_argument("model", type=Path)
    scoring.add_argument("--window", type=int, default=1024)
    scoring.add_argument("--windows", type=int, default=24)
    scoring.add_argument("--prose", action="store_true", help="Python's documentation, no code")
    scoring.add_argument("--device", default="cpu")
    scoring.set_defaults(run=scores)
    for part in (timing, scoring):
        part.add_argument("--kinds", default=",".join(KINDS))
        part.add_argument("--out", type=Path, help="a CSV to which rows are added")
    given = parser.parse_args()
    cuda = given.device.startswith("cuda")
    facts = {
        "device": torch.cuda.get_device_name() if cuda else processor(),
        "threads": "" if cuda else torch.get_num_threads(), "date": date.today(),
        "versions": f"torch {torch.__version__}",
    }  # fmt: skip
    for row in given.run(given):
        print(row, flush=True)
        if given.out is not None:
            add_rows(given.out, [facts | row])


def numbers(text: str, separator: str = ",") -> list[int]:
    return [int(part) for part in text.split(separator)]


# Time.


@torch.inference_mode()
def times(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    heads, kv_heads, dim = numbers(given.heads, "x")
    device = torch.device(given.device)
    for sequences, context in itertools.product(numbers(given.sequences), numbers(given.contexts)):
        steps, sizes = {}, {}
        for kind in given.kinds.split(","):
            layers = caches(kind, sequences, context, kv_heads, dim, device)
            sizes[kind] = layers[0].nbytes / (layers[0].k.shape[0] * BLOCK)
            steps[kind] = recorded(Step(layers, sequences, context, heads, dim), device)
        found = dict.fromkeys(steps, math.inf)
        for _ in range(given.rounds):
            for kind, (step, layers_run) in steps.items():
                found[kind] = min(found[kind], seconds(step, device) / layers_run)
        dense = found.get("model", math.nan)
        for kind, took in found.items():
            yield {
                "heads": heads, "kv_heads": kv_heads, "dim": dim, "kv": kind,
                "sequences": sequences, "context": context,
                "us": round(took * 1e6, 1), "vs_bf16": round(took / dense, 3),
                "bytes_a_token": round(sizes[kind]),
                "gbps": round(sizes[kind] * sequences * context / took / 1e9, 1),
            }  # fmt: skip


def caches(
    kind: str, sequences: int, context: int, heads: int, dim: int, device: torch.device
) -> list[LayerCache]:
    """Layers of a cache that is full of random contents."""
    blocks = sequences * -(-context // BLOCK)
    format = KV_FORMATS.get(kind) or plain(torch.bfloat16)

    def layer() -> LayerCache:
        cache = LayerCache.empty(blocks, heads, BLOCK, dim, format, device)
        randomize(cache)
        return cache

    first = layer()
    count = max(2, -(-COLD[device.type] // first.nbytes))
    return [first, *(layer() for _ in range(count - 1))]


def randomize(cache: LayerCache) -> None:
    """Fill all blocks of a cache with the same random tokens."""
    heads, size = cache.k.shape[1:3]
    dtype = cache.k.dtype if cache.k.is_floating_point() else torch.float32
    k, v = torch.randn(2, size, heads, cache.head_dim, device=cache.k.device, dtype=dtype)
    cache.store(k, v, torch.arange(size, device=cache.k.device))
    for t in cache.of_tokens:
        t.copy_(t[:1].expand_as(t))


class Step:
    """A decode step of attention in all layers: every sequence writes a token and attends."""

    def __init__(
        self, layers: list[LayerCache], sequences: int, context: int, heads: int, dim: int
    ):
        device, blocks = layers[0].k.device, -(-context // BLOCK)
        self.layers, self.heads, self.scores = layers, heads, Scores(dim**-0.5)
        tables = torch.randperm(sequences * blocks).view(sequences, blocks)
        last = tables[:, (context - 1) // BLOCK] * BLOCK + (context - 1) % BLOCK
        full = torch.full((sequences,), context, dtype=torch.int32, device=device)
        self.batch = Batch(
            full - 1, last.to(device, torch.int32), tables.to(device, torch.int32), full,
            torch.arange(sequences + 1, dtype=torch.int32, device=device),
            [1] * sequences, [context] * sequences, sequences,
        )  # fmt: skip
        width = (heads + 2 * layers[0].k.shape[1]) * dim
        self.qkv = torch.randn(sequences, width, dtype=torch.bfloat16, device=device)
        angles = torch.rand(context, dim // 2, device=device)
        self.rope = angles.cos(), angles.sin()

    def __call__(self) -> Tensor:
        for layer in self.layers:
            out = layer.attend(self.qkv, self.heads, self.batch, self.rope, self.scores)
        return out


def recorded(step: Step, device: torch.device) -> tuple[Callable[[], object], int]:
    """What runs a step, after a first one that compiles it; and its layers."""
    out = step()
    assert torch.isfinite(out).all()
    if device.type == "cpu":
        return step, len(step.layers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(_: Step = step) -> None:  # what the graph reads lives as long
        graph.replay()

    replay()
    return replay, len(step.layers)


def seconds(step: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.process_time()
        step()
        return (time.process_time() - start) / torch.get_num_threads()
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    step()
    end_event.record()
    torch.cuda.synchronize()
    return start_event.elapsed_time(end_event) / 1e3


# Accuracy.


class Rounded(Numbers):
    """In fp32, what bf16 holds."""

    kind = None  # by no kernel

    def encode(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return x.bfloat16().float(), None


ROUNDED = Rounded(torch.float32)


@torch.inference_mode()
def scores(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Everything in fp32 but K and V, so that nothing else differs."""
    llm = LLM(
        given.model, dtype="float32", device=given.device, max_running=1, keep="decoded",
        kv_bytes=1 << 28,
    )  # fmt: skip
    model: Decoder = llm.engine.runner.model  # type: ignore[attr-defined]
    device, size = model.embed_tokens.device, min(given.window, llm.length)
    texts = windows(llm, size, given.prose)[: given.windows]
    whole = Room(-(-size // BLOCK), BLOCK, 0, WHOLE, device)
    exact = [logits(model, text, [heads.empty(whole) for heads in model.heads]) for text in texts]
    losses = [loss(found, text) for found, text in zip(exact, texts, strict=True)]
    one = whole._replace(blocks=1)
    unquantized = state_bytes(model, one._replace(kv=plain(torch.bfloat16)))
    for kind in given.kinds.split(","):
        format = KV_FORMATS.get(kind) or KvFormat(kind, ROUNDED, ROUNDED)
        layers = [heads.empty(whole._replace(kv=format)) for heads in model.heads]
        nbytes = unquantized if kind == "model" else state_bytes(model, one._replace(kv=format))
        found, rises = [], []
        for text, want, before in zip(texts, exact, losses, strict=True):
            got = logits(model, text, layers)
            kl = (want.exp() * (want - got)).sum(-1)
            same = (want.argmax(-1) == got.argmax(-1)).float()
            found.append(torch.stack((kl, same)))
            rises.append(loss(got, text) - before)
        kl, same = torch.stack(found).unbind(1)
        rise = torch.cat(rises)
        yield {
            "model": given.model.stem, "kv": kind, "tokens": kl.numel(),
            "kl": f"{kl.mean():.2e}", "kl_late": f"{kl[:, size // 2 :].mean():.2e}",
            "agreement": round(float(same.mean()), 4), "loss": f"{rise.mean():.4f}",
            "loss_error": f"{rise.std() / rise.numel() ** 0.5:.4f}",
            "bytes_a_token": nbytes // BLOCK, "vs_bf16": round(nbytes / unquantized, 3),
        }  # fmt: skip


def windows(llm: LLM, size: int, english: bool) -> list[list[int]]:
    """Texts of so many tokens: the beginnings of modules, or prose cut into pieces."""
    if not english:
        texts = [llm.encode(text)[:size] for _, text in held_out_text()]
        return [text for text in texts if len(text) == size]
    first = llm.encode("")  # what the tokenizer puts before a text
    tokens = llm.encode("\n\n".join(prose(held_out=True)))[len(first) :]
    each = size - len(first)
    return [first + tokens[i : i + each] for i in range(0, len(tokens) - each + 1, each)]


def loss(log_probabilities: Tensor, text: list[int]) -> Tensor:
    """Of all tokens but the first, nats."""
    own = torch.tensor(text[1:], device=log_probabilities.device)[:, None]
    return -log_probabilities[:-1].gather(1, own)[:, 0]


def logits(model: Decoder, text: list[int], layers: Sequence[LayerState]) -> Tensor:
    """Log probabilities (T, vocabulary) of a text that is read at once."""
    size, device = len(text), model.embed_tokens.device
    at = torch.arange(size, dtype=torch.int32, device=device)
    tables = torch.arange(-(-size // BLOCK), dtype=torch.int32, device=device)[None]
    length = torch.tensor([size], dtype=torch.int32, device=device)
    starts = torch.tensor([0, size], dtype=torch.int32, device=device)
    batch = Batch(at, at, tables, length, starts, [size], [size], 0)
    hidden = model(torch.tensor(text, device=device), layers, batch)
    return model.logits(hidden).float().log_softmax(-1)


if __name__ == "__main__":
    main()
