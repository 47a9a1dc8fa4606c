"""Few tokens on CUDA cores, with sums in fp32 and in fp16, beside our kernels on tensor cores.

    python benchmarks/cuda_cores.py --out benchmarks/results/h200_cuda_cores.csv

GemLite's way to multiply: each program decodes rows of 4-bit codes, whose words hold codes 32
columns apart, multiplies on CUDA cores, two numbers at a time in fp16, and adds up in the end. The
best of some tiles is timed, with cold weights, beside int4 in groups of 128 as our layers launch it
and cuBLAS. `error` is that of the product on normal tokens, by norm, beside exact sums.
"""

import argparse
import csv
import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from hopper_layers import RandomLayer, dense_us, time_tile
from torch import Tensor

from anybit.measure.timing import median_us, rotated

FORMAT, GROUP, WARP, FIELDS = "int4:group=128", 128, 32, 8
SHAPES, COUNTS = ((28672, 4096), (4096, 4096)), (1, 2, 4, 8, 16)
TILES = ((1, 8, 4), (4, 4, 4), (2, 8, 8))  # rows, tiles of 256 columns, warps
COLUMNS = ("N", "K", "M", "kernel", "us", "error", "tile", "gpu", "date", "commit")


@triton.jit
def gemv(
    x, words, scales, y, N, K,
    M: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    token = tl.arange(0, M)[:, None, None]
    word = tl.arange(0, 32 * WIDE)[None, :]
    kind: tl.constexpr = tl.float16 if HALF else tl.float32
    sums = tl.zeros((M, ROWS, 32 * WIDE), kind)
    for first in range(0, K // 8, 32 * WIDE):
        codes = tl.load(words + row * (K // 8) + first + word)
        column = (first + word) // 32 * 256 + word % 32
        for group in tl.static_range(2):
            part = tl.zeros((M, ROWS, 32 * WIDE), kind)
            for j in tl.static_range(4):
                code = codes >> (16 * group + 4 * j) & 15
                if HALF:  # the bits of 1024 and of 2^23, to which a code is added
                    w = (code | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1032
                else:
                    w = (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388616
                v = tl.load(x + token * K + (column + (128 * group + 32 * j))[None])
                part += v.to(kind) * w[None]
            scale = tl.load(scales + row * (K // 128) + column // 128 + group)
            sums += part * scale.to(kind)[None]
    at = tl.arange(0, M)[:, None] * N + tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(y + at, tl.sum(sums, 2))


def pack(codes: Tensor) -> Tensor:
    """Codes (N, K) of 4 bits -> words (N, K / 8), whose codes are 32 columns apart."""
    n, k = codes.shape
    fields = codes.view(n, k // (FIELDS * WARP), FIELDS, WARP).long()
    shift = torch.arange(0, 32, 4, device=codes.device)[:, None]
    words = (fields << shift).sum(2).view(n, k // FIELDS)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).int()


def multiply(
    x: Tensor, words: Tensor, scales: Tensor, tile: tuple[int, int, int], half: bool
) -> Tensor:
    (m, k), n = x.shape, len(words)
    rows, wide, warps = tile
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    gemv[n // rows,](x, words, scales, y, n, k, m, rows, wide, half, num_warps=warps)
    return y


def measure(n: int, k: int) -> Iterator[dict[str, Any]]:
    """Rows of one weight; sums in both types against exact ones."""
    codes = torch.randint(16, (n, k), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(n, k // GROUP, device="cuda") * 0.01 + 0.01).half()
    weight = (codes.float() - 8) * scales.float().repeat_interleave(GROUP, 1)
    words = pack(codes)
    copies = rotated(words, words.nbytes)
    ours = RandomLayer(FORMAT, torch.float16, n, k, cold=True, few=True)
    for m in COUNTS:
        x = torch.randn(m, k, device="cuda").half()
        exact = x.double() @ weight.double().T
        for half in (False, True):
            best = (math.inf, TILES[0])
            for tile in TILES:
                calls = [partial(multiply, x, w, scales, tile, half) for w in copies]
                best = min(best, (median_us(calls, torch.device("cuda")), tile))
            got = multiply(x, words, scales, best[1], half).double()
            error = float((got - exact).norm() / exact.norm())
            if not error < 2e-2:
                raise SystemExit(f"{n}x{k}, {m} tokens: the product is off by {error:.1e}")
            name = f"CUDA cores fp{16 if half else 32}"
            yield {"M": m, "kernel": name, "us": best[0], "error": f"{error:.2e}", "tile": best[1]}
        yield {"M": m, "kernel": "tensor cores", "us": time_tile(ours, m, None, None)}
        yield {"M": m, "kernel": "cuBLAS fp16", "us": dense_us(n, k, m, torch.float16)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", default="", help="what is measured, for the rows")
    parser.add_argument("--out", type=Path, default=Path("h200_cuda_cores.csv"))
    args = parser.parse_args()
    date, gpu = time.strftime("%Y-%m-%d", time.gmtime()), torch.cuda.get_device_name()
    with args.out.open("w", newline="") as file:
        rows = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        rows.writeheader()
        for n, k in SHAPES:
            for row in measure(n, k):
                us = round(row.pop("us"), 2)
                tile = "x".join(map(str, row.pop("tile", ())))
                facts = {"gpu": gpu, "date": date, "commit": args.commit}
                rows.writerow({"N": n, "K": k, **row, "us": us, "tile": tile, **facts})
                print(f"{n}x{k}", *row.values(), us, tile, flush=True)
                file.flush()


if __name__ == "__main__":
    main()
