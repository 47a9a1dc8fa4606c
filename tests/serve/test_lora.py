"""Adapters are models of their own for clients (`anybit serve --lora NAME=DIR`)."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from transformers import AutoModelForCausalLM

from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from anybit.errors import InvalidInput
from anybit.serve.options import adapters_of
from anybit.serve.run import service_of
from anybit.serve.settings import Settings
from tests.engine.test_lora import adapter
from tests.serve.conftest import Live, serving

GREEDY = SamplingParams(max_tokens=8, temperature=0)


@pytest.fixture(scope="module")
def llm(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    place = tmp_path_factory.mktemp("adapters")
    model = AutoModelForCausalLM.from_pretrained(tiny)
    with warnings.catch_warnings(action="ignore"):  # peft's own
        adapters = {name: adapter(model, place / name, i) for i, name in enumerate("ab")}
    return LLM(tiny, adapters=adapters)


@pytest.fixture(scope="module")
def wanted(llm: LLM) -> dict[str, str]:
    """Each model's text."""
    params = {name: replace(GREEDY, adapter=name) for name in "ab"} | {"tiny": GREEDY}
    return {name: llm.generate("def f(", p)[0].text for name, p in params.items()}


@pytest.fixture(scope="module")
def live(llm: LLM, wanted: dict[str, str]) -> Iterator[Live]:
    with serving(llm) as live:
        yield live


@pytest.mark.parametrize("name", ["tiny", "a", "b"])
def test_a_request_names_its_adapter(live: Live, wanted: dict[str, str], name: str) -> None:
    assert len(set(wanted.values())) == 3
    asked = {"model": name, "temperature": 0, "max_tokens": 8}
    answer = live.post("/v1/completions", asked | {"prompt": "def f("}).json()
    assert answer["choices"][0]["text"] == wanted[name]
    assert answer["model"] == name
    chat = asked | {"messages": [{"role": "user", "content": "def f("}]}
    answer = live.post("/v1/chat/completions", chat).json()
    assert answer["choices"][0]["message"]["content"] == wanted[name]


def test_adapters_are_listed(live: Live) -> None:
    models = httpx.get(live.url + "/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["tiny", "a", "b"]
    refused = live.post("/v1/completions", {"model": "c", "prompt": "x"})
    assert refused.status_code == 404
    assert "this server has 'tiny' or 'a' or 'b'" in refused.text


def test_names(llm: LLM) -> None:
    with pytest.raises(InvalidInput, match="'a' names the model and an adapter"):
        service_of(llm, Settings(("a",)))
    assert adapters_of(["x=y", "z=a=b"]) == {"x": Path("y"), "z": Path("a=b")}
    for wrong in (["x"], ["=x"], ["x="], ["x=y", "x=z"]):
        with pytest.raises(InvalidInput, match="give NAME=DIRECTORY, each name once"):
            adapters_of(wrong)
