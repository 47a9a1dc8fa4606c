"""ggml's blocks against the `gguf` package, whose decoders are llama.cpp's own."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import Tensor

import anybit
from anybit.checkpoint.foreign.ggml import TYPES, Field, Mixed, Scale, Type, pack, unpack
from anybit.errors import InvalidInput

N, K = 12, 512


def blocks_of(name: str, n: int = N, k: int = K) -> Tensor:
    """Random blocks: every code and step, and scales that are numbers, some of them 0 or below."""
    kind, random = TYPES[name], np.random.default_rng(0)
    out, parts = np.empty((n, k // kind.columns, kind.nbytes), np.uint8), kind.parts
    at = 0
    for part in parts:
        shape = (*out.shape[:2], part.nbytes)
        some = random.integers(0, 256, shape, np.uint8)
        if isinstance(part, Scale) and part.dtype == torch.float16:
            scale = random.normal(0, 0.01, (*out.shape[:2], 1)).astype(np.float16)
            scale[0, 0] = 0
            some = scale.view(np.uint8)
        elif isinstance(part, Scale) and part.dtype == torch.float8_e8m0fnu:
            some = random.integers(100, 140, shape, np.uint8)
        elif isinstance(part, Field) and kind.most == 2:
            digits = random.integers(0, 3, (*shape, 4), np.uint8)
            some = (digits << np.array([0, 2, 4, 6], np.uint8)).sum(-1, dtype=np.uint8)
        elif part == Mixed("iq1_m", 8):  # the highest digits are those of an fp16 number
            some[..., 7] = some[..., 7] & 0x8F | 0x20
        out[..., at : at + part.nbytes] = some
        at += part.nbytes
    return torch.from_numpy(out.reshape(n, -1))


def decoded(name: str, blocks: Tensor) -> Tensor:
    return torch.from_numpy(quants.dequantize(blocks.numpy(), GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", TYPES)
def test_weights_are_those_of_the_gguf_package(name: str) -> None:
    kind, blocks = TYPES[name], blocks_of(name)
    assert GGML_QUANT_SIZES[GGMLQuantizationType[name]] == (kind.columns, kind.nbytes)
    packed = unpack(kind, blocks, name)
    wanted = decoded(name, blocks)
    assert wanted.any()
    bits = packed.dequantize().view(torch.int32) ^ wanted.view(torch.int32)
    zero = wanted == 0  # e2m1 has a zero below 0, which gguf's table of integers has not
    assert not bits[~zero].any()
    assert (packed.dequantize()[zero] == 0).all()
    if packed.format.width == 1:  # else there are more codes than weights
        assert packed.codes().max() == min(2**packed.format.bits - 1, kind.most + kind.plus)


@pytest.mark.parametrize("name", TYPES)
def test_blocks_come_back_byte_for_byte(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anybit.checkpoint.foreign.ggml.CHUNK", 5 * K)  # rows in parts
    blocks = blocks_of(name)
    packed = unpack(TYPES[name], blocks, name)
    assert torch.equal(pack(TYPES[name], packed, name), blocks)


@pytest.mark.parametrize("name", TYPES)
def test_what_is_quantized_here_is_written_exactly(name: str) -> None:
    kind = TYPES[name]
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(1)) * 0.02
    packed = anybit.quantize_tensor(w, kind.spec)
    if kind.plus:  # codes -2, which the type does not have
        low = packed.codes().clamp_min(1)
        packed = type(packed).from_codes(packed.format, packed.shape, low, packed.grid)
    assert torch.equal(decoded(name, pack(kind, packed, name)), packed.dequantize())


# Relative errors of normal weights, 2 to 4 % above those that were measured.
LIMITS = {"q2_k": 0.28, "q3_k": 0.15, "q4_k": 0.073, "q5_k": 0.037, "q6_k": 0.0185,
          "iq4_xs": 0.078, "q4_1": 0.072, "q5_1": 0.035, "iq1_s": 0.485, "iq1_m": 0.451,
          "iq2_xxs": 0.341, "iq2_xs": 0.298, "iq2_s": 0.249, "iq3_xxs": 0.189,
          "iq3_s": 0.139}  # fmt: skip


@pytest.mark.parametrize("spec", LIMITS)
def test_rounding_is_close(spec: str) -> None:
    w = torch.randn(32, 1024, generator=torch.Generator().manual_seed(1)) * 0.02
    error = (anybit.quantize_tensor(w, spec).dequantize() - w).norm() / w.norm()
    assert error < LIMITS[spec]


@pytest.mark.parametrize(("name", "number"), [("Q4_0", np.nan), ("Q6_K", np.inf)])
def test_scales_that_are_no_numbers_are_refused(name: str, number: float) -> None:
    kind, blocks = TYPES[name], blocks_of(name)
    at = 0 if name == "Q4_0" else kind.nbytes - 2
    blocks[3, at : at + 2] = torch.tensor([number], dtype=torch.float16).view(torch.uint8)
    with pytest.raises(InvalidInput, match="a scale is infinite or no number"):
        unpack(kind, blocks, name)


def test_codes_that_a_type_does_not_have_are_refused() -> None:
    blocks = blocks_of("TQ2_0")
    blocks[0, 0] = 255
    with pytest.raises(InvalidInput, match="code 3, above the largest, 2"):
        unpack(TYPES["TQ2_0"], blocks, "w")


def test_scales_that_fp16_does_not_hold_are_refused() -> None:
    w = torch.randn(2, 256) * 1e9
    for name in ("Q4_0", "Q4_K"):
        kind: Type = TYPES[name]
        with pytest.raises(InvalidInput, match="numbers that are none of"):
            pack(kind, anybit.quantize_tensor(w, kind.spec), "w")
