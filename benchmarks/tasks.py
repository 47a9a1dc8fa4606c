"""Two tasks that perplexity hides: functions that pass their tests, and tool calls that are right.

    python benchmarks/tasks.py MODEL.gguf build/study/* --out benchmarks/results/h200_tasks.csv
    python benchmarks/tasks.py models/pico --device cpu --problems 4 --calls 4 --out rows.csv

MODEL: what `anybit.LLM` takes, quantized or not (`study.py --keep` makes such folders). Every model
answers greedily, in its own chat template, all prompts in one batch; weights are decoded once, and
multiplied in 16 bits.

`problems.txt` has functions: a head with a docstring, a body that passes, and tests. An answer's
tests run in a process of its own, which can neither write files nor start programs nor reach a
network. `calls.json` has tools and prompts: a call counts as valid if the server's reader finds it,
it is of a tool that was offered, and its arguments match the tool's schema; as right if it also is
of the tool that was meant, with the values that the prompt names.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from csv_rows import add_rows
from study import commit, facts

from anybit import LLM, SamplingParams
from anybit.serve.tools import FAMILIES, family_of

HERE = Path(__file__).parent
OFFERED = 4  # tools of a prompt
LIMIT = 10  # seconds that tests may take
# Nothing that an answer does may reach beyond its process.
GUARD = """
import sys
def guard(event, args):
    out = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    if out or event.startswith(("socket.", "subprocess.", "os.", "shutil.", "ctypes.", "pty.")):
        if event not in ("os.listdir", "os.scandir"):  # of imports
            raise PermissionError(event)
sys.addaudithook(guard)
"""
TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda x: isinstance(x, str),
    "boolean": lambda x: isinstance(x, bool),
    "integer": lambda x: isinstance(x, int) and not isinstance(x, bool),
    "number": lambda x: isinstance(x, int | float) and not isinstance(x, bool),
    "array": lambda x: isinstance(x, list),
    "object": lambda x: isinstance(x, dict),
}


class Problem(NamedTuple):
    """A function's head with its docstring, a body that is right, and tests."""

    head: str
    body: str
    tests: str

    def prompt(self) -> str:
        return (
            "Complete this Python function. Answer with the whole function in one code block, and "
            f"nothing else.\n\n```python\n{self.head}\n```"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+")
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--problems", type=int, help="the first so many (all)")
    parser.add_argument("--calls", type=int, help="the first so many (all)")
    parser.add_argument("--tokens", type=int, default=384, help="of an answer at most (384)")
    parser.add_argument("--out", type=Path, required=True, help="the .csv file to add rows to")
    args = parser.parse_args()
    asked = problems()[: args.problems], prompts()[: args.calls]
    for path in args.models:
        start = time.perf_counter()
        room = {} if args.device == "cpu" else {"kv_bytes": 4 << 30}  # a few models have room
        llm = LLM(path, device=args.device, keep="decoded", max_itl=None, **room)
        found = measured(llm, *asked, args.tokens)
        took = {"seconds": round(time.perf_counter() - start, 1)}
        row = {"model": path.name} | found | took | facts(str(llm.device)) | {"commit": commit()}
        add_rows(args.out, [row])
        print(*row.values(), flush=True)
        del llm


def measured(
    llm: LLM, asked: list[Problem], calls: list[dict[str, Any]], most: int
) -> dict[str, Any]:
    """Shares of answers that are right, with standard errors."""
    family = FAMILIES[family_of(llm.tokenizer.chat_template or "") or "hermes"]
    marks = llm.tokenizer.convert_tokens_to_ids(list(family.marks))
    shown = [mark for mark in marks if mark in llm.special]
    texts = [llm.encode_chat(message(one.prompt())) for one in asked]
    texts += [llm.encode_chat(message(one["text"]), tools=one["tools"]) for one in calls]
    params = SamplingParams(temperature=0.0, max_tokens=most, shown=shown)
    outputs = [out.completions[0].text for out in llm.generate(texts, params, show_progress=False)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        answers = outputs[: len(asked)]
        passed = list(pool.map(lambda one, text: passes(code_of(text), one.tests), asked, answers))
    valid, right = list[bool](), list[bool]()
    for one, text in zip(calls, outputs[len(asked) :], strict=True):
        found = calls_in(text, family.reader(one["tools"]))
        valid.append(bool(found) and all(matches(*call, one["tools"]) for call in found))
        right.append(valid[-1] and (meant(one) in (wanted(call, one) for call in found)))
    out: dict[str, Any] = {}
    for name, hits in (("pass1", passed), ("valid", valid), ("right", right)):
        n = max(len(hits), 1)
        mean = sum(hits) / n
        out |= {name: round(mean, 4), f"{name}_error": round((mean * (1 - mean) / n) ** 0.5, 4)}
    return {"problems": len(asked), "calls": len(calls)} | out


def message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


# Functions.


def problems() -> list[Problem]:
    blocks = (HERE / "problems.txt").read_text("utf-8").split("\n%%\n")
    return [Problem(*(part.strip("\n") for part in block.split("\n%\n"))) for block in blocks]


def code_of(answer: str) -> str:
    """The first code block of an answer, or all of it."""
    found = re.search(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", answer, re.S)
    return found[1] if found else answer


def passes(code: str, tests: str) -> bool:
    """Whether tests hold after some code."""
    program = f"{GUARD}\n{code}\n{tests}\nprint('passed', 'all', flush=True)\n"
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", program], capture_output=True, timeout=LIMIT,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and done.stdout.endswith(b"passed all\n")


# Tool calls.


def prompts() -> list[dict[str, Any]]:
    """Each with its tool and those that follow it, as the n-th of them."""
    given = json.loads((HERE / "calls.json").read_text("utf-8"))
    tools = given["tools"]
    names = [tool["function"]["name"] for tool in tools]
    for number, one in enumerate(given["prompts"]):
        first = names.index(one["tool"]) - number % OFFERED
        one["tools"] = [tools[(first + i) % len(tools)] for i in range(OFFERED)]
    prompts: list[dict[str, Any]] = given["prompts"]
    return prompts


def calls_in(text: str, reader: Any) -> list[tuple[str, str]]:
    """(name, arguments) of the calls that the server would report."""
    found: dict[int, list[str]] = {}
    for piece in [*reader.feed(text), *reader.feed("", last=True)]:
        if piece.kind == "call":
            call = found.setdefault(piece.call, ["", ""])
            call[0] += piece.name or ""
            call[1] += piece.text
    return [(name, arguments) for name, arguments in found.values()]


def matches(name: str, arguments: str, tools: list[dict[str, Any]]) -> bool:
    """Whether a call is of one of the tools, and its arguments are as the schema says."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    try:
        return name in schemas and fits(json.loads(arguments or "{}"), schemas[name])
    except ValueError:
        return False


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is as a schema of `calls.json` says: no other words are known."""
    known = {"type", "enum", "items", "properties", "required", "description"}
    assert set(schema) <= known | {"additionalProperties"}, schema
    if not TYPES[schema["type"]](value) or value not in schema.get("enum", [value]):
        return False
    if schema["type"] == "array":
        return all(fits(item, schema["items"]) for item in value)
    if schema["type"] == "object":
        inner = schema["properties"]
        complete = set(schema["required"]) <= set(value) <= set(inner)
        return complete and all(fits(item, inner[key]) for key, item in value.items())
    return True


def meant(one: dict[str, Any]) -> tuple[str, Any]:
    return one["tool"], folded(one["arguments"])


def wanted(call: tuple[str, str], one: dict[str, Any]) -> tuple[str, Any]:
    """A valid call's tool, and its values of the arguments that the prompt names."""
    arguments = json.loads(call[1] or "{}")
    return call[0], folded({key: arguments.get(key) for key in one["arguments"]})


def folded(value: Any) -> Any:
    """A value without regard to case, or to the full stop at a sentence's end."""
    if isinstance(value, dict):
        return {key: folded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [folded(item) for item in value]
    return value.casefold().rstrip(".") if isinstance(value, str) else value


if __name__ == "__main__":
    main()
