"""The paged KV cache of a layer."""

from typing import NamedTuple

import torch
from torch import Tensor

from anybit.errors import Unsupported
from anybit.kernels.attention import Batch, Scores
from anybit.kernels.between import TORCH, Unturned, of
from anybit.kernels.kv.format import KvFormat, Numbers, zeros
from anybit.kernels.state import Room


class Heads(NamedTuple):
    """K and V of every token.

    scales: Static ones (kv_heads, dim) of both, if there are any. bias: of K, the root mean square
        in the head where that is largest. dtype: the model's.
    """

    kv_heads: int
    dim: int
    scales: tuple[Tensor, Tensor] | None = None
    bias: float = 0.0
    dtype: torch.dtype = torch.float32

    def format(self, kv: KvFormat) -> KvFormat:
        """How such K and V are kept in a cache of a format."""
        return kv.of_layer(self.scales).with_bias(self.bias, self.dtype)

    def empty(self, room: Room) -> "LayerCache":
        room.kv.check(self.dim)
        return LayerCache.empty(
            room.blocks,
            self.kv_heads,
            room.block_size,
            self.dim,
            self.format(room.kv),
            room.device,
            self.scales,
        )


def rms_of_heads(bias: Tensor, dim: int) -> float:
    """The root mean square of K's bias (kv_heads * dim) in the head where that is largest."""
    return float(bias.detach().float().view(-1, dim).square().mean(1).max().sqrt())


class LayerCache:
    """K and V of one layer in blocks of tokens, as a format keeps them.

    Attributes:
        format: How numbers are kept.
        k: (blocks, kv_heads, block_size, head_dim); in int4, half as many bytes as channels.
        v: The same; (blocks, kv_heads, head_dim, block_size) where `side_by_side`.
        k_scale: Static ones of channels, fp32 (kv_heads, head_dim); of tokens (blocks, kv_heads,
            groups, block_size, numbers): one in fp32 for int8, a scale and a low in fp16 for int4.
        v_scale: The same.
        kinds: What kernels call K's and V's numbers.
        head_dim: Channels of a head.
        groups: Of channels in half a head of int4; 1 without int4.
        family: Whose kernels work on it, or the definition.
        side_by_side: Whether V's tokens lie side by side.
    """

    def __init__(
        self,
        format: KvFormat,
        k: Tensor,
        v: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ):
        self.format, self.k, self.v = format, k, v
        self.k_scale, self.v_scale = k_scale, v_scale
        self.kinds = format.k.kind, format.v.kind
        self.head_dim = k.shape[3] * format.k.packs
        pairs = zip(self.kinds, (k_scale, v_scale), strict=True)
        groups = (s.shape[2] // 2 for kind, s in pairs if kind == "int4" and s is not None)
        self.groups = next(groups, 1)
        family = of(k)
        self.family = TORCH if family.refuse_cache(self) else family
        self.side_by_side = format.v.side_by_side and self.family.side_by_side

    @classmethod
    def empty(
        cls,
        blocks: int,
        heads: int,
        block_size: int,
        head_dim: int,
        format: KvFormat,
        device: torch.device,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> "LayerCache":
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
        if cache.side_by_side:
            cache.v = v.view(blocks, heads, v.shape[3], block_size)
        return cache

    @classmethod
    def within(cls, pages: Tensor, head_dim: int, format: KvFormat) -> "LayerCache":
        """A cache in memory of somebody else's: K, V and their scales of a head's block in a row.

        Args:
            pages: uint8 (blocks, heads, block_size, bytes), which `token_bytes` says; the last two
                and the first two without gaps between them.
            head_dim: Channels of a head.
            format: How numbers are kept.

        Raises:
            Unsupported: There are gaps.
        """
        blocks, heads, size, room = pages.shape
        page, head, *rest = pages.stride()
        if rest != [room, 1] or page != heads * head or head < size * room:
            raise Unsupported(
                f"KV pages of {tuple(pages.shape)} bytes have strides {pages.stride()}, and gaps "
                "between them; give each layer pages of its own size, one after the other"
            )
        one, at, planes = sample(size, head_dim, format), pages.storage_offset(), []
        for plane in (one.k, one.v, one.k_scale, one.v_scale):
            if plane is not None:
                own = pages.as_strided((blocks, heads, plane.nbytes), (page, head, 1), at)
                at += plane.nbytes
                plane = own.view(plane.dtype).unflatten(2, plane.shape[2:])
            planes.append(plane)
        k, v, *scales = planes
        assert k is not None
        assert v is not None
        return cls(format, k, v, *scales)

    @property
    def by_kernels(self) -> bool:
        """Whether kernels read and write it, which look at nothing on the host."""
        return self.family is not TORCH

    def attend(
        self,
        qkv: Tensor | Unturned,
        heads: int,
        batch: Batch,
        rope: tuple[Tensor, Tensor] | None,
        scores: Scores,
        norms: tuple[Tensor, Tensor, float] | None = None,
    ) -> Tensor:
        """From projections (T, (heads + 2 kv_heads) * head_dim) to the output (T, heads, head_dim).

        Always attends to what went into the cache and never to K and V before that, so that neither
        chunks of a prompt nor cached prefixes nor preemption change a result.

        Args:
            qkv: Projections.
            heads: Of Q.
            batch: The step.
            rope: Cosines and sines of all positions; None: Q and K are rotated already, and no
                kernel is to be used.
            scores: How queries weigh keys.
            norms: RMSNorm weights of Q's and K's heads, and the epsilon.
        """
        family = TORCH if rope is None else self.family
        q = family.write(qkv, self, rope, batch.positions, batch.slots, heads, norms)
        return family.attend(q, self, batch, scores)

    @property
    def sides(self) -> tuple[tuple[Numbers, Tensor, Tensor | None], ...]:
        """How K is kept, its numbers (blocks, kv_heads, block_size, ...) and scales; so of V."""
        v = self.v.transpose(2, 3) if self.side_by_side else self.v
        return (self.format.k, self.k, self.k_scale), (self.format.v, v, self.v_scale)

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


def sample(size: int, head_dim: int, format: KvFormat) -> LayerCache:
    """One head's block of tokens, laid out as `LayerCache.within` has it, without memory."""
    return LayerCache.empty(1, 1, size, head_dim, format, torch.device("meta"))


def token_bytes(head_dim: int, format: KvFormat) -> int:
    """Of a token's head of K and V, with its scales."""
    return sample(1, head_dim, format).nbytes


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
