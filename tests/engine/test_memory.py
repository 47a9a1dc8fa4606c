"""A model that a GPU has no room for is refused before its weights are read."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anybit.engine import memory
from anybit.engine.llm import LLM
from anybit.engine.weights import Checkpoint
from anybit.errors import InvalidInput, Unsupported
from anybit.kernels.kv.cache import LayerCache
from anybit.kernels.kv.format import plain
from anybit.kernels.kv.formats import KV_FORMATS
from tests.pages import place, taken

PICO = Path(__file__).parents[2] / "models" / "pico"
CARD = 24 << 30


def load(quantization: str | None = None, **options: Any) -> LLM:
    small = {"max_tokens": 16, "max_running": 2}
    return LLM(PICO, quantization, device="cpu", dtype="bfloat16", **(small | options))


def blocks_of(llm: LLM) -> int:
    return int(llm.engine.runner.states[0].k.shape[0])


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that a GPU of 24 GiB has left."""
    left = [CARD]
    monkeypatch.setattr(memory, "gpu_memory", lambda device: (left[0], CARD))
    return left


def test_what_does_not_fit_is_refused_before_it_is_read(
    free: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    real = Checkpoint.least_bytes
    monkeypatch.setattr(
        Checkpoint, "least_bytes", lambda self: found.append(real(self)) or found[-1]
    )
    load()
    stored = sum(path.stat().st_size for path in PICO.glob("*.safetensors"))  # in bf16
    assert 0.9 * stored < found[0] <= stored
    load("int4:group=64")
    assert found[1] < 0.7 * found[0]

    free[0] = (found[0] + found[1]) // 2
    load("int4:group=64")  # has room
    monkeypatch.setattr(Checkpoint, "_read", None)
    with pytest.raises(
        Unsupported, match=r"GiB or more, and .* of 24.0 GiB are free .* fewer bits"
    ):
        load()


def test_a_cache_that_does_not_fit_is_refused(free: list[int]) -> None:
    """Beside what a step takes, which follows from max_tokens and max_running."""
    free[0] = 20 << 20
    with pytest.raises(
        InvalidInput,
        match=r"a KV cache of \d+ bytes, the least there is, does not fit: .* max_tokens",
    ):
        load(max_tokens=8192, max_running=64)
    assert blocks_of(load(max_tokens=8192, max_running=1)) > 2  # a step has a text's tokens at most
    blocks = blocks_of(load(max_running=8))
    assert blocks > 2
    with pytest.raises(InvalidInput, match=rf"kv_bytes={21 << 20} \(0.02202 GB\) does not fit"):
        load(kv_bytes=21 << 20)
    free[0] = CARD
    assert blocks_of(load(max_running=8)) > blocks


def test_a_cache_larger_than_the_machine_is_refused() -> None:
    """A CPU would give the memory, and run out of it later."""
    with pytest.raises(
        InvalidInput,
        match=r"kv_bytes=1125899906842624 \(1.126e\+06 GB\) does not fit: cpu has [\d.]+ GB",
    ):
        load(kv_bytes=1 << 50)


def test_a_step_of_llama_3_8b_on_a_card_of_24_gib() -> None:
    """About 0.8 GB: activations, logits, the largest weight decoded."""
    config = SimpleNamespace(hidden_size=4096, intermediate_size=14336, vocab_size=128256)
    step = memory.step_bytes(config, 2048, 256)
    assert 0.6e9 < step < 1.2e9
    experts = vars(config) | {"num_experts_per_tok": 8, "moe_intermediate_size": 768}
    assert memory.step_bytes(SimpleNamespace(**experts), 2048, 256) > step
    mixtral = vars(config) | {"num_experts_per_tok": 2}  # `intermediate_size` is an expert's
    assert memory.step_bytes(SimpleNamespace(**mixtral), 2048, 256) > 1.5 * step


def test_only_gpus_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.gpu_memory(torch.device("cpu")) is None
    shared = SimpleNamespace(is_integrated=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: shared)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, CARD))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10)
    assert memory.gpu_memory(torch.device("cuda")) == (25, CARD)  # what torch would reuse is free
    shared.is_integrated = True  # files that were read count as used there
    assert memory.gpu_memory(torch.device("cuda")) is None


def test_a_cache_takes_memory_of_a_cpu_when_it_is_written() -> None:
    """Whatever the process has freed before, here more than malloc returns to the system."""
    cpu = torch.device("cpu")
    freed = [b"." * 60_000 for _ in range(4_000)]
    last = b"." * 50_000  # behind it: malloc keeps what lies before
    del freed
    cache = LayerCache.empty(1 << 14, 2, 16, 64, plain(torch.float32), cpu)
    assert cache.nbytes == 1 << 28 > len(last)
    assert sum(taken(*place(plane)) for plane in (cache.k, cache.v)) < 1 << 24
    for plane in (cache.k, cache.v):
        assert plane.data_ptr() % 64 == 0
        assert not plane[::1000].any()
        plane[7] = 1
        assert taken(*place(plane[7])) >= plane[7].nbytes
        assert not plane[6].any()
        assert not plane[8].any()
    small = LayerCache.empty(3, 2, 4, 64, KV_FORMATS["int4"], cpu)
    for plane in (small.k, small.v, small.k_scale, small.v_scale):
        assert plane is not None
        assert plane.is_contiguous()
        assert not plane.any()
