"""What trellis codes err on Gaussian numbers: the five of `trellis`, and others that were tried.

    python benchmarks/trellis_codes.py --out benchmarks/results/cpu_trellis_codes.csv

Each code encodes the same numbers in tail-biting sequences of 256, at several scales, of which the
best counts. 32,768 numbers take half a minute on one core; the error of a figure is then 1 %, that
of a difference between two codes less.
"""

import argparse
import csv
from pathlib import Path

import torch
from torch import Tensor

from anybit.core.format import get_format
from anybit.formats import trellis
from anybit.formats.trellis_encoder import paths

GAINS = {2: (0.94, 0.99), 3: (0.89, 0.94), 4: (0.83, 0.88)}
FIELDS = ("code", "weights_a_step", "int8", "bits", "gain", "mse", "numbers")


def lanes(x: Tensor) -> Tensor:
    """The two halves of 32 bits as numbers of fp16 near 1, (S, 2)."""
    x = (x & 0x8FFF8FFF) ^ 0x3B603B60
    parts = [part.to(torch.int16).view(torch.float16) for part in (x & 0xFFFF, x >> 16)]
    return torch.stack(parts, 1)


def doubled(states: Tensor, times: int, plus: int) -> Tensor:
    return trellis._hash(states * 0x10001 & 0xFFFFFFFF, times, plus)


def sum2(states: Tensor) -> Tensor:
    """Two products of the state, whose halves are added."""
    first = lanes(doubled(states, 0x9E3779B1, 0x7F4A7C15))
    return first + lanes(doubled(states, 0x85EBCA77, 0x165667B1))


def log2(states: Tensor) -> Tensor:
    """The halves of one product."""
    return lanes(doubled(states, 0x9E3779B1, 0x7F4A7C15))


def two_sums(states: Tensor) -> Tensor:
    """`sum8` of two products."""
    products = [trellis._hash(states, times) for times in (0x83DCD12D, 0x85EBCA77)]
    sums = [trellis._dot4(x, 1, 1, 1, 1) for x in products]
    return (torch.stack(sums, 1) + 4 >> 2) - 128


def triangles(states: Tensor) -> Tensor:
    """Two sums of two bytes of one product, in 7 bits."""
    x = doubled(states, 0x9E3779B1, 0x7F4A7C15) >> 1 & 0x7F7F7F7F
    return torch.stack([trellis._dot4(x, 1, 0, 1, 0), trellis._dot4(x, 0, 1, 0, 1)], 1) - 127


OTHERS = {"sum2": sum2, "log2": log2, "two_sums": two_sums, "triangles": triangles}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiles", type=int, default=128, help="sequences of 256 numbers (128)")
    parser.add_argument("--out", type=Path, required=True, help="the .csv file to write")
    args = parser.parse_args()
    w = torch.randn(args.tiles, 256, generator=torch.Generator().manual_seed(0))
    tables = {name: trellis.table(name) for name in trellis.CODES}
    states = torch.arange(1 << trellis.STATE)
    tables |= {name: made(states).float() for name, made in OTHERS.items()}
    with args.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        for name, table in tables.items():
            width, whole = table.shape[1], bool((table == table.round()).all())
            for bits, gains in GAINS.items():
                fmt = get_format(f"trellis:bits={bits},code={'sum8' if width == 1 else 'pair8'}")
                found = []
                for gain in gains:
                    x = w * (gain * table.std())
                    q = table[paths(x.view(len(w), -1, width), table, fmt).long()].view_as(x)
                    found.append((float((q - x).square().mean() / (gain * table.std()) ** 2), gain))
                mse, gain = min(found)
                writer.writerow([name, width, int(whole), bits, gain, f"{mse:.5f}", w.numel()])
                print(name, bits, f"{mse:.5f}", gain, flush=True)


if __name__ == "__main__":
    main()
