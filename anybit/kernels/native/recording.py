"""A step on a CPU as a list of calls, which is made again for the next token without the model.

What a CUDA graph is on a GPU: kernels are called with the same addresses each time, and what
changes (tokens, positions, pages) lies in memory that they read. Runs of kernels become one call;
torch's own operators between them are called again, and their results put where the first ones
lie.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anybit.kernels.between import Repeated
from anybit.kernels.native import build, fused
from anybit.kernels.native.program import Program

aten = torch.ops.aten
ALLOCATIONS = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
}
UNKNOWN = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Recording(Repeated):
    """Runs a step once, and replays it.

    refused: an operator whose result the host looks at. operators: what is done in operators of our
    own, which are seen from within.
    """

    def __init__(self, step: Callable[[], Tensor], operators: Mapping[Any, Callable[..., Tensor]]):
        self.step = step
        self.calls: list[Any] = []
        watch = _Watch(self.calls, operators)
        with build.recorded(self.calls), watch:
            self.out = step()
        self.kept = watch.kept
        self.refused = watch.refused
        if self.refused:  # the step runs itself
            self.calls, self.kept = [], []
        self.parts = list(self._parts())

    def _parts(self) -> Any:
        """Programs of kernels, and calls of operators between them."""
        run: list[tuple[build.Kernel, list[int]]] = []
        for call in self.calls:
            if isinstance(call, tuple):
                run.append(call)
            elif not isinstance(call, Tensor):
                if run:
                    yield Program(run, fused.level()).run
                    run = []
                yield call
        if run:
            yield Program(run, fused.level()).run

    def replay(self) -> None:
        if self.refused:
            super().replay()
        for part in self.parts:
            part()


class _Watch(TorchDispatchMode):
    """Sees every operator of torch's; writes down those that compute."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler for that

    def __init__(self, calls: list[Any], operators: Mapping[Any, Callable[..., Tensor]]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls, self.operators = calls, operators
        self.kept: list[Any] = []  # kernels know their memory by address alone
        self.refused: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.operators:
            with self:
                return self.operators[func](*args, **kwargs)
        if func is aten.copy_.default and _plain(*args[:2]):
            fused.convert(args[1], args[0])
            self.kept.append(args)
            return args[0]
        out = func(*args, **kwargs)
        self.kept.append((args, kwargs, out))
        if UNKNOWN & set(func.tags):
            self.refused = str(func)
        if func._schema.is_mutable:
            self.calls.append(partial(func, *args, **kwargs))
        elif func.overloadpacket not in ALLOCATIONS:
            given = {_memory(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
            if any(_memory(t) not in given for t in made):  # else it is a view
                self._repeat(func, args, kwargs, out, made)
        return out

    def _repeat(self, func: Any, args: Any, kwargs: Any, out: Any, made: list[Tensor]) -> None:
        """Write down an operator that makes tensors."""
        single = isinstance(out, Tensor)
        if func is aten.cat.default and _in_a_row(out, *args[0]):
            at = 0
            for part in args[0]:
                fused.convert(part, out.flatten()[at : at + part.numel()])
                at += part.numel()
        elif single and func.overloadpacket in (aten.to, aten._to_copy):
            if _plain(out, args[0]):
                fused.convert(args[0], out)
            else:
                self.calls.append(partial(out.copy_, args[0]))
        elif single and (into := into_memory(func)):
            self.calls.append(partial(into, *args, **kwargs, out=out))
        else:
            self.calls.append(partial(_again, partial(func, *args, **kwargs), made))


@cache
def into_memory(func: Any) -> Any:
    """The variant of an operator that writes to given memory; None where there is none."""
    packet, given = func.overloadpacket, [(a.name, str(a.type)) for a in func._schema.arguments]
    for name in packet.overloads():
        found = getattr(packet, name)
        *own, last = found._schema.arguments
        if last.name == "out" and [(a.name, str(a.type)) for a in own] == given:
            return found
    return None


def _again(call: Callable[[], Any], results: list[Tensor]) -> None:
    """Call an operator anew and put what it gives where its first results lie."""
    made = [t for t in tree_leaves(call()) if isinstance(t, Tensor)]
    for old, new in zip(results, made, strict=True):
        old.copy_(new)


def _memory(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _in_a_row(out: Tensor, *parts: Tensor) -> bool:
    """Whether the numbers of tensors lie one after the other in what they are joined to."""
    return all(
        t.dtype == out.dtype and t.dtype in fused.FLOATS and t.is_contiguous() and len(t) == 1
        for t in (out, *parts)
    )


def _plain(to: Tensor, source: Any) -> bool:
    """Whether a kernel copies numbers from one tensor to another."""
    return (
        isinstance(source, Tensor)
        and to.shape == source.shape
        and all(t.dtype in fused.FLOATS and t.is_contiguous() for t in (to, source))
    )
