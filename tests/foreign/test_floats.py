"""Small floats of other tools: GPT-OSS, DeepSeek's FP8, ModelOpt; against decoders of others."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import anybit
from anybit.checkpoint.foreign.convert import convert_checkpoint
from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from anybit.nn.model import quantized_layers
from tests.foreign.make import linears, llama
from tests.foreign.test_formulas import read, same

E2M1 = ml_dtypes.float4_e2m1fn
RANDOM = np.random.default_rng(0)


def floats(codes: Any, dtype: Any) -> np.ndarray:
    return np.asarray(codes, np.uint8).view(dtype).astype(np.float32)


def nibbles(codes: np.ndarray) -> np.ndarray:
    """(N, K) codes of 4 bits -> (N, K / 2) bytes, the first of two in the low half."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)


def e4m3(*shape: int) -> Tensor:
    """Any numbers but NaN."""
    codes = RANDOM.integers(0, 256, shape).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 1
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


# Layers.


@pytest.mark.parametrize(("n", "k", "tall", "wide"), [(300, 256, 128, 128), (64, 96, 16, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_blocks_as_deepseek_publishes_them(
    n: int, k: int, tall: int, wide: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    weight = e4m3(n, k)
    scale = torch.from_numpy(RANDOM.uniform(1e-4, 1e-2, (-(-n // tall), k // wide))).to(dtype)
    layer = read(
        "fp8",
        {"weight_block_size": [tall, wide], "fmt": "e4m3", "activation_scheme": "dynamic"},
        tmp_path,
        {"weight": weight, "weight_scale_inv": scale},
    )
    whole = scale.float().repeat_interleave(tall, 0)[:n].repeat_interleave(wide, 1)
    kind = "mxfp8" if dtype == torch.float8_e8m0fnu else "fp8"
    group = "" if (kind, wide) == ("mxfp8", 32) else f":group={wide}"
    same(layer, (weight.float() * whole).numpy(), kind + group)
    assert "stay in 16 bits" in layer.note


def test_a_block_reaches_over_the_end_of_a_row(tmp_path: Path) -> None:
    weight, scale = e4m3(40, 80), torch.rand(2, 3) + 0.5
    config = {"weight_block_size": [32, 32]}
    layer = read("fp8", config, tmp_path, {"weight": weight, "weight_scale_inv": scale})
    whole = scale.repeat_interleave(32, 0)[:40].repeat_interleave(32, 1)[:, :80]
    assert layer.format is None
    assert torch.equal(layer.read(), weight.float() * whole)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["blocks", "fp4", "mxfp8"])
def test_transformers_decodes_the_same(kind: str, tmp_path: Path) -> None:
    """DeepSeek-V3's blocks, DeepSeek-V4's experts in e2m1, and exponents for groups."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    power = torch.from_numpy(RANDOM.integers(100, 140, (64, 3)).astype(np.uint8))
    fp4 = torch.from_numpy(RANDOM.integers(-128, 128, (64, 48)).astype(np.int8))
    weight, scale, block = {
        "blocks": (e4m3(256, 384), torch.rand(2, 3) + 0.5, [128, 128]),
        "fp4": (fp4, power.view(torch.float8_e8m0fnu), [128, 128]),
        "mxfp8": (e4m3(64, 96), power, [1, 32]),
    }[kind]
    wanted = Fp8Dequantize(None)._dequantize_one(weight, scale, output_dtype=torch.float32)
    tensors = {"weight": weight, "weight_scale_inv": scale}
    packed = read("fp8", {"weight_block_size": block}, tmp_path, tensors).read()
    assert torch.equal(packed.dequantize(), wanted)  # type: ignore[union-attr]


def test_nvfp4_of_modelopt(tmp_path: Path) -> None:
    codes = RANDOM.integers(0, 16, (24, 64))
    scale = RANDOM.integers(1, 127, (24, 4)).astype(np.uint8)
    number = np.float32(0.00123)
    tensors = {
        "weight": nibbles(codes),
        "weight_scale": torch.from_numpy(scale).view(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(number),
        "input_scale": torch.tensor(0.5),
    }
    layer = read("modelopt", {"quant_algo": "NVFP4"}, tmp_path, tensors)
    scales = floats(scale, ml_dtypes.float8_e4m3fn) * number
    same(layer, floats(codes, E2M1) * scales.repeat(16, 1), "nvfp4")
    assert layer.note


@pytest.mark.parametrize("algorithm", ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8"])
def test_fp8_of_modelopt(algorithm: str, tmp_path: Path) -> None:
    weight = e4m3(256, 256)
    scale: Tensor = {
        "FP8": torch.tensor(0.0123),
        "FP8_PER_CHANNEL_PER_TOKEN": torch.rand(256) + 0.5,
        "FP8_PB_WO": torch.rand(2, 1, 2, 1) + 0.5,
        "MXFP8": torch.randint(100, 140, (256, 8), dtype=torch.uint8),
    }[algorithm]
    tensors = {"weight": weight, "weight_scale": scale}
    layer = read("modelopt", {"quantization": {"quant_algo": algorithm}}, tmp_path, tensors)
    if algorithm == "MXFP8":
        power = floats(scale.numpy(), ml_dtypes.float8_e8m0fnu)
        same(layer, weight.float().numpy() * power.repeat(32, 1), "mxfp8")
        return
    wide = scale.view(-1, 1)
    if algorithm == "FP8_PB_WO":
        wide = scale.view(2, 2).repeat_interleave(128, 0).repeat_interleave(128, 1)
    spec = "fp8:group=128" if algorithm == "FP8_PB_WO" else "fp8"
    same(layer, (weight.float() * wide).numpy(), spec)
    assert layer.activation == ("fp8" if algorithm == "FP8_PER_CHANNEL_PER_TOKEN" else None)


@pytest.mark.parametrize("change", ["nan", "zero", "negative", "inf", "number", "e8m0", "element"])
def test_bad_numbers_are_refused_before_a_weight_is_read(change: str, tmp_path: Path) -> None:
    scale = torch.ones(8, 4)
    tensors = {
        "weight": torch.zeros(8, 32, dtype=torch.uint8),
        "weight_scale": scale,
        "weight_scale_2": torch.tensor(1.0),
    }
    message = r"a\.b\.weight_scale: 1 scales are not positive and finite, the first is .* at 5"
    scale[1, 1] = {"nan": torch.nan, "zero": 0, "negative": -1}.get(change, 1)
    tensors["weight_scale"] = scale.to(torch.float8_e4m3fn)
    if change == "inf":
        del tensors["weight_scale_2"]
        tensors["weight"] = e4m3(8, 32)
        scale[1, 1] = torch.inf
        tensors["weight_scale"] = scale
    if change == "number":
        tensors["weight_scale_2"] = torch.tensor(-2.0)
        message = "weight_scale_2: 1 scales are not positive and finite, the first is -2 at 0"
    if change == "e8m0":
        del tensors["weight_scale_2"]
        byte = torch.full((8, 4), 127, dtype=torch.uint8)
        byte[1, 1] = 255
        tensors["weight_scale"] = byte
    if change == "element":
        weight = e4m3(8, 32).view(torch.uint8)
        weight[3, 3] = 0xFF
        tensors = {"weight": weight.view(torch.float8_e4m3fn), "weight_scale": torch.ones(8)}
        layer = read("modelopt", {"quant_algo": "FP8"}, tmp_path, tensors)
        with pytest.raises(ValueError, match=r"a\.b\.weight: holds NaN or inf"):
            layer.read()
        return
    with pytest.raises(ValueError, match=message):
        read("modelopt", {"quant_algo": "NVFP4"}, tmp_path, tensors)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight": e4m3(8, 32), "weight_scale": torch.ones(7)}, r"scales of \(7,\) do not fit"),
        ({"weight": e4m3(8, 32), "weight_scale": torch.ones(0)}, r"scales of \(0,\) do not fit"),
        ({"weight": e4m3(0, 32), "weight_scale": torch.ones(1)}, r"is no shape of a weight"),
        ({"weight": e4m3(8), "weight_scale": torch.ones(1)}, r"is no shape of a weight"),
        (
            {"weight": torch.zeros(8, 32).byte(), "weight_scale": torch.ones(8, 4)[:, :3].byte()},
            r"scales of \(8, 3\) do not fit a weight of \(8, 64\)",
        ),
        (
            {"weight": e4m3(8, 32), "weight_scale": torch.ones(8, 2).to(torch.float8_e4m3fn)},
            "scales of F8_E4M3 without a number for the whole weight are no layout",
        ),
    ],
)
def test_shapes_that_do_not_fit(tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read("modelopt", {"quant_algo": "FP8"}, tmp_path, tensors)


# Models.


def test_gpt_oss(tmp_path: Path) -> None:
    """Published tensors of a tiny GPT-OSS, against transformers' own conversion and model."""
    from transformers import GptOssConfig, GptOssForCausalLM
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    config = GptOssConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
        sliding_window=16,
        pad_token_id=0,
        architectures=["GptOssForCausalLM"],
        dtype="float32",
    )
    model = GptOssForCausalLM(config).eval()
    tensors = dict(model.state_dict())
    expected = {}
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, k, n = tensors[name].shape
        blocks = torch.randint(256, (experts, n, k // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 123, (experts, n, k // 32), dtype=torch.uint8)
        whole = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # (E, K, N)
        model.get_parameter(name).data.copy_(whole)
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        prefix, _, key = name.rpartition(".")
        expected |= {f"{prefix}.{e}.{key}": whole[e].T for e in range(experts)}
    source = tmp_path / "gpt-oss"
    source.mkdir()
    save_file({k: v.contiguous() for k, v in tensors.items()}, source / "model.safetensors")
    text = config.to_dict()
    text["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (source / "config.json").write_text(json.dumps(text))

    report = convert_checkpoint(source, tmp_path / "ours")
    assert set(report.formats) == set(expected)
    assert set(report.formats.values()) == {"mxfp4"}
    assert not report.unexpected
    loaded = anybit.load(tmp_path / "ours")
    for name, layer in quantized_layers(loaded):
        assert torch.equal(layer.dequantize(), expected[name])
    prompt = torch.randint(1, 64, (1, 12))
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(prompt).logits, model(prompt).logits, rtol=1e-4, atol=1e-5
        )


def test_fp8_blocks_of_a_model_in_transformers_and_the_engine(tmp_path: Path) -> None:
    model = llama(64).float()
    source = tmp_path / "fp8"
    source.mkdir()
    tensors = dict(model.state_dict())
    for name, module in linears(model).items():
        assert isinstance(module, nn.Linear)
        n, k = module.weight.shape
        blocks = module.weight.data.view(n // 32, 32, k // 32, 32)
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).view(n, k).to(torch.float8_e4m3fn)
        wide = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)
        module.weight.data = codes.float() * wide
        tensors |= {f"{name}.weight": codes, f"{name}.weight_scale_inv": scale}
    save_file(tensors, source / "model.safetensors")
    text = model.config.to_dict()
    text["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (source / "config.json").write_text(json.dumps(text))
    report = convert_checkpoint(source, tmp_path / "ours")
    assert set(report.formats.values()) == {"fp8:group=32"}
    prompt = torch.tensor([[1, 5, 9, 30, 7, 7, 12]])
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = model.generate(prompt, **options)[0, prompt.shape[1] :].tolist()
    ours = anybit.load(tmp_path / "ours", dtype=torch.float32)
    for name, layer in quantized_layers(ours):
        assert torch.equal(layer.dequantize(), linears(model)[name].weight)
    assert ours.generate(prompt, **options)[0, prompt.shape[1] :].tolist() == wanted
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    llm = LLM(tmp_path / "ours", dtype="float32")
    assert llm.generate([prompt[0].tolist()], params)[0].tokens == wanted
