"""What vLLM's warm-up compiles for anybit's layers, with a stand-in for kernels of a GPU."""

import logging
from functools import partial
from io import StringIO

import pytest
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
from vllm.utils import jit_monitor

from anybit.core.format import get_format
from anybit.integrations import vllm, vllm_ready
from anybit.integrations.vllm_linear import Stored
from anybit.kernels import ahead, compilations, reference
from anybit.kernels.backend import Needs
from anybit.kernels.registry import BACKENDS, register_backend
from anybit.quantizers.quantize import quantize_tensor

MOST = 300


class Kernels:
    """A backend with a kernel for each multiple of 100 tokens, and one that it names itself."""

    def __init__(self) -> None:
        self.there: set[tuple] = set()
        self.asked: list[tuple] = []
        self.compiled: list[tuple] = []
        self.launched: list[tuple] = []

    refuse = staticmethod(reference.refuse)
    prepare = staticmethod(reference.prepare)

    def take(self, kernel: tuple) -> None:
        if kernel in self.there:
            return
        if notes := ahead.notes():
            raise notes.missing(str(kernel), partial(self.add, kernel))
        self.add(kernel)

    def add(self, kernel: tuple) -> None:
        self.compiled.append(kernel)
        self.there.add(kernel)

    def needs(self, layer, most, experts=False):
        self.asked.append((layer.shape, layer.dtype, most, experts))
        return Needs([partial(self.take, (*layer.shape, "own"))], [100, 200, 300])

    def linear(self, x, prepared, bias):
        kernel = (*prepared.shape, -(-len(x) // 100))
        self.take(kernel)
        self.launched.append((len(x), bias is not None))
        return reference.linear(x, prepared, bias)


@pytest.fixture
def kernels(monkeypatch):
    found = Kernels()
    before = dict(BACKENDS)
    register_backend("counted", found, ("cpu",), before="native")
    monkeypatch.setattr(ahead, "side_by_side", lambda calls: [call() or "" for call in calls])
    yield found
    BACKENDS.clear()
    BACKENDS.update(before)


def layer_of(n, k, bias=None):
    layer = torch.nn.Module()
    layer.params_dtype, layer.bias = torch.float32, bias
    method = Stored(["layer"], ["int4"], [n], None)
    method.finish(layer, [(quantize_tensor(torch.randn(n, k), get_format("int4")), None)])
    return method, layer


def test_kernels_of_all_layers_are_compiled_before_the_first_request(kernels) -> None:
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    config.scheduler_config.max_num_batched_tokens = MOST
    registry = JitWarmupRegistry(config)
    with set_current_vllm_config(config), registry.activate():
        layers = [layer_of(*shape) for shape in ((64, 128), (32, 128), (64, 128))]
        layers.append(layer_of(48, 128, torch.zeros(48)))
    assert kernels.compiled == []
    registry.warmup()
    shapes = [(64, 128), (32, 128), (48, 128)]
    assert kernels.asked == [(shape, torch.float32, MOST, False) for shape in shapes]
    want = {(*shape, kernel) for shape in shapes for kernel in ("own", 1, 2, 3)}
    assert set(kernels.compiled) == want
    assert len(kernels.compiled) == len(want)
    assert {m for m, _ in kernels.launched} >= {1, 2, 3, 16, 17, 256, 257, 100, 200, 300}
    assert max(m for m, _ in kernels.launched) == MOST
    assert vllm_ready.LAYERS.found == {}
    done = len(kernels.compiled)
    for method, layer in layers:
        for m in range(1, MOST + 1):
            method.apply(layer, torch.zeros(m, 128), layer.bias)
    assert len(kernels.compiled) == done


def test_nothing_is_registered_outside_of_vllms_loading(kernels) -> None:
    method, layer = layer_of(64, 128)
    assert method.apply(layer, torch.zeros(2, 128)).shape == (2, 64)
    assert kernels.asked == []
    assert vllm_ready.LAYERS.found == {}


def test_kernels_that_requests_wait_for_are_counted(kernels, monkeypatch, caplog) -> None:
    layer_of(64, 128)
    before = vllm_ready.compilations_after_ready()
    compilations.note("while vLLM starts")
    monkeypatch.setattr(jit_monitor, "_active", True)
    for _ in range(2):
        compilations.note("product(64, 128)")
    compilations.note("vllm.its_own", own=False)
    assert vllm_ready.compilations_after_ready() == before + 2
    assert caplog.text.count("a request waited for a kernel: product(64, 128)") == 1
    assert "while vLLM starts" not in caplog.text


def test_lines_of_ours_are_among_those_of_vllm(monkeypatch):
    vllm.register()
    text, theirs = StringIO(), logging.getLogger("vllm")
    monkeypatch.setattr(theirs, "handlers", [logging.StreamHandler(text)])
    monkeypatch.setattr(theirs, "level", logging.INFO)
    vllm_ready.logger.info("kernels of %s are there", "ours")
    assert text.getvalue() == "kernels of ours are there\n"
