"""Integers beside small floats on models/pico, as it is and with outliers in its weights, on a CPU.

Rows of pico have no outliers. So a second model computes the same, but one percent of the channels
that a layer reads are FACTOR times as large in its weights and as small in what comes in: in the
norm, or in the rows of the layer before. The factor is a power of two, so the two models have equal
outputs in fp32. The text and the columns are those of `study.py`.

    python benchmarks/large_columns.py --out benchmarks/results/cpu_accuracy.csv
"""

import argparse
import copy
import time
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from csv_rows import add_rows
from study import ROOT, Row, Work, facts
from torch import Tensor, nn

from anybit.evaluate.perplexity import Remembered

TOKENS, SAMPLES, FACTOR, PART = 24_000, 16, 8.0, 100
ZEROS = ("rtn", "hqq")  # HQQ as published, with zero points
CASES = [
    *((spec, "rtn") for spec in ("int8", "fp:e2m3", "int6", "fp6", "int5", "fp5", "int4", "fp4")),
    *((f"{spec}:group=128", "rtn") for spec in ("int6", "fp6", "fp5")),
    *((f"{spec},zero", method) for spec in ("int4:group=64", "int2:group=32") for method in ZEROS),
    *((spec, "gptq") for spec in ("int6", "fp6", "int5", "fp5")),
]
PLAIN = [  # of pico as it is alone
    *(("int3:group=128", method) for method in ("hqq", "gptq", "gptq/prose")),
    *(("int4:group=128@int8", method) for method in ("rtn", "smooth", "smooth+gptq")),
    *(("liquid@int8", method) for method in ("rtn", "smooth", "gptq", "smooth+gptq")),
]


def with_outliers(model: nn.Module) -> nn.Module:
    """The same function, with large columns in every linear layer of every block."""
    random = torch.Generator().manual_seed(0)

    def some(count: int) -> Tensor:
        return torch.randperm(count, generator=random)[: -(-count // PART)]

    def grow(at: Tensor, *readers: nn.Linear) -> None:
        for layer in readers:
            layer.weight[:, at] *= FACTOR

    with torch.no_grad():
        for block in model.model.layers:  # type: ignore[union-attr, operator]
            a, m = block.self_attn, block.mlp
            at = some(len(block.input_layernorm.weight))
            block.input_layernorm.weight[at] /= FACTOR
            grow(at, a.q_proj, a.k_proj, a.v_proj)
            at = some(len(block.post_attention_layernorm.weight))
            block.post_attention_layernorm.weight[at] /= FACTOR
            grow(at, m.gate_proj, m.up_proj)
            at = some(len(m.up_proj.weight))
            m.up_proj.weight[at] /= FACTOR
            grow(at, m.down_proj)
            at = some(len(a.v_proj.weight))  # a channel of V is read by all heads of its group
            a.v_proj.weight[at] /= FACTOR
            heads = torch.arange(a.num_key_value_groups)
            head, dim = at // a.head_dim, at % a.head_dim
            readers = (head[:, None] * a.num_key_value_groups + heads) * a.head_dim + dim[:, None]
            grow(readers.flatten(), a.o_proj)
    return model


def measure(work: Work, model: str, spec: str, method: str) -> Row:
    start = time.perf_counter()
    quantized = work.fresh() if spec == "bf16" else work.quantize(spec, method)
    seconds = time.perf_counter() - start
    return replace(work.measure(spec, method, quantized, seconds), model=model)


@torch.no_grad()
def largest(model: nn.Module) -> float:
    """The largest weight of a row in standard deviations of the row, the mean of all rows."""
    layers = [m for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    rows = [m.weight.abs().amax(1) / m.weight.std(1) for m in layers if m is not model.lm_head]
    return float(torch.cat(rows).mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the .csv file to add rows to")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    about = facts("cpu")
    work = Work(ROOT / "models" / "pico", "cpu", TOKENS, 0, 0, SAMPLES)
    plain = work.dense
    for name in ("pico", "pico-large-columns"):
        if name != "pico":
            model = with_outliers(copy.deepcopy(plain.model))
            ids = work.documents[0][None, :256]
            assert torch.allclose(model(ids).logits, plain.model(ids).logits, atol=1e-4)
            work.dense = Remembered(model, 12 << 30)
            work.texts.clear()
        print(f"{name}: largest weight of a row {largest(work.dense.model):.1f} deviations")
        for spec, method in [("bf16", "dense"), *CASES, *(PLAIN if name == "pico" else ())]:
            cells = vars(measure(work, name, spec, method)) | about
            add_rows(args.out, [cells])
            print(*cells.values(), flush=True)


if __name__ == "__main__":
    main()
