"""Train the tables of `trellis:code=look` on Gaussian numbers, as they stand in `trellis_look.py`.

Best paths and means of what they code, in turns (Lloyd's algorithm); older turns count less. The
table grows a little with each turn, which makes up for what means take off its edge.

    python benchmarks/look_tables.py --bits 2
"""

import argparse
import base64

import torch
from torch import Tensor

from anybit.core.format import get_format
from anybit.formats.trellis_look import LOOKS, Look
from anybit.kernels.between import of

# By bits a weight: what the table is to code, turns, growth and sequences of a turn.
RUNS = {2: ((2,), 90, 0.002, 128), 3: ((3,), 36, 0.006, 96), 4: ((3, 4), 70, 0.012, 96)}
SEED = 1000  # of the first turn


def gaussian(count: int, seed: int) -> Tensor:
    return torch.randn(count, 256, generator=torch.Generator().manual_seed(seed))


def train(look: Look, rates: tuple[int, ...], turns: int, growth: float, count: int) -> Tensor:
    """The table (entries, width), in units of the standard deviation."""
    width = look.width
    index, complement = look.places(torch.arange(1 << 16))
    sign = 1 - 2 * complement
    start = torch.randn(len(look.table()), width, generator=torch.Generator().manual_seed(3))
    table = start.abs()
    sums, counts = torch.zeros_like(table), torch.zeros(len(table))
    for turn in range(turns):
        keep = min(0.95, 0.5 + turn / 60)
        sums, counts = sums * keep, counts * keep
        for rate in rates:
            x = gaussian(count, SEED + turn).view(count, -1, width)
            fmt = get_format(f"trellis:bits={rate},code=look")
            found = of(x).paths(x, table[index] * sign, fmt, x.shape[1] // 2).long().flatten()
            sums.index_add_(0, index[found], x.view(-1, width) * sign[found])
            counts.index_add_(0, index[found], torch.ones(len(found)))
        means = sums / counts.clamp_min(1e-9)[:, None]
        table = torch.where(counts[:, None] > 1, means, table) * (1 + growth)
    return table


def whole(table: Tensor) -> Tensor:
    """int8, whose complement stands for the negative number."""
    return (table * (127 / table.abs().max()) - 0.5).round().clamp(-128, 126).to(torch.int8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bits", type=int, choices=RUNS, required=True)
    parser.add_argument("--turns", type=int, help="fewer than all")
    args = parser.parse_args()
    rates, turns, growth, count = RUNS[args.bits]
    look = LOOKS[args.bits - 1]
    table = whole(train(look, rates, args.turns or turns, growth, count))
    print(f"{(table != look.table()).sum()} of {table.numel()} numbers are not those in use:")
    print(base64.b85encode(table.numpy().tobytes()).decode())


if __name__ == "__main__":
    main()
