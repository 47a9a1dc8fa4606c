"""What `LLM` takes: right, or refused in one line before anything runs; from threads, too."""

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from anybit.engine.llm import LLM
from anybit.engine.output import Delta
from anybit.engine.sequence import SamplingParams
from anybit.errors import AnybitError, InvalidInput, InvalidType, Unsupported
from anybit.serve.run import service_of
from anybit.serve.settings import Settings
from tests.engine.conftest import PICO
from tests.engine.test_engine import assert_no_block_is_held

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(PICO, dtype="float32")


@pytest.mark.parametrize(
    "field",
    [
        {"logprobs": True}, {"max_tokens": "4"}, {"max_tokens": 2.5}, {"max_tokens": 2.0},
        {"seed": "a"}, {"seed": 10**40}, {"n": True}, {"n": None}, {"top_k": -2}, {"top_k": 1.0},
        {"stop": b"a"}, {"stop": [1]}, {"stop": 5}, {"stop": {"a": 1}}, {"stop_token_ids": 5},
        {"stop_token_ids": "ab"}, {"stop_token_ids": [True]}, {"stop_token_ids": [1.0]},
        {"logit_bias": {"3": 1}}, {"logit_bias": [3]}, {"logit_bias": {3: "x"}},
        {"logit_bias": {3: float("nan")}}, {"logit_bias": {True: 1}},
        {"structured": {"type": "object"}}, {"structured": "x"}, {"temperature": "1"},
        {"temperature": None}, {"temperature": True}, {"ignore_eos": 1}, {"embed": "yes"},
        {"include_stop_str_in_output": None}, {"adapter": 3}, {"shown": 3}, {"min_tokens": None},
        *(
            {name: value}
            for name in ("temperature", "top_p", "min_p", "repetition_penalty",
                         "presence_penalty", "frequency_penalty")
            for value in (1e300, 10**400, float("nan"), float("inf"), -float("inf"))
        ),
        {"top_p": -0.0}, {"repetition_penalty": -0.0},
    ],
)  # fmt: skip
def test_parameters_of_the_wrong_kind_are_named(field: dict[str, Any]) -> None:
    (name,) = field
    with pytest.raises(AnybitError, match=f"^{name}=") as refused:
        SamplingParams(**field)
    assert "\n" not in str(refused.value)


def test_parameters_of_another_kind_mean_the_same() -> None:
    got = SamplingParams(
        max_tokens=np.int64(3), n=torch.tensor(2), seed=np.int32(5), temperature=np.float32(0.5),
        top_k=-1, stop=None, stop_token_ids=np.array([3, 4]), logit_bias=None, top_p=1,
        presence_penalty=-0.0, shown=None,
    )  # fmt: skip
    want = SamplingParams(
        max_tokens=3, n=2, seed=5, temperature=0.5, top_k=0, stop_token_ids=(3, 4), top_p=1.0
    )
    assert got == want
    assert type(got.max_tokens) is type(got.n) is int
    assert SamplingParams(stop=iter(["a", "b"])).stop == ("a", "b")


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.array([5, 6]), lambda: torch.tensor([5, 6]), lambda: (5, 6),
        lambda: [np.int64(5), np.int64(6)], lambda: [torch.tensor([5, 6])], lambda: iter([5, 6]),
        lambda: np.array([[5, 6]], dtype=np.uint8), lambda: (p for p in [[5, 6]]),
        lambda: range(5, 7),
    ],
)  # fmt: skip
def test_prompts_of_any_kind(llm: LLM, make: Callable[[], Any]) -> None:
    assert llm.generate(make(), GREEDY) == llm.generate([[5, 6]], GREEDY)


@pytest.mark.parametrize(
    ("prompts", "params"),
    [
        (b"abc", GREEDY), ([b"abc"], GREEDY), ([[True]], GREEDY), ([True], GREEDY),
        ([1.0, 2.0], GREEDY), (np.array([1.5]), GREEDY), (torch.tensor([True]), GREEDY),
        (None, GREEDY), ([None], GREEDY), (5, GREEDY), (torch.tensor(5), GREEDY),
        ({"prompt": "a"}, GREEDY), ([{"prompt": "a"}], GREEDY), ({"a"}, GREEDY),
        ([1, "a"], GREEDY), (["a", 5], GREEDY), ([[]], GREEDY), (["a"], []),
        (["a"], [GREEDY] * 2), (["a"], {}), (["a"], [{}]), (["a"], [None]), (["a"], "x"),
        ("a", SamplingParams), (["a", [10**6]], GREEDY), (["a", "\ud800"], GREEDY),
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_refused_before_anything_runs(
    llm: LLM, prompts: Any, params: Any
) -> None:
    steps = llm.engine.stats.steps
    with pytest.raises((InvalidInput, InvalidType)) as refused:
        llm.generate(prompts, params)
    assert "\n" not in str(refused.value)
    assert llm.engine.stats.steps == steps
    assert_no_block_is_held(llm.engine)


def test_chat(llm: LLM) -> None:
    """As `generate` of the prompts that the template makes."""
    talk = [{"role": "user", "content": "def f(x):"}]
    want = llm.generate(llm.encode_chat(talk), GREEDY)
    assert llm.chat(talk, GREEDY) == want
    assert llm.chat([talk, talk], GREEDY) == want * 2
    template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}{{ tools }}"
    before, llm.tokenizer.chat_template = llm.tokenizer.chat_template, template
    try:
        (got,) = llm.chat(talk, GREEDY, tools=[{"a": 1}])
        assert llm.decode(got.prompt).startswith("<def f(x):>")
        assert "'a': 1" in llm.decode(got.prompt)
        llm.tokenizer.chat_template = "{{ raise_exception('no') }}"
        with pytest.raises(InvalidInput, match="no"):
            llm.chat(talk, GREEDY)
    finally:
        llm.tokenizer.chat_template = before


@pytest.mark.parametrize(
    "messages", ["hi", None, 5, [["x"]], [{"content": "x"}], {"role": "user", "content": "x"}]
)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidType, match="give a list of messages"):
        llm.chat(messages, GREEDY)


def test_threads_take_turns(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [[5 + i, 6, 7] for i in range(6)]
    want = [llm.generate(prompt, params) for prompt in prompts]
    got: dict[int, Any] = {}

    def work(i: int) -> None:
        try:
            got[i] = llm.generate(prompts[i], params)
        except Exception as error:
            got[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(len(prompts))] == want
    assert_no_block_is_held(llm.engine)


def test_a_callback_that_generates_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def again(*args: object) -> None:
        llm.generate([5], GREEDY)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.observer, "token", again, raising=False)
        (output,) = llm.generate([5], GREEDY)
    assert output.completions[0].finish == "error"
    assert "at work already" in output.completions[0].error
    assert llm.generate([5], GREEDY)[0].completions[0].finish == "length"
    assert_no_block_is_held(llm.engine)


def test_a_served_engine_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(("pico",))

    def use() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(llm, "encode", lambda *_, **__: pytest.fail("beside the server"))
            for use, what in (
                (llm.generate, "a"),
                (llm.embed, "a"),
                (llm.chat, [{"role": "user", "content": "a"}]),
            ):
                with pytest.raises(Unsupported, match="a server runs"):
                    use(what)
        with pytest.raises(Unsupported, match="at work already"):
            service_of(llm, settings).run()
        service.stop()

    service = service_of(llm, settings)
    monkeypatch.setattr(service, "_commands", lambda: use())
    service.run()
    assert llm.engine.scheduler.pace is not None  # steps with prompts are bounded from now on
    step = llm.engine.step

    def start() -> list[Delta]:
        with pytest.raises(Unsupported, match="at work already"):
            service_of(llm, settings).run()
        return step()

    monkeypatch.setattr(llm.engine, "step", start)
    assert llm.generate("a")[0].completions[0].finish


def test_a_fork_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for threads that only its parent has."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        with pytest.raises(Unsupported, match="fork"):
            llm.generate([5], GREEDY)
    assert llm.generate([5], GREEDY)[0].completions[0].finish == "length"


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupt_while_requests_are_queued_leaves_none(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    calls, add = iter(range(9)), llm.engine.add

    def interrupted(*args: Any) -> None:
        if next(calls) == at:
            raise KeyboardInterrupt
        add(*args)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5], [6], [7]], GREEDY)
    assert_no_block_is_held(llm.engine)


def test_stop_strings_may_stay_in_the_text(llm: LLM) -> None:
    params = {"temperature": 0, "max_tokens": 64, "ignore_eos": True}
    (whole,) = llm.generate("def main(", SamplingParams(**params))
    stop = whole.text[20:26]
    (got,) = llm.generate(
        "def main(", SamplingParams(**params, stop=stop, include_stop_str_in_output=True)
    )
    assert got.text == whole.text[: whole.text.index(stop)] + stop
    assert got.completions[0].stop_reason == stop
