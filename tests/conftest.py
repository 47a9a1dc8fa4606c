"""Triton kernels run on the GPU with ANYBIT_TEST_DEVICE=cuda, else in its interpreter.

Tests run in random order (pytest-randomly; `-p "randomly_seed=N"` repeats one), so each starts from
the same random numbers and must leave the process as it found it. The tests of a file share a
budget of CPU time.
"""

import logging
import os
from collections import Counter
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import needs

DEVICE = os.environ.get("ANYBIT_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the network
# Settings of the shell are not those of the tests; with the last three typer colors its help.
for name in ("ANYBIT_API_KEY", "ANYBIT_DEBUG", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):
    os.environ.pop(name, None)


def pytest_configure() -> None:
    """Fail at once where CI would skip what it is for."""
    needs.check_compilers()


# The longest file takes a third; those who try every kernel, a GPU, or vLLM have time.
LONG = needs.EVERY_KERNEL or DEVICE != "cpu" or find_spec("vllm") is not None
CPU_SECONDS = float("inf") if LONG else 90.0
spent: Counter[Path] = Counter()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Count CPU seconds, of this process and of those that it has waited for."""
    before = sum(os.times()[:4])
    try:
        return (yield)
    finally:
        spent[item.path] += sum(os.times()[:4]) - before


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail what begins after its file has used up the budget."""
    if spent[item.path] > CPU_SECONDS:
        pytest.fail(
            f"{item.path.name} took {spent[item.path]:.0f} s of CPU time, of {CPU_SECONDS:.0f}: "
            "let tests share what they make, or keep all pairs for `make test-emulated`",
            pytrace=False,
        )


@pytest.fixture(autouse=True)
def same_start_and_nothing_left() -> Iterator[None]:
    """Seed torch; fail a test that changes torch's defaults or the registry of formats.

    The level of our log, which commands set, is put back.
    """
    import torch

    from anybit.core.format import known_formats

    def state() -> tuple[torch.dtype, bool, set[str]]:
        return torch.get_default_dtype(), torch.is_grad_enabled(), set(dict(known_formats()))

    # Not `torch.manual_seed`: where CUDA has not started, that keeps a stack trace for each call.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    before, log = state(), logging.getLogger("anybit")
    level = log.level
    yield
    log.setLevel(level)
    assert state() == before, "the test changed state of the whole process"
