"""Before any work: do blocks that run one at a time get what they get in the whole model?"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from anybit.errors import InvalidInput
from anybit.quantizers.calibration.block_runner import BlockRunner, Done, Visit, parted, to_each

TOKENS = 64
PLAIN = (bool, int, float, str, torch.dtype, type(None))


@dataclass
class Call:
    """One block's arguments and results in the run of the whole model."""

    index: int
    given: Any
    hidden: Tensor
    tail: tuple[Any, ...] | None


def rehearse(runner: BlockRunner, at_work: Callable[[int], AbstractContextManager[None]]) -> None:
    """Run the model on a short sample, whole and block by block; compare the blocks' arguments.

    That is another thing when layers lie between the blocks, when a block runs several times, or
    when blocks hand each other more than their results or have a layer in common: the runner is
    told to run the model whole, once for each block. What blocks pass on beside the hidden states
    is noted in it, too.

    Args:
        runner: At its start.
        at_work: Inside `at_work(index)` a block has its weights, on the runner's device.

    Raises:
        InvalidInput: The model does not run on what it is given, or not all of its blocks, or a
            block computes something else when it runs again.
    """
    kind, sample = type(runner.model).__name__, runner.batches[0]
    if runner.tokens:  # other inputs cannot be cut without knowing what they are
        sample = {"input_ids": sample["input_ids"][:1, :TOKENS]}
    calls: list[Call] = []
    results: list[Any] = []  # as they were returned, of the block before

    def watch(visit: Visit) -> Any:
        at, forward, args, kwargs = visit
        leaves = {id(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        if calls:
            carried = frozenset(i for i, x in enumerate(results) if id(x) in leaves)
            runner.carried[calls[-1].index] = carried
        given = to_each((args, kwargs), Tensor.clone)
        with at_work(at):
            args, kwargs = to_each((args, kwargs), lambda x: x.to(runner.device))
            out = to_each(forward(*args, **kwargs), lambda x: x.to(runner.home))
            args, kwargs = to_each(given, lambda x: x.to(runner.device, copy=True))
            again = to_each(forward(*args, **kwargs), lambda x: x.to(runner.home))
        hidden, tail = parted(out)
        if not same(parted(again)[0], hidden):
            raise InvalidInput(
                f"{kind} does not run block by block: block {at} computes something else when it "
                "runs again; quantize it without calibration data"
            )
        results[:] = tail or ()
        runner.tails[at] = None if tail is None else len(tail)
        calls.append(Call(at, given, hidden.clone(), to_each(tail, Tensor.clone)))
        return out

    runner.run_all(sample, watch)
    order = [call.index for call in calls]
    if {*order} != {*range(len(runner.blocks))}:
        raise InvalidInput(
            f"{kind} runs its {len(runner.blocks)} blocks in the order {order} on {runner.given}, "
            "not all of them; quantize it without calibration data"
        )
    related = having_layers_of(runner.blocks)
    apart = order == [*range(len(order))] and all(len(others) == 1 for others in related)
    runner.whole = [] if apart and runs_in_parts(runner, calls, sample) else related
    runner.forget()


def having_layers_of(blocks: list[nn.Module]) -> list[set[int]]:
    """For each block, itself and others that have a module with parameters in common with it."""
    owners: dict[nn.Module, set[int]] = {}
    for at, block in enumerate(blocks):
        for module in block.modules():
            if module._parameters:
                owners.setdefault(module, set()).add(at)
    return [{at}.union(*(own for own in owners.values() if at in own)) for at in range(len(blocks))]


def runs_in_parts(runner: BlockRunner, calls: list[Call], sample: Mapping[str, Tensor]) -> bool:
    """Whether each block gets the same, if it runs alone on the results of the one before it."""
    hidden, passed = None, ()
    for call in calls:
        given = runner.run_one(call.index, sample, hidden, passed, take, "sample")
        if not same(given, call.given):
            return False
        hidden, passed = call.hidden, call.tail or ()
    return True


def take(visit: Visit) -> Any:
    """In the place of a block: what it was called with."""
    raise Done((visit.args, visit.kwargs))


def same(a: Any, b: Any) -> bool:
    """Whether nested arguments hold the same tensors and plain values."""
    (first, form), (second, other) = tree_flatten(a), tree_flatten(b)
    return form == other and all(map(alike, first, second))


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        equal = a.dtype == b.dtype and a.shape == b.shape
        return equal and bool(((a == b) | ((a != a) & (b != b))).all())  # NaN, too
    return type(a) is type(b) and (not isinstance(a, PLAIN) or a == b)
