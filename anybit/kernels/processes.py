"""Calls in other processes, side by side: compilers mostly take one call at a time in each.

Processes are started by this module's name, so that a script that loads a model need not guard
itself against being imported again.
"""

import atexit
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TypeAlias

Process: TypeAlias = "subprocess.Popen[bytes]"
MOST = 32  # processes, unless told
CRASHES = {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
IDLE = 60.0  # seconds without a call after which a child ends
FORGOTTEN = 600  # seconds after which it ends by itself
_standing = 0  # `standing_by`s that have not ended
_waiting: list[Process] = []
_unanswered: set[Process] = set()  # of them, those whose answer to `wait_with` is not read


def side_by_side(
    calls: Sequence[Callable[[], object]],
    jobs: int = 0,
    done: Callable[[int], object] = lambda at: None,
) -> list[str]:
    """Call functions that can be pickled, for what they leave on disk.

    Args:
        calls: Started in this order.
        jobs: Processes; 0 for one a core.
        done: Called with a call's place when it has returned without an error.

    Returns:
        The error of each call, "" where there was none.
    """
    count = min(len(calls), jobs or max(len(_waiting), cores()))
    if not calls:
        return []
    idle: SimpleQueue[Process] = SimpleQueue()
    started: list[Process] = []

    def called(at: int) -> str:
        process = idle.get()
        try:
            if process.poll() is not None:  # it has ended with the call before
                started.append(process := worker())
            answer = asked(process, calls[at])
        except Exception as error:  # what a call holds may raise anything when it is pickled
            answer = f"the process that compiles it has ended: {error}"
            process.kill()
            process.wait()
        finally:
            idle.put(process)
        if not answer:
            done(at)
        return answer

    try:
        for _ in range(count):
            started.append(worker())
            idle.put(started[-1])
        with ThreadPoolExecutor(count) as pool:
            answers = list(pool.map(called, range(len(calls))))
        if _standing:
            _waiting.extend(process for process in started if process.poll() is None)
            started = [process for process in started if process not in _waiting]
        return answers
    finally:
        ended(started)


@contextmanager
def standing_by() -> Iterator[None]:
    """Processes that have made their calls wait for further ones inside, and end with it.

    So do those of `wait_with`: to start one takes seconds of imports.
    """
    global _standing
    _standing += 1
    try:
        yield
    finally:
        _standing -= 1
        if not _standing:
            ended(_waiting)
            _waiting.clear()
            _unanswered.clear()


def wait_with(calls: Sequence[Callable[[], object]]) -> None:
    """Start a process for each call, such as for imports, that then waits for those who need it."""
    for call in calls:
        process = started_now()
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(call))
        process.stdin.flush()
        _unanswered.add(process)
        _waiting.append(process)


def ended(processes: Sequence[Process]) -> None:
    """End processes."""
    for process in processes:
        process.kill()
        process.communicate()


class Child:
    """A process that makes calls first which may end it, and not this one.

    It starts with the first call, and again after one that has ended it; it ends when it was not
    asked for a minute, and with this process.
    """

    def __init__(self) -> None:
        self._begin()
        atexit.register(self.end)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin)
            os.register_at_fork(after_in_child=_waiting.clear)

    def _begin(self) -> None:
        """Have no process; a fork of this one leaves to it what it has."""
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._idle: threading.Timer | None = None

    def survives(self, call: Callable[[], object]) -> bool:
        """Whether a function that can be pickled crashes no process, whatever else it does."""
        with self._lock:
            if self._idle is not None:
                self._idle.cancel()
            try:
                if self._process is None or self._process.poll() is not None:
                    self._process = worker()
                asked(self._process, call)
            except (EOFError, OSError):  # also where no process can start
                crashed = self._process is not None and -self._process.wait() in CRASHES
                self._end()
                return not crashed
            except Exception:  # such as of a call that cannot be pickled, of which nothing is known
                self._end()
                return True
            except BaseException:  # Ctrl-C: the answer would be taken for the next one's
                self._end()
                raise
            self._idle = threading.Timer(IDLE, self.end)
            self._idle.daemon = True
            self._idle.start()
            return True

    def end(self) -> None:
        """End the process, if it is there and idle."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def asked(process: Process, call: Callable[[], object]) -> str:
    """The error of a call that a worker makes, "" if there is none.

    Raises:
        EOFError, OSError: The process has ended.
        Exception: Whatever the call's parts raise when they are pickled.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    if process in _unanswered:
        _unanswered.remove(process)
        pickle.load(process.stdout)
    process.stdin.write(pickle.dumps(call))
    process.stdin.flush()
    answer: str = pickle.load(process.stdout)
    return answer


def cores() -> int:
    """Cores that this process may use, and no more processes than fit into usual memories."""
    affinity = getattr(os, "sched_getaffinity", None)
    return min(MOST, len(affinity(0)) if affinity else os.cpu_count() or 1)


def worker() -> Process:
    """A process that runs `serve`: one that waits, if there is one."""
    try:
        return _waiting.pop(0)
    except IndexError:
        return started_now()


def started_now() -> Process:
    """A new process that runs `serve`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command, pipe = [sys.executable, "-m", __name__], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)


def serve() -> None:
    """Make calls as they come, and answer with an error or nothing; Ctrl-C is the parent's.

    Where none comes for minutes, such as after a start that has failed, this process ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    alarm = getattr(signal, "alarm", lambda seconds: 0)  # Windows has none
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a compiler prints is no answer
    while True:
        alarm(FORGOTTEN)
        try:
            call = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        except Exception as error:  # a format of the caller's own script, say
            answer = f"{type(error).__name__}: {error}"
        else:
            alarm(0)
            answer = ""
            try:
                call()
            except Exception as error:
                answer = str(error) or type(error).__name__
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    serve()
