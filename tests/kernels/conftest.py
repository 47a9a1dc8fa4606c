"""What tests of several families of kernels share."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hopper kernels are chosen for an H200, and no choice for it outlives the test."""
    from anybit.kernels.hopper import scalar_linear
    from anybit.kernels.hopper.chip import H200

    choices = scalar_linear.is_narrow, scalar_linear.few_kernel, scalar_linear.copied
    for choice in choices:
        choice.cache_clear()
    monkeypatch.setattr(scalar_linear, "chip_of", lambda device: H200)
    yield
    for choice in choices:
        choice.cache_clear()
