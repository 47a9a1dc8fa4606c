"""What launches of tiles do whose warps split K, as `choice.py` tells their time from it."""

from anybit.kernels.choice import Work
from anybit.kernels.cute.decode import Decoder
from anybit.kernels.cute.pack import k_tiles, packed_bytes
from anybit.kernels.mma.tiles import Gpu, Tile, stage_bytes, tiles_of


def of_narrow(tile: Tile, decoder: Decoder, gpu: Gpu, m: int, n: int, k: int) -> Work:
    """What a launch of a narrow tile does."""
    count, places = tiles_of(tile, m, n), tile.ctas * gpu.multiprocessors
    ctas, busiest = -(-min(count, places) // gpu.multiprocessors), -(-count // gpu.multiprocessors)
    # Where issue binds, fewer CTAs in the last turn take less.
    turns = busiest / ctas if decoder.table_bytes else -(-count // places)
    return of_split(
        f"mma {kind_of(decoder)}",
        tile,
        decoder,
        k,
        turns,
        ctas,
        read=packed_bytes(n, k, decoder) + m * k * decoder.slot / 8 + 2 * m * n,
        uneven=max(1, turns * ctas * gpu.multiprocessors / count),
    )


def kind_of(decoder: Decoder) -> str:
    """Whose costs tiles have that split K."""
    if decoder.table_bytes:
        return f"table {decoder.slot}"
    return "slow" if decoder.cost > 2 else str(decoder.slot)


def of_split(
    kind: str,
    tile: Tile,
    decoder: Decoder,
    k: int,
    turns: float,
    ctas: int,
    read: float,
    uneven: float = 1,
) -> Work:
    """What a launch does whose warps split K: a multiprocessor has `ctas` at once, in `turns`."""
    every, columns = turns * ctas, max(8, tile.tokens)
    return Work(
        kind=kind,
        steps=turns * -(-k_tiles(k) // tile.warps),
        beside=ctas * tile.warps,
        multiply=tile.slices * columns * decoder.slot,
        decode=tile.slices * decoder.instructions,
        copied=every * k_tiles(k) * stage_bytes(tile, decoder),
        read=read,
        uneven=uneven,
        ends=every * tile.slices * 16 * columns,
        turns=every * tile.warps,
    )
