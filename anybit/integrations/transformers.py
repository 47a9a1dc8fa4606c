"""anybit as a quantization method of transformers.

    AutoModelForCausalLM.from_pretrained(quantized_directory)
    AutoModelForCausalLM.from_pretrained(dense, quantization_config=anybit.AnybitConfig("fp6"))

Checked with transformers 5.17 and 5.23. Only the names that `hook` needs are imported at the top:
this module is loaded while transformers itself is still loading.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from anybit.dispatch import parse_scheme
from anybit.experts import FUSED, Expert, Experts, expert_layers, fused_experts, split, unpublished
from anybit.files import Stored, read_header
from anybit.format import Packed, tensor_shapes
from anybit.linear import QuantLinear, check_finite
from anybit.quantize import (
    METHOD,
    VERSION,
    Plan,
    Spec,
    canonical,
    dense_layers,
    patterns_for,
    plan_of,
    quantization_config,
    quantized_layers,
    replace,
    resolve,
    shared_weights,
)
from anybit.quantizers.rtn import RTN

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CODES = re.compile(r"\.codes\d+$")


def register() -> None:
    """Enter both classes into transformers' registries. Idempotent."""
    if METHOD not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
        auto.register_quantization_config(METHOD)(AnybitConfig)
    if METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantizer(METHOD)(AnybitQuantizer)


class AnybitConfig(QuantizationConfigMixin):
    """Which format each linear layer has: `quantization_config` in a checkpoint's config.json.

    formats: a spec ("fp6"), or `{glob: spec or None}` as in `quantize_`.
    version: of the checkpoint's layout; a newer one than this anybit knows is a ValueError.
    """

    def __init__(
        self,
        formats: Spec | Plan | Iterable[tuple[str, Spec | None]] | None = None,
        version: int = VERSION,
        quant_method: str = METHOD,
        **unknown: Any,
    ):
        from anybit import __version__

        if not isinstance(version, int) or version > VERSION:
            raise ValueError(
                f"the checkpoint has layout version {version}, anybit {__version__} reads up to "
                f"{VERSION}; upgrade anybit"
            )
        if formats is None or quant_method != METHOD or unknown:
            given = {"formats": formats, "quant_method": quant_method, **unknown}
            raise ValueError(f"anybit's quantization_config has formats and version, not {given}")
        self.quant_method = METHOD  # type: ignore[assignment]
        self.formats = plan_of(formats)

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
    apart = False  # whether experts were taken apart

    def _process_model_before_weight_loading(
        self,
        model: "PreTrainedModel",
        checkpoint_files: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.pre_quantized:
            stored = {n: t for f in checkpoint_files or () for n, t in read_header(Path(f)).items()}
            fill = swap_for_stored(model, self.quantization_config.formats, stored)
        else:
            fill = swap_for_dense(model, self.quantization_config.formats)
        for name, layer in fill.items():
            replace(model, name, layer)
        self.apart = any(isinstance(module, Experts) for module in model.modules())

    def param_needs_quantization(
        self, model: "PreTrainedModel", param_name: str, **kwargs: Any
    ) -> bool:
        name, _, tensor = param_name.rpartition(".")
        module = model.get_submodule(name)
        if tensor in FUSED:
            return isinstance(module, Experts)
        return tensor == "weight" and isinstance(module, QuantLinear)

    def update_weight_conversions(self, weight_conversions: list[Any], *model: Any) -> list[Any]:
        """Experts that are stored one by one are left like that in a checkpoint of ours."""
        if self.pre_quantized and self.apart:
            weight_conversions = [
                c for c in weight_conversions if not str(c.target_patterns[0]).endswith(FUSED)
            ]
        return super().update_weight_conversions(weight_conversions, *model)

    def get_quantize_ops(self) -> "Quantize":
        return Quantize(self)

    def _process_model_after_weight_loading(self, model: "PreTrainedModel", **kwargs: Any) -> None:
        if self.error is not None:
            raise self.error
        placeholders: dict[type, tuple[str, ...]] = {QuantLinear: ("weight",), Experts: FUSED}
        for name, module in model.named_modules():
            for tensor in placeholders.get(type(module), ()):
                if tensor in module._parameters:
                    raise ValueError(
                        f"{name}.{tensor}: not in the checkpoint, so it cannot be quantized; "
                        "a file is missing, or config.json is another model's"
                    )
        for _, layer in quantized_layers(model):
            if not any(b.is_meta for b in layer.buffers()):  # offloaded layers have no contents yet
                layer.prepare()
        model.anybit_formats = self.quantization_config.formats  # type: ignore[assignment]

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

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
            if not isinstance(module, QuantLinear | Experts):
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


def fill(layer: QuantLinear, weight: Tensor, name: str) -> None:
    """Quantize a loaded weight into an empty layer."""
    check_finite(weight, name)
    packed = RTN().quantize(weight, layer.format)
    if packed.shape != (layer.out_features, layer.in_features):
        raise ValueError(
            f"{name}: the checkpoint has shape {packed.shape}, the model "
            f"{(layer.out_features, layer.in_features)}"
        )
    for key, tensor in packed.tensors().items():
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # or it is initialized anew
        setattr(layer, key, tensor)
    layer._parameters.pop("weight", None)  # the placeholder


def fill_experts(experts: Experts, weight: Tensor, name: str, tensor: str) -> None:
    """Fill layers of experts from a loaded tensor (experts, N, K), one of `FUSED`."""
    expected = experts._parameters.pop(tensor)
    if expected is not None and weight.shape != expected.shape:
        raise ValueError(
            f"{name}.{tensor}: the checkpoint has shape {tuple(weight.shape)}, the model "
            f"{tuple(expected.shape)}"
        )
    for e, expert in enumerate(cast(Iterable[Expert], experts)):
        names = expert.names[:2] if tensor == "gate_up_proj" else expert.names[2:]
        for key, part in zip(names, weight[e].chunk(len(names)), strict=True):
            layer = expert.get_submodule(key)
            if isinstance(layer, QuantLinear):
                fill(layer, part, f"{name}.{e}.{key}.weight")
            else:
                layer.weight = nn.Parameter(part.clone(), requires_grad=False)
                layer.weight._is_hf_initialized = True  # type: ignore[attr-defined]


def swap_for_dense(model: nn.Module, formats: Plan) -> dict[str, QuantLinear]:
    """Empty layers with a placeholder `weight` for a dense checkpoint's linear layers.

    Experts to be quantized are taken apart, and get placeholders by transformers' names.
    """
    schemes, out = linear_schemes(model, formats), {}
    fused = dict(fused_experts(model))
    split(model, schemes)
    for name, scheme in schemes.items():
        old = cast(nn.Linear, model.get_submodule(name))
        layer = QuantLinear.empty(scheme, (old.out_features, old.in_features), old.bias)
        if name.rsplit(".", 2)[0] not in fused:
            layer.weight = nn.Parameter(old.weight.detach(), requires_grad=False)
        out[name] = layer
    for name, module in fused.items():
        experts = model.get_submodule(name)
        if isinstance(experts, Experts):
            for key in FUSED:
                experts.register_parameter(key, module._parameters[key])
    return out


def linear_schemes(model: nn.Module, formats: Spec | Plan) -> dict[str, str]:
    """Names of the linear layers to be quantized -> schemes, for a model that is not loaded yet."""
    schemes = resolve(dense_layers(model), formats)
    tied = tied_layers(model)
    for name in schemes:
        if name in tied:
            raise ValueError(
                f"{name} shares its weight with {tied[name]}; keep it: {{'*': ..., '{name}': None}}"
            )
    return schemes


def tied_layers(model: nn.Module) -> dict[str, str]:
    """Layers whose weights are shared, or will be after loading -> the layer shared with."""
    keys = getattr(model, "all_tied_weights_keys", {})
    pairs = [(a.removesuffix(".weight"), b.removesuffix(".weight")) for a, b in keys.items()]
    return shared_weights(model) | dict(pairs) | {b: a for a, b in pairs}


def swap_for_stored(
    model: nn.Module, formats: Plan, stored: Mapping[str, Stored]
) -> dict[str, QuantLinear]:
    """Empty layers, of the dtypes that are stored, for the quantized layers of a checkpoint.

    Raises ValueError when the plan, the model and the checkpoint's tensors do not agree.
    """
    base = getattr(model, "base_model_prefix", "")
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    stored = {unpublished(name, model_type): tensor for name, tensor in stored.items()}
    coded = {key.rpartition(".")[0] for key in stored if CODES.search(key)}
    layers = coded | {key.removesuffix(".weight") for key in stored if key.endswith(".weight")}

    def names_of(name: str) -> tuple[str, ...]:
        """A base model (AutoModel) has shorter names than the model that was saved, or longer."""
        return name, f"{base}.{name}", name.removeprefix(f"{base}.")

    split(model, [n for n in expert_layers(model) if layers.intersection(names_of(n))])
    out, placed = {}, set()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        here = next((n for n in names_of(name) if n in coded), name)
        patterns = patterns_for(here, formats)
        scheme = formats[patterns[-1]] if patterns else None
        if (scheme is not None) != (here in coded):
            raise ValueError(
                f"{name}: config.json says {scheme or 'not quantized'}, but the checkpoint holds "
                f"{'codes' if here in coded else 'no codes'} for it; copy it again"
            )
        placed.add(here)
        if scheme is not None:
            out[name] = stored_layer(canonical(scheme), module, here, stored)
    experts = sorted(name for name in coded - placed if ".experts." in name)
    if experts:  # else they would be initialized at random, with no more than a warning
        raise ValueError(
            f"{len(experts)} layers of experts, such as {experts[0]}, are quantized one by one, "
            f"and transformers' {type(model).__name__} has no such layers; anybit.LLM and vLLM "
            "have, where they know the model"
        )
    return out


def stored_layer(
    scheme: str, old: nn.Linear, name: str, stored: Mapping[str, Stored]
) -> QuantLinear:
    """An empty layer in the place of `old`, of the dtypes that the checkpoint has under `name`."""
    fmt, activation = parse_scheme(scheme)
    shape = (old.out_features, old.in_features)
    keys = (key for key in tensor_shapes(fmt, shape) if f"{name}.{key}" in stored)
    tensors = {key: stored[f"{name}.{key}"].meta() for key in keys}
    return QuantLinear(Packed.from_tensors(fmt, shape, tensors, name), old.bias, activation)


register()
