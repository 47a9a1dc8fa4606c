"""MLX's experts, and layouts of 8 bits, packed here step by step without the tools' or our code."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import anybit
from anybit.checkpoint.foreign.compressed_tensors import group_of
from anybit.checkpoint.foreign.convert import convert_checkpoint
from anybit.core.packed import Packed
from anybit.files.safetensors import WEIGHTS
from tests.foreign.make import FIXTURES
from tests.foreign.test_errors import refused
from tests.foreign.test_formulas import RANDOM, read, same

N, K = 64, 128


def as_eetq_stores(q: np.ndarray) -> np.ndarray:
    """int8 (N, K) -> (K, N): the four steps of FasterTransformer's weight preprocessing."""
    n, k = q.shape
    rows = q.T.copy()
    for base in range(0, k, 16):
        tile = rows[base : base + 16].copy()
        for t in range(16):
            rows[base + t] = tile[8 * (t % 4 // 2) + t % 2 + 2 * (t // 4)]
    columns = rows.T.reshape(n, k // 4, 4)  # words of 4 bytes
    out = np.zeros((n // 2, k // 4 * 2, 4), dtype=np.int16)
    for column in range(n):
        for word in range(k // 4):
            tile, within = divmod(word, 16)
            out[column // 2, 32 * tile + 16 * (column % 2) + within] = columns[column, word]
    out = (out + 128).astype(np.uint8)
    out[..., [1, 2]] = out[..., [2, 1]]
    return out.reshape(k, n).view(np.int8)


def test_eetq(tmp_path: Path) -> None:
    q = RANDOM.integers(-128, 128, (N, K)).astype(np.int8)
    scale = RANDOM.uniform(0.01, 0.1, N).astype(np.float16)
    tensors = {"weight": as_eetq_stores(q), "weight_scales": scale}
    layer = read("eetq", {}, tmp_path, tensors)
    same(layer, q * scale.astype(np.float32)[:, None], "int8")
    tensors["weight"] = tensors["weight"][:96]
    with pytest.raises(ValueError, match=r"\(96, 64\) is no whole number of 64 inputs"):
        read("eetq", {}, tmp_path, tensors)


def test_fbgemm_fp8(tmp_path: Path) -> None:
    weight = torch.randint(-120, 120, (N, K)).float().div(16).to(torch.float8_e4m3fn)
    scale = torch.rand(N, 1) / 50 + 0.01
    config = {"activation_scale_ub": 1200.0}
    layer = read("fbgemm_fp8", config, tmp_path, {"weight": weight, "weight_scale": scale})
    same(layer, (weight.float() * scale).numpy(), "fp8")
    assert layer.scheme == "fp8@fp8"
    assert layer.note == "activations were clipped at 1200.0 there, and are not here"


def test_bitsandbytes_int8(tmp_path: Path) -> None:
    """Its own weights, q * SCB * (1 / 127) in fp32, differ by the order of their roundings."""
    q = RANDOM.integers(-127, 128, (N, K)).astype(np.int8)
    largest = RANDOM.uniform(0.01, 0.1, N).astype(np.float32)
    tensors = {"weight": q, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    layer = read("bitsandbytes", {"load_in_8bit": True}, tmp_path, tensors)
    same(layer, q * (largest / np.float32(127))[:, None], "int8")
    packed = layer.read()
    assert isinstance(packed, Packed)
    tool = torch.from_numpy(q * largest[:, None] * np.float32(7.874015718698502e-3))
    torch.testing.assert_close(packed.dequantize(), tool, rtol=4 * 2.0**-24, atol=0)
    assert "outliers" in layer.note
    tensors["weight_format"] += 2
    with pytest.raises(ValueError, match=r"weight_format: is 2, .*save it again"):
        read("bitsandbytes", {"load_in_8bit": True}, tmp_path, tensors)


def test_mxfp8(tmp_path: Path) -> None:
    """As transformers writes it: fp8 with e8m0 bytes for every 32 columns."""
    weight = torch.randint(-120, 120, (N, K)).float().div(16).to(torch.float8_e4m3fn)
    power = torch.randint(100, 130, (N, K // 32), dtype=torch.uint8)
    tensors = {"weight": weight, "weight_scale_inv": power}
    layer = read("mxfp8", {"weight_block_size": [1, 32]}, tmp_path, tensors)
    wide = torch.exp2(power.float() - 127).repeat_interleave(32, 1)
    same(layer, (weight.float() * wide).numpy(), "mxfp8")


def test_experts_of_mlx(tmp_path: Path) -> None:
    """A tensor of all experts becomes one layer for each, under the published names."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, vocab_size=32, num_experts=4,
        num_experts_per_tok=2, decoder_sparse_step=1, mlp_only_layers=[], pad_token_id=0,
    )  # fmt: skip
    dense = Qwen3MoeForCausalLM(config)
    dense.save_pretrained(tmp_path / "dense")
    state = load_file(tmp_path / "dense" / WEIGHTS)
    wanted = {}
    for projection, columns in (("gate_proj", 64), ("up_proj", 64), ("down_proj", 32)):
        stack = []
        for e in range(4):
            name = f"model.layers.0.mlp.experts.{e}.{projection}"
            rows = len(state.pop(f"{name}.weight"))
            q = torch.randint(0, 16, (rows, columns))
            scale, shift = torch.rand(rows, columns // 32), torch.rand(rows, columns // 32)
            scale, shift = scale.div(50).half(), shift.sub(0.5).half()
            words = sum(q[:, i::8] << 4 * i for i in range(8))
            factor, base = (t.float().repeat_interleave(32, 1) for t in (scale, shift))
            wanted[name] = q * factor + base
            stack.append((torch.as_tensor(words).to(torch.uint32), scale, shift))
        for key, held in zip(("weight", "scales", "biases"), zip(*stack, strict=True), strict=True):
            state[f"model.layers.0.mlp.switch_mlp.{projection}.{key}"] = torch.stack(held)
    source = tmp_path / "source"
    source.mkdir()
    save_file(state, source / WEIGHTS)
    text = json.loads((tmp_path / "dense" / "config.json").read_text())
    text["quantization"] = {"group_size": 32, "bits": 4}
    (source / "config.json").write_text(json.dumps(text))
    report = convert_checkpoint(source, tmp_path / "out")
    assert report.formats == dict.fromkeys(wanted, "q4_1")
    model = anybit.load(tmp_path / "out")
    for name, weight in wanted.items():
        assert torch.equal(model.get_submodule(name).dequantize(), weight)


@pytest.mark.parametrize(
    ("fixture", "file", "change", "message"),
    [
        ("mlx", "config.json", {"mode": "nvfp4"}, "mode is 'nvfp4', and only 'affine'"),
        ("mlx", "config.json", {"group_size": 48}, "have no groups of 48"),
        ("mlx", "config.json", {"bits": 7}, "bits is 7, and only 4, 2"),
        ("metal", "config.json", {"bits": 3}, "metal: bits is 3"),
        ("gemma", "config.json", {"num_bits": 3}, "num_bits is 3"),
        ("gemma", "config.json", {"module_quant_configs": {"(": {}}}, r"'\(\?P<g0>\(\)': missing"),
        ("quanto", "quanto_qmap.json", {}, "quanto_qmap.json does not name model.layers.0"),
    ],
)
def test_settings_that_do_not_fit(
    fixture: str, file: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / fixture, source)
    text = json.loads((source / file).read_text())
    if fixture == "quanto":
        text = change
    elif fixture == "mlx":
        text["quantization"] |= change
    else:
        text["quantization_config"] |= change
    (source / file).write_text(json.dumps(text))
    refused(source, message)


@pytest.mark.parametrize("zero", [False, True])
def test_one_bit_of_compressed_tensors(zero: bool, tmp_path: Path) -> None:
    """Its own packing and decoding: of 1 bit, the levels are -1 and 0, less the zero point."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    q = torch.randint(-1, 1, (N, K), dtype=torch.int8)
    scale = torch.rand(N, K // 32).half()
    weights = {"num_bits": 1, "type": "int", "strategy": "group", "group_size": 32}
    outputs = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
    config = {
        "format": "pack-quantized",
        "version": "0.20.0",
        "config_groups": {
            "a": {"targets": ["Linear"], "weights": weights, "output_activations": outputs}
        },
    }
    tensors = {
        "weight_packed": pack_to_int32(q, 1),
        "weight_scale": scale,
        "weight_shape": torch.tensor([N, K]),
        "output_scale": torch.tensor([0.1]),
    }
    points = torch.zeros(N, K // 32, dtype=torch.int8)
    if zero:
        points = torch.randint(-1, 1, points.shape, dtype=torch.int8)
        tensors["weight_zero_point"] = pack_to_int32(points, 1, packed_dim=0)
    layer = read("compressed-tensors", config, tmp_path, tensors)
    wide = [t.float().repeat_interleave(32, 1) for t in (points, scale)]
    same(layer, ((q.float() - wide[0]) * wide[1]).numpy(), "int1:group=32,zero")
    assert layer.note == "outputs were quantized by fixed scales there, and are not here"


def test_targets_by_class_of_compressed_tensors() -> None:
    linear, words = {"targets": ["Linear"]}, {"targets": ["Embedding"]}
    for name, group in (("model.embed_tokens", words), ("wte", words), ("h.0.fc", linear)):
        assert group_of(name, name, [linear, words]) == group
    assert group_of("model.embed_tokens", "model.embed_tokens", [linear]) == linear
