"""Load kernels with the CUDA driver and launch them: no DSL, no CUDA toolkit.

ctypes on libcuda, because a launch costs the host less this way than through `cuda.bindings`:
the parameters are one struct, tensor maps are cached, and nothing is built anew. Any thread may
launch: the driver is called without the interpreter lock, so each fills structs of its own.
"""

import ctypes
import json
import os
import threading
from collections.abc import Mapping
from ctypes import c_uint, c_uint32, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch

SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
SHARED_LIMIT = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
LARGE_CLUSTERS = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED


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
        clusters = "cluster" in meta  # GPUs before sm_90 have none
        self.attributes = (Attribute * (clusters + 1))()
        if clusters:
            self.attributes[0].id = CLUSTER
            self.set_cluster(meta["cluster"])
        self.attributes[clusters].id = SERIALIZATION
        self.attributes[clusters].value[0] = 1
        self.without_overlap = int(clusters)  # attributes
        self.config = Config(attributes=self.attributes, shared=meta["shared"])
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
        config.count = self.without_overlap + overlap
        error = self.launcher(*self.launch_arguments)
        if error:
            raise RuntimeError(f"cuLaunchKernelEx: {error_text(error)}")


class Launcher:
    """A loaded kernel on one device, with a frame for each thread that launches it.

    Attributes:
        arguments: The struct of its parameters.
        settings: (CUfunction_attribute, value) of the kernel, beside its shared memory.
    """

    arguments: ClassVar[type[ctypes.Structure]]
    settings: ClassVar[tuple[tuple[int, int], ...]] = ()

    def __init__(self, path: Path, device: int):
        self.device = device
        header, _, cubin = path.read_bytes().partition(b"\n")
        self.meta = json.loads(header)
        library, self.kernel = c_void_p(), c_void_p()
        call("cuLibraryLoadData", ctypes.byref(library), cubin, None, None, 0, None, None, 0)
        call("cuLibraryGetKernel", ctypes.byref(self.kernel), library, self.meta["entry"].encode())
        for attribute, value in ((SHARED_LIMIT, self.meta["shared"]), *self.settings):
            call("cuKernelSetAttribute", attribute, value, self.kernel, device)
        self.names = [field[0] for field in self.arguments._fields_]
        self.local = threading.local()

    def launch(self, values: Mapping[str, Any], grid: int, overlap: bool) -> None:
        """Launch on the device's current stream.

        Args:
            values: Tensors, addresses and numbers by the names of parameters; None is address 0.
            grid: CTAs.
            overlap: Begin before the previous kernel of the stream has finished; the kernel must be
                made for that.
        """
        frame = self.frame()
        self.fill(frame, values)
        frame.start(grid, overlap, self.device)

    def fill(self, frame: Frame, values: Mapping[str, Any]) -> None:
        """Write the parameters."""
        for name in self.names:
            what = values[name]
            address = what if isinstance(what, int) else 0 if what is None else what.data_ptr()
            setattr(frame.arguments, name, address)

    def frame(self) -> Frame:
        """This thread's."""
        try:
            frame: Frame = self.local.frame
        except AttributeError:
            frame = self.local.frame = Frame(self.kernel, self.arguments(), self.meta)
        return frame


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


@cache
def driver_version() -> int:
    """The CUDA version of the driver, such as 13000."""
    version = ctypes.c_int()
    call("cuDriverGetVersion", ctypes.byref(version))
    return version.value
