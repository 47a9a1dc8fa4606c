"""guidellm, which measures a server under load."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import ROOT

pytest.importorskip("guidellm")


def test_a_short_run(url: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = {
        "backend": f"kind=openai_http,target={url},model=pico",
        "profile": "kind=synchronous",
        "constraint": "kind=max_requests,count=3",
        "tokenizer": "kind=hf_auto,model=models/pico",
        "data": "kind=synthetic_text,prompt_tokens=20,output_tokens=5",
        "output": f"kind=json,path={report}",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "guidellm", "run", *words, "--disable-console"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    (run,) = json.loads(report.read_text())["benchmarks"]
    assert run["metrics"]["request_totals"]["successful"] == 3
