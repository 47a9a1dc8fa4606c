"""Makes fixtures with MLX, quanto and transformers' own tools: `python -m tests.foreign.make_others
mlx`, in an environment that has `mlx[cpu]`; likewise quanto (optimum-quanto), metal and gemma.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.foreign.make import keep, linears, llama, save

BLOCK = "model.layers.0."


def mlx() -> None:
    """Each number of bits, and embeddings; the layout of `mlx_lm.convert`."""
    import mlx.core as mx
    import numpy as np
    from safetensors.torch import save_file

    own: dict[str, Any] = {
        "self_attn.q_proj": {"group_size": 32, "bits": 2},
        "self_attn.k_proj": {"group_size": 64, "bits": 3},
        "self_attn.v_proj": {"group_size": 32, "bits": 5},
        "mlp.gate_proj": {"group_size": 32, "bits": 6},
        "mlp.down_proj": {"group_size": 128, "bits": 8},
    }
    usual: dict[str, Any] = {"group_size": 64, "bits": 4, "mode": "affine"}
    settings = usual | {BLOCK + name: value for name, value in own.items()}
    model, expected = llama(64), {}
    state = {name: tensor.half() for name, tensor in model.state_dict().items()}
    for layer in [*linears(model), "model.embed_tokens"]:
        chosen = usual | settings.get(layer, {})
        sizes = {"group_size": chosen["group_size"], "bits": chosen["bits"]}
        made = mx.quantize(mx.array(state.pop(f"{layer}.weight").numpy()), **sizes)
        wide = (made[0], made[1].astype(mx.float32), made[2].astype(mx.float32))
        expected[layer] = torch.from_numpy(np.array(mx.dequantize(*wide, **sizes)))
        for key, value in zip(("weight", "scales", "biases"), made, strict=True):
            state[f"{layer}.{key}"] = torch.from_numpy(np.array(value))
    with tempfile.TemporaryDirectory() as place:
        config = model.config.to_dict() | {"quantization": settings}
        config["quantization_config"] = settings
        (Path(place) / "config.json").write_text(json.dumps(config))
        save_file(state, Path(place) / "model.safetensors", metadata={"format": "mlx"})
        keep("mlx", Path(place), expected, mlx=mx.__version__)


def quanto() -> None:
    """Each of its types, as its own `save_pretrained` writes them."""
    from importlib.metadata import version

    from optimum.quanto import QuantizedModelForCausalLM, freeze, qint2, qint4, qint8, quantize
    from optimum.quanto import qfloat8_e4m3fn as qfloat8

    kinds = {"q_proj": qint2, "k_proj": qint4, "v_proj": qint4, "up_proj": qint8, "o_proj": qfloat8}
    model = llama(64)
    for name, kind in kinds.items():
        quantize(model, weights=kind, include=f"*{name}")
    freeze(model)
    expected = {}
    for layer, module in linears(model).items():
        if hasattr(module, "qweight"):
            weight = module.weight
            weight._scale = weight._scale.float()
            if hasattr(weight, "_shift"):
                weight._shift = weight._shift.float()
            expected[layer] = weight.dequantize().detach()
            weight._scale = weight._scale.half()
            if hasattr(weight, "_shift"):
                weight._shift = weight._shift.half()
    with tempfile.TemporaryDirectory() as place:
        QuantizedModelForCausalLM(model).save_pretrained(place)
        keep("quanto", Path(place), expected, optimum_quanto=version("optimum-quanto"))


def metal() -> None:
    """transformers' ops, which need no Mac to quantize or to dequantize."""
    from transformers import __version__
    from transformers.integrations import metal_quantization as tool

    model, expected = llama(), {}
    state = {name: tensor.half() for name, tensor in model.state_dict().items()}
    for layer in linears(model):
        made = tool._affine_quantize_tensor(state[f"{layer}.weight"], 32, 4)
        words, scales, shifts = made[0], made[1].half(), made[2].half()
        expected[layer] = tool._affine_dequantize_tensor(words, scales, shifts, 32, 4)
        state |= {
            f"{layer}.weight": words, f"{layer}.scales": scales, f"{layer}.qbiases": shifts,
        }  # fmt: skip
    model.config.quantization_config = {"quant_method": "metal", "bits": 4, "group_size": 32}
    keep_state("metal", model, state, expected, transformers=__version__)


def gemma() -> None:
    """transformers' modules: each number of bits, activations' scales, and embeddings."""
    from transformers import __version__
    from transformers.integrations import gemma_quant as tool

    model, expected = llama(), {}
    state = {name: tensor.half() for name, tensor in model.state_dict().items()}
    bits = {"q_proj": 2, "k_proj": 2, "mlp": 8}
    patterns = {
        "embed_tokens": {"num_bits": 8},
        r"self_attn\.[qk]_proj": {"num_bits": 2},
        "mlp": {"num_bits": 8},
    }
    for i, (layer, dense) in enumerate(linears(model).items()):
        own = next((b for name, b in bits.items() if name in layer), 4)
        new: Any = tool.QuantizedLinear(dense.in_features, dense.out_features, num_bits=own)
        fill(new.weight, new.weight_scale, i)
        expected[layer] = new._dequantize_weights().detach()
        state |= {f"{layer}.{k}": v.detach() for k, v in new.state_dict().items()}
        state[f"{layer}.input_activation_scale"] = torch.tensor(0.05 * (i == 3))
        state[f"{layer}.k_cache_scale"] = torch.tensor(0.1)
    words: Any = tool.QuantizedEmbedding(32, 32, torch.float32, num_bits=8)
    words.embedding_scale = nn.Parameter(torch.ones(32, 2), requires_grad=False)
    fill(words.embedding_quantized, words.embedding_scale, 9)
    expected["model.embed_tokens"] = words.weight.detach()
    del state["model.embed_tokens.weight"]
    state |= {f"model.embed_tokens.{k}": v.detach() for k, v in words.state_dict().items()}
    model.config.quantization_config = {
        "quant_method": "gemma",
        "num_bits": 4,
        "quantize_embeddings": True,
        "module_quant_configs": patterns,
        "modules_to_not_convert": ["lm_head"],
    }
    keep_state("gemma", model, state, expected, transformers=__version__)


def fill(codes: Any, scale: Any, seed: int) -> None:
    """Random bytes and scales."""
    drawn = torch.Generator().manual_seed(seed)
    held = torch.randint(0, 256, codes.shape, generator=drawn, dtype=torch.uint8)
    codes.data = held.view(codes.dtype)
    scale.data = torch.rand(scale.shape, generator=drawn) / 50 + 0.001


def keep_state(
    name: str, model: nn.Module, state: Any, expected: dict[str, Any], **about: Any
) -> None:
    with tempfile.TemporaryDirectory() as place:
        config: Any = model.config
        model.state_dict = lambda: state  # type: ignore[assignment,method-assign,return-value]
        save(model, Path(place))
        keep(name, Path(place), expected, **about)
        del config


if __name__ == "__main__":
    for chosen in sys.argv[1:]:
        globals()[chosen]()
