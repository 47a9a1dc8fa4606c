"""Shared memory of the engine's Triton kernels on GPUs that have less than a Hopper GPU."""

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from anybit.kernels.kv.cache import LayerCache
from anybit.kernels.kv.format import plain
from anybit.kernels.triton import activation, attention
from anybit.kernels.triton.attention import PROMPT, Tile
from tests.kernels.compiling import Job, built
from tests.needs import EVERY_KERNEL

KB = 1024
ROOMS = {80: 163 * KB, 86: 99 * KB, 89: 99 * KB, 120: 99 * KB}  # by architecture
DTYPES = {"model": "*bf16", "static": "*i8", "dynamic": "*i8", "int4": "*u8"}


def head_bytes(kind: str, dim: int, size: int = 2) -> int:
    groups = max(1, dim // 128) if kind == "int4" else 1  # of 64 channels, in half a head
    return {"model": size * dim, "int4": dim // 2}.get(kind, dim) + 8 * groups


def tile_of(kind: str, dim: int, rows: int, room: int, size: int = 2) -> Tile:
    given = attention.tile_of(kind, rows)._replace(rows=rows)
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
                    assert tile == attention.tile_of(kind, rows)._replace(rows=rows)
    assert tile_of("model", 256, 128, 99 * KB) == Tile(32, 8, 2, 64)
    assert tile_of("model", 256, 16, 99 * KB) == Tile(32, 2, 3, 16)
    assert tile_of("model", 256, 128, 163 * KB) == PROMPT._replace(rows=128)


def test_what_no_tile_fits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(k: torch.Tensor) -> str | None:
        return attention.refuse(LayerCache(plain(k.dtype), k, k))

    wide = torch.empty(1, 1, 16, 512)
    assert refuse(wide) is None
    monkeypatch.setattr(attention, "shared_memory", lambda device: 99 * KB)
    assert "takes 101632 bytes of shared memory, and it has 101376" in str(refuse(wide))
    assert refuse(wide.half()) is None
    assert "not a power of two" in str(refuse(wide[..., :80]))


SCALES = {"model": None, "static": "*fp32", "dynamic": "*fp32", "int4": "*i32"}
ALIGNED = ("q", "k_cache", "v_cache", "k_scale", "v_scale", "out", "TABLE_STRIDE")


def attend(architecture: int, kind: str, dim: int, tile: Tile) -> Job:
    single = tile.rows == 16 and kind != "model"
    kinds: dict[str, Any] = {
        "q": "*bf16", "k_cache": DTYPES[kind], "v_cache": DTYPES[kind], "k_scale": SCALES[kind],
        "v_scale": SCALES[kind], "tables": "*i32", "contexts": "*i32", "out": "*bf16",
        "TABLE_STRIDE": "i32", "BATCH": "i32", "PARTS": "i32", "SCALE": "fp32", "sums": "*fp32",
        "maxima": "*fp32", "owners": "*i32", "sinks": None,
    }  # fmt: skip
    constants = {
        "KV_HEADS": 8, "GROUP": 4, "D": dim, "BLOCK": 16, "WINDOW": 0, "K_KIND": kind,
        "V_KIND": kind, "GROUPS": max(1, dim // 128) if kind == "int4" else 1,
        "TOKENS": tile.tokens, "PDL": False, "K_STEP": 16 * dim, "V_STEP": 16 * dim,
        "K_GRID": 64, "V_GRID": 64, "EACH": 4,
    } | {name: None for name, type in kinds.items() if type is None}  # fmt: skip
    if not single:
        kinds["starts"] = "*i32"
        constants |= {"ROWS": tile.rows, "SEQUENCES": 0 if tile.rows < 128 else 64}
    name = "attention_int8._attend_int8" if single else "attention._attend"
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return Job(name, kinds, constants, ("cuda", architecture, 32), options, ALIGNED)


def token(architecture: int) -> Job:
    kinds = dict.fromkeys(("x", "other", "weight", "residual"), "*bf16")
    kinds |= dict.fromkeys(("K", "X_STRIDE", "OTHER_STRIDE", "LOW"), "i32")
    kinds |= {"vector": "*fp32", "out": "*i8", "scales": "*fp32", "sums": "*i32", "EPS": "fp32"}
    wide = activation.WIDEST
    constants = {"LARGEST": 127, "FUSE": "norm", "HAS_SUMS": True, "WIDE": wide, "SIZE": 128}
    options = {"num_warps": 32}
    target = ("cuda", architecture, 32)
    return Job("activation._token", kinds, constants | {"PDL": False}, target, options)


EVERY = [(arch, kind) for arch in ROOMS for kind in (*DTYPES, "activations")]


@pytest.mark.parametrize(("architecture", "kind"), EVERY if EVERY_KERNEL else [(86, "model")])
def test_compiled_kernels_take_no_more_than_the_gpu_has(
    compilers: Callable[..., Executor], architecture: int, kind: str
) -> None:
    room = ROOMS[architecture]
    if kind not in DTYPES:
        assert compilers().submit(built, token(architecture)).result().shared <= room
        return
    sizes = [(dim, rows) for dim in (64, 128, 256) for rows in (16, 32, 128)]
    for dim, rows in sizes if EVERY_KERNEL else [(256, 128)]:
        tile = tile_of(kind, dim, rows, room)
        shared = compilers().submit(built, attend(architecture, kind, dim, tile)).result().shared
        assert shared <= room
        if kind == "model" or tile.rows > 16:  # of `_attend`, not `_attend_int8`
            assert shared <= attention.shared_bytes(tile, dim, 2, head_bytes(kind, dim)), tile
