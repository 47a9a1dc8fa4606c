"""What fails while drafts are made or run costs no text and no token."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from anybit.engine.llm import LLM
from anybit.engine.sequence import Row, SamplingParams
from tests.engine.conftest import prompts
from tests.engine.test_engine import assert_no_block_is_held, assert_same, mixed_params
from tests.engine.test_speculation import Told, alone, drafting, speculating

Checkpoint = Callable[[str], Path]


class Broken(Told):
    """Guesses a few times, and then fails in one of its methods."""

    def __init__(self, method: str, told: Told):
        super().__init__(told.outputs)
        self.left = 5
        self.failures = 0
        good = getattr(self, method)

        def fail(rows: list[Row], given: object) -> object:
            self.left -= 1
            if self.left < 0:
                self.failures += 1
                raise MemoryError("no room for guesses")
            return good(rows, given)

        setattr(self, method, fail)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("method", ["reach", "read", "draft"])
def test_texts_go_on_without_a_drafter_that_fails(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture, method: str, overlaps: bool
) -> None:
    want = alone(checkpoint, "llama")
    drafter = Broken(method, Told(want))
    llm = speculating(LLM(checkpoint("llama"), block_size=4), drafter)
    llm.engine.runner.overlaps = overlaps
    with caplog.at_level(logging.ERROR, "anybit.engine"):
        for _ in range(2):
            assert_same(llm.generate(prompts(10), mixed_params(10)), want)
    assert drafter.failures == 1
    errors = [r.message for r in caplog.records if r.name == "anybit.engine"]
    assert errors == ["guessing has failed; texts go on without drafts until a restart"]
    assert llm.engine.stats.accepted_tokens > 0
    assert_no_block_is_held(llm.engine)


def test_a_draft_model_that_fails(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model, with a cache of its own."""
    want = alone(checkpoint, "llama")
    llm = drafting(LLM(checkpoint("llama"), draft=checkpoint("qwen2"), block_size=4))
    drafter = llm.engine.speculation.drafter  # type: ignore[union-attr]
    runs, good = iter(range(9)), drafter.runner.logits  # type: ignore[attr-defined]

    def fail(*args: object) -> object:
        if next(runs, None) is None:
            raise MemoryError("no room for guesses")
        return good(*args)

    monkeypatch.setattr(drafter.runner, "logits", fail)  # type: ignore[attr-defined]
    assert_same(llm.generate(prompts(10), mixed_params(10)), want)
    assert llm.engine.speculation.failed  # type: ignore[union-attr]
    assert_no_block_is_held(llm.engine)
    own = drafter.blocks  # type: ignore[attr-defined]
    assert own.holders == [0] * own.count


def test_tokens_before_a_failure_are_told(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits behind the second drafted token are NaN: what was chosen before them stays."""
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)
    want = LLM(checkpoint("llama")).generate([[5, 7, 9]], params)
    llm = speculating(LLM(checkpoint("llama")), All(want))
    # The runner's, since a graph does not call the model's again, and pads a step.
    logits, steps = llm.engine.runner.logits, []  # type: ignore[attr-defined]

    def poisoned(*step: object) -> torch.Tensor:
        out = logits(*step)
        if len(out) == 5:
            steps.append(0)
            if len(steps) == 2:
                out[2] = torch.nan
        return out

    monkeypatch.setattr(llm.engine.runner, "logits", poisoned)
    (got,) = llm.generate([[5, 7, 9]], params)[0].completions
    whole = want[0].completions[0]
    assert got.finish == "error"
    assert "NaN" in got.error
    assert got.tokens == whole.tokens[:8]  # 1 of the prompt, 5 of a step, 2 of the one that failed
    assert got.logprobs is not None
    assert len(got.logprobs) == 8
    assert_no_block_is_held(llm.engine)


class All(Told):
    """Guesses right, and as much as is asked for."""

    def __init__(self, outputs: list) -> None:
        super().__init__(outputs, wrong=0)

    def reach(self, rows: list[Row], most: int) -> list[int]:
        return [most] * len(rows)
