"""Find the fastest launches for layers of one's own, on one's own GPU.

Nothing is tuned on a user's first call: Triton's tiles are shipped as data, and the other kernels
follow from a rule, or from a model of a launch's time that was fitted to an H200. A GPU or an
unusual shape may want others. `tune` times the candidates of the backend that multiplies a layer,
in turns, with cold weights and in CUDA graphs (`timing.py`), and keeps the best
(`kernels/tuned.py`). Every result is compared with the decoded weight before it is timed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from anybit.core.packed import Packed
from anybit.core.scheme import parse_scheme, scheme_name
from anybit.errors import InvalidInput, Unsupported
from anybit.kernels import registry, tuned
from anybit.kernels.ahead import build_for
from anybit.kernels.backend import HALVES, Backend, LayerSpec, NoRoom, Prepared
from anybit.kernels.cute import jit
from anybit.kernels.reference import quantized_activation
from anybit.measure.timing import medians_in_turns, rotated
from anybit.progress import progress
from anybit.quantizers.quantize import quantize_tensor

TOLERANCE = {None: 3e-3, "int8": 5e-3, "fp8": 2e-2}  # relative, of norms
ROUNDING = {torch.float16: 0.0, torch.bfloat16: 4e-3}  # more, of outputs
Launch = Callable[[Prepared], Tensor]
Times = dict[str, float]  # microseconds, by the names of launches


def tune(
    schemes: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    counts: Sequence[int],
    say: Callable[[str], None],
    device: torch.device | None = None,
) -> Path:
    """Time candidates for every scheme, shape (N, K), dtype and number of tokens; returns the file.

    Raises RuntimeError without a GPU, ValueError where no backend with candidates takes a layer.
    """
    device = device or torch.device("cuda", 0)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise Unsupported("tune measures a GPU, and torch sees none")
    gpu = torch.cuda.get_device_name(device)
    cells = [(*parse_scheme(s), shape) for s in schemes for shape in shapes]
    layers = [LayerSpec(fmt.plain(), activation, shape, device) for fmt, activation, shape in cells]
    backends = [tuned_backend(layer) for layer in layers]
    path = tuned.tuned_file(gpu)
    with progress("tuning", len(layers) * len(HALVES) * len(counts)) as step:
        for layer, name in zip(layers, backends, strict=True):
            packed, (n, k) = random_weight(layer), layer.shape
            for dtype in HALVES:
                cell = tuned.cell_of(name, layer.format, layer.activation, dtype, n, k)
                what, winners = f"{cell.scheme} in {cell.dtype} {n}x{k}", []
                step(0, what)
                for m, times in time_layer(name, packed, layer.activation, dtype, sorted(counts)):
                    step(1, what)
                    if times:
                        best = min(times, key=times.__getitem__)
                        winners.append(tuned.Winner(m, best))
                        say(f"{what} M={m}: {times[best]:.1f} us, {best}")
                    else:
                        say(f"{what} M={m}: nothing to choose from; the rule's stays")
                path = tuned.save(gpu, {cell: winners})  # an interruption loses one cell
    return path


def tuned_backend(layer: LayerSpec) -> str:
    """The name of the backend that multiplies a layer; it must have candidates."""
    name = registry.choose(layer)
    if not registry.get_backend(name).does(Backend.candidates):
        what = f"{scheme_name(layer.format, layer.activation)} at {layer.shape}"
        reasons = "; ".join(f"{n} {r}" for n, r in registry.refusals(layer).items() if r)
        raise InvalidInput(f"{what}: {name} multiplies it, and has nothing to tune: {reasons}")
    return name


def random_weight(layer: LayerSpec) -> Packed:
    """A weight of Gaussian numbers, the same at each call."""
    generator = torch.Generator(layer.device).manual_seed(0)
    weight = torch.randn(layer.shape, device=layer.device, generator=generator) * 0.02
    return quantize_tensor(weight, layer.format)


def time_layer(
    backend: str,
    packed: Packed,
    activation: str | None,
    dtype: torch.dtype,
    counts: Sequence[int],
) -> Iterator[tuple[int, Times]]:
    """Each number of tokens, and the times of the candidates that run here."""
    family = registry.get_backend(backend)
    prepared = family.prepare(packed, activation, dtype)
    device, k = packed.planes[0].device, packed.shape[1]
    tokens = [torch.randn(m, k, device=device, dtype=dtype) for m in counts]
    every = [family.candidates(x, prepared) for x in tokens]
    # What fails is told where it is launched.
    build_for([partial(launch, prepared) for found in every for launch in found.values()])
    copies, weight = rotated(prepared, packed.nbytes()), packed.dequantize()
    for x, found in zip(tokens, every, strict=True):
        want = quantized_activation(x, activation) @ weight.T
        yield len(x), time_launches(found, copies, want, TOLERANCE[activation] + ROUNDING[dtype])


def time_launches(
    found: dict[str, Launch], copies: Sequence[Prepared], want: Tensor, tolerance: float
) -> Times:
    """Microseconds of every launch that this GPU has room for. RuntimeError: a wrong result."""
    right = {}
    for name, launch in found.items():
        with suppress(NoRoom, jit.BuildError):
            error = float((launch(copies[0]) - want).norm() / want.norm())
            if not error < tolerance:
                spec, m = copies[0].format.spec, len(want)
                raise RuntimeError(f"{spec} M={m} {name}: wrong by {error:.1e}; please report it")
            right[name] = [partial(launch, weight) for weight in copies]
    times = {}
    for name, us in zip(right, medians_in_turns([*right.values()], want.device), strict=True):
        if isinstance(us, Exception):
            raise us
        times[name] = us
    return times
