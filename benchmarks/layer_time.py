"""Seconds that quantizers take for one 4096x4096 layer, its statistics given; the second run each.

    python benchmarks/layer_time.py --out benchmarks/results/h200_layer_time.csv
    python benchmarks/layer_time.py --cases "gptq int4:group=128" "additive codebook:v=8,m=2"

On a GPU it also checks that GPTQ's recorded loop (a CUDA graph) finds the codes of the plain one.
"""

import argparse
import datetime
import sys
import time
from pathlib import Path

from csv_rows import write_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import anybit
from anybit.core.format import Format
from anybit.core.packed import Packed
from anybit.quantizers import columns
from anybit.quantizers.additive import Additive
from anybit.quantizers.calibration.statistics import Statistics
from anybit.quantizers.gptq import inverse_factor

M2V8, M1V4 = "codebook:m=2,v=8,group=128", "codebook:m=1,v=4,group=128"
CASES = (
    *("rtn int4:group=128", "clip int4:group=128", "hqq int4:group=128,zero"),
    *(f"gptq {spec}" for spec in ("int4", "int4:group=128", "fp6", "liquid", "sparse")),
    *(f"{name} {spec}" for spec in (M2V8, M1V4) for name in ("kmeans", "gptq", "additive")),
)
K = 4096


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=CASES, help="quantizer and format")
    parser.add_argument("--size", type=int, default=K, help=f"outputs and inputs ({K})")
    parser.add_argument("--out", type=Path, help="the .csv file to write")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random = torch.Generator(device).manual_seed(0)
    k = args.size
    w = torch.randn(k, k, generator=random, device=device) * 0.02
    x = torch.randn(2 * k, k, generator=random, device=device)
    x = x @ torch.randn(k, k, generator=random, device=device)
    seen = Statistics()
    seen.add(x, ("hessian",), every=len(x))
    inverse_factor(seen.hessian, 0.01)  # loads the device's libraries
    rows = []
    for case in args.cases:
        name, _, spec = case.partition(" ")
        fmt = anybit.get_format(spec)
        if name == "gptq" and device == "cuda":
            same_codes(w[:, :256], fmt)
        seconds = [timed(name, w, fmt, seen) for _ in range(1 if name == "additive" else 2)][-1]
        rows.append(
            {
                "quantizer": name,
                "format": spec,
                "N": k,
                "K": k,
                "seconds": round(seconds, 3),
                "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "date": datetime.datetime.now(datetime.UTC).date(),
            }
        )
        print(*rows[-1].values(), flush=True)
        if args.out:
            write_rows(args.out, rows)


def timed(name: str, w: torch.Tensor, fmt: Format, seen: Statistics) -> float:
    start = time.perf_counter()
    quantize(name, w, fmt, seen).planes[0].flatten()[0].item()  # waits for the device
    return time.perf_counter() - start


def quantize(name: str, w: torch.Tensor, fmt: Format, seen: Statistics) -> Packed:
    free = {"rtn": anybit.RTN, "kmeans": anybit.RTN, "clip": anybit.Clip, "hqq": anybit.HQQ}
    if name in free:
        return free[name]().quantize(w, fmt)
    return {"gptq": anybit.GPTQ, "additive": Additive}[name]().quantize(w, fmt, seen)


def same_codes(w: torch.Tensor, fmt: Format) -> None:
    """GPTQ of a few columns, recorded and not; prints where they differ, which rounding may."""
    u = inverse_factor(torch.eye(w.shape[1], device=w.device) + 0.1, 0.01)
    grid, order = fmt.fit(w), [*range(w.shape[1])]
    with columns.recordings():
        recorded = columns.propagate(w.T.clone(), u, order, fmt, grid)
    waits, columns.waits_for_device = columns.waits_for_device, lambda work: True
    with columns.recordings():
        plain = columns.propagate(w.T.clone(), u, order, fmt, grid)
    columns.waits_for_device = waits
    print(f"{fmt.spec}: {(recorded != plain).sum().item()} of {plain.numel()} codes differ")


if __name__ == "__main__":
    main()
