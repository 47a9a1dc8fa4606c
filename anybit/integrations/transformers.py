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

from anybit.checkpoint.names import Names, conversions, ignored_unexpected
from anybit.checkpoint.places import Place, places
from anybit.core.packed import Packed, is_codes, tensor_shapes
from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput
from anybit.files.safetensors import Stored, read_header
from anybit.nn.embedding import QuantEmbedding, embedding_layers
from anybit.nn.experts import (
    Experts,
    expert_layers,
    fused_experts,
    split,
)
from anybit.nn.linear import QuantLinear, check_finite, check_grid
from anybit.nn.model import (
    count_weights,
    dense_layers,
    dequantize_,
    full_plan,
    is_linear,
    linear_schemes,
    quantized_modules,
    replace,
    under_all_names,
    weight_of,
)
from anybit.nn.multiplier import Keep, check_keep
from anybit.nn.plan import (
    METHOD,
    VERSION,
    Plan,
    Spec,
    canonical,
    patterns_for,
    quantization_config,
    stored_plan,
)
from anybit.nn.quantized import Quantized
from anybit.nn.tied import forget_ties, sharing_heads, tied_heads
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
            self.quantization_config.formats = full_plan(model, self.quantization_config.formats)
            self.quantization_config.formats |= dict.fromkeys(new_layers(model))
            fill = swap_for_dense(model, self.quantization_config.formats)
        plan = model._get_dtype_plan(model.dtype)  # layers that stay in fp32, by their names

        def planned(name: str, dtype: torch.dtype) -> torch.dtype:
            return next((plan[p] for p in plan if re.search(rf"\b{p}\b", name)), dtype)

        schemes = {name: layer.scheme for name, layer in fill.items()}
        self.heads = sharing_heads(model, schemes)
        forget_ties(model, self.heads)
        with under_all_names(model):
            for name, layer in fill.items():
                replace(model, name, layer)
                if isinstance(layer, QuantLinear):
                    layer.keep = self.quantization_config.keep
                layer.weight_dtype = planned(name, layer.weight_dtype)
        share(model, self.heads)
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


def new_layers(model: "PreTrainedModel") -> set[str]:
    """Linear layers that the class which was saved has not, such as a classifier for a new task.

    transformers gives them random weights, says so, and leaves it to the user to train them.
    """
    import transformers

    names = getattr(model.config, "architectures", None) or [""]
    saved = getattr(transformers, names[0], None)
    if not isinstance(saved, type) or not issubclass(saved, transformers.PreTrainedModel):
        return set()
    if saved is type(model) or not isinstance(model.config, saved.config_class or ()):
        return set()
    with torch.device("meta"):
        known = {name for name, _ in saved(model.config).named_modules()}
    prefix = f"{model.base_model_prefix}."
    known |= {prefix + name for name in known} | {name.removeprefix(prefix) for name in known}
    return {name for name, m in model.named_modules() if is_linear(m) and name not in known}


def share(model: nn.Module, heads: Mapping[str, str]) -> None:
    """Let heads hold the tensors of embeddings, by their names."""
    for head, words in heads.items():
        layer, owner = model.get_submodule(head), model.get_submodule(words)
        assert isinstance(layer, Quantized)
        assert isinstance(owner, Quantized)
        layer.share(owner)


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


def swap_for_stored(
    model: "PreTrainedModel", formats: Plan, stored: Mapping[str, Stored]
) -> tuple[dict[str, Quantized], dict[str, str]]:
    """Empty layers, of the dtypes that are stored, for the quantized layers of a checkpoint.

    Args:
        model: On the meta device, its experts not taken apart.
        formats: The checkpoint's plan.
        stored: Its tensors.

    Returns:
        The layers by name, and the model's names of stored tensors, theirs and those of experts, by
        those in the checkpoint.

    Raises:
        InvalidInput: The plan, the model and the checkpoint's tensors do not agree.
    """
    coded = {key.rpartition(".")[0] for key in stored if is_codes(key)}
    layers = coded | {key.removesuffix(".weight") for key in stored if key.endswith(".weight")}
    table = Names(model)
    whole = places(table, layers)
    fused = expert_layers(model)
    split(model, [name for name in fused if name in whole])
    words = embedding_layers(model)
    tied = {head: own for head, own in tied_heads(model).items() if own in words}
    linear = {n: m for n, m in model.named_modules() if is_linear(m) or n in words}
    where = {name: whole.get(name, Place(name, name)) for name in linear}
    for head, own in tied.items():  # its codes are stored once
        if where[own].stored in coded and head in where and where[head].stored not in layers:
            where[head] = Place(where[head].saved, where[own].stored)
    absent = {name for name, (_, own) in where.items() if own not in layers}
    new = absent & new_layers(model) if absent else set()
    ignored = ignored_unexpected(model)
    out, placed = {}, set()
    names: dict[str, str] = {}
    for name, module in linear.items():
        there, own = where[name]
        if name in new:
            continue
        patterns = patterns_for(there, formats, name in words)
        scheme = formats[patterns[-1]] if patterns else None
        if (scheme is not None) != (own in coded):
            raise InvalidInput(
                f"{name}: config.json says {scheme or 'not quantized'}, but the checkpoint holds "
                f"{'codes' if own in coded else 'no codes'} for it; copy it again"
            )
        placed.add(own)
        if scheme is not None:
            layer = stored_layer(canonical(scheme), module, own, stored)
            out[name] = layer
            if name not in tied or where[tied[name]].stored != own:
                names |= {f"{own}.{key}": f"{name}.{key}" for key in layer.names}
        if name in fused and own in layers:  # transformers' table would merge what is not codes
            ends = [f".{key}" for key in ("weight", "bias") if f"{own}.{key}" in stored]
            names |= {own + end: name + end for end in ends}
    others = (name for name in coded - placed if ".experts." in name)
    experts = sorted(n for n in others if not ignored(n) and not ignored(table.renamed(n)))
    if experts:  # else they would be initialized at random, with no more than a warning
        raise InvalidInput(
            f"{len(experts)} layers of experts, such as {experts[0]}, are quantized one by one, "
            f"and transformers' {type(model).__name__} has no such layers; anybit.LLM and vLLM "
            "have, where they know the model"
        )
    return out, names


def stored_layer(scheme: str, old: nn.Module, name: str, stored: Mapping[str, Stored]) -> Quantized:
    """An empty layer in the place of `old`, of the dtypes that the checkpoint has under `name`."""
    fmt, activation = parse_scheme(scheme)
    weight = old.weight if isinstance(old, nn.Embedding) else weight_of(old)
    shape = cast(tuple[int, int], tuple(weight.shape))
    keys = (key for key in tensor_shapes(fmt, shape) if f"{name}.{key}" in stored)
    tensors = {key: stored[f"{name}.{key}"].meta() for key in keys}
    return in_place_of(old, Packed.from_tensors(fmt, shape, tensors, name), activation)


def in_place_of(old: nn.Module, packed: Packed, activation: str | None) -> Quantized:
    """The quantized layer of an unquantized one's kind."""
    if isinstance(old, nn.Embedding):
        return QuantEmbedding.instead_of(old, packed)
    return QuantLinear.instead_of(old, packed, activation)


register()
