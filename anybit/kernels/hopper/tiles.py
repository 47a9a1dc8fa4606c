"""The kernels of the Hopper family, and which one a problem gets: data, not code."""

from dataclasses import dataclass, replace

from anybit.kernels.hopper.decode import K_TILE, Decoder

MULTIPROCESSORS = 132  # of an H100 or H200; the tables below were measured there
MAX_SHARED = 232_448  # bytes of shared memory that one CTA may have
SHARED_OF_SM = 233_472  # bytes that all CTAs of a multiprocessor share
RESERVED = 1024  # bytes of it that each CTA costs beside its own
MOST_STAGES = 12
MOST_EXPERTS = 256
EPILOGUE, EXCHANGE = 2000, 1500  # cycles of a tile behind its main loop


@dataclass(frozen=True)
class Tile:
    """What one CTA multiplies, and how.

    tokens: 8 to 256. rows: weight rows, 128 or 256. ctas: resident on a multiprocessor.
    split: CTAs of a cluster that split the K of one tile. share: CTAs of a cluster with different
    rows of the same tokens, each of which loads a part of X for all. One of both is 1.
    stages: K tiles in flight; 0 means all that fit.
    """

    tokens: int
    rows: int = 128
    ctas: int = 1
    split: int = 1
    share: int = 1
    stages: int = 0

    @property
    def cluster(self) -> int:
        return self.split * self.share

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
        split = f"_split{self.split}" if self.split > 1 else ""
        share = f"_share{self.share}" if self.share > 1 else ""
        return f"{self.rows}x{self.tokens}_{self.stages}stages_{self.ctas}ctas{split}{share}"


@dataclass(frozen=True)
class Kernel:
    """One member of the family: everything that is fixed when it is compiled.

    output: "float16" or "bfloat16". overlap: False is the ablation that decodes and multiplies in
    turns (LiquidGEMM, figure 13). grouped: tokens lie sorted by expert, each with its own weight.
    """

    decoder: Decoder
    tile: Tile
    output: str
    overlap: bool = True
    grouped: bool = False

    @property
    def activation(self) -> str:
        """The dtype of X."""
        return "int8" if self.decoder.operand == "uint8" else self.decoder.operand


FEW = [Tile(tokens, ctas=2, split=s) for tokens in (8, 16, 32, 64) for s in (1, 2, 4, 8)]
MANY = [
    *(Tile(128, split=s) for s in (1, 2, 4)),
    Tile(128, share=2),
    Tile(256),
    Tile(256, share=2),
]
TALL = [Tile(128, rows=256), Tile(128, rows=256, share=2)]


def family(decoder: Decoder) -> list[Tile]:
    """The tiles that a decoder is compiled for."""
    tall = TALL if decoder.slot == 8 else []  # 16-bit operands would spill
    return [fitted(tile, decoder) for tile in FEW + MANY + tall]


def fitted(tile: Tile, decoder: Decoder) -> Tile:
    """The tile with as many stages as fit into shared memory."""
    if tile.stages:
        return tile
    stage = decoder.blob_bytes * tile.rows // 128 + tile.tokens * 128 * decoder.slot // 8
    fixed = 1024 + 8 * 48 * min(tile.tokens, 32) + 16 * tile.tokens
    room = min(MAX_SHARED, SHARED_OF_SM // tile.ctas - RESERVED) // 1024 * 1024 - fixed
    return replace(tile, stages=min(MOST_STAGES, room // stage))


def grid(tile: Tile, m: int, n: int, experts: int = 0) -> int:
    """CTAs to launch: one cluster a tile, or, when tiles are many, as few waves as can be.

    How many tiles of tokens `experts` make is known on the device only; here it is the most.
    """
    tokens = -(-m // tile.tokens) if not experts else m // tile.tokens + min(m, experts)
    tiles = -(-n // (tile.rows * tile.share)) * tokens
    if experts:
        return min(tiles, MULTIPROCESSORS * tile.ctas // tile.share) * tile.share
    if tile.split > 1:  # a cluster does one tile
        return tiles * tile.split
    slots = MULTIPROCESSORS * tile.ctas // tile.cluster
    waves = -(-tiles // slots)
    return -(-tiles // waves) * tile.cluster


def choose(decoder: Decoder, m: int, n: int, k: int) -> Tile:
    """The tile for y (m, n) = x (m, k) w (n, k)^T: the fastest by `cycles`.

    Up to 64 tokens a tile holds them all, two CTAs share a multiprocessor, and K is split until the
    multiprocessors are busy. `share` waits for measurements.
    """
    if m <= 64:
        tokens = next(t for t in (8, 16, 32, 64) if m <= t)
        candidates = [t for t in FEW if t.tokens == tokens]
    else:
        candidates = [t for t in MANY if t.share == 1]
        if decoder.slot == 8 and m <= 128:
            candidates.append(TALL[0])
    candidates = [t for t in candidates if t.split == 1 or fits_once(t, m, n, k)]
    if m <= 64:  # the memory is the limit: as many loads in flight as can be
        return fitted(max(candidates, key=lambda t: t.split), decoder)
    return fitted(min(candidates, key=lambda t: cycles(t, decoder, m, n, k)), decoder)


def fits_once(tile: Tile, m: int, n: int, k: int) -> bool:
    """Whether every cluster can be resident at once and every CTA gets a part of K."""
    tiles = -(-n // tile.rows) * -(-m // tile.tokens)
    return tiles * tile.split <= MULTIPROCESSORS * tile.ctas and k // K_TILE >= tile.split


def cycles(tile: Tile, decoder: Decoder, m: int, n: int, k: int) -> float:
    """Clock cycles of a product: waves of tiles, each bound by copies or by the matrix unit.

    The two rates fit H200 times of kernels with this structure: 26 bytes a clock from L2 to one
    multiprocessor, and 4096 int8 or 2048 fp16 multiply-adds.
    """
    clusters = grid(tile, m, n) // tile.cluster
    tiles = -(-n // (tile.rows * tile.share)) * -(-m // tile.tokens)
    waves = -(-tiles // clusters)
    # CTAs of one multiprocessor share its rates.
    together = min(tile.ctas, -(-clusters * tile.cluster // MULTIPROCESSORS))
    copied = decoder.blob_bytes * tile.rows / 128 + tile.tokens * K_TILE * decoder.slot / 8
    multiplied = tile.rows * tile.tokens * K_TILE / (32768 / decoder.slot)
    step = max(copied / 26, multiplied, 200) * together
    return waves * (step * -(-k // K_TILE // tile.split) + EPILOGUE + EXCHANGE * (tile.split > 1))


def choose_grouped(decoder: Decoder, m: int, experts: int) -> Tile:
    """The tile for tokens of which an expert gets m / experts on average."""
    average = m / experts
    tokens = next((t for t in (8, 16, 32, 64) if average <= t), 128)
    return fitted(Tile(tokens, ctas=2 if tokens <= 64 else 1), decoder)


def family_grouped(decoder: Decoder) -> list[Tile]:
    """The tiles that `choose_grouped` may name."""
    return [choose_grouped(decoder, m, 1) for m in (8, 16, 32, 64, 128)]
