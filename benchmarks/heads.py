"""What an output head in fewer bits costs a model in accuracy, all other layers in fp32.

A head that shares the embeddings' weight gets codes of its own, rounded to nearest.

    python benchmarks/heads.py --out benchmarks/results/cpu_heads.csv
    python benchmarks/heads.py build/study-105m --device cuda --out h200_heads.csv
"""

import argparse
from pathlib import Path

import transformers
from csv_rows import write_rows
from study import ROOT, STRIDE, WINDOW, Work, when

import anybit
from anybit.evaluate.perplexity import score

TOKENS, SAMPLES = 24_000, 16
SPECS = ("int8", "int6", "fp6", "int4:group=64", "int4:group=128")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, default=ROOT / "models" / "pico")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="the .csv file to write")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    work = Work(args.model, args.device, TOKENS, 1, 0, SAMPLES)
    rows = []
    for spec in SPECS:
        model = work.fresh()
        anybit.quantize_(model, {"*": None, "lm_head": spec}, anybit.RTN(), show_progress=False)
        got = score(
            model,
            work.documents,
            window=work.window,
            stride=work.window * STRIDE // WINDOW,
            dense=work.dense,
        )
        rows.append({
            "model": args.model.name, "head": spec, "tokens": got.tokens,
            "perplexity": round(got.perplexity, 4), "loss": round(got.loss or 0, 6),
            "loss_error": round(got.loss_error or 0, 6), "kl": round(got.kl or 0, 7),
            "agreement": round(got.agreement or 0, 5), **when(),
        })  # fmt: skip
        print(*rows[-1].values(), flush=True)
    write_rows(args.out, rows)


if __name__ == "__main__":
    main()
