"""Fit the costs of `anybit/kernels/choice.py` to the rows of `tiles.py`, and say what they miss.

    python benchmarks/fit_costs.py h200_tiles.csv --write anybit/kernels/costs_h200.json
    python benchmarks/fit_costs.py h200_tiles.csv --hold 4096x14336

The first line writes the file of a GPU; the second fits without some weights, and shows how far the
choice is above the fastest kernel for them. Every kind of kernel is fitted to the logarithm of its
times, those near the fastest of their cell before others. Takes a minute on one core.
"""

import argparse
import csv
import json
import math
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from anybit.core.scheme import parse_scheme
from anybit.kernels.choice import Costs, Work, cycles
from anybit.kernels.cute.cells import cells_of
from anybit.kernels.cute.operands import decoder_for, operand_of
from anybit.kernels.hopper import choices, codebook_tiles, expert_tiles, lookup, tiles
from anybit.kernels.hopper.chip import Chip
from anybit.kernels.hopper.tile import Tile
from anybit.kernels.mma import tiles as mma
from anybit.kernels.mma.work import of_narrow

CHIP = Chip(132, 2431.5)  # of an H200 at 1,980 MHz
CLOCK = 1755.0  # MHz under load
NEAR = 0.4  # how much slower than the fastest of its cell what counts exp(-1) is
STEPS = 1200
KNOWN = {  # not fitted
    "second": {"start": 2400.0},  # of a launch beside its own: the median of 14 such products
}
# Where the fit begins, by the first word of a kind. Without a number here, a cost is no cost.
OWN = {"multiply": 1.1, "decode": 1.0, "step": 20, "alone_multiply": 0.3, "alone_decode": 0.5,
       "wait": 100, "parts": 1.5}  # fmt: skip
SHARED = {"start": 3000, "read": 0.95, "copied": 1 / 60, "ends": 0.3, "body": 1.5, "copying": 1}
CLUSTER = {"clusters": 1700, "uneven": 0.2}
MEETING = {"late": 0.2, "meet": 1800, "joined": 0.2, "crowd": 0.03, "apart": 0.02, "again": 0.4}
MMA = {"multiply": 0.1, "decode": 0.1, "step": 5, "alone_multiply": 0.3, "alone_decode": 0.3,
       "wait": 300, "parts": 1.5}  # fmt: skip


def without(names: str, *some: dict[str, float]) -> dict[str, float]:
    """All of some costs, but for those that change no choice by 1 % of its time."""
    return {k: v for each in some for k, v in each.items() if k not in names.split()}


FIRST: dict[str, dict[str, float]] = {
    "wgmma": without("copying", OWN, SHARED, CLUSTER, MEETING),
    "mma": {**MMA, **SHARED, "start": 1500, "ends": 1, "turns": 50, "uneven": 0.25},
    "experts": {**without("alone_decode copying copied", OWN, SHARED), "start": 8000,
                "again": 0.6},
    "few": {**without("step", MMA, SHARED), "start": 3500, "turns": 50},
    "lookup": without("clusters copied copying late parts step", OWN, SHARED, CLUSTER, MEETING),
    "codebook": {"multiply": 300, "decode": 70, "start": 5000, "turns": 50, "meet": 600,
                 "read": 0.95, "body": 1.5},
    "psumbook": {"start": 5000, "turns": 50, "meet": 600, "read": 0.95},
    "decode": {"decode": 1.0, "step": 50, "start": 3000, "read": 1.1, "body": 3},
    "library": {"multiply": 1.3, "start": 5000, "read": 1.2, "body": 3},
}  # fmt: skip
Cell = tuple[str, int, int, int, int]  # scheme, tokens, N, K, experts


class Row:
    """A launch that was timed. us: microseconds."""

    def __init__(self, row: dict[str, str]):
        self.cell: Cell = (row["format"], *(int(row[c]) for c in ("M", "N", "K", "experts")))
        self.family, self.us = row["kernel"], float(row["us"])
        tile = dict(field.split("=") for field in row["tile"].split())
        self.work = work_of(*self.cell, self.family, tile)


def work_of(
    scheme: str, m: int, n: int, k: int, experts: int, family: str, tile: dict[str, str]
) -> Work | None:
    """What a launch does; None for what is no candidate of the choice."""
    fmt, activation = parse_scheme(scheme)
    shape = m, n, k
    if family in ("codebook", "lookup"):
        cells = cells_of(fmt)
        assert not isinstance(cells, str)
        if family == "codebook":
            every = codebook_tiles.plans(cells, m, k, "float16", CHIP)
            named = {(p.kernel.name, p.cluster, p.splits): p for p in every}
            plan = named.get((tile["name"], int(tile["cluster"]), int(tile["splits"])))
            return codebook_tiles.work(plan, *shape, CHIP) if plan else None
        looked = lookup.LookupDecoder("float16", cells=cells)
        found = next((t for t in lookup.candidates(looked) if same(t, tile)), None)
        return lookup.work(found, looked, *shape, CHIP) if found else None
    if family not in ("wgmma", "mma", "decode", "library"):
        return None
    d = decoder_for(fmt, getattr(torch, operand_of(activation, torch.float16)))
    gpu = tiles.gpu_for(CHIP)
    if family == "wgmma":
        every = expert_tiles.family_grouped(d) if experts else tiles.family(d)
        found = next((t for t in every if same(t, tile)), None)
        if found is None:
            return None
        if experts:
            return expert_tiles.grouped_work(found, d, *shape, experts, CHIP)
        return tiles.work(found, d, *shape, CHIP) if tiles.suits(found, d, *shape, CHIP) else None
    if family == "mma":
        every = expert_tiles.family_few(d, CHIP) if experts else mma.candidates(d, gpu, m, n)
        few = next((t for t in every if same(t, tile)), None)
        if few is None:
            return None
        if experts:
            return expert_tiles.few_work(few, d, *shape, experts, CHIP)
        return of_narrow(few, d, gpu, *shape)
    if family == "decode":
        return choices.decoding(d, n, k, CHIP)
    return choices.library(*shape, CHIP) if m >= 256 else None


def same(tile: Tile | mma.Tile, told: dict[str, str]) -> bool:
    """Whether a row is of this tile. What it does not tell is as in most, or follows."""
    usual = {"rows": 128, "split": 1, "stream_k": 0} if isinstance(tile, Tile) else {}
    fields = usual | {name: int(value) for name, value in told.items()}
    return all(getattr(tile, name) == value for name, value in fields.items())


def fit(rows: list[Row], word: str, hold: set[str]) -> dict[str, dict[str, float]]:
    """Costs of all kinds that begin with a word: what they share by the word, their own by kind."""
    best = fastest(rows)
    rows = [r for r in rows if r.work and r.work.kind.split()[0] == word]
    rows = [r for r in rows if f"{r.cell[2]}x{r.cell[3]}" not in hold]
    kinds = sorted({r.work.kind for r in rows if r.work})
    which = torch.tensor([kinds.index(r.work.kind) for r in rows if r.work])
    numbers = [[float(x) for x in r.work[1:]] for r in rows if r.work]
    work = Work("", *torch.tensor(numbers, dtype=torch.float64).T)
    us = torch.tensor([r.us for r in rows], dtype=torch.float64)
    alone = word in ("decode", "library")
    least = us if alone else torch.tensor([best[r.cell] for r in rows], dtype=torch.float64)
    weight = torch.exp(-(us / least - 1) / NEAR)
    own = set(OWN) if len(kinds) > 1 else set()
    logs = {
        name: torch.full((len(kinds) if name in own else 1,), math.log(value), dtype=torch.float64)
        for name, value in FIRST[word].items()
    }
    for each in logs.values():
        each.requires_grad_()
    adam = torch.optim.Adam(logs.values(), lr=0.03)
    for step in range(STEPS):
        for group in adam.param_groups:
            group["lr"] = 0.03 if step < STEPS * 2 // 3 else 0.006
        adam.zero_grad()
        error = (predicted(work, logs, which).log() - us.log()) ** 2
        loss = (weight * error).sum() / weight.sum()
        loss.backward()
        adam.step()
    print(f"{word}: {len(rows)} rows, error {100 * loss.item() ** 0.5:.1f} %")
    told = {name: log.exp().tolist() for name, log in logs.items()}
    shared = {name: rounded(value[0]) for name, value in told.items() if name not in own}
    each_own = {
        kind: {name: rounded(told[name][i]) for name in told if name in own}
        for i, kind in enumerate(kinds)
    }
    return {word: shared} | ({} if kinds == [word] else each_own)


def predicted(work: Work, logs: dict[str, Tensor], which: Tensor) -> Tensor:
    costs = {name: log.exp()[which if len(log) > 1 else 0] for name, log in logs.items()}
    time: Tensor = cycles(work, CHIP.read, Costs(**costs)) / CLOCK
    return time


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def fastest(rows: list[Row]) -> dict[Cell, float]:
    best: dict[Cell, float] = defaultdict(lambda: math.inf)
    for row in rows:
        if row.family not in ("library", "decode"):
            best[row.cell] = min(best[row.cell], row.us)
    return best


def report(rows: list[Row], costs: dict[str, dict[str, float]], hold: set[str]) -> None:
    """How far the choice is above the fastest kernel, by scheme."""
    best, chosen = fastest(rows), {}
    for row in rows:
        if row.work is None or row.family in ("library", "decode"):
            continue
        found = costs[row.work.kind.split()[0]] | costs[row.work.kind]
        time = cycles(row.work, CHIP.read, Costs(**found))
        if row.cell not in chosen or time < chosen[row.cell][0]:
            chosen[row.cell] = (time, row.us)
    above: dict[str, list[float]] = defaultdict(list)
    for cell, (_, us) in chosen.items():
        if not hold or f"{cell[2]}x{cell[3]}" in hold:
            name = cell[0] + " experts" * (cell[4] > 0)
            above[name].append(us / best[cell])
            above["all"].append(us / best[cell])
    for name, each in above.items():
        mean = math.exp(sum(map(math.log, each)) / len(each))
        far = sum(x > 1.15 for x in each)
        print(f"{name:36} {len(each):5} cells  {mean:.4f}  worst {max(each):.2f}  over 1.15: {far}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, nargs="+", help="CSV files of tiles.py")
    parser.add_argument("--write", type=Path, help="the costs, as JSON")
    parser.add_argument("--hold", nargs="+", default=[], metavar="NxK", help="weights not fitted")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [Row(r) for path in args.rows for r in csv.DictReader(path.open())]
    costs: dict[str, dict[str, float]] = {**KNOWN}
    for word in FIRST:
        costs |= fit(rows, word, set(args.hold))
    report(rows, costs, set(args.hold))
    if args.write:
        args.write.write_text(json.dumps(costs, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
