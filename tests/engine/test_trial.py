"""The child that tries grammars: what ends it, and with what it ends."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import anybit
from anybit.engine import trial
from anybit.engine.structured import Grammars, Structured
from anybit.errors import InvalidInput
from tests.engine.conftest import PICO
from tests.serve.conftest import wait_for


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(AutoTokenizer.from_pretrained(PICO), 4096, frozenset([0]))


def child(grammars: Grammars) -> subprocess.Popen:
    """The process that tries grammars, with at least one grammar behind it."""
    grammars.matcher(Structured(regex="[0-9]"))
    assert grammars._trial is not None
    process = grammars._trial._process
    assert process is not None
    return process


def chain(length: int, kind: str = "lark") -> Structured:
    if kind == "json":
        refs = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
        return Structured(json={"$ref": "#/$defs/d0", "$defs": refs | {f"d{length}": {}}})
    sign, last = ("::=", "root ::= r0") if kind == "gbnf" else (":", "start: r0")
    rules = [f"r{i}{sign} r{i + 1}" for i in range(length)]
    return Structured(grammar="\n".join([last, *rules, f'r{length}{sign} "a"']))


@pytest.mark.parametrize("kind", ["json", "lark", "gbnf"])
def test_a_crash_is_a_refusal_and_another_child_goes_on(grammars: Grammars, kind: str) -> None:
    first = child(grammars)
    for _ in range(2):  # the second time, nothing is tried again
        with pytest.raises(InvalidInput, match="make it smaller, or nest it less"):
            grammars.matcher(chain(20000, kind))
    assert first.returncode is not None
    grammars.matcher(Structured(regex="a"))  # starts another
    second = child(grammars)
    assert second.pid != first.pid
    grammars.matcher(chain(1000, kind))
    grammars.matcher(Structured(regex="b"))
    assert second.poll() is None


def test_time_and_memory_are_limited(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    child(grammars)
    # 10**6 copies of a character: a second or two, and some 100 MB, before they are too many.
    with pytest.raises(InvalidInput, match=r"too many|takes more than"):
        grammars.matcher(Structured(regex="(a{1000}){1000}"))
    child(grammars)
    monkeypatch.setattr(trial, "PATIENCE", 0.0)
    with pytest.raises(RuntimeError, match="killed"):  # not for a grammar's fault: no refusal
        grammars.matcher(Structured(regex="c{1,2000}"))
    monkeypatch.undo()
    grammars.matcher(Structured(regex="c{1,2000}"))


def test_what_the_child_survives_this_process_survives(grammars: Grammars) -> None:
    """The longest chain that is taken, found by halves, is compiled and runs here, too."""
    low, high = 1000, 20000
    while high - low > 500:
        middle = (low + high) // 2
        try:
            matcher = grammars.matcher(chain(middle))
        except InvalidInput:
            high = middle
        else:
            low = middle
            matcher.take(grammars.tokenizer.encode("a")[0])
            assert matcher.ended
    assert trial.ROOMY_STACK >= 2 * trial.STACK


def test_a_child_that_died_idle_is_replaced(grammars: Grammars) -> None:
    first = child(grammars)
    first.kill()
    first.wait()
    grammars.matcher(Structured(regex="after"))


def test_errors_of_the_library_are_no_refusals(grammars: Grammars) -> None:
    child(grammars)
    assert grammars._trial is not None
    with pytest.raises(RuntimeError, match="Traceback"):
        grammars._trial.judge("no such kind", "a")


def test_an_interrupted_trial_answers_nobody_else(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(grammars)
    assert grammars._trial is not None

    def interrupt(message: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", interrupt)
        with pytest.raises(KeyboardInterrupt):
            grammars._trial.judge("lark", "no grammar")
    assert grammars._trial.judge("regex", "a")["error"] == ""


def test_many_threads_share_a_child(grammars: Grammars) -> None:
    child(grammars)
    found: list[bytes] = []

    def work(i: int) -> None:
        found.append(grammars.matcher(Structured(regex=f"x{i % 8}y")).grammar.compute_ff_bytes())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted([f"x{i}y".encode() for i in range(8)] * 2)


def test_the_child_ends_with_its_grammars() -> None:
    grammars = Grammars(AutoTokenizer.from_pretrained(PICO), 4096, frozenset([0]))
    process = child(grammars)
    del grammars
    gc.collect()
    assert process.returncode is not None


OWNER = f"""
import os, signal, sys, time
from pathlib import Path
from anybit.engine.trial import Trial
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
trial = Trial(Path({str(PICO / "tokenizer.json")!r}).read_text(), 4096, [0])
assert trial.judge("regex", "a")["error"] == ""
print(trial._process.pid, flush=True)
"""
FORK = """
if not os.fork():
    assert trial.judge("regex", "b")["error"] == ""  # by a child of its own
    sys.exit()
assert os.wait()[1] == 0
assert trial.judge("regex", "c")["error"] == ""
print(trial._process.pid, flush=True)
"""


@pytest.fixture
def owner() -> Iterator[subprocess.Popen]:
    process = start(OWNER + "time.sleep(60)")
    yield process
    process.kill()
    process.communicate()


def start(code: str) -> subprocess.Popen:
    root = str(Path(anybit.__file__).parents[1])
    paths = filter(None, (root, os.environ.get("PYTHONPATH")))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "error"}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_child_ends_with_its_owner(owner: subprocess.Popen, kind: signal.Signals) -> None:
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert not gone(pid)
    owner.send_signal(kind)
    owner.wait(30)
    assert wait_for(lambda: gone(pid))


def test_a_fork_has_a_child_of_its_own() -> None:
    process = start(OWNER + FORK)
    out = process.communicate(timeout=100)[0].split()
    assert process.returncode == 0
    assert len(out) == 2
    assert out[0] == out[1]  # the fork's end has not ended the owner's child
    assert wait_for(lambda: gone(int(out[0])))


def test_the_child_is_small_and_leaves_the_directory_alone(
    grammars: Grammars, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    process = child(grammars)
    maps = Path(f"/proc/{process.pid}/maps")
    if maps.exists():
        assert "torch" not in maps.read_text()
