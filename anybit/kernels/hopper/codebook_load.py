"""Load and launch the codebook kernels; see `load.py`."""

import ctypes
from ctypes import c_int, c_int32, c_uint64
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from anybit.kernels.hopper.load import SHARED_LIMIT, Launcher, call
from anybit.kernels.hopper.tiles import MAX_SHARED

CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
LARGE_CLUSTERS = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED


class Arguments(ctypes.Structure):
    """The parameters of the kernels, in the order of `codebook_build.PARAMETERS`."""

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


class Function(Launcher):
    """A loaded kernel on one device."""

    def __init__(self, path: Path, device: int):
        super().__init__(path, device, Arguments())
        for attribute, value in ((SHARED_LIMIT, MAX_SHARED), (CARVEOUT, 100), (LARGE_CLUSTERS, 1)):
            call("cuKernelSetAttribute", attribute, value, self.kernel, device)
        self.most_clusters = cache(self._most_clusters)

    def _most_clusters(self, cluster: int, shared: int) -> int:
        """Clusters that can be resident at once."""
        self.set_cluster(cluster)
        self.config.shared = shared
        self.config.grid[0] = cluster
        count = c_int()
        call(
            "cuOccupancyMaxActiveClusters",
            ctypes.byref(count), self.kernel, ctypes.byref(self.config),
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
        a = self.arguments
        a.x = x.data_ptr()
        a.w, a.book, a.row_scale, a.bias, a.y = pointers
        a.m, a.k = x.shape
        a.n, a.cluster, a.early = n, cluster, overlap
        self.set_cluster(cluster)
        self.config.shared = shared
        self.start(teams * cluster, overlap, torch._C._cuda_getCurrentRawStream(x.device.index))
