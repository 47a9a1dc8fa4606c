"""Tables of the papers' pages: what a paper claims, what it reports, what we measured, and where.

The claims are in `claims_of_*.py`. A figure of ours is computed from the rows that `where` names,
so it cannot stand for rows that are not there; `tests/test_claims.py` checks every place.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from codebook_tables import CONTESTANTS, block
from results import BIG, DOWN, OURS, OUT, QKV, Missing, Row, cells, find, markdown, read

NOT_RUN = "not run: "
WEIGHTS = (BIG, DOWN, QKV, OUT)  # of Llama-3-8B, gate and up merged
PLACE = re.compile(r"(\w+)\.csv(?:: (.+))?")


class Claim(NamedTuple):
    """A line of a table.

    what: the claim, or a part of the method. theirs: the paper's figure. ours: words, with figures
    from the rows of `where`. where: files, "name.csv: column=value/value; column=value", or
    "not run: " and the reason; several are joined by ", ".
    """

    what: str
    theirs: str
    ours: str
    where: str


def tables() -> dict[str, str]:
    """Every table by its name in the pages."""
    return {f"claims_{name}": claims_table(claims) for name, claims in papers().items()}


def papers() -> dict[str, Callable[[], Sequence[Claim]]]:
    from claims_of_codegemm import codegemm
    from claims_of_fp6 import fp6_llm, zeroquant
    from claims_of_gemlite import gemlite
    from claims_of_liquid import liquid

    return {f.__name__: f for f in (zeroquant, fp6_llm, liquid, gemlite, codegemm)}


def claims_table(claims: Callable[[], Sequence[Claim]]) -> str:
    """Markdown; "" while rows that a claim names were not measured."""
    try:
        rows = [(c.what, c.theirs, c.ours, shown(c.where)) for c in claims()]
    except Missing:
        return ""
    return markdown(["claim", "theirs", "ours", "where"], rows, words=4)


def measured(what: str, theirs: str, ours: Callable[[], str], where: str) -> Claim:
    """A claim that is "not run" while its rows are not there."""
    try:
        return Claim(what, theirs, ours(), where)
    except Missing:
        return Claim(what, theirs, "", f"{NOT_RUN}needs a GPU, for {where.partition(':')[0]}")


def places(where: str) -> list[str]:
    """The files and selections of rows that a claim names; none if it was not run."""
    return [] if where.startswith(NOT_RUN) else where.split(", ")


def shown(where: str) -> str:
    """A place as Markdown."""
    if where.startswith(NOT_RUN):
        return where
    out = []
    for place in places(where):
        name, _, rows = place.partition(": ")
        out.append(f"`{name}`" + (f": {rows}" if rows else ""))
    return "<br>".join(out)


def found(place: str) -> list[Row]:
    """The rows of "name.csv: column=value/value; ..."; Missing if there are none."""
    match = PLACE.fullmatch(place)
    if match is None:
        raise Missing(f"{place} names no rows")
    wanted = [part.partition("=")[::2] for part in (match[2] or "").split("; ") if part]
    rows = [
        row
        for row in read(match[1])
        if all(row[column] in values.split("/") for column, values in wanted)
    ]
    if not rows:
        raise Missing(f"no rows of {place}")
    return rows


def one(place: str, column: str) -> float:
    """A figure of the only row of a place."""
    rows = found(place)
    if len(rows) > 1:
        raise Missing(f"{len(rows)} rows of {place}")
    return float(rows[0][column])


def best(
    spec: str,
    m: int,
    shape: tuple[int, int] = BIG,
    activation: str = "fp16",
    peer: str = OURS,
    csv: str = "h200_gemm",
    column: str = "us",
) -> float:
    """The time of a product in us, or another column, as a layer launches it."""
    row = find(cells(csv)[*shape, m], ("", peer, (spec,), (activation,), ""))
    if row is None:
        raise Missing(f"no {spec} of {peer}, {shape}, {m} tokens in {csv}.csv")
    return float(row[column])


def layers(model: str, name: str, m: int = 1) -> float:
    """The time of the layers of a block, in us, by a kernel of `codebook_tables`."""
    columns = {column[0]: column for _, column in CONTESTANTS}
    time = block(model, m, columns[name])
    if time is None:
        raise Missing(f"{name}, {model}, {m} tokens")
    return time


def speeds(spec: str, m: int, activation: str = "fp16") -> list[float]:
    """Speed over cuBLAS fp16 of the same process, for the four weights."""
    return [best(spec, m, shape, activation, column="vs_cublas_fp16") for shape in WEIGHTS]


def over_paper(peer: str, fmt: str, spec: str, m: int, activation: str = "fp16") -> list[float]:
    """Our speed over that of a paper's own kernel, for the four weights.

    Each is divided by cuBLAS fp16 in its own process.
    """
    place = f"h200_paper_kernels.csv: peer={peer}; format={fmt}; M={m}; "
    return [
        best(spec, m, (n, k), activation, column="vs_cublas_fp16")
        / one(f"{place}N={n}; K={k}", "vs_cublas_fp16")
        for n, k in WEIGHTS
    ]


def span(values: Iterable[float], unit: str = "x", digits: int = 2) -> str:
    """The least and the greatest."""
    some = sorted(round(value, digits) for value in values)
    low, high = f"{some[0]:.{digits}f}", f"{some[-1]:.{digits}f}"
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def by_batch(values: dict[str, float]) -> str:
    return ", ".join(f"{batch}: {value:.2f}x" for batch, value in values.items())


def lost(place: str, column: str = "loss", digits: int = 4) -> str:
    """A loss or a change with its standard error."""
    row = found(place)[0]
    value, error = float(row[column]), float(row[f"{column}_error"])
    return f"{round(value, digits) + 0.0:.{digits}f} ± {error:.{digits}f}"
