"""Every layout by its published formula, packed here bit by bit, without the tools' or our code."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from anybit.checkpoint.foreign.base import Given, Layer
from anybit.checkpoint.foreign.convert import reader_of
from anybit.core.packed import Packed
from anybit.errors import InvalidInput
from anybit.files.safetensors import read_header

N, K = 64, 96
RANDOM = np.random.default_rng(0)


def read(method: str, config: dict[str, Any], place: Path, tensors: dict[str, Any]) -> Layer:
    """The layer "a.b" of a checkpoint with these tensors."""
    named = {f"a.b.{key}": as_tensor(value) for key, value in tensors.items()}
    save_file({k: v.contiguous() for k, v in named.items()}, place / "model.safetensors")
    found = reader_of(method).layers(Given(config, read_header(place / "model.safetensors")))
    assert list(found) == ["a.b"]
    assert set(found["a.b"].tensors) == set(named)
    return found["a.b"]


def same(layer: Layer, weight: np.ndarray, spec: str) -> None:
    """Fail unless the layer becomes this format with exactly these fp32 weights."""
    packed = layer.read()
    assert isinstance(packed, Packed)
    assert layer.format is not None
    assert layer.format.spec == spec
    again = Packed.from_tensors(layer.format, layer.shape, packed.tensors())
    assert torch.equal(again.dequantize(), torch.from_numpy(weight))
    for name, tensor in packed.grid.items():  # the sizes that space on disk is checked with
        wanted = layer.dtypes.get(name, layer.format.stored_entries()[name].default_dtype)
        assert tensor.dtype == wanted


def as_tensor(value: Any) -> torch.Tensor:
    return (
        value if isinstance(value, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(value))
    )


def codes(shape: tuple[int, ...], bits: int, low: int = 0) -> np.ndarray:
    return RANDOM.integers(low, 2**bits, shape)


def scales(*shape: int, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, np.ndarray]:
    """Random scales, and the same in fp32."""
    t = torch.from_numpy(RANDOM.uniform(0.01, 0.1, shape)).to(dtype)
    return t, t.float().numpy()


def stream(values: np.ndarray, bits: int) -> np.ndarray:
    """(R, C) -> (R, words) int32: codes one after the other, low bits first."""
    flat = ((values[..., None] >> np.arange(bits)) & 1).reshape(len(values), -1).astype(np.uint8)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    return np.packbits(flat, axis=1, bitorder="little").view("<i4")


def padded(values: np.ndarray, bits: int) -> np.ndarray:
    """(R, C) -> (R, words) int32 with whole codes only in each word."""
    per = 32 // bits
    values = np.pad(values, ((0, 0), (0, -values.shape[1] % per)))
    words = [
        sum(int(c) << (bits * i) for i, c in enumerate(chunk))
        for row in values
        for chunk in row.reshape(-1, per)
    ]
    return np.array(words, dtype=np.uint32).view(np.int32).reshape(len(values), -1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits: int, version: int, act_order: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    groups = 3
    q, zero = codes((K, N), bits), codes((groups, N), bits, low=1)
    scale, s = scales(groups, N, dtype=dtype)
    g_idx = np.repeat(np.arange(groups), K // groups)
    if act_order:
        g_idx = RANDOM.permutation(g_idx)
    tensors = {
        "qweight": stream(q.T, bits).T,
        "qzeros": stream(zero - 1 if version == 1 else zero, bits),
        "scales": scale,
        "g_idx": g_idx.astype(np.int32),
    }
    config = {"bits": bits, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    layer = read("gptq", config, tmp_path, tensors)
    weight = (q - zero[g_idx]).astype(np.float32) * s[g_idx]
    same(layer, weight.T, f"int{bits}:group=32,zero" + (",order" if act_order else ""))


def test_gptq_bits_of_a_layer_may_differ_from_the_configs(tmp_path: Path) -> None:
    """GPTQModel's `dynamic` overrides; and g_idx may be absent where they do not."""
    q, (scale, s) = codes((K, N), 8), scales(1, N)
    tensors = {
        "qweight": stream(q.T, 8).T,
        "qzeros": stream(np.full((1, N), 127), 8),
        "scales": scale,
        "g_idx": np.zeros(K, np.int32),
    }
    weight = ((q - 128).astype(np.float32) * s).T
    config = {"bits": 4, "dynamic": {"a": {"bits": 8}}}
    same(read("gptq", config, tmp_path, tensors), weight, "int8")
    with pytest.raises(InvalidInput, match="do not fit each other in 0 bits"):
        read("gptq", config, tmp_path, tensors | {"g_idx": np.zeros(32 * K, np.int32)})
    del tensors["g_idx"]
    same(read("gptq", {"bits": 8}, tmp_path, tensors), weight, "int8")


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq_v1_zero_points_of_zero(bits: int, tmp_path: Path) -> None:
    """GPTQModel subtracts 1 from whole words, with borrows; so zeros come back."""
    q, zero, (scale, s) = codes((K, N), bits), codes((1, N), bits), scales(1, N)
    zero[0, ::5] = 0
    ones = stream(np.ones((1, N), np.int64), bits).view(np.uint32)
    qzeros = (stream(zero, bits).view(np.uint32) - ones).view(np.int32)
    tensors = {"qweight": stream(q.T, bits).T, "qzeros": qzeros, "scales": scale}
    layer = read("gptq", {"bits": bits, "sym": False}, tmp_path, tensors)
    same(layer, ((q - zero).astype(np.float32) * s).T, f"int{bits}:zero")


@pytest.mark.parametrize("group", [32, K])
def test_awq(group: int, tmp_path: Path) -> None:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    groups = K // group
    q, zero, (scale, s) = codes((K, N), 4), codes((groups, N), 4), scales(groups, N)

    def interleaved(values: np.ndarray) -> np.ndarray:
        return stream(values.reshape(len(values), -1, 8)[:, :, order].reshape(len(values), -1), 4)

    tensors = {"qweight": interleaved(q), "qzeros": interleaved(zero), "scales": scale}
    layer = read("awq", {"bits": 4, "version": "gemm", "group_size": group}, tmp_path, tensors)
    g = np.arange(K) // group
    weight = ((q - zero[g]).astype(np.float32) * s[g]).T
    same(layer, weight, "int4:zero" if groups == 1 else "int4:group=32,zero")


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8, 1.58])
def test_hqq(bits: float, tmp_path: Path) -> None:
    group, packings = 32, {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}
    whole = 2 if bits == 1.58 else int(bits)
    width = 8 if whole in (5, 6) else whole
    rows = N * K // group
    q = RANDOM.integers(0, round(2**bits), (rows, group))
    scale, s = scales(rows, 1)
    zero, z = scales(rows, 1)
    zero, z = zero * 40, z * np.float32(40)
    z = zero.float().numpy()
    per = 10 if width == 3 else 8 // width
    parts = np.pad(q, ((0, -rows % per), (0, 0))).reshape(per, -1, group)
    words = sum(part << (width * (per - 1 - i)) for i, part in enumerate(parts))
    tensors = {
        "W_q": words.astype(np.int32 if width == 3 else np.uint8),
        "scale": scale,
        "zero": zero,
        "nbits": torch.tensor(bits, dtype=torch.float32 if bits == 1.58 else torch.int32),
        "group_size": torch.tensor(group, dtype=torch.int32),
        "axis": torch.tensor(1, dtype=torch.int32),
        "shape": torch.tensor([N, K]),
        "packing": torch.tensor(list(packings[width].encode()), dtype=torch.uint8),
        "view_as_float": torch.tensor(0, dtype=torch.uint8),
        "compute_dtype": torch.tensor(list(b"torch.float16"), dtype=torch.uint8),
    }
    layer = read("hqq", {}, tmp_path, tensors)
    weight = ((q.astype(np.float32) - z) * s).reshape(N, K)
    same(layer, weight, f"int{whole}:group=32,zero")


@pytest.mark.parametrize(("m", "b", "v"), [(2, 8, 8), (1, 16, 8), (4, 8, 16), (3, 5, 4)])
def test_aqlm(m: int, b: int, v: int, tmp_path: Path) -> None:
    q = codes((N, K // v, m), b)
    books, c = scales(m, 2**b, 1, v)
    scale, s = scales(N, 1, 1, 1)
    wrapped = np.where(q >= 2 ** (b - 1), q - 2**b, q).astype(np.int8 if b <= 8 else np.int16)
    tensors = {"codes": wrapped, "codebooks": books, "scales": scale}
    config = {"nbits_per_codebook": b, "num_codebooks": m, "in_group_size": v, "out_group_size": 1}
    layer = read("aqlm", config, tmp_path, tensors)
    total = c[0, q[:, :, 0], 0]
    for i in range(1, m):
        total = total + c[i, q[:, :, i], 0]
    options = [f"m={m}"] * (m != 2) + [f"v={v}"] * (v != 8) + [f"b={b}"] * (b != 8)
    spec = "codebook" + (":" if options else "") + ",".join(options)
    same(layer, (total.reshape(N, K) * s.reshape(N, 1)).astype(np.float32), spec)


@pytest.mark.parametrize("zero", ["none", "packed", "bytes"])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_compressed_tensors(bits: int, dense: bool, zero: str, tmp_path: Path) -> None:
    groups, middle = 3, 2 ** (bits - 1)
    pack = stream if dense else padded
    q, z = codes((N, K), bits), codes((N, groups), bits)
    scale, s = scales(N, groups)
    tensors = {
        "weight_packed": pack(q, bits),
        "weight_scale": scale,
        "weight_shape": np.array([N, K]),
    }
    if zero == "packed":
        tensors["weight_zero_point"] = pack(z.T, bits).T
    elif zero == "bytes":
        tensors["weight_zero_point"] = (z - middle).astype(np.int8)
    else:
        z[:] = middle
    layer = read("compressed-tensors", pack_quantized(bits), tmp_path, tensors)
    weight = (q - z.repeat(32, axis=1)).astype(np.float32) * s.repeat(32, axis=1)
    same(layer, weight, f"int{bits}:group=32" + (",zero" if zero != "none" else ""))


@pytest.mark.parametrize("dense", [False, True])
def test_compressed_tensors_of_a_size_where_only_the_version_tells(
    dense: bool, tmp_path: Path
) -> None:
    k = 40  # 4 words in either layout
    q, (scale, s) = codes((N, k), 3), scales(N, 1)
    tensors = {
        "weight_packed": stream(q, 3) if dense else padded(q, 3),
        "weight_scale": scale,
        "weight_shape": np.array([N, k]),
    }
    config = pack_quantized(3, strategy="channel", group_size=None)
    config["version"] = "0.19.0" if dense else "0.9.4"
    layer = read("compressed-tensors", config, tmp_path, tensors)
    same(layer, (q - 4).astype(np.float32) * s, "int3")


def test_compressed_tensors_act_order_and_one_scale(tmp_path: Path) -> None:
    q, (scale, s) = codes((N, K), 4), scales(N, 3)
    g_idx = RANDOM.permutation(np.repeat(np.arange(3), 32))
    tensors = {
        "weight_packed": stream(q, 4),
        "weight_scale": scale,
        "weight_shape": np.array([N, K]),
        "weight_g_idx": g_idx.astype(np.int32),
    }
    layer = read("compressed-tensors", pack_quantized(4), tmp_path, tensors)
    same(layer, (q - 8).astype(np.float32) * s[:, g_idx], "int4:group=32,order")
    scale, s = scales(1)
    tensors |= {"weight_scale": scale}
    del tensors["weight_g_idx"]
    config = pack_quantized(4, strategy="tensor", group_size=None)
    same(read("compressed-tensors", config, tmp_path, tensors), (q - 8).astype("f4") * s, "int4")


def pack_quantized(bits: int, **weights: Any) -> dict[str, Any]:
    args = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32} | weights
    group = {"targets": ["Linear"], "weights": args, "input_activations": None}
    return {"format": "pack-quantized", "config_groups": {"group_0": group}}


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes(nested: bool, tmp_path: Path) -> None:
    block, outer = 32, 16
    q = codes((N * K // 2, 2), 4)
    table = np.sort(RANDOM.normal(size=16)).astype(np.float32)
    count = N * K // block
    state = {"shape": [N, K], "blocksize": block, "quant_type": "nf4", "dtype": "float16"}
    tensors: dict[str, Any] = {
        "weight": (q[:, :1] << 4 | q[:, 1:]).astype(np.uint8),
        "weight.quant_map": table,
    }
    if nested:
        levels = np.sort(RANDOM.normal(size=256)).astype(np.float32)
        inner, second = codes((count,), 8), scales(count // outer, dtype=torch.float32)[1]
        offset = 0.123456
        absmax = levels[inner] * second.repeat(outer) + np.float32(offset)
        tensors |= {
            "weight.absmax": inner.astype(np.uint8),
            "weight.nested_absmax": second,
            "weight.nested_quant_map": levels,
        }
        state |= {"nested_blocksize": outer, "nested_offset": offset, "nested_dtype": "float32"}
    else:
        absmax = scales(count, dtype=torch.float32)[1]
        tensors["weight.absmax"] = absmax
    tensors["weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(
        json.dumps(state).encode(), np.uint8
    ).copy()
    layer = read("bitsandbytes", {"load_in_4bit": True}, tmp_path, tensors)
    weight = (table[q.flatten()] * absmax.repeat(block)).reshape(N, K)
    same(layer, weight, "codebook:m=1,v=1,b=4,group=32")
