"""What clients get: the openai client, and raw requests."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from anybit.engine.llm import LLM
from anybit.engine.sequence import Logprob, SamplingParams
from anybit.serve.answers import Asked, CompletionsAnswer
from anybit.serve.bench import Lengths, Load
from anybit.serve.bench import run as bench
from anybit.serve.texts import Words
from tests.engine.conftest import PICO
from tests.engine.test_speculation import drafting
from tests.serve.conftest import Live, serving


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(model: Path, prompt: str, **params: object) -> str:
    """The engine's own text, without the server."""
    return LLM(model).generate(prompt, SamplingParams(**params))[0].text  # type: ignore[arg-type]


def test_completion_is_the_engines(client: openai.OpenAI, live: Live, tiny: Path) -> None:
    answer = client.completions.create(
        model="tiny", prompt="def main(", max_tokens=20, temperature=0
    )
    text = expected(tiny, "def main(", max_tokens=20, temperature=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    assert answer.usage.prompt_tokens == len(live.llm.encode("def main("))
    assert answer.usage.total_tokens == 20 + answer.usage.prompt_tokens


@pytest.mark.parametrize("n", [1, 3])
def test_stream_adds_up_to_the_whole(client: openai.OpenAI, n: int) -> None:
    options = {
        "model": "tiny",
        "prompt": ["import os", "x = ["],
        "max_tokens": 30,
        "n": n,
        "seed": 5,
    }
    whole = client.completions.create(**options)
    texts = [""] * 2 * n
    ends: dict[int, str] = {}
    usages = []
    for chunk in client.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            assert choice.index not in ends
            texts[choice.index] += choice.text
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert ends == {c.index: c.finish_reason for c in whole.choices}
    assert [u.completion_tokens for u in usages] == [whole.usage.completion_tokens]


def test_chat(client: openai.OpenAI) -> None:
    options = {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "import os"},
            {"role": "user", "content": [{"type": "text", "text": "def f("}]},
        ],
        "max_completion_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    logprobs = whole.choices[0].logprobs.content
    assert len(logprobs) == whole.usage.completion_tokens == 12
    for entry in logprobs:  # greedy: the chosen token is the likeliest
        assert entry.logprob == entry.top_logprobs[0].logprob > entry.top_logprobs[1].logprob
        assert bytes(entry.bytes).decode() == entry.token
    streamed = [e for chunk in chunks for e in (chunk.choices[0].logprobs or Empty).content]
    assert streamed == logprobs


class Empty:
    content: list = []


def test_completion_logprobs_and_echo(live: Live) -> None:
    body = {"prompt": "def main(", "max_tokens": 6, "temperature": 0, "logprobs": 3}
    choice = live.post("/v1/completions", body).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 6
    assert [max(top.values()) for top in logprobs["top_logprobs"]] == logprobs["token_logprobs"]
    assert logprobs["text_offset"][0] == 0
    del body["logprobs"]
    echoed = live.post("/v1/completions", body | {"echo": True}).json()["choices"][0]["text"]
    assert echoed == "def main(" + choice["text"]
    streamed = live.post("/v1/completions", body | {"echo": True, "stream": True}).text
    assert "".join(e["choices"][0]["text"] for e in events(streamed)) == echoed


def events(text: str) -> list[dict]:
    """The events of a stream, which must end with [DONE]."""
    *parts, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def test_token_prompts_and_nulls(live: Live) -> None:
    tokens = live.post("/tokenize", {"prompt": "def main("}).json()
    assert tokens["tokens"] == live.llm.encode("def main(")
    assert tokens["count"] == len(tokens["tokens"])
    options = {
        "max_tokens": 9, "temperature": 0, "return_token_ids": True, "best_of": 1, "user": "me",
        "frequency_penalty": 0.0, "logit_bias": {}, "top_p": None, "n": None, "stream": None,
        "seed": 3.0, "stream_options": {"include_obfuscation": False}, "made_up": None,
    }  # fmt: skip
    answers = [
        live.post("/v1/completions", options | {"prompt": prompt}).json()["choices"]
        for prompt in ("def main(", tokens["tokens"], [tokens["tokens"]], ["def main("])
    ]
    assert all(answer == answers[0] for answer in answers)
    assert len(answers[0][0]["token_ids"]) == 9


def test_stop_ignore_eos_and_min_tokens(live: Live) -> None:
    body = {"prompt": "x", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    whole = live.post("/v1/completions", body).json()["choices"][0]
    stop = whole["text"][10:13]
    cut = live.post("/v1/completions", body | {"stop": stop}).json()["choices"][0]
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    streamed = live.post("/v1/completions", body | {"stop": [stop], "stream": True}).text
    assert "".join(e["choices"][0]["text"] for e in events(streamed)) == cut["text"]


def test_models_version_health(client: openai.OpenAI, live: Live) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == ("tiny", 512)  # type: ignore[attr-defined]
    assert httpx.get(live.url + "/health").status_code == 200
    assert set(httpx.get(live.url + "/version").json()) == {"version"}


def test_metrics_count_what_happened(live: Live) -> None:
    def read() -> dict[str, float]:
        lines = httpx.get(live.url + "/metrics").text.splitlines()
        return {
            line.split("{")[0]: float(line.split()[-1])
            for line in lines
            if line.startswith("vllm:")
        }

    before = read()
    body = {"prompt": "import sys, os, re, json", "max_tokens": 7, "ignore_eos": True, "n": 2}
    usage = live.post("/v1/completions", body).json()["usage"]
    assert live.idle()
    after = read()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["vllm:generation_tokens_total"] == usage["completion_tokens"] == 14
    assert grown["vllm:prompt_tokens_total"] == 2 * usage["prompt_tokens"]
    assert grown["vllm:time_to_first_token_seconds_count"] == 2
    assert grown["vllm:inter_token_latency_seconds_count"] == 12
    assert grown["vllm:e2e_request_latency_seconds_count"] == 2
    assert grown["vllm:request_queue_time_seconds_count"] == 2
    assert grown["vllm:prefix_cache_queries_total"] == 2 * usage["prompt_tokens"]
    assert after["vllm:cache_config_info"] == 1
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[f"vllm:{gauge}"] == 0
    assert {"vllm:prefix_cache_hits_total", "vllm:num_preemptions_total"} <= set(after)
    assert "vllm:request_success_total" in after


def test_random_bytes_never_stop_the_server(live: Live) -> None:
    rng = random.Random(0)
    good = b'{"prompt": "' + b"def f(" * 30 + b'", "max_tokens": 3, "stop": ["a"], "n": 2}'
    headers, statuses = {"content-type": "application/json"}, []
    with httpx.Client(base_url=live.url, timeout=60, headers=headers) as client:
        for _ in range(60):
            body = bytearray(good)
            for _ in range(rng.randrange(1, 6)):
                body[rng.randrange(len(body))] = rng.choice(b'\x00"{}[],:0129aen\xff\\')
            answer = client.post("/v1/completions", content=bytes(body))
            assert answer.status_code in (200, 400, 404), (bytes(body), answer.text)
            statuses.append(answer.status_code)
    assert min(statuses.count(200), statuses.count(400)) > 5
    assert live.idle()


def test_key(tiny: Path) -> None:
    with serving(LLM(tiny), keys=("other", "s3cret"), body=1000) as locked:
        body = {"prompt": "x", "max_tokens": 1}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            answer = locked.post("/v1/completions", body, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        key = {"Authorization": "Bearer s3cret", "Content-Type": "application/json"}
        assert locked.post("/v1/completions", body, headers=key).status_code == 200
        assert httpx.get(locked.url + "/v1/models").status_code == 401
        assert httpx.get(locked.url + "/health").status_code == 200
        for path in ("/metrics", "/version", "/openapi.json", "/", "/detokenize", "/nothing"):
            assert httpx.get(locked.url + path).status_code == 401
        assert httpx.get(locked.url + "/metrics", headers=key).status_code == 200
        assert httpx.get(locked.url + "/metrics", headers={"x-api-key": "other"}).status_code == 200
        assert httpx.get(locked.url + "/", auth=("", "s3cret")).status_code == 200
        load = Load(Lengths(2), Lengths(1), streams=1, requests=1)
        bench(locked.url, [load], 101, "s3cret other", lambda line: None)  # the first is sent
        asked = httpx.get(locked.url + "/")  # a browser asks for the key then
        assert asked.headers["www-authenticate"] == "Basic"
        assert (
            locked.post("/v1/completions", {"prompt": "x" * 2000}, headers=key).status_code == 413
        )

        def chunks() -> Iterator[bytes]:
            yield b'{"prompt": "'
            for _ in range(30):
                yield b"x" * 100

        answer = httpx.post(locked.url + "/v1/completions", content=chunks(), headers=key)
        assert answer.status_code == 413


def test_bench_serve_is_a_bench_of_a_server() -> None:
    """`anybit bench serve URL` and `anybit bench-serve URL` are the same."""
    from typer.testing import CliRunner

    from anybit.cli.app import app

    for words in (["bench", "serve"], ["bench-serve"]):
        got = CliRunner().invoke(app, [*words, "http://127.0.0.1:1", "--requests", "1"])
        assert got.exit_code == 1
        assert "no server answers at http://127.0.0.1:1" in got.output
    got = CliRunner().invoke(app, ["bench", "serve", "127.0.0.1:8000"])
    assert got.exit_code == 1
    assert "http://HOST:PORT" in got.output
    got = CliRunner().invoke(app, ["bench", "serve", "http://127.0.0.1:1", "--largest-token", "9"])
    assert got.exit_code == 2
    assert "--streams" in CliRunner().invoke(app, ["bench", "serve", "--help"]).output


def test_prompts_are_scored(live: Live, tiny: Path) -> None:
    """What lm-eval's local-completions sends; the sum is that of the model's own logits."""
    tokens = live.llm.encode("def main(x):\n    return x")
    body = {
        "model": "tiny", "prompt": [tokens, tokens[:5]], "temperature": 0, "max_tokens": 1,
        "logprobs": 1, "seed": 1234, "echo": True,
    }  # fmt: skip
    params, llm = SamplingParams(max_tokens=0, prompt_logprobs=1), LLM(tiny)
    for i, choice in enumerate(live.post("/v1/completions", body).json()["choices"]):
        found, count = choice["logprobs"], len(body["prompt"][i])
        want = llm.generate(body["prompt"][i], params)[0].completions[0]
        assert found["token_logprobs"][0] is None
        assert found["token_logprobs"][1:count] == pytest.approx(
            [entry.logprob for entry in want.prompt_logprobs[1:]], abs=1e-3
        )
        assert len(found["tokens"]) == len(found["top_logprobs"]) == count + 1
        for name, value, top in list(zip(*map(found.get, (
            "tokens", "token_logprobs", "top_logprobs")), strict=True))[1:]:  # fmt: skip
            assert top[name] == value <= max(top.values())
        assert "".join(found["tokens"]) == choice["text"]
        assert found["text_offset"][2] == len(found["tokens"][0] + found["tokens"][1])
    only = live.post("/v1/completions", body | {"max_tokens": 0}).json()
    assert only["usage"]["completion_tokens"] == 0
    assert [len(c["logprobs"]["tokens"]) for c in only["choices"]] == [len(tokens), 5]
    streamed = events(live.post("/v1/completions", body | {"stream": True}).text)
    whole = [e["choices"][0] for e in streamed if e["choices"][0]["index"] == 0]
    assert sum(len((c["logprobs"] or {"tokens": ()})["tokens"]) for c in whole) == len(tokens) + 1


def test_best_of(live: Live) -> None:
    body = {"prompt": "x", "max_tokens": 5, "seed": 3, "ignore_eos": True}
    many = live.post("/v1/completions", body | {"n": 6, "logprobs": 0}).json()["choices"]
    best = live.post("/v1/completions", body | {"n": 2, "best_of": 6}).json()
    many.sort(key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    assert [c["text"] for c in best["choices"]] == [c["text"] for c in many[:2]]
    assert [c["index"] for c in best["choices"]] == [0, 1]
    assert best["usage"]["completion_tokens"] == 30
    assert best["choices"][0]["logprobs"] is None


def test_halves_of_characters_have_their_bytes(live: Live) -> None:
    """Bytes of tokens join to the text, though a token may be a part of a character."""
    tokens = live.llm.encode("\u4e2d\U0001f600")
    words = Words(live.llm.tokenizer)
    assert len(tokens) > 2
    assert b"".join(map(words.bytes, tokens)).decode() == "\u4e2d\U0001f600"
    body = {"prompt": tokens, "echo": True, "logprobs": 0, "max_tokens": 0}
    names = live.post("/v1/completions", body).json()["choices"][0]["logprobs"]["tokens"]
    assert any(name.startswith("bytes:\\x") for name in names)
    bias = {str(tokens[0]): 100}
    said = [{"role": "user", "content": "hi"}]
    chat = {"messages": said, "max_tokens": 1, "logprobs": True, "logit_bias": bias}
    got = live.post("/v1/chat/completions", chat).json()["choices"][0]["logprobs"]["content"]
    assert bytes(got[0]["bytes"]) == words.bytes(tokens[0])


def test_offsets_are_places_in_the_text(live: Live) -> None:
    """Parts of a character begin where it does; special tokens that are not shown take no room."""
    smile = "\U0001f600"
    tokens = [0, *live.llm.encode(f"def {smile}(")]
    body = {"prompt": tokens, "max_tokens": 12, "temperature": 0, "guided_regex": f"a{smile}bc"}
    body |= {"logprobs": 0, "echo": True}
    for shown in (True, False):
        answer = live.post("/v1/completions", body | {"skip_special_tokens": not shown})
        choice = answer.json()["choices"][0]
        assert choice["text"].endswith(f"def {smile}(a{smile}bc")
        places = list(zip(*(choice["logprobs"][k] for k in ("tokens", "text_offset")), strict=True))
        assert places[0] == ("<|endoftext|>", 0)
        assert places[1][1] == (len("<|endoftext|>") if shown else 0)
        for token, at in places[1:]:
            if token.startswith("bytes:"):
                assert choice["text"][at] == smile
            else:
                assert choice["text"].startswith(token, at)
        more = {"stream": True, "skip_special_tokens": not shown}
        streamed = events(live.post("/v1/completions", body | more).text)
        found = [e["choices"][0]["logprobs"] for e in streamed]
        offsets = [at for entry in found if entry for at in entry["text_offset"]]
        assert offsets == [place[1] for place in places]


def test_offsets_pass_over_what_a_tokenizer_puts_before_a_text() -> None:
    words = Words(AutoTokenizer.from_pretrained(PICO))
    prompt = [0, *words.tokenizer.encode("def f(")]
    asked = Asked("tiny", [prompt], 1, SimpleNamespace(names=["a"]), words)  # type: ignore[arg-type]
    answer = CompletionsAnswer(asked, ["def f("], True, frozenset({0}), (0,))
    tokens = [*prompt, 0]  # the last one is the text's
    found = answer.logprobs(answer.texts[0], [Logprob(token, 0.0) for token in tokens])
    assert found is not None
    assert found["text_offset"][:2] == [0, 0]
    assert found["text_offset"][-1] == len("def f(")


def test_long_stops_and_penalties(live: Live) -> None:
    body = {"prompt": "x", "temperature": 0, "max_tokens": 60, "ignore_eos": True}
    whole = live.post("/v1/completions", body).json()["choices"][0]["text"]
    stop = whole[5:30]
    assert len(stop) > 16
    cut = live.post("/v1/completions", body | {"stop": stop}).json()["choices"][0]
    assert (cut["text"], cut["stop_reason"]) == (whole[: whole.index(stop)], stop)
    for field in ({"frequency_penalty": 2}, {"presence_penalty": 2}, {"logit_bias": {"77": 9}}):
        assert live.post("/v1/completions", body | field).json()["choices"][0]["text"] != whole


def test_drafts_are_counted(tiny: Path) -> None:
    """In metrics, in a request's usage, and by the bench of a server."""
    with serving(drafting(LLM(tiny, block_size=8, draft=tiny, draft_tokens=3))) as live:
        body = {"prompt": "def main(", "max_tokens": 12, "ignore_eos": True, "temperature": 0}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        usage = events(live.post("/v1/completions", body | streamed).text)[-1]["usage"]
        details = usage["completion_tokens_details"]
        accepted, rejected = (
            details[f"{what}_prediction_tokens"] for what in ("accepted", "rejected")
        )
        assert usage["completion_tokens"] == 12
        assert 0 < accepted < 12
        text = httpx.get(live.url + "/metrics").text
        for name, value in (("draft", accepted + rejected), ("accepted", accepted)):
            name = f"vllm:spec_decode_num_{name}_tokens_total"
            assert f'{name}{{model_name="tiny"}} {float(value)}' in text
        shown: list[str] = []
        bench(
            live.url,
            [Load(Lengths(8), Lengths(8), streams=2, requests=2)],
            4096,
            None,
            shown.append,
        )
        assert any("tokens taken" in line for line in shown)
