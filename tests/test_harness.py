"""lm-eval's tasks: ours against our own metrics, and what is said when something is missing."""

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from anybit.evaluate import harness
from anybit.evaluate.corpus import held_out_text
from anybit.evaluate.generation import function_prompts, parses
from anybit.evaluate.harness import Result, read_results, run_tasks, table, write_results

PICO = Path(__file__).resolve().parents[1] / "models" / "pico"
RAW = {
    "one": {"alias": "one", "acc,none": 0.5, "acc_stderr,none": 0.25, "sample_len": 4},
    "two": {"exact,strict": 1, "exact_stderr,strict": "N/A"},
}


@pytest.fixture(scope="module")
def local() -> Any:
    """tasks/local.py, loaded by its path as lm-eval does, without the package `datasets`."""
    path = harness.TASKS / "local.py"
    spec = importlib.util.spec_from_file_location("local", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.split = lambda documents: {"test": documents}
    return module


def test_results_are_read_shown_and_written(tmp_path: Path) -> None:
    rows = read_results("a", RAW) + read_results("b", {"one": RAW["one"] | {"acc,none": 0.75}})
    assert rows[0] == Result("a", "one", "acc", 0.5, 0.25)
    assert (rows[1].metric, rows[1].value) == ("exact (strict)", 1.0)
    assert math.isnan(rows[1].error)
    lines = [line.split() for line in table(rows).splitlines()]
    assert lines[0] == ["task", "metric", "a", "b"]
    assert lines[1] == ["one", "acc", "0.5000", "+-", "0.2500", "0.7500", "+-", "0.2500"]
    assert lines[2] == ["two", "exact", "(strict)", "1.0000"]
    write_results(rows, tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    assert [row["error"] for row in found] == [0.25, None, 0.25]


def test_questions_have_one_true_answer_in_the_held_out_text(local: Any) -> None:
    sources = [source for _, source in held_out_text()]
    for doc in local.next_lines()["test"][::5]:
        true = doc["choices"][doc["answer"]]
        assert any(doc["text"] + true + "\n" in source for source in sources)
        assert len(set(doc["choices"])) == local.CHOICES
    for doc in local.docstrings()["test"][::20]:
        assert doc["text"].endswith('"""')
        assert local.docstring_rouge(doc, [f' {doc["summary"]} """ more'])["rougeL"] == 1
        assert local.docstring_rouge(doc, ["qqq"])["rougeL"] == 0


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        run_tasks([tmp_path], ["piqa"])
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"pip install 'anybit\[eval\]'"):
        run_tasks([PICO], ["piqa"])


class Manager:
    """Stands for lm-eval's task manager: knows one task, whose data cannot be loaded."""

    all_tasks = ("piqa", "python_parses")

    def load(self, names: list[str]) -> Any:
        if names == ["piqa"]:
            raise ConnectionError("Couldn't reach the Hub")
        return {"tasks": {names[0]: type("Task", (), {"UNSAFE_CODE": True})()}}


def test_unknown_tasks_data_out_of_reach_and_code_to_run_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown task 'pika'; did you mean piqa; without a netw"):
        harness.check_known(["pika"], Manager())
    with pytest.raises(ValueError, match=r"'piqa' is not to be had here \(ConnectionError: Could"):
        harness.check_data("piqa", Manager(), run_code=True)
    with pytest.raises(ValueError, match=r"executes code .* with --run-code"):
        harness.check_data("humaneval", Manager(), run_code=False)
    harness.check_data("humaneval", Manager(), run_code=True)


@pytest.mark.filterwarnings("ignore")
def test_our_tasks_give_what_our_functions_compute(local: Any) -> None:
    pytest.importorskip("lm_eval")
    limit = 3
    got = run_tasks([PICO], ["python_parses", "python_next_line"], limit=limit)
    values = {(r.task, r.metric): r.value for r in got}
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    model = AutoModelForCausalLM.from_pretrained(PICO).eval()
    prompts = function_prompts(held_out_text(), limit)
    good = 0
    for prompt in prompts:
        text = tokenizer(prompt.before + prompt.head, return_tensors="pt", verbose=False)
        ids = text.input_ids[:, 96 - 1024 :]
        out = model.generate(ids, max_new_tokens=96, do_sample=False, pad_token_id=0)
        good += parses(prompt.head, tokenizer.decode(out[0, ids.shape[1] :]))
    assert values["python_parses", "parses"] == pytest.approx(good / limit)
    right = 0
    for doc in local.next_lines()["test"][:limit]:
        scores = [likelihood(model, tokenizer, doc["text"], c) for c in doc["choices"]]
        right += scores.index(max(scores)) == doc["answer"]
    assert values["python_next_line", "acc"] == pytest.approx(right / limit)


def likelihood(model: Any, tokenizer: Any, text: str, more: str) -> float:
    """Log-probability of `more` after `text`."""
    ids, start = tokenizer(text + more).input_ids, len(tokenizer(text).input_ids)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return sum(logits[i - 1, ids[i]].item() for i in range(start, len(ids)))
