"""Calls as a name, and `<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`, as GLM writes them."""

import json
import re
from typing import Any

from anybit.serve.functions import properties, schema_of, typed

KEY, END, CLOSE = "<arg_key>", "</arg_value>", "</tool_call>"
NAME = re.compile(r"[^\s<]*")
ARGUMENT = re.compile(  # in time that grows as the text does
    rf"{KEY}((?:(?!</?arg_key>).)*)</arg_key>\s*<arg_value>(.*?)(?:{END}(?=\s*(?:{KEY}|\Z))|\Z)",
    re.DOTALL,
)


class KeyedCall:
    """A call's text behind `<tool_call>`, read as it grows.

    Values may hold the marks. So an end mark ends the call only behind a value's end, or a name.
    """

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        self.tools = tools
        self._parts: list[str] = []
        self._tail = ""  # what may be the beginning of an end mark

    @property
    def text(self) -> str:
        """All that was read."""
        return "".join(self._parts) + self._tail

    def feed(self, text: str) -> tuple[str, str] | None:
        """Read on; the call's text, and what stands behind it, once it has ended."""
        self._tail += text
        while (at := self._tail.find(CLOSE)) >= 0:
            self._parts.append(self._tail[:at])
            whole, self._tail = "".join(self._parts), self._tail[at + len(CLOSE) :]
            if KEY not in whole or whole.rstrip().endswith(END):
                return whole, self._tail
            self._parts.append(CLOSE)
        cut = max(len(self._tail) - len(CLOSE) + 1, 0)
        self._parts.append(self._tail[:cut])
        self._tail = self._tail[cut:]
        return None

    def finish(self) -> tuple[str, str] | None:
        """The same when no more follows; None if the call is not whole."""
        text = self.text
        whole, mark, rest = text.rpartition(CLOSE)
        if mark:  # a value's end is missing
            return whole, rest
        known = {tool["function"]["name"] for tool in self.tools}
        return (text, "") if text.rstrip().endswith(END) or text.strip() in known else None


def keyed(text: str, tools: list[dict[str, Any]]) -> tuple[str, str]:
    """Name and arguments, as JSON, of a call's text behind `<tool_call>`."""
    text = text.lstrip()
    header = NAME.match(text)
    assert header is not None
    schema = schema_of(header[0], tools)
    types, rest = properties(schema), schema.get("additionalProperties", {})
    found = {
        (key := each[1].strip()): typed(each[2], types.get(key, rest), schema)
        for each in ARGUMENT.finditer(text, header.end())
    }
    parts = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in found.items())
    return header[0], f"{{{', '.join(parts)}}}"
