"""A kernel of the Hopper family: its tile, and what else is fixed when it is compiled."""

from dataclasses import dataclass

from anybit.errors import Unsupported
from anybit.kernels.cute.decode import K_TILE, Decoder
from anybit.kernels.cute.jit import Compiled
from anybit.kernels.cute.pack import ROWS
from anybit.kernels.hopper.launch import ARCHITECTURE, GemmLauncher


@dataclass(frozen=True)
class Tile:
    """What one CTA multiplies, and how.

    tokens: 8 to 256. rows: weight rows, 128 or 256. ctas: resident on a multiprocessor.
    split: CTAs of a cluster that split the K of one tile.
    stages: parts of `columns` columns of tokens that are in flight; 0 means all that fit. columns:
    of a stage, a K tile's 128 or half of them; weights are in flight by whole K tiles (`slots`).
    stream_k: CTAs have equal shares of all K tiles. late: the second warpgroup stays some K tiles
    behind the first where a CTA has several tiles, so that it multiplies while the first one writes
    outputs, and the other way round.
    """

    tokens: int
    rows: int = 128
    ctas: int = 1
    split: int = 1
    stages: int = 0
    stream_k: bool = False
    late: bool = False
    columns: int = K_TILE

    @property
    def slots(self) -> int:
        """K tiles whose weights are in flight."""
        return -(-self.stages * self.columns // K_TILE)

    @property
    def lag(self) -> int:
        """K tiles that the second warpgroup is behind: the others hide the copies' latency."""
        return max(1, self.stages * self.columns // K_TILE // 2) if self.late else 0

    @property
    def wide(self) -> bool:
        """Whether consumers need more registers than 288 threads leave them."""
        return self.rows // 128 * (self.tokens + 32) >= 256

    @property
    def threads(self) -> int:
        """Two consumer warpgroups and a producer warp, or a warpgroup that gives registers away.

        288 threads cost registers like 384, so they get 168 each at most; with `setmaxnreg` the
        consumers get 232.
        """
        return 384 if self.wide else 288

    @property
    def name(self) -> str:
        split = f"_split{self.split}" if self.split > 1 else "_streamk" * self.stream_k
        split += "_late" * self.late
        columns = f"x{self.columns}" if self.columns < K_TILE else ""
        return f"{self.rows}x{self.tokens}{columns}_{self.stages}stages_{self.ctas}ctas{split}"


@dataclass(frozen=True)
class Kernel:
    """One member of the family: everything that is fixed when it is compiled.

    output: "float16" or "bfloat16". grouped: tokens lie sorted by expert, each with its own weight.
    Raises `Unsupported` for stages of half a K tile with 8-bit operands or scaled sums, and for
    fewer than four of them with 128 rows, whose loop would wait for one that it has not given back.
    """

    decoder: Decoder
    tile: Tile
    output: str
    grouped: bool = False

    architecture = ARCHITECTURE
    launcher = GemmLauncher

    def __post_init__(self) -> None:
        d, tile = self.decoder, self.tile
        if tile.split > 1 and self.grouped:
            raise Unsupported(f"{tile.name}: clusters split no tiles of experts; give split=1")
        if tile.columns < K_TILE and (d.slot < 16 or d.sums):
            raise Unsupported(
                f"stages of {tile.columns} columns are for operands of 16 bits, not for {d.operand}"
                f"{' with scaled sums' * bool(d.sums)}: give the tile {K_TILE}"
            )
        if tile.columns < K_TILE and tile.rows == ROWS and tile.stages < 4:
            raise Unsupported(
                f"{tile.name}: a stage of half a K tile is given back two products later, so with "
                f"{tile.stages} of them the loop would hang: it needs 4"
            )

    @property
    def activation(self) -> str:
        """The dtype of X."""
        return "int8" if self.decoder.operand == "uint8" else self.decoder.operand

    @property
    def piece(self) -> int:
        """Tokens of a WGMMA, whose multiple `suited` makes a slow decoder's tiles.

        While one multiplies, others wait with what a slow decoder of bytes is to do next.
        """
        short = slow(self.decoder) and self.decoder.slot == 8
        return min(self.tile.tokens, 64 if short else 256)

    # As a `jit.KernelSpec`.

    @property
    def name(self) -> str:
        return f"{self.decoder.bits}bit_{self.decoder.operand}_{self.tile.name}_{self.output}"

    @property
    def header(self) -> dict[str, int]:
        tile = self.tile
        return {"threads": tile.threads, "cluster": tile.split, "box": tile.tokens}

    @property
    def batch(self) -> int:
        """WGMMAs of 64 columns, or of a group whose sums get a scale."""
        d = self.decoder
        return min(d.slot // 4, 4 // d.entries) if d.sums else d.slot // 4

    @property
    def classes(self) -> tuple[type, ...]:
        return type(self.decoder).__mro__[:-1]

    def generate(self) -> Compiled:
        """The kernel, compiled for sm_90a; needs CuTe DSL."""
        from anybit.kernels.hopper import gemm

        program = self.decoder.main_loop() or gemm.Gemm
        compiled: Compiled = program(self).compile()
        return compiled


def slow(decoder: Decoder) -> bool:
    """Whether decoding, and not reading, is what few tokens wait for."""
    return decoder.cost > 2
