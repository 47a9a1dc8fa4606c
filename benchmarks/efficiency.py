"""How near kernels come to what the GPU allows, and where they are slower than cuBLAS.

A product takes at least as long as reading its weight's bytes, which the CSV holds a measurement
of, and as its multiplications at the matrix unit's highest rate seen in long products. The larger
of both floors over the time is the efficiency: 1 is as fast as can be. `gemm.py` prints a table and
the worst cells of each format; the pages have some of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from anybit.measure.bench import Row

PEAK = {"fp16": 790.0, "int8": 1580.0, "fp8": 1580.0}  # TFLOP/s of an H200 in long dense products
LEVEL = 0.97  # of cuBLAS's speed; below it a cell counts as slower
PEER = "anybit-hopper"
AGAIN = "again"  # a row's note: measured a second time at the end of the run


@dataclass(frozen=True)
class Cell:
    """One product: a scheme, a weight and a number of tokens.

    efficiency: the larger floor over the time. speed: the time of the faster of cuBLAS fp16 and
    bf16 over ours, if known. quantizes: whether the time holds that of quantizing tokens, which the
    floors do not.
    """

    scheme: str
    shape: tuple[int, int]
    m: int
    us: float
    efficiency: float
    speed: float | None
    quantizes: bool

    def __str__(self) -> str:
        n, k = self.shape
        return f"{n}x{k}, M={self.m}"


def cells(rows: Sequence[Row], peer: str = PEER) -> list[Cell]:
    """Measured cells of a peer; of several rows of one cell the fastest."""
    dense: dict[tuple[tuple[int, int], int], float] = {}
    rows = [row for row in rows if row.note != AGAIN]
    for row in rows:
        if row.peer == "cublas" and row.format in ("fp16", "bf16") and row.us:
            at = (row.N, row.K), row.M
            dense[at] = min(row.us, dense.get(at, row.us))
    found: dict[tuple[str, tuple[int, int], int], Cell] = {}
    for row in rows:
        if row.peer != peer or not (row.us and row.vs_floor and row.tflops):
            continue
        operand = row.activation.removesuffix("-given")
        cell = Cell(
            scheme_of(row),
            (row.N, row.K),
            row.M,
            row.us,
            max(1 / row.vs_floor, row.tflops / PEAK.get(operand, PEAK["fp16"])),
            dense[at] / row.us if (at := ((row.N, row.K), row.M)) in dense else None,
            row.activation in ("int8", "fp8"),
        )
        key = cell.scheme, cell.shape, cell.m
        if key not in found or cell.us < found[key].us:
            found[key] = cell
    return list(found.values())


def scheme_of(row: Row) -> str:
    """The name of a table's line. Groups of 64 stand in for 128 where K is no multiple of that."""
    fmt = row.format.replace("group=64", "group=128") if row.K % 128 else row.format
    operand, _, given = row.activation.partition("-")
    if operand not in ("int8", "fp8"):
        return fmt
    return f"{fmt}@{operand}" + ("" if given else ", tokens quantized too")


def slower(found: Sequence[Cell]) -> list[Cell]:
    """Slower than the faster of cuBLAS fp16 and bf16, the worst first."""
    return sorted((c for c in found if c.speed and c.speed < LEVEL), key=lambda c: c.speed or 0)


def table(found: Sequence[Cell], tokens: Sequence[int]) -> tuple[list[str], list[list[str]]]:
    """Titles and a line for each scheme: speed over cuBLAS, and how often it is slower."""
    lines = []
    for scheme in sorted({cell.scheme for cell in found}):
        mine = [cell for cell in found if cell.scheme == scheme]
        speeds = [[c.speed for c in mine if c.m == m and c.speed] for m in tokens]
        means = [f"{geometric_mean(s):.2f}x" if s else "" for s in speeds]
        compared = [c for c in mine if c.speed]
        lines.append([f"`{scheme}`", *means, f"{len(slower(mine))} of {len(compared)}"])
    return ["format", *(f"M={m}" for m in tokens), "slower"], lines


def worst(found: Sequence[Cell]) -> list[str]:
    """A sentence for each scheme: its worst cells."""
    out = []
    for scheme in sorted({cell.scheme for cell in found}):
        mine, parts = [cell for cell in found if cell.scheme == scheme], []
        if cells := slower(mine):
            parts.append(f"{cells[0].speed:.3g} times the speed of cuBLAS ({cells[0]})")
        if not mine[0].quantizes:
            cell = min(mine, key=lambda cell: cell.efficiency)
            parts.append(f"{cell.efficiency:.0%} of the larger floor ({cell}, {cell.us:.1f} us)")
        out.append(f"`{scheme}`: " + "; ".join(parts or ["none"]))
    return out


def repeats(rows: Sequence[Row]) -> list[float]:
    """How far each time of a repeat lies from the first, relative to that, the least first."""
    times: dict[tuple[str, str, str, int, int, int], float] = {}
    out = []
    for row in sorted(rows, key=lambda row: row.note == AGAIN):
        key = row.peer, row.format, row.activation, row.M, row.N, row.K
        if row.us and row.note == AGAIN and key in times:
            out.append(abs(row.us / times[key] - 1))
        elif row.us:
            times[key] = row.us
    return sorted(out)


def spread(rows: Sequence[Row]) -> str:
    """`repeats` in words; "" where nothing was measured twice."""
    found = repeats(rows)
    if not found:
        return ""
    half, most = (found[int(len(found) * share)] for share in (0.5, 0.95))
    return (
        f"{len(found)} cells were measured again at the end of the run: half of the times differ "
        f"by under {half:.1%}, 95 of 100 by under {most:.1%}, all by under {found[-1]:.1%}."
    )


def report(rows: Sequence[Row], peer: str = PEER) -> str:
    """The table and the worst cells as text."""
    found = cells(rows, peer)
    if not found:
        return f"no measured rows of {peer}"
    tokens = sorted({cell.m for cell in found})
    titles, lines = table(found, tokens)
    lines = [titles, *lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
    text = ["  ".join(t.rjust(w) for t, w in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([*text, *worst(found), spread(rows)])
