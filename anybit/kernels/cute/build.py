"""Compile many kernels ahead of time, in parallel and without a GPU; see `jit.py`.

The DSL compiles one kernel at a time in a process. Processes are started by this module's name, so
that a script that loads a model need not guard itself against being imported again.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TypeAlias

from anybit.errors import Unsupported
from anybit.kernels.cute.jit import KernelSpec, Uncompiled, collected, compile_kernel, kernel_file

Process: TypeAlias = "subprocess.Popen[bytes]"
MOST = 32  # processes, unless told


def build(
    kernels: Sequence[KernelSpec],
    folder: str | Path | None = None,
    jobs: int = 0,
    step: Callable[[int, str], object] = lambda count, name: None,
) -> list[str]:
    """Compile what is missing, in parallel processes.

    Args:
        kernels: Repeated ones count once.
        folder: Where the kernels go; None for the cache folder.
        jobs: Processes; 0 for one a core.
        step: Called with 1 and the file's name when a kernel is done.

    Returns:
        The errors, one line for each kernel that failed.
    """
    missing = [k for k in dict.fromkeys(kernels) if not kernel_file(k, folder).exists()]
    count = min(len(missing), jobs or cores())
    if not missing:
        return []
    idle: SimpleQueue[Process] = SimpleQueue()
    started: list[Process] = []

    def compiled(kernel: KernelSpec) -> str:
        process = idle.get()
        try:
            if process.poll() is not None:  # it has ended with the kernel before
                started.append(process := worker())
            pickle.dump((kernel, folder), process.stdin)  # type: ignore[arg-type]
            process.stdin.flush()  # type: ignore[union-attr]
            answer: str = pickle.load(process.stdout)  # type: ignore[arg-type]
        except Exception as error:  # what a kernel holds may raise anything when it is pickled
            answer = f"the process that compiles it has ended: {error}"
            process.kill()
            process.wait()
        finally:
            idle.put(process)
        if not answer:
            step(1, kernel_file(kernel, folder).name)
        return answer

    try:
        for _ in range(count):
            started.append(worker())
            idle.put(started[-1])
        with ThreadPoolExecutor(count) as pool:
            answers = list(pool.map(compiled, missing))
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return [f"{k}: {error}" for k, error in zip(missing, answers, strict=True) if error]


def build_for(launches: Sequence[Callable[[], object]], least: int = 1) -> list[str]:
    """Compile what launches lack, side by side; what they say themselves is left to their next.

    Args:
        launches: Each is called, and notes the first kernel that is missing instead of launching.
        least: Kernels for which other processes, which take seconds to start, are worth it.

    Returns:
        The errors, one line for each kernel that failed.
    """
    errors: list[str] = []
    for _ in range(2):  # behind a kernel there may be another
        with collected() as wanted:
            for launch in launches:
                with suppress(Uncompiled, Unsupported):
                    launch()
        if len(wanted) < least:
            break
        errors += build([*wanted])
    return errors


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
    """Compile kernels as they come, and answer with an error or nothing."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a compiler prints is no answer
    while True:
        try:
            kernel, folder = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        except Exception as error:  # a format of the caller's own script, say
            answer = f"{type(error).__name__}: {error}"
        else:
            answer = ""
            try:
                compile_kernel(kernel, folder)
            except Exception as error:
                answer = str(error) or type(error).__name__
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    serve()
