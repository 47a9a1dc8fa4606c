"""One text at a time, 32 tokens of prompt and 128 new ones: what megakernels are compared by.

    python benchmarks/record.py bf16 int4:group=128 int4:group=128+int8
    python benchmarks/record.py bf16 fp6 --model meta-llama/Llama-3.2-1B

Eight prompts of random tokens in each of three processes, one after the other, greedy: microseconds
of a token behind the first, host included. Without --model the weights are random ones of
Llama-3.2-1B's shapes, and nothing is downloaded. +FORMAT is that of embeddings and head.

Before a time counts, the same weights in fp32 (decoded) read what was written. They must prefer the
same tokens by the same log probabilities, but for roundings, and the timed run write them again.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from csv_rows import add_rows
from engine import llama
from transformers import AutoModelForCausalLM

import anybit
from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from anybit.measure.bench import current_commit

PROMPTS, PROMPT, NEW, PROCESSES = 8, 32, 128, 3
APART = 0.1  # nats in the mean: rounding to bf16 and 8 bits changes less, a wrong kernel all


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("schemes", nargs="+", help="bf16, or formats")
    parser.add_argument("--model", help="a checkpoint: a directory, or a name on the hub")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--written", action="store_true", help=argparse.SUPPRESS)  # by a process
    parser.add_argument("--out", type=Path, help="a CSV that rows are added to")
    args = parser.parse_args()
    if args.written:
        print(json.dumps(written(args.model, args.schemes[0], args.device)))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or random_model(Path(folder), args.device)
        for scheme in args.schemes:
            row = measure(model, scheme, args.device)
            print(row, flush=True)
            if args.out:
                add_rows(args.out, [{"model": args.model or "random 1B"} | row])


def random_model(folder: Path, device: str) -> str:
    """A checkpoint of Llama-3.2-1B's shapes."""
    config = llama(128256, 2048, 8192, 16, 32, 8)
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return str(folder)


def measure(model: str, scheme: str, device: str) -> dict[str, Any]:
    """A row: the medians of three processes and of all. What fails the check has no time."""
    command = [sys.executable, __file__, "--written", scheme, "--model", model, "--device", device]
    runs = [subprocess.run(command, stdout=subprocess.PIPE, check=True) for _ in range(PROCESSES)]
    found = [json.loads(run.stdout.splitlines()[-1]) for run in runs]
    apart, regret = compared(model, scheme, device, found[0])
    if not max(apart, regret) < APART or any(run["tokens"] != found[0]["tokens"] for run in found):
        raise SystemExit(
            f"{scheme}: wrong tokens. Log probabilities are {apart:.3f} nats apart from those in "
            f"fp32, where {regret:.3f} more are to be had; {APART} may be. Or processes differ."
        )
    medians = [median(run["us"]) for run in found]
    return {
        "scheme": scheme, "us_per_token": round(median(us for run in found for us in run["us"]), 1),
        "processes": " ".join(f"{us:.1f}" for us in medians), "apart": round(apart, 4),
        "regret": round(regret, 4), "commit": current_commit(), "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if "cuda" in device else device,
    }  # fmt: skip


def plan_of(scheme: str) -> dict[str, str | None] | None:
    """What `quantize_` takes; None: nothing is quantized."""
    layers, _, head = scheme.partition("+")
    if layers == "bf16" and not head:
        return None
    return {"*": None if layers == "bf16" else layers} | ({"*embed_tokens": head} if head else {})


def written(model: str, scheme: str, device: str) -> dict[str, list[Any]]:
    """Of each prompt: all its tokens, the new ones' log probabilities, microseconds of a token."""
    llm = LLM(model, plan_of(scheme), dtype="bfloat16", kv_cache="model", device=device,
              length=PROMPT + NEW, max_running=1, prefix_caching=False)  # fmt: skip
    torch.manual_seed(1)
    vocabulary = llm.config.get_text_config().vocab_size
    prompts = torch.randint(vocabulary, (PROMPTS, PROMPT)).tolist()
    checked, timed = (
        SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=n)
        for n in (1, None)
    )
    found: dict[str, list[Any]] = {"tokens": [], "logprobs": [], "us": []}
    for i, prompt in enumerate(prompts):
        first = llm.generate([prompt], checked, show_progress=False)[0].completions[0]
        llm.engine.add(f"timed-{i}", prompt, timed)
        (seq,) = llm.engine.requests[f"timed-{i}"]
        while not seq.generated:
            llm.engine.step()
        before, start = seq.generated, time.perf_counter()
        while llm.engine.busy:
            llm.engine.step()
        seconds = time.perf_counter() - start
        if seq.tokens != prompt + first.tokens:
            raise SystemExit(f"{scheme}: prompt {i} was continued in two ways")
        found["us"].append(seconds / (NEW - before) * 1e6)
        found["tokens"].append(seq.tokens)
        found["logprobs"].append([each.logprob for each in first.logprobs or ()])
    return found


@torch.inference_mode()
def compared(name: str, scheme: str, device: str, found: dict[str, Any]) -> tuple[float, float]:
    """Means: how far log probabilities are from fp32's, by how much it prefers another token."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device)
    if plan := plan_of(scheme):
        anybit.quantize_(model, plan, show_progress=False)
        anybit.dequantize_(model)
    apart, regret = [], []
    for tokens, logprobs in zip(found["tokens"], found["logprobs"], strict=True):
        ids = torch.tensor([tokens], device=device)
        logits = model(ids[:, :-1]).logits[0, -NEW:].log_softmax(-1)
        own = logits.gather(1, ids[0, -NEW:, None])[:, 0]
        apart.append((own - torch.tensor(logprobs, device=device)).abs().mean())
        regret.append((logits.amax(1) - own).mean())
    return torch.stack(apart).mean().item(), torch.stack(regret).mean().item()


if __name__ == "__main__":
    main()
