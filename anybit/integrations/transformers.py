"""anybit as a quantization method of transformers.

    AutoModelForCausalLM.from_pretrained(quantized_directory)
    AutoModelForCausalLM.from_pretrained(dense, quantization_config=anybit.AnybitConfig("fp6"))

Checked with transformers 5.17 and 5.23. Only the names that `hook` needs are imported at the top:
this module is loaded while transformers itself is still loading.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from anybit.checkpoint.names import conversions
from anybit.checkpoint.swap import in_place_of, new_layers, put, share, swap_for_stored
from anybit.core.packed import Packed
from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput
from anybit.files.safetensors import read_header
from anybit.nn.embedding import embedding_layers
from anybit.nn.experts import (
    Experts,
    fused_experts,
    split,
)
from anybit.nn.linear import QuantLinear, check_finite, check_grid
from anybit.nn.model import (
    count_weights,
    dense_layers,
    dequantize_,
    linear_schemes,
    outline_of,
    quantized_modules,
)
from anybit.nn.multiplier import Keep, check_keep
from anybit.nn.plan import (
    METHOD,
    VERSION,
    Plan,
    Spec,
    quantization_config,
    stored_plan,
)
from anybit.nn.quantized import Quantized
from anybit.nn.tied import sharing_heads
from anybit.quantizers.base import quantize_weight
from anybit.quantizers.rtn import RTN

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def register() -> None:
    """Enter both classes into transformers' registries. Idempotent."""
    if METHOD not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
        auto.register_quantization_config(METHOD)(AnybitConfig)
        # Whose `get_loading_attributes` counts beside what a checkpoint says.
        known: Any = getattr(auto, "LOADING_ATTRIBUTES_CONFIG_TYPES", ())
        auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (*known, AnybitConfig)
    if METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantizer(METHOD)(AnybitQuantizer)


class AnybitConfig(QuantizationConfigMixin):
    """Which format each linear layer has: `quantization_config` in a checkpoint's config.json.

    formats: a spec ("fp6"), or `{glob: spec or None}` as in `quantize_`; needless for a quantized
        checkpoint, which says it itself.
    keep: as in `anybit.load`; it is not stored.
    version: of the checkpoint's layout; a newer one than this anybit knows is a ValueError.
    """

    def __init__(
        self,
        formats: Spec | Plan | Iterable[tuple[str, Spec | None]] | None = None,
        version: int = VERSION,
        quant_method: str = METHOD,
        keep: Keep = "auto",
        **unknown: Any,
    ):
        check_keep(keep)
        if formats is None and keep != "auto":
            formats = {}
        given = {"formats": formats, "version": version, "quant_method": quant_method}
        self.quant_method = METHOD  # type: ignore[assignment]
        self.formats = stored_plan(given | unknown)
        self.keep: Keep = keep

    def get_loading_attributes(self) -> dict[str, Any]:
        """What `from_pretrained` takes from its argument where a checkpoint has a plan."""
        return {"keep": self.keep}

    def to_dict(self) -> dict[str, Any]:
        return quantization_config(self.formats)


class AnybitQuantizer(HfQuantizer):
    """Swaps linear layers while transformers loads a model.

    For a quantized checkpoint, by empty layers that the checkpoint's tensors fill. For a dense one,
    by empty layers with a placeholder `weight`: transformers loads into that name only what the
    module has, and hands the tensor to `Quantize`, which fills the layer and drops the placeholder.
    Experts are taken apart, and get placeholders for the tensors that transformers makes of them.
    """

    quantization_config: AnybitConfig
    error: Exception | None = None  # the first that a weight caused; see Quantize
    heads: Mapping[str, str] = MappingProxyType({})  # -> embeddings whose codes they share
    types: Mapping[str, torch.dtype] = MappingProxyType({})  # of parameters, before they are loaded
    names: Mapping[str, str] = MappingProxyType({})  # of stored codes and experts, in the model
    table: Sequence[Any] = ()  # transformers' own for names

    def _process_model_before_weight_loading(
        self,
        model: "PreTrainedModel",
        checkpoint_files: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.pre_quantized:
            stored = {n: t for f in checkpoint_files or () for n, t in read_header(Path(f)).items()}
            fill, self.names = swap_for_stored(model, self.quantization_config.formats, stored)
        else:
            given = self.quantization_config.formats
            self.quantization_config.formats = outline_of(model).full_plan(given)
            self.quantization_config.formats |= dict.fromkeys(new_layers(model))
            fill = swap_for_dense(model, self.quantization_config.formats)
        plan = model._get_dtype_plan(model.dtype)  # layers that stay in fp32, by their names

        def planned(name: str, dtype: torch.dtype) -> torch.dtype:
            return next((plan[p] for p in plan if re.search(rf"\b{p}\b", name)), dtype)

        self.heads = put(model, fill)
        for name, layer in fill.items():
            if isinstance(layer, QuantLinear):
                layer.keep = self.quantization_config.keep
            layer.weight_dtype = planned(name, layer.weight_dtype)
        self.types = {name: planned(name, p.dtype) for name, p in model.named_parameters()}

    def param_needs_quantization(
        self, model: "PreTrainedModel", param_name: str, **kwargs: Any
    ) -> bool:
        name, _, tensor = param_name.rpartition(".")
        module = model.get_submodule(name)
        if isinstance(module, Experts):
            return tensor in module.layout.tensors
        return tensor == "weight" and isinstance(module, Quantized)

    def update_weight_conversions(self, weight_conversions: list[Any], *model: Any) -> list[Any]:
        """Codes go to their layers, and experts that are stored one by one stay like that."""
        if self.pre_quantized:
            self.table = weight_conversions
            weight_conversions = conversions(self.names, weight_conversions)
        return super().update_weight_conversions(weight_conversions, *model)  # type: ignore[no-untyped-call]

    def get_quantize_ops(self) -> "Quantize":
        return Quantize(self)

    def _process_model_after_weight_loading(self, model: "PreTrainedModel", **kwargs: Any) -> None:
        if self.error is not None:
            raise self.error
        for name, module in model.named_modules():
            found = module._parameters if isinstance(module, Experts) else {}
            if isinstance(module, Quantized) and "weight" in module._parameters:
                found = {"weight": None}
            for tensor in found:
                raise InvalidInput(
                    f"{name}.{tensor}: not in the checkpoint, so it cannot be quantized; "
                    "a file is missing, or config.json is another model's"
                )
        for name, parameter in model.named_parameters():
            if self.pre_quantized:  # renamed, it is loaded as stored before transformers 5.24
                parameter.data = parameter.data.to(self.types.get(name, parameter.dtype))
            elif not parameter.is_meta:
                check_finite(parameter, name)
        share(model, self.heads)
        for name, layer in quantized_modules(model):
            if not any(b.is_meta for b in layer.buffers()):  # offloaded layers have no contents yet
                if self.pre_quantized:
                    check_grid(layer.packed, f"{model.name_or_path}: {name}")
                if isinstance(layer, QuantLinear):
                    layer.prepare()
        if self.pre_quantized:  # what transformers goes by when it saves the model
            used: Any = [c for c in self.table if c.was_used()]
            model._weight_conversions = used
        model.anybit_formats = self.quantization_config.formats  # type: ignore[assignment]
        count_weights(model)

    def _dequantize(self, model: "PreTrainedModel", dtype: Any = None) -> "PreTrainedModel":
        return dequantize_(model)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # by adapters of peft

    @property
    def is_compileable(self) -> bool:
        return True


class Quantize:
    """The operation that transformers runs on every loaded weight of a layer to be quantized."""

    def __init__(self, quantizer: AnybitQuantizer):
        self.quantizer = quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        model: nn.Module,
        missing_keys: set[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        """Fill the layer of each weight; nothing is left for transformers to set."""
        rest: dict[str, Tensor] = {}
        for name, value in input_dict.items():
            weight = value[0] if isinstance(value, list) else value
            parent, _, tensor = name.rpartition(".")
            module = model.get_submodule(parent)
            if not isinstance(module, Quantized | Experts):
                rest[name] = weight  # one of several results of a weight conversion
                continue
            try:
                if self.quantizer.error is None:
                    if isinstance(module, Experts):
                        fill_experts(module, weight, parent, tensor)
                    else:
                        fill(module, weight, name)
            except Exception as error:
                # Raised here, transformers would show it in a table after loading all the rest.
                self.quantizer.error = error
            if missing_keys is not None:
                state = module.state_dict().items()
                done = [key for key, t in state if self.quantizer.error or not t.is_meta]
                missing_keys -= {name, *(f"{parent}.{key}" for key in done)}
        return rest


def fill(layer: Quantized, weight: Tensor, name: str) -> None:
    """Quantize a loaded weight into an empty layer."""
    check_finite(weight, name)
    weight = weight.T if isinstance(layer, QuantLinear) and layer.transposed else weight
    packed = quantize_weight(RTN(), weight, layer.format)
    if packed.shape != layer.shape:
        raise InvalidInput(
            f"{name}: the checkpoint has shape {packed.shape}, the model {layer.shape}"
        )
    for key, tensor in packed.tensors().items():
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # or it is initialized anew
        setattr(layer, key, tensor)
    layer._parameters.pop("weight", None)  # the placeholder


def fill_experts(experts: Experts, whole: Tensor, name: str, tensor: str) -> None:
    """Fill layers of experts from a loaded tensor, one of the layout's."""
    expected = experts._parameters.pop(tensor)
    if expected is not None and whole.shape != expected.shape:
        raise InvalidInput(
            f"{name}.{tensor}: the checkpoint has shape {tuple(whole.shape)}, the model "
            f"{tuple(expected.shape)}"
        )
    key = "bias" if tensor.endswith("_bias") else "weight"
    for path, part in experts.layout.cut(tensor, whole):
        layer = experts.get_submodule(path)
        if isinstance(layer, QuantLinear) and key == "weight":
            fill(layer, part, f"{name}.{path}.weight")
        else:
            parameter = nn.Parameter(part.clone(), requires_grad=False)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
            setattr(layer, key, parameter)


def swap_for_dense(model: nn.Module, formats: Plan) -> dict[str, Quantized]:
    """Empty layers with a placeholder `weight` for a dense checkpoint's linear layers.

    So it is for embeddings, but for heads that share their weight, which get no placeholder.
    Experts to be quantized are taken apart, and get placeholders by transformers' names.
    """
    schemes, out = linear_schemes(model, formats), dict[str, Quantized]()
    heads, fused = sharing_heads(model, schemes), dict(fused_experts(model))
    shapes = dense_layers(model) | embedding_layers(model)
    split(model, schemes)
    for name, scheme in schemes.items():
        old, shape = model.get_submodule(name), shapes[name]
        fmt, activation = parse_scheme(scheme)
        out[name] = in_place_of(old, Packed.meta(fmt, (shape[0], shape[1])), activation)
        if name not in heads and name.rsplit(".", 2)[0] not in fused:
            out[name]._parameters["weight"] = nn.Parameter(
                cast(nn.Linear, old).weight.detach(), False
            )
    for name, module in fused.items():
        experts = model.get_submodule(name)
        if isinstance(experts, Experts):
            for key in experts.layout.tensors:
                experts._parameters[key] = module._parameters[key]
    return out


register()
