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
    """Add rows to a file, which gets a line of their columns if it is empty."""
    new = not path.exists() or not path.stat().st_size
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)
