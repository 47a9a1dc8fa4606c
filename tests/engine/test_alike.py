"""Layers that launch what others do are left out of what finds kernels, and no others."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from anybit.engine.alike import first_pairs, look, without_repeats
from anybit.engine.graphs import StepGraphs
from anybit.engine.llm import LLM
from tests.engine.conftest import ARCHITECTURES, random_model


@pytest.mark.parametrize(
    ("kinds", "kept"),
    [
        ("AAAAAA", [0, 1, 5]),
        ("A", [0]),
        ("ABABABC", [0, 1, 2, 5, 6]),
        ("AABBAAB", [0, 1, 2, 3, 4, 6]),
        ("ABCD", [0, 1, 2, 3]),
    ],
)
def test_each_pair_of_neighbours_is_kept(kinds: str, kept: list[int]) -> None:
    assert first_pairs(kinds) == kept
    pairs = {(kinds[i - 1] if i else "", kinds[i]) for i in range(len(kinds))}
    found = {(kinds[a], kinds[b]) for a, b in pairwise(kept)}
    assert pairs <= found | {("", kinds[0])}


class Holder:
    def __init__(self, value: Any):
        self.value = value

    def method(self) -> None:
        pass


def deep(value: Any) -> Any:
    return Holder(Holder(Holder(value)))


ONE, OTHER = Holder(1), Holder(2)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({1}, {2}),
        (frozenset("a"), frozenset("b")),
        (len, max),
        (deep, look),
        (ONE.method, OTHER.method),
        (partial(deep, 1), partial(deep, 2)),
        (deep(1), deep(2)),
        (deep(torch.ones(2)), deep(torch.ones(3))),
    ],
)
def test_what_differs_looks_different(a: Any, b: Any) -> None:
    module, other = torch.nn.Module(), torch.nn.Module()
    module.value, other.value = a, b
    assert look(module) != look(other)
    other.value = copy.copy(a)
    assert look(module) == look(other)
    assert hash(look(module)) == hash(look(other))


class Calls(TorchDispatchMode):
    """What torch is asked for: functions, shapes, dtypes and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), given: Any = None
    ) -> Any:
        self.seen.add((str(function), repr(tree_map(look, (args, given or {})))))
        return function(*args, **(given or {}))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_step_calls_the_same(name: str, checkpoint: Callable[[str], Path]) -> None:
    runner = LLM(checkpoint(name), dtype="bfloat16", length=64, max_running=2).engine.runner
    if runner.overlaps and runner.graphs is None:
        pytest.skip("on a GPU none of its steps is captured")
    few, states = without_repeats(runner.model, runner.states)
    prompts = () if runner.model.recurrent else (16,)
    graphs = StepGraphs(runner.model, runner.states, runner.block_size, 2, 8, prompts=prompts)
    whole, seen = (runner.model, runner.states), []
    for graphs.model, graphs.states in (whole, whole, (few, states)):  # the first finds no memory
        calls = Calls()
        with torch.inference_mode(), calls:
            for rows, size in graphs._todo():
                rows.fill(size, [])
                graphs._forward(rows, size)
        seen.append(calls.seen)
    assert seen[1] == seen[2]


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("llama", 3),
        ("qwen3_moe", 3),
        ("qwen2", 4),
        ("opt", 3),
        ("mamba2", 3),
        ("falcon_h1", 3),
        ("gemma3", 4),
    ],
)
def test_of_layers_that_are_alike_few_are_kept(name: str, kept: int, tmp_path: Path) -> None:
    kind, options = ARCHITECTURES[name]
    random_model(kind, options | {"num_hidden_layers": 6}).save_pretrained(tmp_path)
    runner = LLM(tmp_path, dtype="bfloat16", length=64, max_running=2).engine.runner
    few, _ = without_repeats(runner.model, runner.states)
    assert (len(few.layers), len(runner.model.layers)) == (kept, 6)
