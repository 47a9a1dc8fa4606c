"""What the format `sparse` costs models/pico before and after training for it, on a CPU.

Trains by `examples/sparse_finetune.py`, and scores by the text and the columns of `study.py`.

    python benchmarks/sparse.py --out benchmarks/results/cpu_sparse.csv
"""

import argparse
import os
import runpy
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from csv_rows import write_rows
from study import ROOT, STRIDE, WINDOW, Work, decode, when

from anybit.evaluate.perplexity import score

TOKENS, SAMPLES = 24_000, 16


def trained(steps: int) -> torch.nn.Module:
    """The model that the example leaves, quantized."""
    with tempfile.TemporaryDirectory() as room:
        (Path(room) / "models").symlink_to(ROOT / "models")
        before = os.getcwd()
        os.chdir(room)
        try:
            sys.argv = ["sparse_finetune", str(steps)]
            return runpy.run_path(str(ROOT / "examples/sparse_finetune.py"))["model"]
        finally:
            os.chdir(before)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100, help="of training (100)")
    parser.add_argument("--out", type=Path, required=True, help="the .csv file to write")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    work = Work(ROOT / "models" / "pico", "cpu", TOKENS, 1, 0, SAMPLES)
    cases = {
        "fp32": lambda: work.fresh(),
        "rtn": lambda: work.quantize("sparse", "rtn"),
        "gptq": lambda: work.quantize("sparse", "gptq"),
        "trained": lambda: trained(args.steps),
    }
    rows = []
    for method, make in cases.items():
        model = make()
        bits = 16.0 if method == "fp32" else decode(model)
        window, stride = work.window, work.window * STRIDE // WINDOW
        got = score(model, work.documents, window=window, stride=stride, dense=work.dense)
        row = {
            "model": "pico",
            "spec": "bf16" if method == "fp32" else "sparse",
            "method": method,
            "steps": args.steps if method == "trained" else 0,
            "bits": round(bits, 3),
            "tokens": got.tokens,
            "perplexity": round(got.perplexity, 4),
            "loss": round(got.loss or 0.0, 6),
            "loss_error": round(got.loss_error or 0.0, 6),
            "kl": round(got.kl or 0.0, 6),
            **when(),
        }
        rows.append(row)
        print(*row.values(), flush=True)
    write_rows(args.out, rows)


if __name__ == "__main__":
    main()
