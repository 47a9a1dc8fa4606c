"""From the engine's deltas to OpenAI's answers, whole or as server-sent events."""

import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from anybit.engine.async_engine import Stream
from anybit.engine.engine import Delta
from anybit.engine.llm import Completion
from anybit.engine.sequence import Logprob
from anybit.serve.protocol import error


class Failed(Exception):
    """The engine ended a text before its time."""

    def __init__(self, delta: Delta | Completion):
        self.status = 503 if delta.finish == "abort" else 500
        super().__init__(delta.error or "the server is shutting down")


@dataclass
class Answer:
    """One answer in the making. n: texts for each prompt. echo: prompts that texts begin with."""

    kind: str  # "text_completion" or "chat.completion"
    model: str
    prompts: list[list[int]]
    n: int
    stream: Stream
    decode: Callable[[int], str]  # a token's text
    echo: list[str] | None = None
    usage: bool = False  # a last event with the usage
    token_ids: bool = False
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.chat = self.kind == "chat.completion"
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.index = {name: i * self.n for i, name in enumerate(self.stream.names)}
        self.completions = [Completion(i) for i in range(self.n * len(self.prompts))]
        self.cached = dict.fromkeys(self.stream.names, 0)
        self.offsets = [0] * len(self.completions)

    # Whole.

    async def whole(self) -> dict[str, Any]:
        """The answer, when all texts have ended; Failed if one did not end well."""
        async for deltas in self.stream:
            for delta in deltas:
                self._take(delta)
        choices = []
        for completion in self.completions:
            if completion.finish in ("error", "abort"):
                raise Failed(completion)
            choices.append(self._choice(completion))
        return self._body(self.kind, choices) | {"usage": self._usage()}

    def _choice(self, completion: Completion) -> dict[str, Any]:
        echo = self.echo[completion.index // self.n] if self.echo else ""
        out: dict[str, Any] = {
            "index": completion.index,
            "logprobs": self._logprobs(completion.index, completion.logprobs or []),
            "finish_reason": completion.finish,
            "stop_reason": completion.stop_reason,
        }
        if self.token_ids:
            out["token_ids"] = completion.tokens
        if self.chat:
            return out | {"message": {"role": "assistant", "content": completion.text}}
        return out | {"text": echo + completion.text}

    # As events.

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events, those of one step together."""
        yield b"".join(self._first())
        async for deltas in self.stream:
            out = []
            for delta in deltas:
                self._take(delta)
                if delta.finish in ("error", "abort"):
                    failed = Failed(delta)
                    out.append(event(error(failed.status, str(failed))))
                elif delta.text or delta.finish or delta.logprobs or self.token_ids:
                    out.append(self._event(delta))
            if out:
                yield b"".join(out)
        if self.usage:
            yield event(self._body(self._chunk, []) | {"usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _first(self) -> list[bytes]:
        """Chat begins with the role; an echo with the prompt."""
        out = []
        for i in range(len(self.completions)):
            first: dict[str, Any]
            if self.chat:
                first = {"delta": {"role": "assistant", "content": ""}}
            elif self.echo:
                first = {"text": self.echo[i // self.n]}
            else:
                continue
            choice = {"index": i, "logprobs": None, "finish_reason": None} | first
            out.append(event(self._body(self._chunk, [choice])))
        return out

    def _event(self, delta: Delta) -> bytes:
        index = self.index[delta.request] + delta.index
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": self._logprobs(index, delta.logprobs),
            "finish_reason": delta.finish,
            "stop_reason": delta.stop_reason,
        }
        choice |= {"delta": {"content": delta.text}} if self.chat else {"text": delta.text}
        if self.token_ids:
            choice["token_ids"] = delta.tokens
        return event(self._body(self._chunk, [choice]))

    @property
    def _chunk(self) -> str:
        return "chat.completion.chunk" if self.chat else self.kind

    # Both.

    def _take(self, delta: Delta) -> None:
        self.completions[self.index[delta.request] + delta.index].add(delta)
        self.cached[delta.request] = max(self.cached[delta.request], delta.cached)

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        prompt = sum(map(len, self.prompts))
        completion = sum(len(c.tokens) for c in self.completions)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }

    def _logprobs(self, index: int, found: list[Logprob]) -> dict[str, Any] | None:
        if not found:
            return None
        if self.chat:
            return {"content": [self._chat_logprob(logprob) for logprob in found]}
        texts = [self.decode(logprob.token) for logprob in found]
        offsets = list(itertools.accumulate(map(len, texts), initial=self.offsets[index]))
        self.offsets[index] = offsets[-1]
        return {
            "tokens": texts,
            "token_logprobs": [logprob.logprob for logprob in found],
            "top_logprobs": [{self.decode(t): p for t, p in lp.top} for lp in found],
            "text_offset": offsets[:-1],
        }

    def _chat_logprob(self, logprob: Logprob) -> dict[str, Any]:
        def entry(token: int, value: float) -> dict[str, Any]:
            text = self.decode(token)
            return {"token": text, "logprob": value, "bytes": list(text.encode())}

        top = [entry(t, p) for t, p in logprob.top]
        return entry(logprob.token, logprob.logprob) | {"top_logprobs": top}


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event. ASCII, since a token may decode to half a surrogate pair."""
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
