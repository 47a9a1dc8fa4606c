"""How many GPU kernels this process has compiled or loaded: no request should wait for one."""

import sys
from typing import Any

_count = 0


def count() -> int:
    """Kernels so far; Triton's from `watch` on."""
    return _count


def note(**_what: Any) -> None:
    """One more."""
    global _count
    _count += 1


def watch() -> None:
    """Count Triton's kernels as well, where it is in use."""
    if "triton" in sys.modules:
        sys.modules["triton"].knobs.compilation.listener = note
