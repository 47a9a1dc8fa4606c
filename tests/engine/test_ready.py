"""Steps in graphs on a GPU: what they compute, and that no request waits for a compiler."""

import gc
import random
from pathlib import Path

import pytest
import torch

from anybit.engine.llm import LLM
from anybit.engine.model_runner import ModelRunner
from anybit.engine.ready import after_ready
from anybit.engine.scheduler import Scheduled
from anybit.engine.sequence import SamplingParams, Sequence

PICO = Path(__file__).parents[2] / "models" / "pico"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are CUDA's")


def steps(runner: ModelRunner, draw: random.Random, blocks: int) -> list[list[Scheduled]]:
    """Parts of some sequences' tokens: prompts at once or in chunks, and single tokens."""
    free = list(range(blocks))
    draw.shuffle(free)
    seqs = []
    for i in range(9):
        prompt = [draw.randrange(1, 4000) for _ in range(draw.choice((2, 17, 90, 150)))]
        params = SamplingParams(temperature=0)
        seqs.append(Sequence(str(i), 0, prompt, params, 999, frozenset()))
        need = -(-len(prompt) // runner.block_size)
        seqs[-1].blocks, free = free[:need], free[need:]
    at, out = [0] * len(seqs), []
    while any(a < len(s.tokens) for a, s in zip(at, seqs, strict=True)):
        step = []
        for i, seq in enumerate(seqs):
            left = len(seq.tokens) - at[i]
            count = min(left, draw.choice((0, 1, 1, 13, 64)))
            if count:
                step.append(Scheduled(seq, at[i], count, count == left))
                at[i] += count
        if step:
            out.append(sorted(step, key=lambda s: s.tokens))
    return out


@pytest.mark.parametrize("kv", ["model", "int8", "int4"])
@pytest.mark.parametrize("scheme", [None, "int4:group=64", "liquid@int8"])
def test_graphs_compute_what_the_model_does(kv: str, scheme: str | None) -> None:
    llm = LLM(PICO, scheme, kv_cache=kv, length=256, max_running=16)
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    assert runner.graphs is not None
    read = 0
    for step in steps(runner, random.Random(0), runner.states[0].k.shape[0]):
        if not runner.graphs.can_read(step) or runner.graphs.can_write(step):
            continue
        with torch.inference_mode():
            got = runner.graphs.hidden(step).float()
            tokens, batch = runner.prepare(step)
            want = runner.model(tokens, runner.states, batch).float()
        assert (got - want).norm() < 0.03 * want.norm()  # in 16 bits, sums in another order
        worst = ((got - want).norm(dim=1) / want.norm(dim=1)).max()
        assert worst < 0.1
        read += sum(s.tokens > 1 for s in step)
    assert read > 10


def test_no_request_waits_for_a_kernel_or_a_graph() -> None:
    llm = LLM(PICO, "int4:group=64", length=512, max_running=64)
    draw = random.Random(1)
    prompts = [[draw.randrange(1, 4000) for _ in range(draw.randrange(1, 300))] for _ in range(90)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), top_p=0.9, max_tokens=draw.randrange(1, 40))
        for i in range(90)
    ]
    llm.generate(prompts, params, show_progress=False)
    assert after_ready(llm.engine) == (0, 0)


def test_graphs_are_captured_beside_the_garbage_of_an_older_engine() -> None:
    """Whose memory a search for garbage would free in the middle of a capture."""
    older = LLM(PICO, length=256, max_running=4)
    older.engine.itself = older  # type: ignore[attr-defined]  # only a search finds it
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        del older
        llm = LLM(PICO, length=256, max_running=4)
    finally:
        gc.set_threshold(*before)
    assert llm.generate([[5, 6, 7]], show_progress=False)[0].tokens
