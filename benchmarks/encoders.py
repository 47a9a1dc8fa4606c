"""What formats cost an encoder of sentences: its embeddings beside its own in fp32.

Sentences of every second topic of Python's language reference; embeddings are the normalized means
of the last hidden states. Calibrated on sentences of the other topics, in batches.

    python benchmarks/encoders.py all-MiniLM-L6-v2 --out cpu_encoders.csv
"""

import argparse
import copy
import datetime
import re
from pathlib import Path

import torch
from csv_rows import write_rows
from transformers import AutoModel, AutoTokenizer

import anybit
from anybit.evaluate.corpus import prose

FORMATS = "int8 fp:e2m3 fp6 int5:group=64 int4:group=64,zero int4:group=128 int3:group=64,zero"
SENTENCES, CALIBRATED, BATCH, LONGEST = 400, 256, 32, 128  # of each kind; tokens of a sentence


def sentences(held_out: bool, count: int) -> list[str]:
    """Sentences of 40 to 400 characters, evenly spaced over the text."""
    text = " ".join(" ".join(prose(held_out)).split())
    found = [s for s in re.split(r"(?<=[.!?]) (?=[A-Z])", text) if 40 <= len(s) <= 400]
    return [found[at * len(found) // count] for at in range(count)]


@torch.inference_mode()
def embeddings(model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Unit vectors (sentences, hidden size)."""
    out = []
    for batch in batches:
        mask = batch["attention_mask"][..., None]
        sums = (model(**batch).last_hidden_state * mask).sum(1)
        out.append(torch.nn.functional.normalize(sums / mask.sum(1), dim=1))
    return torch.cat(out)


def nearest(vectors: torch.Tensor) -> torch.Tensor:
    """For each vector the other one of the largest cosine."""
    return (vectors @ vectors.T).fill_diagonal_(-2).argmax(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="a folder of transformers")
    parser.add_argument("--out", type=Path, required=True, help="the .csv file")
    args = parser.parse_args()
    dense = AutoModel.from_pretrained(args.model, dtype=torch.float32, add_pooling_layer=False)
    tokenizer = AutoTokenizer.from_pretrained(args.model, model_max_length=LONGEST)
    options = {"padding": True, "truncation": True, "return_tensors": "pt"}
    scored, calibrated = (
        [dict(tokenizer(texts[at : at + BATCH], **options)) for at in range(0, len(texts), BATCH)]
        for texts in (sentences(True, SENTENCES), sentences(False, CALIBRATED))
    )
    want, rows = embeddings(dense.eval(), scored), []
    quantizers = {"rtn": anybit.RTN(), "gptq": anybit.GPTQ(calibrated)}
    for method, spec in [(method, spec) for method in quantizers for spec in FORMATS.split()]:
        model = copy.deepcopy(dense)
        anybit.quantize_(model, spec, quantizers[method], show_progress=False)
        packed = [m.packed for m in model.modules() if isinstance(m, anybit.QuantLinear)]
        bits = sum(8 * p.nbytes() for p in packed) / sum(p.shape[0] * p.shape[1] for p in packed)
        got = embeddings(model, scored)
        figures = {"bits": bits, "cosine": (got * want).sum(1).mean().item()}
        figures["least"] = (got * want).sum(1).min().item()
        figures["nearest"] = (nearest(got) == nearest(want)).float().mean().item()
        row = {"model": args.model.name, "spec": spec, "method": method, "sentences": len(got)}
        row |= {name: round(value, 5) for name, value in figures.items()}
        rows.append(row | {"date": datetime.date.today(), "versions": f"torch {torch.__version__}"})
        write_rows(args.out, rows)


if __name__ == "__main__":
    main()
