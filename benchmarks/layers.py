"""Products of a decoder layer on this GPU, by model, format and number of tokens.

    python benchmarks/layers.py --out benchmarks/results/h200_layers.csv

What LiquidGEMM shows in figures 5 and 12, FP6-LLM in its table of linear layers, and GemLite on
square weights. Q, K and V are one product, and gate and up. A time is that of one product as a
layer launches it, with cold weights and 16-bit or quantized tokens; each is compared with the
product of the decoded weight first. Build the formats' kernels beforehand (`anybit build`).
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from csv_rows import write_rows
from hopper_layers import RandomLayer, dense_us, time_tile
from torch import Tensor

from anybit.kernels.reference import quantize_tokens
from anybit.measure.timing import median_us, rotated

LIQUID = ("liquid@int8", "int8@int8", "fp8@fp8", "int4:group=128")
FP6 = ("fp6", "int8", "int4:group=128", "int4", "fp5", "int6")
BITS = ("int8", "int4:group=128", "int2:group=128", "sparse")
FEW, MANY = (8, 16, 32), (4, 8, 16, 32, 64, 128, 256)


def llama(hidden: int, inner: int, kv: int) -> tuple[tuple[int, int], ...]:
    """(N, K) of QKV, attention's output, gate and up, down."""
    return (hidden + 2 * kv, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)


def square(size: int) -> tuple[tuple[int, int], ...]:
    return ((size, size),)


# name: products, formats, numbers of tokens
MODELS = {
    "llama-2-7b": (llama(4096, 11008, 4096), LIQUID, MANY),
    "llama-2-13b": (llama(5120, 13824, 5120), LIQUID, MANY),
    "llama-2-70b": (llama(8192, 28672, 1024), LIQUID, MANY),
    "llama-3-8b": (llama(4096, 14336, 1024), LIQUID, MANY),
    "llama-65b": (llama(8192, 22016, 8192), FP6, FEW),
    "opt-30b": (
        ((21504, 7168), (7168, 7168), (28672, 7168), (7168, 28672)), FP6, FEW
    ),
    "llama-2-70b-fp6": (llama(8192, 28672, 1024), FP6, FEW),
    **{f"square-{size}": (square(size), BITS, (1,)) for size in (4096, 8192, 16384, 24576)},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=1e9, help="start no model after that")
    parser.add_argument("--commit", default="", help="what is measured, for the rows")
    parser.add_argument("--out", type=Path, default=Path("h200_layers.csv"))
    args = parser.parse_args()
    facts = {
        "gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": args.commit,
    }  # fmt: skip
    end = time.monotonic() + args.seconds
    rows: list[dict[str, Any]] = []
    for model in args.models:
        if time.monotonic() > end:
            print(f"{model} was not begun: the time is up")
            continue
        shapes, formats, counts = MODELS[model]
        for n, k in shapes:
            for row in product(n, k, formats, counts):
                rows.append({"model": model, **row, "us": round(row["us"], 2), **facts})
        print(model, *summary(rows, model), sep="\n", flush=True)
        write_rows(args.out, rows)


def product(
    n: int, k: int, formats: tuple[str, ...], counts: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    """A row for each format and number of tokens."""
    for m in counts:
        yield {"format": "bf16", "N": n, "K": k, "M": m, "us": dense_us(n, k, m, torch.bfloat16)}
    if any("@" in name for name in formats):
        for m, us in zip(counts, fp8_us(n, k, counts), strict=True):
            yield {"format": "cublas fp8", "N": n, "K": k, "M": m, "us": us}
    for name in formats:
        p = RandomLayer(name, torch.bfloat16, n, k, cold=True, few=True)
        check(p, counts[0])
        for m in counts:
            yield {"format": name, "N": n, "K": k, "M": m, "us": time_tile(p, m, None, None)}
        del p


def check(p: RandomLayer, m: int) -> None:
    """Compare with the product of the decoded weight; fp8 matrix units keep 14 bits of a sum."""
    x, scale, sums = p.tokens(m)
    tokens = x.float() if scale is None else x.float() * scale[:, None]
    rows = p.packed.dequantize().float()  # which the weight repeats
    want = (tokens @ rows.T).repeat(1, p.n // len(rows))
    error = (p.run(x, scale, sums, overlap=None).float() - want).norm() / want.norm()
    if not error < 2e-2:
        raise SystemExit(f"{p.fmt.spec} {p.n}x{p.k}: the product is off by {error:.1e}")


def fp8_us(n: int, k: int, counts: tuple[int, ...]) -> list[float]:
    """cuBLAS in fp8, a scale for each row and token."""
    codes, scale = quantize_tokens(torch.randn(n, k, device="cuda") * 0.02, "fp8")
    copies, across, times = rotated(codes, codes.nbytes), scale.T.contiguous(), []
    for m in counts:
        x, own = quantize_tokens(torch.randn(m, k, device="cuda"), "fp8")

        def call(w: Tensor, x: Tensor = x, own: Tensor = own) -> Tensor:
            return torch._scaled_mm(
                x, w.T, scale_a=own, scale_b=across, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        calls: list[Callable[[], Tensor]] = [lambda w=w, call=call: call(w) for w in copies]
        times.append(median_us(calls, torch.device("cuda")))
    return times


def summary(rows: list[dict[str, Any]], model: str) -> Iterator[str]:
    """Microseconds of all products of a layer, by format, one for each number of tokens."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["model"] == model:
            times = found.setdefault(row["format"], {})
            times[row["M"]] = times.get(row["M"], 0.0) + row["us"]
    for name, times in found.items():
        yield f"  {name}: " + ", ".join(f"{m}: {us:.1f}" for m, us in times.items())


if __name__ == "__main__":
    main()
