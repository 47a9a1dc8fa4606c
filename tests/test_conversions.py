"""Tensors that transformers makes of stored ones, some of which a checkpoint may not have."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import anybit
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.files.safetensors import WEIGHTS
from anybit.nn.model import dense_layers, quantized_layers
from tests.models.zoo import Model
from tests.tiny import same_state

ARCHITECTURE = "Inkling2LoopForCausalLM"
pytestmark = pytest.mark.skipif(
    not hasattr(transformers, ARCHITECTURE), reason="needs transformers 5.24"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("loop") / "source"
    Model(ARCHITECTURE).make().save_pretrained(place)
    return place


def test_scales_that_dense_weights_do_without(source: Path, tmp_path: Path) -> None:
    """Gates are stored as `controllers.k.down_weight`, which codes cannot be called after."""
    want = anybit.quantize_(Model(ARCHITECTURE).type.from_pretrained(source), "fp6")
    quantize_checkpoint(source, tmp_path / "out", "fp6")
    assert any("message_gate" in name for name, _ in quantized_layers(want))
    same_state(anybit.load(tmp_path / "out"), want)


def nvfp4(tensors: dict[str, Tensor], name: str, experts: int, n: int, k: int) -> None:
    tensors[name] = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8)
    tensors[f"{name}_scale"] = (torch.rand(experts, n, k // 16) + 1).to(torch.float8_e4m3fn)
    tensors[f"{name}_amax"] = torch.rand(experts) + 1
    tensors[f"{name}_outer_scale_denominator"] = torch.tensor(2688.0)


def mxfp8(tensors: dict[str, Tensor], name: str, experts: int, n: int, k: int) -> None:
    tensors[name] = torch.randn(experts, n, k).to(torch.float8_e4m3fn)
    tensors[f"{name}_scale"] = torch.randint(110, 125, (experts, n, k // 32), dtype=torch.uint8)


@pytest.mark.parametrize("store", [nvfp4, mxfp8])
def test_codes_that_transformers_decodes(source: Path, tmp_path: Path, store: object) -> None:
    """Experts of the original files; in one block they stay what they are."""
    assert callable(store)
    torch.manual_seed(0)
    place = tmp_path / "source"
    Model(ARCHITECTURE).type.from_pretrained(source).save_pretrained(place)
    tensors = load_file(place / WEIGHTS)
    for name in [name for name in tensors if "experts.w" in name]:
        store(tensors, name, *tensors[name].shape)
    save_file(tensors, place / WEIGHTS, metadata={"format": "pt"})
    dense = Model(ARCHITECTURE).type.from_pretrained(place)
    plan = {"*": "int8", "*.layers.0.*": None}
    want = anybit.quantize_(dense, plan)
    quantize_checkpoint(place, tmp_path / "out", plan)
    assert not any("layers.0." in name for name, _ in quantized_layers(want))
    found = anybit.load(tmp_path / "out")
    assert dense_layers(found).keys() == dense_layers(want).keys()
    same_state(found, want)
