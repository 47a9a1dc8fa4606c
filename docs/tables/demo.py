"""Put the table of the last `make demo` into docs/accuracy.md, and its plot into docs/img.

Run it after the demo: make demo && .venv/bin/python docs/tables/demo.py
"""

import json
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "out" / "demo"
BEGIN, END = "<!-- demo, written by docs/tables/demo.py -->", "<!-- end -->"


def scores() -> str:
    results = json.loads((DEMO / "results.json").read_text())
    dense = results["rows"][0]["perplexity"]
    lines = [
        "| format | bits per weight | checkpoint | perplexity | KL, nats | same top-1 |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in results["rows"]:
        change = "" if row["bits"] == 16 else f" ({row['perplexity'] / dense - 1:+.2%})"
        perplexity = f"{row['perplexity']:.3f}" if row["perplexity"] < 100 else "> 100"
        perplexity += change if row["perplexity"] < 2 * dense else ""
        lines.append(
            f"| `{row['spec']}` | {row['bits']:.2f} | {row['bytes'] / 1e6:.1f} MB | {perplexity} "
            f"| {row['kl']:.5f} | {row['agreement']:.1%} |"
        )
    about = (
        f"{results['tokens']:,} tokens from {results['documents']} modules of Python "
        f"{results['python']}'s standard library; torch {results['torch']}."
    )
    return "\n".join([*lines, "", about])


def main() -> None:
    page = ROOT / "docs" / "accuracy.md"
    before, old = page.read_text().split(BEGIN)
    after = old.split(END, 1)[1]
    page.write_text(f"{before}{BEGIN}\n\n{scores()}\n\n{END}{after}")
    shutil.copy(DEMO / "size_vs_kl.png", ROOT / "docs" / "img" / "size_vs_kl.png")


if __name__ == "__main__":
    main()
