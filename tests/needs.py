"""What some tests cannot run without: elsewhere they are skipped, in CI nothing is."""

import os
from importlib.util import find_spec

import pytest

EVERY_KERNEL = "ANYBIT_TEST_EVERY_KERNEL" in os.environ  # emulate all, not a few of each kind
COMPILERS = {"triton": "gpu", "cutlass": "hopper"}  # module, and the extra that installs it


def check_compilers() -> None:
    """Refuse to run tests in CI (`CI=true`) where a compiler of kernels is missing.

    Raises:
        pytest.UsageError: One is.
    """
    if os.environ.get("CI") != "true":
        return
    for module, extra in COMPILERS.items():
        if find_spec(module) is None:
            raise pytest.UsageError(
                f"CI=true, and {module} is missing, without which tests would be skipped: "
                f"pip install 'anybit[{extra}]'"
            )
