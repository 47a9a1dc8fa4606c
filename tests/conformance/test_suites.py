"""Published suites against a server: all of their cases pass but those of expected.toml.

`make test-conformance` installs them. pico is not instructed: what is judged is the protocol.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llm_comply")

EXPECTED = tomllib.loads(Path(__file__).with_name("expected.toml").read_text())
MODULES = Path(os.environ.get("ANYBIT_TEST_NODE_MODULES", "node_modules"))


def compare(suite: str, results: dict[str, tuple[bool, Any]]) -> None:
    """results: whether each case has passed, and what the suite says of it."""
    failed = {name: said for name, (passed, said) in results.items() if not passed}
    print(f"{suite}: {len(results) - len(failed)} of {len(results)} cases pass")
    known = EXPECTED[suite]
    for name in failed:
        print(f"  {name}: {known.get(name, 'fails, and is not in expected.toml')}")
    assert not {name: said for name, said in failed.items() if name not in known}
    assert set(known) <= set(failed), "expected.toml lists cases that pass, or are no more"


@pytest.mark.parametrize("suite", ["open-responses", "openai-chat", "anthropic"])
def test_llm_comply(url: str, suite: str) -> None:
    words = ["run", "--base-url", f"{url}/v1", "--api-key", "none", "--model", "pico", "--json"]
    main = "import sys; from llm_comply.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", main, *words, "--format", suite]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    results = json.loads(done.stdout)["results"]
    assert len(results) >= 9, done.stderr
    compare(suite, {case["id"]: (case["status"] == "passed", case) for case in results})


def test_compatcanary(url: str) -> None:
    node, script = shutil.which("node"), MODULES / "compatcanary" / "src" / "cli.js"
    if node is None or not script.exists():
        pytest.skip("compatcanary runs in node, which is not here")
    words = ["scan", "--base-url", f"{url}/v1", "--model", "pico", "--format", "json"]
    command = [node, str(script), *words, "--api-key", "none", "--fail-on", "never"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    report = json.loads(done.stdout)
    assert len(report["results"]) >= 7
    compare(
        "compatcanary", {case["id"]: (case["status"] == "pass", case) for case in report["results"]}
    )
