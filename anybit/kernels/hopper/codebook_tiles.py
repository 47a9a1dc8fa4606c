"""Which codebook kernels there are, and which one a problem gets: data, not code."""

from anybit.kernels.hopper.cells import Cells, CodebookKernel
from anybit.kernels.hopper.tiles import MAX_SHARED

MOST_CTAS = 16  # of a cluster


def family(cells: Cells) -> list[CodebookKernel]:
    """The kernels that a layer may launch."""
    return [
        kernel
        for dtype in ("float16", "bfloat16")
        for tokens in (1, 2, 8, 16)
        for kernel in candidates(cells, tokens, dtype)
    ]


def candidates(cells: Cells, tokens: int, dtype: str) -> list[CodebookKernel]:
    """Kernels for so many tokens, the smallest first."""
    if tokens <= 2:
        shapes = [(512, chunks, 16, 2) for chunks in (1, 2)]
    elif cells.columns > 256:
        shapes = [(512, 1, 8, 2)]
    elif tokens == 8:
        # Two chunks of tokens and wide centroids are more than the 128 registers of 16 warps.
        shapes = [(256, chunks, 16, 2) for chunks in ((1, 2) if cells.v == 4 else (1,))]
    else:
        shapes = [(256, 1, 16, 2) if cells.v == 4 else (256, 2, 8, 2)]
    return [CodebookKernel(cells, tokens, dtype, *shape) for shape in shapes]


def choose(cells: Cells, m: int, k: int, dtype: str) -> tuple[CodebookKernel, int] | None:
    """The kernel for m <= 16 tokens, and the CTAs of a cluster that split K."""
    for tokens in (t for t in (1, 2, 8, 16) if t >= m):
        for kernel in candidates(cells, tokens, dtype):
            cluster = -(-k // kernel.reach)
            if cluster <= MOST_CTAS and kernel.shared(cluster) <= MAX_SHARED:
                return kernel, cluster
    return None
