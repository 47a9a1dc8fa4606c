"""torchao checkpoints in safetensors: fp8, int8, fewer bits in bytes, int4, MX and NVFP4.

    W[n, k] = weight_scale[n, g] * (weight_qdata[n, k] - weight_zero_point[n, g])

A tensor of torchao is stored by its parts, `<layer>._weight_qdata` and so on. Which class it was is
said by their dtypes and shapes; swizzled scales cannot be read. Packed int4 is

    W[n, k] = scale[n, g] * (q[n, k] - 8) + zero[n, g]

Int4Tensor: qdata uint8 or int8 (N, K / 2) holds two numbers q - 8 in a byte, the first in the low
half; scales and zeros are (K / group, N). Int4TilePackedTo4dTensor, in the order of tinygemm
(PyTorch, `int4mm.cu`): qdata int32 (N / 8, K / (16 i), 32, i / 2); scales and zeros lie side by
side, (K / group, N, 2). Where the zeros are zeros, that is our int4.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from anybit.checkpoint.foreign.base import (
    ANY,
    FLOATS,
    TOKENS_STAY,
    Given,
    Layer,
    Part,
    symmetric,
    uniform,
)
from anybit.checkpoint.foreign.bitfields import fields
from anybit.checkpoint.foreign.floats import FP8, POWERS, checked, checked_numbers, float_layer
from anybit.errors import InvalidInput

BITS = 8
DATA, SCALE, ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
NUMBER = "_weight_per_tensor_scale"
TILED = "_weight_scale_and_zero"
PER_TOKEN = (  # settings, a part of them, our format, and what activations are
    ("Float8DynamicActivationFloat8WeightConfig", "PerRow", "fp8", "fp8"),
    ("Int8DynamicActivationInt8WeightConfig", "", "int8", "int8"),
)
OTHERS = ("FqnToConfig", "ASYMMETRIC", "PerTensor", "PerBlock")  # settings that are not as ours
SHIFTED = "its groups have a float added to them (tinygemm's zero points)"
NIBBLES = (0, 8, 16, 24, 1, 9, 17, 25)  # columns of a word's eight, beside 2 t of lane t


def layers(given: Given) -> dict[str, Layer]:
    """The quantized layers of a torchao checkpoint."""
    how = str(given.config.get("quant_type"))
    return {part.name: with_tokens(layer(part), how) for part in given.parts(DATA)}


def with_tokens(found: Layer, how: str) -> Layer:
    """The layer with what its activations are quantized to as we do it, per token.

    how: the tool's settings, of all layers or of some.
    """
    for name, text, spec, activation in PER_TOKEN:
        own = found.format is not None and found.format.spec == spec
        if own and name in how and text in how and not any(other in how for other in OTHERS):
            return replace(found, activation=activation)
    return replace(found, note=TOKENS_STAY if "DynamicActivation" in how else "")


def layer(part: Part) -> Layer:
    if part.has(TILED):
        return tiled(part)
    if part.has(ZERO) and part.stored[f"{part.name}.{ZERO}"].torch_dtype in FLOATS:
        return paired(part)
    data = part.find(DATA, (*FP8, torch.int8, torch.uint8), (ANY, ANY))
    scale = part.stored.get(f"{part.name}.{SCALE}")
    kind = scale.torch_dtype if scale else None
    nvfp4 = kind == torch.float8_e4m3fn and part.has(NUMBER)
    packed = data.torch_dtype == torch.uint8 and not (nvfp4 or kind in POWERS)
    if kind is None or packed or (kind == torch.float8_e4m3fn and not nvfp4):
        raise InvalidInput(
            f"torchao: {part.name} is {data.dtype} with scales of {scale and scale.dtype}; only "
            "fp8, int8, int4, IntxUnpackedToInt8Tensor, MXTensor, and NVFP4Tensor with a number "
            "for the tensor can be read"
        )
    if data.torch_dtype in FP8 or nvfp4 or kind in POWERS:
        part.used.clear()
        part.skip(f"_weight_act{NUMBER.removeprefix('_weight')}")
        return float_layer(part, DATA, SCALE, number=NUMBER if nvfp4 else None)
    n, k = data.shape
    found = part.find(SCALE, FLOATS)
    groups = found.shape[-1] if found.shape[:1] == (n,) and len(found.shape) == 2 else 1
    if found.shape not in ((n,), (n, groups)) or not groups or k % groups:
        raise InvalidInput(
            f"torchao: {part.name}: scales of {found.shape} do not fit bytes of {data.shape}"
        )
    checked(found, f"{part.name}.{SCALE}")
    stored = part.find(ZERO, (torch.int8,), (n, groups)) if part.has(ZERO) else None

    def signed(t: Tensor) -> Tensor:
        return (t.to(torch.int16) + 2 ** (BITS - 1)).to(torch.uint8)

    return uniform(
        part,
        (n, k),
        BITS,
        codes=lambda: signed(data.read()),
        scale=lambda: found.read().reshape(n, groups),
        zero=None
        if stored is None or symmetric(signed(stored.read()), BITS)
        else lambda: signed(stored.read()),
        groups=groups,
        dtypes={"scale": found.torch_dtype},
    )


def paired(part: Part) -> Layer:
    """Int4Tensor."""
    data = part.find(DATA, (torch.int8, torch.uint8), (ANY, ANY))
    scale = part.find(SCALE, FLOATS, (ANY, data.shape[0]))
    zero = part.find(ZERO, FLOATS, scale.shape)

    def codes() -> Tensor:
        q = data.read().view(torch.uint8)
        return torch.stack((q & 15, q >> 4), -1).flatten(1) ^ 8

    shape, own = (data.shape[0], 2 * data.shape[1]), (scale.shape[0], scale.torch_dtype)
    return shifted(part, shape, codes, lambda: scale.read().T, lambda: zero.read().T, *own)


def tiled(part: Part, cut: tuple[int, int] | None = None) -> Layer:
    """Int4TilePackedTo4dTensor.

    cut: (N, K) of the layer, where the tool has filled up rows to 8 and columns to 1,024.
    """
    part.used.clear()
    data = part.find(DATA, (torch.int32,), (ANY, ANY, 32, ANY))
    rows, columns, _, words = data.shape
    whole = 8 * rows, 32 * columns * words
    both = part.find(TILED, FLOATS, (ANY, whole[0], 2))
    groups, shape = both.shape[0], whole
    if cut and (-(-cut[0] // 8) * 8, -(-cut[1] // 1024) * 1024) == whole:
        of_layer, rest = divmod(cut[1] * groups, whole[1])
        if not rest:
            groups, shape = of_layer, cut
    n, k = shape

    def codes() -> Tensor:
        # Lane t = 4 row + pair has columns 2 pair + NIBBLES of each 32.
        q = fields(data.read().flatten(0, 2), 4).view(rows, columns, 8, 4, words, 8)
        out = torch.empty(rows, 8, columns, words, 32, dtype=torch.uint8)
        for i, first in enumerate(NIBBLES):
            out[..., first : first + 8 : 2][..., :4] = q[..., i].permute(0, 2, 1, 4, 3)
        return out.reshape(whole)[:n, :k].contiguous()

    def half(which: int) -> Tensor:
        return both.read()[:groups, :n, which].T

    dtype = both.torch_dtype
    layer = shifted(part, shape, codes, lambda: half(0), lambda: half(1), groups, dtype)
    return replace(layer, cut=lambda shape: tiled(part, shape))


def shifted(
    part: Part,
    shape: tuple[int, int],
    codes: Callable[[], Tensor],
    scale: Callable[[], Tensor],
    zero: Callable[[], Tensor],
    groups: int,
    dtype: torch.dtype,
) -> Layer:
    """int4 with a float that is added to each group: ours where that is 0.

    Args:
        part: The layer's tensors.
        shape: (N, K).
        codes: Reads codes (N, K) uint8.
        scale: Reads scales (N, groups).
        zero: Reads what is added (N, groups).
        groups: Of a row.
        dtype: Of the scales.
    """
    if not groups or shape[1] % groups:
        raise InvalidInput(f"torchao: {part.name}: {groups} groups do not divide K={shape[1]}")
    if part.has("_weight_act_pre_scale"):
        raise InvalidInput(f"torchao: {part.name} has _weight_act_pre_scale, which cannot be read")
    name = f"{part.name}.{SCALE}"
    checked_numbers(scale().contiguous(), name)
    added = zero().float()
    if not added.isfinite().all():
        raise InvalidInput(
            f"{name}: zeros are not finite; the checkpoint is damaged, copy it again"
        )
    if not added.any():
        own = {"scale": dtype}
        return uniform(part, shape, 4, codes, lambda: scale().contiguous(), None, groups, own)

    def decode() -> Tensor:
        q = (codes().float() - 8).view(shape[0], groups, -1)
        return (q * scale().float()[..., None] + zero().float()[..., None]).flatten(1)

    return Layer(shape, tuple(part.used), None, decode, SHIFTED)
