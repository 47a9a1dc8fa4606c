"""From a model's text to its parts, as the text grows: thoughts, content and tool calls."""

import json
import string
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol

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

    inside: whether the prompt has opened them already.
    """

    def __init__(self, open: str, close: str, inside: bool, rest: Reader):
        self.open, self.close, self.rest = open, close, rest
        self.state = "inside" if inside else "before"
        self.held, self.begun = "", False  # whether the thoughts have begun

    @property
    def thinking(self) -> bool:
        return self.state == "inside"

    def feed(self, text: str, last: bool = False) -> list[Piece]:
        self.held += text
        out: list[Piece] = []
        if self.state == "before":
            ahead = self.held.lstrip()
            if ahead.startswith(self.open):
                self.state, self.held = "inside", ahead[len(self.open) :]
            elif last or not self.open.startswith(ahead):
                self.state = "behind"
        if self.state == "inside":
            if not self.begun:
                self.held = self.held.lstrip()
            thought, mark, self.held = cut(self.held, (self.close,))
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


class JsonCall:
    """A tool call's object {"name": ..., "arguments": {...}}, read as it grows.

    name: given when the object is the arguments themselves. text: all that was read.
    """

    def __init__(self, name: str | None = None):
        self.text, self.name, self.ended = "", name, False
        self.passed = ""  # of the arguments
        self._first, self._end = (-1, -1) if name is None else (0, -1)  # where the arguments are
        self._depth, self._string, self._escaped = 0, False, False
        self._quote, self._key, self._value = 0, "", -1  # the key's and the value's beginnings

    def feed(self, text: str) -> str:
        """Read on; the rest of the text behind the object's end."""
        for at, char in enumerate(text):
            self.text += char
            self._step(char)
            if self.ended:
                return text[at + 1 :]
        return ""

    def news(self) -> str:
        """What has been added to the arguments since the last call."""
        if self.name is None or self._first < 0:
            return ""
        whole = self.text[self._first : len(self.text) if self._end < 0 else self._end].lstrip()
        if whole[:1] == '"':  # some models write them as a string that holds JSON
            if self._end < 0:
                return ""
            with suppress(ValueError):  # of a wrong escape: then as the model has written it
                whole = json.loads(whole, strict=False)
        new, self.passed = whole[len(self.passed) :], whole
        return new

    def _step(self, char: str) -> None:
        if self._string:
            if self._escaped or char == "\\":
                self._escaped = not self._escaped
            elif char == '"':
                self._string = False
                if self._depth == 1 and self._value < 0:
                    self._key = self.text[self._quote : -1]
        elif char == '"':
            self._string, self._quote = True, len(self.text)
        elif char == ":" and self._depth == 1 and self._value < 0:
            self._value = len(self.text)
            if self._key in ("arguments", "parameters") and self._first < 0:
                self._first = self._value
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.ended = self._depth == 0
            if self._depth == 1 and self._first == self._value >= 0:
                self._end = len(self.text)
        if (self._depth == 1 and char == ",") or self.ended:
            self._close(len(self.text) - 1)

    def _close(self, end: int) -> None:
        """A value of the object has ended, or the object that is the arguments."""
        if self._first == 0:
            self._end = end + 1 if self.ended else -1
        elif self._value >= 0 and self._first == self._value and self._end < 0:
            self._end = end
        elif self._value >= 0 and self._key == "name" and self.name is None:
            try:
                name = json.loads(self.text[self._value : end])
            except ValueError:
                name = None
            self.name = name if isinstance(name, str) else None
        self._value = -1


class Calls:
    """Content, and tool calls as JSON objects behind a mark.

    open: marks that calls begin with. between: what may stand between and after them. bare:
    names of tools, when an object that calls one of them needs no mark. named: whether the name
    may stand before the arguments, as `name[ARGS]{...}`. xml: reads `<function=...>`, if such
    calls follow the mark.
    """

    thinking = False

    def __init__(
        self, open: tuple[str, ...], between: tuple[str, ...] = (),
        bare: frozenset[str] = frozenset(), named: bool = False,
        xml: Callable[[str], tuple[str, str]] | None = None,
    ):  # fmt: skip
        self.open, self.between, self.bare = open, between, bare
        self.named, self.xml = named, xml
        self.inner = ("<function=",) if xml else ()
        self.separators = ",;[]" if named or bare else ""
        self.count, self.held = 0, ""
        self.call, self.started = JsonCall(), False  # whether the call's name has passed
        # A state takes from what is held, adds pieces, and says whether to go on.
        self.state = self._begin if bare else self._content
        self.out: list[Piece] = []

    def feed(self, text: str, last: bool = False) -> list[Piece]:
        self.held += text
        self.out = []
        while self.state():
            pass
        if last:  # what was the beginning of something is content
            if self.state == self._between and not self.held.strip(SPACE + self.separators):
                self.held = ""
            unread = self.call.text if self.state == self._object and not self.started else ""
            self._add((unread + self.held).rstrip() if self.count else unread + self.held)
            self.held = ""
        return self.out

    def _add(self, content: str) -> None:
        if content:
            self.out.append(Piece("content", content))

    def _begin(self) -> bool:
        """The beginning of a text that may be a call without a mark."""
        ahead = self.held.lstrip()
        if ahead:
            self.state = self._between if ahead[0] == "{" else self._content
        return bool(ahead)

    def _content(self) -> bool:
        text, mark, self.held = cut(self.held, self.open)
        if mark is None:
            body = text.rstrip()  # white space before and behind calls is dropped
            self._add(body)
            self.held = text[len(body) :] + self.held
            return False
        self._add(text.rstrip())
        self.state = self._between
        return True

    def _between(self) -> bool:
        """Before an object, or behind it."""
        self.held = self.held.lstrip()
        for mark in (*self.open, *self.between):
            if self.held.startswith(mark):
                self.held = self.held[len(mark) :]
                return True
        if any(mark.startswith(self.held) for mark in (*self.open, *self.between, *self.inner)):
            return False  # nothing yet, or the beginning of a mark
        ahead = self.held.lstrip(SPACE + self.separators)
        if not ahead:  # separators are dropped only if calls, or nothing, stand behind them
            return False
        if ahead[0] == "{":
            self.state, self.held, self.call = self._object, ahead, JsonCall()
        elif self.xml and ahead.startswith(self.inner):
            self.state, self.held = self._function, ahead
        elif self.named and (ahead[0].isalnum() or ahead[0] == "_"):
            self.state, self.held = self._name, ahead
        else:
            self.state = self._content
            if self.named and self.count:  # the end of a list of calls
                self.held = self.held.removeprefix("]").lstrip()
        return True

    def _name(self) -> bool:
        """`name[ARGS]{...}`; `[CALL_ID]...` may stand between."""
        name, brace, rest = self.held.partition("{")
        if brace:
            self.call = JsonCall(name.partition("[")[0].strip())
            self.state, self.held = self._object, brace + rest
        return bool(brace)

    def _object(self) -> bool:
        if not self.held:
            return False
        call, self.held = self.call, self.call.feed(self.held)
        known = call.name is not None and (not self.bare or call.name in self.bare)
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
        self.started = False
        return True

    def _function(self) -> bool:
        body, end, rest = self.held.partition("</function>")
        if not end:
            return False
        assert self.xml is not None
        name, arguments = self.xml(body)
        self.out += [Piece("call", "", self.count, name), Piece("call", arguments, self.count)]
        self.count += 1
        self.held, self.state = rest, self._between
        return True


class Harmony:
    """GPT-OSS: `<|channel|>NAME to=functions.TOOL<|message|>TEXT<|end|>`, one after the other."""

    MESSAGE = "<|message|>"
    ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")

    def __init__(self) -> None:
        self.held, self.count = "", 0
        self.kind: Literal["reasoning", "content", "call"] | None = None  # None: in a header

    @property
    def thinking(self) -> bool:
        return self.kind == "reasoning"

    def feed(self, text: str, last: bool = False) -> list[Piece]:
        self.held += text
        out: list[Piece] = []
        while True:
            if self.kind is None:
                head, mark, rest = self.held.partition(self.MESSAGE)
                if not mark:
                    if last and head.strip() and "<|" not in head:  # no channel at all
                        out.append(Piece("content", head))
                    return out
                out += self._begin(head)
                self.held = rest
            body, end, self.held = cut(self.held, self.ENDS)
            if last and end is None:
                body, self.held = body + self.held, ""
            if body:
                call = self.count - 1 if self.kind == "call" else -1
                assert self.kind is not None
                out.append(Piece(self.kind, body, call))
            if end is None:
                return out
            self.kind = None

    def _begin(self, head: str) -> list[Piece]:
        """Take a message's header: its channel, and the tool that it is for."""
        channel = head.partition("<|channel|>")[2].split()[:1]
        tool = head.partition("to=functions.")[2].partition("<|")[0].split()[:1]
        if tool:
            self.kind, self.count = "call", self.count + 1
            return [Piece("call", "", self.count - 1, tool[0])]
        self.kind = "reasoning" if channel == ["analysis"] else "content"
        return []


def call_id(short: bool = False) -> str:
    """A name for a tool call; short: of nine characters, as Mistral's templates want it."""
    return uuid.uuid4().hex[:9] if short else f"call_{uuid.uuid4().hex[:24]}"
