"""AWQ checkpoints in the "gemm" layout, 4 bits, as AutoAWQ and GPTQModel write them.

    W[n, k] = scales[g, n] * (q[k, n] - zero[g, n]) with g = k / group

qweight int32 (K, N / 8) and qzeros int32 (K / group, N / 8) hold eight columns in a word, in the
order of ORDER.
"""

import torch

from anybit.checkpoint.foreign.base import ANY, FLOATS, Given, Layer, Part, option, uniform
from anybit.checkpoint.foreign.bitfields import fields
from anybit.errors import InvalidInput

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word is column ORDER[i] of its eight


def layers(given: Given) -> dict[str, Layer]:
    """The quantized layers of an AWQ checkpoint."""
    config = given.config
    key = "bits" if "bits" in config else "w_bit"
    option(config, key, (BITS,), "AWQ", required=True)
    for key in ("checkpoint_format", "format", "version"):
        option({key: str(config.get(key) or "gemm").lower()}, key, ("gemm",), "AWQ")
    option(config, "method", ("awq",), "AWQ")
    option(config, "pack_dtype", ("int32",), "AWQ")
    for name, tensor in given.stored.items():
        of, _, key = name.rpartition(".")
        if key == "scales" and f"{of}.qweight" not in given.stored and (tensor.read() != 1).any():
            raise InvalidInput(
                f"{name}: AWQ divides the outputs of an activation by it, which no layer of anybit "
                "does; quantize the unquantized model with --method smooth instead"
            )
    return {part.name: layer(part) for part in given.parts("qweight")}


def layer(part: Part) -> Layer:
    qweight = part.find("qweight", (torch.int32,), (ANY, ANY))
    scales = part.find("scales", FLOATS, (ANY, ANY))
    k, n, groups = qweight.shape[0], qweight.shape[1] * 8, scales.shape[0]
    if scales.shape != (groups, n) or not groups or k % groups:
        raise InvalidInput(
            f"{part.name}: qweight {qweight.shape} and scales {scales.shape} do not fit AWQ's gemm "
            "layout, (K, N / 8) and (K / group, N)"
        )
    qzeros = part.find("qzeros", (torch.int32,), (groups, n // 8))
    part.skip("g_idx")  # GPTQModel writes it, in order
    return uniform(
        part,
        (n, k),
        BITS,
        codes=lambda: fields(qweight.read(), BITS, ORDER).T.contiguous(),
        scale=lambda: scales.read().T.contiguous(),
        zero=lambda: fields(qzeros.read(), BITS, ORDER).T.contiguous(),
        groups=groups,
        dtypes={"scale": scales.torch_dtype},
    )
