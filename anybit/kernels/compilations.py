"""How many GPU kernels this process has compiled or loaded: no request should wait for one."""

import sys
from collections.abc import Callable
from typing import Any

_count = 0
_told: list[Callable[[str], object]] = []


def count() -> int:
    """Kernels so far; Triton's from `watch` on."""
    return _count


def note(name: str, own: bool = True) -> None:
    """One more. own: whether it is anybit's, and not another package's."""
    global _count
    _count += 1
    for tell in _told if own else ():
        tell(name)


def watch(tell: Callable[[str], object] | None = None) -> None:
    """Count Triton's kernels as well, where it is in use.

    tell: called with the name of each of anybit's kernels from now on.
    """
    if tell is not None and tell not in _told:
        _told.append(tell)
    if "triton" in sys.modules:
        sys.modules["triton"].knobs.compilation.listener = _of_triton


def _of_triton(*, src: Any, **_what: Any) -> None:
    function = getattr(src, "fn", None)  # a file in Triton's language has none
    names, module = getattr(function, "arg_names", ()), getattr(function, "module", "")
    given = getattr(src, "constants", {}).items()
    sizes = (f"{names[at[0]]}={value}" for at, value in given if len(names) > at[0])
    note(f"{module}.{getattr(src, 'name', '')}({', '.join(sizes)})", module.startswith("anybit."))
