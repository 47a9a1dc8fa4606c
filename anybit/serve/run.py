"""Running the server: its socket, its processes, its signals and its end."""

import gc
import json
import logging
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from anybit.errors import InvalidInput, Unsupported, in_a_line
from anybit.progress import START

if TYPE_CHECKING:
    from anybit.engine.llm import LLM
    from anybit.serve.service import Service
    from anybit.serve.settings import Settings

log = logging.getLogger("anybit.serve")
CHILD = "import sys; sys.path[:] = {path}; from anybit.serve.run import front_end; front_end()"


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; Unsupported if the address is not to be had. "::": also of IPv4.

    Before the model is loaded, so that a port in use is told at once. Clients that come while it
    is loaded wait.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        both = address[0] == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=both)
    except (OSError, UnicodeError) as error:  # the latter of a name that is none
        reason = getattr(error, "strerror", None) or "it is not a host name"
        raise Unsupported(
            f"cannot listen on {host}:{port}: {reason}; choose another --port or --host"
        ) from None


def front_end_count() -> int:
    """How many front ends suit this machine."""
    from anybit.kernels.processes import cores

    found = cores()
    return 1 if found < 8 else 2 if found < 32 else 4


@contextmanager
def starting(sock: socket.socket) -> Iterator[None]:
    """Tell the engine's process in a line what keeps a front end from starting, and end."""
    try:
        yield
    except Exception as error:
        from anybit.serve import channel

        remedy = "; install what is missing with: pip install 'anybit[serve]'"
        reason = in_a_line(error) + remedy * isinstance(error, ImportError)
        sock.sendall(channel.framed(channel.Broken(reason)))
        sys.exit(1)


def front_end() -> None:
    """The process. Its arguments are the numbers of the channel and of the socket that listens."""
    for kind in (signal.SIGINT, signal.SIGTERM):  # the engine's process says when to end
        signal.signal(kind, signal.SIG_IGN)
    sock, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    with starting(sock):
        from anybit.checkpoint.late import import_models

        import_models()  # whose tokenizers the engine may send
        from transformers import PreTrainedTokenizerFast  # noqa: F401

        from anybit.serve import front
    front.main(sock, listener)


class FrontEnds:
    """Processes that answer HTTP at a socket, which begin to import what they need at once.

    >>> with FrontEnds(bind("127.0.0.1", 8000)) as front_ends:
    ...     run(LLM(MODEL), Settings(("name",)), front_ends)

    listener: is closed at the end. count: of processes.
    """

    def __init__(self, listener: socket.socket, count: int = 1):
        self.listener = listener
        self.started = [self.start() for _ in range(count)]

    def start(self) -> "tuple[socket.socket, subprocess.Popen[bytes]]":
        """Start one: its socket and its process."""
        ours, theirs = socket.socketpair()
        numbers = theirs.fileno(), self.listener.fileno()
        command = [sys.executable, "-c", CHILD.format(path=json.dumps(sys.path))]
        with theirs:
            # In a group of its own: Ctrl-C is for the engine's process.
            process = subprocess.Popen(
                [*command, *map(str, numbers)], pass_fds=numbers, process_group=0
            )
        return ours, process

    def check(self) -> None:
        """Unsupported if one has found that it cannot start."""
        from anybit.serve.channel import Broken, Channel

        for sock, process in self.started:
            if process.poll() is not None:
                with suppress(OSError):  # it has said nothing, and is started again
                    for message in Channel(sock).receive():
                        if isinstance(message, Broken):
                            raise Unsupported(f"a front end cannot start: {message.reason}")

    def give(self, service: "Service") -> None:
        """Let a service have them, which will also start others in their places."""
        for place, (sock, process) in enumerate(self.started):
            service.attach(place, sock, process)
        self.started.clear()

    def __enter__(self) -> "FrontEnds":
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()
        for sock, process in self.started:  # those that no service has taken
            sock.close()
            process.kill()
            process.wait()


def service_of(llm: "LLM", settings: "Settings", start: Any = None) -> "Service":
    """What serves a model to front ends. start: see `Service`."""
    from anybit.serve.metrics import Metrics
    from anybit.serve.model import model_of
    from anybit.serve.service import Service

    if twice := set(settings.names) & set(llm.engine.adapters):
        raise InvalidInput(f"{twice.pop()!r} names the model and an adapter; rename one")
    level = logging.getLogger("anybit").getEffectiveLevel()
    facts = pickle.dumps((model_of(llm), settings, level))
    metrics = Metrics(llm.engine, settings.names[0], llm.kv_cache)
    return Service(llm.engine, settings, metrics, facts, start)


def run(llm: "LLM", settings: "Settings", front_ends: FrontEnds) -> None:
    """Serve until SIGINT or SIGTERM; then finish or fail every request, and return.

    Call it in the main thread, which runs the engine's steps.
    """
    service, engine = service_of(llm, settings, front_ends.start), llm.engine
    engine.prepare = partial(kept, engine.prepare)
    front_ends.give(service)
    try:
        with signals(service, front_ends.listener):
            service.run()
    finally:
        gc.unfreeze()  # or triton's library calls what is left at the end a leak, in 40 lines


def kept(prepare: Callable[[], None] | None) -> None:
    """Prepare an engine. Later searches for garbage leave out what there is then, which stays."""
    if prepare is not None:
        prepare()
    gc.collect()
    gc.freeze()
    log.info("the engine is ready after %.1f s: %s", START.whole, START)


@contextmanager
def signals(service: "Service", listener: socket.socket) -> Iterator[None]:
    """SIGINT and SIGTERM end a service, at once when one comes again."""

    def stop(*_: object) -> None:
        service.stop()
        listener.close()  # no front end is started any more

    before = {kind: signal.signal(kind, stop) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
