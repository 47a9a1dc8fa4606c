"""Find the fastest tiles of the Triton kernels for layers of one's own, on one's own GPU.

Nothing is tuned on a user's first call: tiles are shipped as data, measured on an H200. Another
GPU or an unusual shape may want others. `tune` times a short list of candidates for each cell, with
cold weights and in a CUDA graph (`timing.py`), and keeps the best (`kernels/tuned.py`). Every
result is compared with the decoded weight before it is timed.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from anybit.core.packed import Packed
from anybit.core.scheme import parse_scheme, scheme_name
from anybit.errors import InvalidInput, Unsupported
from anybit.kernels.backend import LayerSpec, Prepared
from anybit.kernels.reference import quantized_activation
from anybit.kernels.registry import get_backend
from anybit.kernels.triton import tuned
from anybit.kernels.triton.tiles import Tile
from anybit.measure.timing import median_us, rotated
from anybit.progress import progress
from anybit.quantizers.quantize import quantize_tensor

TOLERANCE = {None: 3e-3, "int8": 5e-3, "fp8": 2e-2}  # relative, of norms


def tune(
    schemes: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    counts: Sequence[int],
    say: Callable[[str], None],
    device: torch.device | None = None,
) -> Path:
    """Time candidates for every scheme, shape (N, K) and number of tokens; returns the file.

    Raises RuntimeError without a GPU, ValueError where the triton backend refuses a layer.
    """
    device = device or torch.device("cuda")
    if device.type != "cuda" or not torch.cuda.is_available():
        raise Unsupported("tune measures a GPU, and torch sees none")
    gpu = torch.cuda.get_device_name(device)
    cells = [(*parse_scheme(s), shape) for s in schemes for shape in shapes]
    for fmt, activation, shape in cells:
        reason = get_backend("triton").refuse(LayerSpec(fmt, activation, shape, device))
        if reason:
            raise InvalidInput(f"{scheme_name(fmt, activation)} at {shape}: {reason}")
    path = tuned.tuned_file(gpu)
    with progress("tuning", len(cells) * len(counts)) as step:
        for fmt, activation, (n, k) in cells:
            generator = torch.Generator(device).manual_seed(0)
            weight = torch.randn(n, k, device=device, generator=generator) * 0.02
            packed = quantize_tensor(weight, fmt)
            name = scheme_name(fmt, activation)
            found: list[tuple[int, Tile]] = []
            for m in sorted(counts):
                step(0, f"{name} {n}x{k} M={m}")
                times = time_tiles(packed, activation, m)
                best = min(times, key=times.__getitem__)
                say(f"{name} {n}x{k} M={m}: {times[best]:.1f} us, {best}")
                found.append((m, best))
                step(1)
            path = tuned.save(gpu, {(name, n, k): found})  # an interruption loses one cell
    return path


def time_tiles(packed: Packed, activation: str | None, m: int) -> dict[Tile, float]:
    """Microseconds of every candidate that runs here. Raises RuntimeError for a wrong result."""
    from triton.runtime.errors import OutOfResources

    from anybit.kernels.triton import backend
    from anybit.kernels.triton.layout import layout_of

    fmt, (n, k) = packed.format, packed.shape
    device = packed.planes[0].device
    layout = layout_of(fmt, activation)
    prepared = rotated(backend.prepare(packed, activation), packed.nbytes())
    x = torch.randn(m, k, device=device, dtype=torch.float16)
    seen = quantized_activation(x, activation) if activation else x.float()
    want = seen @ packed.dequantize().T

    def run(weight: Prepared, tile: Tile) -> Tensor:
        return backend.multiply(x, weight, None, tile)

    times = {}
    for tile in candidates(backend.family(layout, m, activation), m, n, activation is None):
        try:
            error = float((run(prepared[0], tile) - want).norm() / want.norm())
        except OutOfResources:
            continue
        if not error < TOLERANCE[activation]:
            raise RuntimeError(f"{fmt.spec} M={m} {tile}: wrong by {error:.1e}; please report it")
        times[tile] = median_us([partial(run, w, tile) for w in prepared], device)
    return times


def candidates(family: str, m: int, n: int, dense: bool) -> Iterator[Tile]:
    """A short list for a family of `tiles.py`; splits that give a GPU one wave or a few.

    dense: whether decoding the weight and cuBLAS are a choice; not for quantized activations.
    """
    if family == "psumbook":
        for rows, split in itertools.product((256, 512), (1, 2, 4, 8, 16)):
            if 50 <= -(-n // rows) * split <= 300:
                yield Tile("psumbook", rows, 1, split, 1, 8, 3)
    if m <= 16:
        plans = [(64, 2, 4, 1), (128, 4, 3, 1), (32, 1, 3, 1), (64, 4, 3, 1)]
        if family in ("rows", "groups"):
            plans += [(128, 4, 3, 2), (128, 4, 4, 2), (64, 2, 3, 2)]
        for (rows, warps, stages, steps), split in itertools.product(plans, (1, 2, 4, 8)):
            if split == 1 or 100 <= -(-n // rows) * split <= 1200:
                yield Tile("gemm", rows, 8 if m <= 8 else 16, split, steps, warps, stages)
        return
    if m <= 64:
        wide = [(128, 64, 8, 3), (64, 64, 4, 4), (64, 32, 4, 3), (128, 64, 4, 3), (128, 32, 4, 3)]
    else:
        wide = [(128, 64, 8, 3), (128, 128, 8, 3), (128, 128, 4, 3), (128, 256, 8, 3)]
        if dense:
            yield Tile("dense")
    for (rows, tokens, warps, stages), split in itertools.product(wide, (1, 2, 4)):
        tiles = -(-n // rows) * -(-m // tokens)
        if split == 1 or 100 <= tiles * split <= 700:
            yield Tile("gemm", rows, tokens, split, 1, warps, stages)
