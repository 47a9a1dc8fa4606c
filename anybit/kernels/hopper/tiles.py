"""The kernels of the Hopper family, and which one a problem gets: data, not code."""

import math
from dataclasses import dataclass

from anybit.kernels.hopper.decode import Decoder

MULTIPROCESSORS = 132  # of an H100 or H200; the tables below were measured there
MAX_SHARED = 232_448  # bytes of shared memory that one CTA may have
SHARED_OF_SM = 233_472  # bytes that all CTAs of a multiprocessor share
RESERVED = 1024  # bytes of it that each CTA costs beside its own
MOST_STAGES = 12


@dataclass(frozen=True)
class Tile:
    """What one CTA multiplies, and how.

    tokens: 8 to 256. rows: weight rows, 128 or 256. ctas: resident on a multiprocessor.
    cluster: CTAs that share a tile and split K. stages: K tiles in flight; 0 means all that fit.
    """

    tokens: int
    rows: int = 128
    ctas: int = 1
    cluster: int = 1
    stages: int = 0

    @property
    def wide(self) -> bool:
        """Whether consumers need more registers than 288 threads leave them."""
        return self.tokens * self.rows // 128 >= 256

    @property
    def threads(self) -> int:
        """Two consumer warpgroups and a producer warp, or a warpgroup that gives registers away.

        288 threads cost registers like 384, so they get 168 each at most; with `setmaxnreg` the
        consumers get 232.
        """
        return 384 if self.wide else 288

    @property
    def name(self) -> str:
        cluster = f"_cluster{self.cluster}" if self.cluster > 1 else ""
        return f"{self.rows}x{self.tokens}_{self.stages}stages_{self.ctas}ctas{cluster}"


@dataclass(frozen=True)
class Kernel:
    """One member of the family: everything that is fixed when it is compiled.

    output: "float16" or "bfloat16". overlap: False is the ablation that decodes and multiplies in
    turns (LiquidGEMM, figure 13).
    """

    decoder: Decoder
    tile: Tile
    output: str
    overlap: bool = True

    @property
    def activation(self) -> str:
        """The dtype of X."""
        return "int8" if self.decoder.operand == "uint8" else self.decoder.operand


FEW = [Tile(tokens, ctas=2, cluster=c) for tokens in (8, 16, 32, 64) for c in (1, 2, 4, 8)]
MANY = [Tile(128, cluster=c) for c in (1, 2, 4)] + [Tile(256)]
TALL = [Tile(128, rows=256)]  # its fragments of 16-bit operands would not fit into registers


def family(decoder: Decoder) -> list[Tile]:
    """The tiles that a decoder is compiled for."""
    return [fitted(tile, decoder) for tile in FEW + MANY + (TALL if decoder.slot == 8 else [])]


def fitted(tile: Tile, decoder: Decoder) -> Tile:
    """The tile with as many stages as fit into shared memory."""
    if tile.stages:
        return tile
    stage = decoder.blob_bytes * tile.rows // 128 + tile.tokens * 128 * decoder.slot // 8
    fixed = 1024 + 8 * 48 * min(tile.tokens, 32) + 16 * tile.tokens
    room = min(MAX_SHARED, SHARED_OF_SM // tile.ctas - RESERVED) // 1024 * 1024 - fixed
    return Tile(tile.tokens, tile.rows, tile.ctas, tile.cluster, min(MOST_STAGES, room // stage))


def grid(tile: Tile, m: int, n: int) -> int:
    """CTAs to launch: one cluster a tile, or, when tiles are many, as few waves as can be."""
    tiles = -(-n // tile.rows) * -(-m // tile.tokens)
    slots = MULTIPROCESSORS * tile.ctas // tile.cluster
    waves = -(-tiles // slots)
    return -(-tiles // waves) * tile.cluster


def choose(decoder: Decoder, m: int, n: int, k: int) -> Tile:
    """The tile for y (m, n) = x (m, k) w (n, k)^T."""
    tokens = 8 if m <= 8 else min(64, 2 ** math.ceil(math.log2(m)))
    if m > 64:
        tile = Tile(256) if decoder.slot == 8 and m >= 1024 else Tile(128)
    else:
        tile = Tile(tokens, ctas=2)
    if tile.tokens <= 128:
        tiles = -(-n // 128) * -(-m // tile.tokens)
        most = 8 if tile.tokens <= 64 else 4
        while (
            tile.cluster < most
            and tiles * tile.cluster * 2 <= MULTIPROCESSORS * tile.ctas
            and k // 128 >= tile.cluster * 2
        ):
            tile = Tile(tile.tokens, tile.rows, tile.ctas, tile.cluster * 2)
    return fitted(tile, decoder)
