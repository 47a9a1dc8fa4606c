"""EXL3 by its published layout, decoded here bit by bit, and layers that its own kernels made.

`exl3.safetensors` holds layers of 128x128: Gaussian numbers that the kernels of exllamav3 1.4.1
quantized and packed on an H200. Its metadata has, by layer, the SHA-256 of the weight (K, N) in
fp16 that `reconstruct` made of it, before rotation; some layers have the whole `weight`, which
`reconstruct_had` rotated in fp16.
"""

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import anybit
from anybit.checkpoint.foreign import exl3
from anybit.checkpoint.foreign.base import Given, Layer
from anybit.checkpoint.foreign.convert import convert_checkpoint
from anybit.core.packed import Packed
from anybit.errors import InvalidInput
from anybit.files.safetensors import read_header
from anybit.nn.model import quantized_layers
from tests.tiny import dense, logits

N, K = 128, 256
MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}


def tensors_of(bits: int, code: str, n: int = N, k: int = K) -> dict[str, np.ndarray]:
    random = np.random.default_rng(bits)
    out = {
        "trellis": random.integers(-(2**15), 2**15, (k // 16, n // 16, 16 * bits), np.int16),
        "suh": (random.choice([-1, 1], k) * random.uniform(0.5, 2, k)).astype(np.float16),
        "svh": (random.choice([-1, 1], n) * random.uniform(0.01, 0.02, n)).astype(np.float16),
    }
    if code in MULTIPLIERS:
        out[code] = np.array(MULTIPLIERS[code], np.uint32).view(np.int32)
    return out


def layer_of(place: Path, tensors: dict[str, Any]) -> Layer:
    named = {f"a.b.{name}": torch.from_numpy(array) for name, array in tensors.items()}
    save_file(named, place / "model.safetensors")
    found = exl3.layers(Given({}, read_header(place / "model.safetensors")))
    assert set(found["a.b"].tensors) == set(named)
    return found["a.b"]


def half(bits: int) -> np.float16:
    return np.float16(np.array([bits], np.uint16).view(np.float16)[0])


def value(state: int, code: str) -> np.float16:
    """`decode_3inst` of exllamav3's codebook.cuh."""
    if code == "mul1":
        x = state * 0x83DCD12D & 0xFFFFFFFF
        total = 1024 + sum(x >> 8 * i & 255 for i in range(4))
        return np.float16(float(total) * float(half(0x1EEE)) + float(half(0xC931)))
    x = state * 0xCBAC1FED if code == "mcg" else state * 89226354 + 64248484
    x = x & 0x8FFF8FFF ^ 0x3B603B60
    return half(x & 0xFFFF) + half(x >> 16 & 0xFFFF)


def inner(trellis: np.ndarray, bits: int, code: str) -> np.ndarray:
    """The weight (K, N) before rotation, as `reconstruct_kernel` puts it together."""
    out = np.zeros((K, N), np.float32)
    for i in range(K // 16):
        for j in range(N // 16):
            halves = trellis[i, j].view(np.uint16).reshape(-1, 2)[:, ::-1].flatten()
            string = "".join(f"{int(word):016b}" for word in halves)
            for t in range(256):
                end = (t + 1) * bits
                window = (string + string)[end + 256 * bits - 16 : end + 256 * bits]
                lane, own = t // 8, t % 8
                row = lane % 4 * 2 + own % 2 + (8 if own & 2 else 0)
                column = lane // 4 + (8 if own & 4 else 0)
                out[i * 16 + row, j * 16 + column] = value(int(window, 2), code)
    return out


def hadamard(size: int) -> np.ndarray:
    """(size, size) of blocks of 128."""
    signs = [[(-1) ** (i & j).bit_count() for j in range(128)] for i in range(128)]
    return np.kron(np.eye(size // 128), np.array(signs) / 128**0.5)


@pytest.mark.parametrize(("bits", "code"), [(2, "mul1"), (3, "mcg"), (5, "3inst"), (8, "mcg")])
def test_weights_are_those_of_the_published_layout(bits: int, code: str, tmp_path: Path) -> None:
    tensors = tensors_of(bits, code)
    layer = layer_of(tmp_path, tensors)
    packed = layer.read()
    assert isinstance(packed, Packed)
    assert layer.format is not None
    assert (layer.format.bits, layer.format.rotate, layer.shape) == (bits, "kn", (N, K))
    v = inner(tensors["trellis"], bits, code)
    again = Packed.from_tensors(layer.format, layer.shape, packed.tensors())
    assert torch.equal(again.values(), torch.from_numpy(v.T.copy()))
    w = hadamard(K) @ v * tensors["suh"].astype(np.float64)[:, None]
    w = w @ hadamard(N) * tensors["svh"].astype(np.float64)
    assert np.allclose(again.dequantize().numpy(), w.T, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["3inst2", "mcg2", "mcg3", "mcg4", "mul12", "mul13", "mul14"])
def test_weights_are_those_of_exllamav3_s_kernels(name: str) -> None:
    path = Path(__file__).parent / "exl3.safetensors"
    stored = {key: s for key, s in read_header(path).items() if not key.endswith(".weight")}
    layer = exl3.layers(Given({}, stored))[name]
    packed = layer.read()
    assert isinstance(packed, Packed)
    values = packed.values().T.contiguous().half()
    with safe_open(path, "pt") as file:
        digest = file.metadata()[name]
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest() == digest
    whole = load_file(path).get(f"{name}.weight")
    if whole is not None:  # rounded to fp16 after each of two transforms
        got, want = packed.dequantize().T, whole.float()
        assert (got - want).norm() < 1e-3 * want.norm()
        assert (got - want).abs().max() < 5e-3 * want.abs().max()


def test_signs_of_one_bit(tmp_path: Path) -> None:
    tensors = tensors_of(2, "3inst")
    words = {}
    for name in ("su", "sv"):
        negative = tensors.pop(f"{name}h") < 0
        words[name] = np.packbits(negative, bitorder="little").view(np.int16)
    packed = layer_of(tmp_path, tensors | words).read()
    assert isinstance(packed, Packed)
    for name, grid in (("su", "rotate_in"), ("sv", "rotate_out")):
        bits = np.unpackbits(words[name].view(np.uint8), bitorder="little")
        assert np.array_equal(packed.grid[grid].flatten().numpy(), 1 - 2.0 * bits)


def test_a_model_and_its_head_are_converted(tmp_path: Path) -> None:
    """Layers of different bits and codes, and a head beside tied embeddings."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
    source = dense(tmp_path / "source", tied=True, num_hidden_layers=1, **sizes)
    tensors = load_file(source / "model.safetensors")
    kinds = itertools.cycle([(2, "mcg"), (3, "mul1"), (4, "3inst")])
    names = [name for name in tensors if "proj" in name]
    for name in (*names, "lm_head.weight"):
        shape = tensors.pop(name, torch.empty(256, 128)).shape
        layer = name.removesuffix(".weight")
        made = tensors_of(*next(kinds), *shape)
        tensors |= {f"{layer}.{key}": torch.from_numpy(value) for key, value in made.items()}
    save_file(tensors, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "exl3", "bits": 3.0, "head_bits": 3}
    (source / "config.json").write_text(json.dumps(config))
    report = convert_checkpoint(source, tmp_path / "out")
    assert len(report.formats) == len(names) + 1
    assert not report.decoded
    found = exl3.layers(Given({}, read_header(source / "model.safetensors")))
    model = anybit.load(tmp_path / "out")
    layers = dict(quantized_layers(model))
    assert set(layers) == set(found)
    for name, layer in found.items():
        packed = layer.read()
        assert isinstance(packed, Packed)
        assert torch.equal(layers[name].dequantize(), packed.dequantize())
    embedded = model.get_input_embeddings().weight
    assert torch.equal(embedded, tensors["model.embed_tokens.weight"].to(embedded.dtype))
    assert torch.isfinite(logits(model)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mcg": np.array(5, np.int32)}, "0x5 is no known code"),
        ({"trellis": np.zeros((16, 8, 40), np.int16)}, "40 words a tile"),
        ({"trellis": np.zeros((16, 4, 32), np.int16)}, r"\(64, 256\) has no blocks of 128"),
        ({"suh": np.zeros(100, np.float16)}, "expected float16"),
    ],
)
def test_what_is_no_exl3(changes: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=message):
        layer_of(tmp_path, tensors_of(2, "3inst") | changes)
