"""Shared memory of the engine's Triton kernels on GPUs that have less than a Hopper GPU."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from anybit.kernels.kv import Planes
from anybit.kernels.triton import attention
from anybit.kernels.triton.attention import PROMPT, TILES, Tile
from tests.needs import EVERY_KERNEL

KB = 1024
ROOMS = {80: 163 * KB, 86: 99 * KB, 89: 99 * KB, 120: 99 * KB}  # by architecture
DTYPES = {"model": "*bf16", "static": "*i8", "dynamic": "*i8", "int4": "*u8"}
Case = tuple[str, int, Tile]  # kind of cache, dimension of heads, tile


def head_bytes(kind: str, dim: int, size: int = 2) -> int:
    groups = max(1, dim // 128) if kind == "int4" else 1  # of 64 channels, in half a head
    return {"model": size * dim, "int4": dim // 2}.get(kind, dim) + 8 * groups


def tile_of(kind: str, dim: int, rows: int, room: int, size: int = 2) -> Tile:
    tile = PROMPT if rows == 128 else TILES[kind]
    given = tile._replace(rows=rows)
    return attention.fitted(given, dim, size, head_bytes(kind, dim, size), room)


@pytest.mark.parametrize("room", [99 * KB, 163 * KB, 227 * KB])
@pytest.mark.parametrize("kind", DTYPES)
def test_tiles_follow_what_the_gpu_has(kind: str, room: int) -> None:
    for dim in (16, 64, 128, 256, 512):
        for size in (2, 4):
            for rows in (16, 32, 128):
                tile = tile_of(kind, dim, rows, room, size)
                bytes_ = attention.shared_bytes(tile, dim, size, head_bytes(kind, dim, size))
                if (dim, size) != (512, 4):
                    assert bytes_ <= room
                assert tile.tokens >= 32
                assert tile.rows >= 16
                if dim <= 128 and size == 2:  # as measured
                    assert tile == (PROMPT if rows == 128 else TILES[kind])._replace(rows=rows)
    assert tile_of("model", 256, 128, 99 * KB) == Tile(32, 8, 2, 64)
    assert tile_of("model", 256, 16, 99 * KB) == Tile(32, 4, 3, 16)
    assert tile_of("model", 256, 128, 163 * KB) == PROMPT._replace(rows=128)


def test_what_no_tile_fits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(k: torch.Tensor) -> str | None:
        return attention.refuse(Planes("model", "model", k, k))

    wide = torch.empty(1, 1, 16, 512)
    assert refuse(wide) is None
    monkeypatch.setattr(attention, "shared_memory", lambda device: 99 * KB)
    assert "takes 101632 bytes of shared memory, and it has 101376" in str(refuse(wide))
    assert refuse(wide.half()) is None
    assert "not a power of two" in str(refuse(wide[..., :80]))


PROGRAM = """
import json
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from anybit.kernels.triton import activation, attention, attention_int8

SCALES = {"model": None, "static": "*fp32", "dynamic": "*fp32", "int4": "*i32"}


def shared(function, kinds, constants, warps, stages=3):
    names = function.arg_names
    constants |= {n: None for n, kind in kinds.items() if kind is None}
    signature = {n: kinds.get(n) or "constexpr" for n in names}
    values = {(names.index(n),): v for n, v in constants.items()}
    aligned = {
        (names.index(n),): [["tt.divisibility", 16]] for n, kind in kinds.items()
        if kind and n in ("q", "k_cache", "v_cache", "k_scale", "v_scale", "out", "TABLE_STRIDE")
    }
    source = ASTSource(function, signature, values, aligned)
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=target, options=options).metadata.shared


for kind, dim, (tokens, warps, stages, rows), cache in json.loads(sys.argv[2]):
    single = rows == 16 and kind != "model"
    kinds = dict(
        q="*bf16", k_cache=cache, v_cache=cache, k_scale=SCALES[kind], v_scale=SCALES[kind],
        tables="*i32", contexts="*i32", out="*bf16", TABLE_STRIDE="i32", SCALE="fp32", sums=None,
        maxima=None, sinks=None,
    )
    constants = dict(
        KV_HEADS=8, GROUP=4, D=dim, BLOCK=16, WINDOW=0, K_KIND=kind, V_KIND=kind, SPLITS=1,
        GROUPS=max(1, dim // 128) if kind == "int4" else 1, TOKENS=tokens, PDL=False,
    )
    function = attention_int8._attend_int8 if single else attention._attend
    if not single:
        kinds |= {"starts": "*i32", "BATCH": "i32"}
        constants |= {"ROWS": rows, "SEQUENCES": 0 if rows < 128 else 64}
    print(kind, dim, rows, shared(function, kinds, constants, warps, stages))
if sys.argv[3] == "activations":
    tokens = dict.fromkeys(["x", "other", "weight", "residual", "hadamard"], "*bf16")
    kinds = tokens | dict(
        vector="*fp32", out="*i8", scales="*fp32", sums="*i32", K="i32", X_STRIDE="i32",
        OTHER_STRIDE="i32", EPS="fp32",
    )
    wide = activation.WIDEST
    constants = dict(LARGEST=127, FUSE="norm", HAS_SUMS=True, WIDE=wide, SIZE=128, PDL=False)
    print("token", wide, 1, shared(activation._token, kinds, constants, wide // 256))
"""
EVERY = [(arch, kind) for arch in ROOMS for kind in (*DTYPES, "activations")]


@pytest.mark.parametrize(("architecture", "kind"), EVERY if EVERY_KERNEL else [(86, "model")])
def test_compiled_kernels_take_no_more_than_the_gpu_has(architecture: int, kind: str) -> None:
    room, cases = ROOMS[architecture], []
    if kind in DTYPES:
        sizes = [(256, 128)]
        if EVERY_KERNEL:
            sizes = [(dim, rows) for dim in (64, 128, 256) for rows in (16, 32, 128)]
        cases = [(kind, dim, tile_of(kind, dim, r, room), DTYPES[kind]) for dim, r in sizes]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(architecture), json.dumps(cases), kind],
        capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    taken = [int(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(taken) == max(1, len(cases))
    assert max(taken) <= room
    for (_, dim, tile, _), shared in zip(cases, taken, strict=False):
        if kind == "model" or tile.rows > 16:  # of `_attend`, not `_attend_int8`
            assert shared <= attention.shared_bytes(tile, dim, 2, head_bytes(kind, dim)), tile
