"""Search the constants and train the tables of `trellis:code=look` on Gaussian numbers.

Best paths and means of what they code, in turns (Lloyd's algorithm); older turns count less. The
table grows a little with each turn, which makes up for what means take off its edge. Constants are
drawn at random, trained for a few turns, and the best of them for all.

    python benchmarks/look_tables.py --bits 2                trains for the constants in use
    python benchmarks/look_tables.py --bits 2 --tries 136    draws others first

Those in use are the best of 136, 542 and 446 pairs at 2, 3 and 4 bits, on an H200. Sums there have
no fixed order, so another run may differ in some numbers, and a CPU draws other Gaussian ones.
"""

import argparse
import base64
from dataclasses import replace

import torch
from torch import Tensor

from anybit.core.format import get_format
from anybit.formats.trellis_look import LOOKS, Look
from anybit.kernels.between import of

GROWTH = {2: 0.002, 3: 0.006, 4: 0.012}  # of a table in a turn, by bits a weight
SHORT, LONG = (12, 132), (100, 528)  # turns, and sequences of a turn
SEED = 1000  # of the first turn
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def gaussian(count: int, seed: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(count, 256, generator=generator, device=DEVICE)


def states(x: Tensor, table: Tensor, rate: int) -> Tensor:
    """States (sequences, steps) of the best paths, whose values are rows of `table`."""
    steps, fmt = x.view(len(x), -1, table.shape[1]), get_format(f"trellis:bits={rate},code=look")
    return of(x).paths(steps, table, fmt, steps.shape[1] // 2).long()


def places(look: Look) -> tuple[Tensor, Tensor]:
    """The row of every state, and the signs of its values."""
    index, complement = look.places(torch.arange(1 << 16))
    return index.to(DEVICE), (1 - 2 * complement).to(DEVICE)


def train(look: Look, rate: int, turns: int, count: int) -> Tensor:
    """The table (entries, width), in units of the standard deviation."""
    index, sign = places(look)
    entries = 1024 // look.width
    start = torch.randn(entries, look.width, generator=torch.Generator().manual_seed(3))
    table = start.abs().to(DEVICE)
    sums, counts = torch.zeros_like(table), torch.zeros(entries, device=DEVICE)
    for turn in range(turns):
        keep = min(0.95, 0.5 + turn / 60)
        sums, counts = sums * keep, counts * keep
        x = gaussian(count, SEED + turn)
        found = states(x, table[index] * sign, rate).flatten()
        sums.index_add_(0, index[found], x.view(-1, look.width) * sign[found])
        counts.index_add_(0, index[found], torch.ones(len(found), device=DEVICE))
        means = sums / counts.clamp_min(1e-9)[:, None]
        table = torch.where(counts[:, None] > 1, means, table) * (1 + GROWTH[rate])
    return table


def error(look: Look, table: Tensor, rate: int, count: int) -> tuple[float, float]:
    """The least mean squared error by some factors of a table, and its gain (`trellis.GAINS`)."""
    index, sign = places(look)
    values, x = table[index] * sign, gaussian(count, 77)
    x = x / x.square().mean().sqrt()
    found = []
    for factor in (0.97, 1.0, 1.03, 1.06):
        some = values * factor
        off = some[states(x, some, rate)].view(x.shape) - x
        found.append((float(off.square().mean()), 1 / float(some.std())))
    return min(found)


def drawn(look: Look, tries: int, rate: int) -> Look:
    """The best of `tries` other constants, after a few turns each."""
    generator = torch.Generator().manual_seed(7)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    found = []
    for _ in range(tries):
        low = number(60, 198)
        high = number(max(60, 240 - low), 257 - low) if low < 197 else 60
        other = replace(look, low=low, high=high, spread=number(1, 1 << 31) | 1)
        found.append((error(other, train(other, rate, *SHORT), rate, 264)[0], other))
    found.sort(key=lambda each: each[0])
    print(f"errors {found[0][0]:.5f} to {found[-1][0]:.5f}")
    return found[0][1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bits", type=int, choices=GROWTH, required=True)
    parser.add_argument("--tries", type=int, default=0, help="constants to draw (0)")
    parser.add_argument("--turns", type=int, help="fewer than all")
    args = parser.parse_args()
    look = LOOKS[args.bits - 1]
    if args.tries:
        look = drawn(look, args.tries, args.bits)
    turns, count = args.turns or LONG[0], LONG[1] if args.turns is None else SHORT[1]
    table = train(look, args.bits, turns, count)
    # int8, whose complement stands for the negative number.
    unit = 127 / table.abs().max()
    whole = (table * unit - 0.5).round().clamp(-128, 126)
    off, gain = error(look, (whole + 0.5) / unit, args.bits, 4 * SHORT[1])
    changed = (whole.cpu() != LOOKS[args.bits - 1].table()).sum()
    print(f"low {look.low}, high {look.high}, spread {look.spread:#x}")
    print(f"error {off:.5f}, gain {gain:.3f}")
    print(f"{changed} of {whole.numel()} numbers are not those in use:")
    print(base64.b85encode(whole.to(torch.int8).cpu().numpy().tobytes()).decode())


if __name__ == "__main__":
    main()
