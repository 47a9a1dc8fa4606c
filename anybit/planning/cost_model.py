"""The cost model of a quantized matrix product (LiquidGEMM, section 3.2, equations 3 to 6).

Three rates of a device and three numbers of a kernel say what a product is bound by: weights must
be read, decoded on the CUDA cores, and multiplied on the tensor cores. `anybit plan` goes by it
under a budget of time.
"""

import math
from dataclasses import dataclass

from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput
from anybit.planning.gpus import Device


@dataclass(frozen=True)
class Cost:
    """The predicted time of one product, in seconds.

    Attributes:
        load: Time in which the weights are read.
        decode: Time in which the CUDA cores decode them.
        multiply: Time in which the tensor cores multiply.
    """

    load: float
    decode: float
    multiply: float

    @property
    def seconds(self) -> float:
        """Time of the product when all three overlap, which is what the paper's pipeline is for."""
        return max(self.load, self.decode, self.multiply)


def cost(
    device: Device,
    m: int,
    n: int,
    k: int,
    bits: float,
    operand: str,
    alpha: float = 0.0,
    tile: int = 256,
) -> Cost:
    """The terms of equation 6 for y (m, n) = x (m, k) w (n, k)^T.

    Args:
        device: A GPU of `gpus.DEVICES`, or rates of another one.
        m: Tokens.
        n: Outputs.
        k: Inputs.
        bits: Stored bits of a weight.
        operand: What the tensor core multiplies: a key of `device.mma`.
        alpha: Instructions that decode one weight.
        tile: Tokens of a tile; each tile reads and decodes the weights again.

    Raises:
        InvalidInput: The device's tensor cores do not take the operand.
    """
    if operand not in device.mma:
        raise InvalidInput(
            f"{device.name} has no tensor core for {operand!r}; it has {', '.join(device.mma)}"
        )
    passes = math.ceil(m / tile)
    load = passes * n * k * bits / 8 / device.bandwidth
    decode = passes * alpha * n * k / device.alu
    multiply = passes * min(tile, m) * 2 * n * k / device.mma[operand]
    return Cost(load, decode, multiply)


def operand_of(scheme: str) -> str:
    """The tensor core's operand: "int8", "fp8", or "fp16", which stands for bf16 too."""
    return parse_scheme(scheme)[1] or "fp16"


def instructions(scheme: str) -> float:
    """alpha: instructions with which the Hopper kernels decode one weight.

    Counted on the decoder (`Decoder.instructions`), for fp16 where activations are not quantized.

    Raises:
        InvalidInput: These kernels do not decode the scheme.
    """
    from anybit.kernels.cute.decode import decoder

    fmt, activation = parse_scheme(scheme)
    operands = {None: "float16", "int8": "int8", "fp8": "float8_e4m3fn"}
    d = decoder(fmt, operands[activation])
    if isinstance(d, str):
        raise InvalidInput(f"{scheme}: {d}")
    return d.instructions / 32
