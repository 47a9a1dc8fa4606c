"""Count tokens of Python by folder, and words of pages: `make size`.

No formatter changes the count: comments, docstrings, line ends and commas before a closing bracket
are no tokens here. Python 3.12 and later count the parts of f-strings apart.
"""

import io
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENDS = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}  # a statement begins after one
LAYOUT = ENDS | {tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER}


def count(source: str) -> int:
    """Tokens of a file's code."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    total, begins, last = 0, True, ""
    for token, following in zip(tokens, [*tokens[1:], tokens[-1]], strict=True):
        if token.type in LAYOUT:
            begins = begins or token.type in ENDS
            continue
        docstring = begins and token.type == tokenize.STRING and following.type in LAYOUT
        comma = last == "," and token.string in (")", "]", "}")
        total += (not docstring) - comma
        begins, last = False, token.string
    return total


def main() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    tokens: Counter[str] = Counter()
    words: Counter[str] = Counter()
    for path in map(Path, listed.stdout.splitlines()):
        text = (ROOT / path).read_text(encoding="utf-8")
        if path.suffix == ".md":
            words[path.parts[0] if len(path.parts) > 1 else "pages at the top"] += len(text.split())
            continue
        tokens[path.parts[0]] += (size := count(text))
        if path.parts[0] == "anybit":
            tokens["/".join(path.parts[:2])] += size
    for counted, unit in ((tokens, "tokens"), (words, "words ")):
        for folder, number in counted.most_common():
            print(f"{number:9,} {unit}  {folder}")


if __name__ == "__main__":
    main()
