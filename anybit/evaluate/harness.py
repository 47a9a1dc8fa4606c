"""Tasks of EleutherAI's lm-evaluation-harness: its own by name, and ours, which need no network.

`python_next_line`, `python_parses` and `python_docstring` (the YAML files in `tasks/`) are made
from the held-out modules of the standard library. Stock tasks (piqa, arc_easy, hellaswag,
winogrande, humaneval, ...) read their data sets from the cache of the package `datasets`, or from
the network.
"""

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from anybit.errors import InvalidInput, in_a_line, near
from anybit.files.directory import without_nan, write_json

TASKS = Path(__file__).with_name("tasks")
OURS = tuple(sorted(path.stem for path in TASKS.glob("*.yaml")))


@dataclass(frozen=True)
class Result:
    """One metric of one task: its mean, and the standard error of the mean (nan if unknown)."""

    model: str
    task: str
    metric: str
    value: float
    error: float


def run_tasks(
    models: Sequence[Path],
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    batch: int = 8,
    run_code: bool = False,
) -> list[Result]:
    """Run tasks on the models of some directories, dense or quantized.

    limit: documents of each task; all by default. batch: requests that go through a model at a
    time. run_code: allow tasks that execute what the model writes (humaneval).

    Raises ImportError without lm-eval, ValueError for unknown tasks and for data sets that are not
    to be had.
    """
    for directory in models:
        if not (directory / "config.json").is_file():
            raise FileNotFoundError(f"{directory} is not a directory of a model: no config.json")
    # Before any model is loaded, which turns the hub off for packages that are imported later.
    evaluator, manager, language_model = harness()
    check_known(tasks, manager)
    if run_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"
    for name in tasks:
        check_data(name, manager, run_code)
    from anybit.evaluate.model import load_text_model

    results = []
    for directory in models:
        model, tokenizer = load_text_model(directory)
        out = evaluator.simple_evaluate(
            model=language_model(pretrained=model, tokenizer=tokenizer, batch_size=batch),
            tasks=[*tasks],
            limit=limit,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=1000,
            confirm_run_unsafe_code=run_code,
        )
        results += read_results(str(directory), out["results"])
    return results


def harness() -> tuple[Any, Any, Any]:
    """lm-eval's evaluator module, a task manager that knows our tasks, and its model class."""
    try:
        from lm_eval import evaluator
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ImportError(
            f"tasks need lm-eval ({error}), which is in the extra `eval`: "
            "pip install 'anybit[eval]'"
        ) from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return evaluator, TaskManager(include_path=str(TASKS)), HFLM


def check_known(tasks: Sequence[str], manager: Any) -> None:
    """ValueError for names that lm-eval does not know, with those that look like them."""
    for name in tasks:
        if name not in manager.all_tasks:
            raise InvalidInput(
                f"unknown task {name!r}{near(name, manager.all_tasks)}; "
                f"without a network there are {', '.join(OURS)}; `lm_eval ls tasks` lists all"
            )


def check_data(name: str, manager: Any, run_code: bool) -> None:
    """ValueError when a task's data is not to be had, or when it needs a permission."""
    try:
        loaded = manager.load([name])
    except Exception as error:  # what datasets, the hub and the network raise is theirs to choose
        raise InvalidInput(
            f"the data of task {name!r} is not to be had here ({in_a_line(error)}). Run it once "
            "with a network, or copy the data set into the cache (HF_HOME); tasks that need no "
            f"network: {', '.join(OURS)}"
        ) from None
    unsafe = [n for n, task in loaded["tasks"].items() if getattr(task, "UNSAFE_CODE", False)]
    if unsafe and not run_code:
        raise InvalidInput(
            f"{', '.join(unsafe)} executes code that the model writes, on this machine; allow it "
            "with --run-code, best inside a container"
        )


def read_results(model: str, results: dict[str, dict[str, Any]]) -> list[Result]:
    """lm-eval's `{"task": {"acc,none": .., "acc_stderr,none": ..}}` -> rows."""
    rows = []
    for task, metrics in results.items():
        for key, value in metrics.items():
            metric, _, kind = key.partition(",")
            if not kind or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            found: Any = metrics.get(f"{metric}_stderr,{kind}")
            error = float(found) if isinstance(found, int | float) else math.nan
            name = metric if kind == "none" else f"{metric} ({kind})"
            rows.append(Result(model, task, name, float(value), error))
    return rows


def table(results: Sequence[Result]) -> str:
    """A column for every model, a line for every metric, with standard errors."""
    models = list(dict.fromkeys(r.model for r in results))
    lines = [["task", "metric", *models]]
    cells = {(r.task, r.metric, r.model): r for r in results}
    for task, metric in dict.fromkeys((r.task, r.metric) for r in results):
        found = [cells.get((task, metric, model)) for model in models]
        lines.append([task, metric, *("" if r is None else show(r) for r in found)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def show(result: Result) -> str:
    return f"{result.value:.4f}" + ("" if math.isnan(result.error) else f" +- {result.error:.4f}")


def write_results(results: Sequence[Result], path: Path) -> None:
    """Rows as JSON; an unknown error is null."""
    write_json(path, [without_nan(asdict(r)) for r in results])
