"""What the engine says of a text, step by step (`Delta`), and what becomes of it (`Output`)."""

from dataclasses import dataclass, field

from anybit.engine.sequence import Logprob


@dataclass(slots=True)  # not frozen, which would take three times as long to make
class Delta:
    """What a step has added to one text; the last one of a text has a `finish`.

    text: what a `Transcript` makes of the tokens. It may lag behind them, and never holds a part of
    a stop string. silent: whether the token has ended the text and is no part of it. finish:
    "stop", "length", "abort" or "error"; stop_reason: the stop string or token. The first one of a
    text has what was asked about the prompt: prompt_logprobs, with None for the first token, and
    the embedding (hidden,).
    """

    request: str
    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish: str | None = None
    stop_reason: str | int | None = None
    error: str = ""
    cached: int = 0  # prompt tokens that the prefix cache had
    accepted: int = 0  # of the text's tokens so far, those that were drafted
    rejected: int = 0  # drafted tokens that it has not taken
    prompt_logprobs: list[Logprob | None] | None = None
    embedding: list[float] | None = None
    silent: bool = False


@dataclass
class Completion:
    """One output of a request. finish: "stop", "length", "abort" or "error".

    accepted: tokens that were drafted; rejected: drafted ones that were not taken.
    """

    index: int = 0
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob | None] | None = None
    embedding: list[float] | None = None
    finish: str | None = None
    stop_reason: str | int | None = None
    error: str = ""
    accepted: int = 0
    rejected: int = 0

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        if delta.logprobs:
            self.logprobs = self.logprobs or []  # a list of its own
            self.logprobs += delta.logprobs
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.embedding = self.embedding or delta.embedding
        self.finish, self.stop_reason, self.error = delta.finish, delta.stop_reason, delta.error
        self.accepted, self.rejected = delta.accepted, delta.rejected


@dataclass
class Output:
    """What `generate` gives for a prompt: its token ids, also if it was text, and n completions."""

    prompt: list[int]
    completions: list[Completion]

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def tokens(self) -> list[int]:
        return self.completions[0].tokens
