"""Calls as `<function=NAME><parameter=KEY>VALUE</parameter></function>`, as models write them."""

import ast
import json
import re
from contextlib import suppress
from typing import Any, NoReturn

from anybit.engine.references import followed
from anybit.engine.schemas import kind, kinds
from anybit.errors import InvalidInput

OPEN = ("<tool_call>", "<seed:tool_call>", "<function=")
CLOSE = ("</function>", "</tool_call>", "</seed:tool_call>")
MARKS = re.compile("|".join((*OPEN, *CLOSE, "</parameter/?>")))
LONGEST = max(map(len, (*OPEN, *CLOSE, "</parameter/>"))) - 1
HEADER = re.compile(r"[^>\n]*>?")
PARAMETER = re.compile(r"<parameter=([^>\n]*)>")
END = re.compile(r"\n?</parameter/?>")
BLANK = re.compile(r"\s*")
BEGINS = {"[": "array", "{": "object"}
DECODER = json.JSONDecoder(parse_int=lambda digits: 0)


class FunctionCall:
    """A call's text behind `<function=`, read as it grows.

    Values may hold the marks. So an end mark ends the call behind a parameter's end, or in front of
    another mark of a call, or of nothing; but not in a string of JSON, which ends behind it.
    """

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        self.tools = tools
        self._inside: tuple[str, int] | None = None  # the first text that ended in such a string
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
            if mark[0] in OPEN + CLOSE and (self._end is not None or self._closed):
                whole, at = "".join(self._parts), self._length
                if self._end is not None:
                    whole = whole[: self._end]
                elif mark[0] in CLOSE:
                    at += size
                if (call := self._ended(whole, at)) is not None:
                    return call
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
        if self._inside is not None and cut_off(text, self.tools) is not None:
            return self._first()
        if self._header and self._closed and not self._tail.strip():
            return text, ""
        begin, end = self._ends
        return (text[:begin], text[end:]) if end else None

    def _ended(self, whole: str, at: int) -> tuple[str, str] | None:
        """The call's text and what stands behind it at `at`; None if that is in a string."""
        broken = cut_off(whole, self.tools)
        if broken:
            self._inside = self._inside or (whole, at)
            return None
        return (whole, self.text[at:]) if broken is None or self._inside is None else self._first()

    def _first(self) -> tuple[str, str]:
        """The first end, as what seemed to be a string never became one of JSON."""
        assert self._inside is not None
        whole, at = self._inside
        return whole, self.text[at:]

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
    schema = schema_of(name, tools)
    types, rest = properties(schema), schema.get("additionalProperties", {})
    found = parameters_in(body, schema)
    arguments: dict[str, str] = {}
    stops = [begin for _, begin, _, _ in found[1:]] + [len(body)]
    for (key, _, begin, json_end), stop in zip(found, stops, strict=False):
        value = body[begin:stop]
        ends = list(END.finditer(value, max(json_end - begin, 0)))
        value = value[: ends[-1].start()] if ends else value.rstrip(" \t").removesuffix("\n")
        while ends and len(ends) > 1 and value.rstrip().endswith(("</parameter>", "</parameter/>")):
            ends.pop()  # the mark is repeated
            value = value[: ends[-1].start()]
        arguments[key] = typed(value.removeprefix("\n"), types.get(key, rest), schema)
    parts = (f"{json.dumps(key, ensure_ascii=False)}: {text}" for key, text in arguments.items())
    return name, f"{{{', '.join(parts)}}}"


def schema_of(name: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
    functions = (tool["function"] for tool in tools)
    return next((f.get("parameters") for f in functions if f["name"] == name), None) or {}


def cut_off(text: str, tools: list[dict[str, Any]]) -> bool | None:
    """Whether a call's text ends in a string of JSON; None if its last value is whole, or no JSON.

    False: it is broken otherwise.
    """
    header = HEADER.match(text)
    assert header is not None
    schema, body = schema_of(name_of(header[0].removesuffix(">")), tools), text[header.end() :]
    found = parameters_in(body, schema)
    return {-1: True, -2: False}.get(found[-1][3]) if found else None


def parameters_in(body: str, schema: Any) -> list[tuple[str, int, int, int]]:
    """Of each parameter its key, where its mark begins and ends, and its `json_end`."""
    types, rest = properties(schema), schema.get("additionalProperties", {})
    found: list[tuple[str, int, int, int]] = []
    seen: set[str] = set()
    at = 0
    while mark := PARAMETER.search(body, at):
        key, before = name_of(mark[1]), body[: mark.start()].rstrip(" \t")
        at = mark.end()
        ended = not before.strip() or before.rstrip().endswith(("</parameter>", "</parameter/>"))
        if ended or (before.endswith("\n") and key in types and key not in seen):
            end = json_end(body, at, kinds(types.get(key, rest), schema))
            found.append((key, mark.start(), at, end))
            seen.add(key)
            at = max(at, end)
    return found


def json_end(body: str, at: int, wanted: frozenset[str]) -> int:
    """Where a list or an object that begins there ends; 0: there is none.

    -1: The text ends in a string of it. -2: It is no JSON otherwise.
    """
    blank = BLANK.match(body, at)
    assert blank is not None
    if BEGINS.get(body[blank.end() : blank.end() + 1]) not in wanted:
        return 0
    try:
        return DECODER.raw_decode(body, blank.end())[1]
    except json.JSONDecodeError as error:
        return -1 if error.msg.startswith("Unterminated string") else -2
    except RecursionError:
        return -2


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
    raise InvalidInput(f"{constant} is not JSON")
