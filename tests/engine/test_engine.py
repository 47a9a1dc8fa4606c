"""Batching, chunks, shared prefixes and preemption change nothing; no block is ever lost."""

import math
import random
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anybit.engine.engine import Engine
from anybit.engine.llm import LLM, Output
from anybit.engine.scheduler import Scheduled
from anybit.engine.sequence import SamplingParams, Sequence
from tests.engine.conftest import PICO, prompts

Checkpoint = Callable[[str], Path]
TIE = 1e-3  # nats; fp32 logits of these models differ by about 1e-5


def mixed_params(count: int) -> list[SamplingParams]:
    """Greedy and sampled requests with every filter, each with a seed."""
    kinds = [
        SamplingParams(temperature=0, max_tokens=20, logprobs=2),
        SamplingParams(seed=1, max_tokens=30),
        SamplingParams(seed=2, top_k=5, max_tokens=7, ignore_eos=True),
        SamplingParams(seed=3, top_p=0.8, repetition_penalty=1.3, max_tokens=25),
        SamplingParams(seed=4, min_p=0.1, temperature=2.0, n=3, max_tokens=12, min_tokens=4),
    ]
    return [kinds[i % len(kinds)] for i in range(count)]


def tokens(outputs: list[Output]) -> list[list[list[int]]]:
    return [[c.tokens for c in output.completions] for output in outputs]


def assert_same(got: list[Output], want: list[Output]) -> None:
    """Equal tokens on a CPU. A GPU sums the products of another batch in another order.

    There a greedy sequence may differ from where two tokens are as likely but for rounding, and a
    sampled one from where the random number falls between two tokens: 2 of 18 did on an H200.
    """
    if not torch.cuda.is_available():
        assert tokens(got) == tokens(want)
        return
    pairs = [
        p
        for a, b in zip(got, want, strict=True)
        for p in zip(a.completions, b.completions, strict=True)
    ]
    sampled = [a.tokens == b.tokens for a, b in pairs if a.logprobs is None]
    assert sum(sampled) >= 0.8 * len(sampled)
    for a, b in pairs:
        if b.logprobs is not None and a.tokens != b.tokens:
            at = next(i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y)
            likely = dict(b.logprobs[at].top)
            assert likely.get(a.tokens[at], -math.inf) > b.logprobs[at].logprob - TIE


def assert_no_block_is_held(engine: Engine) -> None:
    blocks = engine.scheduler.blocks
    assert not engine.requests
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert blocks.holders == [0] * blocks.count
    assert sorted(blocks.free) == list(range(blocks.count))
    assert all(blocks.digest[block] == digest for digest, block in blocks.known.items())


@pytest.fixture(scope="module")
def alone(checkpoint: Checkpoint) -> list[Output]:
    """Each request by itself, prompt in one step, nothing shared."""
    llm = LLM(checkpoint("qwen2"), prefix_caching=False)
    many = zip(prompts(10), mixed_params(10), strict=True)
    return [llm.generate(prompt, params)[0] for prompt, params in many]


@pytest.mark.parametrize(
    ("options", "preempts"),
    [
        ({}, False),
        ({"max_tokens": 7, "block_size": 4}, False),
        ({"max_running": 3, "prefix_caching": False}, False),
        ({"block_size": 4, "kv_bytes": 30 * 4 * 512, "length": 80}, True),
        ({"block_size": 4, "kv_bytes": 30 * 4 * 512, "length": 80, "prefix_caching": False}, True),
        ({"block_size": 1, "max_tokens": 11, "kv_bytes": 120 * 512, "length": 80}, True),
    ],
)
def test_together_equals_one_by_one(
    checkpoint: Checkpoint, alone: list[Output], options: dict, preempts: bool
) -> None:
    llm = LLM(checkpoint("qwen2"), **options)
    outputs = llm.generate(prompts(10), mixed_params(10))
    assert_same(outputs, alone)
    assert (llm.engine.scheduler.preemptions > 0) == preempts
    assert_no_block_is_held(llm.engine)


@pytest.mark.parametrize("options", [
    {}, {"max_running": 3}, {"block_size": 4, "kv_bytes": 30 * 4 * 512, "length": 80},
])  # fmt: skip
def test_starting_steps_before_the_last_ones_tokens_are_known_changes_nothing(
    checkpoint: Checkpoint, alone: list[Output], options: dict
) -> None:
    """As on a GPU, where ends turn up late: by the end token a step, by stop strings two."""
    llm = LLM(checkpoint("qwen2"), **options)
    runner = llm.engine.runner
    runner.overlaps, launch, ahead = True, runner.launch, []

    def counted(scheduled: list, previous: object) -> object:
        ahead.append(previous is not None)
        return launch(scheduled, previous)

    runner.launch = counted
    assert_same(llm.generate(prompts(10), mixed_params(10)), alone)
    assert 0 < sum(ahead) < len(ahead)  # what waits could begin meanwhile
    ahead.clear()
    plain = [SamplingParams(seed=i, max_tokens=30, logprobs=2) for i in range(3)]
    once = likelihoods(llm.generate(prompts(3), plain))
    assert sum(ahead) >= len(ahead) - 4
    assert_no_block_is_held(llm.engine)
    runner.overlaps = False
    assert likelihoods(llm.generate(prompts(3), plain)) == once


def likelihoods(outputs: list[Output]) -> list[list[tuple[int, float]]]:
    return [
        [(p.token, round(p.logprob, 3)) for p in output.completions[0].logprobs]
        for output in outputs
    ]


def test_stop_strings_found_late_cost_no_one_a_token() -> None:
    pico = LLM(PICO, dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=40, stop=["self"])
    want = pico.generate(["def main(", "class Stack:"] * 3, params)
    pico.engine.runner.overlaps = True
    got = pico.generate(["def main(", "class Stack:"] * 3, params)
    assert [o.completions for o in got] == [o.completions for o in want]
    assert got[0].completions[0].stop_reason == "self"
    assert_no_block_is_held(pico.engine)


def test_int8_cache_is_the_same_in_chunks_and_after_preemption(checkpoint: Checkpoint) -> None:
    """Attention reads what the cache holds, also in a prompt's own step."""
    params = mixed_params(10)
    whole = LLM(checkpoint("llama"), kv_cache="int8", prefix_caching=False)
    parts = LLM(
        checkpoint("llama"), kv_cache="int8", block_size=4, max_tokens=9, kv_bytes=30 * 4 * 192
    )
    assert tokens(whole.generate(prompts(10), params)) == tokens(
        parts.generate(prompts(10), params)
    )
    assert parts.engine.scheduler.preemptions


def test_shared_prefixes_are_computed_once(checkpoint: Checkpoint) -> None:
    llm = LLM(checkpoint("llama"), block_size=4)
    scheduler, prefix = llm.engine.scheduler, list(range(2, 40))
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    first = llm.generate(prefix, params)
    assert scheduler.prefix_hits == 0
    again, longer, other = llm.generate(
        [prefix, prefix + first[0].tokens + [5, 6], [9, *prefix]], params
    )
    assert again.tokens == first[0].tokens
    # 38 tokens are 9 full blocks; 46 of prompt and output (the last was never run) are 11.
    assert scheduler.prefix_hits == 9 * 4 + 11 * 4
    fresh = LLM(checkpoint("llama"), prefix_caching=False)
    assert fresh.generate(longer.prompt, params)[0].tokens == longer.tokens
    assert fresh.generate(other.prompt, params)[0].tokens == other.tokens


def test_a_prompt_of_full_known_blocks_still_runs_a_token(checkpoint: Checkpoint) -> None:
    llm = LLM(checkpoint("llama"), block_size=4)
    params = SamplingParams(temperature=0, max_tokens=5)
    first, second = (llm.generate(list(range(2, 18)), params)[0].tokens for _ in range(2))
    assert first == second
    assert llm.engine.scheduler.prefix_hits == 12


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_thousand_requests_with_random_aborts_leak_no_block(
    checkpoint: Checkpoint, overlaps: bool
) -> None:
    llm = LLM(checkpoint("llama"), block_size=2, kv_bytes=60 * 2 * 512, length=40, max_running=12)
    engine, rng = llm.engine, random.Random(0)
    engine.runner.overlaps = overlaps
    ended: dict[str, str] = {}
    added = 0
    while added < 1000 or engine.busy:
        for _ in range(rng.randrange(12) if added < 1000 else 0):
            prompt = [rng.randrange(2, 6) for _ in range(rng.randrange(1, 20))]
            more = {"presence_penalty": rng.choice([0.0, 0.5]), "n": rng.choice([1, 1, 2])}
            params = SamplingParams(max_tokens=rng.randrange(1, 8), **more)
            engine.add(str(added), prompt, params)
            added += 1
        deltas = engine.step()
        if engine.requests and rng.random() < 0.7:
            held = sum(map(len, (seq.blocks for seq in engine.scheduler.running)))
            victim = rng.choice(list(engine.requests))
            had = sum(len(seq.blocks) for seq in engine.requests[victim])
            deltas += engine.abort(victim)
            assert victim not in engine.requests
            assert sum(len(seq.blocks) for seq in engine.scheduler.running) == held - had
        for delta in deltas:
            if delta.finish:
                key = f"{delta.request}/{delta.index}"
                assert key not in ended
                ended[key] = delta.finish
    assert len({key.split("/")[0] for key in ended}) == added >= 1000
    assert min(list(ended.values()).count(kind) for kind in ("abort", "length")) > 100
    assert engine.scheduler.preemptions > 0
    assert_no_block_is_held(engine)


def test_a_step_runs_on_the_models_device(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on the current one, which may be another GPU in the server's thread."""
    llm = LLM(checkpoint("llama"))
    inside: list[int | None] = []

    @contextmanager
    def device_index(index: int | None) -> Iterator[None]:
        inside.append(index)
        yield
        inside.pop()

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        assert inside == [1]
        return run(hidden)

    runner, run = llm.engine.runner, llm.engine.runner.model.logits
    runner.device = types.SimpleNamespace(index=1)
    monkeypatch.setattr(runner, "tensor", lambda x: torch.tensor(x, dtype=torch.int32))
    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    monkeypatch.setattr(runner.model, "logits", logits)
    (output,) = llm.generate([[5]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert output.completions[0].finish == "length"
    assert not inside


def test_after_an_interrupt_nothing_of_it_is_left(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a text's last token was sampled and not read, as on a GPU."""
    llm = LLM(checkpoint("llama"))
    engine, step = llm.engine, llm.engine.step
    engine.runner.overlaps = True

    def interrupted() -> list:
        if any(seq.finish for seq, *_ in engine.unread):
            raise KeyboardInterrupt
        return step()

    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 9)]
    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6], [7, 8]], params)
    assert not engine.requests
    got = llm.generate([[5, 6], [7, 8]], params)
    assert got == LLM(checkpoint("llama")).generate([[5, 6], [7, 8]], params)
    assert_no_block_is_held(engine)


@pytest.mark.parametrize("at", [0, 2])
def test_a_failing_step_ends_its_requests_and_no_others(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Also if the host is ahead by then, as on a GPU."""
    llm = LLM(checkpoint("llama"), max_running=2)
    llm.engine.runner.overlaps = at > 0
    run = llm.engine.runner.launch

    def fail(scheduled: list, previous: object) -> object:
        if any(s.seq.tokens[0] == 66 and s.first >= at for s in scheduled):
            raise RuntimeError("out of luck")
        return run(scheduled, previous)

    monkeypatch.setattr(llm.engine.runner, "launch", fail)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    outputs = llm.generate([[5, 6], [7], [66, 5], [66], [8], [9]], params)
    finishes = [output.completions[0].finish for output in outputs]
    assert finishes == ["length", "length", "error", "error", "length", "length"]
    assert outputs[2].completions[0].error == "RuntimeError: out of luck"
    assert_no_block_is_held(llm.engine)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_failing_row_takes_no_neighbour_with_it(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    llm = LLM(checkpoint("llama"))
    params = [SamplingParams(seed=1, max_tokens=n, ignore_eos=True) for n in (4, 9, 9)]
    want = llm.generate([[5, 6], [66], [7]], params)
    llm.engine.runner.overlaps = overlaps
    run = llm.engine.runner.launch

    def fail(scheduled: list, previous: object) -> object:
        if any(s.seq.tokens[0] == 66 and s.first >= 3 for s in scheduled):
            raise RuntimeError("out of luck")
        return run(scheduled, previous)

    monkeypatch.setattr(llm.engine.runner, "launch", fail)
    got = llm.generate([[5, 6], [66], [7]], params)
    assert [output.completions[0].finish for output in got] == ["length", "error", "length"]
    assert (got[0].tokens, got[2].tokens) == (want[0].tokens, want[2].tokens)
    assert got[1].tokens == want[1].tokens[: len(got[1].tokens)]
    assert_no_block_is_held(llm.engine)


def fail_of_several(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every step of several texts fail at its end."""
    run = llm.engine.runner.launch

    def fail(scheduled: list, previous: object) -> object:
        flight = run(scheduled, previous)
        if len(scheduled) > 1:
            raise RuntimeError("out of luck")
        return flight

    monkeypatch.setattr(llm.engine.runner, "launch", fail)


def test_a_step_that_is_run_again_changes_nothing(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step of several texts fails at its end, also those that read prompts in chunks."""
    llm = LLM(checkpoint("llama"), max_tokens=8, prefix_caching=False)
    params = SamplingParams(max_tokens=5, seed=3, prompt_logprobs=1, embed=True)
    many = prompts(4)
    want = llm.generate(many, params)
    fail_of_several(llm, monkeypatch)
    got = llm.generate(many, params)
    for a, b in zip(got, want, strict=True):
        (a,), (b,) = a.completions, b.completions
        assert (a.tokens, a.finish) == (b.tokens, b.finish)
        assert a.embedding == pytest.approx(b.embedding, abs=1e-5)
        values = [[p and p.logprob for p in c.prompt_logprobs][1:] for c in (a, b)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)
    assert_no_block_is_held(llm.engine)


def test_a_token_that_cannot_be_taken_ends_its_own_text(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(checkpoint("llama"))
    append = Sequence.append

    def fail(seq: Sequence, token: int) -> None:
        if seq.prompt == [66] and seq.generated == 2:
            raise RuntimeError("out of luck")
        append(seq, token)

    monkeypatch.setattr(Sequence, "append", fail)
    got = llm.generate([[5], [66], [7]], SamplingParams(max_tokens=4, seed=0, ignore_eos=True))
    assert [output.completions[0].finish for output in got] == ["length", "error", "length"]
    assert [len(output.tokens) for output in got] == [4, 2, 4]
    assert_no_block_is_held(llm.engine)


def test_nan_logits_end_only_their_own_text(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(checkpoint("llama"))
    runner = llm.engine.runner
    logits = runner.logits  # a graph does not call the model's again

    def poisoned(*step: Any) -> torch.Tensor:
        out = logits(*step)
        out[0] = torch.nan
        return out

    monkeypatch.setattr(runner, "logits", poisoned)
    outputs = llm.generate([[5], [7]], SamplingParams(max_tokens=1, seed=0))
    assert [o.completions[0].finish for o in outputs] == ["error", "length"]
    assert "NaN" in outputs[0].completions[0].error


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([2] * 64, {}, "has 64 tokens; .* fit into 64"),
        ([2, 96], {}, "token 96 is not in the vocabulary of 96"),
        ([2], {"stop_token_ids": [-1]}, "token -1"),
        ([2], {"stop": "x"}, "need a tokenizer"),
        ("text", {}, "no tokenizer"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_runs(
    checkpoint: Checkpoint, prompt: object, params: dict, message: str
) -> None:
    llm = LLM(checkpoint("llama"), length=64)
    with pytest.raises(ValueError, match=message):
        llm.generate([[3], prompt], SamplingParams(**params))
    assert_no_block_is_held(llm.engine)


@pytest.mark.parametrize(
    "field",
    [
        {"n": 0}, {"max_tokens": -1}, {"temperature": -1.0}, {"temperature": float("nan")},
        {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -2}, {"min_p": 2.0}, {"repetition_penalty": 0.0},
        {"stop": [""]}, {"min_tokens": 17}, {"logprobs": 21}, {"prompt_logprobs": -1},
        {"presence_penalty": 2.5}, {"frequency_penalty": -3.0}, {"logit_bias": {3: 101.0}},
    ],
)  # fmt: skip
def test_parameters_out_of_range_are_named(field: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        SamplingParams(**field)


def test_ends(checkpoint: Checkpoint) -> None:
    """The end token, stop tokens, min_tokens and the model's limit."""
    llm = LLM(checkpoint("llama"), length=48)
    free = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = llm.generate([[5, 7, 9]], free)
    whole = output.tokens
    assert len(whole) == 48 - 3
    assert output.completions[0].finish == "length"
    stop = whole[10]
    first = whole.index(stop)
    (output,) = llm.generate([[5, 7, 9]], replace(free, stop_token_ids=[stop]))
    assert output.tokens == whole[: first + 1]
    assert output.completions[0].stop_reason == stop
    (output,) = llm.generate(
        [[5, 7, 9]],
        SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[stop], min_tokens=20),
    )
    assert len(output.tokens) >= 20
    assert stop not in output.tokens[:19]
    llm.engine.eos = frozenset([stop])
    (output,) = llm.generate([[5, 7, 9]], SamplingParams(temperature=0, max_tokens=40))
    assert output.tokens == whole[: first + 1]
    assert output.completions[0].finish == "stop"


def test_texts_of_one_request_differ_and_repeat_with_the_seed() -> None:
    llm = LLM(PICO, dtype="float32")
    params = SamplingParams(n=4, seed=7, max_tokens=12)
    once, twice = (llm.generate("def main(", params)[0].completions for _ in range(2))
    assert len({c.text for c in once}) == 4
    assert [c.text for c in once] == [c.text for c in twice]
    assert [c.index for c in once] == [0, 1, 2, 3]


def test_stop_strings_of_a_real_tokenizer() -> None:
    llm = LLM(PICO, dtype="float32")
    params = {"temperature": 0, "max_tokens": 64}
    (whole,) = llm.generate("def main(", SamplingParams(**params))
    stop = whole.text[20:26]
    (cut,) = llm.generate("def main(", SamplingParams(**params, stop=["\x00", stop]))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.completions[0].finish, cut.completions[0].stop_reason) == ("stop", stop)
    assert cut.tokens == whole.tokens[: len(cut.tokens)]


def test_padded_rows_of_the_head_are_not_all_rows(checkpoint: Checkpoint) -> None:
    """Two single tokens and a prompt of two: three rows of four are sampled, and run as four."""
    runner = LLM(checkpoint("llama"), max_running=4, block_size=4).engine.runner
    step = []
    for i, prompt in enumerate(([5], [6], [7, 8])):
        params = SamplingParams(temperature=0)
        seq = Sequence(str(i), 0, prompt, params, 99, frozenset())
        seq.blocks = [i]
        step.append(Scheduled(seq, 0, len(prompt), True))
    with torch.inference_mode():
        want = runner.logits(step).clone()
        runner.overlaps = True  # as on a GPU, where the head runs in the sizes of graphs
        assert runner.graphs is not None
        got = runner.logits(step)
    torch.testing.assert_close(got, want)
