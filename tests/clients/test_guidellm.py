"""guidellm, which measures a server under load."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("guidellm")


def test_a_short_run(url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "guidellm", "benchmark", "run", "--target", url]
    command += ["--profile", "synchronous", "--max-requests", "3", "--model", "pico"]
    command += ["--data", "prompt_tokens=20,output_tokens=5", "--processor", "models/pico"]
    command += ["--output-dir", str(tmp_path), "--outputs", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    (report,) = tmp_path.glob("*.json")
    (run,) = json.loads(report.read_text())["benchmarks"]
    assert run["metrics"]["request_totals"]["successful"] == 3
