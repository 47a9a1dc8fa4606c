"""The trained model of `models/pico`, its tokenizer, and the collector of its training text."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from anybit.evaluate.corpus import (
    CALIBRATION,
    HELD_OUT,
    calibration_text,
    held_out_text,
    module_path,
)

PICO = Path(__file__).parents[1] / "models" / "pico"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(PICO, dtype=torch.float32)
    return loaded.eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(PICO)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@pytest.fixture(scope="module")
def collector() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pico_collect", PICO / "collect.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def card_perplexity(name: str) -> float:
    """The perplexity that the model card records for a held-out module."""
    card = (PICO / "README.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| `{re.escape(name)}` \|[^|]*\|[^|]*\| ([\d.]+) \|", card, re.MULTILINE)
    assert row is not None
    return float(row[1])


def test_size_and_shapes(model: PreTrainedModel) -> None:
    assert 5.0e6 <= model.num_parameters() <= 7.5e6
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert len(linears) == 7 * model.config.num_hidden_layers + 1
    assert all(linear.in_features % 256 == 0 for linear in linears.values())
    assert (PICO / "model.safetensors").stat().st_size < 15e6


def test_weights_are_finite_and_not_degenerate(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        assert torch.isfinite(parameter).all()
        assert parameter.std() > 0


@pytest.mark.parametrize("name", ["colorsys", "sched"])
def test_perplexity_agrees_with_card(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    text = dict(held_out_text())[name]
    ids = tokenizer(tokenizer.bos_token + text, return_tensors="pt", verbose=False).input_ids[0]
    loss = 0.0
    for start in range(0, len(ids) - 1, 1024):
        window = ids[start : start + 1025]
        with torch.no_grad():
            logits = model(window[None, :-1]).logits[0]
        loss += F.cross_entropy(logits, window[1:], reduction="sum").item()
    # The card was written with one version of Python; the source differs a little in others.
    assert math.exp(loss / (len(ids) - 1)) == pytest.approx(card_perplexity(name), rel=0.1)


def test_completion_is_python(model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = tokenizer("def fibonacci(n):", return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert re.match(r"def fibonacci\(n\):\n {4}\S", str(tokenizer.decode(ids[0])))


@given(text=st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_tokenizer_returns_any_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n",
        "\r\n\t\r\n",
        "\x00\ufeff",
        "a  \n\n   b\t\tc ",
        "x = '漢字 é 🦜'",
        "<|endoftext|>",
    ],
)
def test_tokenizer_returns_odd_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_tokenizer_returns_held_out_text(tokenizer: PreTrainedTokenizerFast) -> None:
    for _, text in held_out_text():
        assert tokenizer.decode(tokenizer(text, verbose=False).input_ids) == text


def test_indent_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer("\n        return").input_ids) == 2


def test_corpora() -> None:
    assert not set(HELD_OUT) & set(CALIBRATION)
    held_out, calibration = dict(held_out_text()), dict(calibration_text())
    assert min(len(held_out), len(calibration)) >= 20
    assert 400_000 < sum(map(len, held_out.values())) < 900_000


def test_corpus_reports_missing_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anybit.evaluate.corpus.module_path", lambda name: Path("/nowhere", name))
    with pytest.raises(FileNotFoundError, match="only 0 of"):
        held_out_text()


def test_collector_leaves_out_held_out_modules(collector: ModuleType) -> None:
    guard = collector.HeldOutGuard(held_out_text())
    for name, text in held_out_text():
        assert guard.excludes(module_path(name), text)
        assert guard.excludes(Path("vendored.py"), text), name
    for name, text in calibration_text():
        assert not guard.excludes(module_path(name), text), name


def test_collector_leaves_out_copies_and_tables(collector: ModuleType, tmp_path: Path) -> None:
    sources = dict(held_out_text())
    plain = dict(calibration_text())["difflib"]
    heap = sources["heapq"].splitlines()
    files = {
        "plain.py": plain,
        "argparse.py": "# Another program that has this name only.\n" * 20,
        "vendored.py": "# Copied.\n" + sources["textwrap"].replace("self.", "this."),
        "part.py": "\n".join(heap[len(heap) // 2 :]),
        "inside.py": plain + "\n" + sources["colorsys"],
        "again.py": plain + "\n# A copy but for this line.\n",
        "generated.py": "# Generated by a tool: DO NOT EDIT\n" + plain,
        "table.py": "TABLE = [\n" + "    0x1f, 25, 1234567, 890,\n" * 100 + "]\n",
        "large.py": plain * 4,
        "small.py": "x = 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n" * 100)
    order = [*files, "latin.py"]
    guard = collector.HeldOutGuard(held_out_text())
    documents, left_out = collector.collect(
        [("package", tmp_path / name) for name in order], guard, seed=0
    )
    assert [document.text[: len(plain)] for document in documents] == [plain]
    assert left_out == {
        "held out": 4,
        "duplicate": 1,
        "generated or table": 2,
        "size": 2,
        "unreadable": 1,
    }


def test_a_limit_of_bytes_leaves_no_work_in_the_pool(
    collector: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that is ended with work to do may never end."""
    sources = []
    for name in range(12):
        path = tmp_path / f"module_{name}.py"
        path.write_text("".join(f"value_{name} = compute({name}, step={i})\n" for i in range(20)))
        sources.append(("package", path))
    parts = []

    class Pool:
        def __init__(self, workers: int) -> None:
            assert workers == 2

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *error: object) -> None: ...

        def map_async(self, do: Callable[[Any], Any], part: list[Any], chunksize: int) -> Any:
            parts.append(len(part))
            return SimpleNamespace(get=lambda seconds: [do(one) for one in part])

    monkeypatch.setattr(collector, "Pool", Pool)
    monkeypatch.setattr(collector, "PART", 4)
    guard = collector.HeldOutGuard(held_out_text())
    size = sources[0][1].stat().st_size
    documents, _ = collector.collect(sources, guard, 0, max_bytes=4 * size, workers=2)
    assert (len(documents), parts) == (5, [4, 4])


def test_collector_reads_no_held_out_module(collector: ModuleType) -> None:
    guard = collector.HeldOutGuard(held_out_text())
    for name in HELD_OUT:
        path = module_path(name)
        if path.is_file():
            assert collector.inspect_file((collector.STDLIB, path), guard) == "held out"
