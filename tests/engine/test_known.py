"""What is kept of a checkpoint: another start reads the same, and nothing that was changed."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from anybit.engine import known, loader
from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from anybit.errors import AnybitError
from anybit.files.directory import cache_folder
from tests.engine.conftest import ARCHITECTURES, PICO

PROMPTS = [[3, 5, 7, 11, 13, 17], [2] * 30]
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
HEAVY = ("transformers.modeling_utils", "torch._dynamo", "torch.distributed.tensor", "sympy")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path / "cache"))
    return cache_folder() / "checkpoints"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Directories that are read by transformers' classes."""
    found: list[Path] = []
    usual = loader.bare_model
    monkeypatch.setattr(loader, "bare_model", lambda path: found.append(path) or usual(path))
    return found


def tokens(source: Path) -> list[list[int]]:
    outputs = LLM(source, dtype="float32").generate(PROMPTS, GREEDY, show_progress=False)
    assert not any(output.completions[0].error for output in outputs)
    return [output.tokens for output in outputs]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_is_the_same_again(
    name: str, checkpoint: Callable[[str], Path], read: list[Path], cache: Path
) -> None:
    source = checkpoint(name)
    first = tokens(source)
    assert read == [source]
    kept = cache.is_dir() and bool(list(cache.iterdir()))
    assert kept or name == "gpt_oss"  # whose tensors are made of others
    assert tokens(source) == first
    assert len(read) == 2 - kept


def test_what_was_changed_is_read_anew(
    checkpoint: Callable[[str], Path], read: list[Path], cache: Path, tmp_path: Path
) -> None:
    source = tmp_path / "model"
    source.mkdir()
    for path in checkpoint("llama").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    first = tokens(source)
    (kept,) = cache.iterdir()
    whole = kept.read_text()
    for damaged in ("", "{", "[]", "{}", whole[:-9], whole.replace('"dict"', '"dic"')):
        kept.write_text(damaged)
        del read[:]
        assert tokens(source) == first
        assert read == [source]
        assert kept.read_text() == whole
    facts = json.loads(whole)
    for at, other in ((0, "0.0.1"), (1, "1.0"), (2, "other sources")):
        facts["of"][at], before = other, facts["of"][at]
        kept.write_text(json.dumps(facts))
        assert known.restored(source, None) == (None, "")
        facts["of"][at] = before
    tokens(source)
    del read[:]
    config = json.loads((source / "config.json").read_text())
    for field, value in (("hidden_act", "gelu"), ("mlp_bias", True), ("num_hidden_layers", 3)):
        (source / "config.json").write_text(json.dumps(config | {field: value}))
        if field == "hidden_act":
            assert tokens(source) != first
        else:  # tensors are missing
            with pytest.raises(AnybitError):
                tokens(source)
        assert read.pop() == source
    (source / "config.json").write_text(json.dumps(config))
    (source / "adapter_config.json").write_text("{}")  # a file that was not there
    with pytest.raises(AnybitError, match="adapter_config"):
        tokens(source)


def test_only_some_are_kept(
    checkpoint: Callable[[str], Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "MOST", 2)
    for name in ("llama", "qwen2", "qwen3"):
        tokens(checkpoint(name))
    assert len(list(cache.iterdir())) == 2


def test_the_second_start_imports_no_models(tmp_path: Path) -> None:
    """Nor torch's compiler and what it needs, which take seconds."""
    code = (
        f"import sys, anybit; llm = anybit.LLM({str(PICO)!r}, device='cpu');"
        "llm.generate(['def main('], anybit.SamplingParams(max_tokens=2));"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    shown = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}
        )
        assert done.returncode == 0, done.stderr[-2000:]
        shown.append(done.stdout.strip())
    assert shown[0] != "[]"
    assert shown[1] == "[]"
