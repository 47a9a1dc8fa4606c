"""What launches lack, compiled before it is needed: all at once, side by side.

Inside `collected`, a kernel that would have to be compiled is noted instead. One in CuTe DSL raises
`Uncompiled`, which layers take for "not launched"; one of Triton's is not launched, and the launch
returns. So everything that a step launches is found by one pass, whose results mean nothing. Where
the notes are strict, either kind raises `Missing`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from anybit.errors import Unsupported
from anybit.kernels.processes import side_by_side

ROUNDS = 3  # behind a kernel there may be another, such as one that multiplies a copy


class Uncompiled(RuntimeError):
    """A kernel that is noted, and so neither compiled nor launched."""


class Missing(RuntimeError):
    """A kernel that would have to be compiled where none shall be."""


class Notes:
    """Kernels that are missing.

    strict: whether the first one is an error.

    Attributes:
        kernels: What compiles each, in any process, by its name.
        asked: How often one was missing.
    """

    def __init__(self, strict: bool = False):
        self.kernels: dict[str, Callable[[], object]] = {}
        self.strict, self.asked = strict, 0

    def missing(self, name: str, compiles: Callable[[], object]) -> RuntimeError:
        """Note a kernel; what to raise."""
        self.kernels[name] = compiles
        self.asked += 1
        return Missing(name) if self.strict else Uncompiled(f"{name} is compiled later")


_notes: ContextVar[Notes | None] = ContextVar("notes", default=None)


def notes() -> Notes | None:
    """Where this thread notes kernels, if it does."""
    return _notes.get()


@contextmanager
def collected(strict: bool = False) -> Iterator[Notes]:
    """Note kernels that are to be compiled instead of that, in this thread."""
    own = Notes(strict)
    token = _notes.set(own)
    try:
        yield own
    finally:
        _notes.reset(token)


def build_for(launches: Sequence[Callable[[], object]], least: int = 1) -> list[str]:
    """Compile what launches lack, side by side; what they say themselves is left to their next.

    Args:
        launches: Each is called, and lacks what `collected` keeps from it.
        least: Kernels for which other processes, which take seconds to start, are worth it.

    Returns:
        The errors, one line for each kernel that failed.
    """
    errors: list[str] = []
    for _ in range(ROUNDS):
        again = []
        with collected() as found:
            for launch in launches:
                before = found.asked
                with suppress(Uncompiled, Unsupported):
                    launch()
                if found.asked > before:
                    again.append(launch)
        if len(found.kernels) < least:
            break
        names, calls = [*found.kernels], [*found.kernels.values()]
        answers = side_by_side(calls)
        errors += [f"{name}: {error}" for name, error in zip(names, answers, strict=True) if error]
        launches = again
    return errors
