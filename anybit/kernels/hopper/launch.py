"""Load kernels with the CUDA driver and launch them: no DSL, no CUDA toolkit.

ctypes on libcuda, because a launch costs the host less this way than through `cuda.bindings`:
the parameters are one struct, tensor maps are cached, and nothing is built anew. Any thread may
launch: the driver is called without the interpreter lock, so each fills structs of its own.
"""

import ctypes
import json
import os
import threading
from ctypes import c_int, c_int32, c_ubyte, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
SHARED_LIMIT = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
LARGE_CLUSTERS = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
# CUtensorMapDataType, bytes of an element.
MAP_TYPES = {
    torch.int8: (0, 1),
    torch.float8_e4m3fn: (0, 1),
    torch.float16: (6, 2),
    torch.bfloat16: (9, 2),
}


class GemmArguments(ctypes.Structure):
    """The parameters of every kernel of `gemm.py`.

    zero_or_book: zero points of rows; for look-ups, the codebook.
    """

    _fields_ = [
        ("x_map", c_ubyte * 128),
        ("x_shape", c_int32 * 2),  # m, k
        ("w", c_uint64),
        ("row_scale", c_uint64),
        ("zero_or_book", c_uint64),
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


class CodebookArguments(ctypes.Structure):
    """The parameters of every kernel of `ring.py`."""

    _fields_ = [
        ("x", c_uint64),
        ("w", c_uint64),
        ("book", c_uint64),
        ("row_scale", c_uint64),
        ("bias", c_uint64),
        ("y", c_uint64),
        ("m", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("cluster", c_int32),
        ("early", c_int32),
    ]


def sizes(arguments: type[ctypes.Structure]) -> list[int]:
    """Bytes of each parameter."""
    return [getattr(arguments, field[0]).size for field in arguments._fields_]


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

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


class Frame:
    """What one thread hands to the driver for a kernel; the driver copies it at the launch."""

    def __init__(self, kernel: c_void_p, arguments: ctypes.Structure, meta: dict[str, Any]):
        self.arguments: Any = arguments
        self.attributes = (Attribute * 2)()
        self.attributes[0].id = CLUSTER
        self.set_cluster(meta.get("cluster", 1))
        self.attributes[1].id = SERIALIZATION
        self.attributes[1].value[0] = 1
        self.config = Config(attributes=self.attributes, count=2, shared=meta["shared"])
        self.config.block[:] = (meta["threads"], 1, 1)
        self.config.grid[:] = (1, 1, 1)
        # By address, one by one: where the kernel wants them is for the driver to know.
        start = ctypes.addressof(arguments)
        offsets = [getattr(type(arguments), field[0]).offset for field in arguments._fields_]
        self.parameters = (c_void_p * len(offsets))(*(start + offset for offset in offsets))
        self.launcher = driver().cuLaunchKernelEx
        self.launch_arguments = (ctypes.byref(self.config), kernel, self.parameters, None)

    def set_cluster(self, ctas: int) -> None:
        self.attributes[0].value[:3] = (ctas, 1, 1)

    def start(self, grid: int, overlap: bool, device: int) -> None:
        """Launch on the device's current stream.

        overlap: begin before the previous kernel of the stream has finished.
        """
        config = self.config
        config.grid[0] = grid
        config.stream = torch._C._cuda_getCurrentRawStream(device)
        config.count = 2 if overlap else 1
        error = self.launcher(*self.launch_arguments)
        if error:
            raise RuntimeError(f"cuLaunchKernelEx: {error_text(error)}")


class Launcher:
    """A loaded kernel on one device, with a frame for each thread that launches it."""

    arguments: ClassVar[type[ctypes.Structure]]

    def __init__(self, path: Path, device: int):
        header, _, cubin = path.read_bytes().partition(b"\n")
        self.meta = json.loads(header)
        library, self.kernel = c_void_p(), c_void_p()
        call("cuLibraryLoadData", ctypes.byref(library), cubin, None, None, 0, None, None, 0)
        call("cuLibraryGetKernel", ctypes.byref(self.kernel), library, self.meta["entry"].encode())
        call("cuKernelSetAttribute", SHARED_LIMIT, self.meta["shared"], self.kernel, device)
        self.local = threading.local()

    def frame(self) -> Frame:
        """This thread's."""
        try:
            frame: Frame = self.local.frame
        except AttributeError:
            frame = self.local.frame = Frame(self.kernel, self.arguments(), self.meta)
        return frame


class GemmLauncher(Launcher):
    """A kernel of `gemm.py`."""

    arguments = GemmArguments

    def __init__(self, path: Path, device: int):
        super().__init__(path, device)
        self.box: int = self.meta["box"]  # tokens that one copy instruction brings

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

        pointers: w, row_scale, zero_or_book, token_scale, token_sum, bias, y and starts, 0 for
        none. overlap: begin before the previous kernel of the stream has finished.
        """
        frame = self.frame()
        a = frame.arguments
        m, k = x.shape
        ctypes.memmove(a.x_map, tensor_map(x.data_ptr(), m, k, x.dtype, self.box), 128)
        a.x_shape[0] = a.m = m
        a.x_shape[1] = a.k = k
        a.n = n
        (
            a.w, a.row_scale, a.zero_or_book, a.token_scale, a.token_sum, a.bias, a.y, a.starts,
        ) = pointers  # fmt: skip
        a.experts = experts
        a.accumulate = 1
        frame.start(grid, overlap, x.device.index)


class CodebookLauncher(Launcher):
    """A kernel of `ring.py`."""

    arguments = CodebookArguments

    def __init__(self, path: Path, device: int):
        super().__init__(path, device)
        for attribute, value in ((CARVEOUT, 100), (LARGE_CLUSTERS, 1)):
            call("cuKernelSetAttribute", attribute, value, self.kernel, device)
        self.most_clusters = cache(self._most_clusters)

    def _most_clusters(self, cluster: int, shared: int) -> int:
        """Clusters that can be resident at once."""
        frame, count = self.frame(), c_int()
        frame.set_cluster(cluster)
        frame.config.shared = shared
        frame.config.grid[0] = cluster
        call(
            "cuOccupancyMaxActiveClusters",
            ctypes.byref(count), self.kernel, ctypes.byref(frame.config),
        )  # fmt: skip
        return count.value

    def launch(
        self,
        x: Tensor,
        pointers: tuple[int, int, int, int, int],
        n: int,
        cluster: int,
        teams: int,
        shared: int,
        overlap: bool = True,
    ) -> None:
        """Launch `teams` clusters on the current stream of x's device.

        pointers: w, codebook, row_scale, bias and y, 0 for none. shared: bytes of shared memory.
        """
        frame = self.frame()
        a = frame.arguments
        a.x = x.data_ptr()
        a.w, a.book, a.row_scale, a.bias, a.y = pointers
        a.m, a.k = x.shape
        a.n, a.cluster, a.early = n, cluster, overlap
        frame.set_cluster(cluster)
        frame.config.shared = shared
        frame.start(teams * cluster, overlap, x.device.index)


@lru_cache(4096)
def tensor_map(address: int, m: int, k: int, dtype: torch.dtype, tokens: int) -> bytes:
    """The 128 bytes that describe X (m, k) to the copy engine, 128-byte rows of `tokens` tokens."""
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
    return bytes(room[start : start + 128])


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
