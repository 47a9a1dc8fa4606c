"""What tests of several families of kernels share."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hopper kernels are chosen for an H200, and no choice for it outlives the test."""
    from anybit.kernels.hopper import scalar_linear
    from anybit.kernels.hopper.chip import H200

    scalar_linear.chosen.cache_clear()
    monkeypatch.setattr(scalar_linear, "chip_of", lambda device: H200)
    yield
    scalar_linear.chosen.cache_clear()
