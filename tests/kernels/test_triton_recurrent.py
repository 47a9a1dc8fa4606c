"""Kernels of recurrences against their definition, and compiled for GPUs."""

import itertools
import os
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from anybit.kernels import between
from anybit.kernels.attention import Run
from anybit.kernels.between import TORCH
from anybit.kernels.kv.format import plain
from anybit.kernels.recurrences import Convolution, DeltaRule, Scan, StateSpace
from anybit.kernels.scans import Ragged, Ring, Singles, Texts
from anybit.kernels.state import Recurrence, Room
from anybit.kernels.triton import recurrent as kernel
from anybit.kernels.triton.between import FAMILY
from tests.kernels.compiling import Job, built
from tests.needs import pairs

DEVICE = torch.device(os.environ.get("ANYBIT_TEST_DEVICE", "cpu"))
ROWS = 7


def whole(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def made(kind: str, dtype: torch.dtype, random: torch.Generator) -> tuple[Scan, list[Tensor], int]:
    """A scan, its states, and how many numbers an input has."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    def convolution(channels: int, taps: int, bias: bool, act: object) -> Convolution:
        weight, more = normal(channels, taps).to(dtype), normal(channels).to(dtype)
        return Convolution(weight.to(DEVICE), more.to(DEVICE) if bias else None, act)  # type: ignore[arg-type]

    def window(conv: Convolution) -> Tensor:
        return normal(ROWS, *conv.window[0]).to(dtype).to(DEVICE)

    if kind == "convolution":
        conv = convolution(300, 3, True, None)
        return conv, [window(conv)], 300
    if kind == "space":
        groups, each, dim, states = 2, 2, 20, 12
        conv = convolution(groups * each * dim + 2 * groups * states, 4, True, F.silu)
        a, d, bias = (normal(groups, each).to(DEVICE) for _ in range(3))
        state = normal(ROWS, groups, each, dim, states).to(DEVICE)
        scan = StateSpace(conv, -a.exp(), d, bias, dim, states)
        return scan, [window(conv), state], len(conv.weight) + groups * each
    heads, v_heads, dim, v_dim = 1, 2, 12, 20
    conv = convolution(2 * heads * dim + v_heads * v_dim, 2, False, F.silu)
    a, bias = (normal(v_heads).to(DEVICE) for _ in range(2))
    state = normal(ROWS, v_heads, dim, v_dim).to(DEVICE)
    scan = DeltaRule(conv, -a.exp(), bias, heads, dim, v_dim)
    return scan, [window(conv), state], len(conv.weight) + 2 * v_heads


@pytest.mark.parametrize(
    ("kind", "dtype"),
    pairs(["convolution", "space", "delta"], [torch.float32, torch.float16]),
)
def test_kernels_are_the_recurrence(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single tokens, some in rings, and whole texts; for rows that begin anew or that are nobody's,
    to other rows or none."""
    monkeypatch.setattr(kernel, "STATE", 256)  # several programs for a head
    random = torch.Generator().manual_seed(3)
    scan, states, numbers = made(kind, dtype, random)
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}

    def normal(*shape: int) -> Tensor:
        wide = torch.randn(*shape, numbers + 3, generator=random).to(dtype).to(DEVICE)
        return wide[..., :numbers]  # rows lie apart

    def check(
        x: Tensor, texts: Texts, live: Any, given: tuple[Any, ...], by: tuple[Any, ...] = ()
    ) -> None:
        """Kernels do what the definition does, `by` other texts, in all rows but the first."""
        mine, want = [s.clone() for s in states], [s.clone() for s in states]
        got = FAMILY.recur(scan, mine, x, texts, *given)[live]
        expected = TORCH.recur(scan, want, *(by or (x, texts, *given)))[live]
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, **close)
        for one, other in zip(mine, want, strict=True):
            torch.testing.assert_close(one[1:], other[1:], **close)

    rows, seen = whole(3, 1, 0, 2), whole(9, 0, 1, 4)
    check(normal(4), Singles(4), [0, 1, 3], (rows, seen, rows))
    for to in (whole(3, 0, 0, 4), None):
        ring = Ring(rows, seen, seen + whole(2, 4, 0, 1), 4)
        check(normal(ROWS, 6).contiguous(), ring, ring.real.flatten(), (rows, seen, to))
    rows, seen, lengths = whole(5, 4, 2), whole(0, 3, 1), [3, 6, 1]
    cut = Texts.cut(lengths, {0: [2], 1: [1, 5]}, DEVICE)
    order = cut.order.tolist()
    wanted = torch.zeros(4, 4, dtype=torch.int32, device=DEVICE)
    wanted[:, 0], wanted[:, 1] = whole(2, 6, 0, 0), whole(1, 3, 5, 1)
    to = torch.cat([rows[order], whole(*({(0, 2): 6, (1, 1): 3, (1, 5): 1}[s] for s in cut.saved))])
    given = tuple(torch.cat([t, whole(0)]) for t in (rows, seen, rows))  # one row is nobody's
    texts = Ragged(whole(0, 3, 9, 10, 11), wanted)
    x = normal(12)
    check(x, texts, slice(10), given, (x[:10], cut, rows[order], seen[order], to))


def test_texts_whose_tokens_may_be_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses, right and wrong, between steps that read prompts and that the device alone knows."""
    monkeypatch.setattr(between, "chosen", {DEVICE: FAMILY})
    random = torch.Generator().manual_seed(6)
    scan, _, numbers = made("convolution", torch.float32, random)
    assert isinstance(scan, Convolution)
    room = Room(0, 1, 6, plain(torch.float32), DEVICE, back=4)
    late = Recurrence((scan.window,), ((numbers, torch.float32),)).empty(room)
    tokens = torch.randn(3, 9, numbers, generator=random).to(DEVICE)
    cut, none = Texts.cut([9, 9], {}, DEVICE), whole(0, 0)
    zeros = [torch.zeros(1, *scan.window[0], device=DEVICE)]
    want = TORCH.recur(scan, zeros, tokens[:2].flatten(0, 1), cut, none, none, None).view(2, 9, -1)

    def step(*given: tuple[int, int, int, int], wanted: Tensor | None = None) -> None:
        """Of each text: its row, its first position, how many tokens stay, and how many there are.

        Row 1 has the first text, 2 the second, and 5 the first one behind a prefix. wanted: as
        `Ragged` has it. Without, all are single; whose position is beyond is a wrong guess.
        """
        rows, first, stay = (whole(*(g[i] for g in given)) for i in range(3))
        own = [0 if row == 5 else row - 1 for row, *_ in given]
        x = torch.cat([
            tokens[2 if wanted is None and at > stays else text, at : at + n]
            for text, (_, at, stays, n) in zip(own, given, strict=True)
        ])  # fmt: skip
        texts: Texts = Singles(len(given))
        if wanted is not None:
            texts = Ragged(whole(0, *itertools.accumulate(g[3] for g in given)), wanted)
        run = Run(texts, rows, first, stay, slice(None), rows)
        got, at = late.advance(scan, x, SimpleNamespace(runs=[run])), 0  # type: ignore[arg-type]
        for text, (_, begin, stays, n) in zip(own, given, strict=True):
            if wanted is not None or begin == stays:
                torch.testing.assert_close(got[at : at + n], want[text, begin : begin + n])
            at += n

    step((1, 0, 0, 3), (2, 0, 0, 2), wanted=torch.stack([whole(2, 0), whole(4, 0), none, none]))
    step((1, 3, 3, 1), (1, 4, 3, 1), (1, 5, 3, 1), (2, 2, 2, 1))
    step((1, 4, 4, 1), (2, 3, 3, 1), (2, 4, 3, 1))
    step((1, 5, 5, 2), (2, 4, 4, 1), wanted=torch.stack([none] * 4))
    step((1, 7, 7, 1), (2, 5, 5, 1))
    late.copy(whole(4), whole(5))
    step((5, 2, 2, 1), (1, 8, 8, 1))


def test_small_time_steps_keep_their_digits() -> None:
    """exp(dt a) and dt x with dt near 1e-6, where 1 + exp(x) has lost most of it."""
    random = torch.Generator().manual_seed(5)
    scan, states, numbers = made("space", torch.float32, random)
    assert isinstance(scan, StateSpace)
    scan.dt_bias.fill_(-14.0)
    x = torch.zeros(1, numbers, device=DEVICE)
    x[:, : len(scan.conv.weight)] = torch.randn(1, len(scan.conv.weight), generator=random)
    mine, want = [torch.zeros_like(s) for s in states], [torch.zeros_like(s) for s in states]
    given = [torch.ones(1, dtype=torch.int32, device=DEVICE)] * 3
    FAMILY.recur(scan, mine, x, Singles(1), *given)
    TORCH.recur(scan, want, x, Singles(1), *given)
    torch.testing.assert_close(mine[1], want[1], rtol=1e-5, atol=0)


def test_what_has_no_kernel_is_the_definition() -> None:
    random = torch.Generator().manual_seed(4)
    scan, states, numbers = made("space", torch.float32, random)
    assert isinstance(scan, StateSpace)
    other = replace(scan, conv=replace(scan.conv, act=F.gelu))
    x = torch.randn(3, numbers, generator=random).to(DEVICE)
    three = torch.tensor([1, 2, 3], dtype=torch.int32, device=DEVICE)
    assert FAMILY.refuse_scan(other)
    assert FAMILY.refuse_scan(scan) is None
    two = [s.clone() for s in states], [s.clone() for s in states]
    got, want = (
        family.recur(other, own, x, Singles(3), three, three, three)
        for family, own in zip((FAMILY, TORCH), two, strict=True)
    )
    assert torch.equal(got, want)


def test_columns_move() -> None:
    x = torch.randn(5, 40).half().to(DEVICE)[:, 3:]
    order = torch.randperm(37, generator=torch.Generator().manual_seed(0)).int()[:31].to(DEVICE)
    assert torch.equal(FAMILY.columns(x, order), TORCH.columns(x, order))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("groups", "weights"), [(1, 1), (3, 3), (3, 1), (1, 0)])
def test_norms_with_gates(first: bool, groups: int, weights: int) -> None:
    random = torch.Generator().manual_seed(groups)
    x = torch.randn(4, groups * 20, generator=random).to(DEVICE)
    gate = torch.randn(4, groups * 20 + 8, generator=random).bfloat16().to(DEVICE)[:, 8:]
    weight = torch.randn(weights, 20, generator=random).bfloat16().to(DEVICE) if weights else None
    given = (x, gate, weight, groups, 1e-5, first)
    torch.testing.assert_close(FAMILY.gated_norm(*given), TORCH.gated_norm(*given))


def test_kernels_compile_without_a_gpu(compilers: Callable[..., Executor]) -> None:
    """With Qwen3-Next's and Mamba 2's sizes, and nothing spilled."""
    numbers = "L", "RING", "TEXTS", "C", "N", "X_STRIDE", "DT_STRIDE", "S_STRIDE", "GATE_STRIDE"
    halves = "weight", "bias", "window", "mixed", "dt", "strengths", "gate"
    kinds = dict.fromkeys(numbers, "i32") | dict.fromkeys(halves, "*bf16")
    kinds |= dict.fromkeys(("rows", "seen", "lengths", "starts", "places", "kept", "to"), "*i32")
    kinds |= dict.fromkeys(("a", "d", "dt_bias", "state"), "*fp32") | {"EPS": "fp32"}
    space = {"HEADS": 128, "GROUPS": 1, "DIM": 64, "STATES": 128, "TILE": 16, "WIDE": 128}
    delta = {"HEADS": 16, "V_HEADS": 32, "DIM": 128, "V_DIM": 128, "SCALE": 128**-0.5}
    norm = {"GROUPS": 32, "SHARED": True, "FIRST": False, "WIDE": 128}
    for name, x, out, constants in [
        ("_convolve", "*bf16", "*bf16", {"K": 4, "SILU": True, "WIDE": 256}),
        ("_space", "*bf16", "*fp32", space | {"lengths": None, "places": None}),
        ("_delta", "*bf16", "*fp32", delta | {"TILE": 16, "WIDE": 128}),
        ("_gated_norm", "*fp32", "*bf16", norm),
    ]:
        options = {"num_warps": 4, "launch_pdl": True}
        job = Job(f"recurrent.{name}", kinds | {"x": x, "out": out}, constants | {"PDL": True},
                  options=options)  # fmt: skip
        text = compilers().submit(built, job).result().text
        assert ".local" not in text
