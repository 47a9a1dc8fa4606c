"""What kernels know of a layer's KV cache: its tensors, and what their numbers mean."""

from typing import NamedTuple

from torch import Tensor


class Planes(NamedTuple):
    """K and V of a layer, in blocks of tokens.

    Attributes:
        k_kind: "model": numbers of the model's dtype. "static" and "dynamic": int8 with a scale of
            each channel, or of each token and head. "int4": as `anybit.engine.kv.int4` has it.
            None: what no kernel reads.
        v_kind: The same, of V.
        k: (blocks, kv_heads, block_size, head_dim); in int4, half as many bytes as channels.
        v: The same; (blocks, kv_heads, head_dim, block_size) where `LayerCache.turned`.
        k_scale: fp32 (kv_heads, head_dim) of channels; of tokens (blocks, kv_heads, groups,
            block_size, numbers): one in fp32 for int8, a scale and a low in fp16 for int4.
        v_scale: The same.
    """

    k_kind: str | None
    v_kind: str | None
    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.k.shape[3] * (2 if self.k_kind == "int4" else 1)

    @property
    def groups(self) -> int:
        """Groups of channels in half a head of int4; 1 without int4."""
        own = [
            scale.shape[2] // 2
            for kind, scale in ((self.k_kind, self.k_scale), (self.v_kind, self.v_scale))
            if kind == "int4" and scale is not None
        ]
        return own[0] if own else 1
