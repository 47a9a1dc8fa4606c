"""What models see that look at the weight of a quantized layer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from anybit.errors import Unsupported

READ_ONLY = (
    "the weight of a quantized layer cannot be written to; dequantize_ the model, change it, and "
    "quantize it again"
)
aten = torch.ops.aten
FACTORS: dict[Any, Callable[[float], float]] = {  # of in-place operations with a number
    aten.mul_.Tensor: lambda x: x,
    aten.mul_.Scalar: lambda x: x,
    aten.div_.Tensor: lambda x: 1 / x,
    aten.div_.Scalar: lambda x: 1 / x,
}
READS = (
    Tensor.numpy,
    Tensor.tolist,
    Tensor.__array__,
    Tensor.__repr__,
)  # they look for memory by themselves


class DecodedWeight(Tensor):
    """A tensor without memory, which an operation on it decodes: a weight (N, K), or a view of one.

    Models ask for dtype, device and shape in every forward, which costs nothing here. It is no
    parameter, and nothing can be written to it; a whole weight can be multiplied by a number.
    """

    _decode: Callable[[], Tensor]
    _multiply: Callable[[float], None] | None

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        decode: Callable[[], Tensor],
        multiply: Callable[[float], None] | None = None,
        strides: Sequence[int] | None = None,
    ) -> "DecodedWeight":
        weight: DecodedWeight = Tensor._make_wrapper_subclass(
            cls, shape, strides, dtype=dtype, device=device
        )
        weight._decode, weight._multiply = decode, multiply
        weight._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers leaves it
        return weight

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        # Defined so that torch's fast paths, which read weights instead of calling layers, see a
        # tensor of another kind and call the layer.
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]  # would be lost
            raise Unsupported(READ_ONLY)
        if func in READS:
            args = (args[0]._decode(), *args[1:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for given, argument in zip(args, func._schema.arguments, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(given, cls):
                return given._write(func, args)

        def decoded(x: Any) -> Any:
            return x._decode() if isinstance(x, cls) else x

        def view(x: Tensor) -> Tensor:
            return cls(x.shape, x.dtype, x.device, lambda: x, strides=x.stride())

        out = func(*tree_map(decoded, args), **tree_map(decoded, kwargs))
        alias = func._schema.returns[0].alias_info if func._schema.returns else None
        if alias is None or alias.is_write:
            return out
        return tree_map(view, out)  # or a write to it would have no effect, without a word

    def _write(self, func: Any, args: Sequence[Any]) -> Tensor:
        """What an operation that writes to this tensor returns: it is multiplied by a number."""
        number = args[1] if len(args) == 2 else None
        if isinstance(number, Tensor) and number.ndim == 0:
            number = number.item()
        if func in FACTORS and self._multiply and isinstance(number, int | float) and number:
            self._multiply(FACTORS[func](number))
            return self
        raise Unsupported(READ_ONLY)
