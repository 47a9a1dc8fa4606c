"""The operators behind every quantized layer: traceable, compilable, capturable, differentiable."""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anybit.core.format import get_format
from anybit.core.packed import Packed, tensor_shapes
from anybit.core.planes import segments
from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidType, Unsupported
from anybit.kernels.ahead import Uncompiled
from anybit.kernels.backend import Activations, Backend, Pairs, Prepared
from anybit.kernels.between import of
from anybit.kernels.registry import get_backend

log = logging.getLogger(__name__)
_library = torch.library.Library("anybit", "DEF")
# layout is `Prepared.layout`, and what has defaults is a `Call`.
_library.define(
    "linear(Tensor x, Tensor[] layout, Tensor? bias, str scheme, int n, str backend, "
    "Tensor? scale=None, Tensor? sums=None, ScalarType? dtype=None, Tensor[]? stored=None, "
    "int[]? versions=None, Tensor? pairs=None) -> Tensor"
)
_library.define("rotate(Tensor x, Tensor vector, bool after) -> Tensor")
_library.define(
    "look_up(Tensor ids, Tensor[] stored, str spec, int n, int k, ScalarType dtype) -> Tensor"
)
_library.define("decode(Tensor[] stored, str spec, int n, int k, ScalarType dtype) -> Tensor")


class Call(NamedTuple):
    """What goes with x, beside a weight's layout; the operator's arguments that have defaults.

    Attributes:
        scale, sums, dtype: Of quantized activations, whose codes x are.
        stored: The canonical tensors, which the gradient of x is computed from.
        versions: Of these when the layout was made, for compiled code, which meets other contents
            later.
        pairs: `Pairs.count`, for backends that join.
    """

    scale: Tensor | None = None
    sums: Tensor | None = None
    dtype: torch.dtype | None = None
    stored: Sequence[Tensor] | None = None
    versions: Sequence[int] | None = None
    pairs: Tensor | None = None

    def written(self) -> bool:
        """Whether the canonical tensors have other contents than the layout."""
        if not self.stored or not self.versions:
            return False
        return [tensor._version for tensor in self.stored] != list(self.versions)


def multiply(
    x: Tensor,
    layout: Sequence[Tensor],
    bias: Tensor | None,
    scheme: str,
    n: int,
    backend: str,
    *given: Any,
) -> Tensor:
    """x (..., K) times a weight of n rows. given: a `Call`, or its first fields."""
    call = Call(*given)
    if backend != "reference" and call.stored and call.written():
        decoding(scheme)
        layout, backend = call.stored, "reference"
    fmt, activation = parse_scheme(scheme)
    prepared = Prepared(fmt, (n, x.shape[-1]), activation, tuple(layout))
    rows: Tensor | Activations = x
    if call.scale is not None:
        if call.sums is None or call.dtype is None:
            raise InvalidType("quantized activations need scale, sums and dtype")
        both = None if call.pairs is None else Pairs(call.pairs, len(x), len(x))
        rows = Activations(x, call.scale, call.sums, call.dtype, pairs=both)
    return product(get_backend(backend), rows, prepared, bias)


def product(
    kernels: Backend, x: Tensor | Activations, prepared: Prepared, bias: Tensor | None
) -> Tensor:
    """What the operator does: x (..., K) -> (..., N)."""
    codes = x.codes if isinstance(x, Activations) else x
    if codes.is_cuda and codes.device.index != torch.cuda.current_device():  # where kernels run
        with torch.cuda.device(codes.device):
            return product(kernels, x, prepared, bias)
    lead, k = codes.shape[:-1], codes.shape[-1]
    if len(lead) != 1:
        codes = codes.reshape(-1, k)
        if isinstance(x, Activations):
            x = x._replace(codes=codes, scale=x.scale.reshape(-1), sums=x.sums.reshape(-1))
        else:
            x = codes
    try:
        y = kernels.linear(x, prepared, bias)
    except Uncompiled:
        y = codes.new_zeros(len(codes), prepared.shape[0], dtype=x.dtype)
    return y if len(lead) == 1 else y.view(*lead, prepared.shape[0])


@cache
def decoding(scheme: str) -> None:
    log.warning(
        "weights in %s were written to after a model was compiled, and are decoded in each call; "
        "call prepare() on its quantized layers",
        scheme,
    )


def _linear_fake(
    x: Tensor,
    layout: Sequence[Tensor],
    bias: Tensor | None,
    scheme: str,
    n: int,
    backend: str,
    *given: Any,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], n), dtype=Call(*given).dtype or x.dtype)


def turn(x: Tensor, vector: Tensor, after: bool) -> Tensor:
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return turn(x, vector, after)
    return of(x).rotate(x, vector, after)


def _rotate_fake(x: Tensor, vector: Tensor, after: bool) -> Tensor:
    return x.new_empty(x.shape)


def _setup_rotate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, vector, ctx.after = inputs
    ctx.save_for_backward(vector)


def _backward_rotate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """H is symmetric, so the transposed of either kind is the other."""
    return rotate(grad, ctx.saved_tensors[0], not ctx.after), None, None


def _decode(stored: Sequence[Tensor], spec: str, n: int, k: int, dtype: torch.dtype) -> Tensor:
    fmt = get_format(spec)
    tensors = dict(zip(tensor_shapes(fmt, (n, k)), stored, strict=True))
    return Packed.from_tensors(fmt, (n, k), tensors).dequantize().to(dtype)


def _decode_fake(stored: Sequence[Tensor], spec: str, n: int, k: int, dtype: torch.dtype) -> Tensor:
    return stored[0].new_empty((n, k), dtype=dtype)


def rows(
    ids: Tensor, stored: Sequence[Tensor], spec: str, n: int, k: int, dtype: torch.dtype
) -> Tensor:
    """Rows (..., k) of a weight (n, k) by their numbers (...), decoded by the format's definition.

    Args:
        ids: int32 or int64.
        stored: All tensors of the weight, in the order of `Packed.tensors`.
        spec: The format's.
        n, k: The weight's shape.
        dtype: Of the result.
    """
    fmt = get_format(spec)
    planes = len(segments(fmt.bits))
    grid = dict(zip(fmt.stored_entries(), stored[planes:], strict=True))
    packed = Packed(fmt, (n, k), tuple(stored[:planes]), grid)
    return packed.at(ids.reshape(-1)).to(dtype).view(*ids.shape, k)


def _rows_fake(
    ids: Tensor, stored: Sequence[Tensor], spec: str, n: int, k: int, dtype: torch.dtype
) -> Tensor:
    return ids.new_empty((*ids.shape, k), dtype=dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, layout, bias, scheme, _, _, *given = inputs
    call = Call(*given)
    ctx.save_for_backward(*(call.stored or ()))
    ctx.scheme, ctx.k, ctx.parts = scheme, x.shape[-1], len(layout)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Straight through the rounding of activations: the gradient of x @ W^T + bias."""
    grad_x = grad_bias = None
    stored = ctx.saved_tensors  # read once: gradient checkpointing makes them anew
    if ctx.needs_input_grad[0]:
        if not stored:
            raise Unsupported(
                "a quantized layer whose canonical tensors were released has no gradient; load "
                "the model again, and do not release it"
            )
        spec, n = parse_scheme(ctx.scheme)[0].spec, grad.shape[-1]
        grad_x = grad @ decode(stored, spec, n, ctx.k, grad.dtype)
    if ctx.needs_input_grad[2]:
        grad_bias = grad.flatten(0, -2).sum(0).to(ctx.bias_dtype)
    # None for each argument that was passed; those of the last ones that were left out have none.
    others = (None if isinstance(n, bool) else [None] * len(n) for n in ctx.needs_input_grad[3:])
    return grad_x, [None] * ctx.parts, grad_bias, *others


_library.impl("linear", multiply, "CompositeExplicitAutograd")
_library.impl("rotate", turn, "CompositeExplicitAutograd")
_library.impl("decode", _decode, "CompositeExplicitAutograd")
_library.impl("look_up", rows, "CompositeExplicitAutograd")
torch.library.register_fake("anybit::linear", _linear_fake, lib=_library)
torch.library.register_fake("anybit::rotate", _rotate_fake, lib=_library)
torch.library.register_fake("anybit::decode", _decode_fake, lib=_library)
torch.library.register_fake("anybit::look_up", _rows_fake, lib=_library)
torch.library.register_autograd("anybit::linear", _backward, setup_context=_setup, lib=_library)
torch.library.register_autograd(
    "anybit::rotate", _backward_rotate, setup_context=_setup_rotate, lib=_library
)

rotate = torch.ops.anybit.rotate.default
linear = torch.ops.anybit.linear.default
decode = torch.ops.anybit.decode.default
look_up = torch.ops.anybit.look_up.default
FUNCTIONS: dict[Any, Callable[..., Tensor]] = {linear: multiply, rotate: turn, look_up: rows}


def run(operator: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
    """One of `FUNCTIONS`' operators on x; the function itself where nobody looks.

    torch's dispatcher takes 5 us of the host in inference mode, and 12 without gradients otherwise,
    which is as much as all the rest of a product.
    """
    call = operator if watched(x) else FUNCTIONS[operator]
    result: Tensor = call(x, *args, **options)
    return result


def watched(x: Tensor) -> bool:
    """Whether anything in torch may look at operators on x.

    A trace, a profile, a gradient, a mode, or a tensor of another kind. Layers do without operators
    in transforms of `torch.func` and forward gradients.
    """
    return (
        torch.compiler.is_compiling()
        or type(x) is not Tensor
        or torch.is_grad_enabled()
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._profiler_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
    )
