"""Every script of examples/, run on a short models/pico in a folder of its own."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.nn import Linear

import anybit
from anybit.checkpoint.save_load import load
from anybit.core.format import FORMATS
from anybit.engine.llm import LLM
from anybit.evaluate.model import load_text_model
from anybit.nn.model import quantized_layers
from anybit.serve.run import FrontEnds
from anybit.serve.settings import Settings
from tests import tiny

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: it has models/ as the repository does, and takes what is written."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models/pico").symlink_to(tiny.short_pico())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(name: str, monkeypatch: pytest.MonkeyPatch, *args: object) -> dict[str, Any]:
    """The variables that a script leaves behind."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")


def test_one_line_fp6(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    left = run("one_line_fp6", monkeypatch)
    dense = dict(load_text_model("models/pico", "cpu")[0].named_modules())
    layers = dict(quantized_layers(left["model"]))
    assert len(layers) == 14
    for name, layer in layers.items():
        expected = anybit.dequantize(anybit.quantize_tensor(dense[name].weight, "fp6"))
        assert torch.equal(anybit.dequantize(layer.packed), expected)
    text = capsys.readouterr().out
    assert text.startswith(left["PROMPT"])
    assert len(text) > len(left["PROMPT"]) + 20


def test_own_format(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        left = run("own_format", monkeypatch)
        layers = dict(quantized_layers(left["model"]))
        assert {layer.scheme for layer in layers.values()} == {"normal"}
        dense, _ = load_text_model("models/pico", "cpu")
        weight = dense.get_submodule(next(iter(layers))).weight.detach()

        def error(spec: str) -> float:
            """Squared, of weights that are about normal: what these levels are made for."""
            back = anybit.dequantize(anybit.quantize_tensor(weight, spec)).detach()
            return float((back - weight).square().sum() / weight.square().sum())

        assert 0.001 < error("normal") < 0.9 * error("int4")
    finally:
        FORMATS.pop("normal", None)
    assert len(capsys.readouterr().out) > 20


def test_quantize_and_chat(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["def fibonacci(n):"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, None) or end_of_input())
    run("quantize_and_chat", monkeypatch)
    text = capsys.readouterr().out
    assert "14 layers" in text
    assert "[64 tokens" in text
    saved = dict(quantized_layers(load(folder / "out/chat")))
    assert {layer.scheme for layer in saved.values()} == {"int4:group=64,zero"}


def end_of_input() -> str:
    raise EOFError


def test_plan_under_budget(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = run("plan_under_budget", monkeypatch, 0.8)
    stored = sum(
        tensor.nbytes for _, layer in quantized_layers(left["model"]) for tensor in layer.buffers()
    )
    assert 0.77e6 < stored <= 0.8e6
    assert len({layer.scheme for _, layer in quantized_layers(left["model"])}) > 1
    linear = sum(
        m.weight.numel()
        for name, m in load_text_model("models/pico", "cpu")[0].named_modules()
        if isinstance(m, Linear) and name != "lm_head"
    )
    assert f"{stored * 8 / linear:.2f} bits a weight" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # see test_peft
def test_finetune(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = run("finetune", monkeypatch, 4)
    before, after = left["losses"]
    assert after < before - 0.01
    assert (folder / "out/finetune/adapter/adapter_model.safetensors").is_file()
    merged = dict(quantized_layers(load(folder / "out/finetune/merged")))
    assert {layer.scheme for layer in merged.values()} == {"int4:group=64"}
    assert left["loss"]() < before


def test_train_rounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is trained with rounding keeps its loss when it is quantized, and so loses less."""
    losses = run("train_rounded", monkeypatch, "int2:group=32", 4)["losses"]
    plain, quantized = losses["without rounding"]
    before, after = losses["with rounding"]
    assert after == pytest.approx(before, abs=1e-4)
    assert plain < after < quantized - 0.1
    layers = dict(quantized_layers(load(folder / "out/train_rounded")))
    assert [layer.scheme for layer in layers.values()] == ["int2:group=32"] * 14


def test_reinforce(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the served weights raises the reward sooner than that of the trainer's."""
    rewards = run("reinforce", monkeypatch, "int2:group=32", 4)["rewards"]
    plain, rounded = (sum(each[-2:]) for each in rewards.values())
    assert rounded > plain + 0.05


def test_w4a8_serve(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[LLM, Settings, str]] = []

    def serve(llm: LLM, settings: Settings, front_ends: FrontEnds) -> None:
        served.append((llm, settings, front_ends.listener.getsockname()[0]))

    monkeypatch.setattr("anybit.serve.run.run", serve)
    run("w4a8_serve", monkeypatch, 0)
    ((llm, settings, host),) = served
    assert (settings.names, host) == (("pico",), "127.0.0.1")
    assert llm.kv_cache == "int8"
    (answer,) = llm.generate("def f(x):", anybit.SamplingParams(temperature=0, max_tokens=8))
    assert len(answer.tokens) == 8
    assert answer.text.strip()
    config = json.loads((folder / "out/w4a8/config.json").read_text())
    assert "liquid@int8" in json.dumps(config["quantization_config"])
    with safe_open(folder / "out/w4a8/model.safetensors", "pt") as saved:
        names = list(saved.keys())
    assert sum(name.endswith(".step") for name in names) == 14  # LiquidQuant's second level
    assert sum(name.endswith(".k_scale") for name in names) == 2
