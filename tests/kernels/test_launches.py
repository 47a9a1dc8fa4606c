"""What is launched for a product is as launches.txt says: kernels, CTAs, rows, where sums meet.

A change on purpose: `python -m tests.kernels.test_launches` writes the file.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from traceback import extract_stack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import anybit
from anybit.core.scheme import parse_scheme
from anybit.kernels.backend import Backend, Prepared
from anybit.kernels.cute import cells, counters, driver, jit, launch, operands
from anybit.kernels.hopper import chip
from anybit.kernels.hopper.launch import ClusterLauncher
from anybit.kernels.registry import get_backend
from anybit.nn.linear import QuantLinear
from anybit.nn.multiplier import Multiplier
from anybit.quantizers.quantize import quantize_tensor
from tests.kernels.mma import GPUS

FILE = Path(__file__).with_name("launches.txt")
NAMES = "A100", "RTX 4090", "H200", "B200"
TOKENS = 1, 2, 4, 8, 16, 17, 33, 64, 128, 300, 1024, 8192
EXPERTS = 8
WEIGHTS = (  # scheme, (N, K)
    ("liquid@int8", (4096, 4096)),
    ("liquid@int8", (28672, 4096)),
    ("liquid@int8", (1000, 5120)),
    ("int4:group=128", (4096, 4096)),
    ("int4:group=128", (6144, 4096)),
    ("int4:group=128", (4096, 14336)),
    ("int4:group=128@int8", (4096, 4096)),
    ("int3:group=64,zero", (28672, 4096)),
    ("fp6", (4096, 4096)),
    ("fp6", (128256, 2048)),
    ("fp6@fp8", (5120, 5120)),
    ("int8@int8", (3072, 1024)),
    ("q4_k", (4096, 4096)),
    ("nf4", (2048, 8192)),
    ("trellis", (4096, 4096)),
    ("trellis:code=look", (28672, 4096)),
    ("trellis:code=look@int8", (4096, 4096)),
    ("trellis:code=look@int8", (576, 1536)),
    ("codebook:m=1,v=4,group=128", (4096, 4096)),
    ("codebook:m=2,v=8", (28672, 4096)),
    ("liquid@int8 of experts", (1536, 2048)),
    ("int4:group=128 of experts", (2048, 768)),
)
DTYPE = torch.float16
PACKAGE = str(Path(anybit.__file__).parent)


@contextmanager
def a_gpu(name: str, launched: Callable[..., None]) -> Iterator[None]:
    """A GPU that is none: its tensors have no memory, and `launched` stands for the driver's.

    launched: Called with a launcher, whose `name` is its kernel's, and what it is launched with.
    """
    gpu = GPUS[name]
    properties = SimpleNamespace(
        major=gpu.capability[0],
        minor=gpu.capability[1],
        multi_processor_count=gpu.multiprocessors,
        shared_memory_per_block_optin=gpu.shared,
        shared_memory_per_multiprocessor=gpu.shared_of_sm,
    )
    said = {chip.MULTIPROCESSORS: 132, chip.CLOCK: 1_980_000}
    said |= {chip.MEMORY_CLOCK: 3_201_000, chip.BUS: 6144}

    def asked(function: str, value: Any, attribute: int, device: int) -> None:
        value._obj.value = said[attribute]

    def load(launcher: Any, kernel: Any, device: int | None) -> None:
        launcher.name, launcher.device = kernel.name, device
        launcher.names = [field[0] for field in launcher.arguments._fields_]
        launcher.meta = {"box": 8}

    with ExitStack() as stack:
        for place, attribute, value in (
            (torch.cuda, "get_device_properties", lambda device: properties),
            (torch.cuda, "get_device_name", lambda device=None: name),
            (torch.cuda, "current_device", lambda: None),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "device", nullcontext),
            (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
            (chip, "call", asked),
            (counters, "_kept", {}),
            (counters, "piece", lambda words, device: (1, words)),
            (jit, "dsl_version", lambda: "any"),
            (launch, "built", lambda kernel: kernel),
            (driver.Launcher, "__init__", load),
            (driver.Launcher, "launch", launched),
            (ClusterLauncher, "_most_clusters", lambda *args: 0),
            (cells, "dense", lambda p, dtype: torch.empty(p.shape, dtype=dtype, device="meta")),
        ):
            stack.enter_context(patch.object(place, attribute, value, create=True))
        stack.callback(forget)
        forget()
        yield


def forget() -> None:
    """Empty the caches of what a GPU says, and of what follows."""
    for name, module in sys.modules.items():
        if name.startswith(tuple(f"anybit.kernels.{room}." for room in ("cute", "hopper", "mma"))):
            for value in vars(module).values():
                if hasattr(value, "cache_clear") and value.__module__ == name:
                    value.cache_clear()


def weight(scheme: str, n: int, k: int, experts: int = 1) -> Prepared:
    """A weight in Hopper's layout, which `mma` shares, without memory."""
    fmt, activation = parse_scheme(scheme)
    meta: Any = {"device": "meta"}
    rows = torch.empty(n * experts, **meta)
    if cells.takes(fmt):
        book = torch.empty(1, **meta)
        layout = torch.empty(n // 16 + 16, 1, 1, **meta), rows, book.half(), book.bfloat16()
        return Prepared(fmt, (n, k), activation, layout)
    d = operands.decoder_for(fmt, getattr(torch, operands.operand_of(activation, DTYPE)))
    blobs = torch.empty(-(-n // 256) * 2 * experts, 1, 1, dtype=getattr(torch, d.operand), **meta)
    table = [rows.int()] * bool(d.table_bytes)
    return Prepared(fmt, (n, k), activation, (blobs, rows, rows.int(), *table))


def launches(backend: Backend, weight: Prepared, m: int, seen: list[str]) -> str:
    """What a product of m tokens launches."""
    x, n = torch.empty(m, weight.shape[1], dtype=DTYPE, device="meta"), len(weight.layout[1])
    seen.clear()
    if n > weight.shape[0]:
        starts = torch.empty(EXPERTS + 1, dtype=torch.int32, device="meta")
        backend.linear_experts(x, starts, weight)
    else:
        backend.linear(x, weight, None)
    return ", then ".join(seen) or "the library"


def lines() -> Iterator[str]:
    """A line for each weight, GPU and way."""
    seen: list[str] = []

    def launched(launcher: Any, values: Any, grid: int, overlap: bool) -> None:
        work = values.get("work")
        parts = [launcher.name, f"{grid} CTAs", *["overlaps"] * overlap, f"{values['n']} rows"]
        parts += [f"{work.numel()} of work"] if isinstance(work, Tensor) else []
        parts += [
            f"{key} {values[key]}" for key in ("cluster", "splits", "shared") if key in values
        ]
        seen.append(" ".join(parts))

    for scheme, (n, k) in WEIGHTS:
        spec, _, experts = scheme.partition(" of ")
        prepared = weight(spec, n, k, EXPERTS if experts else 1)
        for name in NAMES:
            if name == "A100" and prepared.activation == "fp8":
                continue
            with a_gpu(name, launched):
                backend = get_backend("hopper" if name == "H200" else "mma")
                ways = [(launches(backend, prepared, m, seen), m) for m in TOKENS]
                for way, group in groupby(ways, itemgetter(0)):
                    tokens = [str(m) for _, m in group]
                    yield f"{scheme} {n}x{k} {name}, {' '.join(tokens)} tokens: {way}"


def test_launches_are_as_they_were() -> None:
    assert list(lines()) == FILE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("scheme", ["int4:group=128", "liquid@int8", "codebook:m=1,v=4,group=128"])
@pytest.mark.parametrize("name", ["A100", "H200"])
def test_few_frames_lie_between_a_layer_and_its_launch(name: str, scheme: str) -> None:
    """Six before `Launcher.launch` and the one behind it: each costs a host that launches."""
    frames: list[str] = []

    def launched(*args: Any) -> None:
        frames[:] = [f.name for f in extract_stack() if f.filename.startswith(PACKAGE)]

    fmt, activation = parse_scheme(scheme)
    packed = quantize_tensor(torch.randn(64, 1024), fmt)
    with a_gpu(name, launched), torch.inference_mode():
        layer = QuantLinear(packed, None, activation, DTYPE)
        assert layer._made is not None
        backend = "hopper" if name == "H200" else "mma"
        multiplier = Multiplier.by(backend, packed, activation, DTYPE)
        layer._made = layer._made._replace(backend=backend, multiplier=multiplier)
        layer(torch.randn(3, 1024).to(DTYPE))
    assert frames[0] == "forward"
    assert len(frames) <= 6, frames


if __name__ == "__main__":
    FILE.write_text("\n".join(lines()) + "\n", encoding="utf-8")
