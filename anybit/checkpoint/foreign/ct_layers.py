"""How a quantized layer of ours is written in compressed-tensors, where that says the same exactly.

Integers of 2 to 8 bits become "pack-quantized" (codes cross words, as its versions from 0.19 on
write and read them), small floats the layouts of `floats.py`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anybit.checkpoint.foreign.base import check_codes
from anybit.checkpoint.foreign.bitfields import pack
from anybit.checkpoint.foreign.compressed_tensors import BITS, ELEMENTS, FORMAT, TOOL
from anybit.checkpoint.foreign.floats import BLOCK
from anybit.core.format import Format
from anybit.core.packed import Packed, tensor_shapes
from anybit.core.scheme import scheme_name
from anybit.files.safetensors import Stored
from anybit.formats.integer import Integer
from anybit.formats.microscaling import NVFP4, Microscaling
from anybit.formats.minifloat import Minifloat

MX = {4: "mxfp4-pack-quantized", 6: "mxfp6-pack-quantized", 8: "mxfp8-quantized"}
PER_TOKEN = {
    "dynamic": True,
    "group_size": None,
    "num_bits": 8,
    "strategy": "token",
    "symmetric": True,
}


@dataclass(frozen=True)
class Written:
    """A layer in compressed-tensors.

    Attributes:
        format: Of our weight.
        shape: (N, K).
        name: Of the layout there.
        weights: What a config group says of its weights, as JSON, so that equal ones are one.
        activation: "fp8" or "int8" where activations are quantized, per token.
        tensors: Makes its tensors, by the ends of their names.
        sizes: Bytes of those tensors.
        number: NVFP4's of the weight; None in other layouts.
    """

    format: Format
    shape: tuple[int, int]
    name: str
    weights: str
    activation: str | None
    tensors: Callable[[Packed], dict[str, Tensor]]
    sizes: Mapping[str, int]
    number: float | None = None

    @property
    def group(self) -> dict[str, Any]:
        """What a config group says, but for its targets."""
        kinds = {"fp8": "float", "int8": "int"}
        own = PER_TOKEN | {"type": kinds[self.activation]} if self.activation else None
        return {
            "weights": json.loads(self.weights),
            "input_activations": own,
            "output_activations": None,
            "format": self.name,
        }


def written(
    fmt: Format,
    activation: str | None,
    shape: tuple[int, int],
    stored: Mapping[str, Stored],
    name: str,
    number: float | None = None,
) -> Written | str:
    """A layer in compressed-tensors, or why it cannot be.

    Args:
        fmt: Its format.
        activation: What its activations are quantized to.
        shape: (N, K).
        stored: Its tensors, by their names in `Packed.tensors`.
        name: Of the layer, for errors.
        number: NVFP4's that other weights have too; taken if the weights stay the same.
    """
    Packed.from_tensors(fmt, shape, {key: tensor.meta() for key, tensor in stored.items()}, name)
    if fmt.rotate:
        return f"{fmt.spec} is rotated, which anybit does not write in {TOOL}"
    rows = (fmt.group or shape[1]) == shape[1]
    plain_fp8 = type(fmt) is Minifloat and (fmt.exponent, fmt.mantissa) == (4, 3)
    integers = isinstance(fmt, Integer) and not fmt.zero
    known = {None, "fp8" if plain_fp8 and rows else None, "int8" if integers else None}
    if activation not in known:
        return (
            f"{scheme_name(fmt, activation)} quantizes activations, which engines that read {TOOL} "
            "do as we do for fp8@fp8, and @int8 of integers without `zero`"
        )
    if isinstance(fmt, Integer):
        return integer(fmt, activation, shape, stored, name)
    if isinstance(fmt, NVFP4):
        return nvfp4(fmt, shape, stored, number)
    if isinstance(fmt, Microscaling):
        if fmt.group != 32 or (fmt.exponent, fmt.mantissa) != ELEMENTS[fmt.bits]:
            return f"{fmt.spec} is not among the MX formats of {TOOL}: mxfp4, mxfp6 and mxfp8"
        return floats(fmt, shape, MX[fmt.bits], "group", fmt.group, torch.uint8)
    if isinstance(fmt, Minifloat) and plain_fp8:
        return fp8(fmt, activation, shape, stored["scale"])
    return f"{fmt.spec} is not among the formats that {TOOL} has"


def integer(
    fmt: Integer,
    activation: str | None,
    shape: tuple[int, int],
    stored: Mapping[str, Stored],
    name: str,
) -> Written | str:
    if fmt.bits not in BITS:
        return f"{fmt.spec} is not among the integers of 2 to 8 bits, which {TOOL} has"
    if fmt.order:
        return f"the columns of a group lie apart (act-order), which {TOOL} reads no more"
    n, k = shape
    scale = stored["scale"]
    strategy = "group" if fmt.group else "channel"
    weights = settings(fmt, "int", strategy, fmt.group or None, symmetric=not fmt.zero)
    if activation and fmt.bits == 8 and not fmt.group:  # W8A8, whose codes are not packed
        sizes = {"weight": n * k, "weight_scale": scale.nbytes}
        return Written(fmt, shape, "int-quantized", weights, activation, int8_tensors, sizes)
    sizes = {
        "weight_packed": n * -(-k * fmt.bits // 32) * 4,
        "weight_scale": scale.nbytes,
        "weight_shape": 16,
    }
    if fmt.zero:
        zero = stored["zero"]
        if zero.torch_dtype != torch.uint8:
            return f"its zero points are {zero.dtype}, {TOOL} has integers"
        check_codes(zero.read(), 2**fmt.bits - 1, f"{name}.zero")
        sizes["weight_zero_point"] = -(-n * fmt.bits // 32) * scale.shape[1] * 4

    def tensors(packed: Packed) -> dict[str, Tensor]:
        out = {
            "weight_packed": pack(packed.codes(), fmt.bits),
            "weight_scale": packed.grid["scale"],
            "weight_shape": torch.tensor(shape),
        }
        if fmt.zero:
            along_n = pack(packed.grid["zero"].T.contiguous(), fmt.bits)
            out["weight_zero_point"] = along_n.T.contiguous()
        return out

    return Written(fmt, shape, FORMAT, weights, activation, tensors, sizes)


def int8_tensors(packed: Packed) -> dict[str, Tensor]:
    codes = (packed.codes().to(torch.int16) - 128).to(torch.int8)
    return {"weight": codes, "weight_scale": packed.grid["scale"]}


def number_of(fmt: NVFP4, stored: Mapping[str, Stored]) -> float:
    """By which compressed-tensors divides the scales of a weight's first row, and we of all."""
    row = stored["row_scale"].read()[0]
    return float(row if fmt.divide else 1 / row)


def nvfp4(
    fmt: NVFP4, shape: tuple[int, int], stored: Mapping[str, Stored], shared: float | None
) -> Written | str:
    row, scale = stored["row_scale"].read(), stored["scale"].read()
    if fmt.group != 16:
        return f"{fmt.spec} has groups of {fmt.group} columns, {TOOL}'s NVFP4 has 16"
    if not (row == row[0]).all():
        return "its rows have different numbers, and NVFP4 has one for the whole weight"
    own = number_of(fmt, stored)
    each = scale.view(torch.uint8).unique().view(torch.float8_e4m3fn).float()
    wanted = fmt.scales({"scale": each, "row_scale": row[0]})

    def fits(number: float) -> bool:
        moved = (each * (number / own)).to(torch.float8_e4m3fn)
        return torch.equal(moved.float() / number, wanted)

    if not fits(own):
        return (
            f"{TOOL} divides scales by the weight's number, which gives other weights in their "
            f"last bits; quantize to {NVFP4(divide=True).spec} for it"
        )
    number = shared if shared is not None and fits(shared) else own
    out = floats(fmt, shape, "nvfp4-pack-quantized", "tensor_group", 16, torch.float8_e4m3fn)

    def tensors(packed: Packed) -> dict[str, Tensor]:
        moved = packed.grid["scale"].float() * (number / own)
        return out.tensors(packed) | {
            "weight_scale": moved.to(torch.float8_e4m3fn),
            "weight_global_scale": torch.tensor([number]),
        }

    sizes = {**out.sizes, "weight_global_scale": 4}
    return Written(fmt, shape, out.name, out.weights, None, tensors, sizes, number)


def fp8(fmt: Minifloat, activation: str | None, shape: tuple[int, int], scale: Stored) -> Written:
    """Scales of rows, of blocks if 128 rows and 128 columns share them, or of groups."""
    n, k = shape
    name = "float-quantized" if activation else "naive-quantized"
    every, block, strategy = 1, None, "channel" if fmt.group in (0, k) else "group"
    if fmt.group == BLOCK[1]:
        read = scale.read().float()
        first = read[:: BLOCK[0]].repeat_interleave(BLOCK[0], 0)[:n]
        if n > 1 and torch.equal(first, read):
            every, block, strategy = BLOCK[0], [*BLOCK], "block"
    group = fmt.group if strategy == "group" else None
    weights = settings(fmt, "float", strategy, group, block_structure=block)
    sizes = {"weight": n * k, "weight_scale": -(-n // every) * (scale.nbytes // n)}

    def tensors(packed: Packed) -> dict[str, Tensor]:
        codes = elements(packed).view(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": packed.grid["scale"][::every].contiguous()}

    return Written(fmt, shape, name, weights, activation, tensors, sizes)


def floats(
    fmt: Minifloat, shape: tuple[int, int], name: str, strategy: str, group: int, dtype: torch.dtype
) -> Written:
    """Elements and scales of 8 bits."""
    n, k = shape
    key = "weight" if fmt.bits == 8 else "weight_packed"
    weights = settings(fmt, "float", strategy, group, scale_dtype=str(dtype))
    sizes = {key: n * (k * fmt.bits // 8), "weight_scale": n * (k // group)}
    make = partial(float_tensors, key=key, dtype=dtype)
    return Written(fmt, shape, name, weights, None, make, sizes)


def float_tensors(packed: Packed, key: str, dtype: torch.dtype) -> dict[str, Tensor]:
    codes = elements(packed)
    if packed.format.bits == 8:
        codes = codes.view(torch.float8_e4m3fn)
    return {key: codes, "weight_scale": packed.grid["scale"].view(dtype)}


def elements(packed: Packed) -> Tensor:
    """Codes (N, K * bits / 8) uint8, one after the other, low bits first."""
    bits = packed.format.bits
    words = packed.planes[0] if bits in (4, 8) else pack(packed.codes(), bits)
    return words.contiguous().view(torch.uint8)[:, : packed.shape[1] * bits // 8].contiguous()


def settings(fmt: Format, kind: str, strategy: str, group: int | None, **more: Any) -> str:
    """What a config group says of weights, as JSON."""
    own = {
        "num_bits": fmt.bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "group_size": group,
        "dynamic": False,
    }
    return json.dumps(own | {key: value for key, value in more.items() if value is not None})


def keys_of(fmt: Format, shape: tuple[int, int]) -> list[str]:
    """Names of the tensors that our layer is stored in."""
    return [*tensor_shapes(fmt, shape)]
