"""Processes without imports are what processes would be."""

import os
import signal
import subprocess
import time

import pytest

from tests import forks


def test_they_have_imported_what_takes_long_and_nothing_more() -> None:
    code = "import sys, threading; print(*sys.argv[1:], 'torch' in sys.modules,"
    code += "'transformers.models' in sys.modules, 'anybit.serve.front' in sys.modules,"
    code += "'triton' in sys.modules, threading.active_count())"
    assert forks.run(code, "a").stdout.split() == ["a", *["True"] * 3, "False", "1"]


def test_a_code_and_its_output_come_back() -> None:
    code = "import os, sys; print(os.environ['GIVEN']); print('e', file=sys.stderr); sys.exit(3)"
    done = forks.run(code, GIVEN="here")
    assert (done.returncode, done.stdout, done.stderr) == (3, "here\n", "e\n")
    done = forks.run("1 / 0")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert forks.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").returncode == -9
    assert "GIVEN" not in os.environ


def test_they_are_killed_and_waited_for() -> None:
    process = forks.Fork(time.sleep, 100)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == process.returncode == -signal.SIGTERM
    process.kill()
