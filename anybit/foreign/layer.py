"""What a reader of another tool's checkpoint says about a layer, and what readers share."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anybit.files import Stored
from anybit.format import Format, Packed
from anybit.formats.integer import Integer

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
ANY = -1  # a size that is not known before a tensor is found


@dataclass(frozen=True)
class Layer:
    """A linear layer that another tool quantized, and how it becomes ours.

    shape: (N, K). tensors: names of the source's tensors that hold its weight.
    format: holds the weight exactly, and `read` then gives a `Packed`. Without one, for the
    `reason` given, `read` gives the decoded weight (N, K) fp32, and the layer becomes dense.
    dtypes: of grid tensors that are not of their entry's default dtype.
    """

    shape: tuple[int, int]
    tensors: tuple[str, ...]
    format: Format | None
    read: Callable[[], Packed | Tensor]
    reason: str = ""
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)


class Part:
    """The stored tensors of one layer, checked before they are read."""

    def __init__(self, name: str, stored: Mapping[str, Stored]):
        self.name, self.stored = name, stored
        self.used: list[str] = []

    def find(
        self, key: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...] | None = None
    ) -> Stored:
        """The tensor `<layer>.<key>`; ValueError unless it has one of the dtypes and the shape.

        shape: sizes, of which any may be ANY; None for a tensor of any rank.
        """
        name = f"{self.name}.{key}"
        if name not in self.stored:
            keys = sorted(other.removeprefix(f"{self.name}.") for other in self.stored)
            raise ValueError(f"{name} is missing; there are {', '.join(keys)}")
        tensor = self.stored[name]
        fits = shape is None or (
            len(shape) == len(tensor.shape)
            and all(want in (ANY, size) for want, size in zip(shape, tensor.shape, strict=True))
        )
        if tensor.torch_dtype not in dtypes or not fits:
            wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            size = f"shape {shape}".replace("-1", "any") if shape is not None else "any shape"
            raise ValueError(
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


def parts(key: str, stored: Mapping[str, Stored]) -> list[Part]:
    """The layers that have a tensor `<layer>.<key>`, each with all tensors below its name."""
    found: dict[str, dict[str, Stored]] = {
        name.removesuffix(f".{key}"): {} for name in stored if name.endswith(f".{key}")
    }
    for name, tensor in stored.items():
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

    codes (N, K) uint8, scale and zero (N, groups) are read when they are called.
    zero: None for levels that are symmetric about zero.
    order: columns (K,) sorted by their groups, where the columns of a group are no neighbours.
    """
    group = 0 if groups == 1 else shape[1] // groups
    fmt = Integer(bits, group, zero is not None, order is not None)

    def read() -> Packed:
        grid = {"scale": scale()} | ({} if order is None else {"order": order})
        q = codes() if order is None else codes().index_select(1, order)
        return Packed.from_codes(fmt, shape, q, grid | ({"zero": zero()} if zero else {}))

    return Layer(shape, tuple(part.used), fmt, read, dtypes=dtypes)


def symmetric(zero: Tensor, bits: int) -> bool:
    """Whether zero points are all 2**(bits - 1), so that a format need not store them."""
    return bool((zero == 2 ** (bits - 1)).all())


def option(
    config: Mapping[str, Any], key: str, allowed: tuple[Any, ...], tool: str, required: bool = False
) -> Any:
    """A value of a quantization_config, by default the first one that can be read.

    Raises ValueError when it is none of those, or absent where it is required.
    """
    value = config.get(key)
    if value is None and not required:
        return allowed[0]
    if value not in allowed:
        raise ValueError(
            f"{tool}: {key} is {value!r}, and only {', '.join(map(repr, allowed))} can be read"
        )
    return value


def check_codes(codes: Tensor, largest: int, name: str) -> Tensor:
    """The codes; ValueError when one is above the largest."""
    if codes.numel() and int(codes.max()) > largest:
        raise ValueError(f"{name}: holds code {int(codes.max())}, above the largest, {largest}")
    return codes
