"""The part of a kernel's stalls at sums of bytes, `__vadd4` of CUDA, from a profile.

    ncu --set source --section SourceCounters -f -o qserve ./qserve
    ncu -i qserve.ncu-rep --page source --csv > qserve.csv
    python benchmarks/stalls.py qserve.csv 22016x4096 --m 16,128,256 --out h200_stalls.csv

What LiquidGEMM says of QServe's W4A8 kernel. Hopper has no instruction for four sums of bytes: CUDA
makes one of masks without the bytes' highest bits (7f7f7f7f), a sum, and the highest bits by
themselves (80808080). These instructions are found in the profile's assembly by their masks and by
what their results are used for; a row has their part of the samples and of what was executed.
"""

import argparse
import csv
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from csv_rows import write_rows

LOW, HIGH = "0x7f7f7f7f", "0x80808080"
SAMPLES, EXECUTED = "Warp Stall Sampling (All Samples)", "Instructions Executed"
REGISTER = re.compile(r"\bR\d+\b")
SUMS = ("IADD3", "IADD", "VIADD", "IMAD.IADD")
Line = dict[str, str]


def kernels(text: str) -> Iterator[list[Line]]:
    """The instructions of each kernel launch of a profile, in order, with their counters.

    A launch whose source is known is printed twice, with the same counters.
    """
    lines: list[list[str]] = [*csv.reader(text.splitlines())]
    starts = [i for i, line in enumerate(lines) if line and line[0] == "Kernel Name"]
    before = None
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        titles = lines[start + 1]
        found = [line for line in lines[start + 2 : end] if line and line[0].startswith("0x")]
        if found != before:
            yield [dict(zip(titles, line, strict=False)) for line in found]
        before = found


def of_sums(instructions: list[str]) -> list[bool]:
    """Which instructions are parts of sums of bytes."""
    wrote: dict[str, str] = {}  # register: the part that it holds
    found = []
    for text in instructions:
        name, _, operands = re.sub(r"^@!?U?P\w+\s+", "", text.strip()).partition(" ")
        registers = REGISTER.findall(operands)
        target, sources = registers[:1], [wrote.get(r, "") for r in registers[1:]]
        part = ""
        if name.startswith("LOP3") and LOW in operands:
            part = "low"
        elif name.startswith("LOP3") and HIGH in operands:
            part = "high"
        elif name in SUMS and sources.count("low") == 2:
            part = "sum"
        elif name.startswith("LOP3") and {"sum", "high"} <= set(sources):
            part = "end"
        found.append(bool(part))
        for register in target:
            wrote[register] = part
    return found


def part_of(lines: list[Line]) -> dict[str, Any]:
    """The samples and instructions of sums of bytes, and of the whole kernel."""
    marks = of_sums([line["Source"] for line in lines])
    row = {}
    for name, column in (("samples", SAMPLES), ("executed", EXECUTED)):
        counts = [int(line[column]) for line in lines]
        mine = sum(count for count, mark in zip(counts, marks, strict=True) if mark)
        row |= {name: sum(counts), f"{name}_of_sums": mine}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("profile", type=Path, help="ncu's page of sources, as CSV")
    parser.add_argument("shapes", nargs="+", help="weights, NxK, in the order of the launches")
    parser.add_argument("--m", default="16,128,256", help="numbers of tokens of each weight")
    parser.add_argument("--kernel", default="qserve", help="a name for the rows")
    parser.add_argument("--gpu", default="NVIDIA H200", help="a name for the rows")
    parser.add_argument("--out", type=Path, required=True, help="the .csv file to write")
    args = parser.parse_args()
    launches = [(shape, int(m)) for shape in args.shapes for m in args.m.split(",")]
    rows = []
    for (shape, m), lines in zip(launches, kernels(args.profile.read_text()), strict=True):
        n, k = shape.split("x")
        rows.append(
            {
                "gpu": args.gpu,
                "date": time.strftime("%Y-%m-%d", time.gmtime()),
                "kernel": args.kernel,
                "M": m,
                "N": n,
                "K": k,
                **part_of(lines),
            }
        )
        print(*rows[-1].values())
    write_rows(args.out, rows)


if __name__ == "__main__":
    main()
