"""The tiles of the Hopper family, and which one a problem gets: data, not code."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import gcd

from anybit.kernels.cute.decode import K_TILE, Decoder
from anybit.kernels.cute.operands import SPANS
from anybit.kernels.cute.pack import ROWS, k_tiles
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
# Cycles: of a plane of codes in a K tile, of a launch, of a cluster's exchange, of the sums of a
# tile's part that go through the memory.
DECODE, FIXED, EXCHANGE, JOIN = 170, 6300, 3000, 5500
READ = 0.967  # of what the memory can bring, by these kernels
# Bytes a cycle of a multiprocessor: of weights from the memory, from the L2, of such sums.
WEIGHTS, L2, SUMS = 22, 38, 10


# Of `expected`: cycles of a K tile's products over what they should take, by tokens; bytes a cycle
# that a multiprocessor copies; multiply-adds a cycle of each that power allows; cycles of a launch,
# of a tile's outputs, of a cluster's sums, and of each sum that goes through the memory. How much
# longer it takes where CTAs share: always, and with as many bytes of tokens as the L2 holds.
PRODUCTS = {32: 2.07, 64: 1.27, 96: 1.095, 112: 1.08, 128: 1.01, 160: 1.045, 176: 1.04, 192: 1.04}
COPIED, POWER, BEGIN, END, MEET, SUM = 38.7, 1580, 4800, 6500, 1370, 0.366
APART, AGAIN, NEAR = 1.023, 0.041, 5e7


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


def shared(decoder: Decoder) -> tuple[Tile, ...]:
    """Tiles of 64 tokens that two or three CTAs share. Four were slower on every shape.

    Where two CTAs of 16-bit operands (or 8-bit codes) share a multiprocessor, each has 3 or 4
    stages, and a kernel that starts early finds places for two CTAs on some and none on others.
    """
    ctas = 2 if decoder.slot == 8 and decoder.bits <= 6 else 1
    return tuple(Tile(64, ctas=ctas, split=s) for s in (2, 3))


@cache
def few(decoder: Decoder) -> tuple[Tile, ...]:
    """Tiles for up to 64 tokens."""
    small = [Tile(tokens, ctas=2, split=s) for tokens in (8, 16, 32) for s in (1, 2, 4, 6)]
    if decoder.slot == 8 and decoder.bits <= 6:  # others would leave three CTAs too few stages
        small += [Tile(tokens, ctas=3, split=8) for tokens in (8, 16)]
    tall = [Tile(64, rows=256)] if decoder.slot == 8 else []
    return suited([*small, Tile(64, ctas=2), *tall, *shared(decoder)], decoder)


@cache
def many(decoder: Decoder) -> tuple[Tile, ...]:
    """Tiles for more than 64 tokens."""
    large = [Tile(128, late=True), Tile(128, split=2), Tile(128, split=3)]
    large += [Tile(tokens, late=True) for tokens in (96, 192)]
    large += [replace(tall(decoder), late=True), *largest(decoder)]
    large += [Tile(256, split=2)] * bool(decoder.hidden and largest(decoder))
    pairs = decoder.slot == 8 and (decoder.bits <= 6 or decoder.crowded)
    large += [Tile(64, ctas=2)] * pairs
    return suited([*shared(decoder), *large], decoder)


def tall(decoder: Decoder) -> Tile:
    """256 rows of 128 tokens. Stages of half a K tile make 16-bit operands 1 to 3 % faster."""
    return Tile(128, rows=256, columns=K_TILE // 2 if decoder.slot == 16 else K_TILE)


def largest(decoder: Decoder) -> tuple[Tile, ...]:
    """Tiles of 256 tokens: of bytes; of 16 bits to halve slow decoding, if three stages fit."""
    if decoder.slot == 16 and not (slow(decoder) and fitted(Tile(256), decoder).stages > 2):
        return ()
    return (Tile(256, late=True),)


@cache
def equal(decoder: Decoder) -> tuple[Tile, ...]:
    """Tiles whose CTAs have equal shares. Two of 64 tokens on a multiprocessor would spill."""
    every = [Tile(16, ctas=2), Tile(32, ctas=2), Tile(64), Tile(128), tall(decoder)]
    every += [*[Tile(192)] * (decoder.slot == 8), *largest(decoder)]
    return tuple(replace(t, shared=True, late=t.tokens >= 128) for t in suited(every, decoder))


def halves(decoder: Decoder) -> tuple[Tile, ...]:
    """More tiles of 16-bit operands, for more than 32 tokens."""
    if decoder.slot == 8 or slow(decoder):
        return ()
    every = [Tile(t, rows=256, shared=True, late=True) for t in (64, 96)]
    every += [Tile(96, rows=256, late=True), Tile(96, split=2), Tile(96, shared=True)]
    every += [Tile(t, late=True) for t in (112, 160, 176)]  # fill waves that others leave open
    return suited(every, decoder)


@cache
def family(decoder: Decoder) -> tuple[Tile, ...]:
    """The tiles that a decoder is compiled for."""
    every = few(decoder) + many(decoder) + equal(decoder) + halves(decoder)
    return tuple(fitted(tile, decoder) for tile in dict.fromkeys(every))


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
    """Whether `kernels/mma` may have other tiles here than a table's for up to 16 tokens.

    On sm_90 `mma.sync` has no products of fp8, nor does it multiply scales of groups into sums.
    Slow decoders were not tried.
    """
    return not (decoder.operand == "float8_e4m3fn" or decoder.sums or slow(decoder))


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
    tokens = -(-m // tile.tokens) if not experts else most_tiles(tile, m, experts)
    tiles = -(-n // tile.rows) * tokens
    room = chip.multiprocessors * tile.ctas
    if experts and tile.split == 1:
        return min(tiles, room)
    if tile.split > 1:  # a cluster does one tile
        return tiles * tile.split
    if tile.shared:
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
    """Numbers of the workspace where `ctas` share tiles, see `shares.py`; else 0."""
    tiles = -(-n // tile.rows) * -(-m // tile.tokens)
    some = tile.shared and tiles % ctas
    return 2 * ctas * tile.rows * tile.tokens if some else 0


def most_tiles(tile: Tile, m: int, experts: int) -> int:
    """Tiles of tokens of all experts at most: each has some full ones and one token more."""
    busy = min(m, experts)
    return busy + (m - busy) // tile.tokens


def overlaps(
    tile: Tile, decoder: Decoder, m: int, n: int, experts: int = 0, chip: Chip = H200
) -> bool:
    """Whether a launch of a fitted tile should begin while the kernel before it ends; measured.

    With 16-bit operands 1,024 tokens take 0.98 of the time by it, 2,048 and 4,096 0.99 to 1.00, in
    turns. With bytes, where CTAs take many tiles in turn, the next kernel's took places from them
    (4 to 13 % slower at 28672x4096 from 1024 tokens on). Not with experts, up to 46 % slower at one
    token, unless clusters split K. Nor where two CTAs of 64 tokens share a multiprocessor, unless
    most of those are free: they would pile up on some of them (8 to 45 % slower with 96 or 128 CTAs
    of sparse@int8, int4@fp8 and fp6@fp8).
    """
    count = -(-n // tile.rows) * -(-m // tile.tokens)
    half = chip.multiprocessors // 2 < count * tile.split <= chip.multiprocessors
    if half and tile.tokens == 64 and places(tile, decoder) == 2:
        return False
    if experts:
        count = -(-n // tile.rows) * most_tiles(tile, m, experts) * tile.split
        return tile.split > 1 and count <= chip.multiprocessors * tile.ctas
    wide = decoder.slot == 16 and not slow(decoder)
    return m < 1024 or wide or count <= chip.multiprocessors * tile.ctas


def choose(decoder: Decoder, m: int, n: int, k: int, chip: Chip = H200) -> Tile:
    """The tile for y (m, n) = x (m, k) w (n, k)^T, by rules and by `cycles`; both were measured.

    Up to 32 tokens K is split until the multiprocessors are busy, but not over 8 CTAs if they are
    soon done. Up to 64 one tile holds all tokens. What counts is the time of launches that overlap.
    Equal shares where the model says that they take a tenth less (of 256 tokens that hide decoding
    a twentieth), clusters of fewer tokens where it says a fifth, and of 64 tokens for 17 to 32
    where it says anything (1.06 to 1.45 times as fast).

    More than 32 tokens of 16 bits get the tile that `expected` calls the fastest.
    """
    if m > 32 and decoder.slot == 16 and not slow(decoder):
        some = [t for t in family(decoder) if t.tokens in PRODUCTS and t.tokens < 4 * m]
        some = [t for t in some if fits_once(t, decoder, m, n, k, chip)]
        some = [t for t in some if not piles(t, m, n, chip)]
        return min(some, key=lambda t: expected(t, decoder, m, n, k, chip))
    if m > 64:
        # 96 tokens take more bytes for a product, which one wave, or one tile of tokens, can have.
        once = m <= 96 or -(-n // ROWS) * 2 <= chip.multiprocessors
        candidates = [t for t in many(decoder) if t.tokens != 96 or (m <= 192 and once)]
    else:
        tokens = next(t for t in (8, 16, 32, 64) if m <= t)
        candidates = [t for t in few(decoder) if t.tokens == tokens]
    candidates = [t for t in candidates if fits_once(t, decoder, m, n, k, chip)]
    candidates = [t for t in candidates if not piles(t, m, n, chip)] or candidates

    def busy(tile: Tile) -> float:
        return cycles(tile, decoder, m, n, k, chip)

    def time(tile: Tile) -> float:
        return max(busy(tile), reading(tile, decoder, m, n, k, chip))

    usual = max(candidates, key=lambda t: t.split) if m <= 32 else min(candidates, key=busy)
    shares = [t for t in equal(decoder) if t.tokens < 2 * max(m, 9)]
    others = [(t, 0.95 if decoder.hidden and t.tokens == 256 else 0.9) for t in shares]
    fewer = (t for t in few(decoder) if 16 <= t.tokens < min(m, 64) and t.split > 1)
    others += [(t, 0.8) for t in fewer if m <= 128 and not piles(t, m, n, chip)]
    if 16 < m <= 32:
        others += [(t, 1.0) for t in suited(shared(decoder), decoder)]
    better = [
        t
        for t, part in others
        if fits_once(t, decoder, m, n, k, chip) and time(t) < part * time(usual)
    ]
    return fitted(min([usual, *better], key=lambda t: (time(t), busy(t))), decoder)


def piles(tile: Tile, m: int, n: int, chip: Chip = H200) -> bool:
    """Whether CTAs that overlap the previous kernel share multiprocessors while others have none.

    That is where two find room and all could be alone, unless most multiprocessors are free: 80
    CTAs of 16 tokens took 34.6 us where 160 took 22.2. For 64 tokens see `overlaps`.
    """
    ctas = -(-n // tile.rows) * -(-m // tile.tokens) * tile.split
    half = chip.multiprocessors // 2 < ctas <= chip.multiprocessors
    return half and tile.ctas > 1 and tile.tokens < 64 and not tile.shared


def fits_once(tile: Tile, decoder: Decoder, m: int, n: int, k: int, chip: Chip = H200) -> bool:
    """Whether every cluster can be resident at once, and every CTA gets enough of K."""
    if tile.split == 1 and not tile.shared:
        return True
    tiles = -(-n // tile.rows) * -(-m // tile.tokens)
    room = chip.multiprocessors * places(fitted(tile, decoder), decoder)
    if tile.shared:
        return tiles * k_tiles(k) >= LEAST_UNITS * room
    if tile.split > 2:  # they do not fill the processor's parts: 40 of three took two turns
        room = room * 7 // 8
    least = tile.split * (LEAST_STEPS if tile.split in (3, 8) else 1)
    return tiles * tile.split <= room and k_tiles(k) >= least


def cycles(tile: Tile, decoder: Decoder, m: int, n: int, k: int, chip: Chip = H200) -> float:
    """Clock cycles of a product: waves of tiles, of K tiles, of products and decoding.

    The matrix unit does 4096 multiply-adds of bytes or 2048 of 16 bits in a clock; the other rates
    fit times of these kernels on an H200, most of them within 10 %.
    """
    steps = most_steps(tile, m, n, k, chip) * step_cycles(tile, decoder)
    return steps * together(tile, m, n, chip) + FIXED + meeting(tile, m, n, k, chip)


def expected(tile: Tile, decoder: Decoder, m: int, n: int, k: int, chip: Chip = H200) -> float:
    """Clock cycles of more than 32 tokens of 16 bits, at 1.75 GHz; of `PRODUCTS`' tiles.

    Fitted to the order of tiles where several were timed: in the mean it picks one that is 1.0 %
    above the best for up to 192 tokens (63 weights) and 0.3 % for more (32 cells, in turns).
    Multiprocessors that have nothing to do leave power to the others, but these then need more of
    it for a product. CTAs with equal shares are at different places of K at a time, so the L2 keeps
    less of the tokens for them.
    """
    own = most_steps(tile, m, n, k, chip)
    steps = own * together(tile, m, n, chip)
    slow_by = PRODUCTS[tile.tokens]
    area = tile.rows * tile.tokens * K_TILE
    decoded = tile.rows // ROWS * (4 * decoder.instructions + 60)
    step = max(slow_by * area / 2048, decoded, staged(tile, decoder) / COPIED)
    tiles = -(-n // tile.rows) * -(-m // tile.tokens)
    each = tiles * k_tiles(k) / chip.multiprocessors  # K tiles of a multiprocessor
    powered = each * area * slow_by / PRODUCTS[128] / (POWER * (each / steps) ** 0.77)
    least = reading(tile, decoder, m, n, k, chip) - FIXED
    ends = max(0, own / k_tiles(k) - 1) * (0.58 * END if tile.late else END)
    parts = parts_met(tile, m, n, k, chip)
    meets = parts * SUM * tile.rows * tile.tokens + MEET * (tile.split > 1)
    apart = APART + AGAIN * min(1, 2 * m * k / NEAR) if parts else 1
    return max(steps * step, powered, least) * apart + ends + meets + BEGIN


def parts_met(tile: Tile, m: int, n: int, k: int, chip: Chip) -> float:
    """Parts of tiles with equal shares that a CTA adds to others', and what many at a time cost."""
    ctas = grid(tile, m, n, chip=chip)
    common = -(-n // tile.rows) * -(-m // tile.tokens) % ctas
    if not tile.shared or not common:
        return 0
    share = sharers(common, k_tiles(k), ctas)
    return (2 if share % common else 1) + max(0, share / common - 3) / 2


def together(tile: Tile, m: int, n: int, chip: Chip) -> int:
    """CTAs of the fullest multiprocessor, which share its rates."""
    return min(tile.ctas, -(-grid(tile, m, n, chip=chip) // chip.multiprocessors))


def most_steps(tile: Tile, m: int, n: int, k: int, chip: Chip) -> int:
    """K tiles of the CTA that has most."""
    ctas = grid(tile, m, n, chip=chip)
    tiles, each = -(-n // tile.rows) * -(-m // tile.tokens), k_tiles(k)
    if not tile.shared:
        return -(-tiles * tile.split // ctas) * (each // tile.split)
    common = tiles % ctas
    return tiles // ctas * each + -(-common * each // max(1, sharers(common, each, ctas)))


def reading(tile: Tile, decoder: Decoder, m: int, n: int, k: int, chip: Chip = H200) -> float:
    """Clock cycles of a launch that waits for nothing but the memory, and the L2."""
    tiles, blob = -(-n // tile.rows) * -(-m // tile.tokens), decoder.blob_bytes
    weights = -(-n // ROWS) * k_tiles(k) * blob / (READ * chip.read)
    copied = tiles * k_tiles(k) * staged(tile, decoder) / (L2 * chip.multiprocessors)
    fullest = most_steps(tile, m, n, k, chip) * together(tile, m, n, chip)
    fullest *= blob * tile.rows // ROWS if m <= tile.tokens else 0  # others find them in the L2
    return max(weights, copied, fullest / WEIGHTS) + FIXED


def meeting(tile: Tile, m: int, n: int, k: int, chip: Chip) -> float:
    """Cycles until CTAs' sums of a tile are one; with equal shares, most CTAs have two parts."""
    if tile.split > 1:
        return EXCHANGE
    ctas = grid(tile, m, n, chip=chip)
    common = -(-n // tile.rows) * -(-m // tile.tokens) % ctas
    if not tile.shared or not common:
        return 0
    parts = 2 if sharers(common, k_tiles(k), ctas) % common else 1
    return parts * (JOIN + 4 * tile.rows * tile.tokens * tile.ctas / SUMS)


def step_cycles(tile: Tile, decoder: Decoder) -> float:
    """Clock cycles of a K tile of one CTA alone, its copies there in time."""
    multiplied = tile.rows * tile.tokens * K_TILE / (32768 / decoder.slot)
    decoded = DECODE * decoder.cost * (tile.rows // ROWS if slow(decoder) else 1)
    if tile.tokens == 256:
        decoded *= 1 - decoder.hidden
    return 1.1 * multiplied + decoded + scaled(tile, decoder) + staged(tile, decoder) / 400


def scaled(tile: Tile, decoder: Decoder) -> int:
    """Cycles in which a K tile's sums are multiplied by scales: an estimate, one lane each.

    int8's have to become fp32 numbers first, in two instructions, one of half that rate.
    """
    whole = decoder.operand == "int8"
    groups = decoder.entries if decoder.sums else 0
    return groups * tile.tokens * tile.rows // ROWS * (4 if whole else 1)


def may_copy(decoder: Decoder) -> bool:
    """Whether a weight may be decoded once for the product of many tokens; see `copies`.

    Only slow decoders: from 1,024 tokens on the main loop was 1.1 times as fast as the library
    with others. Bytes only where they need no scales of groups.
    """
    whole = decoder.operand != "float8_e4m3fn" and not decoder.sums
    return slow(decoder) and (decoder.slot == 16 or whole)
