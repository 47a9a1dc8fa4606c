"""The table of reports from other machines: docs/gpus.md."""

import json
from pathlib import Path

REPORTS = Path(__file__).parents[2] / "benchmarks" / "reports"
PEERS = ("anybit-triton", "anybit-mma", "anybit-hopper", "anybit-native")
TITLES = ("dense", "Triton", "mma", "Hopper", "native")


def tables() -> dict[str, str]:
    rows = [row for path in sorted(REPORTS.glob("*.json")) for row in rows_of(path)]
    if not rows:
        return {"gpus": "No report has come in yet."}
    head = "| machine | weight | format | M | " + " | ".join(TITLES) + " |"
    return {"gpus": "\n".join([head, "|---|---|---|--:|" + "--:|" * len(TITLES), *rows])}


def rows_of(path: Path) -> list[str]:
    """A line for each weight, format and number of tokens of a report."""
    report = json.loads(path.read_text("utf-8"))
    cells: dict[tuple[str, str, int], dict[str, float]] = {}
    dense: dict[tuple[str, int], float] = {}
    for row in report["rows"]:
        weight = f"{row['N']}x{row['K']}"
        if row["us"] is None:
            continue
        if row["peer"] in ("cublas", "torch"):
            dense[weight, row["M"]] = row["us"]
        elif row["peer"] != "anybit":  # what a layer gets is one of the others
            quantized = row["activation"] in ("int8", "fp8")
            scheme = row["format"] + (f"@{row['activation']}" if quantized else "")
            cells.setdefault((weight, scheme, row["M"]), {})[row["peer"]] = row["us"]
    link = f"[{report.get('gpu', report['system'])}](../benchmarks/reports/{path.name})"
    lines = []
    for (weight, scheme, m), found in cells.items():
        times = [dense.get((weight, m)), *(found.get(peer) for peer in PEERS)]
        texts = ["" if us is None else f"{us:.1f}" for us in times]
        lines.append(f"| {link} | {weight} | `{scheme}` | {m} | " + " | ".join(texts) + " |")
    return lines
