"""The engine: takes requests, runs steps, says what each step has added to which text."""

import itertools
import logging
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from functools import partial

from anybit.engine.detokenizer import Detokenizer
from anybit.engine.model_runner import Flight, Runner
from anybit.engine.prompts import prompt_results
from anybit.engine.sampler import INVALID, Sampled
from anybit.engine.scheduler import Scheduled, Scheduler
from anybit.engine.sequence import Logprob, SamplingParams, Sequence
from anybit.engine.structured import Grammars
from anybit.errors import InvalidInput, Unsupported

log = logging.getLogger("anybit.engine")

Decode = Callable[[list[int], Items[int]], str]  # tokens, and the special ones among them to show


@dataclass(frozen=True)
class Delta:
    """What a step has added to one text; the last one of a text has a `finish`.

    text: may lag behind the tokens, and never holds a part of a stop string. finish: "stop",
    "length", "abort" or "error"; stop_reason: the stop string or token. The first one of a text
    has what was asked about the prompt: prompt_logprobs, with None for the first token, and the
    embedding (hidden,).
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
    prompt_logprobs: list[Logprob | None] | None = None
    embedding: list[float] | None = None


@dataclass
class Stats:
    """Totals since the start. finished: texts by how they ended."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    steps: int = 0


class Observer:
    """Is told what happens, in the engine's thread; does nothing by itself."""

    def token(self, seq: Sequence, since: float | None) -> None:
        """A token was sampled; `since` is the time of the one before, None for the first."""

    def finished(self, seq: Sequence) -> None:
        """A text has ended; `seq.finish` says how."""


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread calls all methods."""

    def __init__(
        self, runner: Runner, scheduler: Scheduler, length: int, decode: Decode | None,
        eos: frozenset[int], vocabulary: int, grammars: Grammars | None = None,
    ):  # fmt: skip
        self.runner, self.scheduler, self.length = runner, scheduler, length
        self.decode, self.eos, self.vocabulary = decode, eos, vocabulary
        self.grammars = grammars
        self.adapters: Collection[str] = ()  # names of those that requests may ask for
        self.requests: dict[str, list[Sequence]] = {}  # their texts that have not ended
        self.unread: list[tuple[Sequence, int | None, Logprob | None]] = []  # sampled, not yet text
        self.flight: Flight | None = None  # the next step, if it was started ahead
        self.stats, self.observer = Stats(), Observer()

    def check(self, prompt: Items[int], params: SamplingParams) -> None:
        """ValueError when a prompt or its parameters cannot be served."""
        if not prompt:
            raise InvalidInput("the prompt is empty; it needs at least one token")
        more = 0 if params.max_tokens == 0 else 1
        if len(prompt) + more > self.length:
            raise InvalidInput(
                f"the prompt has {len(prompt)} tokens; {'with at least one more ' * more}they must "
                f"fit into {self.length}"
            )
        tokens = itertools.chain(prompt, params.stop_token_ids, params.logit_bias)
        wrong = next((t for t in tokens if not 0 <= t < self.vocabulary), None)
        if wrong is not None:
            raise InvalidInput(f"token {wrong} is not in the vocabulary of {self.vocabulary}")
        if params.adapter is not None and params.adapter not in self.adapters:
            known = ", ".join(map(repr, self.adapters)) or "none"
            raise InvalidInput(f"there is no adapter {params.adapter!r}; there are: {known}")
        if params.stop and self.decode is None:
            raise InvalidInput("stop strings need a tokenizer, and the model has none")
        if params.structured is not None:
            if self.grammars is None:
                raise InvalidInput("structured output needs a tokenizer, and the model has none")
            self.grammars.matcher(params.structured)  # compiled and kept
        if params.reads_prompt and not self.runner.reads_prompts:
            raise Unsupported(
                "log probabilities of prompts and embeddings need a model that the engine runs "
                "itself, and transformers' generate runs this one"
            )

    def add(
        self,
        request: str,
        prompt: Items[int],
        params: SamplingParams,
        arrival: float | None = None,
    ) -> None:
        """Queue a request under a name of its own; ValueError if it cannot be served.

        arrival: when it came, by `time.monotonic`, if that was not now.
        """
        self.check(prompt, params)
        if request in self.requests:
            raise InvalidInput(f"request {request!r} is running already")
        new = self.length if params.max_tokens is None else params.max_tokens
        limit = min(len(prompt) + new, self.length)
        decode = None if self.decode is None else partial(decoded, self.decode, params.shown)
        seqs = []
        for index in range(params.n):
            text = Detokenizer(decode, prompt, params.stop)
            seq = Sequence(request, index, list(prompt), params, text, limit, self.eos)
            if params.structured is not None and self.grammars is not None:
                seq.matcher = self.grammars.matcher(params.structured)
            seq.arrival = seq.arrival if arrival is None else arrival
            seqs.append(seq)
        self.requests[request] = seqs
        for seq in seqs:
            self.scheduler.add(seq)

    def abort(self, request: str) -> list[Delta]:
        """End a request now and free its blocks; nothing happens if it has ended already."""
        seqs = list(self.requests.get(request, []))
        # One whose last token is sampled but not read has left the scheduler already.
        return [self._end(seq, "abort", running=not seq.finish) for seq in seqs]

    @property
    def busy(self) -> bool:
        scheduler = self.scheduler
        return bool(scheduler.running or scheduler.waiting or self.unread or self.flight)

    def step(self) -> list[Delta]:
        """Run one step. A failure ends the requests in it with "error", and no others.

        On a GPU the host keeps ahead: where that is possible, the next step is started before this
        one's tokens are known, and the texts of the step before are read while both run.
        """
        flight, self.flight = self.flight, None
        if flight is None:
            scheduled = self.scheduler.schedule()
            if not scheduled:
                return self._read()
            flight = self._launch(scheduled)
        out = []
        try:
            if self.runner.overlaps:
                following = self.scheduler.ahead(flight.scheduled)
                self.flight = self._launch(following, flight) if following else None
                out = self._read()
            tokens, logprobs = flight.wait()
        except Exception as error:
            self.flight = None
            return out + self._read() + self._failed(flight.scheduled, error)
        sampled = zip(tokens, logprobs, strict=True)
        for s in flight.scheduled:
            found = next(sampled) if s.samples else None
            if s.seq.finish:  # it has ended meanwhile
                continue
            self.scheduler.done(s)
            if found and s.seq.matcher and s.seq.matcher.error:
                out.append(self._end(s.seq, "error", s.seq.matcher.error))
            elif found and found[0] == INVALID:
                out.append(self._end(s.seq, "error", "the model's logits are NaN or inf"))
            elif found:
                self._take(s.seq, *found)
        return out if self.runner.overlaps else out + self._read()

    def _launch(self, scheduled: list[Scheduled], previous: Flight | None = None) -> Flight:
        """Start a step; if that fails, waiting for it does."""
        self.stats.steps += 1
        try:
            return self.runner.launch(scheduled, previous)
        except Exception as error:
            failure = error

        def wait() -> Sampled:
            raise failure

        return Flight(scheduled, None, wait)

    def _take(self, seq: Sequence, token: int, logprob: Logprob | None) -> None:
        """Append a sampled token, and free the blocks if it is the last."""
        if seq.last_token is None:
            self.stats.prompt_tokens += len(seq.prompt)
        if seq.params.max_tokens == 0:  # only the prompt was to be read
            seq.finish = "length"
            self.scheduler.remove(seq)
            self.unread.append((seq, None, None))
            return
        self.stats.generation_tokens += 1
        since = seq.last_token
        seq.append(token, logprob)
        self.observer.token(seq, since)
        if seq.finish:
            self.scheduler.remove(seq)
        self.unread.append((seq, token, logprob))

    def _read(self) -> list[Delta]:
        """Turn tokens into text, and look for stop strings in it."""
        unread, self.unread, out = self.unread, [], []
        for seq, token, logprob in unread:
            if seq.finish in ("abort", "error"):
                continue
            released, running = seq.detokenizer.released, not seq.finish
            try:
                stopped = token is not None and seq.read()
            except Exception as error:  # a tokenizer's decoder may fail on a token
                log.exception("request %s: cannot decode token %s", seq.request, token)
                out.append(
                    self._end(seq, "error", f"cannot decode token {token}: {error}", running)
                )
                continue
            delta = Delta(
                seq.request,
                seq.index,
                seq.detokenizer.text[released : seq.detokenizer.released],
                [] if token is None else [token],
                [logprob] if logprob else [],
                cached=seq.cached,
            )
            if seq.params.reads_prompt and not seq.told:
                delta, seq.told = replace(delta, **prompt_results(seq)), True
            if seq.finish:
                end = self._end(seq, seq.finish, running=running and stopped)
                delta = replace(delta, finish=end.finish, stop_reason=end.stop_reason)
            out.append(delta)
        return out

    def _end(self, seq: Sequence, reason: str, error: str = "", running: bool = True) -> Delta:
        """Forget a sequence; running: whether the scheduler still has it."""
        seq.finish, seq.error = reason, error
        if running:
            self.scheduler.remove(seq)
        self.stats.finished[reason] = self.stats.finished.get(reason, 0) + 1
        self.observer.finished(seq)
        seqs = self.requests[seq.request]
        seqs.remove(seq)
        if not seqs:
            del self.requests[seq.request]
        return Delta(
            seq.request,
            seq.index,
            finish=reason,
            stop_reason=seq.stop_reason,
            error=error,
            cached=seq.cached,
        )

    def _failed(self, scheduled: list[Scheduled], error: Exception) -> list[Delta]:
        """End the sequences of a step that raised."""
        log.error("a step with %d sequences failed", len(scheduled), exc_info=error)
        text = f"{type(error).__name__}: {error}"
        return [self._end(s.seq, "error", text) for s in scheduled if not s.seq.finish]


def decoded(decode: Decode, shown: Items[int], tokens: list[int]) -> str:
    """Text of tokens."""
    return decode(tokens, shown)
