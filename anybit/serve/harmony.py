"""GPT-OSS's channels: thoughts, content and tool calls as messages."""

from typing import Literal

from anybit.serve.reading import Collected, JsonCall, Piece, cut


class Harmony:
    """GPT-OSS: `<|channel|>NAME to=functions.TOOL<|message|>TEXT<|end|>`, one after the other.

    A call's object may hold the marks. So in one that is not whole, they end the message only in
    front of `<|start|>`, or of nothing.
    """

    MESSAGE, START = "<|message|>", "<|start|>"
    ENDS = ("<|end|>", "<|call|>", "<|return|>", START)

    def __init__(self) -> None:
        self.held, self.count = "", 0
        self.header = Collected(self.MESSAGE)
        self.kind: Literal["reasoning", "content", "call"] | None = None  # None: in a header
        self.unsure: str | None = None  # arguments that may be null
        self.json: JsonCall | None = None  # a call's arguments, if they are an object
        self.said: Literal["", "now", "before"] = ""  # whether content has passed: in this message

    @property
    def thinking(self) -> bool:
        return self.kind == "reasoning"

    def feed(self, text: str, last: bool = False) -> list[Piece]:
        self.held += text
        out: list[Piece] = []
        while True:
            if self.kind is None:
                rest = self.header.feed(self.held)
                self.held, head = rest or "", self.header.text if last or rest is not None else ""
                if rest is None:
                    if last and head.strip() and "<|" not in head:  # no channel at all
                        out.append(Piece("content", head))
                    return out
                out += self._begin(head)
                self.header = Collected(self.MESSAGE)
            body, ended = self._body(last)
            assert self.kind is not None
            if self.kind == "call":
                body = self._called(body, ended, last)
            if body and self.kind == "content":
                body, self.said = "\n" * (self.said == "before") + body, "now"
            if body:
                out.append(Piece(self.kind, body, self.count - 1 if self.kind == "call" else -1))
            if not ended:
                return out
            self.kind, self.said = None, self.said and "before"

    def _body(self, last: bool) -> tuple[str, bool]:
        """Take what is held of a message's text; also whether the message ends behind it."""
        taken: list[str] = []
        while True:
            text, mark, self.held = cut(self.held, self.ENDS)
            if last and mark is None:
                text, self.held = text + self.held, ""
            taken.append(text)
            if self.json is not None and not self.json.inside and text.strip():
                self.json = self.json if text.lstrip().startswith("{") else None
            if self.json is not None:
                self.json.feed(text)
            if mark is None:
                return "".join(taken), False
            if self.json is None or not self.json.inside or self.held.startswith(self.START):
                return "".join(taken), True
            if last and not self.held:
                return "".join(taken), True
            if not last and self.START.startswith(self.held):  # it is not known yet
                self.held = mark + self.held
                return "".join(taken), False
            taken.append(mark)
            self.json.feed(mark)

    def _called(self, body: str, ended: bool, last: bool) -> str:
        """What passes of a call's arguments: none are {}, and so is null."""
        if self.unsure is None:
            return body
        self.unsure = (self.unsure + body).lstrip()
        text = self.unsure.rstrip()
        if (ended and not text) or ((ended or last) and text == "null"):
            return "{}"
        if "null".startswith(text) and not ended:
            return ""
        body, self.unsure = self.unsure, None
        return body

    def _begin(self, head: str) -> list[Piece]:
        """Take a message's header: its channel, and the tool that it is for."""
        channel = head.partition("<|channel|>")[2].split()[:1]
        tool = head.partition("to=functions.")[2].partition("<|")[0].split()[:1]
        if tool:
            self.kind, self.count, self.unsure = "call", self.count + 1, ""
            self.json = JsonCall("")
            return [Piece("call", "", self.count - 1, tool[0])]
        self.json = None
        self.kind = "reasoning" if channel == ["analysis"] else "content"
        return []
