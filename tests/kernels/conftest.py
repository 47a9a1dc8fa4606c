"""What tests of several families of kernels share."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack
from functools import cache

import pytest

from tests.kernels.compiling import process


@pytest.fixture(scope="session")
def compilers() -> Iterator[Callable[..., Executor]]:
    """Processes in which Triton compiles, for `cuda` and for `hip`; each begins when asked for."""
    with ExitStack() as stack:
        yield cache(lambda backend="cuda": stack.enter_context(process(backend == "hip")))


@pytest.fixture
def an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hopper kernels are chosen for an H200, and no choice for it outlives the test."""
    import torch

    from anybit.kernels.hopper import scalar_linear
    from anybit.kernels.hopper.chip import H200

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    scalar_linear.chosen.cache_clear()
    monkeypatch.setattr(scalar_linear, "chip_of", lambda device: H200)
    yield
    scalar_linear.chosen.cache_clear()
