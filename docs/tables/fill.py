"""Fill the tables of README.md and docs/ from benchmarks/results, and draw the first picture.

Each `*_tables.py` here makes some of them.

    python docs/tables/fill.py            after new measurements
    python docs/tables/fill.py --check    names the pages that are out of date
    python docs/tables/fill.py --show build/results > tables.md

With --show, the tables of what was measured on another machine (benchmarks/README.md) are printed,
and no page is changed.

A table stands between <!-- NAME, written by docs/tables/fill.py --> and <!-- end -->, where NAME
is a key of `tables()`.
"""

import argparse
import re
import sys
from pathlib import Path

import accuracy_tables
import codebook_tables
import cpu_tables
import engine_tables
import first_tables
import gpu_tables
import paper_tables
import peer_tables
import results
import shape_tables

ROOT = Path(__file__).parents[2]


NAME = re.compile(r"<!-- (\w+), written by docs/tables/fill.py -->")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--show", type=Path, metavar="FOLDER", help="print tables of these files")
    args = parser.parse_args()
    if args.show:
        print(shown(args.show))
        return
    stale = {path: text for path, text in pages().items() if path.read_text() != text}
    for path, text in stale.items():
        print(path.relative_to(ROOT))
        if not args.check:
            path.write_text(text)
    if not args.check:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        import plot  # in which matplotlib is

        plot.first(ROOT / "docs" / "img")
    if stale and args.check:
        raise SystemExit("out of date with benchmarks/results; run: python docs/tables/fill.py")


def shown(folder: Path) -> str:
    """Every table that a folder's files make, page by page."""
    names = {path.name.partition("_")[0] for path in folder.glob("*_*.csv")}
    names -= {"cpu", "kv", "serving", "study", "tasks"}
    if len(names) > 1:
        raise SystemExit(f"{folder} has files of {', '.join(sorted(names))}; keep those of one GPU")
    empty, found = (tables_of(place, [*names, "gpu"][0]) for place in (folder / "none", folder))
    left, lines = {*gpu_tables.tables()}, []
    for path in page_files():
        for name in NAME.findall(path.read_text()):
            table = found.get(name)
            if table != empty.get(name) and name not in left:
                lines += [f"## {path.relative_to(ROOT)}: {name}", "", table, ""]
    if not lines:
        raise SystemExit(f"{folder} has no files of which tables of the pages are made")
    return "\n".join(lines)


def tables_of(folder: Path, device: str) -> dict[str, str]:
    """The tables of other files than those of the pages."""
    results.RESULTS, results.DEVICE = folder, device
    results.read.cache_clear()
    results.cells.cache_clear()
    return tables()


def tables() -> dict[str, str]:
    """Every table by its name in the pages; "" where nothing was measured."""
    modules = (
        first_tables, peer_tables, shape_tables, codebook_tables, cpu_tables, accuracy_tables,
        engine_tables, gpu_tables, paper_tables,
    )  # fmt: skip
    return {name: table for module in modules for name, table in module.tables().items()}


def pages() -> dict[Path, str]:
    """The text of every page, with its tables written anew."""
    found = tables()
    return {path: filled(path.read_text(), found) for path in page_files()}


def page_files() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(page: str, tables: dict[str, str]) -> str:
    for name in NAME.findall(page):
        if tables[name]:  # else keep the old table: nothing was measured
            begin, end = f"<!-- {name}, written by docs/tables/fill.py -->", "<!-- end -->"
            before, rest = page.split(begin)
            page = f"{before}{begin}\n\n{tables[name]}\n\n{end}{rest.split(end, 1)[1]}"
    return page


if __name__ == "__main__":
    main()
