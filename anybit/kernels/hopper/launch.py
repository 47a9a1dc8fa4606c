"""How the Hopper kernels are launched: tensor maps of tokens, and clusters of any size."""

import ctypes
from collections.abc import Mapping
from ctypes import c_int, c_int32, c_ubyte, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from anybit.kernels.cute.driver import LARGE_CLUSTERS, Frame, Launcher, call
from anybit.kernels.cute.launch import CodebookLauncher, GemmArguments, structure

ARCHITECTURE = "sm_90a"
# CUtensorMapDataType, bytes of an element.
MAP_TYPES = {
    torch.int8: (0, 1),
    torch.float8_e4m3fn: (0, 1),
    torch.float16: (6, 2),
    torch.bfloat16: (9, 2),
}


class GemmStructure(ctypes.Structure):
    """`GemmArguments`, with a map of the tokens in the place of their address."""

    _fields_ = [
        ("x_map", c_ubyte * 128),
        ("x_shape", c_int32 * 2),  # m, k
        *structure(GemmArguments)._fields_[1:],
        ("accumulate", c_ubyte),
    ]


class GemmLauncher(Launcher):
    """A kernel of `gemm.py`."""

    arguments = GemmStructure

    def __init__(self, path: Path, device: int):
        super().__init__(path, device)
        self.box: int = self.meta["box"]  # tokens that one copy instruction brings
        self.names = self.names[2:-1]

    def fill(self, frame: Frame, values: Mapping[str, Any]) -> None:
        super().fill(frame, values)
        a, x = frame.arguments, values["x"]
        m, k = x.shape
        ctypes.memmove(a.x_map, tensor_map(x.data_ptr(), m, k, x.dtype, self.box), 128)
        a.x_shape[0], a.x_shape[1], a.accumulate = m, k, 1


class ClusterLauncher(CodebookLauncher):
    """A kernel of `codebook_ring.py`; clusters of any size, and `shared` bytes of shared memory."""

    settings = (*CodebookLauncher.settings, (LARGE_CLUSTERS, 1))

    def __init__(self, path: Path, device: int):
        super().__init__(path, device)
        self.most_clusters = cache(self._most_clusters)

    def _most_clusters(self, cluster: int, shared: int) -> int:
        """Clusters that can be resident at once; 0 where the driver does not tell."""
        frame, count = self.frame(), c_int()
        frame.set_cluster(cluster)
        frame.config.shared = shared
        frame.config.grid[0] = cluster
        frame.config.count = 1  # attributes: the cluster's size, and not what the last launch had
        try:
            call(
                "cuOccupancyMaxActiveClusters",
                ctypes.byref(count),
                self.kernel,
                ctypes.byref(frame.config),
            )
        except RuntimeError:  # a launch says whether it can run
            return 0
        return count.value

    def fill(self, frame: Frame, values: Mapping[str, Any]) -> None:
        super().fill(frame, values)
        frame.set_cluster(values["cluster"])
        frame.config.shared = values["shared"]


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
