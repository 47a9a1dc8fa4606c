"""Whether a model's weights fit on a GPU, asked before any of them is read."""

from pathlib import Path

import torch

from anybit.errors import Unsupported

GIB = 1 << 30


def gpu_memory(device: torch.device) -> tuple[int, int] | None:
    """Free bytes of a GPU and all it has; None for other devices, whose memory can grow."""
    if device.type != "cuda":
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
