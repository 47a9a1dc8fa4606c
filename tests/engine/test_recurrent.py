"""Layers that keep states of texts: whatever shares their steps, texts stay what they are alone."""

import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from anybit.engine import assemble, graphs, model_runner, ready
from anybit.engine.engine import Engine
from anybit.engine.graphs import StepGraphs
from anybit.engine.llm import LLM
from anybit.engine.model_runner import ModelRunner, state_bytes
from anybit.engine.models.hosted import Hosted
from anybit.engine.scheduler import MOST_PROMPTS, Scheduled
from anybit.engine.sequence import SamplingParams
from anybit.errors import InvalidInput, Unsupported
from anybit.kernels.between import Family, of
from anybit.kernels.kv.format import plain
from anybit.kernels.recurrences import Convolution, StateSpace
from anybit.kernels.scans import CHUNK, STATES, Singles, Texts
from anybit.kernels.state import Recurrence, Room, RowStates
from tests.engine.conftest import ARCHITECTURES, RECURRENT, prompts, random_model, reference
from tests.engine.test_between import register
from tests.engine.test_engine import (
    assert_no_block_is_held,
    assert_same,
    fail_of_several,
    mixed_params,
)
from tests.engine.test_models import edit
from tests.engine.test_speculation import Told, speculating
from tests.needs import pairs

Checkpoint = Callable[[str], Path]
GREEDY = SamplingParams(max_tokens=9, temperature=0)
MIXED = ("lfm2", "falcon_h1", "jamba", "mamba2", "qwen3_5")  # each kind of state


def aborted(
    engine: Engine, rng: random.Random, chance: float, got: dict[str, list[int]]
) -> Iterator[str]:
    """Run an engine, and after a step with some chance abort a request, which is given.

    got: the tokens of requests that were not aborted.
    """
    while engine.busy:
        for delta in engine.step():
            got.setdefault(delta.request, []).extend(delta.tokens)
        if engine.requests and rng.random() < chance:
            victim = rng.choice(list(engine.requests))
            engine.abort(victim)
            got.pop(victim, None)
            yield victim


def assert_nothing_is_held(llm: LLM) -> None:
    assert_no_block_is_held(llm.engine)
    runner, blocks = llm.engine.runner, llm.engine.scheduler.blocks
    assert isinstance(runner, ModelRunner)
    rows = {len(s.states[0]) for s in runner.states if isinstance(s, RowStates)}
    kept = [*blocks.kept.free, *blocks.kept.known.values()]
    assert rows == {len(blocks.rows) + 1 + len(kept)}
    assert sorted([*blocks.rows, *kept]) == list(range(1, *rows))
    assert blocks.kept.known.keys() <= blocks.known.keys()


@pytest.mark.parametrize("name", MIXED)
def test_together_equals_one_by_one(checkpoint: Checkpoint, name: str) -> None:
    """In chunks, after preemptions, and with steps that start before the last one's tokens."""
    llm = LLM(checkpoint(name), prefix_caching=False)
    many, params = prompts(10), mixed_params(10)
    many[6:] = [many[3] + prompt for prompt in many[6:]]  # what they begin with is found again
    alone = [llm.generate(*each)[0] for each in zip(many, params, strict=True)]
    options = [{}, {"max_tokens": 7, "block_size": 4}, {"max_running": 3}, {"deterministic": True}]
    first = MIXED.index(name) % 2 == 0  # so each option meets both in some kinds of states
    for option, overlaps in pairs(options, (first, not first)):
        llm = LLM(checkpoint(name), **option)
        llm.engine.runner.overlaps = overlaps
        assert_same(llm.generate(many, params), alone)
        assert_nothing_is_held(llm)
    llm = LLM(checkpoint(name), block_size=4, length=80)
    blocks = llm.engine.scheduler.blocks
    for block in list(blocks.free)[30:]:  # as if others held them
        del blocks.free[block]
    assert_same(llm.generate(many, params), alone)
    assert llm.engine.scheduler.preemptions > 0


@pytest.mark.parametrize("name", MIXED)
def test_aborts_leave_no_row(checkpoint: Checkpoint, name: str) -> None:
    """A row is taken by another text at once, which must not see what it holds."""
    llm = LLM(checkpoint(name), max_running=4, block_size=2)
    want = {tuple(p): llm.generate(p, GREEDY)[0].tokens for p in prompts(8)}
    engine, rng, got = llm.engine, random.Random(0), dict[str, list[int]]()
    names = {str(i): rng.choice(prompts(8)) for i in range(60)}
    for request, prompt in names.items():
        engine.add(request, prompt, GREEDY)
    for victim in aborted(engine, rng, 0.3, got):
        names.pop(victim)
    assert len(names) > 10
    for request, prompt in names.items():
        assert got[request] == want[tuple(prompt)]
    assert_nothing_is_held(llm)


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_step_that_fails_after_it_has_changed_states(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, name: str, overlaps: bool
) -> None:
    llm = LLM(checkpoint(name), max_tokens=8, draft="ngram")
    params = SamplingParams(max_tokens=5, seed=3, prompt_logprobs=1, embed=True)
    many = prompts(4)
    want = llm.generate(many, params)
    speculating(llm, Told(want))
    llm.engine.runner.overlaps = overlaps
    fail_of_several(llm, monkeypatch)
    for a, b in zip(llm.generate(many, params), want, strict=True):
        (a,), (b,) = a.completions, b.completions
        assert (a.tokens, a.finish) == (b.tokens, b.finish)
        assert a.embedding == pytest.approx(b.embedding, abs=1e-4)
        values = [[p and p.logprob for p in c.prompt_logprobs][1:] for c in (a, b)]
        assert values[0] == pytest.approx(values[1], abs=1e-3)
    assert_nothing_is_held(llm)


@pytest.mark.parametrize("name", RECURRENT)
def test_16_bits_stay_close(checkpoint: Checkpoint, name: str) -> None:
    """Log probabilities of a prompt in two chunks, and of what follows in single tokens."""
    prompt = prompts(1, longest=60)[0] + [5] * CHUNK
    model = AutoModelForCausalLM.from_pretrained(checkpoint(name), dtype=torch.float32)
    want = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    want = want.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    llm = LLM(checkpoint(name), dtype="bfloat16", max_tokens=50)
    params = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=0, ignore_eos=True)
    (output,) = llm.generate([prompt], params)
    found = output.completions[0].prompt_logprobs
    assert found is not None
    got = torch.tensor([p.logprob for p in found[1:] if p is not None])
    assert (got - want).abs().median() < 0.1 * want.std()
    assert output.completions[0].finish == "length"


@pytest.mark.parametrize("name", ["lfm2", "bamba", "falcon_h1", "mamba2", "qwen3_5"])
def test_steps_of_single_tokens_are_recorded(checkpoint: Checkpoint, name: str) -> None:
    """What is captured runs once before that, and must not advance a state twice."""
    llm = LLM(checkpoint(name))
    graphs = llm.engine.runner.graphs
    assert graphs is not None
    llm.generate(prompts(3), GREEDY)
    assert graphs.captures > 0
    assert not any(getattr(graph, "refused", None) for graph, _ in graphs.graphs.values())
    plain = LLM(checkpoint(name))
    plain.engine.runner.graphs = None
    assert_same(llm.generate(prompts(3), GREEDY), plain.generate(prompts(3), GREEDY))


def test_memory_is_counted_by_rows_and_blocks(checkpoint: Checkpoint) -> None:
    llm = LLM(checkpoint("falcon_h1"), kv_bytes=1 << 20, block_size=4)
    runner, blocks = llm.engine.runner, llm.engine.scheduler.blocks
    model, kv = runner.model, runner.states[1].format
    none = Room(0, 4, 0, kv, runner.device)
    row, block = (state_bytes(model, r) for r in (none._replace(rows=1), none._replace(blocks=1)))
    # Two layers: 8 heads of 16 channels with 12 states, 3 inputs of 176 channels; K and V.
    assert row == 2 * 4 * (8 * 16 * 12 + 3 * (8 * 16 + 2 * 2 * 12))
    assert block == 2 * 4 * 2 * 4 * 2 * 16
    held = sum(state.nbytes for state in runner.states)
    rows = len(blocks.rows) + len(blocks.kept.free) + 1
    assert held == rows * row + blocks.count * block
    assert (1 << 20) - row - block < held <= 1 << 20
    assert rows == (1 << 19) // row
    assert llm.engine.scheduler.max_running == len(blocks.rows) == (rows - 1) * 3 // 4
    none = LLM(checkpoint("falcon_h1"), kv_bytes=1 << 20, block_size=4, prefix_caching=False)
    assert none.engine.scheduler.max_running == rows - 1
    whole = LLM(checkpoint("mamba2"), max_running=5)  # as many as are asked for, and no K and V
    assert len(whole.engine.scheduler.blocks.rows) == 5
    free = LLM(checkpoint("mamba2"))
    assert_same(whole.generate(prompts(9), GREEDY), free.generate(prompts(9), GREEDY))


class Live(TorchDispatchMode):
    """The most bytes that tensors take at once, of those that are made inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), given: Any = None
    ) -> Any:
        out = function(*args, **(given or {}))
        for tensor in filter(torch.is_tensor, out if isinstance(out, tuple | list) else [out]):
            memory = tensor.untyped_storage()
            if memory._cdata not in self.sizes:
                self.sizes[memory._cdata] = memory.nbytes()
                weakref.finalize(memory, self.sizes.pop, memory._cdata)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return out


@pytest.mark.parametrize("ragged", [True, False])
def test_memory_is_left_for_states_on_their_way(ragged: bool) -> None:
    """Of texts whose prompts a step reads, however many are written; of all without kernels."""
    meta, many = torch.device("meta"), 400
    numbers = torch.zeros(1, 4, device=meta)
    conv = Convolution(torch.zeros(8224, 4, device=meta), None)
    scan = StateSpace(conv, numbers, numbers, numbers, 8, 4096)
    memory = Recurrence(
        (scan.conv.window, ((1, 4, 8, 4096), torch.float32)), ((1, torch.bfloat16),)
    )
    none = Room(0, 16, 0, plain(torch.bfloat16), meta)
    state = memory.empty(none._replace(rows=1)).nbytes

    def states(texts: int) -> float:
        model = SimpleNamespace(recurrent=True, ragged=ragged, memories=[memory])
        settings = SimpleNamespace(max_running=texts, draft=None)
        return assemble.states_bytes(model, settings, none) / state  # type: ignore[arg-type]

    texts, tokens = (MOST_PROMPTS + 1, 8) if ragged else (many, 1)
    assert states(many) == (5 * texts if ragged else 8 * texts)
    assert states(2) == (10 if ragged else 8 * STATES)
    rows = memory.empty(none._replace(rows=texts + 1))
    at = torch.zeros(texts, dtype=torch.int32, device=meta)
    own = Singles(texts) if tokens == 1 else Texts.cut([tokens] * texts, {}, meta)
    x = torch.zeros(texts * tokens, 8228, device=meta)
    with Live() as live:
        of(x).recur(scan, rows.states, x, own, at, at, at)
    assert 3 * texts < live.peak / state < states(many)


def test_a_cache_format_holds_k_and_v_alone(checkpoint: Checkpoint) -> None:
    llm = LLM(checkpoint("qwen3_5"), kv_cache="int8")
    rows, cache = llm.engine.runner.states
    assert {state.dtype for state in rows.states} == {torch.float32}
    assert cache.k.dtype == torch.int8
    outputs = llm.generate(prompts(3), GREEDY)
    assert all(len(output.tokens) == 9 for output in outputs)


def test_a_text_longer_than_any_limit_of_the_model(checkpoint: Checkpoint) -> None:
    """A recurrence counts no positions."""
    llm = LLM(checkpoint("mamba2"), length=600)
    model = AutoModelForCausalLM.from_pretrained(checkpoint("mamba2"))
    prompt = prompts(1)[0] * 30
    (output,) = llm.generate([prompt[:550]], GREEDY)
    assert output.tokens == reference(model, prompt[:550], 9)


def test_steps_that_no_graph_takes_run_before_requests(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, though the longer ones begin as the shorter ones do."""
    llm = LLM(checkpoint("mamba2"), max_tokens=600)
    runner, seen = llm.engine.runner, []
    launch = runner.launch

    def noted(scheduled: list[Scheduled], previous: Any = None) -> Any:
        seen.append(sum(s.tokens for s in scheduled))
        return launch(scheduled, previous)

    monkeypatch.setattr(runner, "launch", noted)
    ready.rehearse(llm.engine, runner.graphs)
    largest = runner.graphs.prompts.sizes[-1] if runner.graphs.prompts else 0
    assert {n for n in (512, 513, 600) if n > largest} < set(seen)  # a GPU's graphs take 512
    assert not llm.engine.scheduler.blocks.known
    assert ready.beyond(512, 2048) == [513, 1024, 1025, 2048]
    assert ready.beyond(2048, 2048) == []


def test_bad_input_is_refused_before_memory_is_taken(checkpoint: Checkpoint) -> None:
    with pytest.raises(InvalidInput, match="kv_cache='int8': no layer of this model has K and V"):
        LLM(checkpoint("mamba2"), kv_cache="int8")
    with pytest.raises(InvalidInput, match=r"holds 0 texts' states.* raise kv_bytes"):
        LLM(checkpoint("falcon_h1"), kv_bytes=1000)


@pytest.mark.parametrize(
    ("name", "field", "value", "said"),
    [
        ("mamba2", "n_groups", 3, "8 heads of Mamba in 3 groups"),
        ("mamba2", "state_size", 11, r"conv1d.bias: config.json asks for floats of shape \(1"),
        ("lfm2", "conv_L_cache", 0, "a convolution of 0 tokens"),
        (
            "lfm2",
            "conv_L_cache",
            5,
            r"conv.weight: config.json asks for floats of shape \(64, 1, 5\)",
        ),
        ("qwen3_5", "linear_num_value_heads", 5, "5 heads of V for 2 of K"),
    ],
)
def test_states_that_contradict_the_configuration(
    checkpoint: Checkpoint, tmp_path: Path, name: str, field: str, value: int, said: str
) -> None:
    directory = edit(checkpoint(name), tmp_path, **{field: value})
    with pytest.raises((InvalidInput, Unsupported), match=said):
        LLM(directory)


def test_new_weights_in_an_engine_with_states(checkpoint: Checkpoint) -> None:
    weights = load_file(checkpoint("falcon_h1") / "model.safetensors")
    llm = LLM(checkpoint("falcon_h1"), "int8")
    want = llm.generate(prompts(5), GREEDY)
    llm.load_weights((name, tensor * 1.1) for name, tensor in weights.items())
    changed = llm.generate(prompts(5), GREEDY)
    assert [output.tokens for output in changed] != [output.tokens for output in want]
    llm.load_weights(weights.items())
    assert_same(llm.generate(prompts(5), GREEDY), want)


def test_a_convolution_of_single_tokens_keeps_no_state(tmp_path: Path) -> None:
    """transformers' modules then run on the engine's cache."""
    random_model("lfm2", ARCHITECTURES["lfm2"][1] | {"conv_L_cache": 1}).save_pretrained(tmp_path)
    llm = LLM(tmp_path)
    assert isinstance(llm.engine.runner, ModelRunner)
    assert isinstance(llm.engine.runner.model, Hosted)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    (output,) = llm.generate([[5, 6, 7]], GREEDY)
    assert output.tokens == reference(model, [5, 6, 7], 9)


def test_prompts_are_read_by_kernels_that_know_no_texts(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in graphs of a GPU: beside single tokens, in chunks, and from prefixes' ends."""
    triton = pytest.importorskip("anybit.kernels.triton.between").FAMILY
    own = type(of(torch.empty(0)))
    names = ("recur", "refuse_scan", "gated_norm")
    kernels = {name: staticmethod(getattr(triton, name)) for name in names}
    both = type("Both", (own,), kernels | {"record": Family.record})()
    register(monkeypatch, (both, "cpu", "torch"))
    monkeypatch.setattr(graphs, "MOST_PROMPTS", 2)
    monkeypatch.setattr(model_runner, "RECORDED", (8,))
    llm = LLM(checkpoint("qwen3_5"), max_tokens=8, block_size=2, max_running=2)
    runner = llm.engine.runner
    assert isinstance(runner, ModelRunner)
    assert runner.graphs is not None
    with torch.inference_mode():
        runner.graphs.reads = True
        for record in runner.graphs.unrecorded():
            record()
    read: list[int] = []
    usual = StepGraphs.hidden

    def hidden(self: StepGraphs, scheduled: list[Scheduled]) -> torch.Tensor:
        read.append(sum(len(s.kept) for s in scheduled))
        return usual(self, scheduled)

    monkeypatch.setattr(StepGraphs, "hidden", hidden)
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3_5"))
    base, params = [5, 6, 7, 8, 9, 4], replace(GREEDY, max_tokens=3)
    for many in ([base, [3, 4, 5]], [[*base, 11, 12, 13], [*base, 14, 15]]):
        got = llm.generate(many, params)
        assert [output.tokens for output in got] == [reference(model, p, 3) for p in many]
    assert llm.engine.scheduler.prefix_hits > 0
    assert len(read) > 2
    assert sum(read) > 2
