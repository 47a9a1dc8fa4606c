"""Whether a model of ours knows every field of a configuration that changes what it computes.

Nobody lists fields: a model of ours is built without weights from a configuration that notes what
is read. A field that it does not read must have the value that the class of the configuration has
by default, or be one that transformers' model, which is built only for that, does not read either.
"""

import copy
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig

from anybit.engine.models import UnknownModel
from anybit.engine.models.layers import Decoder
from anybit.engine.weights import Part, Weights, Words
from anybit.nn.experts import unpublished
from anybit.nn.gates import gates_named
from anybit.nn.outline import Outline

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
    "prefix",
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
# Files of transformers beside a model's own that ask for fields.
SHARED = (
    "cache_utils",
    "configuration_utils",
    "masking_utils",
    "modeling_layers",
    "modeling_rope_utils",
    "modeling_utils",
)
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


class Asked(Weights):
    """Weights without contents, which note what a model asks for.

    Matrices take no memory. Vectors do, since torch imports its compiler for sums of those that
    take none.

    Attributes:
        fields: Names of fields of the configuration.
        heads: Names of output layers.
        tensors: Shapes of tensors, by their names.
        layers: Shapes of linear layers, by their names; tied heads and experts are among them.
        scales: Names of tensors that a checkpoint may have beside those.
        embeddings: Names of the tables of embeddings.
        tied: Heads that have an embedding's weight -> that embedding.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), torch.bfloat16)
        self.fields, self.scales, self.embeddings = set[str](), set[str](), set[str]()
        self.tensors: dict[str, tuple[int, ...]] = {}
        self.layers: dict[str, tuple[int, ...]] = {}
        self.heads, self.tied = set[str](), dict[str, str]()

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        self.tensors[name] = shape
        return torch.zeros(shape, dtype=dtype or self.dtype)

    def parts(
        self, names: list[str], rows: list[int], columns: int, bias: bool = False
    ) -> list[Part]:  # as one
        for name, n in zip(names, rows, strict=True):
            self.tensors[f"{name}.weight"] = self.layers[name] = n, columns
            if bias:
                self.tensors[f"{name}.bias"] = (n,)
        whole = torch.empty(sum(rows), columns, dtype=self.dtype, device="meta")
        return [(whole, torch.zeros(sum(rows), dtype=self.dtype) if bias else None, None)]

    def experts(self, names: list[list[str]], rows: list[int], columns: int) -> list[list[Part]]:
        together = [name for own in names for name in own]  # a module each would take seconds
        return [self.parts(together, rows * len(names), columns)]

    def router(self, name: str, experts: int, columns: int, bias: bool) -> nn.Module:
        layer = super().router(name, experts, columns, bias)
        del self.layers[name]
        return layer

    def part(self, name: str, shape: tuple[int, int], bias: bool) -> Part:
        return self.parts([name], [shape[0]], shape[1], bias)[0]

    def kv_scales(self, name: str, shape: tuple[int, int]) -> None:
        self.scales |= {f"{name}.{kind}_scale" for kind in "kv"}

    def embedding(self, name: str, shape: tuple[int, int]) -> Words:
        self.embeddings.add(name)
        self.tensors[f"{name}.weight"] = shape
        return nn.Embedding.from_pretrained(torch.empty(shape, dtype=self.dtype, device="meta"))

    def head(self, name: str, words: Words, tied: bool) -> nn.Module:
        super().head(name, words, tied)
        self.heads.add(name)
        if tied:
            self.layers[name] = words.num_embeddings, words.embedding_dim
            self.tied[name] = next(iter(self.embeddings))  # models have one table
        return nn.Identity()


def outline_of(kind: type[Decoder], config: Any, asked: Asked) -> tuple[Outline, dict[str, str]]:
    """What plans go by, and the checkpoint's names of layers and embeddings by transformers'."""

    def theirs(name: str) -> str:
        if kind.base_name and name.startswith(f"{kind.prefix}."):
            name = kind.base_name + name.removeprefix(kind.prefix)
        return unpublished(name, config.model_type)

    layers = {theirs(name): shape for name, shape in asked.layers.items()}
    words = {theirs(name): asked.tensors[f"{name}.weight"] for name in asked.embeddings}
    tied = {theirs(name): theirs(other) for name, other in asked.tied.items()}
    deciding = {*map(theirs, gates_named(asked.tensors, asked.layers))}
    outline = Outline(layers, words, {*map(theirs, asked.heads)}, tied, deciding, config)
    return outline, {theirs(name): name for name in (*asked.layers, *asked.embeddings)}


def asked_by(kind: type[Decoder], config: Any) -> Asked:
    """What a model of ours asks for while it is built and runs."""
    asked = Asked()
    with torch.inference_mode():
        model = kind(noting(config, asked.fields), asked, 1)
        model.logits(torch.zeros(1, 1))
        model.embedding_scale  # noqa: B018  the forward pass reads it
    return asked


def read_by_theirs(model: nn.Module) -> tuple[set[str], set[str]]:
    """The fields that transformers' model asks for while it is built and runs, and its cache.

    model: on the meta device. Where it does not run there, all that its source names counts.
    """
    from transformers import DynamicCache

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
        names = Sources(type(config))
        seen |= {name for name, _ in fields(vars(config)) if names.may_read(name)}
    return seen, kept


class Sources:
    """The names that stand in what transformers' model of a configuration is made of.

    They are read as text, since to import them takes seconds.
    """

    def __init__(self, kind: Any):
        file = Path(inspect.getfile(kind))
        model = file.with_name(file.name.replace("configuration_", "modeling_", 1))
        own = kind.__mro__[: kind.__mro__.index(PretrainedConfig)]
        properties = [v for k in own for v in vars(k).values() if isinstance(v, property)]
        self.known = model.is_file() and model != file
        self.model = model.read_text(encoding="utf-8") if self.known else ""
        shared = (Path(transformers.__file__).with_name(f"{name}.py") for name in SHARED)
        texts = [self.model, *(path.read_text(encoding="utf-8") for path in shared)]
        texts += [inspect.getsource(v.fget) for v in properties if v.fget]
        self.words = set(re.findall(r"\w+", " ".join(texts)))
        self.other = {name: alias for alias, name in kind.attribute_map.items()}

    def may_read(self, field: str) -> bool:
        """Whether a model, its cache or its masks could ask for a field."""
        name = field.rpartition(".")[2]
        return not self.known or name in self.words or self.other.get(name) in self.words

    def reads(self, field: str) -> bool:
        """Whether the model asks for a field that its class does not declare."""
        return f'getattr(config, "{field}"' in self.model


def fields(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of a configuration, those inside of objects by their full names."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from fields(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def check_fields(
    kind: type[Decoder], config: Any, ours: set[str], theirs: Callable[[], Any], name: object
) -> None:
    """UnknownModel where a field changes what transformers' model computes, but not ours.

    Args:
        kind: The model of ours.
        config: Of the model.
        ours: The fields that ours asks for.
        theirs: Builds transformers' on the meta device; called where the configuration says what
            ours does not ask for.
        name: Of the model, for the error.
    """
    declared = dict(fields(vars(type(config)())))
    usual = DEFAULTS | declared
    given = {f: v for f, v in fields(vars(config)) if f.partition(".")[0] not in IDLE}
    differ = {f: v for f, v in given.items() if v != usual.get(f)}
    # Not for such a model, says its class: those have a meaning that ours may take for another.
    alien = {f for f in differ.keys() & ours if f not in declared and "." not in f}
    left = differ.keys() - ours - {"max_position_embeddings"}  # which who asks for a length reads
    if left | alien:
        sources = Sources(type(config))
        left = {f for f in left if sources.may_read(f)}
        alien = {f for f in alien if not sources.reads(f)}
    if left | alien:
        seen, kept = read_by_theirs(theirs())
        left, alien = left & (seen | kept), alien - seen
    if left := left | alien:
        field = min(left)
        raise UnknownModel(
            f"{name}: config.json: {field} is {str(differ[field])[:60]}, which the engine's "
            f"{kind.__name__} does not know"
        )
