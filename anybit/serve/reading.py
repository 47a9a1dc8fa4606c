"""From a model's text to its parts, as the text grows: thoughts, content and tool calls."""

import json
import re
import string
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from anybit.serve.functions import FunctionCall, called, name_of
from anybit.serve.keyed import KeyedCall, keyed

SPACE = string.whitespace


@dataclass(frozen=True)
class Piece:
    """What has been added to a part. call: the tool call's number; name: at its beginning."""

    kind: Literal["reasoning", "content", "call"]
    text: str = ""
    call: int = -1
    name: str | None = None


class Reader(Protocol):
    """Reads one text."""

    @property
    def thinking(self) -> bool:
        """Whether what comes next is a thought."""

    def feed(self, text: str, last: bool = False) -> list[Piece]:
        """Take more of the text; last: no more follows."""


def cut(text: str, marks: tuple[str, ...]) -> tuple[str, str | None, str]:
    """What stands before the first of the marks, that mark, and the rest.

    Without a mark: what surely is not a part of one, None, and what may be its beginning.
    """
    found = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
    if found:
        at, _, mark = min(found)
        return text[:at], mark, text[at + len(mark) :]
    longest = min(max((len(mark) for mark in marks), default=1) - 1, len(text))
    for length in range(longest, 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return text[:-length], None, text[-length:]
    return text, None, ""


class Plain:
    """All of the text is content."""

    thinking = False

    def feed(self, text: str, last: bool = False) -> list[Piece]:
        return [Piece("content", text)] if text else []


class Thoughts:
    """Thoughts between two marks come first, and another reader reads the rest.

    inside: whether the prompt has opened them already. calls: what ends them, too: with it a call
    begins, of a model that has forgotten their end.
    """

    def __init__(
        self, open: str, close: str, inside: bool, rest: Reader, calls: tuple[str, ...] = ()
    ):
        self.open, self.close, self.rest, self.calls = open, close, rest, calls
        self.state = "inside" if inside else "before"
        self.held, self.begun = "", False  # whether the thoughts have begun
        self.blank: list[str] = []  # white space that was read ahead of all else

    @property
    def thinking(self) -> bool:
        return self.state == "inside"

    def feed(self, text: str, last: bool = False) -> list[Piece]:
        out: list[Piece] = []
        if self.state == "before" and text.isspace() and not last:
            self.blank.append(text)
            return out
        self.held += "".join([*self.blank, text])
        self.blank.clear()
        if self.state == "before":
            ahead = self.held.lstrip()
            if ahead.startswith(self.open):
                self.state, self.held = "inside", ahead[len(self.open) :]
            elif last or not self.open.startswith(ahead):
                self.state = "behind"
        if self.state == "inside":
            if not self.begun:
                self.held = self.held.lstrip()
            thought, mark, self.held = cut(self.held, (self.close, *self.calls))
            if mark in self.calls:
                self.held = f"{mark}{self.held}"
            if last and mark is None:
                thought, self.held = thought + self.held, ""
            if thought:
                self.begun = True
                out.append(Piece("reasoning", thought))
            if mark is not None:
                self.state = "gap"
        if self.state == "gap":  # line breaks between thoughts and content belong to neither
            self.held = self.held.lstrip("\n")
            self.state = "behind" if self.held else "gap"
        if self.state == "behind" or last:
            text, self.held = self.held, ""
            out += self.rest.feed(text, last)
        return out


class Collected:
    """Text up to a mark, as it arrives."""

    def __init__(self, mark: str):
        self.mark, self.tail = mark, ""
        self.parts: list[str] = []

    def feed(self, text: str) -> str | None:
        """Read on; what stands behind the mark, once that has come."""
        before, mark, rest = (self.tail + text).partition(self.mark)
        cut = len(before) if mark else max(len(before) - len(self.mark) + 1, 0)
        self.parts.append(before[:cut])
        self.tail = before[cut:]
        return rest if mark else None

    @property
    def text(self) -> str:
        return "".join(self.parts) + self.tail


class JsonCall:
    """A tool call's object {"name": ..., "arguments": {...}}, read as it grows.

    name: given when the object is the arguments themselves. passed: whether some of them have.
    """

    OUTSIDE, INSIDE = re.compile(r'["{}\[\]:,]'), re.compile(r'["\\]')  # of strings

    def __init__(self, name: str | None = None):
        self.name, self.ended, self.passed = name, False, False
        self._parts: list[str] = []  # all that was read
        self._depth, self._string, self._escaped = 0, False, False
        self._key: list[str] = []
        self._value: list[str] | None = None  # of the name, if that is read
        self._arguments: list[str] = []  # that have not passed
        self._bare = name is not None
        self._begun, self._whole = self._bare, False  # the arguments
        self._waits: bool | None = None  # whether they pass as a whole; None: not known yet
        self._in_value = False
        # The list that gets the text being read, if one does, and from where on it lacks it.
        self._sink = self._arguments if self._bare else None
        self._since = 0

    @property
    def text(self) -> str:
        """All that was read."""
        return "".join(self._parts)

    @property
    def inside(self) -> bool:
        """Whether the object has begun and not ended."""
        return self._depth > 0

    def feed(self, text: str) -> str:
        """Read on; the rest of the text behind the object's end."""
        at = self._since = 0
        while at < len(text) and not self.ended:
            if self._escaped:
                at, self._escaped = at + 1, False
                continue
            found = (self.INSIDE if self._string else self.OUTSIDE).search(text, at)
            if found is None:
                break
            at = found.end()
            if self._string:
                self._in_string(text, at)
            else:
                self._between_strings(text, at)
        end = at if self.ended else len(text)
        self._turn(text, end, self._sink)
        self._parts.append(text[:end])
        return text[end:]

    def news(self) -> str:
        """What has been added to the arguments since the last call."""
        if self._waits is None:
            self._arguments[:] = ["".join(self._arguments).lstrip()]
            if not self._arguments[0]:
                return ""
            # Some models write them as a string that holds JSON, or null if there are none.
            self._waits = self._arguments[0][0] in '"n'
        if self._waits and not self._whole:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        if self._waits and text:
            with suppress(ValueError):  # of a wrong escape: then as the model has written it
                text = json.loads(text, strict=False) or ""
            text = "" if text.strip() == "null" else text
        self.passed = self.passed or bool(text)
        return text

    def _turn(self, text: str, at: int, sink: list[str] | None) -> None:
        """Give the text before `at` to its list; what follows goes to `sink`."""
        if self._sink is not None:
            self._sink.append(text[self._since : at])
        self._sink, self._since = sink, at

    def _in_string(self, text: str, at: int) -> None:
        if text[at - 1] == "\\":
            self._escaped = True
            return
        self._string = False
        if self._sink is self._key:
            self._turn(text, at - 1, None)

    def _between_strings(self, text: str, at: int) -> None:
        char = text[at - 1]
        in_key = self._depth == 1 and not self._in_value and not self._bare
        if char == '"':
            self._string = True
            if in_key:
                self._key = []
                self._turn(text, at, self._key)
        elif char == ":" and in_key:
            self._in_value, key = True, "".join(self._key)
            if key in ("arguments", "parameters") and not self._begun:
                self._begun = True
                self._turn(text, at, self._arguments)
            elif key == "name" and self.name is None:
                self._value = []
                self._turn(text, at, self._value)
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.ended = self._depth == 0
            if self._sink is self._arguments and self._depth == (0 if self._bare else 1):
                self._whole = True
                self._turn(text, at, None)
        if (self._depth == 1 and char == ",") or self.ended:
            self._close(text, at - 1)

    def _close(self, text: str, end: int) -> None:
        """A value of the object has ended."""
        self._in_value = False
        if self._bare or self._sink is None:
            return
        if self._sink is self._arguments:
            self._whole = True
        self._turn(text, end, None)
        if self._value is not None:
            with suppress(ValueError, RecursionError):
                name = json.loads("".join(self._value))
                self.name = name if isinstance(name, str) else None
            self._value = None


class Calls:
    """Content, and tool calls as JSON objects behind a mark.

    open: marks that calls begin with. between: what may stand between and after them. tools: names
    of those that a call without a mark may call; bare: whether an object at the text's beginning
    may be one. named: whether the name may stand before the arguments, as `name[ARGS]{...}`. xml:
    the tools, if calls as `<function=...>` follow the mark, or, if they are keyed, as a name with
    `<arg_key>...`. separators: characters that may stand between calls.
    """

    thinking = False

    def __init__(
        self,
        open: tuple[str, ...],
        between: tuple[str, ...] = (),
        tools: frozenset[str] = frozenset(),
        bare: bool = False,
        named: bool = False,
        xml: list[dict[str, Any]] | None = None,
        keyed: bool = False,
        separators: str = "",
    ):
        self.open, self.between, self.tools = open, between, tools
        self.bare, self.named, self.xml, self.keyed = bare, named, xml, keyed
        self.inner: tuple[str, ...] = ("<function=",) if xml is not None and not keyed else ()
        self.separators = separators
        self.count, self.held = 0, ""
        self.said: int | None = None  # the number of calls when content passed
        self.blank: list[str] = []  # white space or separators that follow it and change nothing
        self.call, self.started = JsonCall(), False  # whether the call's name has passed
        self.body = Collected("")  # of a name
        self.function: FunctionCall | KeyedCall = FunctionCall(xml or [])
        self.opened = False  # whether a mark stands right before what is held
        self.marked = not bare  # whether a mark stands before what is read
        # A state takes from what is held, adds pieces, and says whether to go on.
        self.state = self._begin if bare else self._content
        self.out: list[Piece] = []

    def feed(self, text: str, last: bool = False) -> list[Piece]:
        self.out = []
        inside = self.state in (self._object, self._function)
        between = self.state == self._between
        if not (last or inside or text.strip(SPACE + self.separators if between else SPACE)):
            self.blank.append(text)
            return self.out
        self.held += "".join([*self.blank, text])
        self.blank.clear()
        while self.state():
            pass
        if last:  # what was the beginning of something is content, but for a mark or another call
            if self.state == self._between and self._begins_mark():
                self.held = ""
            while self.state == self._function and self._called(self.function.finish()):
                while self.state():
                    pass
            unread = ""
            if self.state == self._object and not self.started and not (self.marked and self.count):
                unread = self.call.text
            elif self.state == self._name:
                unread = self.body.text
            elif self.state == self._function and not self.count:
                unread = "".join(self.inner) + self.function.text
            self._add((unread + self.held).rstrip() if self.count else unread + self.held)
            self.held = ""
        return self.out

    def _begins_mark(self) -> bool:
        """Whether what is held is nothing, or may be the beginning of a mark."""
        rest = self.held.strip(SPACE + self.separators)
        ahead = self.held.lstrip(SPACE + self.separators.replace("[", ""))
        return not rest or any(
            mark.startswith(ahead) for mark in (*self.open, *self.between, *self.inner)
        )

    def _add(self, content: str) -> None:
        if content:
            if self.said not in (None, self.count):
                content = "\n" + content  # of the white space around calls, which was dropped
            self.said = self.count
            self.out.append(Piece("content", content))

    def _begin(self) -> bool:
        """The beginning of a text that may be a call without a mark."""
        ahead = self.held.lstrip()
        if ahead:
            self.state = self._between if ahead[0] == "{" else self._content
        return bool(ahead)

    def _content(self) -> bool:
        text, mark, self.held = cut(self.held, (*self.open, *self.inner))
        if mark is not None and mark in self.inner:
            called = self._tool()
            if called is None:
                self.held = text + mark + self.held
                return False
            if called:
                self._add(text.rstrip())
                self.state, self.held = self._between, mark + self.held
                return True
            self._add(text + mark)
            return True
        if mark is None:
            body = text.rstrip()  # white space before and behind calls is dropped
            self._add(body)
            self.held = text[len(body) :] + self.held
            return False
        self._add(text.rstrip())
        self.state, self.marked, self.opened = self._between, True, True
        return True

    def _tool(self) -> bool | None:
        """Whether a tool's name and `>` are held; None: not known yet."""
        name, end, _ = self.held.partition(">")
        if end:
            return name_of(name) in self.tools
        return None if any(tool.startswith(name_of(name)) for tool in self.tools) else False

    def _between(self) -> bool:
        """Before an object, or behind it."""
        ahead = self.held.lstrip(SPACE + self.separators.replace("[", ""))
        for mark in (*self.open, *self.between):
            if ahead.startswith(mark):
                self.held, self.opened = ahead[len(mark) :], mark in self.open
                self.marked = self.marked or self.opened
                return True
        if self._begins_mark():
            return False
        self.held = self.held.lstrip()
        # Separators are dropped only if calls, or nothing, stand behind them.
        ahead = self.held.lstrip(SPACE + self.separators)
        if ahead[0] == "{":
            self.state, self.held, self.call = self._object, ahead, JsonCall()
        elif self.xml is not None and ahead.startswith(self.inner):
            self.held = ahead.removeprefix(self.inner[0])
            self.state, self.function = self._function, FunctionCall(self.xml)
        elif self.xml is not None and self.keyed and self.opened:
            self.state, self.function = self._function, KeyedCall(self.xml)
        elif self.named and (ahead[0].isalnum() or ahead[0] == "_"):
            self.state, self.held, self.body = self._name, ahead, Collected("{")
        else:
            self.state = self._content
            if self.named and self.count:  # the end of a list of calls
                self.held = self.held.removeprefix("]").lstrip()
        return True

    def _ends(self) -> bool:
        """Collect what is held; whether the body's end has come, behind which `held` then is."""
        rest = self.body.feed(self.held)
        self.held = rest or ""
        return rest is not None

    def _name(self) -> bool:
        """`name[ARGS]{...}`; `[CALL_ID]...` may stand between."""
        if not self._ends():
            return False
        self.call = JsonCall(self.body.text.partition("[")[0].strip())
        self.state, self.held = self._object, "{" + self.held
        return True

    def _object(self) -> bool:
        if not self.held:
            return False
        call, self.held = self.call, self.call.feed(self.held)
        known = call.name is not None and (self.marked or call.name in self.tools)
        if known and not self.started:
            self.started = True
            self.out.append(Piece("call", "", self.count, call.name))
        if self.started and (new := call.news()):
            self.out.append(Piece("call", new, self.count))
        if not call.ended:
            return False
        if self.started:
            if not call.passed:
                self.out.append(Piece("call", "{}", self.count))
            self.count += 1
        else:
            self._add(call.text)
        self.state = self._between if self.started else self._content
        self.started = self.opened = False
        return True

    def _function(self) -> bool:
        held, self.held = self.held, ""
        return self._called(self.function.feed(held))

    def _called(self, found: tuple[str, str] | None) -> bool:
        """Pass a call on that has been read, if it has; `held` is then what stands behind it."""
        if found is None:
            return False
        assert self.xml is not None
        name, arguments = (keyed if self.keyed else called)(found[0], self.xml)
        self.held = found[1]
        self.out += [Piece("call", "", self.count, name), Piece("call", arguments, self.count)]
        self.count += 1
        self.state, self.opened = self._between, False
        return True


def call_id(short: bool = False) -> str:
    """A name for a tool call; short: of nine characters, as Mistral's templates want it."""
    return uuid.uuid4().hex[:9] if short else f"call_{uuid.uuid4().hex[:24]}"
