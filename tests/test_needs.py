"""In CI, a missing compiler is a failure, and no reason to skip tests."""

import subprocess
import sys
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


def test_pytest_asks_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    script = (
        "import sys, pytest; sys.modules['cutlass'] = None; "
        "sys.exit(pytest.main(['--collect-only', '-p', 'no:cacheprovider', 'tests/test_needs.py']))"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "cutlass is missing" in done.stderr
