"""benchmarks/measure_all.py: its table has every result, and its scripts know their arguments."""

import argparse
import runpy
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import measure_all
from stages import NEEDS, STAGES, WITHOUT, Stage

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
WORDS = {"out": "x.csv", "commit": "abc", "study": "m", "workers": "2", "llama_cpp": "node"}
COMMANDS = sorted(
    {text for s in STAGES for text in (*s.before, *s.commands, *sum(s.extra.values(), ()))}
)


def test_every_result_has_a_stage_or_a_reason() -> None:
    files = {path.stem.removeprefix("h200_") for path in (BENCHMARKS / "results").glob("*.csv")}
    names = [stage.name for stage in STAGES]
    assert len({*names}) == len(names)
    assert {*names, *WITHOUT} == files
    assert {need for s in STAGES for need in (*s.needs, *s.extra)} == {*NEEDS}


class Parsed(Exception):
    """The script knows these arguments; it is not run any further."""


@pytest.mark.parametrize("text", COMMANDS)
def test_a_script_knows_its_arguments(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script, *arguments = (word.format(**WORDS) for word in shlex.split(text))

    for name in ("parse_args", "parse_intermixed_args"):
        parse = getattr(argparse.ArgumentParser, name)

        def parse_only(self, args=None, parse=parse):
            raise Parsed(parse(self, args))

        monkeypatch.setattr(argparse.ArgumentParser, name, parse_only)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(Parsed) as parsed:
        runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
    given = parsed.value.args[0]
    assert "{out}" not in text or str(given.out) == WORDS["out"]


def test_list_names_every_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run("--list", "--out", str(tmp_path), "--device", "h100", "--commit", "abc")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"commit abc, {tmp_path}"
    for stage, line in zip(STAGES, lines[1:], strict=False):
        before = "h100_" if stage.on_gpu else ""
        assert f" {before}{stage.name}.csv" in line


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090-laptop"),
    ],
)
def test_files_are_named_after_the_gpu(gpu: str, name: str) -> None:
    assert measure_all.short_name(gpu) == name


SCRIPT = """
import pathlib, sys, time
out, row, what = sys.argv[1:]
columns = "other,commit" if what == "differs" else "row,commit"
pathlib.Path(out).write_text(f"{columns}\\n{row},abc\\n")
if what == "fails":
    raise SystemExit("it broke")
if what == "waits":
    time.sleep(60)
"""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a table of one stage of three commands; says what the second of them does."""
    monkeypatch.setattr(measure_all, "HERE", tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)

    def made(second: str) -> None:
        ends = {"1": "ends", "2": second, "3": "ends"}
        commands = tuple(f"script.py {{out}} {row} {what}" for row, what in ends.items())
        monkeypatch.setattr(measure_all, "STAGES", (Stage("cpu_some", commands, 0.001),))

    return made


def test_what_failed_is_measured_again_and_the_rest_is_not(
    table: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table("fails")
    with pytest.raises(SystemExit, match=r"failed:\nscript.py \{out\} 2 fails"):
        run("--only", "cpu_some", "--out", str(tmp_path), "--commit", "abc")
    assert "failed: it broke" in capsys.readouterr().out
    assert not (tmp_path / "cpu_some.csv").exists()
    unfinished = tmp_path / "cpu_some.unfinished.csv"
    assert unfinished.read_text() == "row,commit\n1,abc\n2,abc\n3,abc\n"
    table("ends")  # another command
    run("--only", "cpu_some", "--out", str(tmp_path), "--commit", "abc")
    text = capsys.readouterr().out
    assert "script.py" in text
    assert " 2 ends" in text
    assert " 1 ends" not in text
    assert (tmp_path / "cpu_some.csv").read_text() == "row,commit\n1,abc\n2,abc\n3,abc\n"
    assert not unfinished.exists()
    run("--only", "cpu_some", "--out", str(tmp_path), "--commit", "abc")
    assert "cpu_some is complete" in capsys.readouterr().out
    run("--only", "cpu_some", "--out", str(tmp_path), "--commit", "def")
    assert " 1 ends" in capsys.readouterr().out


def test_columns_that_differ_end_no_other_stage(
    table: Callable[[str], None], tmp_path: Path
) -> None:
    table("differs")
    with pytest.raises(SystemExit, match=r"failed:\ncpu_some: "):
        run("--only", "cpu_some", "--out", str(tmp_path), "--commit", "abc")
    assert not list(tmp_path.glob("cpu_some*"))


@pytest.mark.parametrize("commit", ["", "abc+"])
def test_changes_are_always_measured_again(
    commit: str,
    table: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    table("ends")
    for now in ("-1", "-2"):
        monkeypatch.setattr(measure_all.time, "strftime", lambda form, now=now: now)
        run("--only", "cpu_some", "--out", str(tmp_path), "--commit", commit)
        assert " 1 ends" in capsys.readouterr().out


def test_rows_without_a_package_are_not_those_with_it(
    table: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands = ("script.py {out} 1 ends",)
    table("ends")
    for package, again in (("absent", True), ("absent", False), ("json", True)):
        stage = Stage("cpu_some", commands, 0.001, beside=(package,))
        monkeypatch.setattr(measure_all, "STAGES", (stage,))
        run("--only", "cpu_some", "--out", str(tmp_path), "--commit", "abc")
        assert (" 1 ends" in capsys.readouterr().out) == again


def test_the_end_of_time_stops_a_command_and_keeps_what_there_is(
    table: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table("waits")
    start = time.monotonic()
    run("--only", "cpu_some", "--out", str(tmp_path), "--commit", "abc", "--seconds", "8")
    assert time.monotonic() - start < 50
    text = capsys.readouterr().out
    assert "the time is up" in text
    assert "not complete: cpu_some, 1 of 3" in text
    assert (tmp_path / "cpu_some.unfinished.csv").read_text() == "row,commit\n1,abc\n2,abc\n"


@pytest.mark.parametrize(("apart", "used"), [(False, {"3", "5"}), (True, {"3"})])
def test_gpus_share_what_the_host_does_not_matter_for(
    apart: bool, used: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, sys, time\ntime.sleep(1)\n"
    code += "open(sys.argv[1], 'w').write('gpu\\n' + os.environ['CUDA_VISIBLE_DEVICES'] + '\\n')\n"
    (tmp_path / "script.py").write_text(code)
    monkeypatch.setattr(measure_all, "HERE", tmp_path)
    stage = Stage("some", ("script.py {out}",) * 4, 0.001, ("two GPUs",), apart=apart)
    monkeypatch.setattr(measure_all, "STAGES", (stage,))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda i=0: "NVIDIA H100 80GB HBM3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    run("--out", str(tmp_path), "--commit", "abc")
    head, *rows = (tmp_path / "h100-80gb-hbm3_some.csv").read_text().split()
    assert head == "gpu"
    assert len(rows) == 4
    assert {*rows} == used


def run(*arguments: str) -> None:
    """The command line, in this process; its handlers of signals are put back."""
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["measure_all.py", *arguments])
            measure_all.main()
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
