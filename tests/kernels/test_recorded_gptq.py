"""GPTQ's loop on a GPU, recorded as a CUDA graph: the codes of the plain loop, bit for bit."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import anybit
from anybit.core.format import Grid
from anybit.formats.integer import Integer
from anybit.quantizers import columns
from tests.conftest import DEVICE
from tests.specs import SCALAR

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="graphs are recorded on GPUs only")
N, K = 96, 512  # four blocks of columns


@dataclass(frozen=True)
class Waiting(Integer):
    """Looks at a result on the host, as a recording may not."""

    def encode(self, w: Tensor, grid: Grid) -> Tensor:
        assert torch.isfinite(w).all().item()
        return super().encode(w, grid)


@pytest.fixture(autouse=True)
def debug_mode() -> Iterator[None]:
    """Whatever a test leaves behind, the next one's waits for the device are no errors."""
    yield
    if DEVICE == "cuda":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("default")


def test_the_debug_mode_is_as_before() -> None:
    assert columns.waits_for_device(lambda: torch.ones(1, device="cuda").item())
    assert torch.cuda.get_sync_debug_mode() == 0
    assert not columns.waits_for_device(lambda: torch.ones(1, device="cuda") + 1)
    assert torch.cuda.get_sync_debug_mode() == 0


def factor() -> Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.eye(K) + torch.randn(K, K, generator=random).triu(1) * 0.05


@pytest.mark.parametrize("spec", [*SCALAR, "sparse", "codebook:m=2,v=8,b=5,group=64"])
def test_recorded_is_plain(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt = anybit.get_format(spec)
    w, u = torch.randn(N, K, generator=torch.Generator().manual_seed(1)).cuda(), factor().cuda()
    order = torch.randperm(K // fmt.width, generator=torch.Generator().manual_seed(2))
    places = (order[:, None] * fmt.width + torch.arange(fmt.width)).flatten()
    grid = fmt.fit(w)
    rows = w.T[places.cuda()]
    with columns.recordings():
        recorded = columns.propagate(rows.clone(), u, places.tolist(), fmt, grid)
        again = columns.propagate(rows.clone(), u, places.tolist(), fmt, grid)
        assert columns.recorded
    assert not columns.recorded
    monkeypatch.setattr(columns, "waits_for_device", lambda work: True)
    plain = columns.propagate(rows.clone(), u, places.tolist(), fmt, grid)
    columns.recorded.clear()
    assert torch.equal(recorded, plain)
    assert torch.equal(again, plain)


def test_a_format_that_waits_runs_unrecorded() -> None:
    w, fmt = torch.randn(N, K, generator=torch.Generator().manual_seed(1)).cuda(), Waiting()
    with columns.recordings():
        found = columns.propagate(w.T.clone(), factor().cuda(), [*range(K)], fmt, fmt.fit(w))
    plain = Integer()
    want = columns.propagate(w.T.clone(), factor().cuda(), [*range(K)], plain, plain.fit(w))
    columns.recorded.clear()
    assert torch.equal(found, want)
    torch.randn(3, device="cuda")  # no recording was begun and left


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_recorded_on_a_gpu_that_is_not_the_current_one() -> None:
    """Else nothing would be recorded, and each block would get the first one's codes."""
    w, fmt = torch.randn(N, K, generator=torch.Generator().manual_seed(1)), Integer()
    want = columns.propagate(w.T.clone(), factor(), [*range(K)], fmt, fmt.fit(w))
    with columns.recordings():
        there = w.to("cuda:1")
        grid = fmt.fit(there)
        found = columns.propagate(there.T.clone(), factor().to(there), [*range(K)], fmt, grid)
    assert (found.cpu() != want).float().mean() < 0.01  # sums in another order
