"""`anybit cache`: it shows and removes what anybit has made, and nothing else."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from anybit.cli.app import app
from tests.test_cli import run


def test_the_cache_is_shown_and_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path))
    assert run("cache")[0] == f"{tmp_path}\nempty\n"
    for name in ("converted/llama-12", "native", "mine"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.o").write_bytes(bytes(1000))
    (tmp_path / "tiles-h200.json").write_text("{}")
    stdout, _ = run("cache")
    assert "  0.001 MB  models of other tools, converted\n      0.001 MB  llama-12" in stdout
    assert "tiles that `anybit tune` has found" in stdout
    got = CliRunner().invoke(app, ["cache", "--clear"], input="n\n")
    assert got.exit_code == 0
    assert (tmp_path / "native").exists()
    assert run("cache", "--clear", "--yes")[0].endswith("removed 0.002 MB\n")
    assert [path.name for path in tmp_path.rglob("*.o")] == ["a.o"]
    assert not (tmp_path / "converted" / "llama-12").exists()
