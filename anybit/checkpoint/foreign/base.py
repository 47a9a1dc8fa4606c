"""What a reader of another tool's checkpoint says about a layer, and what readers share."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anybit.core.format import Format
from anybit.core.packed import Packed
from anybit.core.scheme import scheme_name
from anybit.errors import InvalidInput
from anybit.files.safetensors import Stored
from anybit.formats.integer import Integer
from anybit.formats.kquant import KQuant

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# Scales and zero points of queries, keys, values and probabilities, by the names of all tools.
_SAID = r"(scale|scale_inv|scaling_factor|zero_point)"
_WHAT = r"(q|k|v|kv|qkv|p|prob|attn|softmax|query|key|value)"
OF_ATTENTION = re.compile(
    r"(^|\.)("
    rf"{_WHAT}(_output)?_{_SAID}"
    rf"|{_WHAT}(_[ab])?(_proj)?[._]output_{_SAID}"
    r"|(k|v|kv)_cache[._]\w*(scale|scaling_factor|zero_point|amax)"
    rf"|{_WHAT}(_bmm)?_quantizer\.\w+"
    r"|(k|v|kv|qkv|q)_proj\.output_quantizer\.\w+"
    r")$"
)
OF_CACHE = "a scale of attention or its cache"  # why such a tensor is left out
TOKENS_STAY = "activations were quantized there, and stay in 16 bits here"  # a note
ANY = -1  # a size that is not known before a tensor is found, but not 0


@dataclass(frozen=True)
class Layer:
    """A linear layer that another tool quantized, and how it becomes ours.

    Attributes:
        shape: (N, K).
        tensors: Names of the source's tensors that hold its weight.
        format: Holds the weight exactly; None where no format does, and the layer becomes dense.
        read: Reads the layer as a `Packed`, or without a format the decoded weight (N, K) fp32.
        reason: Why there is no format.
        dtypes: Of grid tensors that are not of their entry's default dtype.
        activation: "int8" or "fp8" where the tool quantizes activations as we do, per token.
        note: What the tool does beside the weight and we do not.
        cut: Where the tool stores rows and columns that the layer does not have: the layer of a
            shape (N, K), or this one if that cannot be.
    """

    shape: tuple[int, int]
    tensors: tuple[str, ...]
    format: Format | None
    read: Callable[[], Packed | Tensor]
    reason: str = ""
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    activation: str | None = None
    note: str = ""
    cut: "Callable[[tuple[int, int]], Layer] | None" = None

    @property
    def scheme(self) -> str | None:
        """The format and the activation; None where there is no format."""
        return scheme_name(self.format, self.activation) if self.format else None

    def dense(self) -> Tensor:
        """The weight, read and decoded."""
        weight = self.read()
        return weight.dequantize() if isinstance(weight, Packed) else weight


def of_attention(name: str) -> bool:
    """Whether a tensor says how a tool rounds attention or its cache, and nothing about weights."""
    return OF_ATTENTION.search(name) is not None


def decoded(layer: Layer, reason: str) -> Layer:
    """The layer without a format, for a reason."""
    return replace(layer, format=None, read=layer.dense, reason=reason, dtypes={}, activation=None)


class Part:
    """The stored tensors of one layer, checked before they are read."""

    def __init__(self, name: str, stored: Mapping[str, Stored]):
        self.name, self.stored = name, stored
        self.used: list[str] = []

    def find(
        self, key: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...] | None = None
    ) -> Stored:
        """The tensor `<layer>.<key>`, checked.

        Args:
            key: The last part of its name.
            dtypes: Those it may have.
            shape: Sizes, of which any may be ANY; None for a tensor of any rank.

        Raises:
            InvalidInput: It is missing, or has another dtype or shape.
        """
        name = f"{self.name}.{key}"
        if name not in self.stored:
            keys = sorted(other.removeprefix(f"{self.name}.") for other in self.stored)
            raise InvalidInput(f"{name} is missing; there are {', '.join(keys)}")
        tensor = self.stored[name]
        fits = shape is None or (
            len(shape) == len(tensor.shape)
            and all(
                size == want or (want == ANY and size)
                for want, size in zip(shape, tensor.shape, strict=True)
            )
        )
        if tensor.torch_dtype not in dtypes or not fits:
            wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            size = f"shape {shape}".replace("-1", "any") if shape is not None else "any shape"
            raise InvalidInput(
                f"{name}: expected {wanted} of {size}, found "
                f"{str(tensor.torch_dtype).removeprefix('torch.')} of {tensor.shape}"
            )
        self.used.append(name)
        return tensor

    def has(self, key: str) -> bool:
        return f"{self.name}.{key}" in self.stored

    def skip(self, *unread: str) -> None:
        """Take note of tensors that say nothing about the weight."""
        self.used += [f"{self.name}.{key}" for key in unread if self.has(key)]


class Given(NamedTuple):
    """A checkpoint of another tool.

    config: its quantization_config. stored: its tensors. naming: what its settings call a layer.
    """

    config: Mapping[str, Any]
    stored: Mapping[str, Stored]
    naming: Callable[[str], str] = str

    def parts(self, key: str) -> list[Part]:
        """The layers that have a tensor `<layer>.<key>`, each with all tensors below its name."""
        found: dict[str, dict[str, Stored]] = {
            name.removesuffix(f".{key}"): {} for name in self.stored if name.endswith(f".{key}")
        }
        for name, tensor in self.stored.items():
            layer = owner(name, found)
            if layer is not None:
                found[layer][name] = tensor
        return [Part(name, tensors) for name, tensors in found.items()]


def owner(name: str, layers: Collection[str]) -> str | None:
    """The layer that a tensor's name begins with."""
    while name:
        name = name.rpartition(".")[0]
        if name in layers:
            return name
    return None


def uniform(
    part: Part,
    shape: tuple[int, int],
    bits: int,
    codes: Callable[[], Tensor],
    scale: Callable[[], Tensor],
    zero: Callable[[], Tensor] | None,
    groups: int,
    dtypes: Mapping[str, torch.dtype],
    order: Tensor | None = None,
) -> Layer:
    """A layer of (q - zero) * scale in `groups` groups of a row: our `int1` to `int8`.

    Args:
        part: The layer's stored tensors.
        shape: (N, K).
        bits: Of a code.
        codes: Reads the codes (N, K) uint8.
        scale: Reads the scales (N, groups).
        zero: Reads the zero points (N, groups); None for levels that are symmetric about zero.
        groups: Groups of a row.
        dtypes: Of grid tensors that are not of their entry's default dtype.
        order: Columns (K,) sorted by their groups, where the columns of a group lie apart.
    """
    group = 0 if groups == 1 else shape[1] // groups
    fmt = Integer(bits, group, zero is not None, order is not None)

    def read() -> Packed:
        grid = {"scale": scale()} | ({} if order is None else {"order": order})
        q = codes() if order is None else codes().index_select(1, order)
        return Packed.from_codes(fmt, shape, q, grid | ({"zero": zero()} if zero else {}))

    return Layer(shape, tuple(part.used), fmt, read, dtypes=dtypes)


def affine(
    part: Part,
    shape: tuple[int, int],
    bits: int,
    group: int,
    codes: Callable[[], Tensor],
    factor: Callable[[], Tensor],
    base: Callable[[], Tensor],
    dtype: torch.dtype,
) -> Layer:
    """A layer of q * factor + base in groups of a row: our `q2_1` to `q8_1`.

    Args:
        part: The layer's stored tensors.
        shape: (N, K).
        bits: Of a code.
        group: Columns of a group.
        codes: Reads the codes (N, K) uint8.
        factor: Reads the factors (N, K / group).
        base: Reads what is added to them, of the same shape.
        dtype: Of both.
    """
    fmt = KQuant(f"q{bits}_1", group)

    def read() -> Packed:
        grid = {"scale": torch.ones(shape[0], 1, dtype=torch.float16)}
        return Packed.from_codes(fmt, shape, codes(), grid | {"d": factor(), "base": base()})

    dtypes = {"d": dtype, "base": dtype}
    return Layer(shape, tuple(part.used), fmt, read, dtypes=dtypes)


def symmetric(zero: Tensor, bits: int) -> bool:
    """Whether zero points are all 2**(bits - 1), so that a format need not store them."""
    return bool((zero == 2 ** (bits - 1)).all())


def option(
    config: Mapping[str, Any], key: str, allowed: tuple[Any, ...], tool: str, required: bool = False
) -> Any:
    """A value of a quantization_config, by default the first one that can be read.

    Raises:
        InvalidInput: It is none of those, or absent where it is required.
    """
    value = config.get(key)
    if value is None and not required:
        return allowed[0]
    if value not in allowed:
        raise InvalidInput(
            f"{tool}: {key} is {value!r}, and only {', '.join(map(repr, allowed))} can be read"
        )
    return value


def block_of(config: Mapping[str, Any], key: str, tool: str) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None where nothing is said.

    Raises:
        InvalidInput: They are not two whole numbers.
    """
    block = config.get(key)
    if block is None:
        return None
    if not isinstance(block, list) or [type(s) for s in block] != [int, int] or min(block) < 1:
        raise InvalidInput(f"{tool}: {key} is {block!r}, and not two whole numbers")
    return block[0], block[1]


def check_codes(codes: Tensor, largest: int, name: str) -> Tensor:
    """The codes; InvalidInput when one is above the largest."""
    if codes.numel() and int(codes.max()) > largest:
        raise InvalidInput(f"{name}: holds code {int(codes.max())}, above the largest, {largest}")
    return codes
