"""Which codebook kernels there are, and which one a problem gets: data, not code."""

from anybit.kernels.hopper.cells import ROWS, Cells, CodebookKernel
from anybit.kernels.hopper.tiles import MAX_SHARED, MULTIPROCESSORS

MOST_CTAS, PORTABLE_CTAS = 16, 8  # of a cluster; fewer of the largest find room at once
FEW_TILES = 2 * MULTIPROCESSORS  # of rows: then a kernel's start counts more than its loop
# Up to so many a smaller Psumbook, sooner built, saves more than one cluster of 16 instead of two
# of 8 loses. Lines through times at 512 and 3584 cross at 1630 (m2v8) and 2560 (m1v4).
SOME_TILES = 12 * MULTIPROCESSORS


def family(cells: Cells) -> list[CodebookKernel]:
    """The kernels that a layer may launch."""
    return [
        kernel
        for dtype in ("float16", "bfloat16")
        for tokens in (1, 2, 8, 16)
        for kernel in candidates(cells, tokens, dtype)
    ]


def candidates(cells: Cells, tokens: int, dtype: str) -> list[CodebookKernel]:
    """Kernels for so many tokens, by the K that a CTA holds.

    16 warps hide the latency of look-ups best, but have 128 registers each: more columns of
    tokens take 8. For up to 8 tokens the first of them is for few row tiles.
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
        shapes = [(256, 2, 8, 2)]
    every = [CodebookKernel(cells, tokens, dtype, *shape) for shape in shapes]
    return [kernel for kernel in every if kernel.shared() <= MAX_SHARED]


def choose(cells: Cells, m: int, n: int, k: int, dtype: str) -> tuple[CodebookKernel, int] | None:
    """The kernel for m <= 16 tokens, and the CTAs of a cluster that split K; None if none fits."""
    row_tiles = -(-n // ROWS)
    few = row_tiles <= FEW_TILES
    for tokens in (t for t in (1, 2, 8, 16) if t >= m):
        if tokens <= 2 and few and cells.v * cells.m == 4 and k <= 4096:
            continue  # one Psumbook a CTA takes longer than it saves
        kernels = candidates(cells, tokens, dtype)
        if tokens == 8 and not few:
            kernels = kernels[1:] or kernels
        for kernel in kernels:
            cluster = -(-k // kernel.reach)
            most = PORTABLE_CTAS if kernel.psumbook else 1  # the next kernel splits K less
            full = kernel.psumbook and cluster == MOST_CTAS and row_tiles <= SOME_TILES
            if full or kernel is kernels[-1]:
                most = MOST_CTAS
            if cluster <= most and kernel.shared(cluster) <= MAX_SHARED:
                return kernel, cluster
    return None
