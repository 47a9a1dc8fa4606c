"""How long the GPU waits for the host in a step: penalties, and grammars for every other text.

    python benchmarks/idle.py --out build/results/h200_idle.csv

Llama-3-8B shapes, random weights and a random vocabulary of 128,256 tokens; texts in the middle of
being written, as in engine.py. idle: 1 - the time in which a kernel runs, by the profiler, over a
step's time without it. Grammars are of JSON that does not end.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from csv_rows import add_rows
from engine import RandomWeights, config_of, decode_time, facts_of, fill, kernel_shares
from kv_cache import randomize
from transformers import PreTrainedTokenizerFast

from anybit.engine.llm import LLM
from anybit.engine.loader import Loaded, build, model_class
from anybit.engine.sequence import SamplingParams
from anybit.engine.structured import Structured

PICO = Path(__file__).parents[1] / "models" / "pico"
SCHEMA = {
    "type": "object",
    "required": ["items"],
    "properties": {
        "items": {
            "type": "array",
            "minItems": 100_000,
            "items": {
                "type": "object",
                "required": ["name", "count"],
                "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
            },
        }
    },
}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of even and of odd texts
    "greedy": ({}, {}),
    "penalties": (PENALTIES, PENALTIES),
    "penalties, half JSON": (PENALTIES, PENALTIES | {"structured": Structured(json=SCHEMA)}),
}


def tokenizer_of(size: int) -> PreTrainedTokenizerFast:
    """pico's tokenizer with more tokens: two random ones side by side, 12 characters at most."""
    raw = json.loads((PICO / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary, merges = raw["model"]["vocab"], raw["model"]["merges"]
    words = [word for word in vocabulary if not word.startswith("<|")]
    draw = random.Random(0)
    while len(vocabulary) < size:
        pair = draw.choice(words), draw.choice(words)
        word = "".join(pair)
        if len(word) <= 12 and word not in vocabulary:
            vocabulary[word] = len(vocabulary)
            words.append(word)
            merges.append(list(pair))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
        return PreTrainedTokenizerFast(tokenizer_file=str(Path(folder) / "tokenizer.json"))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="llama-3-8b", help="as in engine.py")
    parser.add_argument("--format", default="liquid@int8")
    parser.add_argument("--kv", default="int8")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", default="", help="what is measured, for the rows")
    parser.add_argument("--out", type=Path, help="a CSV that rows are added to")
    args = parser.parse_args(arguments)
    device, config = torch.device(args.device), config_of(args.model, None)
    config.vocab_size = max(config.vocab_size, 4096)  # pico's tokens
    length = args.context + len(CASES) * (args.steps + 20)
    model = build(model_class(config), config, RandomWeights(device, args.format), length)
    loaded = Loaded(model, tokenizer_of(config.vocab_size), config, frozenset({0}), torch.bfloat16)
    llm = LLM(loaded, kv_cache=args.kv, max_running=args.batch, prefix_caching=False)
    for cache in llm.engine.runner.states:
        randomize(cache)
    for case, kinds in CASES.items():
        params = [
            SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, **more)
            for more in kinds
        ]
        fill(llm, args.batch, args.context, params)
        step = decode_time(llm, args.steps)
        busy = kernel_shares(llm)["busy"] if device.type == "cuda" else 0.0
        for name in list(llm.engine.requests):
            llm.engine.abort(name)
        while llm.engine.busy:
            llm.engine.step()
        row = {
            "model": args.model, "format": args.format, "kv": args.kv, "batch": args.batch,
            "context": args.context, "case": case, "step_us": round(step),
            "busy_us": round(busy), "idle": round(1 - busy / step, 4),
        }  # fmt: skip
        print(row, flush=True)
        if args.out:
            add_rows(args.out, [row | facts_of(args)])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
