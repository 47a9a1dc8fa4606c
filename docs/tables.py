"""Write the tables of the pages from benchmarks/results, and the figures in their text.

    python docs/tables.py            after new measurements
    python docs/tables.py --check    names the pages that no longer say what was measured

A table stands between <!-- NAME, written by docs/tables.py --> and <!-- end -->; a figure between
<!-- =EXPRESSION --> and <!-- . -->, where the expression calls functions of `results.py`.
"""

import re
import sys
from functools import partial
from pathlib import Path

import aims
import paper_tables
import results
from results import HALVES, LAUNCHED, OURS, Cell, Column, Row, against, find, shown

DOCS = Path(__file__).parent
SHAPES = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096))
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
LEVEL = 0.03  # times that differ by less count as equal


def weight_only(spec: str, *peers: tuple[str, str]) -> list[Column]:
    """Columns of 16-bit tokens: ours as launched, ours without overlap, Triton, peers, cuBLAS."""
    return [
        ("Hopper", "anybit-hopper", (spec,), HALVES, LAUNCHED),
        ("plain", "anybit-hopper", (spec,), HALVES, "plain"),
        ("Triton", "anybit-triton", (spec,), HALVES, ""),
        *((name, name, (theirs,), HALVES, "") for name, theirs in peers),
        ("cuBLAS", "cublas", HALVES, HALVES, ""),
    ]


INT8 = ("int8", "int8(_int_mm)")
FOUR = "int4:group=128"
TABLES: list[tuple[str, list[Column]]] = [
    (
        "int4, groups of 128",
        weight_only(
            FOUR,
            ("humming", FOUR),
            ("quack", FOUR),
            ("gemlite", FOUR),
            ("tinygemm", f"{FOUR},zero"),
        ),
    ),
    ("fp6", weight_only("fp6", ("humming", "fp6"))),
    ("fp5", weight_only("fp5", ("humming", "fp5"))),
    ("int8, 16-bit tokens", weight_only("int8", ("humming", "int8"))),
    ("int3, groups of 128", weight_only("int3:group=128", ("humming", "int3:group=128"))),
    ("int2, groups of 128", weight_only("int2:group=128", ("humming", "int2:group=128"))),
    (
        "4 bits, 8-bit tokens that are given",
        [
            ("Hopper liquid", "anybit-hopper", ("liquid",), ("int8-given",), LAUNCHED),
            ("plain", "anybit-hopper", ("liquid",), ("int8-given",), "plain"),
            ("humming int4 g64 int8", "humming", ("int4:group=64",), ("int8-given",), ""),
            ("humming int4 g128 fp8", "humming", (FOUR,), ("fp8-given",), ""),
            ("quack int4 g128 fp8", "quack", (FOUR,), ("fp8-given",), ""),
            ("quack folded fp8", "quack", (f"{FOUR} folded",), ("fp8-given",), ""),
            ("cuBLAS fp8", "cublas", ("fp8 tensorwise",), ("fp8-given",), ""),
            ("cuBLAS", "cublas", HALVES, HALVES, ""),
        ],
    ),
    (
        "4 bits, tokens quantized to int8 in the time, Triton",
        [
            ("Triton liquid", "anybit-triton", ("liquid",), ("int8",), ""),
            ("humming int4 g64", "humming", ("int4:group=64",), ("int8",), ""),
            ("cuBLAS", "cublas", HALVES, HALVES, ""),
        ],
    ),
    (
        "8-bit weights, 8-bit tokens that are given",
        [
            ("Hopper", "anybit-hopper", ("int8",), ("int8-given",), LAUNCHED),
            ("plain", "anybit-hopper", ("int8",), ("int8-given",), "plain"),
            ("humming", "humming", ("int8",), ("int8-given",), ""),
            ("cuBLAS int8", "cublas", INT8, ("int8-given",), ""),
            ("cuBLAS fp8", "cublas", ("fp8 tensorwise",), ("fp8-given",), ""),
            ("cuBLAS", "cublas", HALVES, HALVES, ""),
        ],
    ),
]
ALONE: list[tuple[str, list[Column]]] = [  # no other package has the same bits
    (
        "sparse, and nf4",
        [
            ("Hopper sparse", OURS, ("sparse",), HALVES, LAUNCHED),
            ("plain", OURS, ("sparse",), HALVES, "plain"),
            ("Triton sparse", "anybit-triton", ("sparse",), HALVES, ""),
            ("bitsandbytes nf4 g64", "bitsandbytes", ("nf4:group=64",), HALVES, ""),
            ("cuBLAS", "cublas", HALVES, HALVES, ""),
        ],
    ),
    (
        "Other formats, 8-bit tokens that are given",
        [
            ("sparse@int8", OURS, ("sparse",), ("int8-given",), LAUNCHED),
            ("int4@fp8", OURS, ("int4",), ("fp8-given",), LAUNCHED),
            ("fp6@fp8", OURS, ("fp6",), ("fp8-given",), LAUNCHED),
            ("cuBLAS fp8", "cublas", ("fp8 tensorwise",), ("fp8-given",), ""),
            ("cuBLAS", "cublas", HALVES, HALVES, ""),
        ],
    ),
    (
        "2-bit codebooks, groups of 128",
        [
            ("Hopper m1v4", OURS, ("codebook:m=1,v=4,group=128",), HALVES, LAUNCHED),
            ("Hopper m2v8", OURS, ("codebook:group=128",), HALVES, LAUNCHED),
            ("Triton m1v4", "anybit-triton", ("codebook:m=1,v=4,group=128",), HALVES, ""),
            ("Triton m2v8", "anybit-triton", ("codebook:group=128",), HALVES, ""),
            ("cuBLAS", "cublas", HALVES, HALVES, ""),
        ],
    ),
]


def main() -> None:
    made, missing = pages()
    stale = {path: text for path, text in made.items() if path.read_text() != text}
    for path, text in stale.items():
        print(path.relative_to(DOCS.parent))
        if "--check" not in sys.argv:
            path.write_text(text)
    if missing:
        raise SystemExit("\n".join(missing))
    if stale and "--check" in sys.argv:
        raise SystemExit("say something else than benchmarks/results; run: python docs/tables.py")


def pages() -> tuple[dict[Path, str], list[str]]:
    """Every page with its tables and figures made anew, and which figures have no measurement."""
    found = results.cells()
    tables = {
        "losses": losses(found),
        "tables": "\n\n".join(table(found, *t) for t in (*TABLES, *ALONE)),
        **paper_tables.made(),
        **aims.made(),
    }
    missing: list[str] = []
    made = {}
    for path in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]:
        figures = partial(figure, missing=missing, page=path.name)
        made[path] = FIGURE.sub(figures, filled(path.read_text(), tables))
    return made, missing


def filled(page: str, tables: dict[str, str]) -> str:
    for name in re.findall(r"<!-- (\w+), written by docs/tables.py -->", page):
        if tables[name]:  # nothing was measured: what stands there stays
            page = replaced(page, name, tables[name])
    return page


FIGURE = re.compile(r"<!-- =(.*?) -->(.*?)<!-- \. -->", re.S)


def figure(found: re.Match[str], missing: list[str], page: str) -> str:
    try:
        value = eval(found[1], vars(results).copy())
    except LookupError as error:
        missing.append(f"{page}: {error.args[0]}; change the text, or measure")
        return found[0]
    text = value if isinstance(value, str) else results.number(value)
    return f"<!-- ={found[1]} -->{text}<!-- . -->"


def table(cells: dict[Cell, list[Row]], title: str, columns: list[Column]) -> str:
    names = [column[0] for column in columns]
    lines = [f"### {title}", "", "| weight | M | " + " | ".join(names) + " |"]
    lines.append("|---|--:" + "|--:" * len(names) + "|")
    for n, k in SHAPES:
        for m in TOKENS:
            found = [find(cells[n, k, m], column) for column in columns]
            name = f"{n}x{k}" if m == TOKENS[0] else ""
            lines.append(f"| {name} | {m} | " + " | ".join(map(shown, found)) + " |")
    return "\n".join(lines)


def losses(cells: dict[Cell, list[Row]]) -> str:
    """For every table with peers: cells won, level and lost, and which were lost to whom.

    Ours is the kernel that a layer gets: Hopper's where it was timed, else Triton's.
    """
    titles = ["", "cells", "faster", "level", "slower", "slower by the clock alone"]
    counts = [" | ".join(titles).join(("| ", " |")), "|---|" + "--:|" * 5]
    lost = []
    for title, columns in TABLES:
        ours = [c for c in columns if c[1].startswith("anybit") and c[4] != "plain"]
        theirs = [c for c in columns if not c[1].startswith("anybit")]
        verdicts, raw, where = [0, 0, 0], 0, []
        for n, k in SHAPES:
            here = []
            for m in TOKENS:
                mine = find(cells[n, k, m], ours[0]) or find(cells[n, k, m], ours[-1])
                others = [row for c in theirs if (row := find(cells[n, k, m], c))]
                if mine is None or not others:
                    continue
                ratio, name = max((against(mine, row), row["peer"]) for row in others)
                verdict = 0 if ratio < 1 - LEVEL else 2 if ratio > 1 + LEVEL else 1
                verdicts[verdict] += 1
                raw += float(mine["us"]) > (1 + LEVEL) * min(float(row["us"]) for row in others)
                if verdict == 2:
                    here.append(f"M={m} {ratio:.2f} ({name})")
            if here:
                where.append(f"    - {n}x{k}: {', '.join(here)}")
        counts.append(
            f"| {title} | {sum(verdicts)} | " + " | ".join(map(str, [*verdicts, raw])) + " |"
        )
        if where:
            lost += [f"- {title}", *where]
    return "\n".join([*counts, "", "Slower, and how many times the other's time:", "", *lost])


def replaced(page: str, name: str, text: str) -> str:
    begin, end = f"<!-- {name}, written by docs/tables.py -->", "<!-- end -->"
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end, 1)[1]}"


if __name__ == "__main__":
    main()
