"""Measure all figures of the pages anew, most important ones first, on the GPU or CPU at hand.

    python benchmarks/measure_all.py --list             what there is, what it needs, what is done
    python benchmarks/measure_all.py --seconds 1500     as much as goes into 25 minutes
    python benchmarks/measure_all.py --only shapes peers cpu_kernels

Runs the commands of `stages.py`, each in a process of its own, and writes a file of rows for each
stage into --out: build/results/h200_shapes.csv on an H200. With --seconds, a command is begun if it
fits into the time that is left, and one that takes longer than expected is stopped at the end. What
is complete for this commit is not measured again, so the same command goes on where the last one
stopped, or was stopped by Ctrl-C. The rows and the output of each command are kept in
OUT/commands/COMMIT. A stage that is not complete is OUT/NAME.unfinished.csv, with what there is.
Rows of a checkout with changes, or of no known commit, are never taken for another run's.

Several GPUs share the commands of stages that only time kernels; other stages have one GPU, and
nothing else runs meanwhile. `docs/tables/fill.py --show OUT` makes the pages' tables of the files.
"""

import argparse
import contextlib
import csv
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from csv_rows import add_rows
from stages import NEEDS, STAGES, Stage

from anybit.measure.bench import current_commit

HERE = Path(__file__).resolve().parent
PATIENCE = 20  # seconds to write what is complete, after a command was told to stop
HANGS = 10  # times the minutes that a command should take, but as many minutes at least
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Command:
    """One command of a stage, but for the place of its rows and the number of its workers.

    text: with these left open. path: of its rows, once they are complete. beside: packages here
    that are measured too.
    """

    text: str
    path: Path
    beside: str

    @property
    def unfinished(self) -> Path:
        return self.path.with_suffix(".unfinished.csv")

    @property
    def log(self) -> Path:
        return self.path.with_suffix(".log")

    def done(self) -> bool:
        """Whether its rows are here, and of the same command."""
        if not (self.path.exists() and self.log.exists()):
            return False
        with self.log.open() as file:
            return file.readline().rstrip("\n") == self.told

    @property
    def told(self) -> str:
        """The first line of its log."""
        return self.text + (f" # beside {self.beside}" if self.beside else "")

    def rows(self) -> Path | None:
        """Its rows as far as there are any."""
        return next((p for p in (self.path, self.unfinished) if p.exists() and rows_of(p)), None)


@dataclass
class Running:
    """A process, of a command or of what comes before one, and when it has begun."""

    process: "subprocess.Popen[bytes]"
    began: float = field(default_factory=time.monotonic)

    def stop(self) -> None:
        """As Ctrl-C does; whatever it has started ends too. A second Ctrl-C does not disturb it."""
        before = {name: signal.signal(name, signal.SIG_IGN) for name in SIGNALS}
        try:
            self._stop()
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)

    def _stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Stopped(Exception):
    """The time is up."""


class Measuring:
    """Stages on this machine, and how far they are."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.gpus = torch.cuda.device_count()
        self.device = args.device or (
            short_name(torch.cuda.get_device_name()) if self.gpus else "gpu"
        )
        name = args.commit or "unknown"
        if not args.commit or name.endswith("+"):  # of one run alone
            name += time.strftime("-%Y%m%d-%H%M%S")
        self.folder = args.out / "commands" / name
        self.end = time.monotonic() + args.seconds if args.seconds else float("inf")
        self.failed: list[str] = []

    # What there is.

    def file(self, stage: Stage) -> Path:
        before = f"{self.device}_" if stage.on_gpu else ""
        return Path(self.args.out) / f"{before}{stage.name}.csv"

    def commands(self, stage: Stage) -> list[Command]:
        """Those that this machine can run."""
        more = [c for need, some in stage.extra.items() if self.has(need) for c in some]
        stem = self.file(stage).stem
        beside = ", ".join(package for package in stage.beside if self.has(package))
        return [
            Command(self.filled(text), self.folder / f"{stem}.{i + 1}.csv", beside)
            for i, text in enumerate([*stage.commands, *more])
        ]

    def filled(self, text: str) -> str:
        """A command with what is the same in every place."""
        a = self.args
        return text.format(
            out="{out}", workers="{workers}", commit=shlex.quote(a.commit),
            study=shlex.quote(str(a.study)), llama_cpp=shlex.quote(str(a.llama_cpp)),
        )  # fmt: skip

    def lacks(self, stage: Stage) -> list[str]:
        return [need for need in stage.needs if not self.has(need)]

    def has(self, need: str) -> bool:
        if need == "GPU":
            return self.gpus > 0
        if need == "sm_90":
            return self.gpus > 0 and torch.cuda.get_device_capability() == (9, 0)
        if need == "two GPUs":
            return self.gpus > 1
        if need == "study model":
            return (self.args.study / "config.json").is_file()
        if need == "llama.cpp":
            return self.args.llama_cpp is not None
        return need in os.environ if need.isupper() else importlib.util.find_spec(need) is not None

    def state(self, stage: Stage) -> str:
        """How many of its commands are done."""
        commands = self.commands(stage)
        done = sum(command.done() for command in commands)
        if done == len(commands) and self.file(stage).exists():
            return "done"
        if self.lacks(stage):
            return "cannot run"
        return f"{done} of {len(commands)}" if done else "to do"

    def about(self, stage: Stage) -> str:
        """A line of --list."""

        def named(needs: Sequence[str]) -> str:
            return ", ".join(n if self.has(n) else f"{n} (not here)" for n in needs)

        minutes = stage.minutes * len(self.commands(stage))
        words = [f"needs {named(stage.needs)}"] if stage.needs else []
        words += [f"takes {named(stage.beside)} beside"] if stage.beside else []
        words += [f"more with {named(list(stage.extra))}"] if stage.extra else []
        path = self.file(stage)
        line = f"{self.state(stage):11}{minutes:3.0f} min  {path.name:27} {of(path):34} "
        return (line + "; ".join(words)).rstrip()

    # Running.

    def run(self, stage: Stage) -> None:
        """Every command that is not done; the stage's file is written at the end in any case."""
        waiting = [command for command in self.commands(stage) if not command.done()]
        if not waiting:
            say(f"{stage.name} is complete")
            self.join(stage)
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        places = range(max(1, self.gpus) if stage.on_gpu and not stage.apart else 1)
        running: dict[int, tuple[Command, Running]] = {}
        try:
            if self.fits(stage) and not self.prepare(stage):
                waiting = []
            while running or (waiting and self.fits(stage)):
                for place in places:
                    if place not in running and waiting and self.fits(stage):
                        command = waiting.pop(0)
                        running[place] = command, self.start(stage, command, place, len(places))
                self.wait()
                for place, (command, job) in list(running.items()):
                    hangs = time.monotonic() - job.began > HANGS * 60 * max(1, stage.minutes)
                    if hangs:
                        job.stop()
                    if hangs or job.process.poll() is not None:
                        del running[place]
                        self.finish(command, job)
        finally:
            for _, job in running.values():
                job.stop()
            self.join(stage)

    def fits(self, stage: Stage) -> bool:
        return time.monotonic() + stage.minutes * 60 <= self.end

    def wait(self) -> None:
        time.sleep(0.2)
        if time.monotonic() > self.end:
            raise Stopped

    def prepare(self, stage: Stage) -> bool:
        """Run what makes no rows, such as compiling; whether it ended well."""
        for i, text in enumerate(map(self.filled, stage.before)):
            log = self.folder / f"{self.file(stage).stem}.before{i + 1}.log"
            job = self.launch(stage, text, text, log, "", 0, 1)
            try:
                while job.process.poll() is None:
                    self.wait()
            finally:
                job.stop()
            if job.process.returncode:
                self.fail(text, log)
                return False
        return True

    def start(self, stage: Stage, command: Command, place: int, places: int) -> Running:
        command.path.unlink(missing_ok=True)  # rows of another command
        command.unfinished.unlink(missing_ok=True)
        out = str(command.unfinished)
        return self.launch(stage, command.text, command.told, command.log, out, place, places)

    def launch(
        self, stage: Stage, text: str, told: str, log: Path, out: str, place: int, places: int
    ) -> Running:
        words = {"{out}": out, "{workers}": str(max(1, cores() // places))}
        script, *arguments = (words.get(word, word) for word in shlex.split(text))
        env = os.environ | {"PYTHONPATH": path_with(HERE.parent), "PYTHONUNBUFFERED": "1"}
        if not stage.on_gpu:
            env["CUDA_VISIBLE_DEVICES"] = ""
        elif self.gpus > 1 and "--ranks" not in arguments:
            given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            names = given.split(",") if given else [str(i) for i in range(self.gpus)]
            env["CUDA_VISIBLE_DEVICES"] = names[place]
        say(f"{script} {shlex.join(arguments)}")
        with log.open("w") as file:
            file.write(f"{told}\n")
            file.flush()
            return Running(
                subprocess.Popen(
                    [sys.executable, str(HERE / script), *arguments],
                    stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                    cwd=HERE.parent, env=env, start_new_session=True,
                )
            )  # fmt: skip

    def finish(self, command: Command, job: Running) -> None:
        """Its rows count if it has ended well."""
        job.stop()  # what it may have left running
        seconds = time.monotonic() - job.began
        if job.process.returncode or not (path := command.rows()):
            self.fail(command.text, command.log)
        else:
            path.replace(command.path)
            say(f"  {len(rows_of(command.path))} rows in {seconds:.0f} s")

    def fail(self, text: str, log: Path) -> None:
        self.failed.append(text)
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1]
        say(f"  failed: {last[:200]} ({log})")

    def join(self, stage: Stage) -> None:
        """Write the stage's file: all rows, or those that there are, as unfinished."""
        commands, path = self.commands(stage), self.file(stage)
        found = [rows for command in commands if (rows := command.rows())]
        unfinished = path.with_suffix(".unfinished.csv")
        unfinished.unlink(missing_ok=True)
        if not found:
            return
        whole = all(command.done() for command in commands)
        new = path.with_suffix(".csv.tmp")
        new.unlink(missing_ok=True)
        try:
            for rows in found:
                add_rows(new, rows_of(rows))
        except SystemExit as error:  # columns that differ
            self.failed.append(f"{stage.name}: {error}")
            new.unlink(missing_ok=True)
            return
        new.replace(path if whole else unfinished)
        say(f"  {path if whole else unfinished}")


def main() -> None:
    args = arguments().parse_args()
    args.out, args.study = args.out.resolve(), args.study.resolve()
    args.llama_cpp = args.llama_cpp and args.llama_cpp.resolve()
    for name in SIGNALS:  # in the background, a shell may have had the first ignored
        if name != signal.SIGHUP or signal.getsignal(name) != signal.SIG_IGN:  # nohup's
            signal.signal(name, signal.default_int_handler)
    all_of = Measuring(args)
    chosen = [s for s in STAGES if not args.only or s.name in args.only]
    if args.list:
        print(f"commit {args.commit or 'unknown'}, {args.out}")
        print(*(all_of.about(stage) for stage in chosen), sep="\n")
        wanted = {need for stage in chosen for need in (*stage.needs, *stage.extra)}
        print(*(f"{need}: {NEEDS[need]}" for need in NEEDS if need in wanted), sep="\n")
        return
    if not args.only:
        chosen = [stage for stage in chosen if stage.on_gpu == (all_of.gpus > 0)]
    if len(kinds := {torch.cuda.get_device_name(i) for i in range(all_of.gpus)}) > 1:
        raise SystemExit(
            f"{', '.join(sorted(kinds))}: CUDA_VISIBLE_DEVICES must name GPUs of a kind"
        )
    interrupted = False
    try:
        for stage in chosen:
            if lacks := all_of.lacks(stage):
                say(f"{stage.name} is left out: it needs {', '.join(lacks)}")
            else:
                all_of.run(stage)
    except (KeyboardInterrupt, Stopped) as stop:
        interrupted = not isinstance(stop, Stopped)
        say("stopped" if interrupted else "the time is up")
    for stage in chosen:
        if (state := all_of.state(stage)) != "done" and not all_of.lacks(stage):
            each = f"{stage.minutes:.0f} min for each command"
            say(f"not complete: {stage.name}, {state}, {each}")
    if all_of.failed:
        raise SystemExit("failed:\n" + "\n".join(all_of.failed))
    if interrupted:
        raise SystemExit(130)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    names = [stage.name for stage in STAGES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="of --list")
    parser.add_argument("--seconds", type=float, default=0, help="in all; 0: no limit")
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "results")
    parser.add_argument("--device", help="what files of a GPU are called; by itself h200, rtx-4090")
    parser.add_argument("--commit", default=current_commit(), help="for the rows; git is asked")
    parser.add_argument("--study", type=Path, default=HERE.parent / "build" / "study-105m")
    parser.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help="with node-llama-cpp")
    return parser


def short_name(gpu: str) -> str:
    """ "NVIDIA H200" -> "h200"; "NVIDIA A100-SXM4-80GB" -> "a100-sxm4-80gb"."""
    words = gpu.lower().replace("_", "-").split()
    return "-".join(word for word in words if word not in ("nvidia", "geforce", "gpu"))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def path_with(folder: Path) -> str:
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def of(path: Path) -> str:
    """The commits, or days, of a file's rows."""
    if not path.exists():
        return ""
    rows = rows_of(path)
    column = next((name for name in ("commit", "date") if rows and name in rows[0]), "")
    found = sorted({row[column] for row in rows} if column else ())
    return f"{len(rows)} rows of {', '.join(found)}" if column else f"{len(rows)} rows"


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    main()
