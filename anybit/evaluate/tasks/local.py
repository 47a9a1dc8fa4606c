"""Documents of this folder's tasks, made from the held-out modules of the standard library.

lm-eval imports this file by its path, for the YAML files beside it; it is no module of the package.
"""

import ast
import random
from typing import Any

from anybit.evaluate.corpus import held_out_text
from anybit.evaluate.generation import function_prompts, parses, rouge_l

PROMPTS = 200
CHOICES = 4
BEFORE = 40  # lines that a question about the next line shows
SHORTEST = 12  # characters of a line worth asking for


def functions(**metadata: Any) -> dict[str, Any]:
    """The beginnings of functions: the lines before them, signature and docstring."""
    prompts = function_prompts(held_out_text(), PROMPTS)
    return split([{"text": p.before + p.head, "head": p.head} for p in prompts])


def function_parses(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    return {"parses": float(parses(doc["head"], results[0]))}


def docstrings(**metadata: Any) -> dict[str, Any]:
    """Signatures of functions, and the first paragraph of their docstrings."""
    out = []
    for _, source in held_out_text():
        lines = source.splitlines(keepends=True)
        for node in ast.walk(ast.parse(source)):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if not isinstance(node, ast.FunctionDef) or not text:
                continue
            quote = node.body[0].lineno - 1
            if lines[quote].lstrip().startswith('"""'):
                start = max(0, node.lineno - 1 - BEFORE)
                indent = lines[quote][: len(lines[quote]) - len(lines[quote].lstrip())]
                before = "".join(lines[start:quote]) + indent + '"""'
                out.append({"text": before, "summary": " ".join(text.split("\n\n")[0].split())})
    return split(out[:: max(1, len(out) // PROMPTS)][:PROMPTS])


def docstring_rouge(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    first = " ".join(results[0].split('"""')[0].split("\n\n")[0].split())
    return {"rougeL": rouge_l(first, doc["summary"])}


def next_lines(**metadata: Any) -> dict[str, Any]:
    """Which line comes next: the true one, or lines of the same indentation elsewhere."""
    out, draw = [], random.Random(0)
    for _, source in held_out_text():
        lines = source.splitlines()
        usable = [i for i, line in enumerate(lines) if len(line.strip()) >= SHORTEST]
        for at in draw.sample(usable, min(len(usable), PROMPTS // 16)):
            true = lines[at]
            width = len(true) - len(true.lstrip())
            others = {
                line
                for line in (lines[i] for i in usable)
                if line != true and len(line) - len(line.lstrip()) == width
            }
            if at < 2 or len(others) < CHOICES - 1:
                continue
            choices = [true, *draw.sample(sorted(others), CHOICES - 1)]
            draw.shuffle(choices)
            out.append(
                {
                    "text": "\n".join(lines[max(0, at - BEFORE) : at]),
                    "choices": ["\n" + line for line in choices],
                    "answer": choices.index(true),
                }
            )
    return split(out[:PROMPTS])


def split(documents: list[dict[str, Any]]) -> dict[str, Any]:
    from datasets import Dataset

    return {"test": Dataset.from_list(documents)}
