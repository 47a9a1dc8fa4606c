"""Hostile model directories: one line at once, nothing left behind, nothing opened outside."""

import json
import pickle
import struct
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from anybit.cli.app import app
from anybit.files.safetensors import read_header
from tests.tiny import dense

LIMIT = 20.0  # seconds of the processor, for what takes tenths of one unless it has no end


def edit(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def header(path: Path, **changes: object) -> None:
    """Rewrite entries of the safetensors header."""
    file = path / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    head = json.loads(data[8 : 8 + length])
    for name, entry in changes.items():
        head[name] |= entry
    text = json.dumps(head).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


class Bomb:
    """A pickle that writes a file when it is opened."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


Q = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


def damage(path: Path, how: str) -> None:
    if how == "pickle":
        (path / "model.safetensors").unlink()
        (path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(path.parent / "opened")))
    elif how == "outside":
        (path / "model.safetensors").rename(path.parent / "secret.safetensors")
        weight_map = {Q: "../secret.safetensors"}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    elif how == "short index":
        weight_map = dict.fromkeys(read_header(path / "model.safetensors"), "all.safetensors")
        (path / "model.safetensors").rename(path / "all.safetensors")
        del weight_map[Q]
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    elif how == "overlap":
        header(path, **{Q: {"data_offsets": [0, 4]}})
    elif how == "twice":
        data = (path / "model.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        text = data[8 : 8 + length].decode().rstrip()
        text = f"{text[:-1]}, {json.dumps(Q)}: {json.dumps(json.loads(text)[Q])}}}"
        head = struct.pack("<Q", len(text)) + text.encode()
        (path / "model.safetensors").write_bytes(head + data[8 + length :])
    elif how == "huge offsets":
        header(path, **{Q: {"data_offsets": [1 << 70, (1 << 70) + 4]}})
    elif how == "whole numbers":
        header(path, **{Q: {"dtype": "I16"}})
    elif how == "other shape":
        shape = read_header(path / "model.safetensors")[NORM].shape
        header(path, **{NORM: {"shape": [1, *shape]}})
    elif how == "deep":
        (path / "config.json").write_text("[" * 100_000)
    else:
        raise AssertionError(how)


CONFIGS = [
    ({"hidden_size": -32}, "hidden_size is -32; it must be a whole number"),
    ({"hidden_size": 10**15}, r"hidden_size is 1000000000000000, but the files hold"),
    ({"hidden_size": None}, "transformers cannot build the model"),
    ({"hidden_size": "32"}, "hidden_size is '32'; it must be a whole number"),
    ({"num_attention_heads": 0}, "transformers cannot build the model"),
    ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, but the files hold 21 tensors"),
    ({"num_experts": 10**6}, "num_experts is 1000000, but the files hold"),
    (
        {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": 60000,  # all in one tensor
        },
        "describes a model of more than 1336 tensors, but the files hold 21 in 213632 bytes",
    ),
    (
        {
            "architectures": ["SwitchTransformersForConditionalGeneration"],
            "model_type": "switch_transformers",
            "num_experts": 60000,  # a module for each
        },
        "describes a model of more than 1336 tensors",
    ),
    ({"vocab_size": 10**12}, "vocab_size is 1000000000000, but the files hold"),
    ({"max_position_embeddings": 10**18}, "max_position_embeddings is 10"),
    ({"rope_parameters": {"rope_type": "magic"}}, "magic"),
    ({"architectures": ["Trainer"]}, "'Trainer', which is no model of transformers"),
    ({"architectures": "LlamaForCausalLM"}, "not a list of names"),
    ({"transformers_weights": "other.safetensors"}, "transformers_weights is 'other.safetensors'"),
    ({"model_type": "nobody"}, "nobody"),
    ({"quantization_config": "x"}, "quantization_config is 'x', and must be an object"),
    ({"quantization_config": []}, "quantization_config is [], and must be an object"),
]
FILES = [
    ("pickle", "no safetensors, only pytorch_model.bin"),
    ("outside", "names '../secret.safetensors', which is not a file of its directory"),
    ("short index", "no file holds 1 tensors of the model"),
    ("overlap", "damaged safetensors header"),
    ("twice", f"damaged safetensors header ({Q} stands in it twice)"),
    ("huge offsets", "damaged safetensors header"),
    ("whole numbers", f"{Q}: config.json asks for floats of shape (64, 64), model.safetensors"),
    ("other shape", f"{NORM}: config.json asks for floats of shape (64,), model.safetensors holds"),
    ("deep", "not valid JSON"),
]


def refused(path: Path, message: str) -> None:
    """Every command on a directory ends in one line, within the limit, and writes nothing."""
    before = sorted(path.parent.rglob("*"))
    for command in (
        ["quantize", str(path), "--format", "int4", "--out", str(path.parent / "out")],
        ["generate", str(path), "hello"],
    ):
        start = time.process_time()
        result = CliRunner().invoke(app, command)
        seconds = time.process_time() - start
        assert result.exit_code == 1, (command, result.output)
        assert len(result.output.strip().splitlines()) == 1, result.output
        assert message in result.output
        assert len(result.output) < 1000
        assert seconds < LIMIT
        assert sorted(path.parent.rglob("*")) == before


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    import transformers

    assert transformers.LlamaForCausalLM is not None


@pytest.mark.parametrize(("changes", "message"), CONFIGS, ids=[str(c)[:60] for c, _ in CONFIGS])
def test_configs(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    source = dense(tmp_path / "dense")
    edit(source, **changes)
    refused(source, message)


def test_a_number_of_experts_that_a_dense_model_states(tmp_path: Path) -> None:
    """As Doge's does, which has a mixture of them in other sizes."""
    source = dense(tmp_path / "dense")
    edit(source, num_experts=16384)
    command = ["quantize", str(source), "--format", "int8", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(("how", "message"), FILES, ids=[how for how, _ in FILES])
def test_files(tmp_path: Path, how: str, message: str) -> None:
    source = dense(tmp_path / "dense")
    damage(source, how)
    refused(source, message)
