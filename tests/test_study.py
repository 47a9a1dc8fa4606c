"""benchmarks/study.py and tasks.py on a small model, by their cheapest cases."""

import csv
import json
import sys
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import study
import tasks

PICO = Path(__file__).parents[1] / "models" / "pico"
FEW = ["--windows", "4", "--window", "64", "--samples", "2", "--length", "64"]


class Here:
    """An executor without a process. broken: the case of which it dies."""

    broken = ""

    def __init__(self, count: int, context: Any, begin: Callable[..., None], given: tuple[Any]):
        begin(*given)

    def submit(self, run: Callable[..., Any], *case: str) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            if self.broken and self.broken in case:
                raise BrokenProcessPool
            future.set_result(run(*case))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, **_: Any) -> None:
        """Nothing is left."""


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text("utf-8").splitlines()))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[dict[str, str]]]:
    """Runs the script, and reads its rows."""
    monkeypatch.setattr(study, "ProcessPoolExecutor", Here)
    texts = ["All that is scored. " * 99], [("code", "def f(x):\n    return x\n" * 99)]
    monkeypatch.setattr(study, "prose", lambda held_out: texts[0])
    for name in ("held_out_text", "calibration_text"):
        monkeypatch.setattr(study, name, lambda: texts[1])
    monkeypatch.setattr(study, "BACKENDS", dict(study.BACKENDS))

    def found(*given: str) -> list[dict[str, str]]:
        out = tmp_path / "rows.csv"
        options = [str(PICO), "--device", "cpu", "--out", str(out), *FEW, *given]
        monkeypatch.setattr(sys, "argv", ["study.py", *options])
        study.main()
        return rows_of(out) if out.exists() else []

    return found


def test_rows_of_weights_and_of_caches(run, tmp_path: Path) -> None:
    only = ["bf16/dense", "int8/rtn", "int4:group=64,zero/gptq", "int4/kv"]
    rows = run("--only", *only, "--keep", str(tmp_path))
    assert [f"{row['spec']}/{row['method']}" for row in rows] == only
    assert {row["tokens"] for row in rows} == {str(4 * 63)}
    noise, eight, four, cache = (float(row["kl"]) for row in rows)
    assert 0 < noise < eight < four < 1
    assert 0 < cache < 1
    assert [float(row["bits"]) for row in rows] == [16, 8.052, 4.375, 5.0]
    assert [row["gb"] for row in rows] == ["0.015", "0.008", "0.006", "0.015"]  # one tied matrix
    assert (rows[2]["samples"], rows[2]["text"]) == ("2", "mixed")
    kept = json.loads((tmp_path / "int4-group-64-zero-gptq" / "config.json").read_text())
    assert "quantization_config" in kept
    assert len(run("--only", *only)) == 4  # those are there already
    assert len(run("--only", "int8/rtn", "--windows", "2")) == 5  # but not of these windows


def test_no_case_is_begun_behind_the_deadline(
    run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(study, "begin", lambda settings: None)  # which would end this process
    assert run("--only", "int8/rtn", "--seconds", "-1") == []
    assert "left out: ['int8 rtn']" in capsys.readouterr().out


def test_what_fails_is_named_and_the_rest_goes_on(
    run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="some rows failed"):
        run("--only", "int4:group=100/rtn", "int8/rtn")
    assert "int4:group=100 rtn failed: InvalidInput" in capsys.readouterr().out
    assert len(rows_of(tmp_path / "rows.csv")) == 1
    monkeypatch.setattr(Here, "broken", "int6")
    with pytest.raises(SystemExit, match="some rows failed"):
        run("--only", "int6/rtn", "fp6/rtn")
    assert "int6 rtn failed: its process died" in capsys.readouterr().out
    assert rows_of(tmp_path / "rows.csv")[-1]["spec"] == "fp6"  # in a process in its place


def test_a_copy_that_runs_in_fp32_leaves_the_model_as_it_is() -> None:
    """Matrices of no `Linear`, as of experts, are shared by all copies; no head_dim is no error."""
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 8)}).bfloat16()
    model.experts = torch.nn.Parameter(torch.ones(2, 8, 8, dtype=torch.bfloat16))
    model.get_input_embeddings = lambda: model["embed"]
    shared = model.experts
    study.running(model)
    assert (shared.dtype, model.experts.dtype) == (torch.bfloat16, torch.float32)


def test_what_is_known_of_a_cases_time_keeps_it_from_beginning_late(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second would take as long as the first, and there is no time for that."""
    now = [0.0]
    monkeypatch.setattr(study.time, "time", lambda: now[0])

    def slow(spec: str, method: str) -> dict[str, Any]:
        now[0] += 60
        return {"spec": spec, "method": method, "took": 60.0}

    monkeypatch.setattr(study, "begin", lambda settings: None)
    monkeypatch.setattr(study, "row_of", slow)
    rows = run("--seconds", "100", "--only", "int8/rtn", "int6/rtn", "int4/gptq", "int3/gptq")
    assert [row["spec"] for row in rows] == ["int8", "int4"]


def test_every_solution_passes_and_none_is_missing() -> None:
    found = tasks.problems()
    assert len({one.head for one in found}) == len(found) >= 100
    for one in found:
        exec(f"{one.head}\n{one.body}\n{one.tests}", {})
        with pytest.raises(NotImplementedError):
            exec(f"{one.head}\n    raise NotImplementedError\n{one.tests}", {})


@pytest.mark.parametrize(
    ("code", "well"),
    [
        ("def f():\n    return 1", True),
        ("def f():\n    return 2", False),
        ("import sys\nsys.exit(0)", False),
        ("def f():\n    open('written', 'w')\n    return 1", False),
        ("import socket\ndef f():\n    socket.create_connection(('127.0.0.1', 9))", False),
        ("import os\ndef f():\n    os.system('true')\n    return 1", False),
        ("while True: pass", False),
    ],
)
def test_answers_are_run_and_reach_nothing(
    code: str, well: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    if "while" in code:
        monkeypatch.setattr(tasks, "LIMIT", 0.5)
    assert (
        tasks.passes(tasks.code_of(f"Here:\n```python\n{code}\n```\nDone."), "assert f() == 1")
        == well
    )
    assert not list(tmp_path.iterdir())


def test_calls_are_judged_by_the_servers_reader_and_the_schema() -> None:
    found = tasks.prompts()
    assert len(found) >= 50
    for one in found:
        assert one["tool"] in [tool["function"]["name"] for tool in one["tools"]]
        schema = next(t["function"] for t in one["tools"] if t["function"]["name"] == one["tool"])
        values = schema["parameters"]["properties"]
        assert all(tasks.fits(v, values[key]) for key, v in one["arguments"].items())
    one = next(
        one for one in found if one["arguments"] == {"city": "Madrid", "days": 5, "unit": "celsius"}
    )
    family = tasks.FAMILIES["hermes"]

    def judged(arguments: str) -> tuple[bool, bool]:
        text = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
        (call,) = tasks.calls_in(text, family.reader(one["tools"]))
        valid = tasks.matches(*call, one["tools"])
        return valid, valid and tasks.wanted(call, one) == tasks.meant(one)

    assert judged('{"city": "madrid", "days": 5, "unit": "celsius"}') == (True, True)
    assert judged('{"city": "Madrid", "days": 4}') == (True, False)
    assert judged('{"city": "Madrid", "days": "5"}') == (False, False)
    assert judged('{"city": "Madrid", "unit": "kelvin"}') == (False, False)
    assert judged('{"days": 5}') == (False, False)
    assert judged('{"city": "Madrid", "more": 1}') == (False, False)
    assert tasks.calls_in("It is warm.", family.reader(one["tools"])) == []


def test_a_model_has_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    given = ["--device", "cpu", "--problems", "1", "--calls", "1", "--tokens", "4"]
    monkeypatch.setattr(sys, "argv", ["tasks.py", str(PICO), *given, "--out", str(out)])
    tasks.main()
    (row,) = rows_of(out)
    assert (row["model"], row["problems"], row["calls"], row["pass1"]) == ("pico", "1", "1", "0.0")
