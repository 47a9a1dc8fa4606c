"""What a GPU says of itself, which tiles must fit."""

from functools import cache

import torch


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; elsewhere those of an H100."""
    if device.type != "cuda":
        return 132
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have: 99 KB on an RTX 3090, 163 on an A100; elsewhere no limit."""
    if device.type != "cuda":
        return 1 << 30
    facts = torch.cuda.get_device_properties(device)
    most: int = getattr(facts, "shared_memory_per_block_optin", facts.shared_memory_per_block)
    return most
