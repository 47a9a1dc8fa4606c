"""Time every format on this CPU beside torch's bf16 product and the read floor, in turns.

In each round every contestant multiplies twice, with other copies of its weight, and the second
product counts; a machine whose speed changes so changes it for all. Times are medians over rounds;
a ratio is the median of the ratios of single rounds.

The floor is a sum over 256 MB of fp32, in the same rounds.
"""

import argparse
import datetime
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from csv_rows import add_rows
from torch import Tensor, nn

import anybit
from anybit.core.packed import Packed
from anybit.core.scheme import parse_scheme
from anybit.kernels.native import memory
from anybit.kernels.native.isa import isa
from anybit.kernels.processor import processor
from anybit.nn.multiplier import Multiplier

COLUMNS = (
    "cpu", "threads", "isa", "date", "versions", "format", "backend", "M", "N", "K", "us",
    "weight_gbps", "vs_bf16", "vs_floor",
)  # fmt: skip
FORMATS = (
    "int8", "int4", "int3", "int4:group=128", "int4:group=64,zero", "int4:group=32",
    "int3:group=64", "int2:group=64,zero", "fp8", "fp6", "fp5", "fp4", "liquid", "sparse",
    "codebook:m=2,v=8", "int8@int8", "int4@int8", "liquid@int8", "int4:group=128@int8",
)  # fmt: skip
COLD = 160 << 20  # bytes of the copies of a weight: more than caches hold
ROWS = 64  # that are really quantized; the weight repeats them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default=" ".join(FORMATS), help="separated by spaces")
    parser.add_argument("--shapes", default="4096x4096,14336x4096,4096x14336", help="NxK,...")
    parser.add_argument("--m", default="1,4,16,128,512", help="numbers of tokens")
    parser.add_argument("--seconds", type=float, default=20, help="for each shape and number")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="a CSV; rows are added to it")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for shape in given.shapes.split(","):
        n, k = map(int, shape.split("x"))
        contestants = [Dense(n, k), *(Quantized(spec, n, k) for spec in given.formats.split())]
        for m in map(int, given.m.split(",")):
            times = rounds(contestants, tokens(m, k), given.seconds)
            rows = [row(c, times, m, n, k) for c in contestants]
            for one in rows:
                print(*one.values(), sep=",", flush=True)
            if given.out:
                add_rows(given.out, rows)


class Contestant:
    """Layers with the same weight, which no cache holds together.

    Attributes:
        name: a spec, or "bf16".
        backend: what multiplies.
        nbytes: of one weight.
        layers: that multiply in turn.
    """

    name: str
    backend: str
    nbytes: int
    layers: list[nn.Module]

    def copies(self) -> int:
        return max(2, -(-COLD // self.nbytes))


class Dense(Contestant):
    def __init__(self, n: int, k: int):
        weight = random(k).bfloat16().repeat(-(-n // ROWS), 1)[:n]
        self.name, self.backend, self.nbytes = "bf16", "torch", weight.nbytes
        self.layers = []
        for _ in range(self.copies()):
            layer = nn.Linear(k, n, False, device="meta")
            layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
            self.layers.append(layer)


class Quantized(Contestant):
    def __init__(self, scheme: str, n: int, k: int):
        fmt, activation = parse_scheme(scheme)
        packed = tall(anybit.quantize_tensor(random(k), fmt), n)
        self.name, self.nbytes = scheme, packed.nbytes()
        layer = Multiplier.of(packed, activation, torch.bfloat16)
        self.backend = layer.backend
        self.layers = [layer, *(twin(layer) for _ in range(self.copies() - 1))]


def twin(layer: Multiplier) -> Multiplier:
    """A layer with the same weight in other memory."""
    layout = (memory.empty(t.nbytes).view(t.dtype).view(t.shape) for t in layer.prepared.layout)
    out = Multiplier(
        layer.backend, layer.prepared._replace(layout=tuple(layout)), layer.around, layer.bias
    )
    out.fill(layer)
    return out


def random(k: int) -> Tensor:
    return torch.randn(ROWS, k, generator=torch.Generator().manual_seed(0)) * 0.02


def tokens(m: int, k: int) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(1)).bfloat16()


def tall(packed: Packed, n: int) -> Packed:
    """The rows of a weight, repeated until there are n."""
    times = -(-n // packed.shape[0])
    entries = packed.format.entries()
    grid = {a: t if entries[a].table else t.repeat(times, 1)[:n] for a, t in packed.grid.items()}
    planes = tuple(plane.repeat(times, 1)[:n] for plane in packed.planes)
    return Packed(packed.format, (n, packed.shape[1]), planes, grid)


@torch.inference_mode()
def rounds(contestants: Sequence[Contestant], x: Tensor, seconds: float) -> dict[str, list[float]]:
    """Microseconds of every contestant in every round, and of reading a byte ("floor")."""
    read = torch.ones(64 << 20)
    times: dict[str, list[float]] = {name: [] for name in ("floor", *(c.name for c in contestants))}

    def take(name: str, call: Callable[[int], object], turn: int, share: float = 1) -> None:
        call(turn)  # as in a model, where a like layer comes before
        start = time.perf_counter()
        call(turn + 1)
        times[name].append((time.perf_counter() - start) * 1e6 * share)

    stop = time.perf_counter() + seconds
    turn = 0
    while time.perf_counter() < stop or turn < 6:
        take("floor", lambda _: read.sum(), turn, 1 / read.nbytes)
        for c in contestants:
            take(c.name, lambda i, c=c: c.layers[i % len(c.layers)](x), turn)  # type: ignore[misc]
        turn += 2
    return times


def row(c: Contestant, times: dict[str, list[float]], m: int, n: int, k: int) -> dict[str, object]:
    level = isa()
    us = median(times[c.name])
    dense = median(a / b for a, b in zip(times["bf16"], times[c.name], strict=True))
    floor = median(times["floor"]) * c.nbytes / us
    values = (
        processor(), torch.get_num_threads(), level.name if level else "", datetime.date.today(),
        f"anybit {anybit.__version__} torch {torch.__version__}", c.name, c.backend, m, n, k,
        round(us, 1), round(c.nbytes / us / 1e3, 2), round(dense, 3), round(floor, 3),
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


if __name__ == "__main__":
    main()
