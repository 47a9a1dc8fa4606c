"""Models that the engine does not know run in transformers' `generate`, through the same API."""

import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    T5Config,
    T5ForConditionalGeneration,
)

import anybit
from anybit.engine.generator import Generator
from anybit.engine.llm import LLM
from anybit.engine.model_runner import ModelRunner
from anybit.engine.sequence import SamplingParams
from tests.engine.conftest import DELTA, PICO, prompts, random_model, reference

pytest.importorskip("uvicorn")
from tests.serve.conftest import held, serving, wait_for

GREEDY = SamplingParams(max_tokens=12, temperature=0)
KINDS = {
    "bloom": {"n_head": 4, "n_layer": 2},
    "mamba": {"state_size": 8},
    "olmo_hybrid": DELTA | {"layer_types": ["linear_attention", "full_attention"]},
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            random_model(kind, KINDS[kind] | {"vocab_size": 4096}).save_pretrained(made[kind])
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(PICO / name, made[kind] / name)
        return made[kind]

    return make


def idle() -> bool:
    return not any(t.name == "anybit-generate" for t in threading.enumerate())


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_transformers(
    make: Callable[[str], Path], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = AutoModelForCausalLM.from_pretrained(make(kind))
    with caplog.at_level(logging.WARNING, "anybit.engine"):
        llm = LLM(make(kind))
    assert isinstance(llm.engine.runner, Generator)
    (note,) = [r.getMessage() for r in caplog.records if r.name == "anybit.engine"]
    assert "does not know" in note
    assert "transformers' generate runs it" in note
    many = prompts(3, vocabulary=4096)
    for prompt, output in zip(many, llm.generate(many, GREEDY), strict=True):
        assert output.tokens == reference(model, prompt, 12)
    assert wait_for(idle)


def test_encoders_read_the_prompt(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2}
    config = T5Config(**sizes, num_heads=4)  # type: ignore[arg-type]
    config.decoder_start_token_id = 0  # type: ignore[attr-defined]
    model = T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path)
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=2, n=2)
    for prompt, output in zip(prompts(2), LLM(tmp_path).generate(prompts(2), params), strict=True):
        ids = torch.tensor([prompt])
        want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8)
        for completion in output.completions:
            assert completion.tokens == want[0, 1:].tolist()
            assert len(completion.logprobs or ()) == len(completion.tokens)


def test_quantized_while_loaded_and_before(make: Callable[[str], Path], tmp_path: Path) -> None:
    model = anybit.quantize_(AutoModelForCausalLM.from_pretrained(make("bloom")), "fp6")
    anybit.save(model, tmp_path / "out")
    want = [reference(model, prompt, 12) for prompt in prompts(2)]
    for llm in (LLM(tmp_path / "out"), LLM(make("bloom"), "fp6")):
        assert [o.tokens for o in llm.generate(prompts(2), GREEDY)] == want


def test_parameters(make: Callable[[str], Path]) -> None:
    llm = LLM(make("bloom"))
    prompt = [5, 6, 7]
    model = AutoModelForCausalLM.from_pretrained(make("bloom"))
    logp = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    params = SamplingParams(n=3, max_tokens=9, temperature=0.9, seed=7, top_k=50, top_p=0.9)
    first, second = (llm.generate([prompt], params)[0].completions for _ in range(2))
    assert [c.tokens for c in first] == [c.tokens for c in second]
    assert len({tuple(c.tokens) for c in first}) == 3
    (one,) = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0, logprobs=3))
    assert one.completions[0].logprobs is not None
    found = one.completions[0].logprobs[0]
    assert found.logprob == pytest.approx(logp.max().item(), abs=1e-4)
    assert [t for t, _ in found.top] == logp.topk(3).indices.tolist()
    (whole,) = llm.generate([prompt], GREEDY)
    assert len(whole.text) > 4
    stop = whole.text[3:5]
    (cut,) = llm.generate([prompt], SamplingParams(max_tokens=12, temperature=0, stop=stop))
    assert cut.text == whole.text[: whole.text.find(stop)]
    assert (cut.completions[0].finish, cut.completions[0].stop_reason) == ("stop", stop)
    end = whole.tokens[2]
    params = SamplingParams(max_tokens=12, temperature=0, stop_token_ids=[end])
    (ended,) = llm.generate([prompt], params)
    assert ended.tokens == whole.tokens[: whole.tokens.index(end) + 1]


def test_abort_and_failure_end_the_thread(
    make: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(make("bloom"))
    llm.engine.add("a", [5, 6, 7], SamplingParams(max_tokens=50, temperature=0))
    assert llm.engine.step()
    assert not idle()
    llm.engine.abort("a")
    assert wait_for(idle)
    assert isinstance(llm.engine.runner, Generator)
    model, forward, left = llm.engine.runner.model, llm.engine.runner.model.forward, [3]

    def fail(*args: object, **kwargs: object) -> object:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("out of luck")
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", fail)
    (output,) = llm.generate([[5, 6, 7]], GREEDY)
    assert len(output.tokens) == 2
    assert output.completions[0].finish == "error"
    assert "generate fails (RuntimeError: out of luck)" in str(output.completions[0].error)
    (output,) = llm.generate([[5, 6, 7]], GREEDY)
    assert len(output.tokens) == 12
    assert wait_for(idle)


def test_what_the_fallback_cannot_do_is_refused(
    make: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="leave out kv_cache='int8'"):
        LLM(make("bloom"), kv_cache="int8")
    with pytest.raises(ValueError, match="leave out kv_bytes"):
        LLM(make("bloom"), kv_bytes=1 << 20)
    with pytest.raises(ValueError, match="length=257, and the model has 256 positions"):
        LLM(make("olmo_hybrid"), length=257)
    with pytest.raises(ValueError, match="they must fit into 256"):
        LLM(make("bloom")).generate([[5] * 256], GREEDY)
    with pytest.raises(ValueError, match="leave out kv_cache='int8'"):
        LLM(make("olmo_hybrid"), kv_cache="int8")
    small = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=96)
    BertModel(small).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="BertModel does not write text from text"):
        LLM(tmp_path)


def test_longrope_runs_in_the_engine_up_to_the_original_length(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.5, 2, 2, 3, 3], "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 500.0} | factors
    random_model(
        "phi3",
        {"rope_parameters": rope, "original_max_position_embeddings": 64},
    ).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).max_position_embeddings == 256
    short, whole = LLM(tmp_path, length=64), LLM(tmp_path)
    assert isinstance(short.engine.runner, ModelRunner)
    assert isinstance(whole.engine.runner, Generator)
    many = prompts(3)
    for llm in (short, whole):
        for prompt, output in zip(many, llm.generate(many, GREEDY), strict=True):
            assert output.tokens == reference(model, prompt, 12)
    (output,) = whole.generate([[5, 6, 7] * 30], GREEDY)
    assert output.tokens == reference(model, [5, 6, 7] * 30, 12)


def test_server_streams_and_aborts(make: Callable[[str], Path]) -> None:
    import httpx

    llm = LLM(make("mamba"))
    (want,) = llm.generate([[5, 6, 7]], GREEDY)
    body = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0}
    with serving(llm) as live:
        answer = live.post("/v1/completions", body)
        assert answer.json()["choices"][0]["text"] == want.text
        events = live.post("/v1/completions", body | {"stream": True}).text.split("\n\n")
        assert len(events) > 5
        assert events[-2] == "data: [DONE]"
        long = body | {"max_tokens": 5000, "stream": True, "ignore_eos": True}
        url = live.url + "/v1/completions"
        with held(llm.engine):
            with httpx.stream("POST", url, json=long, timeout=60) as stream:
                next(stream.iter_lines())
                assert not idle()
            assert wait_for(lambda: not live.service.open)
        assert live.idle()
        assert llm.engine.stats.finished["abort"] == 1
        assert wait_for(idle)
        assert b"vllm:num_requests_running" in httpx.get(live.url + "/metrics").content


def test_what_transformers_itself_cannot_run_is_said(
    make: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(make("mamba"))

    def forward(*args: object, **options: object) -> None:
        raise TypeError("many words " * 99)

    monkeypatch.setattr(type(llm.engine.runner.model), "forward", forward)
    (out,) = llm.generate([[5, 6, 7]], GREEDY)
    assert out.completions[0].finish == "error"
    found = out.completions[0].error
    assert found.startswith("Unsupported: transformers' MambaForCausalLM.generate fails (TypeError")
    assert "...); load the model with anybit.load" in found
