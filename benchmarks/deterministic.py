"""What `--deterministic` costs, and whether load changes answers.

    python benchmarks/deterministic.py speed models/pico --out results/deterministic.csv --append
    python benchmarks/deterministic.py answers models/pico

`speed` lets a model write texts of random prompts, so many at once, with the option and without, in
turns; a row holds the median of rounds, prompts included. A name such as 1b stands for random
weights of its shapes. `answers` starts `anybit serve` twice, with the option and without. It asks
for each of 40 texts alone, then for 1,000 of them by 64 clients at once, and counts answers with
other tokens or other log probabilities; it fails if there are any with the option. Both run on a
GPU unchanged.
"""

import argparse
import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import torch
from engine import BLOCK, RandomWeights, writer
from speculative import SHAPES, facts

from anybit.engine.llm import LLM
from anybit.engine.loader import Loaded, build, model_class
from anybit.engine.sequence import SamplingParams
from anybit.evaluate.corpus import calibration_text

COLUMNS = (
    "what", "model", "format", "deterministic", "batch", "prompt", "tokens", "tokens_per_s",
    "clients", "answers", "other_tokens", "other_logprobs", "rounds", "device", "threads", "date",
    "commit", "versions",
)  # fmt: skip
SERVE = "from anybit.cli import main; main()"
KINDS = 40  # texts that `answers` asks for


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["speed", "answers"])
    parser.add_argument("model", help="a directory, or for speed one of " + ", ".join(SHAPES))
    parser.add_argument("--formats", nargs="+", default=["bf16"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=96, help="of a text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--commit", default="", help="what is measured, for the rows")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--append", action="store_true", help="keep what the file has")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows, file = writer(args.out, args.append, COLUMNS)
    wrong = 0
    for row in speed(args) if args.what == "speed" else answers(args):
        rows.writerow(facts(args) | row)
        file.flush()
        if row["deterministic"]:
            wrong += row.get("other_tokens", 0) + row.get("other_logprobs", 0)
    return 1 if wrong else 0


def speed(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for scheme in args.formats:
        source, options = model(args, scheme)
        llms = {
            steady: LLM(
                source, device=args.device, max_running=max(args.batches), prefix_caching=False,
                deterministic=steady, **options,
            )
            for steady in (False, True)
        }  # fmt: skip
        for batch in args.batches:
            found: dict[bool, list[float]] = {steady: [] for steady in llms}
            for _ in range(args.rounds + 1):  # one to compile
                for steady, llm in llms.items():
                    found[steady].append(written(llm, batch, args))
            for steady, seconds in found.items():
                yield {
                    "format": scheme, "deterministic": int(steady), "batch": batch,
                    "prompt": args.prompt, "tokens": args.tokens, "rounds": args.rounds,
                    "tokens_per_s": round(batch * args.tokens / median(seconds[1:]), 1),
                }  # fmt: skip


def model(args: argparse.Namespace, scheme: str) -> tuple[str | Loaded, dict[str, Any]]:
    """A directory, or a random model that is ready; and the options that the first one needs."""
    quantization = None if scheme == "bf16" else scheme
    if args.model not in SHAPES:
        return args.model, {"dtype": "bfloat16", "quantization": quantization}
    config = SHAPES[args.model]
    torch.manual_seed(0)
    weights = RandomWeights(torch.device(args.device), quantization)
    dense = build(model_class(config), config, weights, args.prompt + args.tokens + BLOCK)
    return Loaded(dense, None, config, frozenset(), torch.bfloat16), {}


def written(llm: LLM, batch: int, args: argparse.Namespace) -> float:
    """Seconds from prompts to the last token."""
    rng = random.Random(batch)
    prompts = [[rng.randrange(100, 4000) for _ in range(args.prompt)] for _ in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, show_progress=False)
    return time.perf_counter() - start


# Answers.


def answers(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for steady in (False, True):
        command = [sys.executable, "-c", SERVE, "serve", args.model, "--port", "0", "--dtype",
                   "bfloat16", "--log-level", "warning"]  # fmt: skip
        command += ["--deterministic"] if steady else []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                url = next(line for line in server.stdout if line.startswith("http")).strip()
                tokens, logprobs = asyncio.run(compared(url, args.answers, args.clients))
            finally:
                server.terminate()
        yield {
            "format": "bf16", "deterministic": int(steady), "clients": args.clients,
            "answers": args.answers, "other_tokens": tokens, "other_logprobs": logprobs,
        }  # fmt: skip


def bodies() -> list[dict[str, Any]]:
    """Requests: pieces of modules and a function's name, greedy or sampled, short or long."""
    text = "".join(text for _, text in calibration_text())
    prompts = [text[1000 * i :][: 20 + 37 * i] for i in range(1, KINDS)]
    return [
        {
            "prompt": prompt, "max_tokens": 8 + i, "temperature": i % 2 * 0.8, "seed": i,
            "logprobs": 1, "ignore_eos": True, "return_token_ids": True,
        }
        for i, prompt in enumerate(["def fibonacci(n):", *prompts])
    ]  # fmt: skip


async def compared(url: str, count: int, clients: int) -> tuple[int, int]:
    """How many answers under load have other tokens, and how many only other probabilities."""
    rng = random.Random(0)
    todo = iter([rng.randrange(KINDS) for _ in range(count)])
    other_tokens = other_logprobs = 0
    requests = bodies()
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits()) as http:

        async def ask(kind: int) -> tuple[list[int], list[float]]:
            answer = await http.post("/v1/completions", json=requests[kind])
            answer.raise_for_status()
            (choice,) = answer.json()["choices"]
            return choice["token_ids"], choice["logprobs"]["token_logprobs"]

        alone = [await ask(kind) for kind in range(KINDS)]

        async def client() -> None:
            nonlocal other_tokens, other_logprobs
            for kind in todo:
                tokens, logprobs = await ask(kind)
                if tokens != alone[kind][0]:
                    other_tokens += 1
                elif logprobs != alone[kind][1]:
                    other_logprobs += 1

        await asyncio.gather(*(client() for _ in range(clients)))
    return other_tokens, other_logprobs


if __name__ == "__main__":
    sys.exit(main())
