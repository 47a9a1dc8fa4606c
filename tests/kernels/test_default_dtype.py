"""Weights and layouts are the same whatever torch's default dtype is.

vLLM sets it to the model's while it loads weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import anybit
from anybit.kernels import reference
from anybit.kernels.cute import decode, operands
from anybit.kernels.native import backend as native
from anybit.quantizers.additive import Additive
from anybit.quantizers.base import Quantizer
from anybit.quantizers.calibration.statistics import Statistics
from anybit.quantizers.clip import Clip
from anybit.quantizers.gptq import GPTQ
from tests.specs import SPECS

N, K = 16, 256


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def results(spec: str, w: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    """All that is made of a weight: its tensors, what they decode to, layouts and products."""
    native._refuse_format.cache_clear()
    native._zeros.cache_clear()
    packed = anybit.quantize_tensor(w, spec)
    out = [*packed.tensors().values(), anybit.dequantize(packed)]
    stored = packed.stored()
    if native._refuse_format(stored.format, K) is None:
        for activation in (None, "int8"):
            prepared = native.prepare(stored, activation, torch.bfloat16)
            out += [*prepared.layout, native.linear(x, prepared, None)]
    for operand in ("bfloat16", "float16", "int8", "float8_e4m3fn"):
        if not isinstance(decode.decoder(stored.format, operand), str):
            out += operands.layout(stored, operand)
    return [*out, reference.linear(x, reference.prepare(stored, None), None)]


@pytest.mark.parametrize("spec", SPECS)
def test_nothing_depends_on_it(spec: str) -> None:
    w, x = torch.randn(N, K) / 16, torch.randn(3, K).bfloat16()
    torch.manual_seed(1)
    wanted = results(spec, w, x)
    torch.manual_seed(1)
    with default_dtype(torch.bfloat16):
        got = results(spec, w, x)
    assert [t.dtype for t in got] == [t.dtype for t in wanted]
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    ("quantizer", "spec"),
    [
        (Clip(), "int3:group=32"),
        (GPTQ(), "int3:group=32"),
        (GPTQ(follow=True), "int3:group=32"),
        (Additive(rounds=1, steps=2), "codebook:m=1,v=4,b=4,group=32"),
    ],
    ids=["clip", "gptq", "gptaq", "additive"],
)
def test_quantizers_do_not_depend_on_it(quantizer: Quantizer, spec: str) -> None:
    w, x = torch.randn(32, 64), torch.randn(256, 64)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        with default_dtype(dtype):
            seen = Statistics()
            seen.add(x, quantizer.needs, 1, 1.1 * x)
            packed = quantizer.quantize(w, anybit.get_format(spec), seen)
        found.append([*packed.tensors().values()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
