"""Integers of tools that also store floats: ModelOpt, torchao, Quark and AutoRound, by formula."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import anybit
from anybit.checkpoint.foreign.convert import convert_checkpoint
from tests.foreign.test_formulas import RANDOM, read, same, scales, stream
from tests.tiny import dense

N, K, GROUP = 64, 96, 32


def numbers(bits: int, *shape: int) -> np.ndarray:
    """Signed."""
    return RANDOM.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), shape)


@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", "W4A8_AWQ", "MIXED_PRECISION"])
def test_int4_of_modelopt(algorithm: str, tmp_path: Path) -> None:
    """Rows 2 i and 2 i + 1 share bytes."""
    q, (scale, s) = numbers(4, N, K), scales(N, K // GROUP, dtype=torch.bfloat16)
    packed = (q[::2] & 15 | (q[1::2] & 15) << 4).astype(np.uint8)
    tensors: dict[str, Any] = {"weight": packed, "weight_scale": scale}
    if algorithm == "W4A8_AWQ":
        tensors |= {"weight_scale_2": torch.tensor(0.01), "input_scale": torch.tensor(0.1)}
    config: dict[str, Any] = {"quant_algo": algorithm}
    if algorithm == "MIXED_PRECISION":
        config["quantized_layers"] = {"a.b": {"quant_algo": "W4A16_AWQ", "group_size": GROUP}}
    layer = read("modelopt", config, tmp_path, tensors)
    same(layer, q.astype(np.float32) * s.repeat(GROUP, 1), f"int4:group={GROUP}")
    assert ("stay in 16 bits" in layer.note) == (algorithm == "W4A8_AWQ")


@pytest.mark.parametrize("algorithm", ["W8A16", "W8A8_SQ_PER_CHANNEL"])
def test_int8_of_modelopt(algorithm: str, tmp_path: Path) -> None:
    q, (scale, s) = numbers(8, N, K), scales(N, dtype=torch.float32)
    tensors = {"weight": q.astype(np.int8), "weight_scale": scale}
    layer = read("modelopt", {"quant_algo": algorithm}, tmp_path, tensors)
    same(layer, q.astype(np.float32) * s[:, None], "int8")


def test_scales_of_inputs_join_the_weight(tmp_path: Path) -> None:
    q, (scale, s), (inputs, i) = numbers(8, N, K), scales(N), scales(K)
    tensors = {"weight": q.astype(np.int8), "weight_scale": scale, "pre_quant_scale": inputs}
    layer = read("modelopt", {"quant_algo": "W8A16"}, tmp_path, tensors)
    found = layer.read()
    assert layer.format is None
    assert "pre_quant_scale" in layer.reason
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, torch.from_numpy(q.astype(np.float32) * s[:, None] * i))
    tensors["pre_quant_scale"] = scales(K + 1)[0]
    with pytest.raises(ValueError, match=r"pre_quant_scale: \(97,\) are no scales of 96 inputs"):
        read("modelopt", {"quant_algo": "W8A16"}, tmp_path, tensors)


def test_scales_that_fit_no_integers_of_modelopt(tmp_path: Path) -> None:
    tensors = {"weight": numbers(8, N, K).astype(np.int8), "weight_scale": scales(N + 1)[0]}
    with pytest.raises(ValueError, match=r"scales of \(65,\) do not fit integers of 8 bits"):
        read("modelopt", {"quant_algo": "W8A16"}, tmp_path, tensors)


def tiles(codes: np.ndarray) -> np.ndarray:
    """PyTorch's `matrix_to_m16n8k16_Bint4_layout` for eight inner tiles, word by word."""
    n, k = codes.shape
    out = np.zeros((n // 8, k // 128, 32, 4), np.uint32)
    for row_tile, outer, t, word in np.ndindex(*out.shape):
        row, first = row_tile * 8 + t // 4, outer * 128 + word * 32 + t % 4 * 2
        columns = [first + c for c in (0, 8, 16, 24, 1, 9, 17, 25)]
        eight = codes[row, columns].astype(np.uint32)
        out[row_tile, outer, t, word] = sum(int(c) << 4 * i for i, c in enumerate(eight))
    return out.view(np.int32)


@pytest.mark.parametrize("layout", ["pairs", "tiles"])
@pytest.mark.parametrize("shift", [False, True])
def test_int4_of_torchao(layout: str, shift: bool, tmp_path: Path) -> None:
    n, k = 16, 256
    q, groups = numbers(4, n, k), k // GROUP
    (scale, s), (zero, z) = (scales(groups, n, dtype=torch.bfloat16) for _ in range(2))
    if not shift:
        zero, z = torch.zeros_like(zero), np.zeros_like(z)
    tensors: dict[str, Any]
    if layout == "pairs":
        data = (q[:, ::2] & 15 | (q[:, 1::2] & 15) << 4).astype(np.uint8)
        tensors = {"_weight_qdata": data, "_weight_scale": scale, "_weight_zero_point": zero}
    else:
        both = torch.stack((scale, zero), -1)
        tensors = {"_weight_qdata": tiles(q + 8), "_weight_scale_and_zero": both}
    layer = read("torchao", {}, tmp_path, tensors)
    wide = [t.T.repeat(GROUP, 1) for t in (s, z)]
    weight = q.astype(np.float32) * wide[0] + wide[1]
    if not shift:
        same(layer, weight, f"int4:group={GROUP}")
        return
    found = layer.read()
    assert layer.format is None
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, torch.from_numpy(weight))


def test_tiles_of_torchao_are_filled_up(tmp_path: Path) -> None:
    """12 rows to 16 and 96 columns to 1,024; nothing else is cut off."""
    n, k, rows, columns = 12, 96, 16, 1024
    q, (scale, s) = numbers(4, rows, columns), scales(columns // GROUP, rows, dtype=torch.bfloat16)
    both = torch.stack((scale, torch.zeros_like(scale)), -1)
    tensors = {"_weight_qdata": tiles(q + 8), "_weight_scale_and_zero": both}
    layer = read("torchao", {}, tmp_path, tensors)
    assert layer.shape == (rows, columns)
    assert layer.cut is not None
    weight = q.astype(np.float32) * s.T.repeat(GROUP, 1)
    same(layer.cut((n, k)), weight[:n, :k], f"int4:group={GROUP}")
    for other in ((8, k), (n, 1025), (n, 80), (17, k)):  # less was added, or groups end elsewhere
        assert layer.cut(other).shape == (rows, columns)


def test_a_model_in_filled_up_tiles_of_torchao(tmp_path: Path) -> None:
    """One layer of 64 columns of 1,024; its own format, or another."""
    source, name = dense(tmp_path / "a"), "model.layers.0.self_attn.q_proj"
    weights = load_file(source / "model.safetensors")
    n, k = weights.pop(f"{name}.weight").shape
    q, (scale, s) = numbers(4, n, 1024), scales(1024 // GROUP, n, dtype=torch.bfloat16)
    both = torch.stack((scale, torch.zeros_like(scale)), -1)
    weights |= {
        f"{name}._weight_qdata": torch.from_numpy(tiles(q + 8)),
        f"{name}._weight_scale_and_zero": both,
    }
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "torchao", "quant_type": {}}
    (source / "config.json").write_text(json.dumps(config))
    want = torch.from_numpy(q.astype(np.float32) * s.T.repeat(GROUP, 1))[:n, :k]
    for to, spec in ((None, f"int4:group={GROUP}"), ("int8", "int8")):
        out = tmp_path / spec
        convert_checkpoint(source, out, to=to)
        packed = anybit.load(out).get_submodule(name).packed
        assert packed.format.spec == spec
        if to is None:
            assert torch.equal(packed.dequantize(), want)


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("Float8DynamicActivationFloat8WeightConfig", "fp8@fp8"),
        ("Int8DynamicActivationInt8WeightConfig", "int8"),
        ("Float8WeightOnlyConfig", "fp8"),
    ],
)
def test_tokens_of_torchao(kind: str, scheme: str, tmp_path: Path) -> None:
    """fp8 rows; the settings of int8 weights say nothing about them."""
    data = torch.randint(1, 126, (N, K), dtype=torch.uint8).view(torch.float8_e4m3fn)
    tensors = {"_weight_qdata": data, "_weight_scale": scales(N, 1, dtype=torch.float32)[0]}
    granularity = [{"_type": "PerRow", "_data": {"dim": -1}}] * 2
    config = {"quant_type": {"default": {"_type": kind, "_data": {"granularity": granularity}}}}
    layer = read("torchao", config, tmp_path, tensors)
    assert layer.scheme == scheme.replace("int8", "fp8")
    assert ("stay in 16 bits" in layer.note) == (scheme == "int8")
    config["quant_type"] = {"default": {"_type": "FqnToConfig", "_data": config["quant_type"]}}
    assert read("torchao", config, tmp_path, tensors).scheme == "fp8"


def test_quark_needs_zero_points_of_unsigned_numbers(tmp_path: Path) -> None:
    tensors = {"weight": numbers(8, N, K).astype(np.uint8), "weight_scale": scales(N)[0]}
    weight = {"dtype": "uint8", "qscheme": "per_channel", "ch_axis": 0}
    config = {"global_quant_config": {"weight": weight}}
    with pytest.raises(ValueError, match="weight_zero_point is missing, which uint8 needs"):
        read("quark", config, tmp_path, tensors)
    tensors["weight_zero_point"] = torch.zeros(N + 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"\(72,\) do not fit \(64, 1\)"):
        read("quark", config, tmp_path, tensors)


def test_tokens_of_quark(tmp_path: Path) -> None:
    q, (scale, s) = numbers(8, N, K), scales(N)
    weight = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}
    tokens = {"dtype": "int8", "qscheme": "per_token", "is_dynamic": True, "symmetric": True}
    config = {"global_quant_config": {"weight": weight, "input_tensors": tokens}}
    layer = read("quark", config, tmp_path, {"weight": q.astype(np.int8), "weight_scale": scale})
    assert layer.scheme == "int8@int8"
    same(layer, q.astype(np.float32) * s[:, None], "int8")


@pytest.mark.parametrize(("pattern", "bits"), [(r".*\.b$", 4), ("a.b", 4), ("a.c", 8)])
def test_patterns_of_auto_round(pattern: str, bits: int, tmp_path: Path) -> None:
    q = RANDOM.integers(0, 2**bits, (N, K))
    scale, s = scales(3, N)
    tensors = {
        "qweight": stream(q, bits).T,
        "qzeros": stream(np.full((3, N), 2 ** (bits - 1)), bits),
        "scales": scale,
    }
    config = {"packing_format": "auto_round", "bits": 8, "extra_config": {pattern: {"bits": 4}}}
    weight = (q - 2 ** (bits - 1)).astype(np.float32) * s.T.repeat(GROUP, 1)
    same(read("auto-round", config, tmp_path, tensors), weight, f"int{bits}:group={GROUP}")


def test_a_pattern_that_is_none(tmp_path: Path) -> None:
    config = {"packing_format": "auto_round", "bits": 4, "extra_config": {"(": {"bits": 4}}}
    with pytest.raises(ValueError, match=r"extra_config has '\(', no pattern"):
        read("auto-round", config, tmp_path, {"qweight": torch.zeros(4, 8, dtype=torch.int32)})


def test_bytes_of_auto_round_that_are_no_floats(tmp_path: Path) -> None:
    tensors = {"weight": numbers(8, N, K).astype(np.int8), "weight_scale": scales(N)[0]}
    config = {"packing_format": "auto_round:llm_compressor", "bits": 8}
    with pytest.raises(ValueError, match="expected float8_e4m3fn or float8_e5m2"):
        read("auto-round", config, tmp_path, tensors)


QUARK = {"dtype": "uint4", "qscheme": "per_group", "ch_axis": -1}
WORDS = {"weight": torch.zeros(64, 2, dtype=torch.int32), "weight_scale": torch.ones(2, 16)}


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        (torch.tensor(300, dtype=torch.int32), "300 in 4 bits"),
        (torch.tensor(16, dtype=torch.int32), "16 in 4 bits"),
        (torch.zeros(2, 2, dtype=torch.int8), r"I8 of \(2, 2\) do not fit \(16, 2\)"),
        (torch.zeros(3, dtype=torch.int32), r"\(3,\) do not fit \(16, 2\)"),
        (torch.zeros(0, dtype=torch.int32), r"\(0,\) do not fit \(16, 2\)"),
    ],
)
def test_zero_points_of_quark_that_fit_no_weight(
    zero: torch.Tensor, message: str, tmp_path: Path
) -> None:
    config = {"global_quant_config": {"weight": QUARK}}
    with pytest.raises(ValueError, match=message):
        read("quark", config, tmp_path, WORDS | {"weight_zero_point": zero})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layer_quant_config": ["x"]}, "layer_quant_config is list, not an object"),
        ({"layer_quant_config": {"*": "int8"}}, "layer_quant_config of . is str"),
        ({"global_quant_config": {"weight": "int4"}}, "is str, not an object"),
        ({"global_quant_config": {"weight": ["int4"]}}, "is str, not an object"),
        ({"layer_type_quant_config": {"Linear": {}}}, "settings by class, cannot be read"),
    ],
)
def test_settings_of_quark_that_are_none(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        read("quark", config, tmp_path, WORDS)


@pytest.mark.parametrize("value", [float("nan"), -1.0, 0.0])
def test_scales_of_torchao_that_are_none(value: float, tmp_path: Path) -> None:
    scale = torch.full((N,), 0.5)
    scale[3] = value
    data = torch.ones(N, K, dtype=torch.int8)
    with pytest.raises(ValueError, match="1 scales are not positive and finite"):
        read("torchao", {}, tmp_path, {"_weight_qdata": data, "_weight_scale": scale})


@pytest.mark.parametrize("shape", [(0, K), (N, 0)])
def test_weights_of_nothing_are_refused(shape: tuple[int, int], tmp_path: Path) -> None:
    tensors = {"weight": torch.zeros(shape, dtype=torch.int8), "weight_scale": torch.ones(N)}
    with pytest.raises(ValueError, match="expected uint8 or int8 of shape"):
        read("modelopt", {}, tmp_path, tensors)
