"""Norms, SiLU and quantization become one operator in vLLM's graphs (`make test-vllm`; no GPU)."""

from collections import Counter

import pytest
import torch
from torch import nn
from vllm import ir
from vllm.compilation.passes.inductor_pass import InductorPass, pass_context
from vllm.compilation.passes.ir.inplace_functionalization import (
    VllmIRInplaceFunctionalizationPass,
)
from vllm.compilation.passes.ir.lowering_pass import VllmIRLoweringPass
from vllm.config import (
    CompilationConfig,
    CompilationMode,
    DeviceConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.config.utils import Range
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm

import anybit
from anybit.core.scheme import parse_scheme
from anybit.integrations import vllm_fusion
from anybit.integrations.vllm_fusion import Fusion, enable
from anybit.integrations.vllm_products import build

HIDDEN, MIDDLE, TOKENS = 64, 128, 5


@pytest.fixture(autouse=True)
def config():
    own = VllmConfig(
        device_config=DeviceConfig(device="cpu"),
        compilation_config=CompilationConfig(custom_ops=["none"]),
    )
    # An engine on a CPU, of another test, leaves the operators of norms off.
    with set_current_vllm_config(own), ir.enable_torch_wrap():
        yield own


class Passes(InductorPass):
    """Ours and then the lowering, as in vLLM's compiler; notes the operators in between."""

    def __init__(self, config):
        self.first = VllmIRInplaceFunctionalizationPass(config)
        self.passes = Fusion(), VllmIRLoweringPass(config)
        self.found = Counter()

    def __call__(self, graph):
        self.passes[0](graph)
        graph.lint()
        self.found = Counter(
            (node.target._schema.name, *[a for a in node.args if isinstance(a, str)][:1])
            for node in graph.nodes
            if isinstance(node.target, torch._ops.OpOverload)
        )
        self.passes[1](graph)

    def uuid(self):
        return None  # nothing is cached


class Block(nn.Module):
    """A decoder's layer without attention. schemes: of Q, K, gate and up, and down."""

    def __init__(self, schemes, dtype):
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(HIDDEN, dtype=dtype) for _ in range(3))
        for norm in self.norms:
            nn.init.normal_(norm.weight)
        self.act = SiluAndMul()
        q, k, gate_up, down = schemes
        self.qk = products([(q, HIDDEN), (k, HIDDEN)], HIDDEN, dtype)
        self.gate_up = products([(gate_up, 2 * MIDDLE)], HIDDEN, dtype)
        self.down = products([(down, HIDDEN)], MIDDLE, dtype)

    def forward(self, x):
        residual = x
        x = self.norms[0](x)
        x = torch.add(*[part(x, None) for part in self.qk])
        x, residual = self.norms[1](x, residual)
        x = self.act(self.gate_up[0](x, None))
        return self.norms[2](self.down[0](x, None), residual)


def products(each, k, dtype):
    """Layers of (scheme, N)."""
    layers = []
    for scheme, n in each:
        weight, activation = torch.randn(n, k, dtype=dtype) / k**0.5, None
        if scheme is not None:
            fmt, activation = parse_scheme(scheme)
            weight = anybit.quantize_tensor(weight, fmt)
        layers += build([(weight, activation)], "reference", dtype, "layer")
    return nn.ModuleList(layers)


def compiled(block, x, passes):
    """What a block compiled with these passes returns for any number of tokens."""
    torch._dynamo.reset()
    options = {"pre_grad_custom_pass": passes.first, "post_grad_custom_post_pass": passes}
    function = torch.compile(block, fullgraph=True, dynamic=True, options=options)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad(), pass_context(Range(1, 64)):
        return function(x)


FULL = {("anybit::add_norm", "int8"): 2, ("anybit::add_norm",): 1, ("anybit::silu_mul", "int8"): 1}
CASES = {
    "int8": (["liquid@int8"] * 4, FULL),
    "fp8": (["fp6@fp8"] * 4, {(name, *["fp8"] * len(a)): n for (name, *a), n in FULL.items()}),
    "weights alone": (["int4:group=32"] * 4, {("anybit::add_norm",): 3, ("anybit::silu_mul",): 1}),
    # Q and K want other tokens, and gate and up and down one kind each.
    "unlike": (
        ["liquid@int8", None, "fp6@fp8", "int4:group=32"],
        {
            ("anybit::add_norm",): 2,
            ("anybit::quantize", "int8"): 1,
            ("anybit::add_norm", "fp8"): 1,
            ("anybit::silu_mul",): 1,
        },
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("schemes", "wanted"), CASES.values(), ids=CASES)
def test_fused_is_unfused(config, schemes, wanted, dtype):
    torch.manual_seed(0)
    block, passes = Block(schemes, dtype), Passes(config)
    x = torch.randn(TOKENS, HIDDEN, dtype=dtype)
    with torch.no_grad():
        plain = block(x)
    fused = compiled(block, x, passes)
    ours = {
        key: count
        for key, count in passes.found.items()
        if key[0].startswith("anybit::") and key[0] != "anybit::linear"
    }
    assert {**ours} == {tuple(key): count for key, count in wanted.items()}
    for got, expected in zip(fused, plain, strict=True):
        near = 1e-4 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(got, expected, rtol=near, atol=near)


@pytest.mark.parametrize("mode", [CompilationMode.NONE, CompilationMode.VLLM_COMPILE])
def test_vllm_compiles_with_it_on_gpus(config, monkeypatch, mode):
    passes = config.compilation_config.inductor_compile_config
    config.compilation_config.mode = mode
    enable()
    assert "post_grad_custom_post_pass" not in passes
    monkeypatch.setattr(vllm_fusion.current_platform, "is_cuda", lambda: True)
    for _ in range(2):  # once for every layer
        enable()
        found = isinstance(passes.get("post_grad_custom_post_pass"), Fusion)
        assert found == (mode is CompilationMode.VLLM_COMPILE)
