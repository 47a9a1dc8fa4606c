"""llm, the command line tool."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("llm")

MODELS = """
- model_id: pico
  model_name: pico
  api_base: "{url}/v1"
  supports_schema: true
  supports_tools: true
"""


def test_a_prompt_a_conversation_and_a_schema(url: str, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(url=url))

    def llm(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "llm", "prompt", "-m", "pico", "-o", "max_tokens", "60", *words],
            env=os.environ | {"LLM_USER_PATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert llm("hi").strip()
    assert llm("and then?", "-c", "--no-stream").strip()
    schema = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'
    assert '"a"' in llm("hi", "--schema", schema[:-1] + ', "additionalProperties": false}')
    assert llm("hi", "-T", "llm_version").strip()
