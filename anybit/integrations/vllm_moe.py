"""Mixtures of experts in vLLM: loading and parallelism.

Every expert has a gate, an up and a down projection, each a `Piece` of its own. Where a backend has
a grouped product for the experts' format, tokens sorted by expert go through one launch; else one
expert comes after the other.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none
from vllm.lora.utils import is_in_target_modules
from vllm.model_executor.layers.fused_moe.activation import (
    ApplyMoEActivationConfig,
    apply_moe_activation,
)
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.utils import set_weight_attrs

from anybit.core.packed import WHOLE
from anybit.errors import InvalidInput, Unsupported
from anybit.integrations.vllm_foreign import Source
from anybit.integrations.vllm_linear import (
    Empty,
    Foreign,
    check,
    check_open,
    nothing,
    quantized,
    taken,
)
from anybit.integrations.vllm_products import Experts, all_experts, one_by_one
from anybit.integrations.vllm_ready import register_experts
from anybit.nn.grouped import Weight
from anybit.nn.sharding import Piece, share

if TYPE_CHECKING:
    from anybit.integrations.vllm import AnybitConfig

SHARDS = {"w13": ("w1", "w3"), "w2": ("w2",)}  # vLLM's names: gate and up, down


def method_for(config: "AnybitConfig", layer: Any, prefix: str) -> "AnybitMoEMethod | None":
    """The method of a layer of experts; None when none of them is quantized."""
    projections = {
        "w1": layer.ckpt_gate_proj_name,
        "w2": layer.ckpt_down_proj_name,
        "w3": layer.ckpt_up_proj_name,
    }
    names = {
        (expert, shard): f"{prefix}.{expert}.{projection}"
        for expert in range(layer.moe_config.num_logical_experts)
        for shard, projection in projections.items()
        if projection is not None
    }
    schemes = {at: config.scheme(name) for at, name in names.items()}
    coded = any(config.names.get(name, name) in config.coded for name in names.values())
    if coded or any(schemes.values()):
        check_adapters(prefix)
    if coded:
        source = config.layers_of_others()
        return StoredExperts(layer.moe_config, names, schemes, config.backend, source)
    if any(schemes.values()):
        return OnLoadExperts(layer.moe_config, names, schemes, config.backend)
    return None


def check_adapters(prefix: str) -> None:
    """Raise Unsupported where vLLM would put adapters on these experts: it has some for its own."""
    config = get_current_vllm_config_or_none()
    lora = None if config is None else config.lora_config
    if lora is not None and is_in_target_modules(prefix, lora.target_modules):
        raise Unsupported(
            f"{prefix}: vLLM has no adapters for experts in codes; name the layers that have some "
            "(lora_target_modules=['qkv_proj', 'o_proj']), or keep the experts: None"
        )


class AnybitMoEMethod(FusedMoEMethodBase):
    """names and schemes: of each (expert, shard), shards being vLLM's w1 (gate), w3 (up), w2.

    source: of layers that another tool quantized.
    """

    def __init__(
        self,
        moe: Any,
        names: dict[tuple[int, str], str],
        schemes: dict[tuple[int, str], str | None],
        backend: str | None,
        source: Source | None = None,
    ):
        super().__init__(moe)
        self.names, self.schemes, self.backend, self.source = names, schemes, backend, source
        first = next(iter(names.values()))
        if moe.has_bias:
            raise InvalidInput(f"{first}: experts with a bias are not supported; keep them: None")
        if moe.moe_parallel_config.use_all2all_kernels:
            raise InvalidInput(
                f"{first}: experts behind vLLM's all-to-all kernels (data parallelism) are not "
                "supported; use tensor or expert parallelism, or keep them unquantized: None"
            )

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: Any,
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def get_fused_moe_quant_config(self, layer: nn.Module) -> Any:
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def shards(self, kind: str) -> tuple[str, ...]:
        """The shards of `w13` or `w2` that the experts have; those without a gate lack w3."""
        return tuple(shard for shard in SHARDS[kind] if (0, shard) in self.names)

    def local(self, layer: Any) -> list[int]:
        """The experts of this rank, in the order of its weights."""
        to_local = layer.expert_map_manager.map_global_to_local
        mine = {to_local(expert): expert for expert in range(layer.global_num_experts)}
        return [mine[at] for at in range(layer.local_num_experts)]

    def finish(self, layer: Any, weights: dict[str, list[list[Weight]]]) -> None:
        """Lay out the experts' weights: for w13 and w2, of every expert, its shards."""
        dtype, name = layer.params_dtype, f"{layer.layer_name}"
        layer.w13 = Experts(weights["w13"], self.backend, dtype, f"{name}.w13")
        layer.w2 = Experts(weights["w2"], self.backend, dtype, f"{name}.w2")
        register_experts(self, layer)

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """x (M, K), topk_weights and topk_ids (M, chosen) -> (M, K)."""
        if layer.expert_map is not None:
            topk_ids = layer.expert_map[topk_ids]  # -1: another rank's
        if layer.apply_router_weight_on_input:
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        config = ApplyMoEActivationConfig.from_configs(self.moe, FUSED_MOE_UNQUANTIZED_CONFIG)
        gated = len(self.shards("w13")) == 2

        def activate(h: Tensor) -> Tensor:
            out = h.new_empty(len(h), h.shape[1] // 2 if gated else h.shape[1])
            return apply_moe_activation(layer.activation, out, h, activation_config=config)

        grouped = layer.w13.grouped and layer.w2.grouped
        run = all_experts if grouped else one_by_one
        return run(x, topk_weights, topk_ids, layer.w13, layer.w2, activate)


class StoredExperts(AnybitMoEMethod):
    """Experts of a quantized checkpoint."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        part, rank, ranks = intermediate_size_per_partition, self.moe.tp_rank, self.moe.tp_size
        layer.pieces = {}
        for at, expert in enumerate(self.local(layer)):
            for kind in SHARDS:
                for shard in self.shards(kind):
                    name, scheme = self.names[expert, shard], self.schemes[expert, shard]
                    if kind == "w13":
                        piece = Piece(name, scheme, part, hidden_size)
                    else:
                        columns = share(part * ranks, rank, ranks) if ranks > 1 else WHOLE
                        piece = Piece(name, scheme, hidden_size, part * ranks, columns)
                    layer.pieces[at, shard] = piece
        to_local = layer.expert_map_manager.map_global_to_local
        for kind in SHARDS:
            pieces = {at: piece for at, piece in layer.pieces.items() if at[1] in SHARDS[kind]}
            keys = dict.fromkeys(key for piece in pieces.values() for key in piece.keys())  # noqa: SIM118
            if self.source is None:
                for key in keys:  # some models find those alone whose names begin as a weight's
                    for name in (key, f"weight_{key}"):
                        own = Receiver(key, layer.pieces, to_local, rank)
                        layer.register_parameter(f"{kind}_{name}", own)
                continue
            receivers = {key: Receiver(key, layer.pieces, to_local, rank) for key in keys}
            names = {at: name for at, name in self.names.items() if at[1] in SHARDS[kind]}
            seen = set[str]()
            for key in self.source.keys(names.values()):
                theirs = ForeignExperts(key, self.source, receivers, seen)
                theirs.layers = names
                layer.register_parameter(f"{kind}_{key}", theirs)

    def process_weights_after_loading(self, layer: Any) -> None:
        if "w13" in layer._modules:
            return
        places = [*layer.pieces]
        found = dict(zip(places, taken(layer, layer.pieces.values()), strict=True))
        weights = {
            kind: [
                [found[at, shard] for shard in self.shards(kind)]
                for at in range(layer.local_num_experts)
            ]
            for kind in SHARDS
        }
        self.finish(layer, weights)


class OnLoadExperts(AnybitMoEMethod):
    """Experts of a dense checkpoint, quantized as soon as the layer is read (round to nearest)."""

    uses_meta_device = True  # vLLM makes room for one layer at a time

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        part, ranks = intermediate_size_per_partition, self.moe.tp_size
        for at, scheme in self.schemes.items():
            n, k = (hidden_size, part * ranks) if at[1] == "w2" else (part * ranks, hidden_size)
            if scheme is not None:
                check(self.names[at], scheme, n, k, ranks if at[1] == "w2" else 1)
        shapes = {
            "w13_weight": (num_experts, len(self.shards("w13")) * part, hidden_size),
            "w2_weight": (num_experts, hidden_size, part),
        }
        for key, shape in shapes.items():
            data = torch.empty(shape, dtype=params_dtype, device="meta")
            layer.register_parameter(key, nn.Parameter(data, requires_grad=False))
            set_weight_attrs(getattr(layer, key), extra_weight_attrs)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        if "w13_weight" not in layer._parameters:
            return
        weights: dict[str, list[list[Weight]]] = {}
        for kind in SHARDS:
            stored = getattr(layer, f"{kind}_weight").data
            shards = self.shards(kind)
            weights[kind] = [
                [
                    quantized(weight, self.schemes[expert, shard], self.names[expert, shard])
                    for shard, weight in zip(shards, stored[at].chunk(len(shards)), strict=True)
                ]
                for at, expert in enumerate(self.local(layer))
            ]
            delattr(layer, f"{kind}_weight")
        if "w13" in layer._modules:  # other weights for a running engine
            for kind, experts in weights.items():
                getattr(layer, kind).fill(experts)
        else:
            self.finish(layer, weights)


class Receiver(Empty):
    """Hands one kind of stored tensor of all experts to their pieces."""

    def __new__(cls, key: str, pieces: dict[tuple[int, str], Piece], *args: Any) -> "Receiver":
        return super().__new__(cls, nothing(key, pieces.values()))

    def __init__(
        self,
        key: str,
        pieces: dict[tuple[int, str], Piece],
        to_local: Callable[[int], int],
        rank: int,
    ):
        super().__init__(self.data)
        self.key, self.pieces, self.to_local, self.rank = key, pieces, to_local, rank

    def load(
        self,
        param: "Receiver",
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool:
        """What a model calls with each tensor; False for an expert of another rank."""
        check_open(self.pieces)
        at = self.to_local(expert_id)
        if at < 0:
            return False
        piece = self.pieces[at, shard_id]
        first = 0 if shard_id == "w2" else self.rank * piece.shape[0]
        piece.take(self.key, loaded_weight, first, self.data.device)
        return True


class ForeignExperts(Foreign):
    """Of all experts. layers: names of each (expert, shard)."""

    layers: Mapping[tuple[int, str], str]

    def load(
        self,
        param: Foreign,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool:
        """What a model calls with each tensor; False for an expert of another rank."""
        check_open(self.first.pieces)
        if self.first.to_local(expert_id) < 0:
            return False
        name = self.layers[expert_id, shard_id]
        self.bring(name, loaded_weight, weight_name, shard_id, expert_id)
        return True
