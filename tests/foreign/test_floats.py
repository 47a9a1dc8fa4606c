"""Small floats of other tools: GPT-OSS, DeepSeek's FP8, ModelOpt; against decoders of others."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import anybit
from anybit.checkpoint.foreign.convert import convert_checkpoint
from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from anybit.nn.model import quantized_layers
from tests.foreign.make import FIXTURES, linears, llama
from tests.foreign.test_formulas import read, same, stream

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


def test_scales_as_autofp8_calls_them(tmp_path: Path) -> None:
    weight, scale = e4m3(16, 32), torch.tensor(0.03)
    tensors = {"weight": weight, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
    layer = read("fp8", {"activation_scheme": "static"}, tmp_path, tensors)
    same(layer, (weight.float() * scale).numpy(), "fp8")
    assert "by a fixed scale" in layer.note


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
    """Published tensors of a tiny GPT-OSS, against transformers' own conversion and model; and in
    the engine.
    """
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
    for name, parameter in model.named_parameters():
        if name.endswith("proj_bias"):
            parameter.data.normal_()
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
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = model.generate(prompt, **options)[0, prompt.shape[1] :].tolist()
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    llm = LLM(tmp_path / "ours", dtype="float32")
    assert llm.generate([prompt[0].tolist()], params)[0].tokens == wanted


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


# Other layouts of the same weights.


@pytest.mark.parametrize("dtype", ["fp4", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3"])
def test_quark(dtype: str, tmp_path: Path) -> None:
    codes = RANDOM.integers(0, 2 ** int(dtype[2]), (24, 64))
    codes[(codes & 0x7F) == 0x7F] = 1
    kind: Any = {
        "fp4": E2M1,
        "fp6_e2m3": ml_dtypes.float6_e2m3fn,
        "fp6_e3m2": ml_dtypes.float6_e3m2fn,
        "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    }[dtype]
    bits = (codes[..., None] >> np.arange(int(dtype[2]))) & 1
    data = np.packbits(bits.reshape(24, -1).astype(np.uint8), axis=1, bitorder="little")
    weight = torch.from_numpy(data)
    if dtype == "fp8_e4m3":
        weight = weight.view(torch.float8_e4m3fn)
    power = RANDOM.integers(110, 130, (24, 2)).astype(np.uint8)
    config = {"layer_quant_config": {"a.*": {"weight": {"dtype": dtype, "group_size": 32}}}}
    layer = read("quark", config, tmp_path, {"weight": weight, "weight_scale": power})
    scales = floats(power, ml_dtypes.float8_e8m0fnu).repeat(32, 1)
    spec = "mxfp6:e3m2" if dtype == "fp6_e3m2" else f"mxfp{dtype[2]}"
    same(layer, floats(codes, kind) * scales, spec)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("kind", ["bitlinear", "autobitlinear"])
def test_bitnet(kind: str, tmp_path: Path) -> None:
    from transformers.integrations.bitnet import pack_weights

    numbers = torch.from_numpy(RANDOM.integers(-1, 2, (64, 96)).astype(np.int8))
    scale = torch.tensor([0.173])
    tensors = {"weight": pack_weights(numbers.clone()), "weight_scale": scale}
    layer = read("bitnet", {"linear_class": kind}, tmp_path, tensors)
    wanted = numbers / scale if kind == "bitlinear" else numbers * scale
    same(layer, wanted.numpy() + 0.0, "int2")
    assert layer.activation == "int8"
    tensors["weight"][3, 3] = 0xFF
    with pytest.raises(ValueError, match=r"a\.b\.weight: holds code 3, above the largest, 2"):
        read("bitnet", {"linear_class": kind}, tmp_path, tensors).read()


@pytest.mark.parametrize("layout", ["auto_round", "auto_round:auto_gptq"])
def test_auto_round_in_gptqs_layout(layout: str, tmp_path: Path) -> None:
    bits, n, k, groups = 4, 64, 96, 3
    q = RANDOM.integers(0, 2**bits, (n, k))
    zero = RANDOM.integers(1, 2**bits, (n, groups))
    scale = torch.from_numpy(RANDOM.uniform(0.01, 0.1, (groups, n))).half()
    tensors = {
        "qweight": stream(q, bits).T,
        "qzeros": stream((zero - (layout != "auto_round")).T, bits),
        "scales": scale,
    }
    config = {"packing_format": layout, "bits": 2, "extra_config": {"a.b": {"bits": bits}}}
    layer = read("auto-round", config, tmp_path, tensors)
    wide = [t.repeat(k // groups, 1) for t in (zero, scale.float().numpy().T)]
    same(layer, ((q - wide[0]) * wide[1]).astype(np.float32), "int4:group=32,zero")


def test_auto_round_in_floats(tmp_path: Path) -> None:
    codes = RANDOM.integers(0, 16, (24, 64))
    power = RANDOM.integers(110, 130, (24, 2)).astype(np.uint8)
    tensors = {"weight_packed": nibbles(codes), "weight_scale": power}
    config = {"packing_format": "auto_round:llm_compressor", "bits": 4, "data_type": "mx_fp"}
    layer = read("auto-round", config, tmp_path, tensors)
    scales = floats(power, ml_dtypes.float8_e8m0fnu).repeat(32, 1)
    same(layer, floats(codes, E2M1) * scales, "mxfp4")


@pytest.mark.parametrize("layout", ["auto_round", "auto_round:llm_compressor"])
def test_auto_round_in_signed_fourths(layout: str, tmp_path: Path) -> None:
    """MXINT4: its bytes and scales look like MXFP4's."""
    codes = RANDOM.integers(0, 16, (24, 64))
    power = RANDOM.integers(110, 130, (24, 2)).astype(np.uint8)
    tensors = {"weight_packed": nibbles(codes), "weight_scale": power}
    config = {"packing_format": layout, "bits": 4, "data_type": "mx_int"}
    layer = read("auto-round", config, tmp_path, tensors)
    weight = np.where(codes > 7, -1.0, 1.0) * (codes % 8) / 4
    scales = floats(power, ml_dtypes.float8_e8m0fnu).repeat(32, 1)
    same(layer, (weight * scales).astype(np.float32), "int4:group=32")


# What `convert` does beside.


def test_rounding_to_another_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path / "cache"))
    report = convert_checkpoint(FIXTURES / "ct_floats", tmp_path / "out", "int4:group=32@int8")
    assert set(report.formats.values()) == {"int4:group=32@int8"}
    exact = anybit.load(FIXTURES / "ct_floats")
    ours = dict(quantized_layers(anybit.load(tmp_path / "out")))
    for name, layer in quantized_layers(exact):
        wanted = anybit.quantize_tensor(layer.dequantize(), "int4:group=32")
        assert torch.equal(ours[name].dequantize(), wanted.dequantize())
    with pytest.raises(ValueError, match=r"K=64 is not a multiple of group=128 in format"):
        convert_checkpoint(FIXTURES / "ct_floats", tmp_path / "other", "int4:group=128")
    assert not (tmp_path / "other").exists()


def test_checkpoints_of_other_tools_load_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The conversion is made once; a changed source makes another."""
    monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path / "cache"))
    source = shutil.copytree(FIXTURES / "gptq_4bit_v1", tmp_path / "model")
    first = anybit.load(source)
    assert "kept in" in caplog.text
    caplog.clear()
    llm = LLM(source)
    assert "kept in" not in caplog.text
    prompt = [1, 5, 9, 30]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = first.generate(torch.tensor([prompt]), **options)[0, 4:].tolist()
    assert llm.generate([prompt], params)[0].tokens == wanted
    os.utime(source / "model.safetensors", (1, 1))
    anybit.load(source)
    assert len([*(tmp_path / "cache" / "converted").iterdir()]) == 2
    with pytest.raises(ValueError, match="not quantized"):
        anybit.load(Path(__file__).parents[2] / "models" / "pico")


def test_codes_that_no_layer_claims_are_refused(tmp_path: Path) -> None:
    """Experts of one tensor would become a dense weight without its scales."""
    source = shutil.copytree(FIXTURES / "ct_floats", tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = e4m3(2, 8, 16)
    tensors["model.layers.0.mlp.experts.gate_up_proj_scale_inv"] = torch.ones(2, 1, 1)
    save_file(tensors, source / "model.safetensors")
    message = r"gate_up_proj holds F8_E4M3 of \(2, 8, 16\), and belongs to no layer"
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(source, tmp_path / "out")


def test_modelopts_own_file(tmp_path: Path) -> None:
    source = shutil.copytree(FIXTURES / "ct_floats", tmp_path / "model")
    text = json.loads((source / "config.json").read_text())
    del text["quantization_config"]
    (source / "config.json").write_text(json.dumps(text))
    with pytest.raises(ValueError, match="is not quantized"):
        convert_checkpoint(source, tmp_path / "out")
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4_SVD"}}
    (source / "hf_quant_config.json").write_text(json.dumps(own))
    with pytest.raises(ValueError, match="modelopt: quant_algo is 'NVFP4_SVD', and only 'NVFP4'"):
        convert_checkpoint(source, tmp_path / "out")
