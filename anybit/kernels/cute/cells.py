"""Codebook weights as kernels in CuTe DSL read them: how they lie in memory; no DSL needed.

A cell is 16 rows x 32 vectors of one codebook: 512 bytes, vector by vector, and of each vector the
codes of rows (0, 8), (1, 9), ..., (7, 15). All kernels read the same bytes:

- lane l takes 16 bytes: all rows of vector l, the position that is lane l's in a Psumbook;
- `ldmatrix.trans` hands lane 4 g + t the codes of rows g and g + 8 and of vectors 2 t and 2 t + 1
  of every eight: the places of one lane in the A operand of an m16n8k16 product.

A block is the cells of all codebooks for 32 v columns, then the scales of its rows, group by group
in the same order of rows: fp16, in units of a power of two for the row. Blocks of a row tile are
contiguous, so a bulk copy brings any number of them: a chunk.

A block has 1, 2, 4, 8, 16 or 32 scales a row, enough for groups of any number of vectors: scales
are repeated where a group ends inside a block. Codes of fewer than 8 bits are bytes, too.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from anybit.core.format import Format
from anybit.core.packed import Packed
from anybit.errors import InvalidInput
from anybit.kernels.backend import LayerSpec, Prepared
from anybit.kernels.cute.pack import ROW_MULTIPLE

ROWS, VECTORS, CELL = 16, 32, 512
CENTROIDS = 256  # of a table; those beyond 2^b are zeros
CHUNK_BYTES = 1 << 28  # of temporaries, and of a decoded weight


@dataclass(frozen=True)
class Cells:
    """m codebooks of 256 centroids, v weights a vector, `groups` scales of a row in a block."""

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


@cache
def takes(fmt: Format) -> bool:
    """Whether a format's values are rows of a table, and it has no decoder."""
    return fmt.hopper_decode is None and any(entry.table for entry in fmt.entries().values())


def cells_of(fmt: Format) -> Cells | str:
    """How a format with a `lookup` is cut into cells, or the reason why it cannot be."""
    if fmt.lookup is None:
        return f"{fmt.spec}: its values are not looked up in a table"
    if fmt.bits > 8:
        return (
            f"{fmt.spec}: a table of 2^{fmt.bits} centroids does not fit into shared memory, where "
            "kernels look centroids up"
        )
    if fmt.width not in (4, 8, 16):
        return f"{fmt.spec}: codebooks have vectors of 4, 8 or 16 weights here, not of {fmt.width}"
    columns = VECTORS * fmt.width
    return Cells(fmt.books, fmt.width, columns // math.gcd(fmt.group, columns))


def cut(fmt: Format) -> Cells:
    """How a format that is not refused is cut into cells."""
    cells = cells_of(fmt)
    if isinstance(cells, str):
        raise InvalidInput(cells)
    return cells


def refuse(layer: LayerSpec) -> str | None:
    """Why no kernel multiplies a layer of this format and shape, or None."""
    cells = cells_of(layer.format)
    if isinstance(cells, str):
        return cells
    if layer.activation is not None:
        return f"codebooks are multiplied by fp16 and bf16 activations, not by {layer.activation}"
    return None


def refuse_dense() -> str | None:
    """Why `dense` does not run here, or None."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton decodes its weights for many tokens; pip install 'anybit[gpu]'"
    return None


def prepare(packed: Packed, activation: str | None, dtype: torch.dtype | None = None) -> Prepared:
    """The layout is [blocks, row scale fp32, codebook fp16, codebook bf16]; see `pack`."""
    blocks, row_scale, book = pack(packed)
    layout = blocks, row_scale, book.half(), book.bfloat16()
    return Prepared(packed.format, packed.shape, activation, layout)


def dense(prepared: Prepared, dtype: torch.dtype) -> Tensor:
    """The weight (N, K)."""
    from anybit.kernels.triton.cells import decode

    blocks, row_scale, *books = prepared.layout
    groups = cut(prepared.format).groups
    return decode(blocks, row_scale, books[dtype == torch.bfloat16], prepared.shape, groups)


def multiply_decoded(x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
    """x (M, K) -> (M, N) by the library, with `CHUNK_BYTES` of a decoded weight at a time."""
    n, k = prepared.shape
    blocks, row_scale, *books = prepared.layout
    bias = None if bias is None else bias.to(x.dtype)
    y = torch.empty(len(x), n, dtype=x.dtype, device=x.device)
    step = max(1, CHUNK_BYTES // (2 * k * ROW_MULTIPLE)) * ROW_MULTIPLE
    for start in range(0, n, step):
        end = min(start + step, n)
        layout = blocks[start // ROWS : -(-end // ROWS)], row_scale[start:], *books
        part = prepared._replace(shape=(end - start, k), layout=layout)
        w, out = dense(part, x.dtype).T, y[:, start:end]
        if bias is None:
            torch.mm(x, w, out=out)
        else:
            torch.addmm(bias[start:end], x, w, out=out)
    return y


def pack(packed: Packed) -> list[Tensor]:
    """[blocks (row tiles, blocks, bytes) uint8, row scale fp32 (rows padded,), codebook fp32].

    W = cells' centroids * their scale * row scale. The codebook is divided by a power of two that
    no sum of a centroid's magnitudes exceeds, which the row scale gives back: so an inner product
    with v numbers is never larger than they are, and does not overflow their dtype. Rows past N are
    zeros, as the tiles of `lookup.py` want them, and so are the scales of columns past K.
    """
    cells = cut(packed.format)
    assert packed.format.lookup is not None
    n, k = packed.shape
    book = packed.grid[packed.format.lookup].float()
    book = torch.nn.functional.pad(book, (0, 0, 0, CENTROIDS - book.shape[1]))
    reach = 2.0 ** math.ceil(math.log2(max(float(book.abs().sum(-1).max()), 2.0**-24)))
    scale = packed.grid["scale"].float()
    if packed.format.group == 0:
        unit, scale = scale, torch.ones_like(scale)
    else:
        largest = scale.abs().amax(1, keepdim=True)
        unit = torch.exp2(torch.where(largest == 0, 1.0, largest).log2().ceil())
        scale = scale / unit
    count = -(-k // cells.columns)
    unit_columns = cells.columns // cells.groups
    scale = scale.repeat_interleave(-(-k // scale.shape[1] // unit_columns), 1)
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
