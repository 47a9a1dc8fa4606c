"""What launches lack, compiled before it is needed: all at once, side by side.

Inside `collected`, a kernel that would have to be compiled is noted instead. One in CuTe DSL raises
`Uncompiled`, which layers take for "not launched"; one of Triton's is not launched, and the launch
returns. So everything that a step launches is found by one pass, whose results mean nothing. Where
the notes are strict, either kind raises `Missing`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from importlib import import_module

from anybit.errors import Unsupported
from anybit.kernels.processes import cores, side_by_side, standing_by, wait_with

ROUNDS = 3  # behind a kernel there may be another, such as one that multiplies a copy
SPARE = 4  # cores that load the model and start front ends


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
    with standing_by():
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
            answers = zip(names, side_by_side(calls), strict=True)
            errors += [f"{name}: {error}" for name, error in answers if error]
            launches = again
    return errors


def expect() -> None:
    """Start the processes of `build_for` early, for all cores but those that a start needs."""
    wait_with([partial(imported, not at) for at in range(max(cores() - SPARE, 1))])


def imported(tools: bool) -> None:
    """Import what compiles kernels. tools: also have Triton's own extension compiled, of C."""
    for name in ("anybit.kernels.hopper.backend", "anybit.kernels.triton.backend", "cutlass.cute"):
        with suppress(ImportError):
            import_module(name)
    if tools:
        with suppress(Exception):  # it may need neither, and another GPU's has none
            import_module("triton.backends.nvidia.driver").CudaUtils()
