"""`anybit doctor`: what it shows, what its report holds and never holds, and that it is written."""

import importlib
import importlib.metadata
import json
import re
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from anybit.cli import doctor
from anybit.core.format import known_formats
from anybit.errors import in_a_line
from anybit.measure import bench, report, timing
from anybit.measure.bench import Row
from anybit.measure.timing import ReadFloor
from tests.test_cli import run

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch):
    """One small product of each kind, on the CPU."""
    monkeypatch.setattr(timing, "COLD_BYTES", 1 << 20)
    monkeypatch.setattr(timing, "CPU_SECONDS", 0.002)
    floor = ReadFloor([(1_000_000, 3.0), (2_000_000, 4.0)])
    monkeypatch.setattr(ReadFloor, "measure", classmethod(lambda cls, device: floor))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "SHAPES", [(32, 64)])
    monkeypatch.setattr(doctor, "TOKENS", {"cpu": [1]})


@pytest.fixture
def ada(monkeypatch):
    """A machine and its user, of whom nothing may be told."""
    monkeypatch.setattr(report.platform, "node", lambda: "gpu12.corp.example")
    monkeypatch.setattr(report.getpass, "getuser", lambda: "ada")
    monkeypatch.setattr(report.Path, "home", lambda: Path("/home/countess"))


def test_doctor_shows_a_backend_for_every_format() -> None:
    stdout, _ = run("doctor")
    lines = stdout.splitlines()
    assert len(lines) <= 24 + 12 * torch.cuda.device_count()  # a screen
    assert lines[0].startswith("cpu: ")
    runs = " ".join(stdout.partition("not on")[0].split())
    if "all formats" not in runs:
        for name in dict(known_formats()).keys() - {"fp"}:
            assert re.search(rf"[ ,]{re.escape(name)}(,|$| )", runs)
    else:  # what does not run there runs elsewhere
        for name in re.findall(r"all formats but ([a-z0-9_, ]+?) runs on", runs):
            assert all(runs.count(one) == 2 for one in name.split(", "))


def test_a_report_has_every_kind_of_kernels(small, tmp_path, monkeypatch):
    path, console = tmp_path / "cpu.json", Console(record=True, width=200)
    monkeypatch.setattr(bench, "start", partial(say_first, console, bench.start))
    doctor.report(["int4"], path, console)
    found = json.loads(path.read_text())
    assert [row["peer"] for row in found["rows"]] == ["torch", "anybit", "anybit-native"]
    assert found["rows"][1]["us"] > 0
    assert found["packages"]["torch"] == importlib.metadata.version("torch")
    assert found["threads"] == torch.get_num_threads()
    assert found["backends"]["int4"]["native"] is None
    assert "stopped" not in found
    assert not list(tmp_path.glob("cpu.json.*"))


def say_first(console, start, *args, **options):
    """What the report holds is told before anything is measured."""
    assert "no paths" in console.export_text(clear=False)
    return start(*args, **options)


def test_what_cannot_be_measured_is_refused_before_and_nothing_is_written(small, tmp_path):
    with pytest.raises(ValueError, match="not a directory to write"):
        doctor.report(["int4"], tmp_path / "no" / "r.json")
    with pytest.raises(ValueError, match="unknown format 'int99'"):
        doctor.report(["int99"], tmp_path / "r.json")
    with pytest.raises(ValueError, match="K=64 is not a multiple of group=128"):
        doctor.report(["int4:group=128"], tmp_path / "r.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_what_ends_the_measuring_is_raised_and_the_report_is_written(
    small, ada, tmp_path, monkeypatch, kind
):
    def broken(cases, *_) -> Iterator[Row]:
        yield bench.blank(CPU, "")
        monkeypatch.setattr(doctor.registry, "refusals", pytest.fail)  # nor does it answer now
        raise kind("illegal memory access in /home/ada/k.cu")

    monkeypatch.setattr(bench, "measure", broken)
    path, console = tmp_path / "r.json", Console(record=True, width=200)
    with pytest.raises(kind, match="illegal"):
        doctor.report(["int4"], path, console)
    found = json.loads(path.read_text())
    assert found["stopped"] == f"{kind.__name__}: illegal memory access in ..."
    assert len(found["rows"]) == 1
    assert found["backends"]["int4"]["native"] is None
    assert "which says what stopped it after 1 rows; attach it" in console.export_text()


FOLDER = "/srv/secret/.venv/lib"
GCC = ["/usr/bin/gcc", "/tmp/secret1/main.c", "-O3", f"-L{FOLDER}", f"-I{FOLDER}/include"]


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        (
            in_a_line(subprocess.CalledProcessError(1, GCC)),
            "CalledProcessError: Command '[..., ..., '-O3', ..., ...]' returned non-zero",
        ),
        (in_a_line(subprocess.CalledProcessError(1, [*GCC, "x" * 400])), "CalledProcessError"),
        ("No such file: 'C:\\\\Users\\\\ada\\\\secret\\\\x.py': no", "No such file: ...: no"),
        ("at C:\\Users\\ada b\\secret x.dll; why", "at ...; why"),
        ("/mnt/My Secret Project/data of/x.py: bad", "...: bad"),
        ('it said "/mnt/a: secret/x" (at /mnt/secret)', "it said ... (at ...)"),
        ("see ssh://ada@gpu12/srv/secret", "see ..."),
        ("in secret/: 3 of 4", "in ...: 3 of 4"),
        ("on GPU12, or gpu12.corp.example of Ada: 3", "on ..., or ... of ...: 3"),
        ("device GPU-1234abcd-12cd is lost", "device ... is lost"),
        ("12 of 64 weights don't match; it's wrong", "12 of 64 weights don't match; it's wrong"),
    ],
)
def test_words_of_an_error_tell_no_path_machine_or_user(ada, told, kept):
    found = report.unnamed(told)
    assert found.startswith(kept)
    assert not re.search(r"[/\\]|secret|ada|gpu12|corp|1234abcd", found, re.IGNORECASE)


def test_only_words_of_errors_are_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(report.platform, "node", lambda: "mma")
    monkeypatch.setattr(report.getpass, "getuser", lambda: "int4")
    machine = report.machine(CPU)
    row = Row("mma/int4", "", "", "anybit-mma", "int4", "int8", 1, 2, 3, note="failed: on mma")
    answers = {"int4": {"mma": "see ~/x/verdicts.json", "native": None}}
    report.write(tmp_path / "r.json", report.about(CPU, answers), [row])
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["rows"][0]["note"] == "failed: on ..."
    kept = [found["rows"][0][key] for key in ("gpu", "peer", "format")]
    assert kept == ["mma/int4", "anybit-mma", "int4"]
    assert found["backends"] == {"int4": {"mma": "see ...", "native": None}}
    assert found.items() >= machine.items()


def test_a_user_without_a_name_has_a_report(monkeypatch):
    def unknown():
        raise KeyError("getpwuid(): uid not found: 1234")

    monkeypatch.setattr(report.getpass, "getuser", unknown)
    monkeypatch.setattr(report.platform, "node", lambda: "")
    monkeypatch.setattr(report.Path, "home", lambda: Path("/"))
    assert report.unnamed("failed: 3 of 4") == "failed: 3 of 4"


def test_reports_become_a_table(monkeypatch, tmp_path):
    row = {"N": 32, "K": 64, "M": 1, "format": "int4", "activation": "int8", "note": ""}
    peers = {"cublas": 5.0, "anybit": 2.0, "anybit-mma": 2.0, "anybit-hopper": None}
    rows = [row | {"peer": peer, "us": us} for peer, us in peers.items()]
    (tmp_path / "a.json").write_text(json.dumps({"gpu": "A", "system": "Linux", "rows": rows}))
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "docs/tables")
    gpu_tables = importlib.import_module("gpu_tables")
    monkeypatch.setattr(gpu_tables, "REPORTS", tmp_path)
    line = gpu_tables.tables()["gpus"].splitlines()[-1]
    assert line.endswith("| 32x64 | `int4@int8` | 1 | 5.0 |  | 2.0 |  |  |")
