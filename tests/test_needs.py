"""In CI, a missing compiler is a failure; what a run leaves out follows from rules."""

from pathlib import Path

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


def test_pytest_asks_before_it_starts(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = pytestconfig.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr(needs, "find_spec", lambda name: None)
    with pytest.raises(pytest.UsageError, match="is missing"):
        plugin.pytest_configure(pytestconfig)


def test_every_test_is_in_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"tests/test_some.py::test[{i}]" for i in range(300)]
    found = []
    for part in ("1/3", "2/3", "3/3"):
        monkeypatch.setattr(needs, "PART", part)
        found.append([name for name in names if needs.in_part(name)])
    assert sorted(name for part in found for name in part) == sorted(names)
    assert all(70 < len(part) < 130 for part in found)


@pytest.mark.parametrize(("every", "found"), [(False, ["a1", "b2"]), (True, ["a1", "b2", "a2"])])
def test_first_of(every: bool, found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "EVERY_KERNEL", every)
    assert needs.first_of(["a1", "b2", "a2"], str) == found
