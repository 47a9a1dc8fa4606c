"""`QuantLinear`: a linear layer whose weight is stored in a few-bit format."""

from collections.abc import Callable
from operator import attrgetter, is_, methodcaller
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from anybit.core.format import LAYER
from anybit.core.packed import Packed
from anybit.core.scheme import parse_scheme, scheme_name
from anybit.errors import InvalidInput, InvalidType, Unsupported
from anybit.kernels.backend import Activations, Prepared
from anybit.kernels.registry import get_backend
from anybit.nn import op as ops
from anybit.nn.around import Around
from anybit.nn.multiplier import (
    Keep,
    Multiplier,
    autocast,
    check,
    check_keep,
    chosen,
    constant,
    travels,
)
from anybit.nn.quantized import Quantized

# Bits of the largest finite numbers of dtypes in which torch finds no maximum: of those without the
# highest bit (the sign, if there is one), and of all. What is not finite lies above either.
LARGEST = {
    torch.float8_e4m3fn: (0x7E, 0xFE),
    torch.float8_e5m2: (0x7B, 0xFB),
    torch.float8_e8m0fnu: (0x7F, 0xFE),
}


VERSION, ADDRESS = attrgetter("_version"), methodcaller("data_ptr")


class Made(NamedTuple):
    """What multiplies, and the contents that it was made from.

    Attributes:
        backend: its name.
        multiplier: None: the first call knows what dtype it is for.
        tensors: that were stored.
        versions: theirs at that time.
        addresses: theirs at that time.
        memory: theirs; held, or other contents might get the same addresses.
    """

    backend: str
    multiplier: Multiplier | None
    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]
    addresses: tuple[int, ...]
    memory: tuple[torch.UntypedStorage, ...]

    def written(self) -> bool:
        """Whether the tensors hold other contents than then, as far as torch counts it."""
        return (
            tuple(map(VERSION, self.tensors)) != self.versions
            or tuple(map(ADDRESS, self.tensors)) != self.addresses
        )


class QuantLinear(Quantized):
    """y = x W^T + bias with a quantized W of shape (out_features, in_features).

    Of its tensors, which lie in buffers (`Quantized`), a `Multiplier` is made, and anew when they
    are moved, replaced or written to.

    dtype: of the activations, where it is known beforehand. A GPU's kernels multiply 16-bit ones.

    keep: whether a decoded copy of the weight may be held where no kernel multiplies the packed
    one. "packed": never, so that the weight is decoded in each call; "decoded": always; "auto":
    where all such copies take at most half of the free memory. A copy is made at the first call
    if `dtype` is not known before.
    """

    bias: Tensor | None
    _made: Made | None = None

    def __init__(
        self,
        packed: Packed,
        bias: Tensor | None = None,
        activation: str | None = None,
        dtype: torch.dtype | None = None,
        keep: Keep = "auto",
    ):
        given = dtype if bias is None else bias.dtype
        super().__init__(packed, activation, given or torch.get_default_dtype())
        self.out_features, self.in_features = packed.shape
        self.activation = activation
        self.dtype = dtype
        check_keep(keep)
        self.keep: Keep = keep
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.transposed = False  # whether the dense layer holds W^T
        if not packed.planes[0].is_meta:
            self.prepare()

    @classmethod
    def empty(
        cls,
        scheme: str,
        shape: tuple[int, int],
        bias: Tensor | None = None,
        device: torch.device | str = "meta",
        keep: Keep = "auto",
    ) -> "QuantLinear":
        """A layer without contents, to be filled from a checkpoint."""
        fmt, activation = parse_scheme(scheme)
        packed = Packed.meta(fmt, shape)
        layer = cls(packed, bias, activation, keep=keep)
        for name, tensor in packed.tensors().items():
            filled = torch.empty_like(tensor, device=device)
            if filled.is_floating_point():  # or what nobody fills would multiply like a weight
                filled.fill_(torch.nan)
            setattr(layer, name, filled)
        return layer

    @classmethod
    def instead_of(
        cls,
        layer: Any,
        packed: Packed,
        activation: str | None,
        dtype: torch.dtype | None = None,
        keep: Keep = "auto",
    ) -> "QuantLinear":
        """A layer in the place of a dense one, with its bias."""
        out = cls(packed, layer.bias, activation, dtype, keep)
        out.weight_dtype = layer.weight.dtype
        out.transposed = is_conv1d(layer) or getattr(layer, "transposed", False)
        return out

    # Models call it while they are loaded, when it does nothing; else writing to `weight` raises.
    reset_parameters = nn.Linear.reset_parameters

    @property
    def backend(self) -> str:
        """The name of the backend that multiplies; "" until a call has to choose one."""
        return self._made.backend if self._made else ""

    @property
    def prepared(self) -> Prepared | None:
        """The weight as it multiplies; None until a call has to make it."""
        return self._made.multiplier.prepared if self._made and self._made.multiplier else None

    def prepare(self, dtype: torch.dtype | None = None) -> "QuantLinear":
        """Choose a backend for the device that the layer is on, and make its layout.

        Done by itself when the layer is built or moved, and by calls that find other contents than
        before. torch does not count writes through `.data`, NumPy, storages, `torch.distributed`'s
        collectives and other processes: call it after those.

        Args:
            dtype: of the activations that the layout is for, by default the layer's.
        """
        self._make(dtype or self.dtype)
        return self

    def forget(self) -> None:
        """Drop what multiplies; the next call makes it anew."""
        super().forget()
        self._made = None

    def multiplier(self, dtype: torch.dtype) -> Multiplier:
        """What multiplies activations of this dtype with the contents as they are now."""
        made = self._made
        if made is not None and made.multiplier is not None:
            fits = made.multiplier.prepared.dtype in (None, dtype)
            if fits and not self._swapped(made) and not made.written():
                return made.multiplier
        return cast(Multiplier, self._make(dtype).multiplier)

    def _make(self, dtype: torch.dtype | None) -> Made:
        """Make what multiplies; None: only where it does for activations of any dtype."""
        missing = [name for name in self.names if getattr(self, name).is_meta]
        if missing:
            raise Unsupported(
                f"{self} has no contents in {', '.join(missing)}; load a checkpoint first"
            )
        if next(self.buffers()).is_cuda and torch.cuda.is_current_stream_capturing():
            raise Unsupported(
                f"{self} is to be laid out for {dtype}, which no CUDA graph can hold: call it once "
                f"before capturing, or make it with dtype={dtype}"
            )
        for name in self.names:
            if (tensor := getattr(self, name)).is_inference():  # whose versions are not counted
                with torch.inference_mode(False):
                    setattr(self, name, tensor.clone())
        packed, multiplier = self.packed, None
        tensors = tuple(getattr(self, name) for name in self.names)
        before = (
            tensors,
            tuple(map(VERSION, tensors)),
            tuple(map(ADDRESS, tensors)),
            tuple(tensor.untyped_storage() for tensor in tensors),
        )
        backend, decoded = chosen(packed, self.activation, self.dtype, self.keep, dtype)
        if dtype or not (decoded and get_backend(backend).decodes(self.activation)):
            multiplier = Multiplier.by(backend, packed, self.activation, dtype, decoded)
        self._made = made = Made(backend, multiplier, *before)
        return made

    @constant
    def _make_while_tracing(self, dtype: torch.dtype) -> None:
        """`multiplier` during the tracing itself: no part of the graph."""
        self.multiplier(dtype)

    def _swapped(self, made: Made) -> bool:
        """Whether buffers are other tensors than those that the layout was made from.

        torch.func.functional_call and nn.DataParallel put others there. So do accelerate's hooks
        that offload, which are taken to put the same contents there.
        Compiled code asks in vain before torch 2.13.
        """
        hook = vars(self).get("_hf_hook")
        if hook is not None and getattr(hook, "offload", True):
            return False
        return not all(map(is_, self._buffers.values(), made.tensors))

    def _in_torch(self, x: Tensor) -> Tensor:
        """The layer by torch's own operators, which transforms and forward gradients go through."""
        if self.activation is not None:
            raise Unsupported(
                f"{self} quantizes its activations, which transforms of torch.func and forward "
                f"gradients do not pass; quantize to {self.format.spec!r} instead"
            )
        bias = None if self.bias is None else self.bias.to(x.dtype)
        decoded = self.weight if torch.compiler.is_compiling() else self.dequantize()
        return nn.functional.linear(x, decoded.to(x.dtype), bias)

    def release(self) -> Multiplier:
        """A layer that only multiplies: without the stored tensors, which take memory of their own.

        Put it in the place of this one. Saving, copying, moving or decoding it raises Unsupported.
        """
        made_for = self.prepared.dtype if self.prepared else None
        found = self.multiplier(made_for or self.dtype or self.weight_dtype)
        return Multiplier(found.backend, found.prepared, found.around, self.bias)

    def forward(self, input: Tensor | Activations) -> Tensor:
        x = autocast(input) if isinstance(input, Tensor) else input
        check(x, self.in_features)
        if isinstance(x, Tensor) and travels():
            return self._by_stored(x)
        if not torch.compiler.is_compiling():
            if isinstance(x, Tensor):
                if in_transform():
                    return self._in_torch(x)
                if x.is_meta and all(buffer.is_meta for buffer in self.buffers()):
                    return x.new_empty(*x.shape[:-1], self.out_features)
                if x.requires_grad and torch.is_grad_enabled():
                    return self.multiplier(x.dtype).multiply(x, self.bias, self._stored())
            return self.multiplier(x.dtype).multiply(x, self.bias)
        self._make_while_tracing(x.dtype)
        made = self._made
        assert made is not None
        assert made.multiplier is not None
        if isinstance(x, Tensor) and (in_transform() or self._swapped(made)):
            return self._in_torch(x)
        versions = [v for n, v in zip(self.names, made.versions, strict=True) if n not in LAYER]
        return made.multiplier.multiply(x, self.bias, self._stored(), versions)

    def _by_stored(self, x: Tensor) -> Tensor:
        """The layer for a program that may run elsewhere: from its buffers, which it decodes."""
        around, stored = Around.of(self._buffers), self._stored()
        scheme = scheme_name(self.format.plain(), self.activation)
        own = stored, around.inside(self.bias), scheme, self.out_features, "reference"
        y = ops.linear(around.before(x), *own, *ops.Call(stored=stored))
        return around.after(y, self.bias)

    def _stored(self) -> list[Tensor]:
        """The canonical tensors of the weight that the backend multiplies with."""
        return [getattr(self, name) for name in self.names if name not in LAYER]

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, scheme={self.scheme!r}, backend={self.backend!r}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        made = self._made
        if made and not all(map(is_, self._buffers.values(), made.tensors)):
            self.forget()
            if made.multiplier and not any(buffer.is_meta for buffer in self.buffers()):
                self.prepare()
        return self


def dequantize(packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decoded weights (N, K)."""
    return packed.dequantize().to(dtype)


def linear(
    x: Tensor, packed: Packed, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """y = x W^T + bias for x (..., K). Lays the weight out on every call; QuantLinear only once."""
    return QuantLinear(packed, bias, activation)(x)


def in_transform() -> bool:
    """Whether a transform of torch.func, or a forward gradient, is being computed."""
    return forward_ad._current_level >= 0 or in_func_transform()


@constant
def in_func_transform() -> bool:
    """Whether a transform of torch.func is being computed; compiled code has a guard for that."""
    return bool(torch._C._are_functorch_transforms_active())


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D (GPT-2): a linear layer whose weight is W^T (K, N)."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def check_real(w: Tensor, name: str) -> None:
    """Raise InvalidType for a weight of other than real numbers, or in parts elsewhere."""
    if is_traceable_wrapper_subclass(w):
        raise InvalidType(
            f"{name}: the weight is a {type(w).__name__}, not a plain tensor; quantize the model "
            "before it is sharded or wrapped, or keep the layer (None)"
        )
    if not w.is_floating_point():
        raise InvalidType(
            f"{name}: weights of {w.dtype} are not quantized, only floating-point ones; keep the "
            "layer (None)"
        )


def check_grid(packed: Packed, name: str) -> Packed:
    """The stored weight of a checkpoint; InvalidInput when its scales or tables hold NaN or inf."""
    for key, tensor in packed.grid.items():
        check_finite(tensor, f"{name}.{key}")
    return packed


def check_finite(w: Tensor, name: str) -> None:
    """Raise InvalidInput when a weight holds NaN or inf."""
    if not w.is_floating_point() or all_finite(w.detach()):
        return
    bad = (~torch.isfinite(w.float())).nonzero()
    raise InvalidInput(
        f"{name}: {len(bad)} values are NaN or inf, the first at {tuple(bad[0].tolist())}; "
        "copy the checkpoint again, or make it anew"
    )


def all_finite(w: Tensor) -> bool:
    """Whether no number is NaN or inf: without a temporary, which would take most of the time."""
    if not w.numel():
        return True
    if w.dtype in LARGEST:
        positive, all_numbers = LARGEST[w.dtype]
        highest, largest = w.view(torch.int8).max(), w.view(torch.uint8).max()
        return bool((highest <= positive) & (largest <= all_numbers))
    if w.itemsize not in (2, 4):
        w = w.float()  # what quantizers make of it, where large numbers of 64 bits are inf
    low, high = w.aminmax()  # NaN if any number is
    return bool(low.isfinite() & high.isfinite())
