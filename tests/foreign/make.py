"""Makes tests/foreign/fixtures/ with the tools themselves: `python make.py gptq`, in an environment
that has gptqmodel; likewise awq (gptqmodel), hqq, aqlm, compressed-tensors, bitsandbytes.

Every fixture is a checkpoint of a Llama of one block, and `expected.json`: of each quantized layer
the SHA-256 of the weights that the tool itself decodes in fp32 (see `digest`).
"""

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

FIXTURES = Path(__file__).parent / "fixtures"
PICO = Path(__file__).parents[2] / "models" / "pico"


def llama(width: int = 32) -> Any:
    """About ten thousand random weights in fp16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        architectures=["LlamaForCausalLM"],
    )
    model = LlamaForCausalLM(config).half().eval()
    for i, module in enumerate(linears(model).values()):  # columns of different sizes, and offset
        size = torch.rand(module.in_features, generator=torch.Generator().manual_seed(i)) + 0.5
        module.weight.data = module.weight.data * size.half() + 0.01
    return model


def linears(model: nn.Module) -> dict[str, Any]:
    named = model.named_modules()
    return {n: m for n, m in named if isinstance(m, nn.Linear) and n != "lm_head"}


def digest(weight: torch.Tensor) -> str:
    """SHA-256 of a weight (N, K) fp32, with -0 as 0."""
    return hashlib.sha256((weight.float() + 0.0).contiguous().numpy().tobytes()).hexdigest()


def keep(name: str, made: Path, expected: dict[str, torch.Tensor], **about: Any) -> None:
    """Move what the tool saved into the fixtures, with the digests of what it decodes."""
    out = FIXTURES / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    shutil.copy(made / "config.json", out)
    for file in (*made.glob("*.safetensors*"), *made.glob("quanto_qmap.json")):
        shutil.copy(file, out)
    text = {"made_by": about, "sha256": {n: digest(w) for n, w in expected.items()}}
    (out / "expected.json").write_text(json.dumps(text, indent=1) + "\n")
    size = sum(f.stat().st_size for f in out.iterdir())
    print(f"{name}: {len(expected)} layers, {size} bytes")


# Tools.


def gptq() -> None:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    def decode(module: Any) -> torch.Tensor:
        module.scales = module.scales.float()
        return module.dequantize_weight().T

    cases: dict[str, dict[str, Any]] = {
        "gptq_4bit_v1": {"bits": 4, "group_size": 16, "desc_act": False, "sym": True},
        "gptq_4bit_act_order": {"bits": 4, "group_size": 16, "desc_act": True, "sym": True},
        "gptq_3bit_v2": {"bits": 3, "group_size": 32, "desc_act": False, "sym": False},
        "gptq_2bit_v1": {"bits": 2, "group_size": 16, "desc_act": False, "sym": False},
        "gptq_8bit_row": {"bits": 8, "group_size": -1, "desc_act": True, "sym": True},
    }
    for name, options in cases.items():
        layout = {"format": "gptq_v2"} if name.endswith("v2") else {}
        gptqmodel_case(name, options, layout, "torch", TorchLinear, decode)


def awq() -> None:
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    def decode(m: Any) -> torch.Tensor:
        scales = m.scales.float()
        return dequantize_gemm(m.qweight, m.qzeros, scales, m.bits, m.group_size).T

    options = {"bits": 4, "group_size": 16}
    layout = {"quant_method": "awq", "format": "gemm"}
    gptqmodel_case("awq_gemm", options, layout, "torch_awq", AwqTorchLinear, decode, 64)


def gptqmodel_case(
    name: str,
    options: dict[str, Any],
    layout: dict[str, Any],
    backend: str,
    kind: Any,
    decode: Any,
    width: int = 32,
) -> None:
    import gptqmodel
    from gptqmodel import GPTQModel, QuantizeConfig

    with tempfile.TemporaryDirectory() as place:
        dense, made = Path(place, "dense"), Path(place, "made")
        llama(width).save_pretrained(dense)
        for file in PICO.glob("tokenizer*"):  # it wants one, and never uses it
            shutil.copy(file, dense)
        config = QuantizeConfig(**options, **layout, offload_to_disk=False)
        model = GPTQModel.load(str(dense), config, device="cpu", backend=backend)
        random = torch.Generator().manual_seed(0)
        rows = [torch.randint(3, 32, (64,), generator=random).tolist() for _ in range(16)]
        text = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
        model.quantize(text, batch_size=1)
        model.save(str(made))
        loaded = GPTQModel.load(str(made), device="cpu", backend=backend, dtype=torch.float16)
        modules = loaded.model.named_modules()
        expected = {n: decode(m) for n, m in modules if isinstance(m, kind)}
        keep(name, made, expected, gptqmodel=gptqmodel.__version__, **options)


def hqq() -> None:
    """HQQLinear in the place of each layer, saved by HQQ's own save_to_safetensors."""
    from importlib.metadata import version

    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer
    from hqq.models.hf.base import AutoHQQHFModel

    cases: dict[str, dict[str, Any]] = {
        "hqq_4bit": {"nbits": 4, "group_size": 16, "axis": 1},
        "hqq_3bit": {"nbits": 3, "group_size": 32, "axis": 1},
        "hqq_2bit": {"nbits": 2, "group_size": 16, "axis": 1},
        "hqq_1bit": {"nbits": 1, "group_size": 16, "axis": 1},
        "hqq_8bit": {"nbits": 8, "group_size": None, "axis": 1},
        "hqq_axis0": {"nbits": 4, "group_size": 16, "axis": 0},
    }
    for name, options in cases.items():
        with tempfile.TemporaryDirectory() as place:
            model, expected = llama(), {}
            config = BaseQuantizeConfig(**options)
            for layer, dense in linears(model).items():
                quantized = HQQLinear(dense, config, compute_dtype=torch.float16, device="cpu")
                model.set_submodule(layer, quantized)
                meta = quantized.meta | {"compute_dtype": torch.float32}
                meta |= {key: meta[key].float() for key in ("scale", "zero")}
                expected[layer] = Quantizer.dequantize(quantized.W_q.data, meta)
            model.config.quantization_config = {"quant_method": "hqq", "quant_config": config}
            made = Path(place, "made")
            AutoHQQHFModel.save_to_safetensors(model, str(made), verbose=False)
            keep(name, made, expected, hqq=version("hqq"), **options)


def aqlm() -> None:
    """The tool's layer with random codes: its training takes a GPU. One layer, for the size."""
    from importlib.metadata import version

    from aqlm import QuantizedLinear
    from aqlm.utils import _dequantize_weight, pack_int_data, unpack_int_data

    layer, v, m, b = "model.layers.0.mlp.down_proj", 8, 2, 8
    with tempfile.TemporaryDirectory() as place:
        model = llama()
        n, k = linears(model)[layer].weight.shape
        quantized = QuantizedLinear(k, n, v, 1, m, b, bias=False, dtype=torch.float16)
        quantized.codebooks.data.normal_(0, 0.1)
        quantized.scales.data.uniform_(0.5, 2)
        codes = torch.randint(2**b, quantized.codes.shape)
        quantized.codes.data = pack_int_data(codes.clone(), b)
        model.set_submodule(layer, quantized)
        model.config.quantization_config = {
            "quant_method": "aqlm",
            "in_group_size": v,
            "out_group_size": 1,
            "num_codebooks": m,
            "nbits_per_codebook": b,
            "linear_weights_not_to_quantize": [
                f"{n}.weight" for n in linears(llama()) if n != layer
            ],
        }
        parts = unpack_int_data(quantized.codes.data, b), quantized.codebooks, quantized.scales
        weight = _dequantize_weight(parts[0], parts[1].data.float(), parts[2].data.float())
        save(model, Path(place))
        keep("aqlm_2x8", Path(place), {layer: weight}, aqlm=version("aqlm"))


def compressed_tensors() -> None:
    """Scales of the largest weight, then the tool's own calibration-free quantizing and packing."""
    from compressed_tensors import __version__
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    def group(**weights: Any) -> dict[str, Any]:
        return {"weights": {"type": "int", "strategy": "group", "group_size": 16} | weights}

    row = {"strategy": "channel", "group_size": None}
    cases: dict[str, dict[str, Any]] = {
        "ct_4bit": {"a": group(num_bits=4) | {"targets": ["Linear"]}},
        "ct_mixed": {
            "a": group(num_bits=3, symmetric=False) | {"targets": ["re:.*self_attn.*"]},
            "b": group(num_bits=8, **row) | {"targets": ["model.layers.0.mlp.down_proj"]},
            "c": group(num_bits=6, symmetric=False, **row) | {"targets": ["Linear"]},
        },
    }
    old = int(__version__.split(".")[1]) < 19  # pads words of odd bits
    for name, groups in {"ct_mixed_old": cases["ct_mixed"]}.items() if old else cases.items():
        with tempfile.TemporaryDirectory() as place:
            model = llama()
            config = QuantizationConfig(config_groups=groups, ignore=["lm_head"])
            apply_quantization_config(model, config)
            for module in linears(model).values():
                args = module.quantization_scheme.weights
                w = module.weight.data.unflatten(1, (-1, args.group_size or module.in_features))
                scale, zero = calculate_qparams(w.amin(-1), w.amax(-1), args)
                module.weight_scale.data = scale.half()
                if not args.symmetric:
                    module.weight_zero_point.data = zero
            compressor = ModelCompressor.from_pretrained_model(model)
            compressor.compress_model(model)
            expected = {}
            for layer, module in model.named_modules():
                if getattr(module, "weight_packed", None) is not None:
                    state = dict(module.state_dict())
                    state["weight_scale"] = state["weight_scale"].float()
                    scheme = module.quantization_scheme
                    state = PackedQuantizationCompressor.decompress(state, scheme)
                    expected[layer] = state["weight"]
            save(model, Path(place))
            compressor.update_config(place)
            keep(name, Path(place), expected, compressed_tensors=__version__)


def compressed_tensors_floats() -> None:
    """Every float format of the tool, and its integers with quantized activations, by layer."""
    from compressed_tensors import __version__
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
    from compressed_tensors.quantization.utils import calculate_qparams
    from compressed_tensors.quantization.utils.helpers import generate_gparam

    def preset(name: str, **changed: Any) -> dict[str, Any]:
        own = {k: v.model_dump() for k, v in PRESET_SCHEMES[name].items()}
        own["weights"] |= changed
        return own

    cases = {
        "ct_floats": {
            "self_attn.q_proj": preset("NVFP4"),
            "self_attn.k_proj": preset("MXFP4A16"),
            "self_attn.v_proj": preset("MXFP6A16"),
            "self_attn.o_proj": preset("MXFP8A16"),
            "mlp.gate_proj": preset("FP8_DYNAMIC"),
            "mlp.up_proj": preset("FP8_BLOCK", block_structure=[48, 32]),
            "mlp.down_proj": preset("FP8"),
        },
        "ct_activations": {
            "self_attn.q_proj": preset("W8A8"),
            "self_attn.k_proj": preset("W4A8", group_size=32),
            "mlp.down_proj": preset("W4AFP8", group_size=32),
        },
    }
    for name, schemes in cases.items():
        with tempfile.TemporaryDirectory() as place:
            model = llama(64)
            groups = {
                f"group_{i}": scheme | {"targets": [f"model.layers.0.{layer}"]}
                for i, (layer, scheme) in enumerate(schemes.items())
            }
            apply_quantization_config(model, QuantizationConfig(config_groups=groups))
            for module in linears(model).values():
                if not hasattr(module, "quantization_scheme"):
                    continue
                args, w = module.quantization_scheme.weights, module.weight.data.float()
                n, k = w.shape
                tall, wide = args.block_structure or (1, args.group_size or k)
                if args.strategy == "tensor":
                    tall, wide = n, k
                w = torch.nn.functional.pad(w, (0, 0, 0, -n % tall))
                w = w.view(-1, tall, k // wide, wide).transpose(1, 2).flatten(2)
                low, high = w.amin(-1), w.amax(-1)
                number = None
                if hasattr(module, "weight_global_scale"):
                    number = generate_gparam(w.amin(), w.amax())
                    module.weight_global_scale.data = number
                scale, _ = calculate_qparams(low, high, args, number)
                module.weight_scale.data = scale.reshape(module.weight_scale.shape)
            compressor = ModelCompressor.from_pretrained_model(model)
            compressor.compress_model(model)
            expected = {}
            for layer, module in model.named_modules():
                scheme = getattr(module, "quantization_scheme", None)
                if scheme is None or scheme.weights is None:
                    continue
                kind = BaseCompressor.get_value_from_registry(scheme.format.value)
                expected[layer] = decoded_in_fp32(kind, dict(module.state_dict()), scheme)
            save(model, Path(place))
            compressor.update_config(place)
            keep(name, Path(place), expected, compressed_tensors=__version__)


def decoded_in_fp32(kind: Any, state: dict[str, torch.Tensor], scheme: Any) -> torch.Tensor:
    """The tool's own formula, with elements and scales in fp32 instead of bf16."""
    from unittest import mock

    from compressed_tensors.compressors import mx_utils
    from compressed_tensors.compressors.mxfp6 import base as mxfp6
    from compressed_tensors.compressors.mxfp8 import base as mxfp8
    from compressed_tensors.compressors.nvfp4 import base as nvfp4

    def wide(function: Any) -> Any:
        return lambda *args, **kwargs: function(*args, **kwargs).float()

    names = (
        (nvfp4, "unpack_fp4_from_uint8"),
        (mxfp6, "unpack_fp6_from_uint8"),
        (mxfp8, "decompress_mx_scale"),
        (mx_utils, "decompress_mx_scale"),
    )
    patches = [mock.patch.object(m, n, wide(getattr(m, n))) for m, n in names]
    for patch in patches:
        patch.start()
    try:
        scale = state.get("weight_scale")
        if scale is not None and scale.dtype in (torch.float16, torch.bfloat16):
            state["weight_scale"] = scale.float()
        return kind.decompress(state, scheme)["weight"].float()
    finally:
        for patch in patches:
            patch.stop()


def bitsandbytes() -> None:
    import bitsandbytes
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from bitsandbytes.functional import dequantize_4bit, dequantize_blockwise
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, nested, kind in (
        ("bnb_nf4", False, "nf4"),
        ("bnb_nf4_double", True, "nf4"),
        ("bnb_fp4_double", True, "fp4"),
    ):
        with tempfile.TemporaryDirectory() as place:
            model, expected = llama(), {}
            for layer, dense in linears(model).items():
                new = Linear4bit(dense.in_features, dense.out_features, bias=False)
                new.weight = Params4bit(
                    dense.weight.data,
                    requires_grad=False,
                    compress_statistics=nested,
                    quant_type=kind,
                    # two rows share blocks in down_proj of the first case
                    blocksize=128 if not nested and "down" in layer else 32,
                )
                new.to("cpu")
                model.set_submodule(layer, new)
                # bitsandbytes 0.50's kernel for this CPU errs where blocks reach over rows' ends;
                # its definition in torch does not.
                data, state = new.weight.data, new.weight.quant_state
                scale = state.absmax
                if nested:
                    scale = dequantize_blockwise(scale, state.state2) + state.offset
                sizes = state.blocksize, state.shape, torch.float32
                expected[layer] = _dequantize_4bit_compute(
                    data.flatten(), scale, state.code, *sizes
                )
                if dense.in_features % state.blocksize == 0:
                    state.dtype = torch.float32
                    assert torch.equal(expected[layer], dequantize_4bit(data, state))
                    state.dtype = torch.float16
            model.config.quantization_config = {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "load_in_8bit": False,
                "bnb_4bit_quant_type": kind,
                "bnb_4bit_use_double_quant": nested,
                "bnb_4bit_quant_storage": "uint8",
            }
            save(model, Path(place))
            keep(name, Path(place), expected, bitsandbytes=bitsandbytes.__version__)


def torchao() -> None:
    """Layers of the classes that the tool stores as bytes."""
    from safetensors.torch import save_file
    from torchao import __version__
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        quantize_,
    )
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.quant_primitives import MappingType

    schemes: dict[str, Any] = {
        "self_attn.q_proj": Float8WeightOnlyConfig(),
        "self_attn.k_proj": Int8WeightOnlyConfig(),
        "self_attn.v_proj": IntxWeightOnlyConfig(torch.int4, PerGroup(16)),
        "mlp.down_proj": IntxWeightOnlyConfig(
            torch.int8, PerGroup(32), mapping_type=MappingType.ASYMMETRIC
        ),
    }
    with tempfile.TemporaryDirectory() as place:
        model = llama().float()  # so that the tool decodes in fp32
        expected = {}
        for name, scheme in schemes.items():
            layer = f"model.layers.0.{name}"
            quantize_(model, scheme, filter_fn=lambda m, full, layer=layer: full == layer)
            expected[layer] = model.get_submodule(layer).weight.dequantize()
        floats = {
            "mlp.gate_proj": lambda w: MXTensor.to_mx(w, torch.float4_e2m1fn_x2, 32),
            "mlp.up_proj": lambda w: MXTensor.to_mx(w, torch.float8_e4m3fn, 32),
            "self_attn.o_proj": lambda w: NVFP4Tensor.to_nvfp4(
                w, per_tensor_scale=per_tensor_amax_to_scale(w.abs().max())
            ),
        }
        for name, pack in floats.items():
            module = model.get_submodule(f"model.layers.0.{name}")
            module.weight = nn.Parameter(pack(module.weight.data), requires_grad=False)
            expected[f"model.layers.0.{name}"] = module.weight.dequantize()
        model.config.quantization_config = {"quant_method": "torchao", "quant_type": {}}
        model.config.to_json_file(Path(place) / "config.json")
        state = {k: v.contiguous() for k, v in model.state_dict().items()}
        tensors, metadata = flatten_tensor_state_dict(state)
        save_file(tensors, Path(place) / "model.safetensors", metadata=metadata | {"format": "pt"})
        keep("torchao", Path(place), expected, torchao=__version__)


def save(model: nn.Module, out: Path) -> None:
    """config.json and the state_dict, as they are."""
    from safetensors.torch import save_file

    model.config.to_json_file(out / "config.json")
    state = {k: v.contiguous() for k, v in model.state_dict().items()}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    for tool in sys.argv[1:]:
        globals()[tool.replace("-", "_")]()
