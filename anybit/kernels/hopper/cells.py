"""Codebook weights as the Hopper kernels read them, and which kernels there are: no DSL needed.

A cell is 16 rows x 32 vectors of one codebook: 512 bytes, vector by vector, and of each vector the
codes of rows (0, 8), (1, 9), ..., (7, 15). Two kernels read the same bytes:

- lane l takes 16 bytes: all rows of vector l, the position that is lane l's in a Psumbook;
- `ldmatrix.trans` hands lane 4 g + t the codes of rows g and g + 8 and of vectors 2 t and 2 t + 1
  of every eight: the places of one lane in the A operand of an m16n8k16 product.

A block is the cells of all codebooks for 32 v columns, then the scales of its rows, group by group
in the same order of rows: fp16, in units of a power of two for the row. Blocks of a row tile are
contiguous, so a bulk copy brings any number of them: a chunk.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from anybit.core.format import Format
from anybit.core.packed import Packed
from anybit.errors import InvalidInput
from anybit.kernels.cute.jit import Compiled
from anybit.kernels.cute.pack import ROW_MULTIPLE
from anybit.kernels.hopper.launch import ARCHITECTURE, CodebookArguments

ROWS, VECTORS, CELL = 16, 32, 512
CHUNK_BYTES = 1 << 28  # of temporaries while packing


@dataclass(frozen=True)
class Cells:
    """m codebooks of 256 centroids, v weights a vector, `groups` scales in a block."""

    m: int
    v: int
    groups: int

    @property
    def columns(self) -> int:
        """Of a block."""
        return VECTORS * self.v

    @property
    def block_bytes(self) -> int:
        return CELL * self.m + 2 * ROWS * self.groups


def cells_of(fmt: Format) -> Cells | str:
    """How a format with a `lookup` is cut into cells, or the reason why it cannot be."""
    if fmt.lookup is None:
        return f"{fmt.spec}: its values are not looked up in a table"
    if fmt.bits != 8:
        return f"{fmt.spec}: codebooks have codes of 8 bits here, not of {fmt.bits}"
    if fmt.width not in (4, 8, 16):
        return f"{fmt.spec}: codebooks have vectors of 4, 8 or 16 weights here, not of {fmt.width}"
    columns = VECTORS * fmt.width
    least = columns // 4  # columns that one register of `ldmatrix` and all lanes stand for
    group = fmt.group or columns
    if group < least or (columns % group and group % columns):
        return (
            f"{fmt.spec}: codebooks with vectors of {fmt.width} share scales among {least}, "
            f"{2 * least} or {columns} columns here, a multiple of {columns}, or a row, not {group}"
        )
    return Cells(fmt.books, fmt.width, max(1, columns // group))


def pack(packed: Packed) -> list[Tensor]:
    """[blocks (row tiles, blocks, bytes) uint8, row scale fp32 (rows padded,), codebook fp32].

    W = cells' centroids * their scale * row scale. The codebook is divided by a power of two that
    no sum of a centroid's magnitudes exceeds, which the row scale gives back: so an inner product
    with v numbers is never larger than they are, and does not overflow their dtype. Rows past N are
    zeros, as the tiles of `lookup.py` want them, and so are the scales of columns past K.
    """
    cells = cells_of(packed.format)
    if isinstance(cells, str):
        raise InvalidInput(cells)
    assert packed.format.lookup is not None
    n, k = packed.shape
    book = packed.grid[packed.format.lookup].float()
    reach = 2.0 ** math.ceil(math.log2(max(float(book.abs().sum(-1).max()), 2.0**-24)))
    scale = packed.grid["scale"].float()
    if packed.format.group == 0:
        unit, scale = scale, torch.ones_like(scale)
    else:
        largest = scale.abs().amax(1, keepdim=True)
        unit = torch.exp2(torch.where(largest == 0, 1.0, largest).log2().ceil())
        scale = scale / unit
    count = -(-k // cells.columns)
    if scale.shape[1] == 1 or packed.format.group > cells.columns:  # one for several blocks
        scale = scale.repeat_interleave(-(-count // scale.shape[1]), 1)
    scale = torch.nn.functional.pad(scale, (0, count * cells.groups - scale.shape[1]))
    tiles = -(-n // ROWS)
    codes, of_row = packed.codes(), count * VECTORS * cells.m
    shape = -(-n // ROW_MULTIPLE) * ROW_MULTIPLE // ROWS, count, cells.block_bytes
    blocks = torch.zeros(shape, dtype=torch.uint8, device=codes.device)
    step = max(1, CHUNK_BYTES // (ROWS * k))
    size = CELL * cells.m
    for start in range(0, tiles, step):
        rows = slice(start * ROWS, min(n, (start + step) * ROWS))
        out = blocks[start : min(tiles, start + step)]
        part = torch.nn.functional.pad(codes[rows], (0, of_row - codes.shape[1]))
        c = pad(part).view(-1, 2, 8, count, VECTORS, cells.m)
        out[..., :size] = c.permute(0, 3, 5, 4, 2, 1).reshape(-1, count, size)
        s = pad(scale[rows].half()).view(-1, 2, 8, count, cells.groups)
        s = s.permute(0, 3, 4, 2, 1).reshape(-1, count, cells.groups * ROWS)
        out[..., size:] = s.contiguous().view(torch.uint8)
    return [blocks, pad(unit.flatten() * reach, ROW_MULTIPLE).contiguous(), book / reach]


def pad(rows: Tensor, multiple: int = ROWS) -> Tensor:
    """Zero rows at the end, up to whole tiles."""
    missing = -rows.shape[0] % multiple
    return torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:]))) if missing else rows


WINDOW = 1024  # where a CTA's dynamic shared memory starts in its window of shared addresses
BARRIERS = 1024  # bytes in front of everything else
MET = BARRIERS - 32  # barriers of sums that arrive; those of the rings come first
TABLE = 65536  # 256 entries of 256 bytes: a code is the second byte of its entry's address


@dataclass(frozen=True)
class CodebookKernel:
    """One compiled member of the family.

    tokens: 1 or 2 make a Psumbook of them; 8 or 16 are multiplied on the matrix unit.
    dtype: of x, y and the tables, "float16" or "bfloat16". columns: of a chunk, which a warp reads
    at once. chunks: of K that one CTA (Psumbook) or one warp holds at most. stages: chunks in
    flight for every warp. ctas: resident on a
    multiprocessor; the second one is the next kernel's, and starts while this one ends.
    """

    cells: Cells
    tokens: int
    dtype: str
    columns: int = 512
    chunks: int = 1
    warps: int = 16
    stages: int = 2
    ctas: int = 1

    architecture = ARCHITECTURE
    arguments = CodebookArguments
    batch = 0  # it has no WGMMAs
    classes = ()

    @property
    def psumbook(self) -> bool:
        return self.tokens <= 2

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def blocks(self) -> int:
        """Of a chunk."""
        return self.columns // self.cells.columns

    @property
    def chunk_bytes(self) -> int:
        return self.blocks * self.cells.block_bytes

    @property
    def reach(self) -> int:
        """Columns that a CTA can hold."""
        return self.columns * self.chunks * (1 if self.psumbook else self.warps)

    @property
    def planes(self) -> int:
        """Half tables of 256 x 32 words: all cells and tokens of the chunks, two to a word."""
        return -(-self.chunks * self.blocks * self.cells.m * self.tokens // 2)

    @property
    def tables(self) -> int:
        """Tables of 64 KB: Psumbook's planes, or copies of the centroids for every lane."""
        if self.psumbook:
            return -(-self.planes // 2)
        return -(-self.cells.m // 2) if self.cells.v == 8 else self.cells.m

    @property
    def table_at(self) -> int:
        return WINDOW + BARRIERS

    @property
    def ring_at(self) -> int:
        return self.table_at + self.tables * TABLE

    @property
    def sums_at(self) -> int:
        return self.ring_at + self.warps * self.stages * self.chunk_bytes

    def shared(self, cluster: int = 1, tiles: int = 1) -> int:
        """Bytes of dynamic shared memory, for clusters with `tiles` row tiles each."""
        if self.psumbook:  # sums of a tile from every CTA, in the one that owns it
            sums = -(-tiles // cluster) * cluster * 4 * ROWS * self.tokens
        else:  # of two tiles from every warp, and from every CTA
            parts = self.warps + (cluster if cluster > 1 else 0)
            sums = 2 * parts * 4 * ROWS * self.tokens
        return self.sums_at + sums - WINDOW

    @property
    def name(self) -> str:
        c = self.cells
        kind = "psumbook" if self.psumbook else "codebook"
        return (
            f"{kind}_m{c.m}v{c.v}x{c.groups}_{self.dtype}_{self.tokens}tokens_{self.chunks}x{self.columns}_"
            f"{self.warps}warps_{self.stages}stages_{self.ctas}ctas"
        )

    @property
    def header(self) -> dict[str, int]:
        return {"threads": self.threads, "cluster": 1}

    def generate(self) -> Compiled:
        """The kernel, compiled for sm_90a; needs CuTe DSL."""
        from anybit.kernels.hopper import codebook, psumbook

        program = psumbook.Psumbook if self.psumbook else codebook.Codebook
        return program(self).compile()
