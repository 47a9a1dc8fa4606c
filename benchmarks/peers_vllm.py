"""vLLM's Marlin and Machete. Only its library of operators is loaded, not its Python."""

import importlib.util
from pathlib import Path

import torch
from torch import Tensor

from anybit import quantize_tensor
from anybit.core.groups import ungroup
from anybit.kernels.reference import quantize_tokens
from anybit.measure.bench import Case, Layer, Refused

GROUP = 128
BRAIN = torch.bfloat16
# vLLM's numbers for codes of 4 bits of which 8 is zero, and for e2m1.
UINT4_LESS_8 = 4 << 8 | 8 << 17 | 1 << 50
E2M1 = 2 | 1 << 8 | 1 << 16 | 1 << 49
CTAS = 4  # of a multiprocessor at most, each with a lock: Marlin
# The order in which its threads read scales: of groups, and of a row or with 8-bit activations.
GROUPS = [i + 8 * j for i in range(8) for j in range(8)]
ROWS = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]


def vllm() -> list[Case]:
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise ImportError("vllm is not installed")
    folder = Path(next(iter(found.submodule_search_locations)))
    torch.ops.load_library(folder / "_C_stable_libtorch.abi3.so")
    four = f"int4:group={GROUP}"
    return [
        Case("marlin", four, "bf16", BRAIN, marlin_int4),
        Case("machete", four, "bf16", BRAIN, machete),
        Case("marlin", "mxfp4", "bf16", BRAIN, lambda w: marlin_fp4(w, "mxfp4")),
        Case("marlin", "mxfp4", "fp8-given", BRAIN, lambda w: marlin_fp4(w, "mxfp4", fp8=True)),
        Case("marlin", "nvfp4", "bf16", BRAIN, lambda w: marlin_fp4(w, "nvfp4")),
    ]


def int4(w: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (N, K) uint8 of which 8 is zero, scales (N, groups), and what they stand for."""
    n, k = w.shape
    if k % GROUP:
        raise Refused(f"K={k} is not a multiple of {GROUP}")
    rows = w.view(n, -1, GROUP)
    scale = (rows.abs().amax(-1, keepdim=True) / 7).to(dtype)
    q = (rows / scale.float()).round().clamp(-8, 7)
    return ungroup(q + 8).to(torch.uint8), scale[..., 0], ungroup(q * scale.float())


def gptq_words(codes: Tensor) -> Tensor:
    """Codes (N, K) -> (K / 8, N) int32: eight neighbours along K, the first in the lowest bits."""
    n, k = codes.shape
    eight = codes.T.reshape(k // 8, 8, n).int()
    words = eight[:, 0].clone(memory_format=torch.contiguous_format)
    for i in range(1, 8):
        words |= eight[:, i] << 4 * i
    return words


def machete(w: Tensor) -> Layer:
    if w.shape[0] % 128:
        raise Refused(f"N={w.shape[0]} is not a multiple of 128")
    operators = torch.ops._C
    codes, scale, decoded = int4(w, BRAIN)
    columns = gptq_words(codes).t().contiguous().t()
    words = operators.machete_prepack_B(columns, BRAIN, UINT4_LESS_8, BRAIN)
    scales = scale.T.contiguous()

    def run(weight: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
        return operators.machete_mm(
            x, weight[0], UINT4_LESS_8, None, weight[1], None, GROUP, None, None, None
        )

    return Layer((words, scales), run, words.nbytes + scales.nbytes, decoded)


def marlin_int4(w: Tensor) -> Layer:
    n, k = w.shape
    codes, scale, decoded = int4(w, BRAIN)
    scales = ordered(scale.T, ROWS if k == GROUP else GROUPS)
    zeros = torch.empty(0, dtype=torch.int32, device=w.device)
    return marlin(n, k, UINT4_LESS_8, gptq_words(codes), scales, decoded, zeros=zeros)


def marlin_fp4(w: Tensor, name: str, fp8: bool = False) -> Layer:
    """MXFP4 or NVFP4."""
    packed = quantize_tensor(w, name)
    # Four bytes of e2m1 numbers are a word of ours and of Marlin's source.
    words = packed.planes[0].T.contiguous()
    scales, unit = fp4_scales(packed.grid, fp8)
    return marlin(*w.shape, E2M1, words, scales, packed.dequantize(), unit=unit, fp8=fp8)


def marlin(
    n: int,
    k: int,
    kind: int,
    words: Tensor,
    scales: Tensor,
    decoded: Tensor,
    *,
    zeros: Tensor | None = None,
    unit: Tensor | None = None,
    fp8: bool = False,
) -> Layer:
    """words: (K / 8, N) int32. unit: a number for the whole weight."""
    if n % 64:
        raise Refused(f"N={n} is not a multiple of 64")
    operators = torch.ops._C
    words = operators.gptq_marlin_repack(words, k, n, 4, fp8)
    sms = torch.cuda.get_device_properties(words.device).multi_processor_count
    locks = torch.zeros(sms * CTAS, dtype=torch.int32, device=words.device)

    def run(weight: tuple[Tensor, ...], x: Tensor, scale: Tensor | None = None) -> Tensor:
        words, scales, locks = weight
        out = torch.empty(len(x), n, dtype=BRAIN, device=x.device) if fp8 else None
        return operators.marlin_gemm(
            x, out, words, None, scales, scale, unit, zeros, locks, kind, len(x), n, k,
            False, True, False,
        )  # fmt: skip

    layer = Layer((words, scales, locks), run, words.nbytes + scales.nbytes, decoded)
    if fp8:
        layer.inputs, layer.seen = quantized, values
    return layer


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_tokens(x, "fp8")


def values(x: Tensor) -> Tensor:
    codes, scale = quantized(x)
    return codes.float() * scale


def ordered(scale: Tensor, order: list[int]) -> Tensor:
    """Scales (groups, N) as Marlin's threads read them."""
    return scale.reshape(-1, len(order))[:, order].reshape(-1, scale.shape[1]).contiguous()


def fp4_scales(grid: dict[str, Tensor], fp8: bool) -> tuple[Tensor, Tensor | None]:
    """Scales of MXFP4 or NVFP4, and NVFP4's number for the weight."""
    scale = ordered(grid["scale"].to(BRAIN).T.contiguous(), ROWS if fp8 else GROUPS)
    if not fp8:
        scale = scale.view(-1, 4)[:, [0, 2, 1, 3]].reshape(scale.shape)
    if "row_scale" not in grid:
        powers = scale.to(torch.float8_e8m0fnu)
        return ((powers.view(torch.uint8) + 6).view(powers.dtype) if fp8 else powers), None
    half = scale.half()  # as 8 bits without a sign, in units that leave the largest below 448
    unit = (448 / half.float().max()).log2().floor().exp2()
    bits = ((half.float() * unit).half() * 2**7).view(torch.int16) << 1
    stored = bits.view(torch.float8_e4m3fn)[:, 1::2].contiguous()
    return stored, (grid["row_scale"][:1, 0] / unit * 2.0 ** (126 - 7)).float()
