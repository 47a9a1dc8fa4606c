"""Time what happens to tokens around the products of experts: by kernels, and by torch's operators.

python benchmarks/experts_around.py --out around.csv
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from experts_cases import DEVICE, MODELS, ExpertShape
from torch import Tensor

from anybit.measure import bench
from anybit.measure.timing import median_us
from anybit.nn import routing

TOKENS = "1,4,16,64,256,1024,4096"


def around(shape: ExpertShape, m: int) -> tuple[float, float]:
    """Microseconds of choosing, sorting, spreading as int8 and combining: by kernels, by torch.

    Torch's operators spread tokens without quantizing them.
    """
    experts, top, k = shape.experts, shape.top, shape.k
    logits = torch.randn(m, experts, device=DEVICE)  # fp32: no two are equal
    x = torch.randn(m, k, device=DEVICE).bfloat16()
    y = torch.randn(m * top, k, device=DEVICE).bfloat16()

    def run(kind: str | None) -> Tensor:
        weight, chosen = routing.choose(logits, top, True)
        where = routing.sort(chosen, experts)
        routing.spread(x, where, kind)
        return routing.combine(y, where, weight)

    times, outputs = [], []
    for find, kind in ((routing.kernels, "int8"), (lambda *tensors: None, None)):
        with mock.patch.object(routing, "kernels", find), torch.no_grad():
            outputs.append(run(kind).float())
            times.append(median_us([lambda kind=kind: run(kind)], DEVICE))
    error = (outputs[0] - outputs[1]).norm() / outputs[1].norm()
    if float(error) > 0.01:
        print(f"WRONG: an error of {float(error):.3f}, {shape}, {m} tokens", flush=True)
    return times[0], times[1]


def rows(counts: list[int], commit: str | None) -> Iterator[bench.Row]:
    """Of every model; N: its experts, K: its hidden size."""
    for name, (shape, _) in MODELS.items():
        blank = replace(bench.blank(DEVICE, commit), N=shape.experts, K=shape.k)
        for m in counts:
            ours, torchs = around(shape, m)
            print(f"{name} {m} tokens: {ours:.1f} us, torch {torchs:.1f} us", flush=True)
            for peer, us in (("anybit", ours), ("torch", torchs)):
                yield replace(blank, peer=peer, format="routing", M=m, us=us, note=name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("around.csv"))
    parser.add_argument("--m", type=bench.parse_counts, default=bench.parse_counts(TOKENS))
    parser.add_argument("--commit")
    args = parser.parse_args()
    torch.manual_seed(0)
    bench.write_csv(args.out, rows(args.m, args.commit))


if __name__ == "__main__":
    main()
