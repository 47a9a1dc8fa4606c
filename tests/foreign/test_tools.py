"""Checkpoints that the tools make here and now, where they are installed."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.foreign import make
from tests.foreign.checks import converted

TOOLS = {
    "gptq": "gptqmodel",
    "awq": "gptqmodel",
    "hqq": "hqq",
    "aqlm": "aqlm",
    "compressed_tensors": "compressed_tensors",
    "bitsandbytes": "bitsandbytes",
}


@pytest.mark.filterwarnings("ignore")  # the tools' own
@pytest.mark.parametrize("tool", TOOLS)
def test_tool(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec(TOOLS[tool]) is None:
        pytest.skip(f"{TOOLS[tool]} is not installed")
    monkeypatch.setattr(make, "FIXTURES", tmp_path)
    getattr(make, tool)()
    made = sorted(tmp_path.iterdir())
    assert made
    for directory in made:
        converted(directory, tmp_path / f"{directory.name}.out")
