"""Codebook kernels for `mma.sync`: which there are, and which one a problem gets on a GPU; no DSL.

A CTA keeps its columns of up to 16 tokens in registers, and the table in shared memory, for all
rows that it multiplies. Where a CTA cannot hold all of K, several share it.
"""

from dataclasses import dataclass, replace
from functools import cache

from anybit.kernels.cute.cells import CENTROIDS, ROWS, VECTORS, Cells
from anybit.kernels.cute.jit import Compiled
from anybit.kernels.cute.launch import CodebookLauncher
from anybit.kernels.mma.tiles import RESERVED, Gpu

ALIGNED = 128  # bytes
MOST_TOKENS = 16  # of a CTA; fewer take as many products, and as many registers
# Warps of a CTA, and registers of a thread for tokens: the others are all taken. More warps hide
# more of a look-up's latency, more tokens bring fewer sums together.
SHAPES = (8, 128), (8, 64)
# Vectors of 16 fill all registers: with more tokens, or more copies of centroids, they spill.
WIDE, WIDE_TOKENS, WIDE_COPIES = 16, 8, 4
# Tokens from which a weight is decoded once, by codebook. Sixteen tokens more cost all look-ups
# again: two bytes of shared memory a weight and codebook. See `notes/mma.md`.
DENSE_FROM = 256
# Of the time that a warp takes for a block of one codebook, estimates: a tile's sums, which meet in
# shared memory, and what is done once where CTAs share K.
MEET, FINISH = 0.3, 4.0


@dataclass(frozen=True)
class CodebookTile:
    """What one CTA multiplies, and how.

    Attributes:
        tokens: 8 or 16.
        warps: of a CTA, which split K.
        blocks: of cells along K whose tokens a warp holds.
        copies: of a centroid, or of its halves of 16 bytes: a lane has its own in a full table.
        stages: of each warp's ring; a stage has a row tile's blocks.
        ctas: that should fit a multiprocessor.
    """

    tokens: int
    warps: int
    blocks: int
    copies: int
    stages: int = 2
    ctas: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def name(self) -> str:
        return (
            f"{self.tokens}tokens_{self.warps}warps_{self.blocks}blocks_{self.copies}copies_"
            f"{self.stages}stages_{self.ctas}ctas"
        )


@dataclass(frozen=True)
class CodebookKernel:
    """One member of the family: everything that is fixed when it is compiled.

    Attributes:
        cells: How the weight lies.
        tile: Of a CTA.
        dtype: Of x, y and the table: "float16" or "bfloat16".
        architecture: What it is compiled for.
        overlap: Whether it may begin before the previous kernel has finished; from sm_90 on.
    """

    cells: Cells
    tile: CodebookTile
    dtype: str
    architecture: str
    overlap: bool = False

    launcher = CodebookLauncher
    batch = 0  # it has no WGMMAs
    classes = ()

    @property
    def name(self) -> str:
        c = self.cells
        overlap = "_overlap" if self.overlap else ""
        target = f"{self.dtype}_{self.architecture}{overlap}"
        return f"codebook_m{c.m}v{c.v}x{c.groups}_{self.tile.name}_{target}"

    @property
    def header(self) -> dict[str, int]:
        return {"threads": self.tile.threads}

    def generate(self) -> Compiled:
        """The kernel, compiled for its architecture; needs CuTe DSL."""
        from anybit.kernels.mma import codebook

        return codebook.Codebook(self).compile()


# Bytes.


def piece_bytes(cells: Cells) -> int:
    """What a lane looks up at once: a centroid, or a half of one."""
    return min(2 * cells.v, 16)


def most_copies(cells: Cells) -> int:
    """With 128 bytes of them, lanes of one pass through shared memory never share a bank."""
    return WIDE_COPIES if cells.v == WIDE else 128 // piece_bytes(cells)


def plane_bytes(tile: CodebookTile, cells: Cells) -> int:
    """Of a table of pieces."""
    return CENTROIDS * tile.copies * piece_bytes(cells)


def table_bytes(tile: CodebookTile, cells: Cells) -> int:
    return cells.m * (2 * cells.v // piece_bytes(cells)) * plane_bytes(tile, cells)


def chunk_bytes(tile: CodebookTile, cells: Cells) -> int:
    """Of a stage."""
    return tile.blocks * cells.block_bytes


def part_bytes(tile: CodebookTile) -> int:
    """Of a warp's sums."""
    return 4 * ROWS * tile.tokens


def shared_bytes(tile: CodebookTile, cells: Cells) -> int:
    """Of a CTA: the table, a ring for each warp, and two tiles' sums of all warps."""
    rings = tile.warps * tile.stages * chunk_bytes(tile, cells)
    total = table_bytes(tile, cells) + rings + 2 * tile.warps * part_bytes(tile)
    return -(-total // ALIGNED) * ALIGNED


# Choices.


def shapes(cells: Cells) -> list[CodebookTile]:
    """Tiles with a full table."""
    tokens = WIDE_TOKENS if cells.v == WIDE else MOST_TOKENS
    each = VECTORS * cells.v // 4  # registers for the tokens of a block
    return [
        CodebookTile(tokens, warps, registers // each, most_copies(cells))
        for warps, registers in SHAPES
        if registers >= each
    ]


@cache
def choose(cells: Cells, gpu: Gpu) -> CodebookTile | None:
    """The tile for a GPU; None where its shared memory is too small for any.

    A table with fewer copies, whose lanes meet in banks, only where a full one does not fit.
    """
    room = min(gpu.shared, gpu.shared_of_sm - RESERVED)
    copies = most_copies(cells)
    while copies > 1:
        for tile in shapes(cells):
            for stages in (4, 3, 2):
                found = replace(tile, copies=copies, stages=stages)
                if shared_bytes(found, cells) <= room:
                    return found
        copies //= 2
    return None


def kernel_for(cells: Cells, gpu: Gpu, dtype: str) -> CodebookKernel | None:
    """The kernel for tokens of this dtype; None where there is none."""
    tile, architecture = choose(cells, gpu), gpu.architecture
    if tile is None or architecture is None:
        return None
    return CodebookKernel(cells, tile, dtype, architecture, gpu.capability[0] == 9)


def decodes(cells: Cells, m: int) -> bool:
    """Whether the weight is decoded once, for the library's product."""
    return m * cells.m >= DENSE_FROM


def grid(
    tile: CodebookTile, cells: Cells, gpu: Gpu, shape: tuple[int, int, int]
) -> tuple[int, int]:
    """CTAs to launch for (M, N, K), and how many of them share K.

    Of all ways to share K, the one whose busiest warp has the least to do.
    """
    m, n, k = shape
    blocks, rows, slices = -(-k // cells.columns), -(-n // ROWS), -(-m // tile.tokens)
    places = gpu.multiprocessors * tile.ctas
    least = -(-blocks // (tile.warps * tile.blocks))

    def teams(splits: int) -> int:
        return min(rows, max(1, places // (splits * slices)))

    def time(splits: int) -> float:
        each = -(-blocks // (splits * tile.warps))
        waves = -(-slices * splits * teams(splits) // places)
        turns = -(-rows // teams(splits)) * waves
        return turns * cells.m * (each + MEET) + FINISH * (splits > 1)

    splits = min(range(least, max(least, blocks // tile.warps) + 1), key=time)
    return slices * splits * teams(splits), splits
