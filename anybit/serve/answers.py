"""From the engine's deltas to OpenAI's answers, whole or as server-sent events."""

import codecs
import json
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from anybit.engine.output import Completion, Delta
from anybit.engine.sequence import Logprob
from anybit.engine.structured import STUCK
from anybit.serve.encoding import Frame, around, event, line
from anybit.serve.events import Events
from anybit.serve.mistakes import error
from anybit.serve.reading import Piece, Plain, Reader, call_id
from anybit.serve.streams import Stream
from anybit.serve.texts import Words


class Failed(Exception):
    """The engine ended a text before its time."""

    def __init__(self, delta: Delta):
        status = 400 if (delta.error or "").startswith(STUCK) else 500
        self.status = 503 if delta.finish == "abort" else status
        super().__init__(delta.error or "the server is shutting down")


@dataclass(frozen=True)
class Asked:
    """What answers of every protocol need to know about their request.

    model: as the client calls it. best_of: texts for each prompt, of which `n` are answered; as
    many by default. running: every event of a stream has the usage so far. scored: the answer
    has the prompts' log probabilities, as vLLM has them. readers: makes a reader for each text.
    calls: tool calls of a text at most; None: any number.
    """

    model: str
    prompts: list[list[int]]
    n: int
    stream: Stream
    words: Words
    best_of: int | None = None
    usage: bool = False  # a last event with the usage
    token_ids: bool = False
    readers: Callable[[], Reader] = Plain
    calls: int | None = None
    short_ids: bool = False  # of tool calls
    running: bool = False
    scored: bool = False

    @property
    def texts(self) -> int:
        """Texts for each prompt."""
        return self.best_of or self.n


@dataclass
class Block:
    """A part of a text: thoughts, content or a tool call, with its id and its tool's name.

    logprobs: of the tokens of content.
    """

    kind: str
    text: str = ""
    id: str = ""
    name: str = ""
    logprobs: list[Logprob] = field(default_factory=list)


@dataclass
class Text:
    """One text in the making."""

    completion: Completion
    reader: Reader
    blocks: list[Block] = field(default_factory=list)
    offset: int = 0  # characters that log probabilities were given for
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )
    thoughts: int = 0  # tokens that came while it thought
    pending: list[Logprob] = field(default_factory=list)  # of tokens that were no piece yet

    def joined(self, kind: str) -> str:
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks if block.kind == "call"]

    @property
    def finish(self) -> str | None:
        """How the text has ended: "tool_calls" unless a stop string has cut the last call."""
        finish, calls = self.completion.finish, self.calls
        if finish != "stop" or not calls:
            return finish
        cut = isinstance(self.completion.stop_reason, str) and not is_json(calls[-1].text)
        return "stop" if cut else "tool_calls"


@dataclass(frozen=True)
class Step:
    """What a step of the engine has added to a text. new: pieces that begin a block.

    logprobs: of the tokens of its content.
    """

    text: Text
    delta: Delta
    pieces: list[Piece]
    new: list[bool]
    logprobs: list[Logprob]


class Answer:
    """One answer in the making. Each protocol's answer says what `whole` and `events` are."""

    def __init__(self, asked: Asked, prefix: str):
        self.asked = asked
        self.id, self.created = f"{prefix}{uuid.uuid4().hex}", int(time.time())
        count = asked.texts
        self.index = {name: i * count for i, name in enumerate(asked.stream.names)}
        self.texts = [
            Text(Completion(i), asked.readers()) for i in range(count * len(asked.prompts))
        ]
        self.cached = dict.fromkeys(asked.stream.names, 0)
        self.open = len(self.texts)  # texts that have not ended

    async def whole(self) -> dict[str, Any]:
        """The answer, when all texts have ended; Failed if one did not end well."""
        raise NotImplementedError

    def events(self) -> Events:
        """Server-sent events: those that come first, and of each step's deltas together."""
        raise NotImplementedError

    def frame(self, index: int) -> Frame | None:
        """What stands around a plain token's text, in the event that it is all that is new in.

        None if no such event can be made without `step`, or not yet.
        """
        return None

    async def end(self) -> None:
        """Wait until all texts have ended; Failed if one did not end well."""
        async for deltas in self.asked.stream:
            for delta in deltas:
                self.step(delta)

    def step(self, delta: Delta) -> Step:
        """What a step of the engine has added; Failed if the text did not end well."""
        if delta.finish in ("error", "abort"):
            raise Failed(delta)
        self.open -= delta.finish is not None
        self.cached[delta.request] = max(self.cached[delta.request], delta.cached)
        text = self.texts[self.index[delta.request] + delta.index]
        text.completion.add(delta)
        pieces, new = [], []
        for piece in text.reader.feed(delta.text, delta.finish is not None):
            if piece.kind == "call" and piece.call >= (self.asked.calls or piece.call + 1):
                continue
            last = text.blocks[-1] if text.blocks else None
            begins = piece.name is not None or last is None or last.kind != piece.kind
            if begins:
                call = call_id(self.asked.short_ids) if piece.name is not None else ""
                text.blocks.append(Block(piece.kind, "", call, piece.name or ""))
            text.blocks[-1].text += piece.text
            pieces.append(piece)
            new.append(begins)
        if text.reader.thinking or any(piece.kind == "reasoning" for piece in pieces):
            text.thoughts += len(delta.tokens)
        text.pending += delta.logprobs
        found: list[Logprob] = []
        if pieces:
            if pieces[-1].kind == "content":
                found = text.pending
                text.blocks[-1].logprobs += found
            text.pending = []
        return Step(text, delta, pieces, new, found)

    def spelled(self, found: Iterable[Logprob]) -> list[dict[str, Any]]:
        """Log probabilities as chats and responses have them."""

        def entry(token: int, value: float) -> dict[str, Any]:
            words = self.asked.words
            raw = list(words.bytes(token))
            return {"token": words.text(token), "logprob": value, "bytes": raw}

        return [
            entry(logprob.token, logprob.logprob)
            | {"top_logprobs": [entry(token, value) for token, value in logprob.top]}
            for logprob in found
        ]

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tokens of the prompts, of the texts, and of the prompts that were in the cache."""
        written = sum(len(text.completion.tokens) for text in self.texts)
        return sum(map(len, self.asked.prompts)), written, sum(self.cached.values())


class OpenAI(Answer):
    """What completions and chat have in common."""

    kind = chunk = ""

    def __init__(self, asked: Asked, prefix: str):
        super().__init__(asked, prefix)
        self.frames: dict[tuple[int, str], Frame] = {}

    async def whole(self) -> dict[str, Any]:
        await self.end()
        choices = [self.choice(i, text) for i, text in enumerate(self.kept())]
        return self.body(self.kind, choices) | {"usage": self.usage()}

    def kept(self) -> list[Text]:
        """The texts to answer: of each prompt those with the highest mean log probability."""
        out: list[Text] = []
        count = self.asked.texts
        for at in range(0, len(self.texts), count):
            texts = self.texts[at : at + count]
            if count > self.asked.n:
                texts = sorted(texts, key=lambda text: -likelihood(text.completion))
            out += texts[: self.asked.n]
        return out

    def choice(self, index: int, text: Text) -> dict[str, Any]:
        raise NotImplementedError

    def events(self) -> Events:
        numbers = range(len(self.texts))
        out = b"".join(self.part(i, part) for i in numbers for part in self.first(i))
        try:
            while self.open:
                deltas = yield out
                out = b"".join(map(self.said, deltas))
        except Failed as failed:
            out = event(error(failed.status, str(failed)))
        if self.asked.usage:
            out += event(self.body(self.chunk, []) | {"usage": self.usage()})
        return out + b"data: [DONE]\n\n"

    def said(self, delta: Delta) -> bytes:
        """The events of a delta."""
        step = self.step(delta)
        more = delta.finish or delta.logprobs or delta.prompt_logprobs or self.changing
        if not more and len(step.pieces) == 1 and (piece := step.pieces[0]).kind != "call":
            before, after = self._frame(step.text.completion.index, piece.kind)
            return before + line(piece.text) + after
        return b"".join(self.part(*part) for part in self.parts(step))

    @property
    def changing(self) -> bool:
        """Whether more than the text changes in every event."""
        return self.asked.token_ids or self.asked.running

    def frame(self, index: int) -> Frame | None:
        plain = type(self.texts[index].reader) is Plain and not self.changing
        return self._frame(index, "content") if plain else None

    def _frame(self, index: int, kind: str) -> Frame:
        """What stands around a piece of text, in an event where nothing else changes."""
        if (index, kind) not in self.frames:
            self.frames[index, kind] = around(lambda t: self.part(index, self.piece(kind, t)))
        return self.frames[index, kind]

    def piece(self, kind: str, text: str) -> dict[str, Any]:
        """What an event says of a piece of text."""
        raise NotImplementedError

    def first(self, index: int) -> list[dict[str, Any]]:
        """What a stream begins with, for one text."""
        raise NotImplementedError

    def parts(self, step: Step) -> list[tuple[int, dict[str, Any]]]:
        """The events of a step: the text's number, and what is said of it."""
        raise NotImplementedError

    def part(self, index: int, part: dict[str, Any]) -> bytes:
        choice = {"index": index, "logprobs": None, "finish_reason": None} | part
        body = self.body(self.chunk, [choice])
        return event(body | ({"usage": self.usage()} if self.asked.running else {}))

    def scores(self, completion: Completion) -> list[dict[str, Any] | None]:
        """Log probabilities of a prompt, by tokens. rank: None below the tokens asked for."""

        def entry(token: int, value: float, rank: int | None) -> dict[str, Any]:
            return {"logprob": value, "rank": rank, "decoded_token": self.asked.words.text(token)}

        out: list[dict[str, Any] | None] = []
        for found in completion.prompt_logprobs or ():
            scored: dict[str, Any] = {}
            for rank, (token, value) in enumerate(found.top if found else (), 1):
                scored[str(token)] = entry(token, value, rank)
            if found:
                scored.setdefault(str(found.token), entry(found.token, found.logprob, None))
            out.append(scored if found else None)
        return out

    def ends(self, text: Text) -> dict[str, Any]:
        return {"finish_reason": text.finish, "stop_reason": text.completion.stop_reason}

    def body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.asked.model,
            "choices": choices,
        }

    def usage(self) -> dict[str, Any]:
        prompt, written, cached = self.counts
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "reasoning_tokens": sum(text.thoughts for text in self.texts),
                "accepted_prediction_tokens": sum(t.completion.accepted for t in self.texts),
                "rejected_prediction_tokens": sum(t.completion.rejected for t in self.texts),
            },
        }


class CompletionsAnswer(OpenAI):
    """/v1/completions. echo: prompts that texts begin with. scored: whether log probabilities
    are asked for, which an echo then has of its prompt, too. special: tokens; shown: those of
    them that are text."""

    kind = chunk = "text_completion"

    def __init__(
        self, asked: Asked, echo: list[str] | None, scored: bool,
        special: frozenset[int], shown: Iterable[int],
    ):  # fmt: skip
        super().__init__(asked, "cmpl-")
        self.echo, self.scored = echo, scored
        self.special, self.hidden = special, special.difference(shown)

    def choice(self, index: int, text: Text) -> dict[str, Any]:
        completion = text.completion
        found = [*(completion.prompt_logprobs or ()), *(completion.logprobs or ())]
        out = {"index": index, "logprobs": self.logprobs(text, found)} | self.ends(text)
        if self.asked.token_ids:
            out["token_ids"] = completion.tokens
        if self.asked.scored:
            out["prompt_logprobs"] = self.scores(completion)
        return out | {"text": self._echo(completion.index) + completion.text}

    def first(self, index: int) -> list[dict[str, Any]]:
        # Log probabilities of a prompt come with its first token.
        return [{"text": self._echo(index)}] if self.echo else []

    def parts(self, step: Step) -> list[tuple[int, dict[str, Any]]]:
        delta, asked = step.delta, self.asked
        if not (delta.text or delta.finish or delta.logprobs or asked.token_ids):
            return []
        found = [*(delta.prompt_logprobs or ()), *delta.logprobs]
        part = self.piece("content", delta.text)
        part["logprobs"] = self.logprobs(step.text, found)
        part |= {"finish_reason": delta.finish, "stop_reason": delta.stop_reason}
        if asked.token_ids:
            part["token_ids"] = delta.tokens
        return [(step.text.completion.index, part)]

    def piece(self, kind: str, text: str) -> dict[str, Any]:
        return {"text": text, "stop_reason": None}

    def _echo(self, index: int) -> str:
        return self.echo[index // self.asked.texts] if self.echo else ""

    def logprobs(self, text: Text, found: list[Logprob | None]) -> dict[str, Any] | None:
        """Log probabilities of tokens. None stands for a prompt's first token, which has none."""
        if not found or not self.scored:
            return None
        first = self.first_token(text)
        tokens = [first if entry is None else entry.token for entry in found]
        offsets = []
        for token in tokens:
            offsets.append(text.offset)
            text.offset += len(text.decoder.decode(self._shown(text, token)))
        return {
            "tokens": [self.asked.words.name(token) for token in tokens],
            "token_logprobs": [entry and entry.logprob for entry in found],
            "top_logprobs": [entry and self._top(entry) for entry in found],
            "text_offset": offsets,
        }

    def _shown(self, text: Text, token: int) -> bytes:
        """What a token adds to the text, in bytes."""
        raw, prompt = self.asked.words.bytes(token), self._echo(text.completion.index)
        # A prompt that was a text lacks what the tokenizer puts before it.
        unsure = self.special if text.offset < len(prompt) else self.hidden
        if token in unsure and not prompt.startswith(raw.decode(), text.offset):
            return b""
        # Some tokenizers put a space before a text, and take it away again.
        added = prompt and not text.offset and raw[:1] == b" " and prompt[0] != " "
        return raw[1:] if added else raw

    def first_token(self, text: Text) -> int:
        return self.asked.prompts[text.completion.index // self.asked.texts][0]

    def _top(self, entry: Logprob) -> dict[str, float]:
        """The likeliest tokens and the chosen one; of two with one text, the likelier."""
        out: dict[str, float] = {}
        for token, value in (*entry.top, (entry.token, entry.logprob)):
            out.setdefault(self.asked.words.name(token), value)
        return out


class ChatAnswer(OpenAI):
    """/v1/chat/completions."""

    kind, chunk = "chat.completion", "chat.completion.chunk"

    def __init__(self, asked: Asked):
        super().__init__(asked, "chatcmpl-")

    async def whole(self) -> dict[str, Any]:
        out = await super().whole()
        if self.asked.scored:
            out["prompt_logprobs"] = self.scores(self.texts[0].completion)
        return out

    def choice(self, index: int, text: Text) -> dict[str, Any]:
        content = text.joined("content")
        message: dict[str, Any] = {"role": "assistant", "content": content}
        message |= {"refusal": None, "annotations": []}
        if text.calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.text},
                }
                for call in text.calls
            ]
        if thoughts := text.joined("reasoning"):
            message["reasoning_content"] = thoughts
        logprobs = self.logprobs(text.completion.logprobs or [])
        out = {"index": index, "message": message, "logprobs": logprobs} | self.ends(text)
        return out | ({"token_ids": text.completion.tokens} if self.asked.token_ids else {})

    def first(self, index: int) -> list[dict[str, Any]]:
        return [{"delta": {"role": "assistant", "content": "", "refusal": None}}]

    def parts(self, step: Step) -> list[tuple[int, dict[str, Any]]]:
        text, delta = step.text, step.delta
        parts: list[dict[str, Any]] = []
        for piece in step.pieces:
            if piece.kind == "call":
                call: dict[str, Any] = {"index": piece.call}
                if piece.name is not None:
                    call |= {"id": text.calls[piece.call].id, "type": "function"}
                    call["function"] = {"name": piece.name, "arguments": piece.text}
                else:
                    call["function"] = {"arguments": piece.text}
                parts.append({"delta": {"tool_calls": [call]}})
            else:
                parts.append(self.piece(piece.kind, piece.text))
        if not parts and (delta.finish or delta.logprobs or self.asked.token_ids):
            parts.append({"delta": {}})
        if parts:
            parts[0]["logprobs"] = self.logprobs(delta.logprobs)
            if self.asked.token_ids:
                parts[0]["token_ids"] = delta.tokens
            if delta.finish:
                parts[-1] |= self.ends(text)
        return [(text.completion.index, part) for part in parts]

    def piece(self, kind: str, text: str) -> dict[str, Any]:
        return {"delta": {"content" if kind == "content" else "reasoning_content": text}}

    def logprobs(self, found: list[Logprob]) -> dict[str, Any] | None:
        return {"content": self.spelled(found), "refusal": None} if found else None


def is_json(text: str) -> bool:
    """Whether a call's arguments are whole."""
    try:
        json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return False
    return True


def likelihood(completion: Completion) -> float:
    """Mean log probability of a text's tokens."""
    found = completion.logprobs or []
    return sum(entry.logprob for entry in found) / max(len(found), 1)
