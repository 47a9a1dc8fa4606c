"""docs/models.md: what became of every architecture, in a table."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import transformers

from tests.models.row import Row

OUTCOMES = ("equal", "refused", "wrong", "-")
HEAD = """# Models

<!-- Written by `make test-models`. -->

Tiny random models of {count} architectures of transformers {version} went through anybit, {images}
of them with an image beside the tokens:

{steps}

A cell is one of these:

- **equal**: the outputs are those of the dense model, whose weights the format holds exactly here,
  and every stored tensor is bit for bit the one that was quantized in memory.
- **refused**: an error of anybit's says so before any work; the reasons are below.
- **wrong**: another result, or a failure in the middle; a bug.
- **-**: does not apply: calibration of a model without tokens as its input, the engine for a model
  that is not a causal language model, and what follows after a refusal in memory.

"Quantized" is the share of the weights in matrices, embeddings and heads aside; what is left are
convolutions, routers, and layers in a form of their own.
"""
SAID = {
    "memory": "quantized in memory",
    "load": "saved, and read by `anybit.load`",
    "from_pretrained": "saved, and read by `from_pretrained`",
    "on_load": "quantized by `from_pretrained` while loading the dense checkpoint",
    "stream": "quantized from file to file",
    "gptq": "calibrated with GPTQ in memory",
    "gptq_stream": "calibrated with GPTQ from file to file; the tensors are those of gptq",
    "engine": "run by `anybit.LLM`, which must write the tokens that transformers does",
}


def page(rows: Sequence[Row], steps: Sequence[str]) -> str:
    """The page, as Markdown."""
    run = [row for row in rows if row.unable is None]
    parts = [
        HEAD.format(
            count=len(run),
            images=sum(row.image for row in run),
            version=transformers.__version__,
            steps="\n".join(f"- {step}: {SAID[step]}" for step in steps),
        ),
        "## Counts\n\n" + count_table(run, steps),
        "## Architectures\n\n" + row_table(run, steps),
    ]
    for kind, title in (("refused", "Refusals"), ("wrong", "Wrong")):
        if text := reasons(run, kind):
            parts.append(f"## {title}\n\n{text}")
    if unable := [row for row in rows if row.unable is not None]:
        lines = [f"- {row.architecture}: {quoted(row.unable or '')}" for row in unable]
        parts.append(
            f"## Not tried\n\ntransformers did not run the tiny form of {len(unable)} more:\n\n"
            + "\n".join(lines)
        )
    return "\n\n".join(part.strip() for part in parts) + "\n"


def counts(rows: Iterable[Row]) -> Counter[str]:
    """Rows by their worst cell; "not tried" where transformers cannot run the model."""
    worst = ("wrong", "refused", "equal")
    return Counter(
        "not tried" if row.unable is not None
        else next(kind for kind in worst if kind in row.cells.values())
        for row in rows
    )  # fmt: skip


def count_table(rows: Sequence[Row], steps: Sequence[str]) -> str:
    cells = {step: Counter(row.cells.get(step, "-") for row in rows) for step in steps}
    lines = [[step, *(str(cells[step][kind]) for kind in OUTCOMES)] for step in steps]
    whole = counts(rows)
    lines.append(["all steps of a row", *(str(whole[kind]) for kind in OUTCOMES[:3]), ""])
    return table(["", *OUTCOMES], lines)


def row_table(rows: Sequence[Row], steps: Sequence[str]) -> str:
    lines = []
    for row in sorted(rows, key=lambda row: row.architecture):
        share = "-" if row.quantized is None else f"{row.quantized:.0%}"
        family, kind = parted(row.architecture)
        lines.append([family, kind, share, *(row.cells.get(step, "-") for step in steps)])
    return table(["Architecture", "Class", "Quantized", *steps], lines)


def parted(architecture: str) -> tuple[str, str]:
    """LlamaForCausalLM -> Llama, ForCausalLM."""
    found = re.match(r"(.+?)((?:For|LMHead|WithLMHead|Model).*)", architecture)
    return (found[1], found[2]) if found else (architecture, "")


def reasons(rows: Iterable[Row], kind: str) -> str:
    """Notes of one kind, those that differ in names and numbers only as one."""
    found: dict[tuple[str, str], list[tuple[Row, str]]] = defaultdict(list)
    for row in rows:
        for step, note in row.notes.items():
            if row.cells.get(step) == kind:
                found[step, re.sub(r"[\w.]*[\d._][\w.]*", "", note)].append((row, note))
    lines = []
    for (step, _), cases in sorted(found.items(), key=lambda item: -len(item[1])):
        names = ", ".join(row.architecture for row, _ in cases)
        lines.append(f"- {step}, {quoted(cases[0][1])}: {names}")
    return "\n".join(lines)


def quoted(text: str, length: int = 240) -> str:
    """A message on one line, as code."""
    text = text if len(text) <= length else text[: length - 3] + "..."
    return "`" + text.replace("`", "'").replace("\n", " ") + "`"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
