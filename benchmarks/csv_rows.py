"""Rows of a benchmark as a CSV: its columns are those of the first row."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a file anew; what a later row lacks is empty."""
    path.write_text("")
    add_rows(path, rows)


def add_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows to a file: an empty one gets a line of their columns, any other must have it."""
    new = not path.exists() or not path.stat().st_size
    columns = [*rows[0]]
    with path.open("a+", newline="") as file:
        file.seek(0)
        if not new and (found := next(csv.reader(file))) != columns:
            raise SystemExit(
                f"{path} has the columns {','.join(found)}, and rows have {','.join(columns)}; "
                "name another file"
            )
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)
