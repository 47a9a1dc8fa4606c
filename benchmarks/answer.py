"""Draw docs/img/answer.svg: a question to `anybit chat`, and what a real model answers.

    python benchmarks/answer.py MODEL "How do I reverse a list in Python? Two ways, briefly."

The answer is greedy. What the terminal shows is drawn as it is, but for lines of progress.
"""

import os
import pty
import re
import select
import sys
from html import escape
from pathlib import Path
from textwrap import wrap

OUT = Path(__file__).parents[1] / "docs/img/answer.svg"
COLUMNS, WIDTH, HEIGHT = 88, 8.43, 20  # characters of a line, and pixels of one


def main() -> None:
    model, question = sys.argv[1:]
    command = ["anybit", "chat", model, "--temperature", "0", "--max-tokens", "300"]
    shown = answered(command, question)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown).replace("\r", "")
    _, asked, answer = text.rpartition(f"> {question}\n")
    lines = [
        f"$ anybit chat {Path(model).name}",
        asked.strip(),
        *answer.removesuffix("> ").rstrip().split("\n"),
    ]
    OUT.write_text(drawn(lines))


def answered(command: list[str], question: str) -> str:
    """What a terminal gets until the second prompt."""
    child, terminal = pty.fork()
    if not child:
        os.environ["TERM"] = "dumb"
        os.execvp(command[0], command)
    out, prompts = b"", 0
    while prompts < 2:
        if not select.select([terminal], [], [], 300)[0]:
            raise SystemExit("no answer within 5 minutes")
        out += os.read(terminal, 1 << 16)
        if out.endswith(b"> "):
            prompts += 1
            os.write(terminal, b"\x04" if prompts == 2 else f"{question}\n".encode())
    os.waitpid(child, 0)
    return out.decode()


def drawn(lines: list[str]) -> str:
    """Lines as an SVG, long ones broken; what was typed is bold, and the last line grey."""
    rows = []
    for number, line in enumerate(lines):
        style = ' font-weight="bold"' if number < 2 else ""
        style = ' fill="#9aa5b1"' if number == len(lines) - 1 else style
        rows += [(part, style) for part in wrap(line, COLUMNS, drop_whitespace=False) or [""]]
    width, height = COLUMNS * WIDTH + 32, len(rows) * HEIGHT + 32
    texts = "\n".join(
        f'<text x="16" y="{30 + HEIGHT * row}" xml:space="preserve"{style}>{escape(part)}</text>'
        for row, (part, style) in enumerate(rows)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        'font-family="monospace" font-size="14" fill="#e4e7eb">\n'
        f'<rect width="100%" height="100%" rx="8" fill="#1f2933"/>\n{texts}\n</svg>\n'
    )


if __name__ == "__main__":
    main()
