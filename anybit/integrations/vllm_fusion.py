"""What vLLM does between products, by the kernels of anybit's engine: one launch, not three.

A layer of quantized activations asks for them by `anybit::quantize` before its product. In graphs
that vLLM compiles, `Fusion` joins that with the RMSNorm or SiLU * up before it, so that tokens are
read once, and quantized once for all layers that read them. RMSNorm and SiLU * up before other
layers become the same kernels: on Hopper these start while the product before them ends.

vLLM runs the pass before it lowers its own operators, which is where RMSNorm is still one node.
"""

import operator
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement
from vllm import ir
from vllm.compilation.passes.inductor_pass import InductorPass, enable_fake_mode
from vllm.config import CompilationMode, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.platforms import current_platform

from anybit.kernels.backend import HALVES, Activations
from anybit.kernels.between import Wanted, of

logger = init_logger(__name__)
WIDEST = 32768  # columns of a token that one program holds
Quantized = tuple[Tensor, Tensor, Tensor]  # codes, scales and sums of tokens

# What is not quantized has neither scales nor sums.
_library = torch.library.Library("anybit", "FRAGMENT")
_library.define("quantize(Tensor x, str activation) -> (Tensor, Tensor, Tensor)")
_library.define("silu_mul(Tensor x, str? activation) -> (Tensor, Tensor, Tensor)")
_library.define(
    "add_norm(Tensor x, Tensor? delta, Tensor weight, float eps, str? activation) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def _parts(x: Tensor | Activations, activation: str | None) -> Quantized:
    """x (T, K) as operators return it, quantized if it is not yet."""
    if isinstance(x, Activations):
        return x.codes, x.scale, x.sums
    if activation is None:
        return x, *_nothing(x)
    return of(x).quantize(x, activation)


def _nothing(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(0, dtype=torch.float32), x.new_empty(0, dtype=torch.int32)


def _quantize(x: Tensor, activation: str) -> Quantized:
    codes, scale, sums = _parts(x.reshape(-1, x.shape[-1]), activation)
    return codes.view(x.shape), scale, sums


def _silu_mul(x: Tensor, activation: str | None) -> Quantized:
    """x (T, 2 K), gate beside up."""
    gate, up = x.chunk(2, -1)
    return _parts(of(up).silu_mul(gate, up, Wanted(activation)), activation)


def _add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, activation: str | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """RMSNorm of x + delta (T, K), and last the sum; nothing there without a delta."""
    out, total = of(x).add_norm(x, delta, weight, eps, Wanted(activation))
    return *_parts(out, activation), x.new_empty(0) if delta is None else total


def _like(x: Tensor, activation: str | None) -> Quantized:
    """Tensors of the shapes of `_parts`."""
    kinds = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, None: x.dtype}
    tokens = prod(x.shape[:-1])
    return (
        x.new_empty(x.shape, dtype=kinds[activation]),
        x.new_empty(0 if activation is None else tokens, dtype=torch.float32),
        x.new_empty(tokens if activation == "int8" else 0, dtype=torch.int32),
    )


def _silu_mul_fake(x: Tensor, activation: str | None) -> Quantized:
    return _like(x.new_empty(*x.shape[:-1], x.shape[-1] // 2), activation)


def _add_norm_fake(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, activation: str | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_like(x, activation), x.new_empty(x.shape if delta is not None else 0)


for _name, _function, _fake in (
    ("quantize", _quantize, _like),
    ("silu_mul", _silu_mul, _silu_mul_fake),
    ("add_norm", _add_norm, _add_norm_fake),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"anybit::{_name}", _fake, lib=_library)

quantize = torch.ops.anybit.quantize.default
silu_mul = torch.ops.anybit.silu_mul.default
add_norm = torch.ops.anybit.add_norm.default


def enable() -> None:
    """Have the graphs of the model that vLLM builds now go through `Fusion`, on NVIDIA's GPUs."""
    config = get_current_vllm_config_or_none()
    if config is None or not current_platform.is_cuda():
        return
    compilation = config.compilation_config
    if compilation.mode != CompilationMode.VLLM_COMPILE:
        return
    passes, key = compilation.inductor_compile_config, current_platform.pass_key
    if not isinstance(passes.setdefault(key, Fusion()), Fusion):
        logger.warning_once("norms and quantization stay apart: %s is set already", key)


class Fusion(InductorPass):
    """Joins norms, SiLU * up and quantization in a graph of vLLM's."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            replace_norm(graph, node)
        activations().apply(graph)
        for node in graph.find_nodes(op="call_function", target=quantize):
            if node.users:  # else it was another one's
                join(graph, node)

    def uuid(self) -> str:
        return InductorPass.hash_source(Path(__file__).read_text())


def replace_norm(graph: fx.Graph, node: fx.Node) -> None:
    """Put `add_norm` where vLLM has RMSNorm of whole tokens, with a weight of their dtype."""
    if node.target == ir.ops.rms_norm.torch_op:
        x, weight, eps, *rest = node.args
        delta = None
    elif node.target == ir.ops.fused_add_rms_norm.torch_op:
        x, delta, weight, eps, *rest = node.args
    else:
        return
    if node.kwargs or any(rest) or not isinstance(weight, fx.Node) or not suits(x):
        return
    if weight.meta["val"].dtype != value(x).dtype:
        return
    with graph.inserting_before(node):
        # The sum is x + delta in either order.
        ours = call(graph, add_norm, x, delta, weight, eps, None)
        if delta is None:
            node.replace_all_uses_with(item(graph, ours, 0))
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(item(graph, ours, 3 if user.args[1] else 0))
            graph.erase_node(user)
    graph.erase_node(node)


def join(graph: fx.Graph, node: fx.Node) -> None:
    """Let what makes the tokens of `quantize` also quantize them; once for all who want that."""
    tokens, activation = node.args
    assert isinstance(tokens, fx.Node)
    same = [user for user in tokens.users if user.target == quantize and user.args == node.args]
    maker = tokens.args[0] if tokens.target is operator.getitem else None
    if (
        isinstance(maker, fx.Node)
        and maker.target in (add_norm, silu_mul)
        and tokens.args[1] == 0
        and maker.args[-1] is None
        and len(same) == len(tokens.users)  # nobody reads the tokens themselves
        and sum(user.args[1] == 0 for user in maker.users) == 1
    ):
        maker.args = (*maker.args[:-1], activation)
        maker.meta["val"] = evaluated(maker)
        node = maker
    else:
        same.remove(node)
    for other in same:
        for user in list(other.users):
            with graph.inserting_after(node):
                user.replace_all_uses_with(item(graph, node, user.args[1]))
            graph.erase_node(user)
        graph.erase_node(other)
    if not tokens.users:
        graph.erase_node(tokens)


@cache
def activations() -> PatternMatcherPass:
    """SiLU(gate) * up of gate beside up, as it is left when vLLM's layer is traced."""
    patterns = PatternMatcherPass(pass_name="anybit_silu_mul")

    def written(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return F.silu(x[..., :half]) * x[..., half:]

    def ours(x: Tensor) -> Tensor:
        return silu_mul(x, None)[0]

    def enter(dtype: torch.dtype) -> None:
        example = torch.empty(5, 64, dtype=dtype, device=current_platform.device_type)
        register_replacement(written, ours, [example], fwd_only, patterns, extra_check=matched)

    for dtype in (torch.bfloat16, torch.float32):  # float16 is traced as bfloat16 is
        enable_fake_mode(enter)(dtype)
    return patterns


def matched(match: Any) -> bool:
    return suits(match.kwargs["x"])


# Nodes.


def value(node: Any) -> Tensor:
    """What a node stands for: its shape, dtype and device."""
    found: Tensor = node.meta["val"]
    return found


def suits(node: Any) -> bool:
    """Whether our kernels take these tokens."""
    x = value(node)
    return x.ndim == 2 and x.shape[1] <= WIDEST and (x.dtype in HALVES or not x.is_cuda)


def call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = evaluated(node)
    return node


def item(graph: fx.Graph, node: fx.Node, index: Any) -> fx.Node:
    """One of the outputs of a node."""
    found = graph.call_function(operator.getitem, (node, index))
    found.meta["val"] = node.meta["val"][index]
    return found


def evaluated(node: fx.Node) -> Any:
    """What a node stands for, by its operator on what its arguments stand for."""
    args = fx.map_arg(node.args, value)
    assert callable(node.target)
    return node.target(*args)
