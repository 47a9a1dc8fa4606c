"""Triton's kernels compiled by other processes, and what a launch then finds.

Here Triton interprets, so a process of its own runs each part, with a stand-in for a GPU's driver.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import forks

pytest.importorskip("triton")
LAUNCH = """
import json, sys, types
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Driver:
    launched = []

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source, metadata):
        return lambda *args: self.launched.append(source.name)

    utils = types.SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        load_binary=lambda *args: (0, 0, 32, 0, 1024),
    )

driver.set_active(Driver())
compiled = []
lacked = lambda src, cache_hit, **_: cache_hit or compiled.append(src.name)
knobs.compilation.listener = lacked

from anybit.core.format import get_format
from anybit.kernels.ahead import Missing, build_for, collected
from anybit.kernels.triton import activation, backend, likeliest
from anybit.quantizers.quantize import quantize_tensor

x, w = torch.zeros(2, 256, dtype=torch.bfloat16), torch.ones(256, dtype=torch.bfloat16)
weight = backend.prepare(quantize_tensor(torch.zeros(64, 256), get_format("fp6")), None)
launches = [
    lambda: backend.linear(x, weight, None),
    lambda: activation.add_norm(x, None, w, 1e-5),
    lambda: likeliest.likeliest(x, -1),
][:: int(sys.argv[1])]
if sys.argv[2:] == ["ahead"]:
    with collected() as found:
        launches[1]()
    noted = [name.partition(" ")[0] for name in found.kernels]
    try:
        with collected(strict=True):
            launches[1]()
    except Missing:
        noted.append("missing")
    print(json.dumps([noted, Driver.launched, build_for(launches), compiled]))
else:
    knobs.runtime.jit_post_compile_hook = lambda **seen: None  # as vLLM watches for compilations
    with collected(strict=True):
        launches[1]()
    for launch in launches:
        launch()
    print(json.dumps([Driver.launched, compiled]))
"""
TOKENS = """
from anybit.kernels.backend import LayerSpec
from anybit.core.scheme import parse_scheme

MOST, missed = 600, {}
for scheme in ("int4:group=64", "int8@int8", "fp6"):
    fmt, activation = parse_scheme(scheme)
    weight = backend.prepare(quantize_tensor(torch.zeros(96, 256), fmt), activation)
    x = torch.zeros(MOST, 256, dtype=torch.bfloat16)
    layer = LayerSpec(fmt, activation, (96, 256), x.device, x.dtype)
    tokens = backend.needs(layer, MOST).tokens
    names = []
    for counts in (tokens, range(1, MOST + 1)):
        with collected() as found:
            for m in counts:
                backend.linear(x[:m], weight, None)
        names.append(set(found.kernels))
    missed[scheme] = [len(tokens), len(names[0]), len(names[1] - names[0])]
print(json.dumps(missed))
"""
ABORTING = """
import os
from anybit.kernels.triton import ahead

def compile_one(function, *others):
    if function.name == "_token":
        os.abort()
    ahead.compile_one(function, *others)
"""
ABORTED = """
sys.path.insert(0, sys.argv[2])
import aborting
from anybit.errors import Unsupported
from anybit.kernels import compilations
from anybit.kernels.triton import ahead

ahead.compile_one, said, told = aborting.compile_one, [], []
compilations.watch(told.append)
listeners = [knobs.compilation.listener, lacked]
knobs.compilation.listener = lambda **seen: [hear(**seen) for hear in listeners]
for launch in (launches[1], launches[1], launches[2], launches[2]):
    try:
        launch()
    except Unsupported as error:
        said.append(str(error).partition(";")[0])
ahead.CHILD.end()
print(json.dumps([said, Driver.launched, told, compiled]))
"""


def run(cache: Path, *args: str, code: str = LAUNCH) -> Any:
    done = forks.run(code, *args, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_launches_find_what_other_processes_have_compiled(tmp_path: Path) -> None:
    """In another order as well, in which Triton left to itself names its kernels otherwise."""
    noted, launched, errors, compiled = run(tmp_path, "1", "ahead")
    assert noted == ["_token", "missing"]
    assert (launched, errors, compiled) == (["gemm", "_token", "_largest", "_likeliest"], [], [])
    assert run(tmp_path, "-1") == [["_token", "_largest", "_likeliest", "_token", "gemm"], []]


def test_numbers_of_tokens_that_launch_every_kernel(tmp_path: Path) -> None:
    before, _, _ = LAUNCH.partition("x, w = ")
    for tokens, kernels, missed in run(tmp_path, code=before + TOKENS).values():
        assert missed == 0
        assert 4 < kernels <= tokens + 2 < 40  # beside products, what quantizes and what decodes


def test_a_compiler_that_aborts_ends_a_child(tmp_path: Path) -> None:
    """The next kernel is compiled by another one, loaded from Triton's cache, and told once."""
    (tmp_path / "aborting.py").write_text(ABORTING)
    before, _, _ = LAUNCH.partition("if sys.argv[2:]")
    said, launched, told, compiled = run(tmp_path, "1", str(tmp_path), code=before + ABORTED)
    assert said == 2 * ["Triton's compiler ends its process at the kernel _token"]
    assert (launched, compiled) == (2 * ["_largest", "_likeliest"], [])
    assert [text.partition("(")[0].rpartition(".")[2] for text in told] == launched[:2]
    assert told[0].startswith("anybit.kernels.triton.likeliest._largest(")
    assert "WIDE=" in told[0]
