"""Quantizers by name, and the commands that use them, on a short models/pico."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import anybit
from anybit.checkpoint.quantize import quantize_directory
from anybit.cli.app import app
from anybit.cli.options import default_calibration
from anybit.errors import InvalidInput
from anybit.evaluate.corpus import calibration_text
from anybit.nn.model import quantized_layers
from anybit.quantizers.gptq import GPTQ
from anybit.quantizers.registry import CALIBRATED, DATA_FREE, default_method
from tests import tiny

PICO = tiny.short_pico()
LAYERS = "*.layers.1.self_attn.*"
PART = ["--format", "none", "--format", f"{LAYERS}=int3"]
TEXT = ["--calibrate", "python", "--samples", "4", "--length", "128"]


def run(*args: object) -> str:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == 0, result.output
    return result.output


def codes(directory: Path) -> dict[str, list[int]]:
    return {
        n: layer.packed.codes()[0].tolist() for n, layer in quantized_layers(anybit.load(directory))
    }


@pytest.fixture
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 22 have 300 thousand tokens, of which these tests take 512."""
    monkeypatch.setattr("anybit.cli.options.calibration_text", lambda: calibration_text()[:2])


@pytest.mark.usefixtures("few_texts")
def test_methods_choose_other_codes(tmp_path: Path) -> None:
    found = {}
    free, with_text = ("rtn", "clip", "hqq"), ("gptq", "gptq+gradients", "smooth")
    for method in (*free, *with_text):
        text = [] if method in free else TEXT
        run("quantize", PICO, *PART, *text, "--method", method, "-o", tmp_path / method)
        found[method] = codes(tmp_path / method)
        assert len(found[method]) == 4
    assert found["hqq"] == found["clip"]  # whose scales formats without zero points get
    assert len({json.dumps(value) for value in found.values()}) == len(found) - 1
    run("quantize", PICO, *PART, *TEXT, "-o", tmp_path / "default")
    assert codes(tmp_path / "default") == found["gptq"]
    model = AutoModelForCausalLM.from_pretrained(PICO)
    texts = [text for _, text in calibration_text()[:2]]
    data = anybit.Calibration(texts, 4, 128, tokenizer=AutoTokenizer.from_pretrained(PICO))
    anybit.quantize_(model, {"*": None, LAYERS: "int3"}, GPTQ(data, gradients=True))
    from_memory = {n: layer.packed.codes()[0].tolist() for n, layer in quantized_layers(model)}
    assert from_memory == found["gptq+gradients"]
    assert "by GPTQ with gradients" in (tmp_path / "gptq+gradients" / "README.md").read_text()


def test_what_gains_by_data_is_calibrated_on_text_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no text is named; a data-free method takes none, and a calibrated one asks for it."""
    monkeypatch.setattr("anybit.progress._lines", True)
    layers = ["--format", "none", "--format", "*.layers.0.self_attn.*=int3"]
    for name, options in (("default", []), ("gptq", ["--method", "gptq"])):
        told = run("quantize", PICO, *layers, *options, "-o", tmp_path / name)
        assert "--method rtn" in told
        assert ("15 minutes of CPU time" in told) == (not torch.cuda.is_available())
    data = default_calibration({"*": "int3"}, None)
    assert data is not None
    model = AutoModelForCausalLM.from_pretrained(PICO)
    anybit.quantize_(model, {"*": None, "*.layers.0.self_attn.*": "int3"}, GPTQ(data))
    want = {n: layer.packed.codes()[0].tolist() for n, layer in quantized_layers(model)}
    assert codes(tmp_path / "default") == codes(tmp_path / "gptq") == want
    for plan, method in (({"*": "int8"}, None), ({"*": "int3"}, "rtn"), ({"*": "int3"}, "awq")):
        assert default_calibration(plan, method) is None


def test_what_cannot_be_calibrated_is_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless asked for by --method; what an earlier run has finished is kept."""
    monkeypatch.setattr("anybit.progress._lines", True)
    model, rounded, out = tmp_path / "model", tmp_path / "rounded", tmp_path / "out"
    shutil.copytree(PICO, model, ignore=shutil.ignore_patterns("*token*"))
    run("quantize", model, *PART, "--method", "rtn", "-o", rounded)
    output = run("quantize", model, *PART, "-o", out)
    assert "rounded to nearest, since it cannot be calibrated: no tokenizer at " in output
    assert codes(out) == codes(rounded)
    command = ["quantize", str(model), *PART, "--overwrite", "-o", str(out)]
    result = CliRunner().invoke(app, [*command, "--method", "gptq"])
    assert result.exit_code == 1
    assert "no tokenizer" in result.output

    def broken(*args: object) -> None:
        raise NotImplementedError("a model's own")

    monkeypatch.setattr("anybit.checkpoint.calibrated.calibrate", broken)
    assert "cannot be calibrated: NotImplementedError: a model's own" in run(*command)

    def stopped(*args: object) -> None:
        (tmp_path / "out.partial" / "block_0000.safetensors").touch()
        raise InvalidInput("block 1: its outputs hold NaN")

    monkeypatch.setattr("anybit.checkpoint.calibrated.calibrate", stopped)
    assert "cannot be calibrated: block 1: its outputs hold NaN" in run(*command)
    assert codes(out) == codes(rounded)
    assert not (tmp_path / "out.partial").exists()
    (tmp_path / "out.partial").mkdir()
    for name in ("block_0000.safetensors", "settings.json"):
        (tmp_path / "out.partial" / name).touch()
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == "error: block 1: its outputs hold NaN"
    assert len(list((tmp_path / "out.partial").iterdir())) == 2


def test_default_method() -> None:
    assert default_method({"*": "int4", "lm_head": None}) == "gptq"
    assert default_method({"*": "int4@int8"}) == "smooth+gptq"
    assert default_method({"*": "int4", "*.up_proj": "codebook:m=1,v=4"}) == "additive"
    assert default_method({"*": "int4", "*.down_proj": "liquid"}) == "smooth+gptq"


def test_unknown_and_unfit_methods(tmp_path: Path) -> None:
    text = anybit.Calibration(["text"])
    for method, given, message in [
        (
            "gptq",
            None,
            "'gptq' needs data: --calibrate FILE; without calibration data there are rtn, "
            "clip, hqq, grid",
        ),
        (
            "rtn",
            text,
            f"'rtn' takes no data; with calibration data there are {', '.join(CALIBRATED)}",
        ),
        (
            "gtpq",
            None,
            "unknown method 'gtpq'; did you mean gptq; without calibration data there are "
            + ", ".join(DATA_FREE),
        ),
        ("AWQ", None, "'awq' is done by --method smooth and --calibrate FILE; without"),
        ("awq", text, "'awq' is done by --method smooth; with calibration data there are"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            quantize_directory(PICO, tmp_path / "out", {"*": "int4"}, method, given, False)
    assert not (tmp_path / "out").exists()


def test_without_a_format_one_that_suits_the_machine_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anybit.progress._lines", True)
    for gpu, text, want in [
        (None, [], "fp:e2m3"),
        (None, TEXT, "int4:group=64,zero"),
        ((9, 0), TEXT, "liquid@int8"),
        ((8, 6), TEXT, "int4:group=64,zero"),
        ((8, 6), [], "fp:e2m3"),
    ]:
        monkeypatch.setattr("torch.cuda.is_available", lambda gpu=gpu: gpu is not None)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda gpu=gpu: gpu)
        plans, data = list[dict[str, str | None]](), list[object]()
        monkeypatch.setattr(
            "anybit.checkpoint.quantize.quantize_directory",
            lambda model, out, plan, method, text, *rest, plans=plans, data=data, **more: (
                plans.append(plan) or data.append(text)
            ),
        )
        output = run("quantize", PICO, *text, "-o", tmp_path / "out")
        assert plans == [{"*": want}]
        assert f"no --format: {want} (" in output
        assert bool(data[0]) is bool(text)  # "rounded to nearest" is what is done
        assert ("calibrating" in output) is False
        default_method(plans[0])


def test_budgets_that_are_none() -> None:
    for bits in ("400", "0", "-1"):
        result = CliRunner().invoke(app, ["plan", str(PICO), "--bits", bits])
        assert result.exit_code == 2
        assert "Invalid value for '--bits'" in result.output


@pytest.mark.usefixtures("few_texts")
def test_plan_and_what_it_is_for(tmp_path: Path) -> None:
    offered = "int4:group=128;int5:group=128"
    table = run(
        "plan", PICO, "--bits", "4.6", *TEXT, "--candidates", offered,
        "-o", tmp_path / "plan.json", "--plot", tmp_path / "plan.png",
    )  # fmt: skip
    assert "this plan (4.6 bits)" in table
    assert (tmp_path / "plan.png").is_file()
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert set(plan.values()) == {*offered.split(";"), "int8"}  # of the head and its embeddings
    run(
        "quantize", PICO, "--plan", tmp_path / "plan.json", "--method", "rtn",
        "-o", tmp_path / "out",
    )  # fmt: skip
    schemes = {layer.scheme for _, layer in quantized_layers(anybit.load(tmp_path / "out"))}
    assert schemes == set(plan.values())


@pytest.mark.usefixtures("few_texts")
def test_plan_below_the_smallest_choice() -> None:
    result = CliRunner().invoke(
        app, ["plan", str(PICO), "--bits", "2", *TEXT, "--candidates", "int4"]
    )
    assert result.exit_code == 1
    assert "below the smallest choice" in result.output
