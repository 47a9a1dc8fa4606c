"""`QuantLinear`: a linear layer whose weight is stored in a few-bit format."""

from collections.abc import Callable
from operator import is_
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from anybit.core.format import LAYER
from anybit.core.packed import Packed, tensor_shapes
from anybit.core.scheme import parse_scheme, scheme_name
from anybit.errors import InvalidInput, InvalidType, Unsupported
from anybit.kernels import dense
from anybit.kernels.backend import CODES, Activations, LayerSpec, Prepared
from anybit.kernels.registry import choose, get_backend
from anybit.nn import op as ops
from anybit.nn.around import Around
from anybit.nn.weight import DecodedWeight

Keep = Literal["auto", "packed", "decoded"]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of activations


class QuantLinear(nn.Module):
    """y = x W^T + bias with a quantized W of shape (out_features, in_features).

    The buffers are the canonical tensors of `Packed` (codes4, codes2, ..., scale, ...), which is
    what `state_dict` and checkpoints hold; a backend's own layout is made from them by `prepare`.
    Moving the module to another device moves them; casts (`.half()`, `.to(dtype)`) do not touch
    them, since they are not numbers of the model's dtype. A layer that will only multiply can do
    without them where the backend has a layout of its own: see `release`.

    `weight` is there for models that look at it: its shape, device and dtype (`weight_dtype`, that
    of the dense layer, which follows casts) cost nothing, and an operation on it decodes it. It is
    neither a parameter nor in `state_dict`.

    dtype: of the activations, where it is known beforehand. A GPU's kernels multiply 16-bit ones.

    keep: whether a decoded copy of the weight may be held where no kernel multiplies the packed
    one. "packed": never, so that the weight is decoded in each call; "decoded": always; "auto":
    where all such copies take at most half of the free memory. A copy is made at the first call
    if `dtype` is not known before.
    """

    bias: Tensor | None

    def __init__(
        self,
        packed: Packed,
        bias: Tensor | None = None,
        activation: str | None = None,
        dtype: torch.dtype | None = None,
        keep: Keep = "auto",
    ):
        super().__init__()
        self.out_features, self.in_features = packed.shape
        self.format = packed.format
        self.activation = activation
        self.dtype = dtype
        given = dtype if bias is None else bias.dtype
        self.weight_dtype = given or torch.get_default_dtype()
        check_keep(keep)
        self.keep: Keep = keep
        self.scheme = scheme_name(packed.format, activation)
        self.names = tuple(packed.tensors())  # of the canonical tensors
        for name, tensor in packed.tensors().items():
            self.register_buffer(name, tensor)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.backend, self.kernel_scheme = "", self.scheme
        self.transposed = False  # whether the dense layer holds W^T
        self.released = False  # whether the canonical tensors are gone
        self.prepared: Prepared | None = None
        self.prepared_of: tuple[Tensor | None, ...] = ()  # the buffers
        if packed.planes[0].device.type != "meta":
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
        fmt.check(*shape)
        tensors = {
            name: torch.empty(size, dtype=entry.default_dtype, device=device)
            for name, (size, entry) in tensor_shapes(fmt, shape).items()
        }
        return cls(Packed.from_tensors(fmt, shape, tensors), bias, activation, keep=keep)

    @classmethod
    def instead_of(
        cls,
        layer: Any,
        packed: Packed,
        activation: str | None,
        dtype: torch.dtype | None = None,
    ) -> "QuantLinear":
        """A layer in the place of a dense one, with its bias."""
        out = cls(packed, layer.bias, activation, dtype)
        out.weight_dtype = layer.weight.dtype
        out.transposed = is_conv1d(layer) or getattr(layer, "transposed", False)
        return out

    @property
    def weight(self) -> Tensor:
        """The decoded weight (N, K), for models that look at it; see the class."""
        if "weight" in self._parameters:  # a placeholder, while transformers loads the model
            return cast(Tensor, self._parameters["weight"])
        if torch.compiler.is_compiling():
            n, k, spec = self.out_features, self.in_features, self.format.spec
            return ops.decode([getattr(self, m) for m in self.names], spec, n, k, self.weight_dtype)
        shape, dtype = (self.out_features, self.in_features), self.weight_dtype
        kept = self.prepared.layout if self.released and self.prepared else tuple(self.buffers())
        return DecodedWeight(
            shape, dtype, kept[0].device, lambda: self.dequantize(dtype), self.multiply
        )

    # Models call it while they are loaded, when it does nothing; else writing to `weight` raises.
    reset_parameters = nn.Linear.reset_parameters

    def multiply(self, factor: float) -> None:
        """Multiply the weight by a number, in place; it must be exact, as powers of two are.

        Raises:
            Unsupported: It is not, in the dtype of the scales.
        """
        before = self.packed.grid["scale"]
        scale = before * factor
        if not torch.equal(scale / factor, before):
            raise Unsupported(
                f"{self}: its weight cannot be multiplied by {factor:g}, since its scales, of "
                f"{before.dtype}, would be rounded; dequantize_ the model, change it, and quantize "
                "it again"
            )
        self.scale = scale
        self.prepare(self.dtype)

    @property
    def packed(self) -> Packed:
        shape = (self.out_features, self.in_features)
        if self.released:
            raise Unsupported(
                f"{self}: release() has dropped the canonical tensors, and only the "
                f"{self.backend} backend's layout is left; load the checkpoint again to save, move "
                "or decode it"
            )
        return Packed.from_tensors(self.format, shape, {n: getattr(self, n) for n in self.names})

    def prepare(self, dtype: torch.dtype | None = None) -> "QuantLinear":
        """Choose a backend for the device that the layer is on, and make its layout.

        Done when the layer is built, loaded or moved; call it after writing to the buffers.

        Args:
            dtype: of the activations that the layout is for, by default the layer's.
        """
        packed = self.packed.stored()
        device = packed.planes[0].device
        self.kernel_scheme = scheme_name(packed.format, self.activation)
        dtype = dtype or self.dtype
        decoded = self._may_decode(dtype or torch.get_default_dtype(), device)
        layer = LayerSpec.of(packed, self.activation, self.dtype, decoded)
        self.backend = "dense" if self.keep == "decoded" else choose(layer)
        kernels = get_backend(self.backend)
        if decoded and dtype is None and kernels.decodes(self.activation):
            self.prepared = None  # the first call knows what to decode to
        else:
            self.prepared = kernels.prepare(packed, self.activation, dtype, decoded)
        self.prepared_of = () if self.prepared is None else tuple(self._buffers.values())
        return self

    def unprepare(self) -> None:
        """Drop the layout; the next call makes it anew."""
        self.prepared, self.prepared_of = None, ()

    def _may_decode(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether a decoded copy may be held."""
        if self.keep != "auto":
            return self.keep == "decoded"
        return dense.fits(self.out_features * self.in_features * dtype.itemsize, device)

    def _prepared_for(self, dtype: torch.dtype) -> Prepared:
        """The layout for activations of this dtype, made anew if it was made for another."""
        if self.prepared is None:
            self.prepare(self.dtype or dtype)
        prepared = self.prepared
        assert prepared is not None
        if prepared.dtype in (None, dtype):
            return prepared
        laid_out = f"x is {dtype}, and {self}'s weight is laid out for {prepared.dtype}"
        if self.released:
            raise InvalidType(
                f"{laid_out} alone, since its canonical tensors were released: make the layer "
                f"with dtype={dtype}"
            )
        if prepared.layout[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise Unsupported(
                f"{laid_out}: call the layer once before capturing a CUDA graph, or make it with "
                f"dtype={dtype}"
            )
        self.prepare(dtype)
        return self.prepared or prepared

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _prepare_while_tracing(self, dtype: torch.dtype) -> None:
        """`_prepared_for` during the tracing itself: no part of the graph."""
        if self.prepared is None or self.prepared.dtype not in (None, dtype):
            if any(isinstance(buffer, FakeTensor) for buffer in self.buffers()):
                raise Unsupported(f"{self}: call the model once with {dtype} before exporting it")
            self._prepared_for(dtype)

    def _holds_others(self) -> bool:
        """Whether buffers are other tensors than those that the layout was made from.

        torch.func.functional_call and nn.DataParallel put others there. So do accelerate's hooks
        and torch.export, which are taken to put the same contents there.
        Compiled code asks in vain before torch 2.13.
        """
        if self.released or "_hf_hook" in vars(self) or torch.compiler.is_exporting():
            return False
        return not all(map(is_, self._buffers.values(), self.prepared_of))

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

    def release(self) -> "QuantLinear":
        """Drop the canonical tensors where the backend's layout does without them.

        For inference: it halves the layer's memory on a GPU. Saving, moving or decoding the layer
        raises RuntimeError from then on. A layer that waits for its first call to be decoded keeps
        them; give it a dtype.
        """
        if self.released:
            return self
        if self.prepared is None and self.packed.planes[0].device.type != "meta":
            self.prepare()  # the contents were loaded and not yet used
        if self.prepared is not None and get_backend(self.backend).own_layout:
            self.released, self.prepared_of = True, ()
            for name in self.names:
                if name not in LAYER:
                    del self._buffers[name]
        return self

    def forward(self, input: Tensor | Activations) -> Tensor:
        x = autocast(input) if isinstance(input, Tensor) else input
        dtype = x.dtype
        given: tuple[Any, ...] = ()  # what belongs to activations that are quantized already
        rotated = False
        if isinstance(x, Activations):
            wanted = CODES.get(self.activation or "")
            if x.codes.dtype not in (wanted, x.dtype):
                raise InvalidType(
                    f"{self}: x is quantized to {x.codes.dtype}, and it multiplies "
                    f"{wanted or 'plain activations'}; pass it what they were quantized from"
                )
            if x.rotated != bool(self.format.rotate):
                raise InvalidInput(
                    f"{self}: x was quantized {'after' if x.rotated else 'without'} a rotation, "
                    f"and its weight is {'' if self.format.rotate else 'not '}rotated"
                )
            given = (x.scale, x.sums, x.dtype) if x.codes.dtype == wanted else ()
            rotated, x = x.rotated, x.codes
        if dtype not in FLOATS:
            raise InvalidType(
                f"x is {dtype}, and y would be, too; pass activations of float16, bfloat16, "
                "float32 or float64"
            )
        if x.shape[-1:] != (self.in_features,):
            raise InvalidInput(
                f"x has shape {tuple(x.shape)}, and the layer {self.in_features} inputs (K); "
                "x must be (..., K)"
            )
        tracing = torch.compiler.is_compiling()
        others = self._holds_others()
        if isinstance(input, Tensor) and (in_transform() or (tracing and others)):
            return self._in_torch(x)
        if tracing:
            self._prepare_while_tracing(dtype)
        elif others:
            self.prepare(self.dtype)
        prepared = self.prepared
        if prepared is None or prepared.dtype not in (None, dtype):
            prepared = self._prepared_for(dtype)
        around = Around.of(self._buffers)
        if not rotated:
            x = around.before(x)
        bias = around.inside(self.bias)
        args = (bias, self.kernel_scheme, self.out_features, self.backend)
        if not self.released and x.requires_grad and torch.is_grad_enabled():
            y = ops.run(ops.linear, x, prepared.layout, *args, stored=self._stored())
        else:
            y = ops.run(ops.linear, x, prepared.layout, *args, *given)
        return around.after(y, self.bias)

    def _stored(self) -> list[Tensor]:
        """The canonical tensors of the weight that the backend multiplies with."""
        return [getattr(self, name) for name in self.names if name not in LAYER]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The decoded weight (N, K)."""
        return self.packed.dequantize().to(dtype)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, scheme={self.scheme!r}, backend={self.backend!r}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.weight_dtype = fn(torch.empty(0, dtype=self.weight_dtype)).dtype
        if self.released and self.prepared is not None:
            device = self.prepared.layout[0].device
            if fn(torch.empty(0, device=device)).device != device:
                _ = self.packed  # raises
            return self._moved(fn, recurse)
        self._moved(fn, recurse)
        device = next(iter(self._buffers.values())).device  # type: ignore[union-attr]
        prepared = self.prepared
        if prepared and device.type != "meta" and device != prepared.layout[0].device:
            self.prepare()
        elif self._holds_others():
            self.unprepare()
        return self

    def _moved(self, fn: Callable[[Tensor], Tensor], recurse: bool) -> Any:
        """What `_apply` does, without its casts."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old if old.device == new.device else old.to(new.device)
        return self

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        *_, errors = rest
        saved = local_metadata.get("format", self.format.spec)
        if saved != self.format.spec:  # tensors of int6 and of fp6 look alike
            errors.append(
                f"{prefix}codes are in format {saved!r}, and the layer is in {self.format.spec!r}; "
                "quantize the model to the former before loading"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        if not self.released:
            self.unprepare()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        _ = self.packed  # raises when there is nothing to save
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if notes := getattr(destination, "_metadata", None):
            notes[prefix[:-1]]["format"] = self.format.spec


def dequantize(packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decoded weights (N, K)."""
    return packed.dequantize().to(dtype)


def linear(
    x: Tensor, packed: Packed, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """y = x W^T + bias for x (..., K). Lays the weight out on every call; QuantLinear only once."""
    return QuantLinear(packed, bias, activation)(x)


def autocast(x: Tensor) -> Tensor:
    """x as torch's own linear layers take it inside torch.autocast."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x
    eligible = x.dtype in FLOATS and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if eligible else x


def in_transform() -> bool:
    """Whether a transform of torch.func, or a forward gradient, is being computed."""
    return forward_ad._current_level >= 0 or in_func_transform()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def in_func_transform() -> bool:
    """Whether a transform of torch.func is being computed; compiled code has a guard for that."""
    return bool(torch._C._are_functorch_transforms_active())


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D (GPT-2): a linear layer whose weight is W^T (K, N)."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def check_keep(keep: str) -> None:
    """Raise InvalidInput for what is no `Keep`."""
    if keep not in get_args(Keep):
        raise InvalidInput(f"keep={keep!r}; choose one of {', '.join(get_args(Keep))}")


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
    if not w.is_floating_point():
        return
    if w.itemsize not in (2, 4):
        w = w.float()  # what quantizers make of it, where large numbers of 64 bits are inf
    # The sum of squares is finite only if all are: one pass, no temporary of w's size.
    if not torch.isfinite(torch.linalg.vector_norm(w, 2, dtype=torch.float32)):
        bad = (~torch.isfinite(w)).nonzero()
        if len(bad):
            at = tuple(bad[0].tolist())
            raise InvalidInput(
                f"{name}: {len(bad)} values are NaN or inf, the first at {at}; "
                "repair the checkpoint"
            )
