"""`QuantLinear`: a linear layer whose weight is stored in a few-bit format."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anybit import ops
from anybit.dispatch import choose, get_backend, parse_scheme, scheme_name
from anybit.format import Format, Packed, get_format, tensor_shapes
from anybit.ops import CODES, Tokens
from anybit.quantizers.rtn import RTN


class QuantLinear(nn.Module):
    """y = x W^T + bias with a quantized W of shape (out_features, in_features).

    The buffers are the canonical tensors of `Packed` (codes4, codes2, ..., scale, ...), which is
    what `state_dict` and checkpoints hold; a backend's own layout is made from them by `prepare`.
    Moving the module to another device moves them; casts (`.half()`, `.to(dtype)`) do not touch
    them, since they are not numbers of the model's dtype. A layer that will only multiply can do
    without them where the backend has a layout of its own: see `release`.

    dtype: of the activations, where it is known beforehand. A GPU's kernels multiply 16-bit ones,
    so that a layer for float32 gets the reference.
    """

    bias: Tensor | None
    order: Tensor  # where the format has one

    def __init__(
        self,
        packed: Packed,
        bias: Tensor | None = None,
        activation: str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.out_features, self.in_features = packed.shape
        self.format = packed.format
        self.activation = activation
        self.dtype = dtype
        self.scheme = scheme_name(packed.format, activation)
        for name, tensor in packed.tensors().items():
            self.register_buffer(name, tensor)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.backend, self.kernel_scheme = "", self.scheme
        self.released = False  # whether the canonical tensors are gone
        self.prepared: list[Tensor] = []
        if packed.planes[0].device.type != "meta":
            self.prepare()

    @classmethod
    def empty(
        cls,
        scheme: str,
        shape: tuple[int, int],
        bias: Tensor | None = None,
        device: torch.device | str = "meta",
    ) -> "QuantLinear":
        """A layer without contents, to be filled from a checkpoint."""
        fmt, activation = parse_scheme(scheme)
        fmt.check(*shape)
        tensors = {
            name: torch.empty(
                size, dtype=entry.default_dtype if entry else torch.int32, device=device
            )
            for name, (size, entry) in tensor_shapes(fmt, shape).items()
        }
        return cls(Packed.from_tensors(fmt, shape, tensors), bias, activation)

    @property
    def packed(self) -> Packed:
        shape = (self.out_features, self.in_features)
        names = tensor_shapes(self.format, shape)
        if self.released:
            raise RuntimeError(
                f"{self}: release() has dropped the canonical tensors, and only the "
                f"{self.backend} backend's layout is left; load the checkpoint again to save, move "
                "or decode it"
            )
        return Packed.from_tensors(self.format, shape, {n: getattr(self, n) for n in names})

    def prepare(self) -> "QuantLinear":
        """Choose a backend for the device that the layer is on, and make its layout.

        Done when the layer is built, loaded or moved; call it after writing to the buffers.
        """
        packed = self.packed.stored()
        device = packed.planes[0].device
        self.kernel_scheme = scheme_name(packed.format, self.activation)
        self.backend = choose(packed.format, self.activation, packed.shape, device, self.dtype)
        self.prepared = get_backend(self.backend).prepare(packed, self.activation, self.dtype)
        return self

    def release(self) -> "QuantLinear":
        """Drop the canonical tensors where the backend's layout does without them.

        For inference: it halves the layer's memory on a GPU. Saving, moving or decoding the layer
        raises RuntimeError from then on.
        """
        if self.released:
            return self
        if not self.prepared and self.packed.planes[0].device.type != "meta":
            self.prepare()  # the contents were loaded and not yet used
        needed = get_backend(self.backend).release(self.prepared) if self.prepared else None
        if needed is not None:
            self.prepared, self.released = needed, True
            for name in tensor_shapes(self.format, (self.out_features, self.in_features)):
                if name != "order":
                    del self._buffers[name]
        return self

    def forward(self, x: Tensor | Tokens) -> Tensor:
        given: tuple[Any, ...] = ()  # what belongs to tokens that are quantized already
        if isinstance(x, Tokens):
            wanted = CODES.get(self.activation or "")
            if x.codes.dtype != wanted:
                raise TypeError(
                    f"{self}: tokens are quantized to {x.codes.dtype}, and it multiplies "
                    f"{wanted or 'plain activations'}; pass it what they were quantized from"
                )
            given = x.scale, x.sums, x.dtype
            x = x.codes
        if x.shape[-1] != self.in_features:
            raise ValueError(
                f"x has {x.shape[-1]} columns, the layer {self.in_features} inputs (K); "
                "x must be (..., K)"
            )
        if not self.prepared:
            self.prepare()
        if self.format.order:
            x = x.index_select(-1, self.order)
        args = (self.bias, self.kernel_scheme, self.out_features, self.backend)
        return ops.linear(x, self.prepared, *args, *given)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The decoded weight (N, K)."""
        return self.packed.dequantize().to(dtype)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, scheme={self.scheme!r}, backend={self.backend!r}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if self.released:
            device = self.prepared[0].device
            if fn(torch.empty(0, device=device)).device != device:
                _ = self.packed  # raises
            return super()._apply(fn, recurse)
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():  # undo casts, keep moves
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old if old.device == new.device else old.to(new.device)
        device = next(iter(self._buffers.values())).device  # type: ignore[union-attr]
        if self.prepared and device.type != "meta" and device != self.prepared[0].device:
            self.prepare()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if not self.released:
            self.prepared = []

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        _ = self.packed  # raises when there is nothing to save
        super()._save_to_state_dict(*args, **kwargs)


def quantize_tensor(w: Tensor, spec: str | Format, quantizer: RTN | None = None) -> Packed:
    """Quantize one weight (N, K) of any float dtype; round to nearest by default.

    Raises ValueError for a shape that the format cannot store, and for NaN or inf.
    """
    fmt = get_format(spec)
    if w.ndim != 2:
        raise ValueError(f"a weight has shape (N, K); found {tuple(w.shape)}")
    fmt.check(*w.shape)
    check_finite(w, "weight")
    return (quantizer or RTN()).quantize(w, fmt)


def dequantize(packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decoded weights (N, K)."""
    return packed.dequantize().to(dtype)


def linear(
    x: Tensor, packed: Packed, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """y = x W^T + bias for x (..., K). Lays the weight out on every call; QuantLinear only once."""
    return QuantLinear(packed, bias, activation)(x)


def check_finite(w: Tensor, name: str) -> None:
    """Raise ValueError when a weight holds NaN or inf."""
    # The sum of absolute values is finite only if all are: one pass, no temporary of w's size.
    if not torch.isfinite(torch.linalg.vector_norm(w, 1, dtype=torch.float32)):
        bad = (~torch.isfinite(w)).nonzero()
        if len(bad):
            at = tuple(bad[0].tolist())
            raise ValueError(
                f"{name}: {len(bad)} values are NaN or inf, the first at {at}; "
                "repair the checkpoint, or keep the layer unquantized (None)"
            )
