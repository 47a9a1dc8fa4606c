"""Whether a model of ours knows every field of a configuration that changes what it computes.

Nobody lists fields: a model of ours is built without weights from a configuration that notes what
is read, and so is transformers'. A field that transformers reads and ours does not must have the
value that the class of the configuration has by default.
"""

import copy
import inspect
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anybit.engine.models import UnknownModel
from anybit.engine.models.layers import Decoder
from anybit.engine.weights import Part, Weights

# What transformers reads without an effect on logits: names and dtypes, kinds of outputs, training
# (dropout, losses of routers, first time steps), how it runs a model (chunks of recurrences, the
# dtype of residuals), and what other fields say again.
IDLE = {
    "_attn_implementation_internal",
    "_experts_implementation_internal",
    "_name_or_path",
    "chunk_size",
    "mamba_chunk_size",
    "num_logits_to_keep",
    "residual_in_fp32",
    "time_step_floor",
    "time_step_max",
    "time_step_min",
    "time_step_rank",
    "use_mamba_kernels",
    "use_associative_scan",
    "use_mambapy",
    "z_loss_coefficient",
    "base_model_ep_plan",
    "base_model_fsdp_plan",
    "base_model_pp_plan",
    "base_model_tp_plan",
    "_output_attentions",
    "architectures",
    "attention_dropout",
    "attn_implementation",
    "auto_map",
    "bos_token_id",
    "dropout",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "experts_implementation",
    "gradient_checkpointing",
    "initializer_range",
    "layerdrop",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "quantization_config",
    "resid_pdrop",
    "residual_dropout",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sliding_window_pattern",
    "tie_last_hidden_states",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
# Of fields that no class declares, or not in all releases; None: of all others.
DEFAULTS = {"is_causal": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
TOKENS = 4


class Noted(dict[str, Any]):
    """An object of a config.json that notes, by their full names, which of its entries are read."""

    def __init__(self, given: Mapping[str, Any], seen: set[str], prefix: str):
        super().__init__(
            {
                k: Noted(v, seen, f"{prefix}{k}.") if isinstance(v, dict) else v
                for k, v in given.items()
            }
        )
        self.seen, self.prefix = seen, prefix

    def __getitem__(self, key: str) -> Any:
        self.seen.add(f"{self.prefix}{key}")
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(f"{self.prefix}{key}")
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.seen.add(f"{self.prefix}{key}")
        return super().__contains__(key)

    def __deepcopy__(self, memo: Any) -> "Noted":
        return Noted(self, self.seen, self.prefix)


def noting(config: Any, seen: set[str]) -> Any:
    """A copy of a configuration that adds to `seen` the names of the fields that are read."""
    kind, again = type(config), copy.deepcopy(config)

    class Noting(kind):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            seen.add(kind.attribute_map.get(name, name))
            return super().__getattribute__(name)

    Noting.__name__ = kind.__name__
    for name, value in vars(again).items():
        if isinstance(value, dict):
            vars(again)[name] = Noted(value, seen, f"{name}.")
    again.__class__ = Noting
    return again


class Shapes(Weights):
    """Weights without contents."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"), torch.bfloat16)

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def part(self, name: str, shape: tuple[int, int], bias: bool) -> Part:
        return self.tensor(name, shape), self.tensor(name, shape[:1]) if bias else None, None

    def parts(
        self, names: list[str], rows: list[int], columns: int, bias: bool = False
    ) -> list[Part]:  # as one, which many experts build faster
        return [self.part(names[0], (sum(rows), columns), bias)]


def read_by_ours(kind: type[Decoder], config: Any) -> set[str]:
    """The fields that a model of ours asks for."""
    seen: set[str] = set()
    with torch.inference_mode():
        model = kind(noting(config, seen), Shapes(), 1)
        model.logits(torch.empty(1, model.embedding_size, dtype=torch.bfloat16, device="meta"))
        model.embedding_scale  # noqa: B018  the forward pass reads it
    return seen


def read_by_theirs(model: nn.Module) -> tuple[set[str], set[str]]:
    """The fields that transformers' model asks for while it is built and runs, and its cache.

    model: on the meta device. Where it does not run there, all that its source names counts.
    """
    from transformers import DynamicCache, masking_utils

    seen, kept = set[str](), set[str]()
    kind: Any = type(model)
    config: Any = model.config
    try:
        DynamicCache(config=noting(config, kept))
        cache = DynamicCache(config=config)
        with torch.device("meta"), torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `past_key_values` is `cache` in new releases
            again = kind._from_config(noting(model.config, seen), dtype=torch.bfloat16).eval()
            again(torch.zeros(1, TOKENS, dtype=torch.long), past_key_values=cache)
    except Exception:  # it waits for numbers, which there are none of
        source = inspect.getsource(sys.modules[kind.__module__]) + inspect.getsource(masking_utils)
        words = set(re.findall(r"(?<=config\.)\w+|(?<=[\"'])\w+(?=[\"'])", source))
        names = (name for name, _ in fields(vars(model.config)))
        seen |= {name for name in names if name.rpartition(".")[2] in words}
    return seen, kept


def fields(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of a configuration, those inside of objects by their full names."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from fields(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def check_fields(kind: type[Decoder], model: Any, name: object) -> None:
    """UnknownModel where a field changes what transformers' model computes, but not ours.

    Args:
        kind: The model of ours.
        model: transformers', on the meta device.
        name: Of the model, for the error.
    """
    config: Any = model.config
    declared = dict(fields(vars(type(config)())))
    usual = DEFAULTS | declared
    given = {f: v for f, v in fields(vars(config)) if f.partition(".")[0] not in IDLE}
    differ = {f: v for f, v in given.items() if v != usual.get(f)}
    ours = read_by_ours(kind, config)
    # Not for such a model, says its class: those have a meaning that ours may take for another.
    alien = {f for f in differ.keys() & ours if f not in declared and "." not in f}
    left = differ.keys() - ours - {"max_position_embeddings"}  # which who asks for a length reads
    if left | alien:
        seen, kept = read_by_theirs(model)
        left, alien = left & (seen | kept), alien - seen
    if left := left | alien:
        field = min(left)
        raise UnknownModel(
            f"{name}: config.json: {field} is {str(differ[field])[:60]}, which the engine's "
            f"{kind.__name__} does not know"
        )
