"""A server of a model that ends its answers (obedient.py), for `make test-conformance`."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.clients.conftest import ROOT, same_start_and_nothing_left, served

__all__ = ["same_start_and_nothing_left"]


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the server."""
    model = tmp_path_factory.mktemp("model")
    python = os.environ.get("ANYBIT_TEST_PYTHON", sys.executable)
    subprocess.run([python, "-m", "tests.conformance.obedient", str(model)], cwd=ROOT, check=True)
    with served(str(model)) as found:
        yield found
