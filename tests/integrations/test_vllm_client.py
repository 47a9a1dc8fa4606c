"""vLLM's benchmark client against our server (`make test-vllm`): its report is right."""

import argparse
import json

import httpx
import pytest
from vllm.benchmarks.serve import add_cli_args, main

from anybit.engine.llm import LLM
from tests.engine.conftest import PICO
from tests.serve.conftest import serving

REQUESTS, PROMPT, OUTPUT = 12, 48, 16


@pytest.fixture(scope="module")
def live():
    with serving(LLM(PICO, device="cpu"), 1) as server:
        yield server


def report(url, tmp_path, *options):
    """What `vllm bench serve` saves."""
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    shape = {"input-len": PROMPT, "output-len": OUTPUT}
    sizes = [word for name, n in shape.items() for word in (f"--random-{name}", str(n))]
    saved = ["--save-result", "--save-detailed", "--result-filename", str(tmp_path / "r.json")]
    common = ["--base-url", url, "--model", "tiny", "--tokenizer", str(PICO), "--disable-tqdm"]
    load = ["--dataset-name", "random", "--num-prompts", str(REQUESTS), "--max-concurrency", "4"]
    metrics = ["--percentile-metrics", "ttft,tpot,itl,e2el"]
    main(parser.parse_args([*common, *load, *sizes, *saved, *metrics, *options]))
    return json.loads((tmp_path / "r.json").read_text())


def counted(url):
    """Tokens that the server says it has written, by its metrics."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total")
    )


@pytest.mark.parametrize(
    "options",
    [
        ("--backend", "openai", "--endpoint", "/v1/completions", "--ignore-eos"),
        ("--backend", "vllm", "--endpoint", "/v1/completions", "--logprobs", "2", "--ignore-eos"),
        ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--ignore-eos"),
        ("--backend", "openai", "--endpoint", "/v1/completions", "--request-rate", "50",
         "--ignore-eos", "--temperature", "0.8", "--top-p", "0.9"),
    ],
    ids=["completions", "logprobs", "chat", "rate"],
)  # fmt: skip
def test_report_agrees_with_the_server(live, tmp_path, options):
    before = counted(live.url)
    got = report(live.url, tmp_path, *options)
    assert (got["completed"], got["failed"]) == (REQUESTS, 0), got["errors"]
    assert got["total_output_tokens"] == REQUESTS * OUTPUT
    assert counted(live.url) - before >= REQUESTS * OUTPUT  # the client tries one request first
    assert got["output_lens"] == [OUTPUT] * REQUESTS
    assert got["total_input_tokens"] >= REQUESTS * PROMPT
    assert 0 < got["median_ttft_ms"] < got["median_e2el_ms"] < 1000 * got["duration"]
    # From the first token to the last is what an answer takes beyond its first token.
    rest = got["mean_tpot_ms"] * (OUTPUT - 1)
    assert rest == pytest.approx(got["mean_e2el_ms"] - got["mean_ttft_ms"], rel=0.1)
    assert live.idle()


def test_refused_requests_are_reported(live, tmp_path):
    """An unknown model: every request fails, and the client says why."""
    options = ("--backend", "openai", "--endpoint", "/v1/completions", "--served-model-name", "no")
    got = report(live.url, tmp_path, *options, "--ready-check-timeout-sec", "0")
    assert (got["completed"], got["failed"]) == (0, REQUESTS)
    assert all("Not Found" in error for error in got["errors"]), got["errors"]
    assert live.idle()
