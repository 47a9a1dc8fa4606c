"""Every architecture of transformers through anybit, as docs/models.md tells.

    python -m tests.models.sweep                        every architecture; writes docs/models.csv
    python -m tests.models.sweep LlamaForCausalLM ...   some of them, printed

Each runs in a process of its own, in an order that the code decides. What was found is kept in
out/models.jsonl, and is not run again until the code changes; a run that is not done after its
minutes says so, and the next one goes on.
"""

import argparse
import dataclasses
import hashlib
import json
import logging
import math
import multiprocessing
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_CPU, setrlimit
from signal import SIGXCPU

import torch
import transformers
from transformers import conversion_mapping

import anybit
from tests.models.page import counts, write
from tests.models.row import STEPS, Row, rows
from tests.models.zoo import architectures

ROOT = Path(__file__).parent.parent.parent
PAGE, RESULTS = ROOT / "docs" / "models.md", ROOT / "out" / "models.jsonl"
WAITS = 20  # times its seconds is when a row ends that no processor works on


@dataclasses.dataclass
class Job:
    """A process that works on one architecture."""

    process: ForkProcess
    row: Row
    deadline: float


def sweep(
    names: Sequence[str], steps: Sequence[str], jobs: int, seconds: float, stop: float
) -> Iterator[Row]:
    """Rows in the order in which they are done.

    Args:
        names: Classes of transformers.
        steps: Which of `STEPS`.
        jobs: How many processes at a time.
        seconds: Of the processor, after which a row ends where it is.
        stop: Of `time.monotonic`, after which no row begins.
    """
    context, waiting = multiprocessing.get_context("fork"), list(reversed(names))
    running: dict[Connection, Job] = {}
    while waiting or running:
        if time.monotonic() > stop:
            waiting.clear()
        while waiting and len(running) < jobs:
            receiver, sender = context.Pipe(duplex=False)
            name = waiting.pop()
            process = context.Process(target=work, args=(name, steps, seconds, sender), daemon=True)
            process.start()
            sender.close()
            running[receiver] = Job(process, Row(name), time.monotonic() + WAITS * seconds)
        for receiver in wait(list(running), timeout=1):
            assert isinstance(receiver, Connection)
            job = running[receiver]
            try:
                job.row = receiver.recv()
            except EOFError:  # it is done, or died
                job.process.join()
                code = job.process.exitcode
                late = f"not done after {seconds:.0f} seconds of the processor"
                yield ended(job.row, steps, late if code == -SIGXCPU else f"exit status {code}")
                del running[receiver]
        for receiver, job in list(running.items()):
            if time.monotonic() > job.deadline:
                job.process.kill()
                yield ended(job.row, steps, f"waits, {WAITS * seconds:.0f} seconds after its start")
                del running[receiver]


def preload() -> None:
    """What every row needs of the libraries, once, before processes are forked."""
    _ = anybit.LLM, transformers.GenerationMixin
    conversion_mapping.get_checkpoint_conversion_mapping("llama")


def work(name: str, steps: Sequence[str], seconds: float, sender: Connection) -> None:
    used = time.process_time()
    setrlimit(RLIMIT_CPU, (math.ceil(used + seconds), RLIM_INFINITY))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(name, Path(folder), steps):
            sender.send(row)


def ended(row: Row, steps: Sequence[str], why: str) -> Row:
    """A row whose process has ended; the first step that is missing is wrong."""
    left = [step for step in steps if step not in row.cells]
    if left and row.unable is None:
        row.cells[left[0]], row.notes[left[0]] = "wrong", why
    return row


def fingerprint(steps: Sequence[str]) -> str:
    """Names the code that makes a row."""
    files = [*sorted((ROOT / "anybit").rglob("*.py")), *sorted(Path(__file__).parent.glob("*.py"))]
    text = b"".join(path.read_bytes() for path in files)
    versions = f"{transformers.__version__} {torch.__version__} {','.join(steps)}"
    return hashlib.sha256(text + versions.encode()).hexdigest()[:16]


def known(code: str) -> dict[str, Row]:
    """Rows that this code has made already."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    found = [json.loads(line) for line in lines]
    return {r["row"]["architecture"]: Row(**r["row"]) for r in found if r["code"] == code}


def show(row: Row, done: str) -> None:
    cells = " ".join(f"{step}={cell}" for step, cell in row.cells.items())
    share = "" if row.quantized is None else f", {row.quantized:.0%} quantized"
    unable = f"transformers cannot run it: {row.unable}" if row.unable else ""
    print(f"{done} {row.architecture} ({row.seconds:.0f} s{share}): {cells}{unable}", flush=True)
    for step, note in row.notes.items():
        print(f"    {step}: {note[:300]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architectures", nargs="*")
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=300, help="of the processor, for a row")
    parser.add_argument("--minutes", type=float, default=50, help="after which no row begins")
    options = parser.parse_args()
    names = options.architectures or list(architectures())
    steps = options.steps.split(",")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("anybit").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    preload()
    code = fingerprint(steps)
    found = {name: row for name, row in known(code).items() if name in names}
    if found:
        print(f"{len(found)} of {len(names)} are in {RESULTS.relative_to(ROOT)}")
    RESULTS.parent.mkdir(exist_ok=True)
    left = [name for name in names if name not in found]
    random.Random(code).shuffle(left)
    stop = time.monotonic() + 60 * options.minutes
    with RESULTS.open("a") as file:
        for row in sweep(left, steps, options.jobs, options.seconds, stop):
            found[row.architecture] = row
            print(json.dumps({"code": code, "row": dataclasses.asdict(row)}), file=file, flush=True)
            show(row, f"[{len(found)}/{len(names)}]")
    ordered = [found[name] for name in names if name in found]
    if len(ordered) < len(names):
        print(f"{len(ordered)} of {len(names)} in {options.minutes:g} minutes; run it again")
    elif not options.architectures and tuple(steps) == STEPS:
        write(ordered, STEPS, PAGE)
    print(dict(counts(ordered)))
    return int(any("wrong" in row.cells.values() for row in ordered))


if __name__ == "__main__":
    sys.exit(main())
