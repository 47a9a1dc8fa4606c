"""The engine's process: its loop of steps, and what front ends ask of it."""

import logging
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from subprocess import Popen, TimeoutExpired

from anybit.engine.engine import Engine
from anybit.engine.output import Delta
from anybit.engine.structured import Matcher
from anybit.errors import AnybitError, Unsupported, in_a_line
from anybit.progress import START
from anybit.serve import channel
from anybit.serve.channel import More
from anybit.serve.metrics import Metrics
from anybit.serve.settings import LAST, Settings

log = logging.getLogger("anybit.serve")

TRIES = 3  # starts of a front end in a row that come to nothing
PAUSE = 1.0  # seconds before another try
PATIENCE = 10.0  # seconds that front ends have to end once the engine has failed


@dataclass(eq=False)
class Front:
    """A front end. place: which of them it is. process: None where it is a thread.

    texts, tokens, more, admitted, refused: what the next message will say, see `channel.Step`.
    """

    place: int
    channel: channel.Channel
    process: "Popen[bytes] | None"
    ready: bool = False
    broken: str = ""  # why it cannot start
    serial: int = field(default_factory=count().__next__)
    texts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    more: list[More] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    refused: list[tuple[int, int, str]] = field(default_factory=list)


@dataclass(eq=False)
class Open:
    """A request that has not ended. first: its first text's number for its front end.

    tokens: of the prompt. left: texts. cached: prompt tokens that its front end was told of. added:
    whether the engine has it; before, its grammar is compiled.
    """

    front: Front
    first: int
    tokens: int
    left: int
    cached: int = 0
    added: bool = False


class Service:
    """Runs an engine for front ends; one thread calls `run`, any thread calls `stop`.

    hello: what every front end is told first. start: starts a front end, and gives its socket and
    its process; None: those that end are not started again.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        metrics: Metrics,
        hello: bytes,
        start: "Callable[[], tuple[socket.socket, Popen[bytes] | None]] | None" = None,
    ):
        self.engine, self.settings, self.metrics = engine, settings, metrics
        self.hello, self.start = channel.Hello(hello), start
        self.fronts: dict[int, Front] = {}  # by the number of the socket
        self.open: dict[str, Open] = {}  # by the engine's names of requests
        self.room = engine.scheduler.max_running + settings.queue
        self.texts = self.tokens = 0  # of requests that have not ended
        self.serving = threading.Event()  # once a front end answers and steps are prepared
        self._poll = select.poll()
        self._grace: float | None = None  # seconds that were given for the end
        self._told: float | None = None  # those of them that front ends know
        self._end = float("inf")  # when front ends are ended that have not ended themselves
        self._starts: list[tuple[float, int]] = []  # when to start front ends, and their places
        self._failures: dict[int, int] = {}  # starts in a row that came to nothing, by place
        self._wake: tuple[socket.socket, ...] = ()  # ends a wait of the loop
        self._compiler = ThreadPoolExecutor(1, "anybit-grammars")
        self._compiled: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def attach(self, place: int, sock: socket.socket, process: "Popen[bytes] | None") -> None:
        """Take a front end that was started, and tell it what it needs."""
        front = Front(place, channel.Channel(sock), process)
        self.fronts[front.channel.fileno()] = front
        self._poll.register(sock, select.POLLIN)
        self._send(front, self.hello)
        self._send(front, channel.State(self.engine.prepare is not None))

    def stop(self, grace: float | None = None) -> None:
        """Let requests end within the grace, and then `run`; a second time: at once."""
        self._grace = 0 if self._grace is not None else grace
        if self._grace is None:
            self._grace = self.settings.grace
        self.wake()

    def wake(self) -> None:
        """End a wait of the loop."""
        for end in self._wake[1:]:
            with suppress(OSError):  # it is full, or the loop has ended
                end.send(b"x")

    def run(self) -> None:
        """Serve until `stop`.

        Raises:
            Unsupported: Something else uses the engine, or front ends do not start.
            Exception: The engine has failed, which front ends have told their clients.
        """
        engine = self.engine
        if engine.served or engine.requests:
            for front in list(self.fronts.values()):
                self._part(front)
            raise Unsupported(
                "the engine is at work already, for another server or LLM; wait until that has "
                "ended, or make an engine of its own"
            )
        engine.served, self._wake = True, socket.socketpair()
        for end in self._wake:
            end.setblocking(False)
        self._poll.register(self._wake[0], select.POLLIN)
        try:
            self._greet()
            engine.prepared()
            engine.tell = self._tell_now
            self._broadcast(channel.State(False))
            while self._commands():
                if engine.busy:
                    self._tell(engine.step())
                self._flush()
        except BaseException as error:
            known = isinstance(error, AnybitError)  # and told by who has called this
            log.error("the engine has failed: %s", in_a_line(error), exc_info=not known and error)
            self._broadcast(channel.Failed(in_a_line(error)))
            self._wait(PATIENCE)
            raise
        finally:
            for name in list(self.open):
                self._forget(name)
                engine.abort(name)
            for front in list(self.fronts.values()):
                self._part(front)
            self._compiler.shutdown(wait=False, cancel_futures=True)
            for end in self._wake:
                end.close()
            engine.served, engine.tell = False, None

    # The loop.

    def _commands(self) -> bool:
        """Do what was asked for, waiting if there is nothing else to do; False at the end."""
        if self.serving.is_set():  # what front ends still do to answer comes first
            self.engine.idle(self._wanted)
        self._messages(self._patience())
        while not self._compiled.empty():
            self._compiled.get()()
        now = time.monotonic()
        while self._starts and self._starts[0][0] <= now:
            _, place = self._starts.pop(0)
            assert self.start is not None
            self.attach(place, *self.start())
        self._stop(now)
        return self._told is None or (bool(self.fronts) and now < self._end)

    def _greet(self) -> None:
        """Send front ends what they need, in a second at most; what they ask is read later."""
        end = time.monotonic() + 1
        while late := [front for front in self.fronts.values() if front.channel.waits]:
            room = select.poll()
            for front in late:
                room.register(front.channel, select.POLLOUT)
            if not (ready := room.poll(max(end - time.monotonic(), 0) * 1e3)):
                return
            for number, _ in ready:
                try:
                    self._send_more(number, self.fronts[number])
                except OSError as error:
                    self._lost(self.fronts[number], error)

    def _messages(self, patience: float | None) -> None:
        """Send what waits, and do what is asked. patience: milliseconds to wait for either."""
        for number, what in self._poll.poll(patience):
            front = self.fronts.get(number)
            if front is None:
                with suppress(BlockingIOError):
                    self._wake[0].recv(1 << 12)
                continue
            try:
                if what & select.POLLOUT:
                    self._send_more(number, front)
                if what & ~select.POLLOUT:
                    for message in front.channel.receive():
                        self._do(front, message)
            except OSError as error:
                self._lost(front, error)

    def _send_more(self, number: int, front: Front) -> None:
        """Send what waits, as far as there is room."""
        front.channel.flush()
        if not front.channel.waits:
            self._poll.modify(number, select.POLLIN)

    def _wanted(self) -> bool:
        """Whether something is to be done now."""
        return bool(self._starts or self._poll.poll(0)) or not self._compiled.empty()

    def _patience(self) -> float | None:
        """Milliseconds that the loop may wait for messages."""
        if self.engine.busy or not self._compiled.empty():
            return 0
        times = [at for at, _ in self._starts]
        times += [self._end] if self._end < float("inf") else []
        return max(min(times) - time.monotonic(), 0) * 1e3 if times else None

    def _stop(self, now: float) -> None:
        """Tell front ends to end, as soon as that is known."""
        grace = self._grace
        if grace is None or grace == self._told:
            return
        if self._told is None:
            told = f"; {self.texts} running sequences have {grace:g} s" * bool(self.texts)
            log.warning("shutting down%s", told)
        self._told, self._starts, self._end = grace, [], now + grace + 2 * LAST
        self._broadcast(channel.Stop(grace))

    def _do(self, front: Front, message: channel.FromFront) -> None:
        match message:
            case channel.Add():
                self._add(front, message)
            case channel.End(request, index, reason):
                name = name_of(front, request)
                self.engine.end(name, index, reason)
                self._ended(name)
            case channel.Abort(requests):
                for request in requests:
                    name = name_of(front, request)
                    self._forget(name)
                    self.engine.abort(name)
            case channel.Ready():
                front.ready, self._failures[front.place] = True, 0
                if not self.serving.is_set():
                    log.info("a front end answers after %.1f s", START.whole)
                self.serving.set()
            case channel.Broken(reason):
                front.broken = reason
            case channel.Times(seen):
                self.metrics.merge(seen)
            case channel.Ask(number):
                self._send(front, channel.Told(number, self.metrics.text()))

    # Requests.

    def _add(self, front: Front, add: channel.Add) -> None:
        """Take requests, or refuse them: 400 for what cannot be, 503 for too much at once."""
        texts = sum(params.n for _, params, _ in add.requests)
        tokens = sum(len(prompt) for prompt, _, _ in add.requests)
        most = self.settings.queue_tokens
        if texts > self.room or tokens > most:
            reason = (
                f"{texts} completions of {tokens} prompt tokens are too many for one request; this "
                f"server takes {self.room} and {most}"
            )
            front.refused.append((add.first, 400, reason))
            return
        if self._grace is not None:
            front.refused.append((add.first, 503, "the engine is shutting down"))
            return
        if self.texts + texts > self.room or self.tokens + tokens > most:
            front.refused.append((add.first, 503, "the server has too many requests"))
            return
        names, first = [], add.first
        for prompt, params, _ in add.requests:
            names.append(name_of(front, first))
            self.open[names[-1]] = Open(front, first, len(prompt), params.n)
            self.texts, self.tokens = self.texts + params.n, self.tokens + len(prompt)
            first += params.n
        if any(params.structured for _, params, _ in add.requests):
            self._compiler.submit(self._compile, front, add, names)
        else:
            self._checked(front, add, names, [()] * len(names))

    def _compile(self, front: Front, add: channel.Add, names: list[str]) -> None:
        """Compile the grammars of requests, in a thread, and have them added."""
        error: Exception | None = None
        matchers: list[Items[Matcher]] = []
        try:
            for _, params, tried in add.requests:
                matchers.append(self.engine.matchers(params, tried))
        except Exception as caught:
            error = caught
        self._compiled.put(lambda: self._checked(front, add, names, matchers, error))
        self.wake()

    def _checked(
        self,
        front: Front,
        add: channel.Add,
        names: list[str],
        matchers: list[Items[Matcher]],
        error: Exception | None = None,
    ) -> None:
        """Add requests to the engine, if it can serve them all."""
        if not any(name in self.open for name in names):  # all were aborted meanwhile
            return
        each = list(zip(names, add.requests, matchers, strict=False))
        try:
            if error is not None:
                raise error
            for _, (prompt, params, _), found in each if len(each) > 1 else ():
                self.engine.check(prompt, params, found)
            for name, (prompt, params, _), found in each:
                if name in self.open:
                    self.engine.add(name, prompt, params, add.arrival, found)
                    self.open[name].added = True
        except Exception as caught:
            for name in names:
                self._forget(name)
                self.engine.abort(name)
            status = 400 if isinstance(caught, AnybitError | ModuleNotFoundError) else 500
            if status == 500:
                log.exception("request %s cannot be added", names)
            front.refused.append((add.first, status, in_a_line(caught)))
        else:
            front.admitted.append(add.first)

    def _forget(self, name: str) -> None:
        """Count a request no more."""
        if found := self.open.pop(name, None):
            self.texts, self.tokens = self.texts - found.left, self.tokens - found.tokens

    def _ended(self, name: str) -> None:
        """Count a text of a request no more."""
        if found := self.open.get(name):
            found.left, self.texts = found.left - 1, self.texts - 1
            if not found.left:
                del self.open[name]
                self.tokens -= found.tokens

    # Front ends.

    def _tell(self, deltas: list[Delta]) -> None:
        """Note what a step has added, for the front ends that have asked for it."""
        for delta in deltas:
            found = self.open.get(delta.request)
            if found is None:
                continue
            front = found.front
            if (
                delta.finish
                or delta.logprobs
                or delta.accepted
                or delta.rejected
                or delta.cached > found.cached
                or delta.prompt_logprobs
                or delta.embedding
            ):
                front.more.append(more(len(front.texts), delta))
                found.cached = max(found.cached, delta.cached)
            front.texts.append(found.first + delta.index)
            front.tokens.append(delta.tokens[0] if delta.tokens else -1)
            if delta.finish:
                self._ended(delta.request)

    def _tell_now(self, deltas: list[Delta]) -> None:
        """Tell them in the middle of a step, for whose end they would wait: 20 ms, if it reads."""
        self._tell(deltas)
        self._flush()

    def _flush(self) -> None:
        """Send what was noted."""
        for front in list(self.fronts.values()):
            if front.texts or front.admitted or front.refused:
                step = channel.Step(
                    front.texts,
                    front.tokens,
                    front.more,
                    front.admitted,
                    front.refused,
                    time.monotonic(),
                )
                front.texts, front.tokens, front.more = [], [], []
                front.admitted, front.refused = [], []
                self._send(front, step)

    def _send(self, front: Front, message: channel.Message) -> None:
        try:
            front.channel.send(message)
        except OSError as error:
            self._lost(front, error)
            return
        if front.channel.waits:
            self._poll.modify(front.channel.sock, select.POLLIN | select.POLLOUT)

    def _broadcast(self, message: channel.Message) -> None:
        for front in list(self.fronts.values()):
            self._send(front, message)

    def _lost(self, front: Front, error: OSError) -> None:
        """Drop a front end that has ended, with its requests, and have another one started."""
        if self.fronts.get(front.channel.fileno()) is not front:
            return
        names = [name for name, found in self.open.items() if found.front is front]
        for name in names:
            self._forget(name)
            self.engine.abort(name)
        with suppress(OSError):  # the reason may have come when it had ended already
            reasons = [m for m in front.channel.receive() if isinstance(m, channel.Broken)]
            front.broken = front.broken or "".join(each.reason for each in reasons)
        self._part(front)
        if self._grace is not None or self.start is None:
            return
        how = front.broken or ended(front, error)
        failures = self._failures.get(front.place, 0) + (not front.ready)
        if front.broken and not self.serving.is_set():
            raise Unsupported(f"a front end cannot start: {how}")
        if failures >= TRIES:
            raise Unsupported(f"a front end has failed {failures} times before it was ready: {how}")
        log.error(
            "a front end has failed: %s; its %d requests are dropped, and it starts again",
            how,
            len(names),
        )
        self._failures[front.place] = failures
        when = time.monotonic() + (0 if front.ready else PAUSE)
        self._starts = sorted([*self._starts, (when, front.place)])

    def _part(self, front: Front) -> None:
        """End a front end, if it has not ended."""
        number = front.channel.fileno()
        del self.fronts[number]
        self._poll.unregister(number)
        front.channel.sock.close()
        if front.process is not None:
            with suppress(TimeoutExpired):
                front.process.wait(0.05 if front.ready else 1.0)
            front.process.kill()
            front.process.wait()

    def _wait(self, seconds: float) -> None:
        """Give front ends some time to end by themselves."""
        end = time.monotonic() + seconds
        for front in self.fronts.values():
            if front.process is not None:
                with suppress(TimeoutExpired):
                    front.process.wait(max(end - time.monotonic(), 0))


def ended(front: Front, error: OSError) -> str:
    """How a front end has ended."""
    status = front.process.returncode if front.process else None
    if status is None:
        return str(error)
    if status < 0:
        return f"signal {-status} has ended it"
    return f"it has ended with status {status}, and its output above says why"


def name_of(front: Front, request: int) -> str:
    """What the engine calls a request of a front end."""
    return f"{front.serial}-{request}"


def more(at: int, delta: Delta) -> channel.More:
    """What a message says of a delta besides its token."""
    reason = delta.stop_reason
    return channel.More(
        at,
        delta.finish,
        reason if isinstance(reason, int) else None,
        delta.silent,
        delta.error,
        delta.cached,
        delta.accepted,
        delta.rejected,
        delta.logprobs,
        delta.prompt_logprobs,
        delta.embedding,
    )
