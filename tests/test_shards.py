"""Which files a directory's tensors are read from."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from anybit.checkpoint.stream import quantize_checkpoint
from anybit.errors import InvalidInput
from anybit.files.safetensors import INDEX, WEIGHTS, stored_tensors
from tests import tiny

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Tensors "a", 1, and "b", 2, in two shards; the second one has a "c", which is not listed."""
    save_file({"a": torch.ones(1)}, tmp_path / ONE)
    save_file({"c": torch.full((1,), 3.0), "b": torch.full((1,), 2.0)}, tmp_path / TWO)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": ONE, "b": TWO}}))
    return tmp_path


def numbers(directory: Path) -> dict[str, float]:
    return {name: float(stored.read()) for name, stored in stored_tensors(directory).items()}


def test_the_index_says_which_tensors_count(sharded: Path) -> None:
    assert numbers(sharded) == {"a": 1, "b": 2}


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    """transformers would take that of the last file, and other readers that of the index."""
    save_file({"a": torch.full((1,), 3.0), "b": torch.full((1,), 2.0)}, sharded / TWO)
    with pytest.raises(InvalidInput, match=f"{ONE} and {TWO} both hold 'a', .*save the model anew"):
        stored_tensors(sharded)


def test_an_old_index_beside_the_whole(sharded: Path) -> None:
    """transformers removes old shards and leaves their index, which it does not read then."""
    save_file({"a": torch.full((1,), 4.0)}, sharded / WEIGHTS)
    (sharded / ONE).unlink()
    assert numbers(sharded) == {"a": 4}


def test_files_of_other_names(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    with pytest.raises(FileNotFoundError, match=f"such as {ONE}, and the index is missing"):
        stored_tensors(sharded)
    for path in sharded.glob("*-of-*"):
        path.rename(sharded / path.name.partition("-of-")[2])
    with pytest.raises(InvalidInput, match=f"neither {WEIGHTS} nor {INDEX}, only .*; rename it"):
        stored_tensors(sharded)


def test_an_adapter_beside_a_model(tmp_path: Path) -> None:
    """transformers would add it, and what reads the model's files alone would not."""
    dense = tiny.dense(tmp_path / "dense")
    (dense / "adapter_config.json").write_text("{}")
    with pytest.raises(InvalidInput, match=r"adapter_config\.json lies beside the model"):
        quantize_checkpoint(dense, tmp_path / "out", "int8")
    assert {path.name for path in tmp_path.iterdir()} == {"dense"}
