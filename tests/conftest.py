"""Triton kernels run on the GPU with ANYBIT_TEST_DEVICE=cuda, else in its interpreter.

Tests run in random order (pytest-randomly; `-p "randomly_seed=N"` repeats one), so each starts from
the same random numbers and must leave the process as it found it.
"""

import gc
import logging
import os
import sys
from collections.abc import Iterator

import pytest

from tests import interpreter, needs
from tests.report import Report

DEVICE = os.environ.get("ANYBIT_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the network
# Settings of the shell are not those of the tests; with the last three typer colors its help.
for name in ("ANYBIT_API_KEY", "ANYBIT_DEBUG", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):
    os.environ.pop(name, None)


def pytest_configure(config: pytest.Config) -> None:
    """Fail at once where CI would skip what it is for."""
    needs.check_compilers()
    gc.disable()  # what is imported and found until all tests are collected stays
    if hasattr(config, "workerinput"):  # one of many processes, which share the cores
        from anybit.kernels import processes

        processes.MOST = 4
    config.pluginmanager.register(Report(config))


def pytest_collection_finish() -> None:
    if DEVICE == "cpu" and "triton.runtime.interpreter" in sys.modules:
        interpreter.hasten()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # tests make much that lasts for a moment
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others = [item for item in items if not needs.in_part(item.nodeid)]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if needs.in_part(item.nodeid)]


@pytest.fixture(autouse=True)
def same_start_and_nothing_left() -> Iterator[None]:
    """Seed torch; fail a test that changes torch's defaults or the registry of formats.

    Our log is as it begins: commands, and fixtures of whole modules, set its level.
    """
    import torch

    from anybit.core.format import known_formats

    def state() -> tuple[torch.dtype, bool, set[str]]:
        return torch.get_default_dtype(), torch.is_grad_enabled(), set(dict(known_formats()))

    # Not `torch.manual_seed`: where CUDA has not started, that keeps a stack trace for each call.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    logging.getLogger("anybit").setLevel(logging.NOTSET)
    before = state()
    yield
    assert state() == before, "the test changed state of the whole process"
