"""What multiplies: weights in the layout of the backend and the processor that they were made for.

A layout is derived from stored tensors and right on one processor only, so it never travels: where
a weight is saved, copied or moved, its `Packed` is, and what multiplies is made anew from that.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import Tensor, nn

from anybit.core.packed import Packed
from anybit.core.scheme import scheme_name
from anybit.errors import InvalidInput, InvalidType, Unsupported
from anybit.kernels import dense
from anybit.kernels.backend import CODES, Activations, LayerSpec, Prepared
from anybit.kernels.between import ANSWERS, Unturned, of
from anybit.kernels.registry import choose, get_backend
from anybit.nn import op as ops
from anybit.nn.around import Around
from anybit.nn.weight import DecodedWeight

Keep = Literal["auto", "packed", "decoded"]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of activations


class Frozen(nn.Module):
    """Weights that only multiply. Pickling, copying or moving them raises `Unsupported`.

    Attributes:
        prepared: The weights in the layout of a backend.
        around: What is done before and after the product.
    """

    def __init__(self, prepared: Prepared, around: Around):
        super().__init__()
        self.prepared, self.around = prepared, around
        self.device = prepared.layout[0].device

    @property
    def activation(self) -> str | None:
        return self.prepared.activation

    def fill(self, other: "Frozen") -> None:
        """Put other weights of the same kind where these lie, for graphs that know the place."""
        for to, tensor in zip(self.tensors(), other.tensors(), strict=True):
            to.copy_(tensor)

    def tensors(self) -> list[Tensor]:
        return [*self.prepared.layout, *(t for t in self.around if t is not None)]

    def extra_repr(self) -> str:
        n, k = self.prepared.shape
        scheme = scheme_name(self.prepared.format, self.activation)
        return f"in_features={k}, out_features={n}, scheme={scheme!r}"

    def _refuse(self) -> NoReturn:
        raise Unsupported(
            f"{self} only multiplies: it holds a layout for this processor, not the stored weight; "
            "save, copy, move or decode the layer that it was made from, or load the checkpoint "
            "again"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:  # of pickle and copy
        self._refuse()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Casts change nothing."""
        if fn(torch.empty(0, device=self.device)).device != self.device:
            self._refuse()
        return self


class Multiplier(Frozen):
    """y = x W^T + bias with a weight that is laid out once and for all.

    Args:
        backend: The name of the one that multiplies.
        prepared: As in `Frozen`; so is `around`.
        bias: (N,), of any float dtype; None: calls may give one.

    Attributes:
        leaves: of up to so many tokens it leaves outputs to what rotates them, as `Unturned`.
    """

    leaves = 0

    def __init__(
        self, backend: str, prepared: Prepared, around: Around, bias: Tensor | None = None
    ):
        super().__init__(prepared, around)
        self.backend = backend
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.scheme = scheme_name(prepared.format, prepared.activation)
        self.out_features, self.in_features = prepared.shape
        self.kernels = get_backend(backend)

    @classmethod
    def of(
        cls,
        packed: Packed,
        activation: str | None,
        dtype: torch.dtype,
        keep: Keep = "auto",
        bias: Tensor | None = None,
    ) -> "Multiplier":
        """Made from a weight, for activations of a dtype. keep: as in `QuantLinear`."""
        backend, decoded = chosen(packed, activation, dtype, keep, dtype)
        return cls.by(backend, packed, activation, dtype, decoded, bias)

    @classmethod
    def by(
        cls,
        backend: str,
        packed: Packed,
        activation: str | None,
        dtype: torch.dtype | None,
        decoded: bool = False,
        bias: Tensor | None = None,
    ) -> "Multiplier":
        """Made from a weight for a backend; the other arguments are those of its `prepare`."""
        prepared = get_backend(backend).prepare(packed.stored(), activation, dtype, decoded)
        return cls(backend, prepared, Around.of(packed.grid), bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, backend={self.backend!r}"

    def _save_to_state_dict(self, *args: Any) -> None:
        self._refuse()

    @property
    def weight(self) -> Tensor:
        """Shape, device and dtype (that of activations, if known) for models that look at them."""
        dtype = self.prepared.dtype or torch.get_default_dtype()
        return DecodedWeight(self.prepared.shape, dtype, self.device, self._refuse)

    def forward(self, input: Tensor | Activations) -> Tensor | Unturned:
        x = autocast(input) if isinstance(input, Tensor) else input
        check(x, self.in_features)
        if travels():
            self._refuse()
        if self.prepared.dtype not in (None, x.dtype):
            raise InvalidType(
                f"x is {x.dtype}, and {self} is laid out for {self.prepared.dtype} alone; make it "
                f"with dtype={x.dtype}"
            )
        vector = self.around.rotate_out if self.leaves else None
        if vector is None or len(x if isinstance(x, Tensor) else x.codes) > self.leaves:
            return self.multiply(x, self.bias)
        y, bias = self.multiply(x, self.bias, turns=False), self.bias
        return Unturned(y, vector.flatten(), None if bias is None else bias.to(y.dtype))

    def multiply(
        self,
        x: Tensor | Activations,
        bias: Tensor | None,
        stored: list[Tensor] | None = None,
        versions: list[int] | None = None,
        turns: bool = True,
    ) -> Tensor:
        """x (..., K) -> (..., N) in the dtype of x.

        Args:
            x: that passes `check`, in a dtype that the layout is for.
            bias: (N,), or None.
            stored: the tensors that the layout was made from, for the gradient of x.
            versions: of these at that time, where compiled code is to look at them in each call.
            turns: whether outputs are rotated where the weight is; they lack the bias otherwise.
        """
        around, pairs = self.around, None
        rows: Tensor | Activations = x if isinstance(x, Tensor) else self._given(x)
        codes = rows if isinstance(rows, Tensor) else rows.codes
        if codes.device != self.device:
            raise InvalidInput(f"x is on {codes.device}, and {self} on {self.device}")
        inside, lead = around.inside(bias), codes.shape[:-1]
        if isinstance(x, Tensor) or not x.rotated:
            codes = around.before(codes)
            rows = codes if isinstance(rows, Tensor) else rows._replace(codes=codes)
        if isinstance(rows, Activations):
            pairs = rows.pairs
            lead = lead if pairs is None else torch.Size([pairs.tokens])
        elif not torch.compiler.is_compiling():
            pairs = ANSWERS.of(self.activation, math.prod(lead))
            if pairs:
                codes = codes.flatten(0, -2)
                codes, scale, sums = of(codes).quantize(codes, "int8", pairs)
                rows = Activations(codes, scale, sums, x.dtype, pairs=pairs)
        joins = pairs is None or self.kernels.joins
        if not joins:
            assert isinstance(rows, Activations)
            rows = rows._replace(pairs=None)
        added = inside if joins else None
        if ops.watched(codes):
            call = ops.Call(stored=stored, versions=versions)
            if isinstance(rows, Activations):
                call = call._replace(scale=rows.scale, sums=rows.sums, dtype=rows.dtype)
                call = call._replace(pairs=rows.paired)
            own = self.prepared.layout, added, self.scheme, self.out_features, self.backend
            y = ops.linear(codes, *own, *call)
        else:
            y = ops.product(self.kernels, rows, self.prepared, added)
        if pairs:
            y = y[: pairs.tokens] if joins else of(y).join(y, pairs, inside)
            y = y.view(*lead, -1)
        return around.after(y, bias) if turns else y

    def _given(self, x: Activations) -> Tensor | Activations:
        """Activations as the weight wants them; those that are only rotated as a tensor."""
        wanted = CODES.get(self.activation or "")
        if x.codes.dtype not in (wanted, x.dtype):
            raise InvalidType(
                f"{self}: x is quantized to {x.codes.dtype}, and it multiplies "
                f"{wanted or 'plain activations'}; pass it what they were quantized from"
            )
        rotates = self.around.rotate_in is not None
        if x.rotated != rotates:
            raise InvalidInput(
                f"{self}: x was quantized {'after' if x.rotated else 'without'} a rotation, "
                f"and its weight is {'' if rotates else 'not '}rotated"
            )
        return x if x.codes.dtype == wanted else x.codes


def chosen(
    packed: Packed,
    activation: str | None,
    dtype: torch.dtype | None,
    keep: Keep,
    copy: torch.dtype | None,
) -> tuple[str, bool]:
    """The backend of a weight, and whether it may hold a decoded copy.

    Args:
        packed: the weight.
        activation: what activations are quantized to, or None.
        dtype: of the activations; None: not known yet.
        keep: as in `QuantLinear`.
        copy: the dtype of a decoded copy, if known.
    """
    if keep == "decoded":
        return "dense", True
    stored = packed.stored()
    nbytes = math.prod(stored.shape) * (copy or torch.get_default_dtype()).itemsize
    decoded = keep == "auto" and dense.fits(nbytes, stored.planes[0].device)
    return choose(LayerSpec.of(stored, activation, dtype, decoded)), decoded


def check(x: Tensor | Activations, k: int) -> None:
    """Raise for activations that a layer of K = k inputs does not multiply."""
    if x.dtype not in FLOATS:
        raise InvalidType(
            f"x is {x.dtype}, and y would be, too; pass activations of float16, bfloat16, "
            "float32 or float64"
        )
    shape = x.shape if isinstance(x, Tensor) else x.codes.shape
    if shape[-1:] != (k,):
        raise InvalidInput(
            f"x has shape {tuple(shape)}, and the layer {k} inputs (K); x must be (..., K)"
        )


def constant(function: Any) -> Any:
    """`torch.compiler.assume_constant_result`, whose import of torch._dynamo takes 1.6 s."""
    function._dynamo_marked_constant = True
    return function


@constant  # torch 2.11 calls everything that it compiles an export
def travels() -> bool:
    """Whether what is traced may be saved, and run on another processor or with other contents."""
    traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return torch.compiler.is_exporting() or bool(traced)


def autocast(x: Tensor) -> Tensor:
    """x as torch's own linear layers take it inside torch.autocast."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x
    eligible = x.dtype in FLOATS and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if eligible else x


def check_keep(keep: str) -> None:
    """Raise InvalidInput for what is no `Keep`."""
    if keep not in get_args(Keep):
        raise InvalidInput(f"keep={keep!r}; choose one of {', '.join(get_args(Keep))}")
