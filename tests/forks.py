"""Processes of their own that need no imports: forks of one that has made them, and nothing else.

Torch and transformers take seconds of CPU time, which some hundred processes of a run would spend.
What a start imports, and what it costs, is tested with processes that begin anew.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from socket import socket
from tempfile import TemporaryDirectory
from typing import Any

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])


class Fork:
    """A process that calls a function, as a `subprocess.Popen` of it would be."""

    def __init__(self, function: Callable[..., object], *args: Any):
        self._process = CONTEXT.Process(target=function, args=args)
        self._process.start()
        assert self._process.pid
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("fork", timeout or 0)
        return self._process.exitcode

    def send_signal(self, kind: signal.Signals) -> None:
        os.kill(self.pid, kind)

    def kill(self) -> None:
        self._process.kill()


def run(code: str, *args: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """`python -c CODE ARGS` to its end, with further variables of the environment."""
    with TemporaryDirectory() as folder:
        process = Fork(_run, code, args, os.environ | env, folder)
        try:
            process.wait(240)
        finally:
            process.kill()
        out, error = (Path(folder, name).read_text() for name in ("out", "error"))
        return subprocess.CompletedProcess(args, process.wait(), out, error)


def _run(code: str, args: tuple[str, ...], env: dict[str, str], folder: str) -> None:
    for number, name in ((1, "out"), (2, "error")):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[:] = ["-c", *args]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


def front_end(sock: socket, listener: socket) -> None:
    """As the process of `anybit.serve.run.FrontEnds`."""
    from anybit.serve import run

    os.setpgid(0, 0)
    sys.argv[1:] = [str(end.detach()) for end in (sock, listener)]
    run.front_end()
