"""Which layers the `mma.sync` family refuses, and its self-test, without a GPU."""

import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anybit.core.format import get_format
from anybit.core.scheme import parse_scheme
from anybit.kernels import registry
from anybit.kernels.backend import LayerSpec
from anybit.kernels.cute import jit, operands
from anybit.kernels.mma import backend, linear, selftest
from anybit.kernels.mma.backend import BACKEND
from anybit.kernels.mma.tiles import Gpu, Kernel, Tile
from tests.kernels.mma import GPUS
from tests.kernels.test_mma import CUDA, decoders


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gpu:
    found = GPUS["A100"]
    monkeypatch.setattr(backend, "gpu_of", lambda device: found)
    monkeypatch.setattr(selftest, "gpu_of", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found.capability)
    monkeypatch.setattr(selftest, "driver_version", lambda: 12080)
    monkeypatch.setattr(jit, "dsl_version", lambda: "4.8.1")
    monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path))
    return found


def spec_of(scheme: str, shape: tuple[int, int] = (4096, 4096), dtype: Any = None) -> LayerSpec:
    fmt, activation = parse_scheme(scheme)
    return LayerSpec(fmt, activation, shape, CUDA, dtype)


def test_refusals_say_why(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> str:
        return BACKEND.refuse(spec_of(*args)) or ""

    assert refuse("fp6") == ""
    assert refuse("codebook:m=1,v=4") == ""
    assert refuse("codebook:m=1,v=4,b=4") == ""
    assert "a table of 2^16 centroids" in refuse("codebook:m=1,v=4,b=16")
    assert "not by int8" in refuse("codebook:m=1,v=4@int8")
    assert "not torch.float32" in refuse("fp6", (4096, 4096), torch.float32)
    assert refuse("fp6", (4097, 1001)) == ""
    assert "sm_89" in refuse("fp6@fp8")
    assert "nor into sums here" in refuse("fp6:group=128@fp8")
    for capability, words in (((9, 0), "hopper"), ((7, 5), "sm_80"), ((13, 0), "sm_80")):
        other = replace(gpu, capability=capability)
        monkeypatch.setattr(backend, "gpu_of", lambda device, other=other: other)
        assert words in refuse("fp6")
    small = replace(gpu, shared=4096, shared_of_sm=8192)
    monkeypatch.setattr(backend, "gpu_of", lambda device: small)
    assert "do not fit" in refuse("fp6")
    monkeypatch.setattr(backend, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(jit, "dsl_version", lambda: None)
    assert "anybit[hopper]" in refuse("fp6")


def test_both_halves_are_asked_for(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the dtype of activations is unknown; later only what it is."""
    real = operands.decoder
    missing = lambda fmt, operand: "no fp16" if operand == "float16" else real(fmt, operand)  # noqa: E731
    monkeypatch.setattr(operands, "decoder", missing)
    assert operands.refuse_format(spec_of("fp6")) == "no fp16"
    assert operands.refuse_format(spec_of("fp6", dtype=torch.float16)) == "no fp16"
    assert operands.refuse_format(spec_of("fp6", dtype=torch.bfloat16)) is None
    assert operands.refuse_format(spec_of("fp6@fp8")) is None


def test_kernels_for_nvidia_refuse_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls AMD's GPUs cuda as well, and an MI250 has the capability (9, 0)."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for name in ("hopper", "mma"):
        assert "NVIDIA GPUs only" in str(registry.get_backend(name).refuse(spec_of("fp6")))


def test_the_family_stands_between_hopper_and_triton(gpu: Gpu) -> None:
    assert list(registry.BACKENDS)[:3] == ["hopper", "mma", "triton"]
    answers = registry.refusals(spec_of("int4:group=128"))
    assert "needs an H100 or H200" in str(answers["hopper"])
    assert answers["mma"] is None


# The self-test.


def answered(verdicts: dict[str, str], code: int = 0) -> Any:
    """A process that leaves these verdicts for the names that contain the keys."""

    def run(command: list[str], **kwargs: Any) -> SimpleNamespace:
        assert command[1:3] == ["-m", "anybit.kernels.mma.selftest"]
        assert command[3:] == ["int4:group=128", "", "4096", "4096", "bfloat16", "cuda:0"]
        layer = spec_of("int4:group=128", dtype=torch.bfloat16)
        for kernel in selftest.kernels_of(layer, torch.bfloat16, GPUS["A100"]):
            name = jit.kernel_file(kernel).name
            for part, verdict in verdicts.items():
                if part in name:
                    selftest.record(CUDA, {name: verdict})
        return SimpleNamespace(returncode=code, stderr="Traceback\nillegal instruction")

    return run


def test_a_layer_is_tested_once_it_is_used(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layer = spec_of("int4:group=128", dtype=torch.bfloat16)
    monkeypatch.setattr(subprocess, "run", answered({"": "right"}))
    assert BACKEND.refuse(layer._replace(dtype=None)) is None  # it is only being asked about
    assert selftest.summary(CUDA) is None
    assert BACKEND.refuse(layer) is None
    count = len(selftest.kernels_of(layer, torch.bfloat16, gpu))
    assert (
        selftest.summary(CUDA) == f"{count} of {count} kernels for mma.sync passed their self-test"
    )
    assert [r.getMessage().partition(": ")[2] for r in caplog.records] == [
        f"{count} of {count} are right; they are used"
    ]
    monkeypatch.setattr(subprocess, "run", None)  # nobody asks again
    assert BACKEND.refuse(layer) is None


def test_a_wrong_kernel_is_not_used(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = spec_of("int4:group=128", dtype=torch.bfloat16)
    monkeypatch.setattr(subprocess, "run", answered({"narrow": "right", "gemm": "two runs differ"}))
    reason = BACKEND.refuse(layer) or ""
    assert "failed their self-test on this GPU: two runs differ" in reason
    assert "selftest-nvidia-a100-driver12080.json" in reason
    assert "failed their self-test" in (BACKEND.refuse(layer._replace(dtype=None)) or "")


def test_a_process_that_dies_is_a_verdict(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = spec_of("int4:group=128", dtype=torch.bfloat16)
    monkeypatch.setattr(subprocess, "run", answered({"narrow": "right"}, code=1))
    assert "illegal instruction" in (BACKEND.refuse(layer) or "")


def test_experts_have_a_self_test_of_their_own(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where their kernels are wrong, experts are multiplied one after the other."""
    layer = spec_of("int4:group=128", dtype=torch.bfloat16)
    kernels = selftest.kernels_of(layer, torch.bfloat16, gpu, experts=True)
    verdict = ["right"]

    def run(command: list[str], **kwargs: Any) -> SimpleNamespace:
        assert command[-2:] == ["cuda:0", "experts"]
        selftest.record(CUDA, {jit.kernel_file(k).name: verdict[0] for k in kernels})
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    assert BACKEND.takes_experts(layer)
    assert "experts of int4:group=128" in caplog.text
    assert f"{len(kernels)} of {len(kernels)} are right" in caplog.text
    assert BACKEND.takes_experts(layer._replace(shape=(768, 2048)))
    selftest.record(CUDA, {jit.kernel_file(kernels[0]).name: "two runs differ"})
    assert not BACKEND.takes_experts(layer)
    assert not BACKEND.takes_experts(spec_of("codebook:m=1,v=4", dtype=torch.bfloat16))
    assert not BACKEND.takes_experts(layer._replace(dtype=torch.float32))


class Exact:
    """Stands for kernels: the definition, or something wrong."""

    def __init__(self, wrong: str = ""):
        self.wrong, self.calls = wrong, 0

    def __call__(self, x, scale, sums, prepared, bias, dtype, kernel, grid, starts, pairs):
        self.calls += 1
        weights = [weight.clone() for weight in self.weights]
        if self.wrong == "weight":
            weights[-1][3, 5] += 0.01
        if self.wrong == "repeat":
            weights[0][0, 0] += self.calls * 0.01
        if self.wrong == "sum" and x.abs().sum(1).max() > 1:
            weights[0] *= 1.1
        each = [0, len(x)] if starts is None else starts.tolist()
        parts = zip(pairwise(each), weights, strict=True)
        y = torch.cat([x[a:b].double() @ weight.T for (a, b), weight in parts])
        if pairs is not None:
            y = torch.cat([y[:2].sum(0)[None], y[2:]]) if self.wrong != "pair" else y[1:]
        return y.to(dtype)


@pytest.mark.parametrize(
    ("wrong", "verdict"),
    [
        ("", "right"), ("weight", "weights are wrong"), ("repeat", "two runs differ"),
        ("sum", "a relative error of"), ("pair", "a relative error of"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "tile",
    [Tile(8, 1, 4, 2, kind="narrow"), Tile(32, 2, 4, 2), Tile(8, 2, 4, 2, kind="experts")],
    ids=lambda tile: tile.kind,
)
def test_the_test_finds_what_is_wrong(
    wrong: str, verdict: str, tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = LayerSpec(get_format("int8"), "int8", (4096, 4096), torch.device("cpu"), torch.float16)
    kernel = Kernel(next(decoders("int8@int8")), tile, "float16", "sm_80")
    verdict = "right" if wrong == "pair" and tile.sorted else verdict  # experts have no pairs
    exact = Exact(wrong)
    exact.weights = selftest.SmallWeight(layer, tile).weights
    monkeypatch.setattr(linear, "multiply", exact)
    assert verdict in selftest.verdict(layer, kernel)
