"""Batch invariance: is a request's answer the same, bit for bit, alone and in any mix of others?

    python benchmarks/invariance.py MODEL bf16 liquid@int8 bf16+int8 --out rows.csv

A name is a format, and behind a + that of the KV cache. Eight requests run alone, then each of them
in --mixes batches of random others (numbers, lengths and order drawn anew), without
`deterministic` and with it. A row counts answers that differ from the one alone, in tokens and in
bits of their log probabilities, and has the speed of 1, 16 and 64 sequences.
"""

import argparse
import gc
import random
import time
from pathlib import Path
from typing import Any

import torch
from csv_rows import add_rows

from anybit.engine.llm import LLM
from anybit.engine.output import Output
from anybit.engine.sequence import SamplingParams
from anybit.measure.bench import current_commit

PROBES, NEW, SPEEDS = 8, 48, (1, 16, 64)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("names", nargs="+", metavar="FORMAT[+KV]")
    parser.add_argument("--mixes", type=int, default=25, help="batches with all eight requests")
    parser.add_argument("--others", type=int, default=40, help="most other requests of a batch")
    parser.add_argument("--out", type=Path, help="a CSV that rows are added to")
    args = parser.parse_args()
    for name in args.names:
        for deterministic in (False, True):
            row = measured(args.model, name, deterministic, args.mixes, args.others)
            print(*row.values(), flush=True)
            if args.out:
                add_rows(args.out, [row])


def measured(
    model: Path, name: str, deterministic: bool, mixes: int, others: int
) -> dict[str, Any]:
    spec, _, kv = name.partition("+")
    llm = LLM(
        model,
        None if spec == "bf16" else spec,
        kv_cache=kv or "model",
        deterministic=deterministic,
    )
    draw = random.Random(0)
    probes = [prompt(draw, llm, length) for length in (3, 17, 64, 200, 511, 700, 1300, 2500)]
    alone = [answers(llm, [probe])[0] for probe in probes]
    tokens, bits = 0, 0
    for _ in range(mixes):
        batch = [*enumerate(probes)]
        batch += [
            (-1, prompt(draw, llm, 2 ** draw.randint(2, 11)))
            for _ in range(draw.randint(1, others))
        ]
        draw.shuffle(batch)
        found = answers(llm, [ids for _, ids in batch])
        for (place, _), answer in zip(batch, found, strict=True):
            if place >= 0:
                tokens += answer[0] != alone[place][0]
                bits += answer != alone[place]
    row = {
        "model": model.name,
        "format": spec,
        "kv": llm.kv_cache,
        "deterministic": int(deterministic),
        "answers": mixes * PROBES,
        "other_tokens": tokens,
        "other_bits": bits,
    }
    row |= {f"tokens_per_s_{count}": round(speed(llm, draw, count)) for count in SPEEDS}
    cuda = llm.device.type == "cuda"
    row |= {
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "versions": f"torch {torch.__version__}",
        "date": time.strftime("%F"),
        "commit": current_commit(),
    }
    del llm
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return row


def prompt(draw: random.Random, llm: LLM, length: int) -> list[int]:
    """Random tokens, as many as fit before an answer."""
    length = min(length, llm.length - 2 * NEW)
    return draw.choices(range(100, llm.config.get_text_config().vocab_size), k=length)


def answers(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log probabilities; greedy, and all of one length."""
    return [bits_of(output) for output in llm.generate(prompts, params(NEW), False)]


def params(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, logprobs=0)


def bits_of(output: Output) -> tuple[list[int], list[float]]:
    (text,) = output.completions
    return text.tokens, [one.logprob for one in text.logprobs or ()]


def speed(llm: LLM, draw: random.Random, count: int) -> float:
    """Tokens a second of so many sequences at a time, prompts of 64 tokens among the time."""
    prompts = [prompt(draw, llm, 64) for _ in range(count)]
    llm.generate(prompts, params(8), False)
    start = time.perf_counter()
    llm.generate(prompts, params(128), False)
    return 128 * count / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
