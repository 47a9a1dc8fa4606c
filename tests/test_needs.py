"""In CI, a missing compiler is a failure, and so is a file of tests that takes too long."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests import needs


@pytest.mark.parametrize("module", needs.COMPILERS)
def test_ci_skips_nothing(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "find_spec", lambda name: None if name == module else name)
    monkeypatch.delenv("CI", raising=False)
    needs.check_compilers()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.UsageError, match=rf"{module} is missing.*pip install"):
        needs.check_compilers()


@pytest.fixture
def plugin(pytestconfig: pytest.Config) -> Any:
    return pytestconfig.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))


def test_a_file_over_its_budget_fails(
    plugin: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "CPU_SECONDS", 50)
    monkeypatch.setitem(plugin.spent, request.node.path, 49.9)
    plugin.pytest_runtest_setup(request.node)
    monkeypatch.setitem(plugin.spent, request.node.path, 51)
    with pytest.raises(pytest.fail.Exception, match=r"test_needs\.py took 51 s of CPU time, of 50"):
        plugin.pytest_runtest_setup(request.node)


def test_cpu_time_is_counted(plugin: Any, request: pytest.FixtureRequest) -> None:
    around = plugin.pytest_runtest_protocol(request.node)
    before = plugin.spent[request.node.path]
    next(around)
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    with pytest.raises(StopIteration):
        around.send(None)
    assert plugin.spent[request.node.path] >= before + 0.03


def test_pytest_asks_before_it_starts(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr(needs, "find_spec", lambda name: None)
    with pytest.raises(pytest.UsageError, match="is missing"):
        plugin.pytest_configure()
