"""The engine: takes requests, runs steps, says what each step has added to which text."""

import itertools
import logging
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

from anybit.engine.masks import first_of, start
from anybit.engine.model_runner import Flight, Runner
from anybit.engine.output import Delta
from anybit.engine.prompts import prompt_results
from anybit.engine.sampler import INVALID, Sampled
from anybit.engine.scheduler import Scheduled, Scheduler
from anybit.engine.sequence import Logprob, Row, SamplingParams, Sequence
from anybit.engine.speculation import Speculation
from anybit.engine.structured import Grammars, Matcher, Tried
from anybit.errors import InvalidInput, Unsupported, in_a_line

log = logging.getLogger("anybit.engine")


@dataclass
class Stats:
    """Totals since the start. finished: texts by how they ended.

    drafts: of texts in a step, of draft_tokens, of which accepted_tokens were taken.
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
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
        self,
        runner: Runner,
        scheduler: Scheduler,
        length: int,
        eos: frozenset[int],
        vocabulary: int,
        grammars: Grammars | None = None,
        speculation: Speculation | None = None,
    ):
        self.runner, self.scheduler, self.length = runner, scheduler, length
        self.eos, self.vocabulary = eos, vocabulary
        self.grammars, self.speculation = grammars, speculation
        self.adapters: Collection[str] = ()  # names of those that requests may ask for
        self.requests: dict[str, list[Sequence]] = {}  # their texts that have not ended
        # Output tokens that were sampled and are not yet told, by number, and whether they were
        # drafted; None: only a prompt.
        self.unread: list[tuple[Sequence, int | None, Logprob | None, bool]] = []
        self.flight: Flight | None = None  # the next step, if it was started ahead
        self.begun = 0.0  # when the device turned to the step that runs
        self.stats, self.observer = Stats(), Observer()
        self.tell: Callable[[list[Delta]], None] | None = None  # what is known while a step runs
        self.served = False  # by a server, whose thread is then the one
        self.prepare: Callable[[], None] | None = None  # what is still to be done before it serves
        self.spare: Callable[[Callable[[], bool]], bool] | None = None  # see `idle`
        self.ready_at = (0, 0)  # kernels and graphs there were when it was ready

    def prepared(self) -> None:
        """Do what is to be done before requests come, once."""
        if self.prepare is not None:
            self.prepare()
            self.prepare = None

    def idle(self, wanted: Callable[[], bool]) -> None:
        """Do what makes later steps faster while there are no requests, until `wanted` says so."""
        if self.spare is not None and not self.busy and self.spare(wanted):
            self.spare = None

    def matchers(self, params: SamplingParams, tried: Tried | None = None) -> tuple[Matcher, ...]:
        """A matcher for each text of a request, compiled; any thread may ask. () without a grammar.

        tried: what another process says of the grammar.

        Raises:
            InvalidInput: The grammar is not taken.
        """
        if params.structured is None:
            return ()
        if self.grammars is None:
            raise InvalidInput("structured output needs a tokenizer, and the model has none")
        grammars, structured = self.grammars, params.structured
        return tuple(grammars.matcher(structured, tried) for _ in range(params.n))

    def check(
        self, prompt: Items[int], params: SamplingParams, matchers: Items[Matcher] = ()
    ) -> None:
        """ValueError when a prompt or its parameters cannot be served. matchers: see `add`."""
        if not prompt:
            raise InvalidInput("the prompt is empty; it needs at least one token")
        more = 0 if params.max_tokens == 0 else 1
        if len(prompt) + more > self.length:
            raise InvalidInput(
                f"the prompt has {len(prompt)} tokens; {'with at least one more ' * more}they must "
                f"fit into {self.length}"
            )
        marks = (params.structured and params.structured.think) or ()
        for tokens in (prompt, params.stop_token_ids, params.logit_bias, marks):
            if not tokens or (min(tokens) >= 0 and max(tokens) < self.vocabulary):
                continue
            wrong = next(t for t in tokens if not 0 <= t < self.vocabulary)
            raise InvalidInput(f"token {wrong} is not in the vocabulary of {self.vocabulary}")
        if params.adapter is not None and params.adapter not in self.adapters:
            known = ", ".join(map(repr, self.adapters)) or "none"
            raise InvalidInput(f"there is no adapter {params.adapter!r}; there are: {known}")
        if params.stop and self.grammars is None:
            raise InvalidInput("stop strings need a tokenizer, and the model has none")
        if params.structured is not None and not matchers:
            self.matchers(replace(params, n=1))  # compiled and kept
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
        matchers: Items[Matcher] = (),
    ) -> None:
        """Queue a request under a name of its own; ValueError if it cannot be served.

        arrival: when it came, by `time.monotonic`, if that was not now. matchers: one for each
        text, where they were made beforehand, because that may take long.
        """
        matchers = matchers or self.matchers(params)
        self.check(prompt, params, matchers)
        if request in self.requests:
            raise InvalidInput(f"request {request!r} is running already")
        new = self.length if params.max_tokens is None else params.max_tokens
        limit = min(len(prompt) + new, self.length)
        seqs = []
        for index in range(params.n):
            seq = Sequence(request, index, list(prompt), params, limit, self.eos)
            if matchers:
                seq.matcher = matchers[index]
                seq.matcher.punctual = not self.runner.repeats
                start(seq.matcher)
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

    def end(self, request: str, index: int, reason: str) -> None:
        """End a text whose reader has found its end; nothing happens if it has ended already."""
        for seq in self.requests.get(request, ()):
            if seq.index == index:
                self._end(seq, reason, running=not seq.finish)
                return

    @property
    def busy(self) -> bool:
        scheduler = self.scheduler
        return bool(scheduler.running or scheduler.waiting or self.unread or self.flight)

    def step(self) -> list[Delta]:
        """Run one step. If it fails, its sequences run one by one; those that fail end in "error".

        On a GPU the host keeps ahead: where that is possible, the next step is started before this
        one's tokens are known, and those of the step before are told (`tell`) while both run.
        Where there are grammars, these follow the tokens while the model runs, before it is
        sampled.
        """
        flight, self.flight = self.flight, None
        if flight is None:
            scheduled = self.scheduler.schedule()
            if not scheduled:
                first_of(seq.matcher for seqs in self.requests.values() for seq in seqs)
                return self._read()
            flight = self._launch(scheduled)
        out = []
        try:
            if self.runner.overlaps:
                following = self._following(flight.scheduled)
                self.flight = self._launch(following, flight) if following else None
                out = self._read()
                if self.tell is not None:
                    told, out = out, []
                    self.tell(told)
            tokens, logprobs = flight.wait()
        except Exception as error:
            self.flight = None
            return out + self._read() + self._failed(flight.scheduled, error)
        self._timed(flight.scheduled)
        out += self._taken(flight, tokens, logprobs)
        out += self._choose()
        return out if self.runner.overlaps else out + self._read()

    def _taken(
        self, flight: Flight, tokens: list[int], logprobs: list[Logprob | None]
    ) -> list[Delta]:
        """Take what a step has sampled."""
        out = []
        sampled = zip(flight.rows, tokens, logprobs, strict=True)
        for s in flight.scheduled:
            found = list(itertools.islice(sampled, s.sampled))
            if s.seq.finish:  # it has ended meanwhile
                continue
            try:
                out += self._take(s, found)
            except Exception as error:  # of its grammar, say
                log.exception("request %s: cannot take a token", s.seq.request)
                s.seq.finish = None  # what it has is read before it ends
                out += [*self._read(), self._end(s.seq, "error", in_a_line(error))]
        return out

    def _following(self, scheduled: list[Scheduled]) -> list[Scheduled]:
        """The step after one that still runs, if it can be started now."""
        if self.speculation is not None and not self.speculation.rests(scheduled):
            return []  # drafts begin with the tokens of this one
        return self.scheduler.ahead(scheduled)

    def _timed(self, scheduled: list[Scheduled]) -> None:
        """Note how long a step that has just ended took."""
        now = time.perf_counter()
        if self.speculation is not None:
            self.speculation.timed(scheduled, now - self.begun)
        if not self.runner.overlaps:
            self.scheduler.timed(scheduled, now - self.begun)
        self.begun = now

    def _launch(self, scheduled: list[Scheduled], previous: Flight | None = None) -> Flight:
        """Start a step; if that fails, waiting for it does."""
        self.stats.steps += 1
        try:
            if previous is None:
                if self.speculation is not None:
                    scheduled = self.speculation.drafted(scheduled, self.scheduler)
                self.begun = time.perf_counter()
            return self.runner.launch(scheduled, previous)
        except Exception as error:
            return failing(scheduled, error)

    def _choose(self) -> list[Delta]:
        """Sample for the step that was started ahead, if that took the tokens that came now.

        Texts are read while masks of grammars are computed.
        """
        flight, out = self.flight, []
        if flight is not None and flight.choose is not None:
            try:
                chosen = flight.choose()
                out = self._read()
                self.flight = chosen()
            except Exception as error:
                self.flight = failing(flight.scheduled, error)
        return out

    def _take(self, s: Scheduled, found: list[tuple[Row, int, Logprob | None]]) -> list[Delta]:
        """Append what was sampled for a sequence; free the blocks if that ends it.

        The token behind a draft counts if all of the draft was chosen. Where a mask is late, the
        text's last token runs once more.
        """
        seq, failure, accepted, before = s.seq, "", 0, s.seq.generated
        known = list(itertools.takewhile(lambda f: not (f[0].matcher and f[0].matcher.mask), found))
        late, found = len(found) - len(known), known
        if found and seq.last_token is None:
            self.stats.prompt_tokens += len(seq.prompt)
        if found and seq.params.max_tokens == 0:  # only the prompt was to be read
            seq.finish = "length"
            self.unread.append((seq, None, None, False))
            found = []
        for i, (row, token, logprob) in enumerate(found):
            if row.matcher and row.matcher.error:
                failure = row.matcher.error
            elif token == INVALID:
                failure = (
                    "the model's logits are NaN or inf, or no token is left to choose from: see "
                    "min_tokens, the grammar and biases"
                )
            if failure:
                break
            self.stats.generation_tokens += 1
            since = seq.last_token
            seq.append(token)
            self.observer.token(seq, since)
            drafted = token in s.draft[i : i + 1]
            self.unread.append((seq, seq.generated - 1, logprob, drafted))
            accepted += drafted
            if seq.finish or not drafted:
                break
        if seq.matcher and not seq.finish:
            start(seq.matcher)
        if s.draft:
            seq.rejected += len(s.draft) - accepted
            self.stats.drafts += 1
            self.stats.draft_tokens += len(s.draft)
            self.stats.accepted_tokens += accepted
        if self.speculation is not None:
            self.speculation.judge(seq, before)
        again = late > 0 and accepted == len(found) and not seq.finish
        self.scheduler.done(s, accepted - again)
        if failure:
            out = self._read()  # tokens of this step that came before
            return [*out, self._end(seq, "error", failure)] if seq in self._texts(seq) else out
        if seq.finish:
            self.scheduler.remove(seq)
        return []

    def _read(self) -> list[Delta]:
        """Tell the tokens that were sampled."""
        unread, self.unread, out = self.unread, [], []
        for seq, at, logprob, drafted in unread:
            if seq not in self._texts(seq):
                continue
            seq.accepted += drafted
            delta = Delta(
                seq.request,
                seq.index,
                tokens=[] if at is None else [seq.tokens[len(seq.prompt) + at]],
                logprobs=[logprob] if logprob else [],
                cached=seq.cached,
                accepted=seq.accepted,
                rejected=seq.rejected,
            )
            if seq.params.reads_prompt and not seq.told:
                delta.prompt_logprobs, delta.embedding = prompt_results(seq)
                seq.told = True
            if seq.finish and (at is None or at == seq.generated - 1):
                self._end(seq, seq.finish, running=False)
                delta.finish, delta.stop_reason = seq.finish, seq.stop_reason
                delta.silent = seq.silent
            out.append(delta)
        return out

    def _texts(self, seq: Sequence) -> Items[Sequence]:
        """The texts of a sequence's request that have not ended."""
        return self.requests.get(seq.request, ())

    def _end(self, seq: Sequence, reason: str, error: str = "", running: bool = True) -> Delta:
        """Forget a sequence; running: whether the scheduler still has it."""
        seq.finish = reason
        if running:
            self.scheduler.remove(seq)
        self.stats.finished[reason] = self.stats.finished.get(reason, 0) + 1
        self.observer.finished(seq)
        if self.speculation is not None:
            self.speculation.forget(seq)
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
            accepted=seq.accepted,
            rejected=seq.rejected,
        )

    def _failed(self, scheduled: list[Scheduled], error: Exception) -> list[Delta]:
        """Run the sequences of a step that raised one by one, and end those that cannot."""
        log.error("a step with %d sequences failed", len(scheduled), exc_info=error)
        out: list[Delta] = []
        for s in scheduled:
            if s.seq.finish:
                continue
            failure = error
            if len(scheduled) > 1:
                try:
                    flight = self.runner.launch([self.scheduler.again(s)], None)
                    out += self._taken(flight, *flight.wait())
                    continue
                except Exception as own:
                    failure = own
            out.append(self._end(s.seq, "error", in_a_line(failure)))
        return out + self._read()


def failing(scheduled: list[Scheduled], error: Exception) -> Flight:
    """A step whose waiting raises an error."""

    def wait() -> Sampled:
        raise error

    return Flight(scheduled, [], None, wait)
