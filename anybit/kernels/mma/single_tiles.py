"""The tile of `single.py` for a weight: a token that comes in 16 bits."""

from dataclasses import replace

from anybit.kernels.cute.decode import K_TILE, Decoder
from anybit.kernels.cute.pack import k_tiles
from anybit.kernels.mma import tiles
from anybit.kernels.mma.tiles import Gpu, Tile

COLUMNS = (4096, 6144, 8192, 12288, 16384, 20480, 24576, 32768)  # for which there are kernels
MOST_LOTS = 16  # pieces of a token that a thread's registers hold


def quantizing(few: Tile, decoder: Decoder, gpu: Gpu, k: int) -> Tile | None:
    """A narrow tile that quantizes a token of K columns, as often on a multiprocessor; or None.

    None: too long a token, or one whose pieces of 8 columns are not whole.
    """
    columns = next((c for c in COLUMNS if c >= k_tiles(k) * K_TILE), 0)
    if k % 8 or not columns or columns > MOST_LOTS * 2 * K_TILE * few.warps:
        return None
    tile = replace(few, tokens=1, kind="single", columns=columns)
    # Beside a table, more stages than the rule's let tokens wait behind weights.
    most = few.stages if decoder.table_bytes else 5
    found = tiles.fitted(tile, decoder, gpu, 2, most)
    return found if found and found.ctas == few.ctas else None
