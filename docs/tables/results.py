"""Look up measurements in benchmarks/results for the tables of the pages."""

import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from anybit.core.scheme import parse_scheme

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
DEVICE = "h200"  # the GPU that the pages are of; `fill.py --show` puts another in its place
HALVES = ("fp16", "bf16")
OURS = "anybit-hopper"
BIG, DOWN, OUT = (28672, 4096), (4096, 14336), (4096, 4096)
FOUR, M1V4, M2V8 = "int4:group=128", "codebook:m=1,v=4,group=128", "codebook:group=128"


Row = dict[str, str]
Cell = tuple[int, int, int]  # N, K, M
# Title; then what a row must have: peer, formats, activations, how the note begins.
Column = tuple[str, str, tuple[str, ...], tuple[str, ...], str]
CUBLAS: Column = ("cuBLAS", "cublas", HALVES, HALVES, "")


def file_of(name: str) -> Path:
    """The CSV that is called h200_..., cpu_... here, of the GPU whose tables are made."""
    return RESULTS / f"{name.replace('h200', DEVICE)}.csv"


@cache
def read(name: str) -> tuple[Row, ...]:
    """Rows of a CSV that have a time or a score; none if the file does not exist."""
    path = file_of(name)
    if not path.exists():
        return ()
    with path.open(newline="") as file:
        return tuple(row for row in csv.DictReader(file) if row.get("us", "yes"))


@cache
def cells(*names: str) -> dict[Cell, list[Row]]:
    """Rows of some CSVs (default: h200_gemm) by shape and M."""
    found: dict[Cell, list[Row]] = defaultdict(list)
    for name in names or ("h200_gemm",):
        for row in read(name):
            found[int(row["N"]), int(row["K"]), int(row["M"])].append(row)
    return found


def find(rows: list[Row], column: Column) -> Row | None:
    """The newest row of a column; of fp16 and bf16 on that day the faster."""
    _, peer, formats, activations, note = column
    found = [
        row
        for row in rows
        if row["peer"] == peer
        and row["format"] in formats
        and row["activation"] in activations
        and row["note"].startswith(note)
        and "sweep:" not in row["note"]
    ]
    newest = max((row["date"] for row in found), default="")
    found = [row for row in found if row["date"] == newest]
    return min(found, key=lambda row: float(row["us"]), default=None)


def fastest(rows: list[Row], columns: Iterable[Column]) -> Row | None:
    found = [row for column in columns if (row := find(rows, column))]
    return min(found, key=lambda row: float(row["us"]), default=None)


def score(spec: str, method: str, model: str) -> Row | None:
    """Accuracy of a format and quantizer, calibrated on 128 samples of code where it needs any."""
    text = "" if method in ("rtn", "clip", "hqq", "dense") else "code"
    for row in read("h200_accuracy"):
        same = row["model"], scheme(row["spec"]), row["method"], row["text"]
        if same == (model, scheme(spec), method, text) and row["samples"] in ("0", "128"):
            return row
    return None


def scheme(spec: str) -> object:
    return spec if spec == "bf16" or spec.startswith("plan:") else parse_scheme(spec)


def loss(row: Row | None, beside: Iterable[Row] = ()) -> str:
    """Excess over bf16 in nats, with its standard error.

    beside: rows of the same table; a star says that some have over twice the tokens of this one.
    """
    if row is None:
        return ""
    few = any(int(other["tokens"]) > 2 * int(row["tokens"]) for other in beside)
    lost = f"{round(float(row['loss']), 4) or 0.0:.4f} ± {float(row['loss_error']):.4f}"
    return lost + "\\*" * few


def us(row: Row | None) -> str:
    return number(float(row["us"])) if row else ""


def number(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1}f}"


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A table whose first columns are words and whose others are numbers; "" without rows."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if not lines:
        return ""
    rule = "|" + "---|" * words + "--:|" * (len(titles) - words)
    return "\n".join(["| " + " | ".join(titles) + " |", rule, *lines])
