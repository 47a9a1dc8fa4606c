"""What a backend is: the weights that it prepares, and the activations that it multiplies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from anybit.core.format import Format
from anybit.core.groups import grouped
from anybit.core.packed import Packed
from anybit.errors import InvalidType, Unsupported

HALVES = (torch.float16, torch.bfloat16)  # activations that kernels for GPUs multiply
COUNTS = 4096  # of tokens, for each of which a choice is kept: any number may come
ROWS_AT_ONCE = 1 << 24  # weights whose groups are looked at together
CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # codes of quantized activations


class LayerSpec(NamedTuple):
    """A layer that a backend is asked to multiply.

    Attributes:
        format: of the weight, whose columns lie in the stored order.
        activation: what activations are quantized to, "int8" or "fp8"; None: they are not.
        shape: (N, K).
        device: where the layer is.
        dtype: of the activations; None: not known yet.
        decoded: whether a decoded copy of the weight may be held.
        octaves: of the weight, see `octaves`; 0: not known.
    """

    format: Format
    activation: str | None
    shape: tuple[int, int]
    device: torch.device
    dtype: torch.dtype | None = None
    decoded: bool = True
    octaves: int = 0

    @classmethod
    def of(
        cls,
        packed: Packed,
        activation: str | None,
        dtype: torch.dtype | None = None,
        decoded: bool = True,
    ) -> "LayerSpec":
        """A layer with this weight."""
        device, most = packed.planes[0].device, octaves(packed, activation)
        return cls(packed.format, activation, packed.shape, device, dtype, decoded, most)


class Prepared(NamedTuple):
    """A weight in the layout of the backend that multiplies it.

    Attributes:
        format: of the weight; its columns lie in the stored order.
        shape: (N, K).
        activation: what activations are quantized to, "int8" or "fp8"; None: they are not.
        layout: the backend's own tensors.
        dtype: of the activations that the layout is for; None: of any that the backend takes.
    """

    format: Format
    shape: tuple[int, int]
    activation: str | None
    layout: tuple[Tensor, ...]
    dtype: torch.dtype | None = None


class NoRoom(Unsupported):
    """A launch for which a GPU has too little shared memory, or too few registers."""


@dataclass(frozen=True)
class Pairs:
    """Which tokens of a step have a second row of int8 codes, for what the first has rounded off.

    Token i of the first ones has rows 2 i and 2 i + 1, which products multiply as any others, and
    whose outputs they add up; the other tokens have a row each behind them. Where there are no rows
    for the last tokens, these have none, and their outputs hold anything.

    Attributes:
        count: (1,) int32, how many tokens have two; on the device, since graphs are for any number.
            Kernels read it before the one before them has ended: no kernel may be its writer.
        tokens: Rows of x and of y.
        rows: Of codes; at least two for each that has two.
    """

    count: Tensor
    tokens: int
    rows: int

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Of each row of codes: its token, and whether it is the token's second row."""
        row = torch.arange(self.rows, device=self.count.device)
        token = row - torch.minimum((row + 1) // 2, self.count)
        return token, (row % 2 == 1) & (row < 2 * self.count)

    @cached_property
    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each token: its first row of codes, the one behind that, whether it is its second."""
        token = torch.arange(self.tokens, device=self.count.device)
        first = (token + torch.minimum(token, self.count)).clamp_max(self.rows - 1)
        return first, (first + 1).clamp_max(self.rows - 1), token < self.count


class Activations(NamedTuple):
    """Activations that are quantized or rotated already; layers take them in the place of x.

    Attributes:
        codes: (..., K) int8 or float8_e4m3fn; in `dtype` if they are only rotated.
        scale: (...,) fp32, one for each token; empty if they are only rotated, as `sums` are.
        sums: (...,) int32, of each token's int8 codes; empty for fp8.
        dtype: what y comes in.
        rotated: whether they were rotated before, as layers with a rotated weight want them.
        pairs: which tokens have a second row of codes; None: none has.
    """

    codes: Tensor
    scale: Tensor
    sums: Tensor
    dtype: torch.dtype
    rotated: bool = False
    pairs: Pairs | None = None

    @property
    def paired(self) -> Tensor | None:
        """How many tokens have a second row: `Pairs.count`."""
        return None if self.pairs is None else self.pairs.count


class Needs(NamedTuple):
    """What makes a layer's kernels be there for any number of tokens.

    Attributes:
        calls: Each loads a kernel that it may launch, compiled first if it is missing.
        tokens: Numbers with which it launches each of the others at least once.
    """

    calls: Sequence[Callable[[], object]] = ()
    tokens: Sequence[int] = ()


class Backend:
    """Kernels that multiply. Those of a kind derive from it, and have the first four of their own.

    Attributes:
        joins: Whether `linear` adds up the outputs of tokens that have `Activations.pairs`.
    """

    joins = False

    def refuse(self, layer: LayerSpec) -> str | None:
        """None when this backend multiplies such a layer, else the reason in words why not."""
        raise NotImplementedError

    def prepare(
        self,
        packed: Packed,
        activation: str | None,
        dtype: torch.dtype | None = None,
        decoded: bool = False,
    ) -> Prepared:
        """Lay a weight out; done once, at load. The weight may be freed afterwards.

        Args:
            packed: the weight, in the stored order.
            activation: what activations are quantized to, or None.
            dtype: of the activations; None: unknown yet.
            decoded: whether a decoded copy of the weight may be held.
        """
        raise NotImplementedError

    def linear(self, x: Tensor | Activations, prepared: Prepared, bias: Tensor | None) -> Tensor:
        """y = x W^T + bias.

        Args:
            x: (M, K), with any strides; or `Activations` of M tokens, in the dtype of
                `prepared.activation`. They have `pairs` only if the backend `joins`, and then
                behind the rows of tokens y holds anything.
            prepared: of this backend. `Prepared.dtype` is not known here.
            bias: (N,) of any float dtype.

        Returns:
            (M, N) in `x.dtype`.
        """
        raise NotImplementedError

    def decodes(self, activation: str | None) -> bool:
        """Whether `prepare` holds a decoded copy, as large as N * K activations, where it may."""
        return False

    def does(self, default: Callable[..., object]) -> bool:
        """Whether it has a function of its own in the place of one of those below."""
        own = getattr(self, default.__name__)
        return getattr(own, "__func__", own) is not default

    def candidates(self, x: Tensor, prepared: Prepared) -> dict[str, Callable[[Prepared], Tensor]]:
        """Ways to multiply x (M, K), by the names that `tuned.py` keeps; none: there is one way.

        `anybit tune` compares them. Each takes weights like `prepared`, and returns y (M, N). It
        raises NoRoom where the GPU has none for it.
        """
        return {}

    def needs(self, layer: LayerSpec, most: int, experts: bool = False) -> Needs:
        """Where the number of tokens decides which kernel is launched: all for 1 to `most`.

        Of a layer that it takes, with a dtype, or of many as experts.
        """
        return Needs()

    def takes_experts(self, layer: LayerSpec) -> bool:
        """Whether it multiplies any number of such weights, which it takes, at once."""
        return False

    def prepare_experts(
        self, experts: Sequence[Packed], activation: str | None, dtype: torch.dtype | None = None
    ) -> Prepared:
        """Lay out weights of one format and shape, which `Prepared.shape` is.

        Raises:
            InvalidInput: Formats or shapes differ.
        """
        raise NotImplementedError

    def linear_experts(self, x: Tensor | Activations, starts: Tensor, prepared: Prepared) -> Tensor:
        """Multiply tokens that lie sorted by expert.

        Args:
            x: (M, K), or `Activations` of M rows, as `linear` takes them.
            starts: (experts + 1,) int32, on x's device. Tokens starts[e] to starts[e + 1] meet
                the weight of expert e; those after the last are no expert's.
            prepared: by `prepare_experts`.

        Returns:
            (M, N) in x's dtype; rows that are no expert's hold anything.
        """
        raise NotImplementedError


def adopted(found: object) -> Backend:
    """An object with names of a `Backend`, such as a module, as one: it may lack the later ones."""
    if isinstance(found, Backend):
        return found

    def asked(name: str) -> property:
        return property(lambda self: getattr(found, name))

    names = [name for name in vars(Backend) if name[0] != "_" and hasattr(found, name)]
    backend: Backend = type("Adopted", (Backend,), {name: asked(name) for name in names})()
    return backend


def octaves(packed: Packed, activation: str | None) -> int:
    """Powers of two that the scales of a row's groups lie apart, where 8-bit weights hold them.

    Groups without a weight other than 0 do not count. 0 where scales are applied to sums.
    """
    scale = packed.grid["scale"]
    if activation != "fp8" or not packed.format.group or scale.is_meta:
        return 0
    most, step = 0, max(1, ROWS_AT_ONCE // packed.shape[1])
    for first in range(0, packed.shape[0], step):
        rows = packed.rows(slice(first, first + step))
        scales = rows.grid["scale"].float().abs()
        live = grouped(rows.values() != 0, scales).any(-1)
        _, exponent = torch.frexp(scales)
        high = torch.where(live, exponent, -(1 << 10)).amax(1)
        low = torch.where(live, exponent, 1 << 10).amin(1)
        most = max(most, int((high - low).max()))
    return most


def check_half(x: Tensor | Activations, backend: str) -> None:
    """Raise TypeError unless y is to be float16 or bfloat16."""
    if x.dtype not in HALVES:
        raise InvalidType(
            f"x is {x.dtype}; the {backend} backend multiplies float16 and bfloat16: call .half() "
            "or .bfloat16() on the model"
        )


def refuse_vendor() -> str | None:
    """The refusal of NVIDIA's GPUs' kernels where torch is built for AMD's, also named cuda."""
    return "multiplies on NVIDIA GPUs only, not on AMD's" if torch.version.hip else None


def refuse_dtype(dtype: torch.dtype | None) -> str | None:
    """The refusal of kernels for GPUs of other activations than float16 and bfloat16."""
    if dtype is None or dtype in HALVES:
        return None
    return f"multiplies float16 and bfloat16 activations, not {dtype}"
