"""Find the fastest tiles of the kernels for layers of one's own, on one's own GPU.

Nothing is tuned on a user's first call: Triton's tiles are shipped as data, measured on an H200,
and those for `mma.sync` follow from a rule. A GPU or an unusual shape may want others. `tune` times
a short list of candidates for each cell, with cold weights and in a CUDA graph (`timing.py`), and
keeps the best (`kernels/tuned.py`). Every result is compared with the decoded weight before it is
timed.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from anybit.core.packed import Packed
from anybit.core.scheme import parse_scheme, scheme_name
from anybit.errors import InvalidInput, Unsupported
from anybit.kernels import tuned
from anybit.kernels.backend import LayerSpec, Prepared
from anybit.kernels.cute import operands
from anybit.kernels.cute.decode import Decoder
from anybit.kernels.mma import tiles as mma_tiles
from anybit.kernels.reference import quantized_activation
from anybit.kernels.registry import get_backend
from anybit.kernels.triton.tiles import Tile
from anybit.measure.timing import median_us, rotated
from anybit.progress import progress
from anybit.quantizers.quantize import quantize_tensor

TOLERANCE = {None: 3e-3, "int8": 5e-3, "fp8": 2e-2}  # relative, of norms
ROUNDING = {torch.float16: 0.0, torch.bfloat16: 4e-3}  # more, of outputs
Run = Callable[[Prepared, tuned.Tile], Tensor]


def tune(
    schemes: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    counts: Sequence[int],
    say: Callable[[str], None],
    device: torch.device | None = None,
) -> Path:
    """Time candidates for every scheme, shape (N, K) and number of tokens; returns the file.

    The kernels are those that multiply such a layer: for `mma.sync`, else Triton's.

    Raises RuntimeError without a GPU, ValueError where both backends refuse a layer.
    """
    device = device or torch.device("cuda", 0)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise Unsupported("tune measures a GPU, and torch sees none")
    gpu = torch.cuda.get_device_name(device)
    cells = [(*parse_scheme(s), shape) for s in schemes for shape in shapes]
    backends = [
        backend_for(LayerSpec(fmt, activation, shape, device, torch.float16))
        for fmt, activation, shape in cells
    ]
    path = tuned.tuned_file(gpu)
    with progress("tuning", len(cells) * len(counts)) as step:
        for (fmt, activation, (n, k)), backend in zip(cells, backends, strict=True):
            generator = torch.Generator(device).manual_seed(0)
            weight = torch.randn(n, k, device=device, generator=generator) * 0.02
            packed = quantize_tensor(weight, fmt)
            name = scheme_name(fmt, activation)
            found: tuned.Tuned = {}
            for m in sorted(counts):
                step(0, f"{name} {n}x{k} M={m}")
                for cell, times in BACKENDS[backend](packed, activation, m):
                    if not times:
                        say(f"{cell} {n}x{k} M={m}: no tile can be used; the rule's stays")
                        continue
                    best = min(times, key=times.__getitem__)
                    say(f"{cell} {n}x{k} M={m}: {times[best]:.1f} us, {best}")
                    found.setdefault((cell, n, k), []).append((m, best))
                step(1)
            path = tuned.save(gpu, found)  # an interruption loses one cell
    return path


def backend_for(layer: LayerSpec) -> str:
    """The first of those that can be tuned that takes a layer."""
    reasons = {
        "mma": operands.refuse_format(layer) or get_backend("mma").refuse(layer),  # it has others
        "triton": get_backend("triton").refuse(layer),
    }
    for name, reason in reasons.items():
        if reason is None:
            return name
    why = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
    raise InvalidInput(f"{scheme_name(layer.format, layer.activation)} at {layer.shape}: {why}")


Times = dict[tuned.Tile, float]  # microseconds


def time_triton(packed: Packed, activation: str | None, m: int) -> Iterator[tuple[str, Times]]:
    """(scheme, times) of the candidates that run here."""
    from triton.runtime.errors import OutOfResources

    from anybit.kernels.triton import backend
    from anybit.kernels.triton.layout import layout_of

    layout = layout_of(packed.format, activation)
    x = torch.randn(m, packed.shape[1], device=packed.planes[0].device, dtype=torch.float16)

    def run(weight: Prepared, tile: tuned.Tile) -> Tensor:
        assert isinstance(tile, Tile)
        return backend.multiply(x, weight, None, tile)

    family = backend.family(layout)
    found = candidates(family, m, packed.shape[0], activation is None)
    prepared = backend.prepare(packed, activation)
    times = time_tiles(found, packed, prepared, x, run, OutOfResources)
    yield scheme_name(packed.format, activation), times


def time_mma(packed: Packed, activation: str | None, m: int) -> Iterator[tuple[str, Times]]:
    """(scheme, times) of the candidates that run here, for fp16 and for bf16."""
    from anybit.kernels.cute.jit import BuildError
    from anybit.kernels.mma import linear

    n, k = packed.shape
    device = packed.planes[0].device
    gpu = mma_tiles.gpu_of(device)
    for dtype, output in ((torch.float16, "float16"), (torch.bfloat16, "bfloat16")):
        prepared = operands.prepare(packed, activation, dtype)
        x = torch.randn(m, k, device=device, dtype=dtype)
        given = operands.tokens(x, prepared)
        decoder = operands.decoder_for(packed.format, given[0].dtype)

        def run(
            weight: Prepared,
            tile: tuned.Tile,
            given: tuple[Tensor, Tensor | None, Tensor | None] = given,
            decoder: Decoder = decoder,
            dtype: torch.dtype = dtype,
            output: str = output,
        ) -> Tensor:
            assert isinstance(tile, mma_tiles.Tile)
            kernel = mma_tiles.kernel_of(decoder, gpu, tile, output)
            return linear.multiply(*given, weight, None, dtype, kernel)

        times = time_tiles(candidates_mma(decoder, gpu, m, n), packed, prepared, x, run, BuildError)
        yield linear.tuned_as(scheme_name(packed.format, activation), dtype), times


BACKENDS = {"mma": time_mma, "triton": time_triton}


def time_tiles(
    found: Iterable[tuned.Tile],
    packed: Packed,
    prepared: Prepared,
    x: Tensor,
    run: Run,
    missing: type[Exception],
) -> Times:
    """Microseconds of every candidate that runs here. Raises RuntimeError for a wrong result.

    missing: what a kernel raises that this GPU has no room for.
    """
    activation = prepared.activation
    copies = rotated(prepared, packed.nbytes())
    seen = quantized_activation(x, activation) if activation else x.float()
    want = seen @ packed.dequantize().T
    times = {}
    for tile in found:
        try:
            error = float((run(copies[0], tile) - want).norm() / want.norm())
        except missing:
            continue
        if not error < TOLERANCE[activation] + ROUNDING[x.dtype]:
            name, m = packed.format.spec, len(x)
            raise RuntimeError(f"{name} M={m} {tile}: wrong by {error:.1e}; please report it")
        times[tile] = median_us([partial(run, w, tile) for w in copies], x.device)
    return times


def candidates_mma(decoder: Decoder, gpu: mma_tiles.Gpu, m: int, n: int) -> list[mma_tiles.Tile]:
    """The rule's tile and a short list of others that fit."""
    tile, kind = mma_tiles.Tile, "gemm"
    if m <= mma_tiles.NARROW:
        tokens, kind = 8 if m <= 8 else 16, "narrow"
        shapes = [(2, 8, 1), (2, 8, 2), (1, 8, 2), (1, 8, 3), (2, 4, 2), (2, 4, 3), (1, 4, 4)]
        wanted = [tile(tokens, s, w, ctas=c, kind=kind) for s, w, c in shapes]
        wanted += [tile(tokens, 2, 4, ctas=c) for c in (3, 4)]
    else:
        most = 128 if decoder.slot == 8 else 64
        sizes = sorted({min(most, t) for t in (32, 64, 128) if t < 2 * m})
        shapes = [(2, 4, 1), (2, 4, 2), (2, 4, 3), (2, 8, 1), (4, 4, 1)]
        wanted = [tile(t, s, w, ctas=c) for t in sizes[-2:] for s, w, c in shapes]
    fit = [mma_tiles.fitted(t, decoder, gpu, 2, 5) for t in wanted]
    rule = mma_tiles.choose(decoder, gpu, m, n)
    dense = mma_tiles.DECODE if decoder.slot == 16 and m >= 128 else None
    return [t for t in dict.fromkeys([rule, dense, *fit]) if t]


def candidates(family: str, m: int, n: int, dense: bool) -> Iterator[Tile]:
    """A short list for a family of `tiles.py`; splits that give a GPU one wave or a few.

    dense: whether decoding the weight and cuBLAS are a choice; not for quantized activations.
    """
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
