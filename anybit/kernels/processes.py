"""Calls in other processes, side by side: compilers mostly take one call at a time in each.

Processes are started by this module's name, so that a script that loads a model need not guard
itself against being imported again.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeAlias

Process: TypeAlias = "subprocess.Popen[bytes]"
MOST = 32  # processes, unless told


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
    count = min(len(calls), jobs or cores())
    if not calls:
        return []
    idle: SimpleQueue[Process] = SimpleQueue()
    started: list[Process] = []

    def called(at: int) -> str:
        process = idle.get()
        try:
            if process.poll() is not None:  # it has ended with the call before
                started.append(process := worker())
            pickle.dump(calls[at], process.stdin)  # type: ignore[arg-type]
            process.stdin.flush()  # type: ignore[union-attr]
            answer: str = pickle.load(process.stdout)  # type: ignore[arg-type]
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
            return list(pool.map(called, range(len(calls))))
    finally:
        for process in started:
            process.kill()
            process.communicate()


def cores() -> int:
    """Cores that this process may use, and no more processes than fit into usual memories."""
    affinity = getattr(os, "sched_getaffinity", None)
    return min(MOST, len(affinity(0)) if affinity else os.cpu_count() or 1)


def worker() -> Process:
    """A process that runs `serve`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command, pipe = [sys.executable, "-m", __name__], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)


def serve() -> None:
    """Make calls as they come, and answer with an error or nothing."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a compiler prints is no answer
    while True:
        try:
            call = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        except Exception as error:  # a format of the caller's own script, say
            answer = f"{type(error).__name__}: {error}"
        else:
            answer = ""
            try:
                call()
            except Exception as error:
                answer = str(error) or type(error).__name__
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    serve()
