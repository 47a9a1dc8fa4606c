"""tests/report.py: what a run tells of failures and of time, in one process and in several."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import os, time

def test_a():
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    assert 1 == 2, "one thing"

def test_b():
    pass

def test_c():
    if {dies}:
        os._exit(3)
"""
CONFTEST = """
import sys
sys.path.insert(0, {root!r})
from tests import report
report.SLOW = 0.04

def pytest_configure(config):
    config.pluginmanager.register(report.Report(config))
"""


def run(folder: Path, *options: str, dies: bool = False) -> list[str]:
    """The lines of a run of its own."""
    (folder / "conftest.py").write_text(CONFTEST.format(root=str(ROOT)))
    (folder / "test_it.py").write_text(TESTS.format(dies=dies))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider"]
    command += ["-p", "no:schemathesis", "--rootdir", str(folder), str(folder), *options]
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    return subprocess.run(command, env=env, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.parametrize("options", [(), ("--numprocesses", "1")], ids=["one", "workers"])
def test_failures_are_told_at_once_and_slow_files_at_the_end(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    told = run(tmp_path, *options)
    at = told.index("FAILED test_it.py::test_a (call): AssertionError: one thing")
    assert at < next(i for i, line in enumerate(told) if "= FAILURES =" in line)
    assert told.count(told[at]) == 1
    (head,) = (i for i, line in enumerate(told) if "s of CPU time" in line)
    assert told[head + 1].endswith(" s  test_it.py")


def test_a_process_that_ends_is_told_at_once(tmp_path: Path) -> None:
    told = run(tmp_path, "--numprocesses", "1", dies=True)
    line = next(line for line in told if line.startswith("FAILED test_it.py::test_c"))
    assert "crashed" in line
