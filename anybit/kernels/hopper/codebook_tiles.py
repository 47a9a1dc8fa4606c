"""Which codebook kernels there are, and which one a problem gets: no DSL needed."""

from dataclasses import dataclass

from anybit.kernels.choice import Work, cycles
from anybit.kernels.cute.cells import ROWS, Cells
from anybit.kernels.cute.jit import Compiled
from anybit.kernels.hopper.chip import H200, Chip
from anybit.kernels.hopper.launch import ARCHITECTURE, ClusterLauncher
from anybit.kernels.hopper.tiles import MAX_SHARED

MOST_CTAS = 16  # of a cluster
SHARING = 4  # CTAs of a cluster, where several share K: small ones find room on nearly all SMs

TOKENS = 1, 2, 8, 16  # that one launch multiplies
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
    flight for every warp. ctas: resident on a multiprocessor; the second one is the next kernel's,
    and starts while this one ends.
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
    launcher = ClusterLauncher
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
        whole = 8 if self.tokens > 8 and self.cells.v == 4 else 16  # bytes of a copy
        return -(-self.cells.m // 2) if 2 * self.cells.v == whole else self.cells.m

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
        from anybit.kernels.hopper import codebook, codebook_swapped, psumbook

        if self.psumbook:
            return psumbook.Psumbook(self).compile()
        swapped = self.tokens > 8
        return (codebook_swapped.Swapped if swapped else codebook.Codebook)(self).compile()


def family(cells: Cells) -> list[CodebookKernel]:
    """The kernels that a layer may launch."""
    return [
        kernel
        for dtype in ("float16", "bfloat16")
        for tokens in TOKENS
        for kernel in candidates(cells, tokens, dtype)
    ]


def candidates(cells: Cells, tokens: int, dtype: str) -> list[CodebookKernel]:
    """Kernels for so many tokens, by the K that a CTA holds.

    16 warps hide the latency of look-ups best, but have 128 registers each: more columns of
    tokens take 8.
    """
    if tokens == 1:
        shapes = [(512, 1, 16, 1), (512, 2, 16, 2)]
    elif tokens == 2:
        shapes = [(512, 1, 16, 1)]
    elif cells.v == 16:
        shapes = [(512, 1, 8, 1)]  # its tables leave no room for more
    elif tokens == 8:
        long = (256, 2, 16, 2) if cells.v == 4 else (256, 4, 8, 2)
        shapes = [(256, 2, 8, 2), (256, 1, 16, 2), long]
    else:
        shapes = [(256, 2, 8, 2), (256, 1, 16, 2)][: 2 if cells.v == 4 else 1]
    every = [CodebookKernel(cells, tokens, dtype, *shape) for shape in shapes]
    return [kernel for kernel in every if kernel.shared() <= MAX_SHARED]


@dataclass(frozen=True)
class Plan:
    """How a problem is launched.

    Attributes:
        kernel: What is launched.
        cluster: CTAs of a cluster, which split K.
        splits: Clusters that share K.
    """

    kernel: CodebookKernel
    cluster: int
    splits: int = 1

    @property
    def name(self) -> str:
        """What `anybit tune` calls it."""
        return f"{self.kernel.name}_cluster{self.cluster}x{self.splits}"


def choose(cells: Cells, m: int, n: int, k: int, dtype: str, chip: Chip = H200) -> Plan | None:
    """How to multiply m <= 16 tokens: the plan of the least time; None if no kernel fits."""
    found = plans(cells, m, k, dtype, chip)
    times = {plan: cycles(work(plan, m, n, k, chip), chip.read) for plan in found}
    return min(times, key=times.__getitem__, default=None)


def plans(cells: Cells, m: int, k: int, dtype: str, chip: Chip = H200) -> list[Plan]:
    """All plans that fit. The kernel of 8 tokens takes more of them in two launches."""
    found = []
    enough = [t for t in TOKENS if t >= m and t < 16 * m] + [TOKENS[-2]] * (m > TOKENS[-2])
    for kernel in (kernel for t in enough for kernel in candidates(cells, t, dtype)):
        cluster = -(-k // kernel.reach)
        most = min(MOST_CTAS, chip.multiprocessors * 7 // 8)  # that one cluster finds at once
        if cluster <= most and kernel.shared(cluster) <= MAX_SHARED:
            found.append(Plan(kernel, cluster))
        splits = -(-k // (SHARING * kernel.reach))
        if kernel.psumbook and 1 < splits <= chip.multiprocessors // SHARING:
            found.append(Plan(kernel, SHARING, splits))
    return found


def work(plan: Plan, m: int, n: int, k: int, chip: Chip = H200) -> Work:
    """What a product of up to 16 tokens does: K tiles are pieces of 256 columns of 16 rows."""
    kernel, cells = plan.kernel, plan.kernel.cells
    row_tiles, launches = -(-n // ROWS), -(-m // kernel.tokens)
    teams = max(1, min(chip.multiprocessors // (plan.cluster * plan.splits), row_tiles))
    pieces = -(-k // (256 * plan.cluster * plan.splits))  # of a CTA
    turns = launches * -(-row_tiles // teams)
    slower = 1.4 if cells.v == 4 else 1  # as was timed, like the 64 of each further launch
    return Work(
        kind="psumbook" if kernel.psumbook else "codebook",
        steps=turns,
        beside=1,
        multiply=cells.m * -(-pieces // kernel.warps) * slower,
        decode=cells.m * pieces,
        copied=0,
        read=n * k * cells.m // cells.v + 2 * (m * k + m * n),
        uneven=1,
        ends=turns * ROWS * kernel.tokens,
        turns=turns * kernel.warps + 64 * (launches - 1),
        meets=turns * (plan.cluster * plan.splits > 1),
        clusters=plan.splits > 1,
    )
