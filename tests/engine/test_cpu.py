"""Decode steps on a CPU: recorded, by kernels that LLVM compiles; tokens are those of torch."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

import anybit
from anybit.checkpoint.save_load import load_dense
from anybit.engine.llm import LLM
from anybit.engine.model_runner import MOST_RECORDED, RECORDED
from anybit.engine.pace import Pace
from anybit.engine.scheduler import Scheduled
from anybit.engine.sequence import SamplingParams
from anybit.kernels import between
from anybit.nn.multiplier import Multiplier
from tests.engine.conftest import prompts

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the engine takes the GPU")
Checkpoint = Callable[[str], Path]
# Sums in another order change last bits, and now and then a code of K or V by one: in few steps.
LAST_BITS, USUAL, ANOTHER_CODE = 1e-3, 0.01, 0.5
GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor without compiled kernels."""
    monkeypatch.setitem(between.chosen, torch.device("cpu"), between.TORCH)


@pytest.mark.parametrize("kv", ["model", "int8", "k8v4", "int4"])
@pytest.mark.parametrize("name", ["llama-biases-tied", "qwen3", "gemma3"])
def test_tokens_are_those_of_plain_torch(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, name: str, kv: str
) -> None:
    """Three texts run as four; one of them ends before the others."""
    many = prompts(3)
    params = [replace(GREEDY, max_tokens=n, logprobs=2) for n in (20, 7, 20)]
    llm = LLM(checkpoint(name), max_running=4, block_size=4, kv_cache=kv)
    got = llm.generate(many, params)
    graphs = llm.engine.runner.graphs.graphs
    assert set(graphs) == {2, 4}
    assert all(recording.refused is None for recording, _ in graphs.values())
    plain(monkeypatch)
    llm = LLM(checkpoint(name), max_running=4, block_size=4, kv_cache=kv)
    assert llm.engine.runner.graphs is None
    apart = []
    for mine, other in zip(got, llm.generate(many, params), strict=True):
        if kv == "model":
            assert mine.tokens == other.tokens
        for a, b in zip(*(o.completions[0].logprobs for o in (mine, other)), strict=True):
            (x, first), (_, second) = a.top
            apart.append(abs(first - b.top[0][1]))
            if x != b.top[0][0]:  # as likely as the other; what follows is another text
                assert first - second < ANOTHER_CODE
                break
    assert median(apart) < USUAL
    assert max(apart) < (LAST_BITS if kv == "model" else ANOTHER_CODE)


def test_more_texts_than_a_recording_holds(checkpoint: Checkpoint) -> None:
    many = prompts(MOST_RECORDED + 2)
    llm = LLM(checkpoint("llama"), max_running=32)
    together = [output.tokens for output in llm.generate(many, GREEDY)]
    alone = [llm.generate([prompt], GREEDY)[0].tokens for prompt in many]
    assert together == alone


@pytest.mark.parametrize("head", ["int8", "int4:group=64", "liquid@int8"])
def test_a_quantized_head_is_recorded(checkpoint: Checkpoint, head: str) -> None:
    plan = {"*": "int4:group=32", "lm_head": head}
    llm = LLM(checkpoint("llama-round"), quantization=plan, max_running=1)
    model = llm.engine.runner.model
    assert model.lm_head.scheme == head
    got = llm.generate(prompts(2), GREEDY)
    recording, _ = llm.engine.runner.graphs.graphs[1]
    assert recording.refused is None
    llm.engine.runner.graphs = None  # every step by the model itself
    want = llm.generate(prompts(2), GREEDY)
    assert [o.tokens for o in got] == [o.tokens for o in want]


@pytest.mark.parametrize("spec", ["int4:group=32,rotate=k", "int8:rotate=kn@int8"])
def test_rotations_are_recorded(
    checkpoint: Checkpoint, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q, K and V are one layer, with one transform, unless blocks of outputs differ.

    Others leave that of their outputs to what reads them, where a family does that.
    """
    monkeypatch.setattr(between.of(torch.empty(0)), "turns", 8)
    llm = LLM(checkpoint("llama-round"), quantization=spec, max_running=1)
    layers = llm.engine.runner.model.layers
    assert isinstance(layers[0].self_attn.qkv_proj, Multiplier) == ("kn" not in spec)
    left = [layer.leaves for layer in layers.modules() if isinstance(layer, Multiplier)]
    assert left.count(8) == (3 if "kn" in spec else 4) * len(layers)
    many = prompts(2)
    got = llm.generate(many, GREEDY)
    recording, _ = llm.engine.runner.graphs.graphs[1]
    assert recording.refused is None
    llm.engine.runner.graphs = None
    assert [o.tokens for o in llm.generate(many, GREEDY)] == [o.tokens for o in got]
    model = anybit.quantize_(load_dense(checkpoint("llama-round")), spec)
    ids = torch.tensor(many[:1])
    want = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert got[0].tokens[:8] == want[0, ids.shape[1] :].tolist()


def beside(
    llm: LLM, prompt: list[int], monkeypatch: pytest.MonkeyPatch, alike: bool = True
) -> list[tuple[list[Scheduled], int]]:
    """Steps that read a prompt while a text is written, with how often each ran the model.

    alike: whether what comes of both is what comes of each alone.
    """
    engine, steps, runs = llm.engine, [], [0]
    launch, forward = engine.runner.launch, engine.runner.model.forward

    def counted(*args: Any) -> Any:
        runs[0] += 1
        return forward(*args)

    def noted(scheduled: list[Scheduled], previous: Any) -> Any:
        before, out = runs[0], launch(scheduled, previous)
        steps.append((scheduled, runs[0] - before))
        return out

    first = prompts(1)[0]
    long, short = replace(GREEDY, max_tokens=2 * len(prompt)), replace(GREEDY, max_tokens=5)
    want = llm.generate([first], long) + llm.generate([prompt], short)
    engine.scheduler.blocks.forget()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "launch", noted)
        patch.setattr(engine.runner.model, "forward", counted)
        engine.add("text", first, long)
        got: dict[str, list[int]] = {"text": [], "late": []}
        while engine.busy:
            for delta in engine.step():
                assert not delta.error
                got[delta.request] += delta.tokens
            if len(got["text"]) == 3:
                engine.add("late", prompt, short)
    tokens = [output.tokens for output in want]
    assert list(map(len, got.values())) == list(map(len, tokens))
    assert not alike or list(got.values()) == tokens
    return [(step, n) for step, n in steps if sum(s.tokens for s in step) > len(step) > 1]


@pytest.mark.parametrize("kv", ["model", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama-biases-tied", "qwen3", "gemma3"])
def test_a_prompt_is_read_beside_a_text_by_recordings(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, name: str, kv: str
) -> None:
    """No step is run from Python, and none holds more than its pace."""
    llm = LLM(checkpoint(name), dtype="float32", max_running=4, block_size=4, kv_cache=kv)
    assert llm.engine.scheduler.pace is None  # a call's prompts wait for nobody
    llm.engine.prepared()
    llm.engine.idle(lambda: False)
    graphs = llm.engine.runner.graphs
    refused = {
        r.refused for rows in (graphs.written, graphs.prompts) for r, _ in rows.graphs.values()
    }
    assert refused == {None}
    own = Pace({size: 1 + 0.1 * size for size in RECORDED}, None, {1: 1.0})
    monkeypatch.setattr(own, "timed", lambda *args: None)
    llm.engine.scheduler.pace = own
    prompt = [7 * i % 90 + 2 for i in range(120)]
    # In few bits, a sum in another order may change a code.
    steps = beside(llm, prompt, monkeypatch, alike=kv == "model")
    assert {sum(s.tokens for s in step) for step, _ in steps} == {4}
    assert len(steps) >= len(prompt) // 3
    assert not any(runs for _, runs in steps)


def test_a_recurrence_reads_a_prompt_at_once(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States take tokens in order, which no recording of any prompts does."""
    llm = LLM(checkpoint("lfm2"), dtype="float32", max_running=4, block_size=4)
    llm.engine.prepared()
    llm.engine.idle(lambda: False)
    assert llm.engine.scheduler.pace is None
    steps = beside(llm, [7 * i % 90 + 2 for i in range(60)], monkeypatch)
    assert [runs for _, runs in steps] == [1]


def test_recordings_follow_new_weights(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint("llama-round")
    model = load_dense(source)
    llm = LLM(source, dtype="float32", max_running=4)
    llm.engine.prepared()
    llm.engine.idle(lambda: False)
    graphs = llm.engine.runner.graphs
    before = dict(graphs.prompts.graphs)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    llm.load_weights(model.state_dict().items())
    assert not graphs.prompts.graphs
    llm.generate(prompts(1), GREEDY)
    assert graphs.graphs
    assert set(graphs.prompts.graphs) <= set(before)
    assert not {id(r) for r, _ in before.values()} & {
        id(r) for r, _ in graphs.prompts.graphs.values()
    }
