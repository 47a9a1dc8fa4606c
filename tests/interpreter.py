"""Triton's interpreter without what it does anew for each launch and number, most of its time."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np


class Nothing:
    """What is to be undone after a launch."""

    def restore(self) -> None:
        pass


def hasten() -> None:
    """Let it replace Triton's language by its own once, and know types and shapes it has met.

    It looks through the language to replace it at each launch, undoes that behind it, and looks
    again at each call of a device function.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    if interpreter._patch_lang is not replaced:
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        interpreter._patch_lang = replaced
        interpreter._get_np_dtype = dtypes(interpreter._get_np_dtype)
        remember_types(tl)


def replaced(function: object) -> Nothing:
    return Nothing()


def dtypes(look_up: Any) -> Any:
    """NumPy's types of Triton's, by name; a block has its numbers' type."""
    found: dict[str, np.dtype] = {}

    def dtype_of(kind: Any) -> np.dtype:
        name = kind.scalar.name
        if name not in found:
            found[name] = look_up(kind.scalar)
        return found[name]

    return dtype_of


def remember_types(tl: Any) -> None:
    """Make and check each type of a block once, and each shape of a tensor."""
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    types: dict[Any, dict[str, Any]] = {}

    def of_type(self: Any, element_ty: Any, shape: Any) -> None:
        place = element_ty.name, *shape
        if place not in types:
            make_type(self, element_ty, shape)
            types[place] = dict(vars(self))
        vars(self).update(types[place], element_ty=element_ty)

    @cache
    def about(shape: tuple[int, ...]) -> dict[str, Any]:
        made = tl.tensor.__new__(tl.tensor)
        make_tensor(made, None, tl.block_type(tl.int8, shape) if shape else tl.int8)
        return vars(made)

    def of_tensor(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else ()
        vars(self).update(about(shape), handle=handle, type=type, dtype=type.scalar)

    tl.block_type.__init__, tl.tensor.__init__ = of_type, of_tensor
