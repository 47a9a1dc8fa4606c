"""Speculative decoding: tokens per second with drafts and without, and what drafts cost.

    python benchmarks/speculative.py texts models/pico --out results/speculative.csv
    python benchmarks/speculative.py steps 1b --formats bf16 int4:group=64 --out ...

`texts` lets a model continue texts, greedily or sampled, with each kind of draft in turns, in
rounds; a row holds the median of rounds. Repetitive texts are Python functions of the same form,
others the first lines of modules of the standard library. `steps` takes random weights, whose
guesses are never right, and times a decode step with 0 to 8 drafted tokens for each text. With a
draft model's format, the row without drafted tokens is what one of its tokens takes. Both run on a
GPU unchanged.
"""

import argparse
import importlib.metadata
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from csv_rows import add_rows
from engine import BLOCK, MODELS, RandomWeights
from transformers import LlamaConfig

from anybit.engine.llm import LLM
from anybit.engine.loader import Loaded, build, model_class
from anybit.engine.scheduler import Scheduled
from anybit.engine.sequence import SamplingParams
from anybit.evaluate.corpus import calibration_text
from anybit.kernels.processor import processor
from anybit.measure.bench import current_commit

SHAPES = MODELS | {
    "1b": LlamaConfig(  # the shapes of cpu_model.py
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22,
        num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=2048,
        architectures=["LlamaForCausalLM"],
    )
}  # fmt: skip
COLUMNS = (
    "what", "model", "format", "draft", "draft_tokens", "text", "temperature", "batch", "context",
    "tokens_per_s", "tokens_per_step", "taken", "step_us", "rounds", "device", "threads", "date",
    "commit", "versions",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["texts", "steps"])
    parser.add_argument("model", help="a directory, or for steps one of " + ", ".join(SHAPES))
    parser.add_argument("--formats", nargs="+", default=["bf16"])
    parser.add_argument("--drafts", nargs="+", default=["none", "ngram"])
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--texts", nargs="+", default=["repetitive", "plain"])
    parser.add_argument("--tokens", type=int, default=128, help="of a text")
    parser.add_argument("--context", type=int, default=256, help="tokens of texts in steps")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--commit", default="", help="what is measured, for the rows")
    parser.add_argument("--out", type=Path, help="a CSV that rows are added to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for row in texts(args) if args.what == "texts" else steps(args):
        print(row, flush=True)
        if args.out:
            add_rows(args.out, [dict.fromkeys(COLUMNS, "") | facts(args) | row])


def facts(args: argparse.Namespace) -> dict[str, Any]:
    """What every row says."""
    gpu = args.device.startswith("cuda")
    names = ("torch", "transformers", "triton" if gpu else "llvmlite")
    return {
        "what": args.what, "model": Path(args.model).name,
        "device": torch.cuda.get_device_name() if gpu else processor(),
        "threads": "" if gpu else args.threads, "date": time.strftime("%Y-%m-%d"),
        "commit": args.commit or current_commit(),
        "versions": " ".join(f"{name} {importlib.metadata.version(name)}" for name in names),
    }  # fmt: skip


# Texts.


def repetitive(i: int) -> str:
    """The beginning of a module of functions that say much the same."""
    names = ["add", "sub", "mul", "div", "mod", "min", "max"]
    names = names[i % 7 :] + names[: i % 7]
    return "".join(
        f'def {name}(first, second):\n    """Return {name} of first and second."""\n'
        f"    return operator.{name}(first, second)\n\n\n"
        for name in names[:5]
    )


def plain(i: int) -> str:
    """The first lines of a module."""
    _, text = calibration_text()[i]
    return "\n".join(text.splitlines()[:30])


def texts(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for scheme in args.formats:
        llms = {}
        for draft in args.drafts:
            llms[draft] = LLM(
                args.model, None if scheme == "bf16" else scheme, dtype="bfloat16",
                device=args.device, kv_bytes=1 << 28, max_running=max(args.batches),
                prefix_caching=False, draft=None if draft == "none" else draft,
                draft_tokens=args.draft_tokens,
            )  # fmt: skip
        for kind, temperature, batch in [
            (k, t, b) for k in args.texts for t in args.temperatures for b in args.batches
        ]:
            make = repetitive if kind == "repetitive" else plain
            params = [
                SamplingParams(
                    temperature=temperature, max_tokens=args.tokens, ignore_eos=True, seed=i
                )
                for i in range(batch)
            ]
            found: dict[str, list[list[float]]] = {draft: [] for draft in llms}
            for _ in range(args.rounds + 1):  # one to compile
                for draft, llm in llms.items():
                    found[draft].append(written(llm, [make(i) for i in range(batch)], params))
            for draft, rounds in found.items():
                speed, each, drafted, taken = (median(x) for x in zip(*rounds[1:], strict=True))
                yield {
                    "format": scheme, "draft": draft, "text": kind, "temperature": temperature,
                    "draft_tokens": "" if draft == "none" else args.draft_tokens,
                    "batch": batch, "rounds": args.rounds, "tokens_per_s": round(speed, 1),
                    "tokens_per_step": round(each, 2),
                    "taken": round(taken / drafted, 3) if drafted else "",
                }  # fmt: skip


def written(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> list[float]:
    """Tokens a second behind prompts, tokens of a text in a step, tokens drafted and taken."""
    engine, stats = llm.engine, llm.engine.stats
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        engine.add(f"{time.time()}-{i}", llm.encode(prompt), p)
    while any(not seq.generated for seqs in engine.requests.values() for seq in seqs):
        engine.step()
    before = stats.generation_tokens, stats.steps, stats.draft_tokens, stats.accepted_tokens
    start = time.perf_counter()
    while engine.busy:
        engine.step()
    seconds = time.perf_counter() - start
    tokens, steps, drafted, taken = (
        now - then
        for now, then in zip(
            (stats.generation_tokens, stats.steps, stats.draft_tokens, stats.accepted_tokens),
            before,
            strict=True,
        )
    )
    return [tokens / seconds, tokens / steps / len(prompts), drafted, taken]


# Steps.


def steps(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    config, device = SHAPES[args.model], torch.device(args.device)
    for scheme in args.formats:
        torch.manual_seed(0)
        weights = RandomWeights(device, None if scheme == "bf16" else scheme)
        model = build(model_class(config), config, weights, args.context + 64)
        most = max(args.batches)
        loaded = Loaded(model, None, config, frozenset(), torch.bfloat16)
        llm = LLM(loaded, device=device, max_running=most, prefix_caching=False, block_size=BLOCK,
                  draft="ngram", draft_tokens=8)  # fmt: skip
        for batch in args.batches:
            for drafted, seconds in enumerate(step_times(llm, batch, args)):
                yield {
                    "format": scheme, "draft_tokens": drafted, "batch": batch,
                    "context": args.context, "rounds": args.rounds, "step_us": round(seconds * 1e6),
                }  # fmt: skip


def step_times(llm: LLM, batch: int, args: argparse.Namespace) -> list[float]:
    """Seconds of steps with 0 to 8 drafted tokens for each text, which take turns."""
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for i in range(batch):
        engine.add(f"{i}", [(i + t) % 256 + 1 for t in range(args.context)], params)
    while any(not seq.generated for seqs in engine.requests.values() for seq in seqs):
        engine.step()
    found: list[list[float]] = [[] for _ in range(9)]
    for _ in range(args.rounds + 2):
        for drafted, times in enumerate(found):
            scheduled = []
            for seq in engine.scheduler.running:
                engine.scheduler.blocks.grow(seq, len(seq.tokens) + drafted)
                draft = tuple(range(300, 300 + drafted))
                scheduled.append(Scheduled(seq, len(seq.tokens) - 1, 1, True, draft))
            start = time.perf_counter()
            engine.runner.launch(scheduled).wait()
            times.append(time.perf_counter() - start)
    for name in list(engine.requests):
        engine.abort(name)
    return [median(times[2:]) for times in found]


if __name__ == "__main__":
    main()
