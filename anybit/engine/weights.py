"""Where a model's tensors come from: a checkpoint, dense or quantized, read layer by layer.

A model asks for what it needs by name and shape while it is built, so nothing is allocated twice,
and whatever is missing, misshapen or left over is an error that names it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anybit.checkpoint.layout import Tensors, check_fit, check_missing, cut_as, layout
from anybit.checkpoint.stream import plan_quantization
from anybit.core.packed import Packed, tensor_shapes
from anybit.core.scheme import parse_scheme, scheme_name
from anybit.engine.lora import Adapted, Adapters
from anybit.engine.reads import Reads
from anybit.errors import InvalidInput
from anybit.files.safetensors import Stored
from anybit.kernels.ahead import Uncompiled
from anybit.kernels.between import of
from anybit.nn.embedding import QuantEmbedding, embedding_layers
from anybit.nn.experts import Layout, published
from anybit.nn.grouped import merge
from anybit.nn.linear import check_finite, check_grid
from anybit.nn.multiplier import Keep, Multiplier
from anybit.nn.plan import Plan, Spec, patterns_for
from anybit.quantizers.quantize import quantize_tensor
from anybit.quantizers.rtn import RTN

# How experts lie together in layers that transformers does not know.
GATED = Layout(
    {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}, False, False, "plain"
)
IGNORED = ("*.rotary_emb.inv_freq", "*.masked_bias")  # derived values that old files hold


class Dense(nn.Module):
    """y = x W^T + bias with a weight (N, K) of the model's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        try:
            return of(x).linear(x, self.weight, self.bias)
        except Uncompiled:
            return x.new_zeros(len(x), len(self.weight))

    def gated(self, x: Tensor) -> Tensor:
        """SiLU(gate) * up, of the halves of y."""
        try:
            return of(x).gated(x, self.weight, self.bias)
        except Uncompiled:
            return x.new_zeros(len(x), len(self.weight) // 2)


class Separate(nn.Module):
    """Layers of the same input side by side, where their weights cannot be one matrix."""

    def __init__(self, parts: list[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


def bias_of(layer: Any) -> Tensor | None:
    """The bias (N,) of a layer that `Weights.linear` has made, if it has one."""
    if isinstance(layer, Adapted):
        return bias_of(layer.layer)
    if isinstance(layer, Separate):
        biases = [b for part in layer.parts if (b := bias_of(part)) is not None]
        return torch.cat(biases) if biases else None
    bias: Tensor | None = layer.bias
    return bias


Words = nn.Embedding | QuantEmbedding
Part = tuple[Tensor | Packed, Tensor | None, str | None]  # weight, bias, activation notation


class Weights:
    """A source of tensors on one device; floats come in the model's dtype.

    Attributes:
        quantized: How many weights have been read in each scheme.
        quantized_bytes: That these take, scales included.
    """

    keep: Keep = "auto"  # of quantized layers
    adapters: Adapters | None = None  # beside linear layers

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self.plan: dict[str, str] = {}  # the scheme of each quantized layer that was read
        self.quantized: Counter[str] = Counter()
        self.quantized_bytes = 0

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """A dense tensor of this shape, in the model's dtype by default, or ValueError."""
        raise NotImplementedError

    def part(self, name: str, shape: tuple[int, int], bias: bool) -> Part:
        """The weight of one linear layer, dense or quantized, its bias and activation notation."""
        raise NotImplementedError

    def kv_scales(self, name: str, shape: tuple[int, int]) -> tuple[Tensor, Tensor] | None:
        """Static scales of K and V (kv_heads, head_dim) of an attention layer, if there are any."""
        return None

    def linear(
        self, names: list[str], rows: list[int], columns: int, bias: bool = False
    ) -> nn.Module:
        """One layer whose outputs are those of the named layers, (rows[i], columns) each, in order.

        Their weights become a single matrix when they share a format without shared tables.
        """
        layer = together(self.parts(names, rows, columns, bias), self.dtype, self.keep)
        if self.adapters is None:
            return layer
        return self.adapters.beside(layer, names, rows, columns, self.device, self.dtype)

    def router(self, name: str, experts: int, columns: int, bias: bool) -> nn.Module:
        """What scores a block's experts, which stays dense."""
        return self.linear([name], [experts], columns, bias)

    def parts(
        self, names: list[str], rows: list[int], columns: int, bias: bool = False
    ) -> list[Part]:
        """What `linear` makes one layer of."""
        out = [self.part(name, (n, columns), bias) for name, n in zip(names, rows, strict=True)]
        for (weight, _, activation), n in zip(out, rows, strict=True):
            if isinstance(weight, Packed):
                self.quantized[scheme_name(weight.format, activation)] += n * columns
                self.quantized_bytes += weight.nbytes()
        return out

    def experts(self, names: list[list[str]], rows: list[int], columns: int) -> list[list[Part]]:
        """The `parts` of each expert."""
        return [self.parts(own, rows, columns) for own in names]

    def coded(self, name: str) -> bool:
        """Whether an embedding is quantized."""
        return False

    def embedding(self, name: str, shape: tuple[int, int]) -> Words:
        """A table of embeddings (N, K), which is looked up as it is stored."""
        if not self.coded(name):
            table = self.tensor(f"{name}.weight", shape)
            return nn.Embedding.from_pretrained(table)
        weight = self.parts([name], [shape[0]], shape[1])[0][0]
        assert isinstance(weight, Packed)
        return QuantEmbedding(weight, self.dtype)

    def head(self, name: str, words: Words, tied: bool) -> nn.Module:
        """The output layer, of the embeddings' weight when tied."""
        if not tied:
            parts = self.parts([name], [words.num_embeddings], words.embedding_dim)
            return together(parts, self.dtype, self.keep)  # it sees other tokens than layers do
        if isinstance(words, QuantEmbedding):
            return build((words.packed, None, self.activation(name)), self.dtype, self.keep)
        return Dense(words.weight, None)

    def activation(self, name: str) -> str | None:
        """What a tied head's activations are quantized to, if its weight is."""
        return parse_scheme(self.plan[name])[1] if name in self.plan else None


def build(part: Part, dtype: torch.dtype, keep: Keep = "auto") -> nn.Module:
    weight, bias, activation = part
    if isinstance(weight, Packed):
        return Multiplier.of(weight, activation, dtype, keep, bias)
    return Dense(of(weight).placed(weight), bias)


def together(parts: list[Part], dtype: torch.dtype, keep: Keep = "auto") -> nn.Module:
    """One layer of several weights, multiplied at once if they can be."""
    merged = merge([(weight, activation) for weight, _, activation in parts])
    if merged is None:
        return Separate([build(part, dtype, keep) for part in parts])
    biases = [b for _, b, _ in parts if b is not None]
    return build((merged[0], torch.cat(biases) if biases else None, merged[1]), dtype, keep)


class Reading(NamedTuple):
    """What a checkpoint holds, by the names that the engine's models have for it.

    Attributes:
        config: Of the model.
        embeddings: Names of tables of embeddings.
        stored: The tensors.
        known: Names that the model, or transformers' table, has a place for, or that are left over.
        certain: Those of them that will be read.
        named: The plan of all layers.
        schemes: What layers are quantized to while they are read.
        order: Names of tensors in which the model asks for them, if that is known.
    """

    config: Any
    embeddings: Set[str]
    stored: Mapping[str, Tensors]
    known: Set[str]
    certain: Set[str]
    named: Mapping[str, str | None]
    schemes: Mapping[str, str] = {}
    order: Iterable[str] = ()


def reading(
    directory: Path,
    tensors: Mapping[str, Stored],
    bare: Callable[[], Any],
    formats: Mapping[str, str | None] | None = None,
    quantization: Spec | Plan | None = None,
) -> Reading:
    """Find out, and check, what a directory holds.

    Args:
        directory: Of the checkpoint.
        tensors: That its files hold.
        bare: Builds what its config.json describes, on the meta device.
        formats: The plan of an anybit checkpoint.
        quantization: A spec or plan to quantize a dense checkpoint by while it is read.

    Raises:
        InvalidInput: A dense model's tensors are missing, or of other shapes.
    """
    named = formats or {}
    stored: Mapping[str, Tensors]
    schemes: Mapping[str, str] = {}
    if quantization is not None:
        work = plan_quantization(directory, quantization, RTN(), as_in_model=True)
        stored, schemes, model = work.stored, work.schemes, work.model
        named = work.formats
        known, read = {*work.names, *work.unexpected}, set(work.names)
    else:
        model = bare()
        found = layout(tensors, model, lambda name: True)
        if formats is None:
            check_missing(directory, found.missing, found.unexpected)
            check_fit(directory, found.names, found.stored, model.state_dict())
        stored, known = found.stored, {*found.names, *found.unexpected}
        read = set(found.names if formats is None else stored.keys() - found.unexpected)
    kind = model.config.model_type
    return Reading(
        model.config,
        {published(name, kind) for name in embedding_layers(model)},
        {published(name, kind): tensor for name, tensor in stored.items()},
        {published(name, kind) for name in known},
        {published(name, kind) for name in read},
        named,
        {published(n.removesuffix(".weight"), kind): s for n, s in schemes.items()},
    )


def read_as_asked(
    stored: Mapping[str, Stored],
    asked: Mapping[str, tuple[int, ...]],
    beside: Callable[[str], bool],
    formats: Mapping[str, str | None] | None,
) -> Set[str] | None:
    """The tensors that a model reads, if a checkpoint has them under the names that it asks for.

    Then nothing but these names has to be known of transformers' model.

    Args:
        stored: The checkpoint's tensors.
        asked: Shapes of what the model asks for.
        beside: Whether there may be another tensor of a name.
        formats: The plan of an anybit checkpoint, whose layers may have codes instead of weights.

    Returns:
        The names; None where tensors are missing or left over, or a dense one is of another shape.
    """
    missing = asked.keys() - stored.keys()
    coded = {n.removesuffix(".weight") for n in missing if n.endswith(".weight")}
    if missing and (formats is None or len(coded) < len(missing)):
        return None
    read = {n for n in stored if n in asked or n.rpartition(".")[0] in coded}
    fits = formats is not None or all(
        stored[n].shape == asked[n] and stored[n].torch_dtype.is_floating_point for n in read
    )
    whole = coded <= {n.rpartition(".")[0] for n in read} and all(map(beside, stored.keys() - read))
    return read if fits and whole else None


class Checkpoint(Weights):
    """A checkpoint directory.

    found: what it holds. formats: its plan if it is an anybit checkpoint. keep: as in
    `QuantLinear`. Layers of a dense one are quantized by `found.schemes` while they are read, round
    to nearest, so that the dense model never is in memory as a whole.
    """

    def __init__(
        self,
        directory: Path,
        device: torch.device,
        dtype: torch.dtype,
        found: Reading,
        formats: Mapping[str, str | None] | None = None,
        keep: Keep = "auto",
    ):
        super().__init__(device, dtype)
        self.directory, self.formats, self.keep = directory, formats, keep
        self.config, self.embeddings, self.stored = found.config, found.embeddings, found.stored
        self.named, self.schemes = found.named, found.schemes
        self.reads = Reads(found.stored, found.order, device)
        # What transformers leaves out without a word, such as layers for further tokens, may stay.
        self.unread, self.certain = set(found.known), found.certain

    def as_layer(self, name: str, other: str) -> None:
        """Read layers within `name`, which transformers does not know, as those within another."""
        for key, tensor in [*self.stored.items()]:
            experts, _, end = key.rpartition(".")
            if key.startswith(f"{name}.") and experts.endswith(".experts") and end in GATED.layers:
                self.stored = {**self.stored, **cut_as(key, tensor, GATED)}
        names = {n.rpartition(".")[0] for n in self.stored if n.startswith(f"{other}.")}
        found = {n: self.schemes.get(n) for n in names}
        if self.formats is not None:
            coded = (n for n in names if f"{n}.weight" not in self.stored)
            found |= {n: self._planned(n) for n in coded}
        self.schemes = {**self.schemes} | {
            name + n.removeprefix(other): scheme for n, scheme in found.items() if scheme
        }

    def least_bytes(self) -> int:
        """What the weights take on the device, at least: what may be left unread does not count."""
        total = 0
        for name, tensor in self.stored.items():
            count = math.prod(tensor.shape)
            scheme = self.schemes.get(name.removesuffix(".weight"))
            if scheme is not None:
                fmt = parse_scheme(scheme)[0]
                total += (
                    count // tensor.shape[-1] * fmt.code_count(tensor.shape[-1]) * fmt.bits // 8
                )
            elif name in self.certain and name != "lm_head.weight":  # which may be the embeddings
                total += count * min(tensor.torch_dtype.itemsize, self.dtype.itemsize)
        return total

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return self._read(name, shape).to(self.device, dtype or self.dtype)

    def part(self, name: str, shape: tuple[int, int], bias: bool) -> Part:
        b = self.tensor(f"{name}.bias", shape[:1]) if bias else None
        if f"{name}.weight" in self.stored or self.formats is None:
            if name not in self.schemes:
                return self.tensor(f"{name}.weight", shape), b, None
            weight = self._read(f"{name}.weight", shape).to(self.device)  # in the dtype it has
            check_finite(weight, f"{self.directory}: {name}.weight")
            fmt, activation = parse_scheme(self.schemes[name])
            self.plan[name] = self.schemes[name]
            return quantize_tensor(weight, fmt), b, activation
        self.plan[name] = self._scheme(name)
        fmt, activation = parse_scheme(self.plan[name])
        tensors = {}
        for key, (size, _) in tensor_shapes(fmt, shape).items():
            tensors[key] = self._read(f"{name}.{key}", size)
        name = f"{self.directory}: {name}"
        packed = check_grid(Packed.from_tensors(fmt, shape, tensors, name), name)
        return packed.to(self.device), b, activation

    def kv_scales(self, name: str, shape: tuple[int, int]) -> tuple[Tensor, Tensor] | None:
        names = [f"{name}.{kind}_scale" for kind in "kv"]
        if names[0] not in self.stored:
            return None
        k, v = (self._read(n, shape).to(self.device, torch.float32) for n in names)
        return k, v

    def coded(self, name: str) -> bool:
        return name in self.schemes or (
            self.formats is not None and f"{name}.weight" not in self.stored
        )

    def head(self, name: str, words: Words, tied: bool) -> nn.Module:
        if tied:
            self.unread.discard(f"{name}.weight")
            if isinstance(words, QuantEmbedding):
                self.plan[name] = self._scheme(name)
        return super().head(name, words, tied)

    def check_all_read(self, ignored: tuple[str, ...] = ()) -> None:
        """ValueError when the checkpoint holds tensors that the model has no place for.

        ignored: patterns of names that may be left over, beside IGNORED.
        """
        left = sorted(n for n in self.unread if not matches((*IGNORED, *ignored), n))
        if left:
            raise InvalidInput(
                f"{self.directory}: {len(left)} tensors have no place in the model that its "
                f"config.json describes, such as {', '.join(left[:3])}"
            )

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        stored = self.stored.get(name)
        if stored is None:
            raise InvalidInput(f"{self.directory}: tensor {name!r} is missing")
        if stored.shape != shape:
            raise InvalidInput(
                f"{self.directory}: {name} has shape {stored.shape}, but config.json asks for "
                f"{shape}"
            )
        self.unread.discard(name)
        return self.reads.take(name, stored)

    def _planned(self, name: str) -> str | None:
        matches = patterns_for(name, self.named, name in self.embeddings)
        return self.named[matches[-1]] if matches else None

    def _scheme(self, name: str) -> str:
        scheme = self._planned(name)
        if scheme is None:
            raise InvalidInput(
                f"{self.directory}: tensor {name + '.weight'!r} is missing, and config.json names "
                f"no format for it ({plan_text(self.named)})"
            )
        return scheme


def matches(patterns: Iterable[str], name: str) -> bool:
    """Whether a name matches one of some patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def plan_text(plan: Mapping[str, str | None]) -> str:
    return ", ".join(f"{pattern}: {scheme}" for pattern, scheme in plan.items())
