"""How a KV cache keeps numbers: a class for each way; a format names one for K and one for V."""

import math
import mmap
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from anybit.errors import Unsupported

HUGE = 1 << 22  # bytes from which on large pages pay


class Numbers:
    """K or V as they are, in a dtype; what another way does otherwise, it overrides.

    A new one is a class in a file of its own, in a format of `anybit.kernels.kv.formats`.

    Attributes:
        dtype: Of what is kept.
        packs: Channels in one number of that.
        kind: What kernels call it. "model": numbers of the model's dtype. "static" and "dynamic":
            int8 with a scale of each channel, or of each token and head. "int4": as `int4.py` has
            it. None: no kernel takes it, and torch's attention decodes whole contexts.
        side_by_side: Whether a GPU's kernels want V's tokens side by side: a matrix unit sums over
            tokens, and takes bytes that it sums side by side.
        static: Whether scales belong to channels and were known before.
        most_bias: Of K, root mean square of a head. A larger one, the same in all tokens, takes so
            much of the codes' range that little is left of what differs. Qwen2.5-Coder-1.5B's 28
            layers have 80, 15, 7, 6, and up to 2.2.
    """

    packs: ClassVar[int] = 1
    kind: ClassVar[str | None] = "model"
    side_by_side: ClassVar[bool] = False
    static: ClassVar[bool] = False
    most_bias: ClassVar[float] = math.inf

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def of_layer(self, scale: Tensor) -> "Numbers":
        """The same in a layer whose checkpoint has int8 scales of channels."""
        return self

    def empty_scale(self, shape: tuple[int, int, int, int], device: torch.device) -> Tensor | None:
        """Scales of a cache of zeros, or None; see `LayerCache`.

        Args:
            shape: Blocks, heads, tokens of a block, channels of a head.
            device: Where the cache lies.
        """
        return None

    def turn(self, x: Tensor) -> Tensor:
        """K or a query (..., head_dim) as products are made of it."""
        return x

    def encode(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What is kept of x (T, heads, head_dim), and its scales (T, heads, groups, numbers).

        Args:
            x: K that has been turned, or V.
            scale: The cache's scales. Static ones are used; of others, the shape is.
        """
        return x, None

    def decode(self, codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """What codes (..., heads, T, D) mean, in a dtype.

        Args:
            codes: As `encode` makes them.
            scale: (..., heads, T, groups, numbers); static ones (heads, 1, head_dim).
            dtype: Of queries.
        """
        return codes


@dataclass(frozen=True)
class KvFormat:
    """How K and V are kept.

    Attributes:
        name: As `kv_cache` has it.
        k: Of K.
        v: Of V.
        widest: Channels of a head at most; None: any.
        loss: What it costs published models; "" where that is too little to speak of.
        finer: Of K in layers whose bias is too large for `k`; None: these keep the model's dtype.
    """

    name: str
    k: Numbers
    v: Numbers
    widest: int | None = None
    loss: str = ""
    finer: Numbers | None = None

    def check(self, head_dim: int) -> None:
        """Raises Unsupported for heads that lose too much."""
        if self.widest is not None and head_dim > self.widest:
            raise Unsupported(
                f"kv_cache={self.name!r} takes heads of at most {self.widest} channels, and these "
                f"have {head_dim}: {self.loss}"
            )

    @property
    def static(self) -> bool:
        """Whether a checkpoint's scales are used."""
        return self.k.static or self.v.static

    def of_layer(self, scales: tuple[Tensor, Tensor] | None) -> "KvFormat":
        """The same in a layer whose checkpoint has such scales, if any."""
        if scales is None:
            return self
        return replace(self, k=self.k.of_layer(scales[0]), v=self.v.of_layer(scales[1]))

    def with_bias(self, bias: float, dtype: torch.dtype) -> "KvFormat":
        """The same in a layer whose K has such a bias, root mean square of a head.

        Args:
            bias: Of the head where it is largest.
            dtype: The model's.
        """
        if bias <= self.k.most_bias:
            return self
        if self.finer is not None and bias <= self.finer.most_bias:
            return replace(self, k=self.finer)
        return plain(dtype)


def plain(dtype: torch.dtype) -> KvFormat:
    """A cache in a model's dtype."""
    return KvFormat(str(dtype).removeprefix("torch."), Numbers(dtype), Numbers(dtype))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As `torch.zeros`; on a CPU, memory that the system gives when it is first written.

    torch writes its zeros: a GiB of cache would take up to two seconds, and a GiB, before anything
    is kept in it. So does calloc where the process has freed as much before.
    """
    if device.type != "cpu" or not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with suppress(OSError):  # a wish, which may be refused
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size].view(dtype).view(shape)
