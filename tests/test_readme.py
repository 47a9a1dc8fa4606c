"""What README.md shows with a model of the hub works, against a stand-in that serves pico.

Each fenced block that names such a model (Qwen/Qwen3-0.6B) is run by itself in an empty directory:
a Python block that begins with an import, and of other blocks the lines that begin with `anybit`.
"""

import re
import shlex
from pathlib import Path

import pytest

from anybit.files.hub import name_of
from tests import hub
from tests.test_cli import PICO, run

ROOT = Path(__file__).parent.parent
RUNS_ON = ("serve", "demo")  # which do not end, or need a clone
NAME = re.compile(r"(?<![\w./-])[A-Z]\w*/[\w.-]*\w(?:[@:][\w.-]+)?")


def blocks() -> list[tuple[str, str]]:
    """Language and text of the blocks that are to be run."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
    named = [(language, block) for language, block in found if names(block)]
    return [(lang, block) for lang, block in named if lang != "python" or "import" in block[:20]]


def names(block: str) -> set[str]:
    """Models of the hub that a block names."""
    found = (name_of(text) for text in NAME.findall(block))
    return {name.repository for name in found if name and name.variant is None}


@pytest.mark.parametrize(("language", "block"), blocks())
def test_blocks_that_name_a_model_run(
    language: str, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    with hub.serving(dict.fromkeys(names(block), PICO)) as served:
        hub.use(served, tmp_path / "home", monkeypatch)
        if language == "python":
            exec(block, {})
        else:
            lines = [shlex.split(line, comments=True) for line in block.splitlines()]
            anybit = [line for line in lines if line[:1] == ["anybit"] and line[1] not in RUNS_ON]
            assert anybit
            for line in anybit:
                run(*line[1:])
        assert served.asked
