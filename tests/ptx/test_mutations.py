"""Compiled kernels with one thing broken: the machine must say so, or give another result."""

import re
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import pytest
from torch import Tensor

from tests.ptx.kernels import Case, alone, gemm, lookups, psumbook
from tests.ptx.parse import PtxError

pytestmark = pytest.mark.skipif(
    find_spec("cutlass") is None, reason="CuTe DSL is not installed: pip install 'anybit[hopper]'"
)
Edit = Callable[[str], str]
SEEDS = 4


def change(pattern: str, new: str, which: int | slice = slice(None)) -> Edit:
    """Replace one match, or some, or all."""

    def edit(ptx: str) -> str:
        found = list(re.finditer(pattern, ptx))
        for match in reversed(found[which] if isinstance(which, slice) else [found[which]]):
            ptx = ptx[: match.start()] + match.expand(new) + ptx[match.end() :]
        return ptx

    return edit


def drop(pattern: str, which: int | slice = slice(None)) -> Edit:
    return change(pattern, "", which)


MEET = r"barrier\.cluster\.arrive;\s+barrier\.cluster\.wait;"
TRY_WAIT = r"(mbarrier\.try_wait\.parity\.shared\.b64) P1, (\[%r\d+\]), %r\d+, 10000000;"
MMA = r"(wgmma\.mma_async[^;]*\}, )(%rd\d+)(, p;)([^@]*?)(wgmma\.mma_async[^;]*\}, )(%rd\d+)(, p;)"
MUTATIONS: dict[str, tuple[Callable[[], Case], Edit]] = {
    # The ring of stages.
    "consumers do not wait for a stage": (gemm, change(TRY_WAIT, "mov.pred P1, -1;", -1)),
    "the producer does not wait for free stages": (
        gemm,
        change(TRY_WAIT, "mov.pred P1, -1;", slice(None, -1)),
    ),
    "consumers wait for the first phase forever": (gemm, change(TRY_WAIT, r"\1 P1, \2, 0;", -1)),
    "consumers do not free stages": (gemm, drop(r"@now mbarrier\.arrive[^;]*;", 0)),
    "the barrier expects fewer bytes": (gemm, change(r"(mov\.b32\s+%r\d+), 10752;", r"\1, 8704;")),
    "the barrier expects more bytes": (gemm, change(r"(mov\.b32\s+%r\d+), 10752;", r"\1, 10768;")),
    "weights come from 16 bytes further": (gemm, change(r"(\[%rd\d+)(\], 8704)", r"\1+16\2")),
    "mbarriers are not shown to copies": (gemm, drop(r"fence\.mbarrier_init[^;]*;")),
    "nobody waits for the mbarriers' initialization": (gemm, drop(r"bar\.sync\s+0;")),
    # WGMMAs.
    "registers of A are overwritten too early": (
        gemm,
        change(r"(wgmma\.wait_group\.sync\.aligned\s+)1;", r"\g<1>2;", 0),
    ),
    "a stage is freed before its WGMMAs have ended": (
        gemm,
        change(r"(wgmma\.wait_group\.sync\.aligned\s+)1;", r"\g<1>2;", 1),
    ),
    "sums are read before the last WGMMAs have ended": (
        gemm,
        change(r"(wgmma\.wait_group\.sync\.aligned\s+)0;", r"\g<1>1;"),
    ),
    "WGMMAs are not committed": (gemm, drop(r"wgmma\.commit_group[^;]*;", -1)),
    "registers of A have no fence": (gemm, drop(r"wgmma\.fence[^;]*;", 1)),
    "descriptors of two K steps are swapped": (gemm, change(MMA, r"\1\6\3\4\5\2\7", 0)),
    "the descriptor's stride is half": (
        gemm,
        change("4611686293305360384", str(4611686293305360384 - (32 << 32))),
    ),
    "the descriptor has another swizzle": (
        gemm,
        change("4611686293305360384", str(4611686293305360384 + (1 << 62))),
    ),
    # The epilogue.
    "a warpgroup does not wait for its table": (alone, drop(r"bar\.sync\s+%r\d+, 128;", 0)),
    "sums are sent while the ring is in use": (gemm, drop(MEET, slice(0, None, 2))),
    "sums of other CTAs are read at once": (gemm, drop(MEET, slice(1, None, 2))),
    "a warp reads its staged outputs at once": (gemm, drop(r"bar\.warp\.sync[^;]*;", 0)),
    # Launches that overlap.
    "activations are fetched early": (gemm, drop(r"griddepcontrol\.wait;", 0)),
    "scales are fetched early": (gemm, drop(r"griddepcontrol\.wait;", 1)),
    "a Psumbook is built early": (psumbook, drop(r"griddepcontrol\.wait;")),
    # Sums of warps and CTAs.
    "a lane arrives for a warp that is not done": (lookups, drop(r"bar\.warp\.sync[^;]*;", -1)),
    "a slot is filled while lanes read it": (lookups, drop(r"bar\.warp\.sync[^;]*;", 1)),
    "nobody expects the sums of CTAs": (
        lookups,
        drop(r"mbarrier\.arrive\.expect_tx\.shared\.b64 _, \[%r\d+\], %r\d+;\n", -1),
    ),
    "sums go to a CTA that may not run": (lookups, drop(r"barrier\.cluster\.wait;")),
}


@cache
def expected(make: Callable[[], Case]) -> Tensor:
    case = make()
    return case.run(case.ptx, 0)


@pytest.mark.parametrize("make", [alone, gemm, lookups, psumbook])
def test_kernels_pass_as_they_are(make: Callable[[], Case]) -> None:
    case = make()
    assert not expected(make).isnan().any()
    assert all(case.run(case.ptx, seed).equal(expected(make)) for seed in range(1, 3))


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutants_do_not_pass(name: str) -> None:
    make, edit = MUTATIONS[name]
    case, want = make(), expected(make)
    mutant = edit(case.ptx)
    assert mutant != case.ptx
    for seed in range(SEEDS):
        try:
            if not case.run(mutant, seed).equal(want):
                return
        except PtxError as error:
            print(f"seed {seed}: {error}")
            return
    pytest.fail(f"the machine does not see that {name}")
