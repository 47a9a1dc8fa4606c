"""The paged KV cache of a layer."""

import torch
from torch import Tensor

from anybit.engine.fused import compiled
from anybit.engine.kv.format import KvFormat, Numbers, zeros
from anybit.errors import Unsupported
from anybit.kernels.backend import has_triton
from anybit.kernels.kv import Planes


class LayerCache:
    """K and V of one layer in blocks of tokens, as a format keeps them.

    Attributes:
        format: How numbers are kept.
        planes: The tensors, as kernels get them.
        fused: Whether Triton's kernels work on it.
        native: Whether those that LLVM compiles do.
        turned: Whether V's tokens lie side by side.
    """

    def __init__(
        self, format: KvFormat, k: Tensor, v: Tensor, k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ):  # fmt: skip
        self.format, self.k, self.v = format, k, v
        self.k_scale, self.v_scale = k_scale, v_scale
        planes = Planes(format.k.kind, format.v.kind, k, v, k_scale, v_scale)
        self.fused, self.native = usable(planes), usable_on_cpu(planes)
        self.turned = format.v.turned and not self.native
        self.planes = planes

    @classmethod
    def empty(
        cls, blocks: int, heads: int, block_size: int, head_dim: int, format: KvFormat,
        device: torch.device, scales: tuple[Tensor, Tensor] | None = None,
    ) -> "LayerCache":  # fmt: skip
        """A cache of zeros.

        Args:
            blocks: Of tokens.
            heads: Of K and of V.
            block_size: Tokens.
            head_dim: Channels of a head.
            format: How numbers are kept.
            device: Where.
            scales: Static ones of the layer, (heads, head_dim) of K and of V, if it has any.

        Raises:
            Unsupported: The format packs more channels in a number than divide a head.
        """
        format = format.of_layer(scales)
        shape = (blocks, heads, block_size, head_dim)
        (k, k_scale), (v, v_scale) = (parts(side, shape, device) for side in (format.k, format.v))
        cache = cls(format, k, v, k_scale, v_scale)
        if cache.turned:
            cache.v = v.view(blocks, heads, -1, block_size)
            cache.planes = cache.planes._replace(v=cache.v)
        return cache

    @property
    def head_dim(self) -> int:
        return self.k.shape[3] * self.format.k.packs

    @property
    def values(self) -> Tensor:
        """V as (blocks, kv_heads, block_size, numbers of a head)."""
        return self.v.transpose(2, 3) if self.turned else self.v

    @property
    def sides(self) -> tuple[tuple[Numbers, Tensor, Tensor | None], ...]:
        """How K is kept, its numbers and its scales; the same of V."""
        return (
            (self.format.k, self.k, self.k_scale), (self.format.v, self.values, self.v_scale),
        )  # fmt: skip

    @property
    def of_tokens(self) -> list[Tensor]:
        """What grows with the blocks: K, V, and scales that are not static."""
        return [
            t for how, *both in self.sides for t in both[: 1 if how.static else 2] if t is not None
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of K and V, and of scales that belong to tokens."""
        return sum(t.nbytes for t in self.of_tokens)

    def store(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write K and V (T, kv_heads, head_dim) of tokens to their slots."""
        size = self.k.shape[2]
        block, offset = slots // size, slots % size
        for (how, codes, scale), x in zip(self.sides, (self.format.k.turn(k), v), strict=True):
            codes[block, :, offset], own = how.encode(x, scale)
            if own is not None and scale is not None:
                scale[block, :, :, offset] = own

    def load(self, table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V of the blocks in `table` (..., blocks): (..., kv_heads, tokens, head_dim).

        K is turned as the format has it, for queries that are, too.
        """
        out = []
        for how, codes, scale in self.sides:
            found = codes[table].transpose(-4, -3).flatten(-3, -2)
            if how.static and scale is not None:
                scale = scale[:, None]
            elif scale is not None:
                scale = scale[table].transpose(-3, -2).transpose(-5, -4).flatten(-4, -3)
            out.append(how.decode(found, scale, dtype))
        return out[0], out[1]


def parts(
    how: Numbers, shape: tuple[int, int, int, int], device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Zeros for K or V of (blocks, heads, block_size, head_dim), and their scales."""
    if shape[3] % how.packs:
        raise Unsupported(
            f"the KV cache keeps {how.packs} channels in a byte, but head_dim is {shape[3]}; use "
            "int8 or the model's dtype"
        )
    numbers = zeros((*shape[:3], shape[3] // how.packs), how.dtype, device)
    return numbers, how.empty_scale(shape, device)


def usable(planes: Planes) -> bool:
    """Whether Triton's kernels can work on a cache."""
    if planes.k.device.type != "cuda" or not has_triton():
        return False
    from anybit.kernels.triton.attention import refuse

    return refuse(planes) is None


def usable_on_cpu(planes: Planes) -> bool:
    """Whether kernels that LLVM compiles can work on a cache."""
    if not compiled(planes.k):
        return False
    from anybit.kernels.native.attention import refuse

    return refuse(planes) is None
