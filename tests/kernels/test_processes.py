"""A child that tries what may crash."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from anybit.kernels import processes
from anybit.kernels.processes import Child, side_by_side, standing_by, wait_with

NUMBER = "import os; open({!r}, 'w').write(str(os.getpid()))"  # of the process, into a file


def killed(number: int) -> None:
    """Send a signal to this process, as what is called by name in another one."""
    os.kill(os.getpid(), number)
    time.sleep(5)


def test_only_a_crash_is_one() -> None:
    child = Child()
    assert child.survives(partial(int, "1"))
    assert child.survives(partial(int, "no number"))
    assert not child.survives(partial(killed, signal.SIGABRT))
    assert not child.survives(partial(killed, signal.SIGSEGV))
    assert child.survives(partial(killed, signal.SIGKILL))  # as where memory runs out
    assert child.survives(lambda: None)  # cannot be pickled
    child.end()


def test_ctrl_c_is_the_parents() -> None:
    child = Child()
    assert child.survives(partial(int, "1"))
    process = child._process
    assert process is not None
    process.send_signal(signal.SIGINT)
    assert child.survives(partial(int, "2"))
    assert child._process is process
    child.end()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_waits_for_nobody() -> None:
    child = Child()
    with child._lock:  # as while another thread has it compile
        pid = os.fork()
        if not pid:
            os._exit(0 if child.survives(partial(int, "1")) and not child.end() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_processes_stand_by_and_none_is_left(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "abc"]
    first, *calls = [partial(exec, NUMBER.format(str(file))) for file in files]

    def numbers() -> set[str]:
        return {file.read_text() for file in files[1:]}

    with standing_by():
        wait_with([first, partial(int, "no number")])
        assert side_by_side(calls) == ["", ""]
        before = numbers()
        assert files[0].read_text() in before
        with standing_by():
            assert side_by_side([partial(os._exit, 1), *calls])[1:] == ["", ""]
        assert numbers() & before
        waiting = [*processes._waiting]
    assert waiting
    assert not processes._waiting
    assert all(process.returncode is not None for process in waiting)
