"""What the Hopper kernels are launched with: their parameters, and tensor maps of tokens."""

import ctypes
from ctypes import c_int, c_int32, c_ubyte, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from anybit.kernels.cute.driver import CARVEOUT, LARGE_CLUSTERS, Launcher, address_of, call

ARCHITECTURE = "sm_90a"
# CUtensorMapDataType, bytes of an element.
MAP_TYPES = {
    torch.int8: (0, 1),
    torch.float8_e4m3fn: (0, 1),
    torch.float16: (6, 2),
    torch.bfloat16: (9, 2),
}


class GemmArguments(ctypes.Structure):
    """The parameters of every kernel of `gemm.py`.

    zero_or_book: zero points of rows; for look-ups, the codebook. stride: from a token's outputs to
    the next token's, of which these n may be some.
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
        ("work", c_uint64),
        ("counters", c_uint64),
        ("m", c_int32),
        ("n", c_int32),
        ("stride", c_int32),
        ("k", c_int32),
        ("experts", c_int32),
        ("accumulate", c_ubyte),
    ]


class CodebookArguments(ctypes.Structure):
    """The parameters of every kernel of `ring.py`; splits: clusters that share K."""

    _fields_ = [
        ("x", c_uint64),
        ("w", c_uint64),
        ("book", c_uint64),
        ("row_scale", c_uint64),
        ("bias", c_uint64),
        ("y", c_uint64),
        ("work", c_uint64),
        ("counters", c_uint64),
        ("m", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("cluster", c_int32),
        ("splits", c_int32),
        ("early", c_int32),
    ]


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
        workspace: tuple[int, int] = (0, 0),
        stride: int = 0,
    ) -> None:
        """Launch on the current stream of x's device.

        pointers: w, row_scale, zero_or_book, token_scale, token_sum, bias, y and starts, 0 for
        none. overlap: begin before the previous kernel of the stream has finished. workspace: of
        tiles that CTAs share, and counters (see `shares.py`). stride: of y, a multiple of 8 like n;
        0 for n.
        """
        frame = self.frame()
        a = frame.arguments
        m, k = x.shape
        ctypes.memmove(a.x_map, tensor_map(x.data_ptr(), m, k, x.dtype, self.box), 128)
        a.x_shape[0] = a.m = m
        a.x_shape[1] = a.k = k
        a.n, a.stride = n, stride or n
        (
            a.w, a.row_scale, a.zero_or_book, a.token_scale, a.token_sum, a.bias, a.y, a.starts,
        ) = pointers  # fmt: skip
        a.work, a.counters = workspace
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
        """Clusters that can be resident at once; 0 where the driver does not tell."""
        frame, count = self.frame(), c_int()
        frame.set_cluster(cluster)
        frame.config.shared = shared
        frame.config.grid[0] = cluster
        frame.config.count = 1  # attributes: the cluster's size, and not what the last launch had
        try:
            call(
                "cuOccupancyMaxActiveClusters",
                ctypes.byref(count), self.kernel, ctypes.byref(frame.config),
            )  # fmt: skip
        except RuntimeError:  # a launch says whether it can run
            return 0
        return count.value

    def launch(
        self,
        x: Tensor,
        tensors: tuple[Tensor | int | None, ...],
        n: int,
        cluster: int,
        splits: int,
        teams: int,
        shared: int,
        overlap: bool = True,
    ) -> None:
        """Launch `teams` times `splits` clusters on the current stream of x's device.

        tensors: w, codebook, row_scale, bias, y, and what clusters that share K want: a workspace
        and the address of counters; None for none. shared: bytes of shared memory.
        """
        frame = self.frame()
        a = frame.arguments
        a.x = x.data_ptr()
        (
            a.w, a.book, a.row_scale, a.bias, a.y, a.work, a.counters,
        ) = map(address_of, tensors)  # fmt: skip
        a.m, a.k = x.shape
        a.n, a.cluster, a.splits, a.early = n, cluster, splits, overlap
        frame.set_cluster(cluster)
        frame.config.shared = shared
        frame.start(teams * splits * cluster, overlap, x.device.index)


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
