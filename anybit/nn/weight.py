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


class DecodedWeight(Tensor):
    """A tensor (N, K) without memory, which an operation on it decodes.

    Models ask for dtype, device and shape in every forward, which costs nothing here. It is no
    parameter, and nothing can be written to it.
    """

    _decode: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        decode: Callable[[], Tensor],
    ) -> "DecodedWeight":
        weight: DecodedWeight = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device
        )
        weight._decode = decode
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
                raise Unsupported(READ_ONLY)

        def decoded(x: Any) -> Any:
            return x._decode() if isinstance(x, cls) else x

        return func(*tree_map(decoded, args), **tree_map(decoded, kwargs))
