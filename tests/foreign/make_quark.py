"""Makes the fixture of Quark, which needs `amd-quark`: `python -m tests.foreign.make_quark`."""

import tempfile
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from tests.foreign.make import keep, llama


def quark() -> None:
    """Each of the tool's integers: of rows, groups and tensors, with zero points and without."""
    from importlib.metadata import version

    from quark.torch import ModelQuantizer, export_safetensors
    from quark.torch.export.nn.modules.qparamslinear import QParamsLinear
    from quark.torch.quantization.config import config as tool

    def spec(kind: Any, **given: Any) -> Any:
        usual = {"is_dynamic": False, "scale_type": "float", "round_method": "half_even"}
        known = {k: v for k, v in (usual | given).items() if k in signature(kind).parameters}
        return kind(**known).to_quantization_spec()

    group: dict[str, Any] = {"ch_axis": 1, "group_size": 16}
    row: dict[str, Any] = {"ch_axis": 0}
    schemes = {
        "self_attn.q_proj": spec(tool.Int4PerGroupSpec, symmetric=True, **group),
        "self_attn.k_proj": spec(tool.Uint4PerGroupSpec, symmetric=False, **group),
        "self_attn.v_proj": spec(tool.Int8PerChannelSpec, symmetric=True, **row),
        "self_attn.o_proj": spec(tool.Uint4PerChannelSpec, symmetric=False, **row),
        "mlp.up_proj": spec(tool.Int8PerTensorSpec, observer_method="min_max", symmetric=True),
        "mlp.gate_proj": spec(tool.Int4PerChannelSpec, symmetric=True, **row),
        "mlp.down_proj": spec(tool.Uint8PerGroupSpec, symmetric=False, **group),
    }
    config = tool.QConfig(
        global_quant_config=tool.QLayerConfig(weight=schemes["self_attn.q_proj"]),
        layer_quant_config={f"*{n}": tool.QLayerConfig(weight=s) for n, s in schemes.items()},
        exclude=["lm_head"],
    )
    quantizer = ModelQuantizer(config)
    model = quantizer.quantize_model(llama(64), [torch.randint(3, 32, (1, 16))])
    model = quantizer.freeze(model)
    with tempfile.TemporaryDirectory() as place, torch.no_grad():
        export_safetensors(model, place, custom_mode="quark")
        expected = {}
        for name, module in model.named_modules():
            if isinstance(module, QParamsLinear):
                decoder: Any = module.weight_quantizer
                decoder.scale.data = decoder.scale.data.float()
                expected[name] = decoder(module.weight.data).float()
        keep("quark", Path(place), expected, amd_quark=version("amd-quark"))


if __name__ == "__main__":
    quark()
