"""The tiles of the Hopper family, what room they take, and what a launch of one does."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import gcd

from anybit.kernels.choice import Work
from anybit.kernels.cute.decode import K_TILE, Decoder
from anybit.kernels.cute.operands import SPANS
from anybit.kernels.cute.pack import ROWS, k_tiles, packed_bytes
from anybit.kernels.hopper.chip import H200, Chip
from anybit.kernels.hopper.tile import Tile, slow
from anybit.kernels.mma.tiles import Gpu

MAX_SHARED = 232_448  # bytes of shared memory that one CTA may have
SHARED_OF_SM = 233_472  # bytes that all CTAs of a multiprocessor share
RESERVED = 1024  # bytes of it that each CTA costs beside its own
MOST_STAGES = 12
EXPERT_WORDS = 2 * SPANS + 1  # of spans of experts: starts of tokens, ends of tiles of tokens
LEAST_STEPS = 14  # K tiles that a CTA of a cluster of 3 or 8 should have
EVEN = 85  # percent of the CTAs at least that share tiles
LEAST_UNITS, MOST_SHARERS = 4, 8  # K tiles that a CTA should have of a shared tile, and its CTAs
MOST_HELD = 64  # tokens that one tile holds, unless the weight is small


def suited(tiles: Sequence[Tile], decoder: Decoder) -> tuple[Tile, ...]:
    """The tiles without those that would spill beside a crowded decoder, or a slow one."""
    if decoder.crowded:
        converted = decoder.operand == "int8" and decoder.entries > 1
        most = 64 if converted else 128
        tiles = [t for t in tiles if t.tokens <= most and t.rows == ROWS]
    if slow(decoder):  # 256 tokens of bytes halve the decoding
        fit = [t for t in tiles if t.rows == ROWS and t.ctas < 3 and t.tokens not in (96, 192)]
        alone = [replace(t, ctas=1) for t in fit]
        return tuple(dict.fromkeys(alone))
    return tuple(replace(t, ctas=1) if decoder.crowded and t.tokens == 64 else t for t in tiles)


@cache
def wanted(decoder: Decoder) -> tuple[Tile, ...]:
    """Tiles that win somewhere by over 3 %, and whose place no other can take.

    As timed (benchmarks/results/h200_tiles.csv), and as the costs have it between those problems.
    """
    small = {16: (1, 2, 6), 32: (1, 4, 6), 64: (2,)}  # tokens: CTAs that split K
    large = [Tile(t, late=True) for t in (96, 128, 192)] + [Tile(128, split=2)]
    shares = [Tile(16, ctas=2), Tile(32, ctas=2), Tile(64), Tile(128, late=True)]
    if slow(decoder):
        small = {32: (1, 4, 6), 64: (1, 2)} | ({16: (1, 6)} if decoder.slot == 8 else {})
        large = [Tile(128, late=True), Tile(128, split=2), wide(decoder)]
        large += [replace(wide(decoder), split=2, late=False)] * (decoder.slot == 16)
        shares = [*shares[decoder.slot == 16 :], wide(decoder)]
    elif decoder.slot == 8:
        small = {16: (1,), 32: (1, 2, 4, 6), 64: (1, 2, 3)}
        if has_mma(decoder):
            shares = shares[2:]
        else:
            small |= {8: (1, 2, 6), 16: (1, 2, 4, 6)}
        large += [Tile(64, rows=256), Tile(128, split=3), tall(decoder), Tile(256, late=True)]
        shares += [Tile(256, late=True)]
        large += [Tile(64, ctas=2)] * bool(decoder.table_bytes)
    else:
        large += [Tile(64, ctas=2), Tile(96, split=2)]
        large += [tall(decoder)]
        shares += [Tile(96)]
        if decoder.table_bytes:  # look-ups do not hide under fewer tokens
            large += [wide(decoder), replace(wide(decoder), split=2, late=False)]
            shares += [wide(decoder)]
        else:  # these fill waves that others leave open
            large += [Tile(176, late=True)]
    # Half of the room, where a second CTA just does not fit: the next launch's finds the rest.
    pair = Tile(64, ctas=2)
    half = decoder.slot == 8 and places(fitted(pair, decoder), decoder) < 2
    few = [
        Tile(t, ctas=2 if t < 64 or half else 1, split=s)
        for t, every in small.items()
        for s in every
    ]
    every = suited([*few, *large, *(replace(t, stream_k=True) for t in shares)], decoder)
    return tuple(dict.fromkeys(every))


def tall(decoder: Decoder) -> Tile:
    """256 rows of 128 tokens. Stages of half a K tile make 16-bit operands 1 to 3 % faster."""
    columns = K_TILE // 2 if decoder.slot == 16 else K_TILE
    return Tile(128, rows=256, columns=columns, late=True)


def wide(decoder: Decoder) -> Tile:
    """256 tokens. Of 16 bits, stages of half a K tile where whole ones would leave two."""
    whole = Tile(256, late=True)
    few = decoder.slot == 16 and fitted(whole, decoder).stages < 3
    return replace(whole, columns=K_TILE // 2) if few else whole


@cache
def family(decoder: Decoder) -> tuple[Tile, ...]:
    """The tiles that a decoder is compiled for."""
    return tuple(fitted(tile, decoder) for tile in wanted(decoder))


@cache
def fitted(tile: Tile, decoder: Decoder, grouped: bool = False) -> Tile:
    """The tile with as many stages as fit into the shared memory of a CTA; but see `places`."""
    if tile.stages:
        return tile
    room = min(MAX_SHARED, SHARED_OF_SM // tile.ctas - RESERVED) // 1024 * 1024
    room -= decoder.table_bytes + 1024 + beside(tile) + (4 * EXPERT_WORDS if grouped else 0)
    some = (replace(tile, stages=stages) for stages in range(MOST_STAGES, -1, -1))
    found = next(t for t in some if ring(t, decoder) <= room)
    if shared_bytes(found, decoder, grouped) > MAX_SHARED:  # whole KB of barriers, and `starts`
        found = replace(found, stages=found.stages - 1)
    return found


def gpu_for(chip: Chip) -> Gpu:
    """What `kernels/mma` asks of a GPU, of this family's chips."""
    return Gpu((9, 0), chip.multiprocessors, MAX_SHARED, SHARED_OF_SM)


def has_mma(decoder: Decoder) -> bool:
    """Whether kernels of `kernels/mma` are candidates.

    On sm_90 `mma.sync` has no products of fp8 (the assembler converts to fp16, and spills), nor
    does it multiply scales of groups into sums.
    """
    return not (decoder.operand == "float8_e4m3fn" or decoder.sums)


@cache
def places(tile: Tile, decoder: Decoder, grouped: bool = False) -> int:
    """CTAs of a fitted tile that find room on a multiprocessor: `tile.ctas`, with few exceptions.

    `fitted` does not count the `starts` of dense weights where CTAs share a multiprocessor. So
    liquid's tiles of 64 tokens are 1 KB too large for two.
    """
    return min(tile.ctas, SHARED_OF_SM // (shared_bytes(tile, decoder, grouped) + RESERVED))


def shared_bytes(tile: Tile, decoder: Decoder, grouped: bool = False) -> int:
    """Shared memory of a CTA: the size of `gemm.py`'s struct, in whole KB."""
    barriers = -(-(decoder.table_bytes + 16 * tile.stages) // 1024) * 1024
    starts = 4 * (EXPERT_WORDS if grouped else 1)
    size = barriers + ring(tile, decoder) + beside(tile) + starts
    return -(-size // 1024) * 1024


def ring(tile: Tile, decoder: Decoder) -> int:
    """Bytes of the stages."""
    tokens = tile.stages * tile.tokens * tile.columns * decoder.slot // 8
    return tokens + tile.slots * decoder.blob_bytes * tile.rows // ROWS


def staged(tile: Tile, decoder: Decoder) -> int:
    """Bytes of a K tile of weights and of tokens."""
    return decoder.blob_bytes * tile.rows // ROWS + tile.tokens * K_TILE * decoder.slot // 8


def beside(tile: Tile) -> int:
    """Bytes of outputs on their way, and of scales and sums of tokens."""
    return 8 * 48 * gcd(tile.tokens, 32) + 16 * tile.tokens


def grid(tile: Tile, m: int, n: int, experts: int = 0, chip: Chip = H200) -> int:
    """CTAs to launch: one cluster a tile, or, when tiles are many, as few waves as can be.

    With equal shares, all that are resident at once.

    How many tiles of tokens `experts` make is known on the device only; here it is the most.
    """
    tokens, room = -(-m // tile.tokens), chip.multiprocessors * tile.ctas
    if experts:  # each that has tokens has some full tiles, and one more
        busy = min(m, experts)
        return min(-(-n // tile.rows) * (busy + (m - busy) // tile.tokens), room)
    tiles = -(-n // tile.rows) * tokens
    if tile.split > 1:  # a cluster does one tile
        return tiles * tile.split
    if tile.stream_k:
        return room
    waves = -(-tiles // room)
    return -(-tiles // waves)


def sharers(common: int, steps: int, ctas: int) -> int:
    """CTAs that share the tiles which do not divide, of `steps` K tiles.

    All; or, if few are left over, as many for each tile: then no CTA has parts of two. But few for
    each tile: one of them adds the sums of all, and each should have some K tiles.
    """
    even = ctas // max(common, 1) * common
    most = common * min(max(steps // LEAST_UNITS, 1), MOST_SHARERS)
    return min(even if even * 100 >= ctas * EVEN else ctas, most)


def workspace(tile: Tile, m: int, n: int, ctas: int) -> int:
    """Numbers of the workspace where `ctas` share tiles, see `stream_k.py`; else 0."""
    tiles = -(-n // tile.rows) * -(-m // tile.tokens)
    some = tile.stream_k and tiles % ctas
    return 2 * ctas * tile.rows * tile.tokens if some else 0


def overlaps(tile: Tile, decoder: Decoder, m: int, n: int, chip: Chip = H200) -> bool:
    """Whether a launch of a fitted tile should begin while the kernel before it ends; measured.

    With 16-bit operands 1,024 tokens take 0.98 of the time by it, 2,048 and 4,096 0.99 to 1.00, in
    turns. With bytes, where CTAs take many tiles in turn, the next kernel's took places from them
    (4 to 13 % slower at 28672x4096 from 1024 tokens on). Nor where two CTAs of 64 tokens share a
    multiprocessor, unless most of those are free: they would pile up on some of them (8 to 45 %
    slower with 96 or 128 CTAs of sparse@int8, int4@fp8 and fp6@fp8). Experts never overlap: one
    token took up to 46 % longer.
    """
    count = -(-n // tile.rows) * -(-m // tile.tokens)
    half = chip.multiprocessors // 2 < count * tile.split <= chip.multiprocessors
    if half and tile.tokens == 64 and places(tile, decoder) == 2:
        return False
    wide = decoder.slot == 16 and not slow(decoder)
    return m < 1024 or wide or count <= chip.multiprocessors * tile.ctas


def suits(tile: Tile, decoder: Decoder, m: int, n: int, k: int, chip: Chip = H200) -> bool:
    """Whether a fitted tile is a candidate for y (m, n) = x (m, k) w (n, k)^T.

    Up to `MOST_HELD` tokens are in one tile, unless the weight has few rows. CTAs that overlap the
    previous kernel share multiprocessors while others have none, so where two find room, all must
    not fit alone: 80 CTAs of 16 tokens took 34.6 us where 160 took 22.2.
    """
    if not min(m / 16, 96) <= tile.tokens < max(4 * m, 32):
        return False
    small = 8 * -(-n // ROWS) * -(-m // MOST_HELD) <= chip.multiprocessors
    if tile.tokens < min(m, MOST_HELD) and not small:
        return False
    if m <= MOST_HELD < tile.tokens and tile.rows > ROWS:
        return False
    twice = places(tile, decoder) > 1
    if twice and grid(tile, m, n, chip=chip) <= chip.multiprocessors and tile.split == 1:
        return False
    return fits_once(tile, decoder, m, n, k, chip)


def fits_once(tile: Tile, decoder: Decoder, m: int, n: int, k: int, chip: Chip = H200) -> bool:
    """Whether every cluster can be resident at once, and every CTA gets enough of K."""
    if tile.split == 1 and not tile.stream_k:
        return True
    tiles = -(-n // tile.rows) * -(-m // tile.tokens)
    room = chip.multiprocessors * places(fitted(tile, decoder), decoder)
    if tile.stream_k:
        return tiles * k_tiles(k) >= LEAST_UNITS * room
    if tile.split > 2:  # they do not fill the processor's parts: 40 of three took two turns
        room = room * 7 // 8
    least = tile.split * (LEAST_STEPS if tile.split in (3, 8) else 1)
    return tiles * tile.split <= room and k_tiles(k) >= least


def work(tile: Tile, decoder: Decoder, m: int, n: int, k: int, chip: Chip = H200) -> Work:
    """What a launch of a fitted tile does."""
    ctas, room = grid(tile, m, n, chip=chip), places(tile, decoder)
    tiles, each = -(-n // tile.rows) * -(-m // tile.tokens), k_tiles(k)
    if tile.stream_k:
        most, meets = shares(tiles, each, ctas)
    else:
        most, meets = -(-tiles * tile.split // ctas) * -(-each // tile.split), 0
    steps = most * -(-ctas // (room * chip.multiprocessors))
    beside = room if ctas <= chip.multiprocessors else min(room, -(-ctas // chip.multiprocessors))
    outputs = tile.rows * tile.tokens
    written = outputs * beside * max(0, steps / (each / tile.split) - 1)
    weights = packed_bytes(n, k, decoder)
    return Work(
        kind=f"wgmma {decoder.slot}{' table' if decoder.table_bytes else ' slow' * slow(decoder)}",
        steps=steps,
        beside=beside,
        **of_step(tile, decoder),
        copied=steps * beside * staged(tile, decoder),
        read=weights + m * k * decoder.slot / 8 + 2 * m * n,
        again=weights * (-(-m // tile.tokens) - 1) * (meets > 0),
        uneven=max(1, steps * beside * chip.multiprocessors / (tiles * each)),
        ends=0 if tile.late else written,
        late=written if tile.late else 0,
        meets=meets,
        outputs=outputs,
        clusters=tile.split > 1,
        crowded=tile.split > 1 and chip.multiprocessors // 2 < ctas <= chip.multiprocessors,
    )


def shares(tiles: int, each: int, ctas: int) -> tuple[int, float]:
    """Where CTAs share tiles of `each` K tiles: the K tiles of the one that has most, and `meets`.

    The latter are the parts of tiles that a CTA adds to others', and what many at a time cost.
    """
    common = tiles % ctas
    if not common:
        return tiles // ctas * each, 0
    share = sharers(common, each, ctas)
    meets = (2 if share % common else 1) + max(0, share / common - 3) / 2
    return tiles // ctas * each + -(-common * each // share), meets


def of_step(tile: Tile, decoder: Decoder) -> dict[str, float]:
    """What a CTA does for a K tile, in `Work`'s terms.

    In a cycle WGMMAs multiply 2,048 pairs of 16-bit numbers, or 4,096 of bytes.
    """
    return {
        "multiply": tile.rows * tile.tokens * K_TILE * decoder.slot / 32768,
        "decode": 4 * decoder.instructions * tile.rows / ROWS,
        "scale": scaled(tile, decoder),
    }


def scaled(tile: Tile, decoder: Decoder) -> int:
    """Cycles in which a K tile's sums are multiplied by scales: an estimate, one lane each.

    int8's have to become fp32 numbers first, in two instructions, one of half that rate.
    """
    whole = decoder.operand == "int8"
    groups = decoder.entries if decoder.sums else 0
    return groups * tile.tokens * tile.rows // ROWS * (4 if whole else 1)


def may_copy(decoder: Decoder) -> bool:
    """Whether a weight may be decoded once for the product of many tokens; see `choices`.

    Only slow decoders: from 1,024 tokens on the main loop was 1.1 times as fast as the library
    with others. Bytes only where they need no scales of groups.
    """
    whole = decoder.operand != "float8_e4m3fn" and not decoder.sums
    return slow(decoder) and (decoder.slot == 16 or whole)
