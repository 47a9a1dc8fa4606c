"""The engine on random weights: decode and prefill throughput, by format, KV cache and batch.

    python benchmarks/engine.py --model llama-3-8b --formats bf16,int4:group=128 --batches 1,64

Every decode step goes through the whole engine: scheduler, graph, sampling, the tokens' way back
to the host. Contexts are filled with random K and V instead of being computed, each sequence with
blocks of its own. `busy` is the sum of kernel times in the profiler over the time of a step that
was measured without it; `gemm`, `attention` and `rest` are their shares in microseconds a step.
"""

import argparse
import csv
import gc
import math
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig

from anybit.dispatch import parse_scheme
from anybit.engine.llm import LLM
from anybit.engine.loader import Loaded, build, model_class
from anybit.engine.sequence import SamplingParams
from anybit.engine.weights import Part, Weights
from anybit.format import Packed, tensor_shapes

MODELS = {
    "llama-3-8b": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
        architectures=["LlamaForCausalLM"],
    ),
    "llama-2-7b": LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=32, max_position_embeddings=4096,
        architectures=["LlamaForCausalLM"],
    ),
    "tiny": LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
        architectures=["LlamaForCausalLM"],
    ),
}  # fmt: skip
COLUMNS = (
    "model", "format", "kv", "batch", "context", "step_us", "tokens_per_s", "floor_us", "vs_floor",
    "busy", "gemm_us", "attention_us", "rest_us", "prefill_tokens_per_s", "ttft_ms", "memory_gb",
    "weights_gb", "batch_in_80gb",
)  # fmt: skip
OUTPUT = 512  # tokens that a text grows by; with the prompt, what 80 GB must hold
RESERVE = 2e9  # bytes for activations, graphs and the runtime


class RandomWeights(Weights):
    """Weights for a benchmark: random codes, so that nothing has to be quantized."""

    def __init__(self, device: torch.device, scheme: str | None):
        super().__init__(device, torch.bfloat16)
        self.scheme = scheme

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if "norm" in name:
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        return torch.randn(shape, dtype=self.dtype, device=self.device).mul_(0.02)

    def part(self, name: str, shape: tuple[int, int], bias: bool) -> Part:
        if self.scheme is None or name == "lm_head":
            return self.tensor(name, shape), None, None
        fmt, activation = parse_scheme(self.scheme)
        tensors = {}
        for key, (size, entry) in tensor_shapes(fmt, shape).items():
            if entry is None:
                tensors[key] = torch.randint(
                    -(2**31), 2**31, size, dtype=torch.int32, device=self.device
                )
            elif entry.default_dtype.is_floating_point:
                t = torch.rand(size, device=self.device).mul_(0.002)
                tensors[key] = t.to(entry.default_dtype)
            else:
                tensors[key] = torch.randint(
                    1, 9, size, dtype=entry.default_dtype, device=self.device
                )
        return Packed.from_tensors(fmt, shape, tensors, name), None, activation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b")
    parser.add_argument("--formats", default="bf16,int4:group=128,fp6,liquid@int8")
    parser.add_argument("--kv", default="model,int8")
    parser.add_argument("--batches", default="1,16,64,128")
    parser.add_argument("--context", type=int, default=1280, help="1024 in and half of 512 out")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--bandwidth", type=float, default=4.0, help="TB/s a read floor is made of")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start nothing after that")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    file = args.out.open("w", newline="") if args.out else sys.stdout
    rows = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    rows.writeheader()
    for scheme in args.formats.split(","):
        for kv in args.kv.split(","):
            for row in measure(scheme, kv, args, end):
                rows.writerow(row)
                file.flush()
                print(row, file=sys.stderr, flush=True)


def measure(scheme: str, kv: str, args: argparse.Namespace, end: float):  # type: ignore[no-untyped-def]
    """Rows for one format and cache."""
    if time.monotonic() > end:
        return
    device = torch.device(args.device)
    torch.manual_seed(0)
    config = MODELS[args.model]
    weights = RandomWeights(device, None if scheme == "bf16" else scheme)
    length = args.context + 2 * args.steps + 64
    model = build(model_class(config), config, weights, length)
    gc.collect()
    batches = [int(b) for b in args.batches.split(",")]
    loaded = Loaded(model, None, config, frozenset(), torch.bfloat16)
    each = -(-length // 16)
    per_token = kv_bytes(config, kv)
    llm = LLM(loaded, kv_cache=kv, max_running=max(batches), prefix_caching=False,
              kv_bytes=(max(batches) * each + 1) * 16 * per_token)  # fmt: skip
    for cache in llm.engine.runner.caches:
        for t in (cache.k, cache.v):
            t.random_(-127, 128) if t.dtype == torch.int8 else t.normal_()
        if cache.k_scale is not None:
            cache.k_scale.fill_(0.02)
            cache.v_scale.fill_(0.02)
    size = sum(t.nbytes for t in stored(model))
    prefill, ttft = prefill_speed(llm, config)
    for batch in batches:
        if time.monotonic() > end:
            return
        fill(llm, batch, args.context)
        step = decode_time(llm, args.steps)
        shares = kernel_shares(llm) if device.type == "cuda" else {}
        busy = sum(shares.values())
        for name in list(llm.engine.requests):
            llm.engine.abort(name)
        read = size - model.embed_tokens.nbytes + batch * args.context * per_token
        floor = read / args.bandwidth / 1e6
        yield {
            "model": args.model, "format": scheme, "kv": kv, "batch": batch,
            "context": args.context, "step_us": round(step),
            "tokens_per_s": round(batch / step * 1e6),
            "floor_us": round(floor), "vs_floor": round(step / floor, 2),
            "busy": round(busy / step, 3), **{k: round(v) for k, v in shares.items()},
            "prefill_tokens_per_s": round(prefill), "ttft_ms": round(ttft * 1e3, 1),
            "memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1) if busy else "",
            "weights_gb": round(size / 1e9, 2),
            "batch_in_80gb": int((80e9 - RESERVE - size) / ((1024 + OUTPUT) * per_token)),
        }  # fmt: skip


def kv_bytes(config: LlamaConfig, kv: str) -> int:
    """Bytes of one token in the cache."""
    heads = 2 * config.num_hidden_layers * config.num_key_value_heads
    return heads * (config.head_dim + 4 if kv == "int8" else 2 * config.head_dim)


def stored(model: torch.nn.Module) -> list[Tensor]:
    """All tensors that a step may read, each once."""
    found = {}
    for module in model.modules():
        own = [v for v in vars(module).values() if isinstance(v, Tensor)]
        for t in (*own, *module._buffers.values()):
            if t is not None and module is not model.rope:  # type: ignore[union-attr]
                found[t.data_ptr()] = t
    return list(found.values())


def fill(llm: LLM, batch: int, context: int) -> None:
    """Sequences that are in the middle of being written."""
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for i in range(batch):
        engine.add(f"{i}", [1 + i % 100] * context, params)
        seq = engine.scheduler.waiting.pop()
        assert engine.scheduler.blocks.grow(seq, context)
        seq.computed, seq.started = context - 1, 0.0
        engine.scheduler.running.append(seq)


def decode_time(llm: LLM, steps: int) -> float:
    """Microseconds of an engine step."""
    for _ in range(4):
        llm.engine.step()
    start = time.perf_counter()
    for _ in range(steps):
        llm.engine.step()
    return (time.perf_counter() - start) / steps * 1e6


def kernel_shares(llm: LLM) -> dict[str, float]:
    """Microseconds of kernels in a step, by kind."""
    from torch.profiler import ProfilerActivity, profile

    steps, out = 5, {"gemm_us": 0.0, "attention_us": 0.0, "rest_us": 0.0}
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            llm.engine.step()
        torch.cuda.synchronize()
    for event in found.key_averages():
        name = event.key.lower()
        kind = "rest_us"
        if any(part in name for part in ("_attend", "_combine", "_write")):
            kind = "attention_us"
        elif any(part in name for part in ("gemm", "gemv", "nvjet", "cutlass", "psum", "splitk")):
            kind = "gemm_us"
        out[kind] += event.self_device_time_total / steps
    return out


def prefill_speed(llm: LLM, config: LlamaConfig) -> tuple[float, float]:
    """Prompt tokens per second over 4096 tokens, and seconds to the first token of one prompt."""
    size = min(1024, llm.length - 2)
    params = SamplingParams(temperature=0, max_tokens=1)
    random = torch.Generator().manual_seed(0)
    many = [
        torch.randint(1, config.vocab_size, (size,), generator=random).tolist() for _ in range(4)
    ]
    llm.generate(many[:2], params, show_progress=False)
    start = time.perf_counter()
    llm.generate(many, params, show_progress=False)
    whole = time.perf_counter() - start
    start = time.perf_counter()
    llm.generate(many[0], params, show_progress=False)
    return 4 * size / whole, time.perf_counter() - start


if __name__ == "__main__":
    main()
