"""Load kernels with the CUDA driver and launch them: no DSL, no CUDA toolkit.

ctypes on libcuda, because a launch costs the host less this way than through `cuda.bindings`:
the parameters are one struct, tensor maps are cached, and nothing is built anew.
"""

import ctypes
import json
import os
from ctypes import c_int32, c_ubyte, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
SHARED_LIMIT = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
MAPS = 4096  # tensor maps that are kept
# CUtensorMapDataType, bytes of an element.
MAP_TYPES = {
    torch.int8: (0, 1),
    torch.float8_e4m3fn: (0, 1),
    torch.float16: (6, 2),
    torch.bfloat16: (9, 2),
}


class Arguments(ctypes.Structure):
    """The parameters of every kernel of the family, in the order of `build.PARAMETERS`."""

    _fields_ = [
        ("x_map", c_ubyte * 128),
        ("x_shape", c_int32 * 2),  # m, k
        ("w", c_uint64),
        ("row_scale", c_uint64),
        ("row_zero", c_uint64),
        ("token_scale", c_uint64),
        ("token_sum", c_uint64),
        ("bias", c_uint64),
        ("y", c_uint64),
        ("starts", c_uint64),
        ("m", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("experts", c_int32),
        ("accumulate", c_ubyte),
    ]


class Attribute(ctypes.Structure):
    _fields_ = [("id", c_uint32), ("pad", c_uint32), ("value", c_uint32 * 16)]


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", c_uint),
    ]


class Launcher:
    """A loaded kernel on one device. Its structs are reused: one thread launches at a time.

    CPython's interpreter lock holds between filling them and the driver's copying of them, except
    during the launch itself, when they are not written.
    """

    def __init__(self, path: Path, device: int, arguments: ctypes.Structure):
        header, _, cubin = path.read_bytes().partition(b"\n")
        self.meta = json.loads(header)
        library, kernel = c_void_p(), c_void_p()
        call("cuLibraryLoadData", ctypes.byref(library), cubin, None, None, 0, None, None, 0)
        call("cuLibraryGetKernel", ctypes.byref(kernel), library, self.meta["entry"].encode())
        self.kernel: Any = kernel
        self.arguments: Any = arguments
        self.attributes = (Attribute * 2)()
        self.attributes[0].id = CLUSTER
        self.set_cluster(self.meta.get("cluster", 1))
        self.attributes[1].id = SERIALIZATION
        self.attributes[1].value[0] = 1
        self.config = Config(attributes=self.attributes, count=2)
        self.config.block[:] = (self.meta["threads"], 1, 1)
        self.config.grid[:] = (1, 1, 1)
        # By address, one by one: where the kernel wants them is for the driver to know.
        start = ctypes.addressof(self.arguments)
        offsets = [getattr(type(arguments), field[0]).offset for field in arguments._fields_]
        self.parameters = (c_void_p * len(offsets))(*(start + offset for offset in offsets))
        self.launcher = driver().cuLaunchKernelEx
        self.launch_arguments = (ctypes.byref(self.config), kernel, self.parameters, None)

    def set_cluster(self, ctas: int) -> None:
        self.attributes[0].value[:3] = (ctas, 1, 1)

    def start(self, grid: int, overlap: bool, stream: int) -> None:
        """Launch; overlap: begin before the previous kernel of the stream has finished."""
        config = self.config
        config.grid[0] = grid
        config.stream = stream
        config.count = 2 if overlap else 1
        error = self.launcher(*self.launch_arguments)
        if error:
            raise RuntimeError(f"cuLaunchKernelEx: {error_text(error)}")


class Function(Launcher):
    """A kernel of `gemm.py`."""

    def __init__(self, path: Path, device: int):
        super().__init__(path, device, Arguments(accumulate=1))
        self.box: int = self.meta["box"]  # tokens that one copy instruction brings
        self.config.shared = self.meta["shared"]
        call("cuKernelSetAttribute", SHARED_LIMIT, self.meta["shared"], self.kernel, device)

    def launch(
        self,
        x: Tensor,
        pointers: tuple[int, int, int, int, int, int, int, int],
        n: int,
        grid: int,
        overlap: bool = True,
        experts: int = 1,
    ) -> None:
        """Launch on the current stream of x's device.

        pointers: w, row_scale, row_zero, token_scale, token_sum, bias, y and starts, 0 for none.
        overlap: begin before the previous kernel of the stream has finished.
        """
        a = self.arguments
        m, k = x.shape
        ctypes.memmove(a.x_map, tensor_map(x.data_ptr(), m, k, x.dtype, self.box), 128)
        a.x_shape[0] = a.m = m
        a.x_shape[1] = a.k = k
        a.n = n
        a.w, a.row_scale, a.row_zero, a.token_scale, a.token_sum, a.bias, a.y, a.starts = pointers
        a.experts = experts
        self.start(grid, overlap, torch._C._cuda_getCurrentRawStream(x.device.index))


_maps: dict[tuple, bytes] = {}


def tensor_map(address: int, m: int, k: int, dtype: torch.dtype, tokens: int) -> bytes:
    """The 128 bytes that describe X (m, k) to the copy engine, 128-byte rows of `tokens` tokens."""
    key = (address, m, k, dtype, tokens)
    found = _maps.get(key)
    if found is not None:
        return found
    kind, size = MAP_TYPES[dtype]
    room = (c_ubyte * 192)()
    start = -ctypes.addressof(room) % 64
    call(
        "cuTensorMapEncodeTiled",
        c_void_p(ctypes.addressof(room) + start),
        kind,
        2,
        c_void_p(address),
        (c_uint64 * 2)(k, m),
        (c_uint64 * 1)(k * size),
        (c_uint32 * 2)(128 // size, tokens),
        (c_uint32 * 2)(1, 1),
        0,  # no interleaving
        3,  # swizzle of 128 bytes
        2,  # fetch 128 bytes into the L2
        0,  # rows past m read as zeros
    )
    if len(_maps) >= MAPS:
        _maps.clear()
    _maps[key] = found = bytes(room[start : start + 128])
    return found


@cache
def driver() -> Any:
    """libcuda. Raises OSError where there is none."""
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


def call(name: str, *args: Any) -> None:
    """A driver function; RuntimeError with the driver's own words when it fails."""
    error = getattr(driver(), name)(*args)
    if error:
        raise RuntimeError(f"{name}: {error_text(error)}")


def error_text(error: int) -> str:
    text = ctypes.c_char_p()
    driver().cuGetErrorString(error, ctypes.byref(text))
    return f"{(text.value or b'unknown error').decode()} ({error})"
