"""docs/models.csv: what became of every architecture; docs/models.md: how many, step by step."""

import csv
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import transformers

from tests.models.row import Row

OUTCOMES = ("equal", "refused", "wrong", "-")
BEGIN, END = "<!-- counts, written by `make test-models` -->", "<!-- end -->"
SAID = {
    "memory": "quantized in memory",
    "load": "saved, and read by `anybit.load`",
    "from_pretrained": "saved, and read by `from_pretrained`",
    "on_load": "quantized by `from_pretrained` while loading",
    "stream": "quantized from file to file",
    "gptq": "calibrated with GPTQ in memory",
    "gptq_stream": "calibrated with GPTQ from file to file",
    "engine": "run by `anybit.LLM`, with transformers' tokens",
}


def write(rows: Sequence[Row], steps: Sequence[str], page: Path) -> None:
    """The table of counts in a page, and every row in the CSV beside it."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    new = f"{before}{BEGIN}\n\n{about(rows, steps)}\n\n{END}{rest.split(END, 1)[1]}"
    page.write_text(new, encoding="utf-8")
    with page.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["architecture", "tried", "quantized", *steps, "notes"])
        writer.writerows(line(row, steps) for row in sorted(rows, key=lambda r: r.architecture))


def line(row: Row, steps: Sequence[str]) -> list[str]:
    """A row of the CSV."""
    share = "" if row.quantized is None else f"{row.quantized:.0%}"
    notes = {"not tried": row.unable} if row.unable is not None else row.notes
    said = "; ".join(f"{step}: {shown(note)}" for step, note in notes.items())
    cells = ("" if row.unable is not None else row.cells.get(step, "-") for step in steps)
    return [row.architecture, "no" if row.unable is not None else "yes", share, *cells, said]


def about(rows: Sequence[Row], steps: Sequence[str]) -> str:
    run = [row for row in rows if row.unable is None]
    images = sum(row.image for row in run)
    cells = {step: Counter(row.cells.get(step, "-") for row in run) for step in steps}
    lines = [[SAID[step], *(str(cells[step][kind]) for kind in OUTCOMES)] for step in steps]
    whole = counts(run)
    lines.append(["all steps of an architecture", *(str(whole[kind]) for kind in OUTCOMES[:3]), ""])
    table = ["| step | " + " | ".join(OUTCOMES) + " |", "|---|" + "--:|" * len(OUTCOMES)]
    table += ["| " + " | ".join(cells_of) + " |" for cells_of in lines]
    return (
        f"{len(run)} architectures of transformers {transformers.__version__}, {images} of them "
        f"with an image beside the tokens; transformers did not run the tiny form of "
        f"{len(rows) - len(run)} more.\n\n" + "\n".join(table)
    )


def counts(rows: Iterable[Row]) -> Counter[str]:
    """Rows by their worst cell; "not tried" where transformers cannot run the model."""
    worst = ("wrong", "refused", "equal")
    return Counter(
        "not tried" if row.unable is not None
        else next(kind for kind in worst if kind in row.cells.values())
        for row in rows
    )  # fmt: skip


def shown(text: str, length: int = 240) -> str:
    """A message on one line."""
    text = re.sub(r"\s+", " ", text)
    return text if len(text) <= length else text[: length - 3] + "..."
