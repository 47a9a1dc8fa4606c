"""Calls as `<function=NAME><parameter=KEY>VALUE</parameter></function>`, as models write them."""

import ast
import json
import re
from contextlib import suppress
from typing import Any, NoReturn

from anybit.engine.schemas import followed, kind, kinds

OPEN, CLOSE = ("<tool_call>", "<function="), ("</function>", "</tool_call>")
MARKS = re.compile("|".join((*OPEN, *CLOSE, "</parameter/?>")))
LONGEST = max(map(len, (*OPEN, *CLOSE, "</parameter/>"))) - 1
HEADER = re.compile(r"[^>\n]*>?")
PARAMETER = re.compile(r"<parameter=([^>\n]*)>")
END = re.compile(r"\n?</parameter/?>")


class FunctionCall:
    """A call's text behind `<function=`, read as it grows.

    Values may hold the marks. So an end mark ends the call behind a parameter's end, or in front of
    another mark of a call, or of nothing.
    """

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._tail, self._length = "", 0  # what may be the beginning of a mark; what was read
        self._header = False  # whether it has been read
        self._closed = False  # whether all that was begun in it has ended
        self._end: int | None = None  # where an end mark stands that nothing has followed yet
        self._ends = (0, 0)  # where one begins and ends that text has followed

    @property
    def text(self) -> str:
        """All that was read."""
        return "".join(self._parts) + self._tail

    def feed(self, text: str) -> tuple[str, str] | None:
        """Read on; the call's text, and what stands behind it, once it has ended."""
        self._tail += text
        if not self._header:
            found = HEADER.match(self._tail)
            assert found is not None
            if found.end() == len(self._tail) and not found[0].endswith(">"):
                return None
            self._take(found.end())
            self._header = self._closed = True
        while mark := MARKS.search(self._tail):
            self._between(mark.start())
            size = len(mark[0])
            if mark[0] in OPEN + CLOSE and self._end is not None:
                return "".join(self._parts)[: self._end], self._tail
            if mark[0] in OPEN + CLOSE and self._closed:
                return "".join(self._parts), self._tail[size if mark[0] in CLOSE else 0 :]
            if mark[0] in CLOSE:
                self._end = self._length
                self._take(size)
                self._ends = self._end, self._length
            else:
                self._take(size)
                self._closed, self._end = mark[0] not in OPEN, None
        at = self._tail.rfind("<", max(len(self._tail) - LONGEST, 0))
        self._between(at if at >= 0 else len(self._tail))
        return None

    def finish(self) -> tuple[str, str] | None:
        """The same when no more follows; None if the call is not whole."""
        text = self.text
        if self._header and self._closed and not self._tail.strip():
            return text, ""
        begin, end = self._ends
        return (text[:begin], text[end:]) if end else None

    def _take(self, size: int) -> None:
        self._parts.append(self._tail[:size])
        self._tail, self._length = self._tail[size:], self._length + size

    def _between(self, size: int) -> None:
        """Take text that is no mark."""
        if self._tail[:size].strip():
            self._closed, self._end = False, None
        self._take(size)


def name_of(header: str) -> str:
    """A name as it stands in a mark."""
    return header.strip().strip("\"'")


def called(text: str, tools: list[dict[str, Any]]) -> tuple[str, str]:
    """Name and arguments, as JSON, of a call's text behind `<function=`."""
    header = HEADER.match(text)
    assert header is not None
    name, body = name_of(header[0].removesuffix(">")), text[header.end() :]
    functions = (tool["function"] for tool in tools)
    schema = next((f.get("parameters") for f in functions if f["name"] == name), None) or {}
    types, rest = properties(schema), schema.get("additionalProperties", {})
    found: list[tuple[str, int, int]] = []  # of each parameter: its key, and where it stands
    seen: set[str] = set()
    for mark in PARAMETER.finditer(body):
        key, before = name_of(mark[1]), body[: mark.start()].rstrip(" \t")
        ended = not before.strip() or before.rstrip().endswith(("</parameter>", "</parameter/>"))
        if ended or (before.endswith("\n") and key in types and key not in seen):
            found.append((key, mark.start(), mark.end()))
            seen.add(key)
    arguments: dict[str, str] = {}
    stops = [begin for _, begin, _ in found[1:]] + [len(body)]
    for (key, _, begin), stop in zip(found, stops, strict=False):
        value = body[begin:stop]
        ends = list(END.finditer(value))
        value = value[: ends[-1].start()] if ends else value.rstrip(" \t").removesuffix("\n")
        while ends and len(ends) > 1 and value.rstrip().endswith(("</parameter>", "</parameter/>")):
            ends.pop()  # the mark is repeated
            value = value[: ends[-1].start()]
        arguments[key] = typed(value.removeprefix("\n"), types.get(key, rest), schema)
    parts = (f"{json.dumps(key, ensure_ascii=False)}: {text}" for key, text in arguments.items())
    return name, f"{{{', '.join(parts)}}}"


def properties(schema: Any) -> dict[str, Any]:
    """The properties that a document declares, also through references and parts."""
    out: dict[str, Any] = {}
    for part in followed(schema, schema):
        declared = part.get("properties")
        out |= {} if not isinstance(declared, dict) else declared
    return out


def typed(text: str, schema: Any, root: Any) -> str:
    """A value as JSON, as its schema has it: JSON, or where it may be no string, one of Python."""
    wanted, text_of = kinds(schema, root), text.strip()
    with suppress(ValueError, RecursionError):
        value = json.loads(text_of, parse_constant=unread, parse_int=lambda digits: 0)
        if kind(value) in wanted - {"string"}:
            return text_of
    if "string" not in wanted:
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            value = ast.literal_eval(text_of)
            if kind(value) in wanted:
                return json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(text, ensure_ascii=False)


def unread(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
