"""What work for a GPU costs the host, in microseconds, with launches that do nothing.

    python benchmarks/host.py int4:group=128 liquid@int8 --backends hopper mma triton native

No GPU is needed: tensors lie on the CPU, and libcuda and Triton's driver are stand-ins whose
launches return at once. What a GPU's driver and torch's allocator for it take comes on top. Of a
product, each column holds what the one before it does, too:

launch: its kernels' arguments are written and the driver is called.
backend: kernels are chosen, outputs are allocated, activations are quantized.
operator: torch's dispatcher, through which traces and gradients see it.
layer: `QuantLinear.__call__` without gradients, which does without the dispatcher.

block: a decoder layer of the engine that reads a prompt of 200 tokens: four products, and what lies
between them; not for `native`, whose blocks have other kernels. new M: choices for the four
products of a layer of Llama-3-8B, for each number of tokens once.

A number is the least of several rounds: other processes make it larger, nothing makes it smaller.
"""

import argparse
import ctypes
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from engine import RandomWeights, llama

from anybit import quantize_tensor
from anybit.core.scheme import parse_scheme
from anybit.engine import attention, fused
from anybit.engine.attention import Batch
from anybit.engine.loader import build, model_class
from anybit.engine.model_runner import caches_of
from anybit.kernels.cute import driver
from anybit.kernels.cute.operands import operand_of
from anybit.kernels.registry import get_backend
from anybit.nn import linear, op

ROUNDS, CALLS = 100, 10
META = {"entry": "k", "shared": 4096, "threads": 128, "cluster": 1, "box": 8}
GPUS = {"hopper": (9, 0), "mma": (8, 9), "triton": (9, 0), "native": (9, 0)}
FACTS = {13: 1_980_000, 16: 132, 36: 3_201_000, 37: 6144}  # an H200's clocks, processors, bus
SHAPES = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)
TOKENS = 200  # of the prompt: longer ones would run torch's attention
LENGTHS = range(1001, 1041)  # of new M


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("schemes", nargs="+")
    parser.add_argument("--backends", nargs="+", default=list(GPUS), choices=list(GPUS))
    parser.add_argument("--shape", default="512x1024", help="NxK of the weight")
    parser.add_argument("--m", default="1,200", help="tokens")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # Triton's
    n, k = map(int, args.shape.split("x"))
    names = "launch", "backend", "operator", "layer", "block", "new M"
    print(f"{'backend':8}{'scheme':22}{'M':>5}" + "".join(f"{name:>9}" for name in names))
    for name in args.backends:
        with stand_ins(name):
            for scheme in args.schemes:
                around = [block(scheme) if name != "native" else None]
                around += [new_tokens(scheme)] if name == "hopper" else []
                layer = layer_of(scheme, n, k)
                for m in map(int, args.m.split(",")):
                    times = [*product(layer, m), *around]
                    texts = (" " * 9 if t is None else f"{t:9.1f}" for t in times)
                    print(f"{name:8}{scheme:22}{m:>5}" + "".join(texts), flush=True)


def layer_of(scheme: str, n: int, k: int) -> linear.QuantLinear:
    """A layer for bf16 activations."""
    fmt, activation = parse_scheme(scheme)
    packed = quantize_tensor(torch.randn(n, k), fmt)
    return linear.QuantLinear(packed, None, activation, torch.bfloat16, keep="packed")


@torch.inference_mode()
def product(layer: linear.QuantLinear, m: int) -> list[float]:
    """Microseconds of launch, backend, operator and layer."""
    x = torch.randn(m, layer.in_features, dtype=torch.bfloat16)
    kernels, prepared = get_backend(layer.backend), layer.prepared
    assert prepared is not None
    scheme = layer.multiplier(x.dtype).scheme
    given = (x, prepared.layout, None, scheme, layer.out_features, layer.backend)
    launches: list[Callable[[], Any]] = []
    with watched(launches):
        kernels.linear(x, prepared, None)
    return [
        timed(lambda: [launch() for launch in launches]),
        timed(lambda: kernels.linear(x, prepared, None)),
        timed(lambda: op.linear(*given)),
        timed(lambda: layer(x)),
    ]


@torch.inference_mode()
def block(scheme: str) -> float:
    """Microseconds of a decoder layer that reads a prompt."""
    config = llama(512, 512, 1024, 1, 4, 1)
    device = torch.device("cpu")
    model = build(model_class(config), config, RandomWeights(device, scheme), 1024)
    pages = -(-TOKENS // 16)
    numbers = torch.arange(TOKENS, dtype=torch.int32)
    batch = Batch(
        positions=numbers, slots=numbers, tables=numbers[None, :pages],
        contexts=torch.tensor([TOKENS], dtype=torch.int32),
        starts=torch.tensor([0, TOKENS], dtype=torch.int32),
        queries=[TOKENS], lengths=[TOKENS], decodes=0,
    )  # fmt: skip
    cache = caches_of(model, pages, 16, torch.bfloat16, device)[0]
    cache.fused, cache.native = True, False
    x = torch.randn(TOKENS, 512, dtype=torch.bfloat16)
    return timed(lambda: model.layers[0](x, x, model.ropes[0], cache, batch))


def new_tokens(scheme: str) -> float:
    """Microseconds of what is chosen once for a number of tokens."""
    from anybit.kernels.hopper import backend, codebook_linear, scalar_linear

    fmt, activation = parse_scheme(scheme)
    half, device = torch.bfloat16, torch.device("cpu")
    operand = getattr(torch, operand_of(activation, half))

    def choose(m: int) -> None:
        for n, k in SHAPES:
            if backend.family(fmt) is scalar_linear:
                problem = operand, m, n, k, half, device, None, 0
                scalar_linear.chosen(fmt, activation, *problem)
            elif codebook_linear.lookup_tile(fmt, m, n, k, half, device):
                codebook_linear.launch_of_many(fmt, m, n, k, half, device, None)

    choose(LENGTHS[0] - 1)
    times = []
    for m in LENGTHS:
        start = time.perf_counter()
        choose(m)
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


def timed(call: Callable[[], Any]) -> float:
    """Microseconds of a call."""
    call()
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, time.perf_counter() - start)
    return best / CALLS * 1e6


@contextmanager
def watched(seen: list[Callable[[], Any]]) -> Iterator[None]:
    """Note every launch, to be made again."""
    from triton.runtime.jit import JITFunction

    from anybit.kernels.hopper.launch import CodebookLauncher, GemmLauncher
    from anybit.kernels.mma.launch import MmaLauncher
    from anybit.kernels.native.build import Kernel

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            seen.append(lambda: function(*args, **options))
            return function(*args, **options)

        return noted

    places: list[tuple[Any, str]] = [
        (GemmLauncher, "launch"), (CodebookLauncher, "launch"), (MmaLauncher, "launch"),
        (JITFunction, "run"), (Kernel, "__call__"),
    ]  # fmt: skip
    with ExitStack() as stack:
        for kind, name in places:
            stack.enter_context(patch.object(kind, name, noting(getattr(kind, name))))
        yield


# Stand-ins.


@contextmanager
def stand_ins(backend: str) -> Iterator[None]:
    """Let tensors on the CPU pass for ones on a GPU whose launches do nothing.

    backend: what layers are made for.
    """
    import triton

    from anybit.kernels.hopper import codebook_linear, scalar_linear
    from anybit.kernels.mma import codebook_linear as mma_codebooks
    from anybit.kernels.mma import linear as mma
    from anybit.kernels.native import build as native

    capability, library = GPUS[backend], Library()
    shared = 232_448 if capability == (9, 0) else 101_376
    facts = SimpleNamespace(
        major=capability[0], minor=capability[1], multi_processor_count=132,
        shared_memory_per_block_optin=shared, shared_memory_per_multiprocessor=shared + 1024,
    )  # fmt: skip
    meta = META if capability == (9, 0) else {k: v for k, v in META.items() if k != "cluster"}
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.kernel"
        file.write_bytes(json.dumps(meta).encode() + b"\n\x7fELF")

        def stand_in(place: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(place, name, value, create=True))

        stand_in(torch.cuda, "current_device", lambda: None)  # as tensors on the CPU say
        stand_in(torch.cuda, "device", lambda device: nullcontext())
        stand_in(torch.cuda, "get_device_properties", lambda device: facts)
        stand_in(torch.cuda, "get_device_capability", lambda device=None: capability)
        stand_in(torch.cuda, "get_device_name", lambda device=None: "a stand-in")
        stand_in(torch.cuda, "is_current_stream_capturing", lambda: False)
        stand_in(torch._C, "_cuda_getCurrentRawStream", lambda device: 1)
        stand_in(driver, "driver", lambda: library)
        for module in (scalar_linear, codebook_linear, mma, mma_codebooks):
            stand_in(module, "built", lambda kernel: file)
        stand_in(native.Kernel, "__init__", nothing_compiled)
        stand_in(linear, "choose", lambda layer: backend)
        for module in (fused, attention):
            stand_in(module, "usable", lambda x: True)
            stand_in(module, "compiled", lambda x: False)
        stand_in(triton.runtime.driver, "_active", TritonDriver(capability))
        yield


class Library:
    """libcuda: functions of C that return 0, and what the chip says of itself."""

    def __init__(self) -> None:
        self.cuLaunchKernelEx = ctypes.CDLL("libm.so.6").fegetround  # 0 where nobody changed it
        self.free = 1 << 40

    def cuDeviceGetAttribute(self, to: Any, which: int, device: int) -> int:
        to._obj.value = FACTS[which]
        return 0

    def cuMemAlloc_v2(self, to: Any, size: Any) -> int:
        to._obj.value, self.free = self.free, self.free + size.value
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *args: 0


class TritonDriver:
    """Triton's driver, which compiles for a GPU and launches nothing."""

    def __init__(self, capability: tuple[int, int]):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
        self.utils = SimpleNamespace(
            load_binary=lambda *args: (1, 1, 32, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 232_448},
            unload_module=lambda module: None,
        )
        self.launcher_cls = lambda source, metadata: lambda *args: None

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 1

    def get_current_target(self) -> Any:
        return self.target


def nothing_compiled(kernel: Any, engine: Any, name: str) -> None:
    """`Kernel.__init__` of the CPU's kernels, for a function that does nothing."""
    kernel.engine = engine
    function = ctypes.CDLL("libm.so.6").fegetround
    kernel.address = ctypes.cast(function, ctypes.c_void_p).value
    kernel.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel.address)


if __name__ == "__main__":
    main()
