"""One token in int8: quantized by its product, by a launch before it, or given as codes.

    python benchmarks/one_token.py --out benchmarks/results/h200_one_token.csv

Weights are cold, and the ways take turns. A product whose bits are not those of the codes ends the
run.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from csv_rows import write_rows

from anybit.core.scheme import parse_scheme
from anybit.kernels.backend import Activations
from anybit.kernels.between import of
from anybit.kernels.hopper.backend import BACKEND
from anybit.measure.timing import medians_in_turns, rotated
from anybit.quantizers.quantize import quantize_tensor

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
SCHEMES = "liquid@int8", "int8@int8", "trellis:code=look@int8"
SHAPES = (
    (1536, 8960), (3584, 18944), (13824, 5120), (5120, 5120), (2560, 9728), (4096, 4096),
    (6144, 4096), (4096, 14336), (28672, 4096),
)  # fmt: skip


def times(scheme: str, n: int, k: int) -> dict[str, float]:
    """Microseconds of each way."""
    fmt, activation = parse_scheme(scheme)
    weight = quantize_tensor(torch.randn(n, k, device=DEVICE) * 0.02, fmt).stored()
    prepared = BACKEND.prepare(weight, activation, DTYPE)
    x = torch.randn(1, k, device=DEVICE).to(DTYPE)

    def codes() -> Activations:
        return Activations(*of(x).quantize(x, "int8"), DTYPE)

    def one(w: Any) -> torch.Tensor:
        return BACKEND.linear(x, w, None)

    def two(w: Any) -> torch.Tensor:
        return BACKEND.linear(codes(), w, None)

    given = codes()
    ways = {"one launch": one, "quantize then multiply": two}
    ways["multiply codes"] = lambda w: BACKEND.linear(given, w, None)
    want = BACKEND.linear(given, prepared, None)
    assert all(torch.equal(way(prepared), want) for way in ways.values()), (scheme, n, k)
    copies = rotated(prepared, sum(tensor.nbytes for tensor in prepared.layout))
    sets = [[lambda w=w, way=way: way(w) for w in copies] for way in ways.values()]
    found: dict[str, float] = {}
    for name, us in zip(ways, medians_in_turns(sets, DEVICE), strict=True):
        if isinstance(us, Exception):
            raise us
        found[name] = round(us, 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="", help="what is measured, for the rows")
    parser.add_argument("--out", type=Path, default=Path("h200_one_token.csv"))
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": args.commit,
        "versions": f"torch {torch.__version__}",
    }
    for scheme in SCHEMES:
        for n, k in SHAPES:
            for way, us in times(scheme, n, k).items():
                rows.append(facts | {"scheme": scheme, "n": n, "k": k, "way": way, "us": us})
            write_rows(args.out, rows)


if __name__ == "__main__":
    main()
