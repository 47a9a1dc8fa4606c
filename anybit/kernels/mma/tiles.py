"""The kernels for `mma.sync` and `cp.async`, and which one a problem gets on a GPU: no DSL needed.

Nothing here is a table of shapes. A tile follows from the problem, from the bytes of its stages,
and from what the GPU says of itself.
"""

from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch

from anybit.errors import InvalidInput
from anybit.kernels.backend import COUNTS
from anybit.kernels.cute.decode import K_TILE, Decoder
from anybit.kernels.cute.jit import Compiled
from anybit.kernels.cute.launch import PlainLauncher, ProductLauncher
from anybit.kernels.cute.operands import SPANS
from anybit.kernels.cute.pack import k_tiles

RESERVED = 1024  # bytes of shared memory that each CTA costs beside its own
NARROW = 16  # most tokens of `narrow.py`
FEW = (1, 8, NARROW)  # most tokens of its tiles
NARROW_WARPS = 16  # of its CTAs on a multiprocessor: each may keep 128 registers a thread
UNDERWAY = 1 << 14  # bytes on their way to a multiprocessor beside a table, measured on an H200
BUSY_WARPS = 24  # of 16 rows of decoders to 16 bits that bind, which 80 registers are enough for
SMALL = 64  # most tokens of small weights on H100 and H200
FLAG = 256  # bytes behind the ring of `gemm.py`, for one word
TABLE = -(-8 * (SPANS + 1) // 256) * 256  # bytes behind that, of `experts.py`
COPIED_ROW = 144  # bytes of shared memory for 64 decoded columns: no two rows in the same banks
DENSE_FROM = 512  # tokens; an estimate, see `decodes`
LEAST_UNITS = 4  # K tiles that a CTA of `gemm.py` should have
# What CuTe DSL compiles for. A GPU runs what is made for a smaller second number.
ARCHITECTURES = (
    (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1),
)  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """What a GPU says of itself.

    Attributes:
        capability: Such as (8, 6).
        multiprocessors: How many.
        shared: Bytes of shared memory that one CTA may have.
        shared_of_sm: Bytes that all CTAs of a multiprocessor share.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared: int
    shared_of_sm: int

    @property
    def architecture(self) -> str | None:
        """What kernels are compiled for, such as "sm_86"; None: nothing that is known runs here."""
        major, minor = self.capability
        fit = [a for a in ARCHITECTURES if a[0] == major and a[1] <= minor]
        return f"sm_{fit[-1][0]}{fit[-1][1]}" if fit else None


@cache
def gpu_of(device: torch.device) -> Gpu:
    p = torch.cuda.get_device_properties(device)
    return Gpu(
        (p.major, p.minor),
        p.multi_processor_count,
        p.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        p.shared_memory_per_multiprocessor,
    )


@dataclass(frozen=True)
class Tile:
    """What one CTA multiplies, and how.

    Attributes:
        tokens: 8 to 128; of "narrow", also 1, which leaves memory for more stages.
        slices: of 16 rows that a warp multiplies: 1, 2 or 4; of "narrow", 1 to 8.
        warps: of a CTA.
        stages: K tiles of a ring; of "decode", that a CTA decodes.
        ctas: that should fit a multiprocessor.
        kind: "narrow", whose warps split K; "gemm", whose warps split rows; "few" and "experts",
            which are the same for tokens sorted by expert; "plain", which is "narrow" for weights
            in 16 bits as they come, and "gated", which is that for gate and up; "single", which is
            "narrow" for a token that it quantizes itself; "decode", whose warps write 16 decoded
            rows each and multiply nothing.
        columns: of "single", that a token may have.

    Raises:
        InvalidInput: Warps that split K are fewer than blocks of 16 rows x 8 tokens to write.
    """

    tokens: int
    slices: int = 2
    warps: int = 4
    stages: int = 4
    ctas: int = 2
    kind: str = "gemm"
    columns: int = 0

    def __post_init__(self) -> None:
        blocks = self.slices * -(-self.tokens // 8)
        if self.splits and blocks > self.warps:
            raise InvalidInput(
                f"a {self.kind} tile of {self.rows} rows x {self.tokens} tokens has {blocks} "
                f"blocks for {self.warps} warps, which write one each: give it {blocks} warps"
            )

    @property
    def sorted(self) -> bool:
        """Whether it is for tokens that lie sorted by expert."""
        return self.kind in ("few", "experts")

    @property
    def splits(self) -> bool:
        """Whether its warps split K, and not its rows."""
        return self.kind in ("narrow", "few", "plain", "gated", "single")

    @property
    def rows(self) -> int:
        return 16 * self.slices * (1 if self.splits else self.warps)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def name(self) -> str:
        return (
            f"{self.kind}{self.columns or ''}_{self.rows}x{self.tokens}_{self.warps}warps_"
            f"{self.stages}stages_{self.ctas}ctas"
        )


DECODE = Tile(8, 1, 4, 4, 4, "decode")


@dataclass(frozen=True)
class Kernel:
    """One member of the family: everything that is fixed when it is compiled.

    Attributes:
        decoder: Of the weight.
        tile: Of a CTA.
        output: "float16" or "bfloat16".
        architecture: What it is compiled for.
        overlap: Whether it may begin before the previous kernel has finished; from sm_90 on.
    """

    decoder: Decoder
    tile: Tile
    output: str
    architecture: str
    overlap: bool = False

    batch = 0  # it has no WGMMAs

    @property
    def launcher(self) -> type[ProductLauncher]:
        return PlainLauncher if self.tile.kind in ("plain", "gated") else ProductLauncher

    @property
    def activation(self) -> str:
        """The dtype of X."""
        return "int8" if self.decoder.operand == "uint8" else self.decoder.operand

    @property
    def name(self) -> str:
        d = self.decoder
        overlap = "_overlap" if self.overlap else ""
        target = f"{self.output}_{self.architecture}{overlap}"
        return f"{d.bits}bit_{d.operand}_{self.tile.name}_{target}"

    @property
    def header(self) -> dict[str, int]:
        return {"threads": self.tile.threads}

    @property
    def classes(self) -> tuple[type, ...]:
        return type(self.decoder).__mro__[:-1]

    def generate(self) -> Compiled:
        """The kernel, compiled for its architecture; needs CuTe DSL."""
        from anybit.kernels.mma import decode, experts, few, gemm, narrow, plain, single

        programs = {
            "narrow": narrow.Narrow, "gemm": gemm.Gemm, "experts": experts.Experts,
            "few": few.Few, "decode": decode.Decode, "plain": plain.Plain, "gated": plain.Gated,
            "single": single.Single,
        }  # fmt: skip
        compiled: Compiled = programs[self.tile.kind](self).compile()
        return compiled


def grid_bytes(decoder: Decoder) -> int:
    """Of the grid words of 16 rows and a K tile."""
    return 32 * decoder.entries * decoder.grid_words


def token_bytes(decoder: Decoder) -> int:
    """Of a token in a K tile."""
    return K_TILE * decoder.slot // 8


def stage_bytes(tile: Tile, decoder: Decoder) -> int:
    """Of one stage: of a warp's own ring if the tile is narrow, else of the CTA's.

    Code words of every thread, grid words of every slice, tokens; the latter on whole 256 bytes.
    """
    slices = tile.slices if tile.splits else tile.slices * tile.warps
    weights = slices * (256 * decoder.bits + grid_bytes(decoder))
    tokens = 0 if tile.columns else tile.tokens
    return -(-weights // 256) * 256 + tokens * token_bytes(decoder)


def shared_bytes(tile: Tile, decoder: Decoder) -> int:
    """Of a CTA."""
    if tile.kind == "decode":
        return decoder.table_bytes + tile.rows * COPIED_ROW * (decoder.slot == 16)
    rings = tile.warps if tile.splits else 1
    meet = 2 * tile.warps * tile.slices * tile.tokens // 8 * 512
    beside = {"few": meet + TABLE, "gemm": FLAG, "experts": FLAG + TABLE}.get(tile.kind, 0)
    beside += tile.columns + FLAG if tile.columns else 0
    return decoder.table_bytes + rings * tile.stages * stage_bytes(tile, decoder) + beside


@cache
def fitted(tile: Tile, decoder: Decoder, gpu: Gpu, least: int, most: int) -> Tile | None:
    """The tile with `least` to `most` stages and up to its number of CTAs, as shared memory allows.

    CTAs go before stages: those of one multiprocessor hide each other's beginnings and ends.
    """
    for ctas in range(tile.ctas, 0, -1):
        room = min(gpu.shared, gpu.shared_of_sm // ctas - RESERVED)
        for stages in range(most, least - 1, -1):
            found = replace(tile, stages=stages, ctas=ctas)
            if shared_bytes(found, decoder) <= room:
                return found
    return None


@lru_cache(COUNTS)
def choose(decoder: Decoder, gpu: Gpu, m: int, n: int) -> Tile | None:
    """The tile for M tokens and N rows; None where shared memory is too small for any."""
    if decodes(decoder, m):
        return DECODE
    return narrow(decoder, gpu, m, n) if m <= NARROW else wide(decoder, gpu, m, "gemm")


def decodes(decoder: Decoder, m: int) -> bool:
    """Whether the weight is decoded once, for the library's product.

    A copy costs as much as writing and reading it. If `gemm.py` reaches 45 % of the tensor cores'
    peak, the library 75 %, and a GPU does 160 operations for a byte of its memory (A100, RTX 4090),
    that is made good from some 400 tokens on. With 8-bit operands the peak is twice as high, and
    the library has no faster product.
    """
    return decoder.slot == 16 and m >= DENSE_FROM


def tried(decoder: Decoder, gpu: Gpu, m: int, n: int) -> list[Tile]:
    """What `anybit tune` compares: the rule's tile, and a short list of others that fit."""
    if m <= NARROW:
        tokens = 8 if m <= 8 else 16
        shapes = [(2, 8, 1), (2, 8, 2), (1, 8, 2), (1, 8, 3), (2, 4, 2), (2, 4, 3), (1, 4, 4)]
        wanted = [Tile(tokens, s, w, ctas=c, kind="narrow") for s, w, c in shapes]
        wanted += [Tile(tokens, 2, 4, ctas=c) for c in (3, 4)]
    else:
        most = 128 if decoder.slot == 8 else 64
        sizes = sorted({min(most, t) for t in (32, 64, 128) if t < 2 * m})
        shapes = [(2, 4, 1), (2, 4, 2), (2, 4, 3), (2, 8, 1), (4, 4, 1)]
        wanted = [Tile(t, s, w, ctas=c) for t in sizes[-2:] for s, w, c in shapes]
    fit = [fitted(tile, decoder, gpu, 2, 5) for tile in wanted]
    dense = DECODE if decoder.slot == 16 and m >= 128 else None
    every = choose(decoder, gpu, m, n), dense, *fit
    return [tile for tile in dict.fromkeys(every) if tile]


def kernel_for(
    decoder: Decoder, gpu: Gpu, m: int, n: int, output: str, experts: int = 0
) -> Kernel | None:
    """The kernel for M tokens, N rows and a dtype of y; None where there is none.

    experts: that share the tokens; 0: the weight is one.
    """
    tile = choose_experts(decoder, gpu, m, experts) if experts else choose(decoder, gpu, m, n)
    return None if tile is None else kernel_of(decoder, gpu, tile, output)


def kernel_of(decoder: Decoder, gpu: Gpu, tile: Tile, output: str) -> Kernel | None:
    """The kernel of a tile; None where nothing is compiled for such a GPU."""
    architecture = gpu.architecture
    if architecture is None:
        return None
    overlap = tile.splits and gpu.capability[0] == 9  # not tried on others
    return Kernel(decoder, tile, output, architecture, overlap)


def family(decoder: Decoder, gpu: Gpu, n: int, output: str) -> list[Kernel]:
    """The kernels that any number of tokens and N rows take; none if one is missing."""
    counts = (*FEW, NARROW + 1, 32, 64, 128, DENSE_FROM)
    found = [kernel_for(decoder, gpu, m, n, output) for m in counts]
    return [] if None in found else [kernel for kernel in dict.fromkeys(found) if kernel]


def narrow(decoder: Decoder, gpu: Gpu, m: int, n: int) -> Tile | None:
    """Up to 16 tokens: of the tiles whose CTAs are all resident at once, the one with most warps.

    Its rows are read without a pause, and its ring is what memory is left. More rows win a tie: the
    tokens are read less often. Where CTAs must take turns, three of four warps hide their ends.
    64 rows are for as many rows as only such CTAs hold at once.
    """
    tokens = 8 if m <= 8 else 16
    if decoder.table_bytes:
        return beside_table(decoder, gpu, 1 if m == 1 else tokens, n)
    slow = decoder.cost > 2
    binds = slow and 2 * decoder.cost > decoder.bits and decoder.slot == 16 and tokens == 8
    crowded = slow and decoder.slot == 8 and tokens == 16  # two slices would spill
    sizes = (1,) if crowded else (2, 1) if slow or tokens == 16 else (4, 2, 1)
    short = tokens == 8 and decoder.slot == 16 and not slow
    for least in (3, 2) if short else (3,):  # two of 16 tokens were slower than turns
        at_once = []
        for slices, warps in ((s, w) for w in (8, 4) for s in sizes):
            ctas = -(-n // (16 * slices * gpu.multiprocessors))
            tile = Tile(tokens, slices, warps, ctas=ctas, kind="narrow")
            most = BUSY_WARPS if binds and (slices, warps) == (1, 8) else NARROW_WARPS
            found = fitted(tile, decoder, gpu, least, 5) if ctas * warps <= most else None
            if found and resident(found, gpu, m, n):
                at_once.append(found)
        if at_once:
            return max(at_once, key=lambda tile: tiles_of(tile, m, n) * tile.warps)
    ctas = 4 if slow and not crowded else 3  # slow decoders wait for themselves
    turns = [Tile(tokens, slices, 4, ctas=ctas, kind="narrow") for slices in (2, 1)]
    return next(filter(None, (fitted(t, decoder, gpu, s, 4) for s in (3, 2) for t in turns)), None)


def beside_table(decoder: Decoder, gpu: Gpu, tokens: int, n: int) -> Tile | None:
    """`narrow` of decoders with a table, where decoding binds: the busiest multiprocessor decides.

    Of the tiles whose CTAs are all resident at once: fewest rows there, most warps, most rows of a
    CTA. With more stages than `UNDERWAY` asks for, the first tokens wait behind weights.
    """
    at_once = []
    for slices in range(1, 9 if tokens <= 8 else 5):  # more sums of 16 tokens would spill
        ctas = -(-n // (16 * slices * gpu.multiprocessors))
        for warps in (16, 8, 4):
            if ctas * warps <= NARROW_WARPS and slices * -(-tokens // 8) <= warps:
                tile = Tile(tokens, slices, warps, ctas=ctas, kind="narrow")
                stage = ctas * warps * stage_bytes(tile, decoder)
                found = fitted(tile, decoder, gpu, 2, 1 - -UNDERWAY // stage)
                at_once += [found] if found and found.ctas == ctas else []
    if at_once:
        return min(at_once, key=lambda t: (t.ctas * t.slices, -t.ctas * t.warps, -t.slices))
    turns = (fitted(Tile(tokens, s, 4, ctas=4, kind="narrow"), decoder, gpu, 2, 4) for s in (2, 1))
    return next((tile for tile in turns if tile), None)


@cache
def family_small(decoder: Decoder, gpu: Gpu) -> tuple[Tile, ...]:
    """Tiles for 17 to 64 tokens where rows are few or decoding is slow."""
    pairs = decoder.slot == 8 or decoder.cost > 2  # others are as fast in threes
    # Tokens, slices, warps, CTAs.
    shapes = [(16, 1, 8, 1), (32, 1, 8, 1), *[(32, 1, 4, 2)] * pairs, (32, 1, 4, 3)]
    shapes += [(32, 2, 8, 2)] * bool(decoder.table_bytes)  # rows that share a table
    every = (Tile(*t[:3], ctas=t[3], kind="narrow") for t in shapes)
    return tuple(dict.fromkeys(t for t in (fitted(t, decoder, gpu, 2, 5) for t in every) if t))


def candidates(decoder: Decoder, gpu: Gpu, m: int, n: int) -> list[Tile]:
    """Tiles for up to `SMALL` tokens on H100 and H200: those of 8 warps where all CTAs run at once.

    Each row tile has several tiles of tokens, which find its weights in the L2.
    """
    if m <= NARROW:
        tile = narrow(decoder, gpu, m, n)
        return [] if tile is None else [tile]
    every = family_small(decoder, gpu) if m <= SMALL else ()
    return [tile for tile in every if tile.warps < 8 or resident(tile, gpu, m, n)]


def resident(tile: Tile, gpu: Gpu, m: int, n: int) -> bool:
    """Whether all CTAs of a narrow tile run at once."""
    return tiles_of(tile, m, n) <= tile.ctas * gpu.multiprocessors


def wide(decoder: Decoder, gpu: Gpu, m: float, kind: str) -> Tile | None:
    """More tokens: 128 rows, and as many tokens as registers hold the sums of."""
    # More 16-bit operands spill, and from sm_100 on 8-bit ones too.
    most = 128 if decoder.slot == 8 and gpu.capability < (10, 0) else 64
    sizes = (8, 16, 32, 64)
    tokens = next((t for t in sizes if m <= t), most)
    fewer = [t for t in (tokens, *reversed(sizes)) if t <= tokens]
    shapes = [Tile(t, ctas=3 if t <= 32 else 2, kind=kind) for t in fewer]
    found = (fitted(t, decoder, gpu, least, 4) for t in shapes for least in (3, 2))
    return next((tile for tile in found if tile), None)


@lru_cache(COUNTS)
def choose_experts(decoder: Decoder, gpu: Gpu, m: int, experts: int) -> Tile | None:
    """The tile for tokens of which an expert gets m / experts on average.

    Two standard deviations more fit: an expert's second tile reads its weights once more.
    """
    average = m / experts
    return wide(decoder, gpu, average + 2 * average**0.5, "experts")


def family_experts(decoder: Decoder, gpu: Gpu, output: str) -> list[Kernel]:
    """The kernels that many experts take, whatever their tokens; none if one is missing."""
    found = [choose_experts(decoder, gpu, m, 1) for m in (1, 8, 16, 32, 128)]
    if None in found or gpu.architecture is None:
        return []
    return [Kernel(decoder, t, output, gpu.architecture) for t in dict.fromkeys(found) if t]


def family_few(decoder: Decoder, gpu: Gpu) -> list[Tile]:
    """Tiles of 8 tokens for experts that few tokens meet: 64 or 32 rows, 8 or 4 warps."""
    shapes = [Tile(8, slices, warps, ctas=ctas, kind="few")
              for slices, warps, ctas in ((4, 8, 1), (4, 4, 2), (2, 4, 3))]  # fmt: skip
    found = (fitted(tile, decoder, gpu, 3, 6) for tile in shapes)
    return [tile for tile in found if tile]


def tiles_of(tile: Tile, m: int, n: int) -> int:
    return -(-n // tile.rows) * -(-m // tile.tokens)


def copy_grid(tile: Tile, n: int, k: int) -> int:
    """CTAs that decode a weight."""
    return -(-n // tile.rows) * -(-k_tiles(k) // tile.stages)


def grid(tile: Tile, gpu: Gpu, m: int, n: int, k: int, experts: int = 0) -> int:
    """CTAs to launch.

    One a tile; but where `gemm.py`'s would leave more than a fifth of the last wave's places empty,
    as many as there are places, which share the K tiles of all tiles evenly. For experts as many as
    there are places, unless there cannot be so much to do.
    """
    places = gpu.multiprocessors * tile.ctas
    if experts:  # an expert's last tile may hold one token
        most = -(-n // tile.rows) * (m // tile.tokens + min(m, experts))
        if tile.kind == "few":
            return min(places, most)
        return max(1, min(places, most * k_tiles(k) // LEAST_UNITS))
    tiles = tiles_of(tile, m, n)
    if tile.kind != "gemm" or tiles >= 0.8 * -(-tiles // places) * places:
        return tiles
    return max(1, min(places, tiles * k_tiles(k) // LEAST_UNITS))
