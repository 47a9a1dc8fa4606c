"""What was measured, looked up in benchmarks/results for the tables and figures of the pages."""

import csv
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

from anybit import get_format
from anybit.dispatch import parse_scheme
from anybit.kernels.hopper import tiles
from anybit.kernels.hopper.backend import OPERANDS
from anybit.kernels.hopper.decode import decoder

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
HALVES = ("fp16", "bf16")
LAUNCHED = "launched"  # stands for pdl or plain: as a layer launches its kernel
OURS = "anybit-hopper"
BIG, DOWN, QKV, OUT = (28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096)

Row = dict[str, str]
Cell = tuple[int, int, int]  # N, K, M
# A column: its title, and what its rows have: peer, formats, activations, the note's first word.
Column = tuple[str, str, tuple[str, ...], tuple[str, ...], str]


@cache
def read(name: str) -> tuple[Row, ...]:
    """The rows of a CSV that have a time or a score; none where the file was not made yet."""
    path = RESULTS / f"{name}.csv"
    if not path.exists():
        return ()
    with path.open(newline="") as file:
        return tuple(row for row in csv.DictReader(file) if row.get("us", "yes"))


@cache
def cells(*names: str) -> dict[Cell, list[Row]]:
    """Rows of some CSVs by shape and number of tokens."""
    found: dict[Cell, list[Row]] = defaultdict(list)
    for name in names or ("h200_gemm",):
        for row in read(name):
            found[int(row["N"]), int(row["K"]), int(row["M"])].append(row)
    return found


def find(rows: list[Row], column: Column) -> Row | None:
    """The faster of both dtypes of tokens."""
    _, peer, formats, activations, note = column
    if note == LAUNCHED:
        note = "pdl" if rows and overlaps(rows[0], formats[0], activations[0]) else "plain"
    found = [
        row
        for row in rows
        if row["peer"] == peer
        and row["format"] in formats
        and row["activation"] in activations
        and row["note"].startswith(note)
        and "sweep:" not in row["note"]
    ]
    return min(found, key=lambda row: float(row["us"]), default=None)


def overlaps(cell: Row, spec: str, activation: str) -> bool:
    """Whether a layer's launches overlap at the shape and M of this row."""
    d = decoder(get_format(spec), OPERANDS.get(activation.removesuffix("-given"), "bfloat16"))
    if isinstance(d, str):  # codebooks for few tokens
        return True
    m, n, k = (int(cell[name]) for name in "MNK")
    return tiles.overlaps(tiles.choose(d, m, n, k), d, m, n)


def fastest(rows: list[Row], columns: list[Column]) -> Row | None:
    found = [row for column in columns if (row := find(rows, column))]
    return min(found, key=lambda row: float(row["us"]), default=None)


def shown(row: Row | None) -> str:
    return number(float(row["us"])) if row else ""


POWER = 256  # tokens from which on a chip's clock, hence its power, decides


def against(ours: Row, theirs: Row) -> float:
    """Our time in theirs. Rows of two processes, from 256 tokens on: each in its dense layer's."""
    if ours["commit"] == theirs["commit"] or int(ours["M"]) < POWER:
        return float(ours["us"]) / float(theirs["us"])
    return float(theirs["vs_cublas_fp16"]) / float(ours["vs_cublas_fp16"])


def number(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1}f}"


# For figures in the text of pages: <!-- =us("fp6", 28672, 4096, 1) -->25.1<!-- . -->


def measured(spec: str, n: int, k: int, m: int, peer: str = OURS, activation: str = "") -> Row:
    """The row of a product: ours as a layer launches it, or another's best."""
    given = (activation,) if activation else ("int8-given",) if spec == "liquid" else HALVES
    note = LAUNCHED if peer == OURS else ""
    file = "h200_codebook" if peer == OURS and spec.startswith("codebook") else "h200_gemm"
    row = find(cells(file)[n, k, m], ("", peer, (spec,), given, note))
    if row is None:
        raise LookupError(f"no time of {peer} {spec} {given} at {n}x{k}, M={m} in {file}.csv")
    return row


def us(*key: Any) -> float:
    """Microseconds."""
    return float(measured(*key)["us"])


def over(one: tuple[Any, ...], other: tuple[Any, ...]) -> str:
    """Times the other's time, see `against`; both are arguments of `us`."""
    return f"{against(measured(*one), measured(*other)):.2f}"


def speed(*key: Any) -> str:
    """Times cuBLAS's speed in the same run."""
    return f"{float(measured(*key)['vs_cublas_fp16']):.2f}"


def score(spec: str, method: str, model: str = "study-105m", text: str = "code") -> Row:
    """The row of a model's accuracy; of several, the one calibrated as the others are."""
    text = "" if method in ("rtn", "clip", "hqq", "dense") else text
    for row in read("h200_accuracy"):
        same = row["model"], scheme(row["spec"]), row["method"], row["text"]
        if same == (model, scheme(spec), method, text) and row["samples"] in ("0", "128"):
            return row
    raise LookupError(f"no score of {model} {spec} {method} {text} in h200_accuracy.csv")


def scheme(spec: str) -> object:
    return spec if spec == "bf16" or spec.startswith("plan:") else parse_scheme(spec)


def perplexity(*key: str) -> str:
    return f"{float(score(*key)['perplexity']):.3f}"


def bits(*key: str) -> str:
    return f"{float(score(*key)['bits']):.2f}"


def ratio(spec: str, method: str, model: str = "study-105m") -> str:
    """Perplexity over bf16's."""
    dense = float(score("bf16", "dense", model)["perplexity"])
    return f"{float(score(spec, method, model)['perplexity']) / dense:.2f}"


def nats(*key: str, digits: int = 3) -> str:
    """Excess over bf16."""
    return f"{round(float(score(*key)['loss']), digits) or 0.0:.{digits}f}"


def loss(*key: str) -> str:
    """Excess over bf16 in nats, with its standard error."""
    return f"{nats(*key, digits=4)} ± {float(score(*key)['loss_error']):.4f}"


def engine(spec: str, kv: str, batch: int, column: str, model: str = "llama-3-8b") -> str:
    """A figure of the engine's decode step, the fastest that was measured."""
    key = (model, spec, kv, str(batch))
    rows = [r for r in read("h200_engine") if (r["model"], r["format"], r["kv"], r["batch"]) == key]
    if not rows:
        raise LookupError(f"no step of {model} {spec} {kv} at batch {batch} in h200_engine.csv")
    return min(rows, key=lambda row: float(row["step_us"]))[column]


def part(spec: str, kv: str, batch: int, column: str) -> str:
    """A figure of a step of Llama-3-8B's shapes as text shows it."""
    return f"{float(engine(spec, kv, batch, column)):,.0f}"


def step(*key: Any) -> str:
    """Microseconds."""
    return engine(*key, "step_us")


def faster(*key: Any) -> str:
    """bf16's step over this one."""
    return f"{float(step('bf16', 'model', key[2])) / float(step(*key)):.2f}"
