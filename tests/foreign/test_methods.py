"""Every quantization method that transformers knows is read, or refused by name with a remedy."""

import json
import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import save_file
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

import anybit
from anybit.checkpoint.foreign.convert import convert_checkpoint
from anybit.checkpoint.foreign.methods import ALIASES, METHODS, REFUSED
from anybit.cli.app import app
from anybit.core.scheme import parse_scheme

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", AUTO_QUANTIZATION_CONFIG_MAPPING)
def test_transformers_methods_are_known(method: str) -> None:
    name = re.sub("_[48]bit$", "", method)  # bitsandbytes has one name in files, and two here
    assert name in METHODS or name in REFUSED or name == "anybit"


def test_each_method_has_a_reader_or_a_reason() -> None:
    assert not METHODS.keys() & REFUSED.keys()
    assert set(ALIASES.values()) <= REFUSED.keys()
    for module in METHODS.values():
        assert callable(import_module(f"anybit.checkpoint.foreign.{module}").layers)


def folder(place: Path, quantization: Any, *, codes: bool = True) -> Path:
    """A model that says how it is quantized; its one tensor may be codes."""
    source = place / "source"
    source.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32}
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    dtype = torch.uint8 if codes else torch.float32
    save_file({"model.norm.weight": torch.ones(32, dtype=dtype)}, source / "model.safetensors")
    return source


@pytest.mark.parametrize("method", [*REFUSED, *ALIASES])
def test_refusals(method: str, tmp_path: Path) -> None:
    """By the command that converts and by what loads models."""
    source = folder(tmp_path, {"quant_method": method})
    why, remedy = REFUSED[ALIASES.get(method, method)]
    said = re.escape(f"{method!r}, which cannot be read: {why}; {remedy}") + "$"
    with pytest.raises(ValueError, match=said):
        convert_checkpoint(source, tmp_path / "out")
    with pytest.raises(ValueError, match=said):
        anybit.load(source)


@pytest.mark.parametrize("method", REFUSED)
def test_the_remedies_are_commands(method: str) -> None:
    found = re.findall(r"anybit (\w+) ([^;`]+)$", REFUSED[method][1])
    for command, words in found:
        context = COMMANDS[command].make_context(command, shlex.split(words))
        for scheme in context.params.get("formats") or ():
            parse_scheme(scheme)
    assert found or "`anybit convert` reads" in REFUSED[method][1]


def test_an_unknown_method(tmp_path: Path) -> None:
    source = folder(tmp_path, {"quant_method": "gtpq"})
    with pytest.raises(ValueError, match=r"known: gptq, .*did you mean gptq.*anybit quantize"):
        convert_checkpoint(source, tmp_path / "out")


def test_unquantized_weights_of_a_refused_method_are_loaded(tmp_path: Path) -> None:
    """As transformers' `nvfp4` says of weights that it rounds while it loads them."""
    source = folder(tmp_path, {"quant_method": "nvfp4"}, codes=False)
    with pytest.raises(ValueError, match="quantized with nvfp4, not a checkpoint of anybit"):
        anybit.load(source)


def test_a_folder_of_ctranslate2(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text('{"unk_token": "<unk>", "bos_token": "<s>"}')
    (tmp_path / "source" / "model.bin").write_bytes(b"\x06\x00\x00\x00")
    (tmp_path / "source" / "vocabulary.json").write_text("[]")
    said = "'ctranslate2', which cannot be read: model.bin"
    with pytest.raises(ValueError, match=said):
        convert_checkpoint(tmp_path / "source", tmp_path / "out")
    with pytest.raises(ValueError, match=said):
        anybit.load(tmp_path / "source")
