"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them: 2, 3, 4 and 8 bits, formats v1 and v2.

    W[n, k] = scales[g, n] * (q[k, n] - zero[g, n]) with g = g_idx[k]

qweight int32 (K * bits / 32, N) and qzeros int32 (K / group, N * bits / 32) are streams of codes,
low bits first, along K and along N. v1 stores zero - 1. With act-order (desc_act) the columns of a
group are not neighbours; they become so in our order of columns, see `Format.order`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from anybit.checkpoint.foreign.base import (
    ANY,
    FLOATS,
    Given,
    Layer,
    Part,
    option,
    symmetric,
    uniform,
)
from anybit.checkpoint.foreign.bitfields import unpack
from anybit.errors import InvalidInput
from anybit.files.safetensors import Stored

BITS = (2, 3, 4, 8)


def layers(given: Given) -> dict[str, Layer]:
    """The quantized layers of a GPTQ checkpoint."""
    config = given.config
    key = "checkpoint_format" if config.get("checkpoint_format") else "format"
    act_order = option(config, "desc_act", (False, True), "GPTQ")
    layout = option(config, key, ("gptq", "gptq_v2"), "GPTQ")
    option(config, "format", ("gptq", "gptq_v2"), "GPTQ")
    option(config, "method", ("gptq",), "GPTQ")
    option(config, "pack_dtype", ("int32",), "GPTQ")
    option(config, "is_marlin_format", (False,), "GPTQ")
    bits = option(config, "bits", BITS, "GPTQ", required=True)
    varied = bool(config.get("dynamic"))  # GPTQModel's overrides for layers
    first = layout == "gptq"
    other = ""
    if config.get("sym") is True and not varied:
        other = f"{key}: {'gptq_v2' if first else 'gptq'}"
    return {p.name: layer(p, bits, varied, first, act_order, other) for p in given.parts("qweight")}


def layer(
    part: Part,
    bits: int,
    varied: bool,
    first_version: bool,
    act_order: bool,
    other: str = "",
) -> Layer:
    """One layer.

    Args:
        part: Its tensors.
        bits: Of its codes.
        varied: Its own shapes tell its bits, not the config.
        first_version: Zero points are stored less 1.
        act_order: Columns are sorted.
        other: What config.json says of files whose zero points are stored the other way, where it
            also says that they are the middle of the codes; "": it does not.

    Raises:
        InvalidInput: Tensors do not fit each other, or zero points what the config says of them.
    """
    qweight = part.find("qweight", (torch.int32,), (ANY, ANY))
    scales = part.find("scales", FLOATS, (ANY, ANY))
    groups, n = scales.shape[0], qweight.shape[1]
    g_idx = groups_of_columns(part, groups if act_order else 0)
    if varied and g_idx is not None and len(g_idx.shape) == 1:
        bits = qweight.shape[0] * 32 // g_idx.shape[0]
    k = qweight.shape[0] * 32 // (bits or 1)
    fit = k * bits == qweight.shape[0] * 32 and (g_idx is None or g_idx.shape == (k,))
    if bits not in BITS or not groups or k % groups or not fit:
        raise InvalidInput(
            f"{part.name}: qweight {qweight.shape}, scales {scales.shape} and g_idx "
            f"{g_idx and g_idx.shape} do not fit each other in {bits} bits"
        )
    scales = part.find("scales", FLOATS, (groups, n))
    qzeros = part.find("qzeros", (torch.int32,), (groups, -(-n * bits // 32)))

    def zero() -> Tensor:
        return zero_points(qzeros.read(), bits, n, first_version)

    zeros = zero()
    middle = symmetric(zeros, bits)
    if other:
        check_version(part.name, zeros, bits, first_version, other)
    found = uniform(
        part,
        (n, k),
        bits,
        codes=lambda: unpack(qweight.read().T.contiguous(), bits, k),
        scale=lambda: scales.read().T.contiguous(),
        zero=None if middle else zero,
        groups=groups,
        dtypes={"scale": scales.torch_dtype},
        order=None if g_idx is None else column_order(g_idx.read(), groups, part.name),
    )
    unlike = "config.json says sym: true, but its zero points are not the middle; they are kept"
    return replace(found, note=unlike) if other and not middle else found


def groups_of_columns(part: Part, needed: int) -> Stored | None:
    """The group of each column, where it is stored.

    Raises:
        InvalidInput: It is not, and columns are sorted by `needed` groups.
    """
    found = part.find("g_idx", (torch.int32, torch.int64)) if part.has("g_idx") else None
    if found is not None and found.shape != (0,):  # written for none by some tools
        return found
    if needed > 1:
        raise InvalidInput(
            f"{part.name}: desc_act is set, but without g_idx nothing tells which of the "
            f"{needed} groups a column belongs to"
        )
    return None


def check_version(name: str, zeros: Tensor, bits: int, first_version: bool, other: str) -> None:
    """InvalidInput where zero points would be the middle of the codes if stored the other way."""
    middle = 2 ** (bits - 1)
    beside = middle + (1 if first_version else -1)
    if (zeros == beside).all():
        stored = "less 1" if first_version else "as they are"
        raise InvalidInput(
            f"{name}: config.json says sym: true, and that zero points are stored {stored}, "
            f"by which they are {beside} and not {middle}; the file is of the other "
            f"version: put {other} into its quantization_config"
        )


def zero_points(words: Tensor, bits: int, n: int, first_version: bool) -> Tensor:
    """qzeros (groups, words) -> zero points (N, groups) uint8.

    v1's 1 is added as GPTQModel does it: to whole words, with carries, because that is the inverse
    of how it writes v1; for 3 bits, whose codes cross words, to each code.
    """
    if first_version and bits != 3:
        words = words + sum(1 << at for at in range(0, 31, bits))  # wraps
    zero = unpack(words, bits, n)
    if first_version and bits == 3:
        zero = (zero + 1) & 7
    return zero.T.contiguous()


def column_order(g_idx: Tensor, groups: int, name: str) -> Tensor | None:
    """g_idx (K,) -> the columns sorted by their group (K,) int32; None if they are sorted.

    InvalidInput when groups are not of equal sizes.
    """
    g_idx = g_idx.long()
    k = len(g_idx)
    if int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
        raise InvalidInput(
            f"{name}.g_idx: names groups {int(g_idx.min())} to {int(g_idx.max())}, but scales has "
            f"{groups}"
        )
    counts = torch.bincount(g_idx, minlength=groups)
    if (counts != k // groups).any():
        raise InvalidInput(
            f"{name}.g_idx: groups of {int(counts.min())} to {int(counts.max())} columns; only "
            "groups of equal size can be read"
        )
    order = torch.argsort(g_idx, stable=True).to(torch.int32)
    return None if torch.equal(order, torch.arange(k, dtype=torch.int32)) else order
