"""lm-eval over HTTP: a task's score is that of `anybit eval --tasks`."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from anybit.engine.llm import LLM
from anybit.evaluate import harness
from tests.engine.conftest import PICO
from tests.serve.conftest import TOKENIZER, serving

TASK = "python_next_line"


@pytest.mark.filterwarnings("ignore")
def test_a_task_over_http_has_the_score_of_our_own_command(tmp_path: Path) -> None:
    """In fp32, where no two answers are almost as likely by rounding alone."""
    api = pytest.importorskip("lm_eval.models.openai_completions")
    evaluator = pytest.importorskip("lm_eval.evaluator")
    AutoModelForCausalLM.from_pretrained(PICO, dtype=torch.float32).save_pretrained(tmp_path)
    for name in TOKENIZER:
        shutil.copy(PICO / name, tmp_path / name)
    limit = 12
    (wanted, *_) = harness.run_tasks([tmp_path], [TASK], limit=limit)
    _, manager, _ = harness.harness()
    with serving(LLM(tmp_path), names=("pico",)) as live:
        model = api.LocalCompletionsAPI(
            base_url=f"{live.url}/v1/completions",
            model="pico",
            tokenizer=str(tmp_path),
            num_concurrent=4,
        )
        out = evaluator.simple_evaluate(
            model=model, tasks=[TASK], limit=limit, task_manager=manager, bootstrap_iters=10
        )
    (got, *_) = harness.read_results("http", out["results"])
    assert (got.metric, got.value) == (wanted.metric, wanted.value)
    assert 0 < got.value < 1
    samples = out["samples"][TASK]
    assert len(samples) == limit
