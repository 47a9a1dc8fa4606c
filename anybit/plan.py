"""The cost model of a quantized matrix product (LiquidGEMM, section 3.2, equations 3 to 6).

Three rates of a device and three numbers of a kernel say what a product is bound by: weights must
be read, decoded on the CUDA cores, and multiplied on the tensor cores. `anybit plan --roofline`
prints it beside measured times.
"""

import math
from dataclasses import dataclass

from anybit.dispatch import parse_scheme


@dataclass(frozen=True)
class Device:
    """Rates by the datasheet.

    bandwidth: bytes/s from memory. alu: 32-bit instructions/s of the CUDA cores, one lane each.
    mma: operations/s of the tensor cores, by operand ("int8", "fp8", "fp16"); an FMA is two.
    """

    name: str
    bandwidth: float
    alu: float
    mma: dict[str, float]


DEVICES = {
    "a100": Device("A100 80 GB", 2.0e12, 19.5e12 / 2, {"int8": 624e12, "fp16": 312e12}),
    "h100": Device("H100 SXM", 3.35e12, 34e12, {"int8": 1979e12, "fp8": 1979e12, "fp16": 989e12}),
    "h200": Device("H200", 4.8e12, 34e12, {"int8": 1979e12, "fp8": 1979e12, "fp16": 989e12}),
}


@dataclass(frozen=True)
class Cost:
    """Seconds that each unit is busy with one product, and the product's own time."""

    load: float
    decode: float
    multiply: float
    seconds: float

    @property
    def bound(self) -> str:
        """ "memory", "decoding" or "matrix unit"."""
        names = {"memory": self.load, "decoding": self.decode, "matrix unit": self.multiply}
        return max(names, key=names.__getitem__)


def cost(
    device: Device,
    m: int,
    n: int,
    k: int,
    bits: float,
    operand: str,
    alpha: float = 0.0,
    tile: int = 256,
    overlap: bool = True,
) -> Cost:
    """Equation 6 for y (m, n) = x (m, k) w (n, k)^T.

    bits: stored bits of a weight. operand: what the matrix unit multiplies. alpha: instructions
    that decode one weight. tile: tokens of a tile; every tile of tokens reads and decodes the
    weights anew. overlap: decoding runs beside the products (the paper's pipeline); without it
    both take turns, as the equation has it.
    """
    if operand not in device.mma:
        raise ValueError(
            f"{device.name} has no matrix unit for {operand!r}; it has {', '.join(device.mma)}"
        )
    passes = math.ceil(m / tile)
    load = passes * n * k * bits / 8 / device.bandwidth
    decode = passes * alpha * n * k / device.alu
    multiply = passes * min(tile, m) * 2 * n * k / device.mma[operand]
    compute = max(decode, multiply) if overlap else decode + multiply
    return Cost(load, decode, multiply, max(load, compute))


def threshold(device: Device, bits: float, operand: str) -> float:
    """Tokens from which a product is bound by the matrix unit: T_LD = T_MMA (section 3.3)."""
    return bits / 8 / device.bandwidth * device.mma[operand] / 2


def largest_alpha(device: Device, bits: float) -> float:
    """Instructions a weight that decoding may take and still hide under loading (section 3.3)."""
    return device.alu * bits / 8 / device.bandwidth


def operand_of(scheme: str) -> str:
    """The matrix unit's operand: "int8", "fp8", or "fp16", which stands for bf16 too."""
    return parse_scheme(scheme)[1] or "fp16"


def instructions(scheme: str) -> float:
    """alpha: instructions that the Hopper kernels take to decode one weight.

    Counted on the decoder (`Decoder.instructions`), for fp16 where activations are not quantized.
    Raises ValueError for a scheme that these kernels do not decode.
    """
    from anybit.kernels.hopper.decode import decoder

    fmt, activation = parse_scheme(scheme)
    operands = {None: "float16", "int8": "int8", "fp8": "float8_e4m3fn"}
    d = decoder(fmt, operands[activation])
    if isinstance(d, str):
        raise ValueError(f"{scheme}: {d}")
    return d.instructions / 32
