"""Kernels around the products of experts against their definition, and compiled for GPUs."""

import os
from collections.abc import Callable
from concurrent.futures import Executor

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from anybit.kernels.backend import Activations
from anybit.kernels.between import TORCH, Routing
from anybit.kernels.triton import activation as activations
from anybit.kernels.triton import routing as kernel
from tests.kernels.compiling import Job, built

DEVICE = torch.device(os.environ.get("ANYBIT_TEST_DEVICE", "cpu"))
# Tokens, experts, choices of a token, of which some are no expert's.
CASES = [(1, 8, 2, False), (7, 128, 8, False), (30, 4, 2, True), (20, 16, 8, True)]


def routed(tokens: int, experts: int, top: int, absent: bool) -> tuple[Tensor, Routing]:
    """Choices, and where they go by the definition."""
    random = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, experts, generator=random).topk(top).indices
    if absent:
        chosen[::3, 0] = -1
        chosen[::5, 1] = experts + 3
    return chosen, TORCH.sort(chosen, experts)


def on(given: Routing) -> Routing:
    return Routing(*(t.to(DEVICE) for t in given))


@pytest.mark.parametrize("case", CASES)
def test_choices_are_sorted(
    case: tuple[int, int, int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "CHOICES", 64)  # several steps
    chosen, wanted = routed(*case)
    got = kernel.sort(chosen.to(DEVICE), case[1])
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one.cpu(), other)
    flat = chosen.flatten().tolist()
    there = [e if 0 <= e < case[1] else case[1] for e in flat]
    assert wanted.owners.tolist() == sorted(there)
    assert [there[i] for i in wanted.rows.flatten().argsort().tolist()] == sorted(there)
    assert wanted.starts.tolist() == [sum(e < i for e in there) for i in range(case[1] + 1)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("activation", [None, "int8"])
def test_tokens_are_spread(case: tuple[int, int, int, bool], activation: str | None) -> None:
    _, where = routed(*case)
    x = torch.randn(case[0], 90).half()[:, :72]  # rows lie apart
    wanted = TORCH.spread(x, where)
    assert isinstance(wanted, Tensor)
    used = int(where.starts[-1])
    got = kernel.spread(x.to(DEVICE), on(where), activation)
    if activation is None:
        assert isinstance(got, Tensor)
        assert torch.equal(got.cpu()[:used], wanted[:used])
        return
    assert isinstance(got, Activations)
    by_definition = TORCH.spread(x, where, activation)
    assert isinstance(by_definition, Activations)
    if DEVICE.type == "cpu":  # a GPU's division rounds in its own way
        for one, other in zip(got[:3], by_definition[:3], strict=True):
            assert torch.equal(one[:used], other[:used])
    codes, scale = (t.cpu() for t in activations.quantize(wanted.to(DEVICE), activation)[:2])
    assert torch.equal(got.codes.cpu()[:used], codes[:used])
    assert torch.equal(got.scale.cpu()[:used], scale[:used])
    assert torch.equal(got.sums.cpu()[:used], codes[:used].sum(1, dtype=torch.int32))
    assert got.dtype == torch.float16


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("biased", [False, True])
def test_outputs_are_combined(case: tuple[int, int, int, bool], biased: bool) -> None:
    """Rows that are no expert's hold anything, here NaN."""
    tokens, experts, top, _ = case
    _, where = routed(*case)
    y = torch.randn(tokens * top, 40).half()
    y[int(where.starts[-1]) :] = torch.nan
    weight = torch.rand(tokens, top)
    bias = torch.randn(experts, 40).half() if biased else None
    wanted = TORCH.combine(y, where, weight, bias)
    assert not wanted.isnan().any()
    got = kernel.combine(
        y.to(DEVICE), on(where), weight.to(DEVICE), None if bias is None else bias.to(DEVICE)
    )
    torch.testing.assert_close(got.cpu(), wanted, rtol=2**-9, atol=2**-10)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("experts", "top"), [(8, 2), (32, 4), (100, 7)])
def test_experts_are_chosen(experts: int, top: int, normalize: bool) -> None:
    logits = torch.randn(9, experts + 2, generator=torch.Generator().manual_seed(top)).half()
    logits = logits[:, :experts]
    logits[0, 3] = logits[0, 5] = 9  # the first of equal ones is first
    weight, chosen = TORCH.choose(logits, top, normalize)
    got, at = kernel.choose(logits.to(DEVICE), top, normalize)
    torch.testing.assert_close(got.cpu(), weight, rtol=1e-5, atol=1e-6)
    assert torch.equal(logits.gather(1, at.cpu().long()), logits.gather(1, chosen))
    assert at[0, :2].tolist() == [3, 5]


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, under the interpreter
def test_logits_that_are_no_numbers_choose_experts_that_exist() -> None:
    logits = torch.full((2, 6), torch.nan, device=DEVICE)
    _, at = kernel.choose(logits, 4, True)
    assert at.min() >= 0
    assert at.max() < 6


def test_gates_are_clamped() -> None:
    """As `Family.clamped` defines it, rounded once."""
    y, bias = torch.randn(5, 48).half() * 6, torch.randn(3, 48).half()
    owners = torch.tensor([0, 0, 2, 3, 3], dtype=torch.int32)  # the last are no expert's
    x = (y.float() + bias.float()[owners.clamp(max=2).long()])[:3]
    gate, up = x[:, ::2].clamp(max=7.0), x[:, 1::2].clamp(-7.0, 7.0)
    wanted = (up + 1) * (gate * (gate * 1.702).sigmoid())
    got = kernel.clamped(y.to(DEVICE), owners.to(DEVICE), bias.to(DEVICE), 1.702, 7.0)
    torch.testing.assert_close(got[:3].float().cpu(), wanted, rtol=2**-9, atol=2**-9)


def test_nothing_to_do() -> None:
    where = on(TORCH.sort(torch.zeros(0, 2, dtype=torch.int64), 4))
    assert where.starts.tolist() == [0] * 5
    x = torch.zeros(0, 16, device=DEVICE)
    assert kernel.spread(x, where, "int8")[0].shape == (0, 16)
    weight = torch.zeros(0, 2, device=DEVICE)
    assert kernel.combine(x, where, weight).shape == (0, 16)
    assert kernel.choose(x, 2, True)[1].shape == (0, 2)
    assert torch.equal(kernel.sort(where.rows, 4)[0], where.starts)


def test_kernels_compile_without_a_gpu(compilers: Callable[..., Executor]) -> None:
    kinds = dict.fromkeys(("EXPERTS", "STRIDE", "COUNT", "K", "X_STRIDE", "N"), "i32")
    kinds |= dict.fromkeys(("logits", "x", "y", "bias", "out"), "*bf16")
    kinds |= dict.fromkeys(("chosen", "starts", "rows", "owners", "sums"), "*i32")
    kinds |= {"weight": "*fp32", "scales": "*fp32", "ALPHA": "fp32", "LIMIT": "fp32"}
    quantized = {"TOP": 8, "PARTS": 1, "LARGEST": 127, "HAS_SUMS": True, "WIDE": 4096}
    for name, out, constants, warps in [
        ("_choose", "*bf16", {"TOP": 8, "NORMALIZE": True, "WIDE": 128, "PLACES": 8}, 1),
        ("_sort", "*bf16", {"TILE": 2048}, 4),
        ("_spread", "*bf16", quantized | {"PARTS": 8, "LARGEST": 0, "HAS_SUMS": False}, 4),
        ("_spread", "*i8", quantized, 16),
        ("_combine", "*bf16", {"TOP": 8, "WIDE": 1024}, 4),
        ("_combine", "*bf16", {"TOP": 8, "WIDE": 1024, "bias": None}, 4),
        ("_clamped", "*bf16", {"WIDE": 1024}, 4),
    ]:
        options = {"num_warps": warps, "launch_pdl": True}
        constants["PDL"] = True
        job = Job(f"routing.{name}", kinds | {"out": out}, constants, options=options)
        made = compilers().submit(built, job).result()
        assert made.shared < 99 << 10
        assert "atom" not in made.text
