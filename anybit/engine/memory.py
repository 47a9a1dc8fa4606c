"""Whether weights, KV cache and what a step takes fit on a GPU, asked before any of it is there."""

import os
from pathlib import Path
from typing import Any

import torch

from anybit.errors import Unsupported

GIB = 1 << 30
FRACTION = 0.9  # of the free memory that a KV cache may have at most


def gpu_memory(device: torch.device) -> tuple[int, int] | None:
    """Free bytes of a GPU and all it has; None where nobody knows.

    That is on other devices, whose memory can grow, and on GPUs that share the host's, of which
    files that were read count as used.
    """
    if device.type != "cuda" or torch.cuda.get_device_properties(device).is_integrated:
        return None
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + held, total


def check_weights(directory: Path, least: int, device: torch.device) -> None:
    """Raise Unsupported unless so many bytes of weights leave room on the device."""
    memory = gpu_memory(device)
    if memory is None or least < memory[0]:
        return
    free, total = (part / GIB for part in memory)
    raise Unsupported(
        f"{directory}: its weights take {least / GIB:.1f} GiB or more, and {free:.1f} of "
        f"{total:.1f} GiB are free on {device}, which must hold a KV cache as well; use fewer bits "
        "(`anybit quantize`, or --quantization), end what else uses the GPU, or use a larger one"
    )


def cache_room(device: torch.device, step: int | None) -> int | None:
    """Bytes that a KV cache may have; None: as many as are asked for.

    step: what a step takes beside it; None: that is left to who said how large the cache is. On a
    CPU, which gives memory only when it is used, that may be all that the machine has.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what laying out the weights took and gave back
    memory = gpu_memory(device)
    if memory is None and step is None and device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if memory is None or step is None:
        return memory and memory[0]
    return max(0, min(int(memory[0] * FRACTION), memory[0] - step))


def step_bytes(config: Any, tokens: int, rows: int) -> int:
    """An estimate of what a step takes, of 16-bit activations.

    That is, of so many tokens, some activations between layers and inside one; logits in fp32, and
    once more, of so many rows; and the largest weight, decoded.

    Args:
        config: Of a language model, as transformers has it.
        tokens: Of a step.
        rows: Of its logits.
    """

    def size(name: str) -> int:
        found = getattr(config, name, None) or 0
        return int(max(found) if isinstance(found, list | tuple) else found)

    each = max(1, size("num_experts_per_tok"))  # rows that a token becomes
    hidden, own = size("hidden_size"), size("moe_intermediate_size")
    # Of an expert, where experts have no key of their own; OPT has another name.
    inner = size("intermediate_size") or size("ffn_dim")
    inner = max(inner, each * own) if own else each * inner
    # Of a recurrence, some of whose activations are in fp32.
    expand = max(size("expand"), size("mamba_expand"))
    recurrent = size("linear_num_value_heads") * size("linear_value_head_dim")
    inner = max(inner, 6 * expand * hidden, 6 * recurrent)
    inside = tokens * (4 * each * hidden + 4 * inner) * 2
    return inside + 2 * rows * size("vocab_size") * 4 + 2 * inner * hidden * 2
