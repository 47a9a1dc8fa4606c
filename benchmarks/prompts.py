"""Prompts in the engine, on random weights: until each has its first token, by length and number.

    python benchmarks/prompts.py --case llama-3-8b bf16 liquid@int8 --prompts 128,1024x8,8192x4

"1024x8" are eight prompts of 1,024 tokens at once, which the engine reads in steps of 2,048
tokens. A row is the least of three runs after two that compile and capture, over different random
tokens.
host_ms: what of that the host needs to launch steps; where that is nearly all, the GPU waits.
graphs: whether CUDA graphs take the prompt; rows without them show what they are for.
"""

import argparse
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from csv_rows import add_rows
from engine import MODELS, RandomWeights, config_of, facts_of, kv_bytes

from anybit import LLM, SamplingParams
from anybit.engine.loader import Loaded, build, model_class

FIRST, RUNS = 2, 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--case", nargs="+", action="append", required=True, metavar=("MODEL", "FORMAT"),
        help=f"a model ({', '.join(MODELS)}) and formats for it",
    )  # fmt: skip
    parser.add_argument("--prompts", default="32,128,256,512,1024,1024x8,8192x4")
    parser.add_argument("--layers", type=int, help="instead of the model's")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--both", action="store_true", help="short prompts without graphs, too")
    parser.add_argument("--commit", default="", help="what is measured, for the rows")
    parser.add_argument("--out", type=Path, help="a CSV that rows are added to")
    args = parser.parse_args()
    facts = facts_of(args)
    for model, *formats in args.case:
        for scheme in formats:
            for row in measure(model, scheme, args):
                print(model, scheme, row, flush=True)
                if args.out:
                    add_rows(args.out, [{"model": model, "format": scheme} | row | facts])
            gc.collect()


def measure(model: str, scheme: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of one format."""
    wanted = [tuple(map(int, f"{text}x1".split("x")[:2])) for text in args.prompts.split(",")]
    llm = engine(model, scheme, args.layers, torch.device(args.device), wanted)
    for tokens, count in wanted:
        runner = llm.engine.runner
        row = timed(llm, tokens, count)
        yield row
        if row["graphs"] == "yes" and args.both:
            kept, runner.graphs.prompts = runner.graphs.prompts, None
            yield timed(llm, tokens, count)
            runner.graphs.prompts = kept


def engine(
    model: str, scheme: str, layers: int | None, device: torch.device, wanted: list[tuple[int, ...]]
) -> LLM:
    """An engine with room for the prompts (tokens, how many)."""
    config = config_of(model, layers)
    weights = RandomWeights(device, None if scheme == "bf16" else scheme)
    length = max(tokens for tokens, _ in wanted) + 16
    decoder = build(model_class(config), config, weights, length)
    room = max((tokens + 32) * count for tokens, count in wanted) + 64
    return LLM(
        Loaded(decoder, None, config, frozenset(), torch.bfloat16), kv_cache="model",
        prefix_caching=False, kv_bytes=room * kv_bytes(decoder, "model"),
    )  # fmt: skip


def timed(llm: LLM, tokens: int, count: int) -> dict[str, Any]:
    """Milliseconds until so many prompts have their first tokens, and the host's part of them."""
    params = SamplingParams(temperature=0, max_tokens=1)
    random = torch.Generator().manual_seed(0)
    runner, launch, hosts = llm.engine.runner, llm.engine.runner.launch, [0.0]
    taken = True  # whether graphs take all steps of a run

    def counted(*args: Any) -> Any:
        nonlocal taken
        start = time.perf_counter()
        flight = launch(*args)
        hosts[-1] += time.perf_counter() - start
        taken &= runner.graphs is not None and runner.graphs.can_read(args[0])
        return flight

    runner.launch = counted
    times = []
    for _ in range(FIRST + RUNS):
        prompts = torch.randint(1, llm.config.vocab_size, (count, tokens), generator=random)
        some = prompts.tolist()
        hosts.append(0.0)
        start = time.perf_counter()
        outputs = llm.generate(some, params, show_progress=False)
        times.append(time.perf_counter() - start)
        if error := next((o.completions[0].error for o in outputs if o.completions[0].error), ""):
            raise SystemExit(f"a prompt failed: {error}")
    runner.launch = launch
    best = min(range(FIRST, FIRST + RUNS), key=times.__getitem__)
    return {
        "tokens": tokens, "prompts": count, "graphs": "yes" if taken else "no",
        "ms": round(times[best] * 1e3, 2),
        "tokens_per_s": round(tokens * count / times[best]),
        "host_ms": round(hosts[1 + best] * 1e3, 2),
    }  # fmt: skip


if __name__ == "__main__":
    main()
