"""Candidates of `anybit eval` in other engines, servers and llama.cpp, against the same model."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from anybit.errors import InvalidInput, Unsupported
from anybit.evaluate import llama_cpp
from anybit.evaluate.candidate import Transformers, check_words
from anybit.evaluate.llama_cpp import LlamaCpp
from anybit.evaluate.model import encode
from anybit.evaluate.perplexity import COLUMNS, Likeliest, measure, told
from anybit.evaluate.run import evaluate, opened
from anybit.evaluate.server import TOLD, Server
from tests.serve.conftest import Live

TEXT = (
    "def f(x):\n    return [y * 2 for y in x]\n\n\nfor index in range(10):\n    print(f(index))\n"
    * 8
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_divergences_of_the_likeliest_tokens_are_lower_bounds_and_exact_where_all_are_told() -> (
    None
):
    generator = torch.Generator().manual_seed(0)
    p, q = (3 * torch.randn(40, 30, generator=generator) for _ in range(2))
    ids = torch.randint(30, (41,), generator=generator)
    logits, dense = (torch.cat((x, x[:1]))[None] for x in (q, p))
    whole = measure(lambda _: logits, [ids], window=64, dense=lambda _: dense).values
    log_q, target = q.log_softmax(1), ids[1:]
    for count in (6, 29):
        others = log_q.scatter(1, target[:, None], -torch.inf).topk(count).indices
        tokens = torch.cat((target[:, None], others), 1)
        got = told(Likeliest(tokens, log_q.gather(1, tokens)), target, p)
        for name in ("nll", "loss", "agreement", "top5"):
            at = COLUMNS.index(name)
            torch.testing.assert_close(got[:, at], whole[:, at], atol=1e-5, rtol=1e-5)
        for name in ("kl", "kl_reverse"):
            at = COLUMNS.index(name)
            if count == 29:
                torch.testing.assert_close(got[:, at], whole[:, at], atol=1e-4, rtol=1e-4)
            else:
                assert (got[:, at] < whole[:, at] + 1e-5).all()
                assert got[:, at].mean() > 0.3 * whole[:, at].mean()
    assert torch.equal(
        told(Likeliest(tokens, log_q.gather(1, tokens)), target, None)[:, 0], got[:, 0]
    )


def test_a_server_is_scored_as_its_model_is(live: Live, tiny: Path, text: Path) -> None:
    receipt = evaluate(live.url + "/v1/", tiny, text, 400)
    assert receipt["tokens"] == evaluate(tiny, None, text, 400)["tokens"] > 200
    assert abs(receipt["loss"]) < 1e-3
    assert max(receipt["kl"], receipt["kl_reverse"]) < 1e-4
    assert min(receipt["agreement"], receipt["top5"]) > 0.98
    assert receipt["same64"] == 64
    assert "20 likeliest" in receipt["bound"]
    assert receipt["receipt"]["hashes"]["model"] == {"server": "tiny"}
    assert receipt["receipt"]["hardware"]["device"] == live.url
    json.dumps(receipt)


def test_a_server_and_a_stored_pass(live: Live, tiny: Path, text: Path, tmp_path: Path) -> None:
    evaluate(tiny, None, text, 200, save=tmp_path / "r")
    receipt = evaluate(live.url, tmp_path / "r", None, 0)
    assert max(abs(receipt["loss"]), receipt["kl"]) < 1e-3
    assert receipt["same64"] == 64
    with pytest.raises(Unsupported, match="no other engine tells"):
        evaluate(live.url, tiny, text, 100, save=tmp_path / "s")
    with pytest.raises(Unsupported, match="add --against MODEL"):
        evaluate(live.url, None, text, 100)


def scripted(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str, Any], Any]) -> Server:
    """A server whose answers are a function of path and body: JSON, or a response."""

    def handle(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        found = answer(request.url.path, body)
        return found if isinstance(found, httpx.Response) else httpx.Response(200, json=found)

    def request(method: str, url: str, **options: Any) -> httpx.Response:
        timeout = options.pop("timeout")
        with httpx.Client(transport=httpx.MockTransport(handle), timeout=timeout) as client:
            return client.request(method, url, **options)

    monkeypatch.setattr(httpx, "request", request)
    found = opened("http://localhost:9")
    assert isinstance(found, Server)
    return found


MODELS = {"data": [{"id": "m", "max_model_len": 100}]}


def test_sglang_tells_prompts_in_its_own_route(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(path: str, body: Any) -> Any:
        if path == "/v1/models":
            return MODELS
        if path == "/v1/completions":  # knows no prompt_logprobs
            return {"choices": [{"text": "x"}]}
        own = [[None if i == 0 else -i / 2, token, f"t{token}"] for i, token in
               enumerate(body["input_ids"])]  # fmt: skip
        tops = [None] + [[[-0.25, 7, "t7"], [-3.0, 8, "t8"]] for _ in own[1:]]
        return {"meta_info": {"input_token_logprobs": own, "input_top_logprobs": tops}}

    server = scripted(monkeypatch, answer)
    got = server(torch.tensor([[3, 4, 7]]))
    assert got.tokens.shape == (1, 3, TOLD + 1)
    assert got.tokens[0, :2, :3].tolist() == [[4, 7, 8], [7, 8, -1]]
    assert got.logp[0, 0, :3].tolist() == [-0.5, -0.25, -3.0]
    assert server.words([5, 6]) == ["t5", "t6"]
    assert server.continuations([torch.tensor([1, 2])], 64) is None


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"choices": [{"text": "x"}]}, "tells no log-probabilities of a prompt"),
        ({"choices": [{"prompt_logprobs": [None]}]}, "tells no log-probabilities of a prompt"),
        ({"choices": []}, "tells no log-probabilities of a prompt"),
        (httpx.Response(401, text="no"), "refuses .401.*ANYBIT_API_KEY"),
        (httpx.Response(400, text="at most 5"), "refuses .400.: at most 5"),
        (httpx.Response(200, text="<html>"), "answers no JSON"),
    ],
)
def test_a_server_that_cannot_be_scored(
    answer: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(path: str, body: Any) -> Any:
        other = httpx.Response(404) if path == "/generate" else answer
        return MODELS if path == "/v1/models" else other

    server = scripted(monkeypatch, answers)
    with pytest.raises((InvalidInput, Unsupported), match=says):
        server(torch.tensor([[3, 4, 7]]))


def test_no_server_and_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConnectionError, match="no server answers"):
        opened("http://127.0.0.1:9")
    with pytest.raises(InvalidInput, match="names no model"):
        scripted(monkeypatch, lambda path, body: {"data": []})
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ImportError, match=r"needs httpx.*pip install 'anybit\[serve\]'"):
        opened("http://127.0.0.1:9")


def test_tokens_that_mean_other_texts_are_refused() -> None:
    own = SimpleNamespace(words=lambda ids: [f" w{i}" if i else "\ufffd" for i in ids])
    words = {str(i): f"w{i} " for i in range(100)}
    check_words(own, words | {"3": "other"}, "a and b")  # type: ignore[arg-type]
    with pytest.raises(
        InvalidInput, match=r"a and b have different vocab.*token 1 is 'w1' in the f"
    ):
        check_words(own, {i: f"x{w}" for i, w in words.items()}, "a and b")  # type: ignore[arg-type]


class Stand:
    """What is used of llama_cpp.Llama, with a model of transformers in it."""

    def __init__(self, path: str, n_ctx: int, **options: Any):
        self.model = AutoModelForCausalLM.from_pretrained(Path(path).parent, dtype="auto")
        self.tokenizer = AutoTokenizer.from_pretrained(Path(path).parent)
        self.metadata = {"general.architecture": "llama", "llama.context_length": "512"}
        self.scores = np.zeros((n_ctx, 4096), np.float32)
        self.reset()

    def reset(self) -> None:
        self.ids: list[int] = []

    @property
    def n_tokens(self) -> int:
        return len(self.ids)

    @torch.inference_mode()
    def eval(self, ids: list[int]) -> None:
        self.ids += ids
        self.scores[: len(self.ids)] = self.model(torch.tensor([self.ids])).logits[0].numpy()

    def tokenize(self, text: bytes, add_bos: bool, special: bool) -> list[int]:
        return encode(self.tokenizer, text.decode()).tolist()

    def detokenize(self, ids: list[int], special: bool) -> bytes:
        return str(self.tokenizer.decode(ids)).encode()

    def token_eos(self) -> int:
        return 0


def test_a_gguf_file_in_llama_cpp(tiny: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("llama_cpp")
    module.Llama = Stand  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.setattr(llama_cpp, "version", lambda name: "0")
    file = tiny / "m.gguf"
    file.write_bytes(b"GGUF")
    try:
        receipt = evaluate(f"llama.cpp:{file}", tiny, text, 200)
        alone = evaluate(f"llama.cpp:{file}", None, text, 200)
    finally:
        file.unlink()
    assert max(abs(receipt["loss"]), receipt["kl"]) < 1e-5
    assert receipt["same64"] == 64
    assert receipt["window"] == 512
    assert list(receipt["receipt"]["hashes"]["model"]) == ["m.gguf"]
    assert alone["perplexity"] == pytest.approx(receipt["perplexity"], rel=1e-5)


def test_a_dense_model_takes_tokens_from_wherever_the_other_engine_has_them() -> None:
    model = object.__new__(Transformers)
    model.device, model.model = torch.device("meta"), lambda ids: ids
    assert model(torch.tensor([[1, 2]])).device.type == "meta"


def test_what_llama_cpp_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        opened("llama.cpp:nowhere.gguf")
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(InvalidInput, match="no GGUF file"):
        opened(f"llama.cpp:{tmp_path}/a.bin")
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ImportError, match="pip install llama-cpp-python"):
        opened(f"llama.cpp:{tmp_path}/a.gguf")


@pytest.mark.skipif(
    not all(name in os.environ for name in ("ANYBIT_LLAMA_PERPLEXITY", "ANYBIT_LLAMA_GGUFS"))
    or importlib.util.find_spec("llama_cpp") is None,
    reason="compares with llama-perplexity, named by ANYBIT_LLAMA_PERPLEXITY, on two GGUFs",
)
def test_llama_perplexity_says_the_same(tmp_path: Path) -> None:
    program, files = os.environ["ANYBIT_LLAMA_PERPLEXITY"], os.environ["ANYBIT_LLAMA_GGUFS"]
    dense, candidate = map(Path, files.split(":"))
    (tmp_path / "text").write_text(Path(__file__).read_text() * 2)
    common = ["-f", "text", "-c", "256", "--chunks", "8", "--kl-divergence-base", "base"]
    for more in (["-m", str(dense)], ["-m", str(candidate), "--kl-divergence"]):
        got = subprocess.run(
            [program, *common, *more], cwd=tmp_path, capture_output=True, text=True, check=True
        )
    rows = [line.split() for line in got.stdout.splitlines() if line.startswith(("Mean", "Same"))]
    said = {" ".join(row[:2]): row for row in rows}
    model, base = LlamaCpp(candidate), LlamaCpp(dense)
    ids = base.encode((tmp_path / "text").read_text())
    documents = list(ids[: 8 * 256].clone().split(256))
    if (bos := base.llama.token_bos()) == ids[0]:
        for document in documents:
            document[0] = bos
    half = [torch.arange(256) > 128] * 8  # it scores the second half of each chunk
    found = measure(model, documents, window=256, dense=base, counted=half).score()
    assert found.kl is not None
    assert found.kl > 0.001
    assert abs(found.kl - float(said["Mean KLD:"][2])) < 1e-4
    assert math.isclose(found.perplexity, float(said["Mean PPL(Q)"][3]), rel_tol=1e-4)
