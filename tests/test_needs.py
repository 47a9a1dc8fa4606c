"""In CI, a missing compiler is a failure."""

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
