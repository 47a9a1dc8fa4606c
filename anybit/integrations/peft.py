"""Adapters of the `peft` library (LoRA, DoRA) on quantized layers; `hook` registers it with peft.

Training leaves the quantized weight as it is: the adapter's product is added to the layer's.
Merging decodes the weight, adds the adapter's and rounds the sum to nearest in the layer's format.
Checked with peft 0.20 and 0.21.
"""

import dataclasses
import logging
import warnings
from collections.abc import Callable
from typing import Any

import peft
import torch
from peft.tuners import tuners_utils
from peft.tuners.lora import layer as lora
from peft.tuners.lora.model import LoraModel
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from peft.utils import other
from peft.utils import transformers_weight_conversion as conversion
from torch import Tensor, nn
from transformers.integrations.peft import PeftAdapterMixin

from anybit.core.packed import Packed
from anybit.core.rotation import Rotation
from anybit.errors import InvalidInput, Unsupported
from anybit.nn.experts import Experts
from anybit.nn.linear import QuantLinear
from anybit.nn.model import quantized_layers, quantized_weights
from anybit.nn.tied import output_embeddings
from anybit.quantizers.base import quantize_weights
from anybit.quantizers.rtn import RTN

log = logging.getLogger(__name__)


class LoraQuantLinear(lora.Linear):
    """A quantized layer with adapters beside it.

    While adapters are merged, the tensors from before are kept (a few bits a weight), so that
    `unmerge` gives exactly these back.
    """

    def __init__(self, target: nn.Module, adapter_name: str, config: Any, **kwargs: Any):
        config.fan_in_fan_out = False  # the weight is (N, K), that of a Conv1D as well
        super().__init__(target, adapter_name, config=config, **kwargs)
        self.before: tuple[Packed, Tensor | None] | None = None  # weight and bias

    def _get_in_out_features(self, module: nn.Module) -> Any:
        if isinstance(module, QuantLinear):
            return module.in_features, module.out_features
        return super()._get_in_out_features(module)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters to the weight, which is rounded to nearest again.

        Args:
            safe_merge: Without effect: the sum is always checked for NaN and inf.
            adapter_names: By default, the active ones.

        Raises:
            InvalidInput: The sum holds NaN or inf.
            Unsupported: An adapter has a bias to add to a layer without.
        """
        layer = self.get_base_layer()
        if not isinstance(layer, QuantLinear):  # dequantized since then
            super().merge(safe_merge, adapter_names)
            return
        names = [n for n in check_adapters_to_merge(self, adapter_names) if n in self.lora_A]
        done = [self._merge(layer, name) for name in names]
        if done and costs is not None:
            costs[self] = torch.stack(done).sum(0)

    @torch.no_grad()
    def _merge(self, layer: QuantLinear, name: str) -> Tensor:
        """Merge one adapter; returns squared norms: rounding error, adapter's change, weight."""
        weight, bias = layer.dequantize(), layer.bias
        if name in self.lora_variant:  # DoRA and others, which may unmerge and merge to get there
            total = self.lora_variant[name].merge_safe(self, name, weight)
        else:
            total = weight + self.get_delta_weight(name)
        if self.lora_bias[name]:
            if bias is None:
                raise Unsupported(
                    f"adapter {name!r} has a bias (lora_bias=True) and {layer} none to add it to; "
                    "keep the adapter beside the model"
                )
            bias = bias + self.lora_B[name].bias * self.scaling[name]
        if not torch.isfinite(total).all():
            raise InvalidInput(
                f"adapter {name!r}: its sum with the weight holds NaN or inf; train it again"
            )
        before = layer.dequantize()  # anew, since a variant may have merged others again
        if not self.merged_adapters:
            self.before = layer.packed, layer.bias
        packed = rounded(total, layer.packed)
        put(layer, packed, bias)
        self.merged_adapters.append(name)
        errors = packed.dequantize() - total, total - before, total
        return torch.stack([error.double().square().sum() for error in errors]).cpu()

    def unmerge(self) -> None:
        """Put back what was there before any adapter was merged."""
        layer = self.get_base_layer()
        if not isinstance(layer, QuantLinear):
            super().unmerge()
            return
        if self.before is None:
            warnings.warn("no adapter is merged, so there is none to unmerge", stacklevel=2)
            return
        (packed, bias), self.before = self.before, None
        put(layer, packed.to(layer.packed.planes[0].device), bias)
        self.merged_adapters.clear()


# What merging cost each layer (see `_merge`), while a method that merges all of them runs.
costs: dict[nn.Module, Tensor] | None = None


def rounded(weight: Tensor, like: Packed) -> Packed:
    """A weight (N, K) rounded to nearest in the format of another, in its order of columns."""
    if not like.format.order:
        rotation = Rotation.of(like.grid) if like.format.rotate else None
        return quantize_weights(RTN(), [weight], like.format, rotation=rotation)[0]
    order, fmt = like.grid["order"], like.stored().format
    stored = RTN().quantize(weight.index_select(1, order), fmt)
    return dataclasses.replace(stored, format=like.format, grid=stored.grid | {"order": order})


def put(layer: QuantLinear, packed: Packed, bias: Tensor | None) -> None:
    """Give a layer other contents."""
    if layer.sharing:
        raise Unsupported(
            "a head that shares the embeddings' codes cannot be merged into; quantize the model "
            "with a head of its own, or keep the adapter apart"
        )
    for name, tensor in packed.tensors().items():
        setattr(layer, name, tensor)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().to(layer.weight_dtype), requires_grad=False)
    layer.prepare()


# What is changed in peft.


def with_quantized(create: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """`LoraModel._create_new_module`, which makes the layer with adapters."""

    def create_new_module(config: Any, adapter: str, target: nn.Module, **kwargs: Any) -> nn.Module:
        layer = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if isinstance(layer, QuantLinear) and kwargs.get("parameter_name") is None:
            kwargs.pop("parameter_name", None)
            return LoraQuantLinear(target, adapter, config=config, **kwargs)
        return create(config, adapter, target, **kwargs)

    return create_new_module


def with_cost(merge: Callable[..., Any]) -> Callable[..., Any]:
    """A method of `LoraModel` that merges all layers; it says what the rounding cost."""

    def merge_and_say(*args: Any, **kwargs: Any) -> Any:
        global costs
        found: dict[nn.Module, Tensor] = {}
        costs = found
        try:
            out = merge(*args, **kwargs)
        finally:
            costs = None
        if found:
            error, change, size = torch.stack(list(found.values())).sum(0).sqrt().tolist()
            log.warning(
                "merged adapters into %d quantized layers, rounded to nearest: the error is %.2g "
                "of the weights and %.2g of what the adapters changed; where that is too much, "
                "keep the adapter beside the model",
                len(found),
                error / max(size, 1e-30),
                error / max(change, 1e-30),
            )
        return out

    return merge_and_say


def with_quantized_names(find: Callable[..., Any]) -> Callable[..., Any]:
    """`_maybe_include_all_linear_layers`, for which "all-linear" means quantized ones as well."""

    def find_all(config: Any, model: nn.Module) -> Any:
        meant = getattr(config, "target_modules", None)
        config = find(config, model)
        if isinstance(meant, str) and meant.lower() == "all-linear":
            tuned = {m.get_base_layer() for m in model.modules() if isinstance(m, BaseTunerLayer)}
            heads = output_embeddings(model)
            config.target_modules = set(config.target_modules) | {
                name
                for name, layer in quantized_layers(model)
                if layer not in tuned and name not in heads
            }
        return config

    return find_all


def for_quantized(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """`prepare_model_for_kbit_training`, which treats our models as it does those of HQQ.

    They get gradient checkpointing, and their dense weights stay in the model's dtype.
    """

    def prepare_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(True for _ in quantized_layers(model)):
            return prepare(model, *args, **kwargs)
        model.hqq_quantized = True  # what it asks
        try:
            return prepare(model, *args, **kwargs)
        finally:
            del model.hqq_quantized

    return prepare_model


def with_refusal(check: Callable[..., None]) -> Callable[..., None]:
    """`ModulesToSaveWrapper.check_module`, as a quantized layer cannot be trained itself."""

    def check_module(wrapper: Any) -> None:
        if any(isinstance(module, QuantLinear) for module in wrapper.original_module.modules()):
            raise Unsupported(
                "a quantized layer cannot be trained itself (modules_to_save): name it in "
                "target_modules, or quantize the model with that layer kept dense "
                "({'*': ..., 'NAME': None})"
            )
        check(wrapper)

    return check_module


def with_weights(count: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
    """`get_nb_trainable_parameters`, which sees no parameter in a quantized weight."""

    def count_all(model: Any) -> tuple[int, int]:
        trainable, total = count(model)
        return trainable, total + quantized_weights(model)

    return count_all


def apart(model: nn.Module) -> bool:
    """Whether experts of a model are layers of their own, as in checkpoints."""
    return any(isinstance(module, Experts) for module in model.modules())


def with_experts_apart(convert: Callable[..., None]) -> Callable[..., None]:
    """`convert_peft_config_for_transformers`, which would target experts as one fused tensor."""

    def convert_config(peft_config: Any, model: nn.Module, conversions: Any) -> None:
        if not apart(model):
            convert(peft_config, model, conversions)

    return convert_config


def with_states_apart(convert: Callable[..., Any]) -> Callable[..., Any]:
    """`convert_peft_adapter_state_dict_for_transformers`, which would fuse experts' adapters."""

    def convert_state(
        model: nn.Module, peft_config: Any, adapter_state_dict: Any, adapter_name: str = "default"
    ) -> Any:
        if apart(model):
            return adapter_state_dict
        return convert(model, peft_config, adapter_state_dict, adapter_name)

    return convert_state


def with_experts_refused(load: Callable[..., Any]) -> Callable[..., Any]:
    """`load_adapter` of transformers' models, which would find no adapter of an expert."""

    def load_adapter(model: Any, *args: Any, **kwargs: Any) -> Any:
        if apart(model):
            raise Unsupported(
                f"{type(model).__name__}.load_adapter looks for adapters of fused experts, and "
                "quantized experts are layers of their own; use peft.PeftModel.from_pretrained"
            )
        return load(model, *args, **kwargs)

    return load_adapter


def register() -> None:
    """Enter quantized layers into peft. Idempotent."""
    if getattr(LoraModel, "knows_anybit", False):
        return
    LoraModel.knows_anybit = True
    LoraModel._create_new_module = staticmethod(with_quantized(LoraModel._create_new_module))
    for name in ("merge_adapter", "_unload_and_optionally_merge"):
        setattr(LoraModel, name, with_cost(getattr(LoraModel, name)))
    find = "_maybe_include_all_linear_layers"
    setattr(tuners_utils, find, with_quantized_names(getattr(tuners_utils, find)))
    for name, change in (
        ("convert_peft_config_for_transformers", with_experts_apart),
        ("convert_peft_adapter_state_dict_for_transformers", with_states_apart),
    ):
        setattr(conversion, name, change(getattr(conversion, name)))
    PeftAdapterMixin.load_adapter = with_experts_refused(PeftAdapterMixin.load_adapter)  # type: ignore[method-assign]
    for kind in (peft.PeftModel, peft.PeftMixedModel):
        kind.get_nb_trainable_parameters = with_weights(kind.get_nb_trainable_parameters)
    wrapper = other.ModulesToSaveWrapper
    wrapper.check_module = with_refusal(wrapper.check_module)
    prepare = for_quantized(other.prepare_model_for_kbit_training)
    for module in (peft, peft.utils, other):
        module.prepare_model_for_kbit_training = prepare


register()
