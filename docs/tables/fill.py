"""Fill the tables of README.md and docs/ from benchmarks/results.

Each `*_tables.py` here makes some of them, and `claims.py` those of the papers' pages.

    python docs/tables/fill.py            after new measurements
    python docs/tables/fill.py --check    names the pages that are out of date

A table stands between <!-- NAME, written by docs/tables/fill.py --> and <!-- end -->, where NAME
is a key of `tables()`.
"""

import re
import sys
from pathlib import Path

import accuracy_tables
import claims
import codebook_tables
import cpu_tables
import engine_tables
import gpu_tables
import kernel_tables
import paper_tables
import peer_tables
import shape_tables

ROOT = Path(__file__).parents[2]


def main() -> None:
    stale = {path: text for path, text in pages().items() if path.read_text() != text}
    for path, text in stale.items():
        print(path.relative_to(ROOT))
        if "--check" not in sys.argv:
            path.write_text(text)
    if stale and "--check" in sys.argv:
        raise SystemExit("out of date with benchmarks/results; run: python docs/tables/fill.py")


def tables() -> dict[str, str]:
    """Every table by its name in the pages; "" where nothing was measured."""
    modules = (
        kernel_tables, peer_tables, shape_tables, codebook_tables, cpu_tables, accuracy_tables,
        engine_tables, gpu_tables, paper_tables, claims,
    )  # fmt: skip
    return {name: table for module in modules for name, table in module.tables().items()}


def pages() -> dict[Path, str]:
    """The text of every page, with its tables written anew."""
    found = tables()
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {path: filled(path.read_text(), found) for path in paths}


def filled(page: str, tables: dict[str, str]) -> str:
    for name in re.findall(r"<!-- (\w+), written by docs/tables/fill.py -->", page):
        if tables[name]:  # else keep the old table: nothing was measured
            begin, end = f"<!-- {name}, written by docs/tables/fill.py -->", "<!-- end -->"
            before, rest = page.split(begin)
            page = f"{before}{begin}\n\n{tables[name]}\n\n{end}{rest.split(end, 1)[1]}"
    return page


if __name__ == "__main__":
    main()
