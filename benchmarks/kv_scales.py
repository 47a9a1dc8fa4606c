"""What an INT8 KV cache costs models/pico: scales of tokens, and static ones of channels, on a CPU.

The engine reads held-out modules through its cache, and the loss of each token is compared with a
cache in fp32. Static scales come from calibration (`--kv-scales`): the largest magnitude of each
channel of K and V in windows of other modules ("code") or of the language reference ("prose").
Weights are in fp32 but for the layers that a row names.

    python benchmarks/kv_scales.py --out benchmarks/results/cpu_kv_scales.csv
"""

import argparse
import math
import tempfile
from pathlib import Path

import torch
import transformers
from csv_rows import write_rows
from study import ROOT, Work, when
from torch import Tensor

import anybit
from anybit import GPTQ, LLM, Calibration, SamplingParams
from anybit.evaluate.perplexity import mean_and_error

TOKENS, SAMPLES = 24_000, 16
NEARLY_DENSE = {"*": None, "*.7.mlp.down_proj": "int8"}  # scales are taken while layers are made
CASES = [("fp32", "code"), ("fp32", "prose"), ("liquid@int8", "code")]
PLANS = {"fp32": NEARLY_DENSE, "liquid@int8": "liquid@int8"}


def losses(folder: Path, cache: str, documents: list[list[int]]) -> Tensor:
    """Negative log-likelihood of each document, in nats, by the engine."""
    llm = LLM(folder, kv_cache=cache, dtype="float32", device="cpu", prefix_caching=False)
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    out = []
    for output in llm.generate(documents, params, show_progress=False):
        completion = output.completions[0]
        assert completion.prompt_logprobs is not None, completion.error
        out.append(-sum(entry.logprob for entry in completion.prompt_logprobs if entry))
    return torch.tensor(out, dtype=torch.float64)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the .csv file to write")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    work = Work(ROOT / "models" / "pico", "cpu", TOKENS, 1, 0, SAMPLES)
    documents = [ids.tolist() for ids in work.documents]
    counts = torch.tensor([len(ids) - 1 for ids in documents], dtype=torch.float64)
    rows = []
    with tempfile.TemporaryDirectory() as room:
        for weights, text in CASES:
            plain, scaled = Path(room, "plain"), Path(room, "scaled")
            windows = work.calibration(text, SAMPLES).source
            quantizer = GPTQ(Calibration(windows, kv_scales=True))
            model = anybit.quantize_(work.fresh(), PLANS[weights], quantizer, show_progress=False)
            anybit.save(model, scaled, overwrite=True)
            for module in model.modules():
                for name in ("k_scale", "v_scale"):
                    module._buffers.pop(name, None)
            anybit.save(model, plain, overwrite=True)
            base = losses(plain, "model", documents)
            cases = {"fp32": base, f"int8 by channels ({text})": losses(scaled, "int8", documents)}
            if text == "code":  # scales of tokens are made as they come
                cases["int8 by tokens"] = losses(plain, "int8", documents)
            for cache, got in cases.items():
                mean, _ = mean_and_error(got, counts)
                loss, error = mean_and_error(got - base, counts)
                row = {
                    "model": "pico",
                    "weights": weights,
                    "cache": cache,
                    "tokens": int(counts.sum()),
                    "perplexity": round(math.exp(mean), 4),
                    "loss": round(loss, 6),
                    "loss_error": round(error, 6),
                    **when(),
                }
                rows.append(row)
                print(*row.values(), flush=True)
    write_rows(args.out, rows)


if __name__ == "__main__":
    main()
