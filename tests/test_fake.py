"""Training with rounding: outputs are the quantized model's, and tensors stay as they were."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import GPT2Config, GPT2LMHeadModel

import anybit
from anybit.core.rotation import hadamard
from anybit.errors import InvalidInput
from anybit.nn.model import quantized_modules
from tests import tiny
from tests.engine.conftest import ARCHITECTURES, random_model
from tests.specs import SPECS
from tests.test_experts import tiny_experts

ROUND = "int3:group=32,rotate=k@int8", "int4:group=32,rotate=kn", "liquid@int8", "fp6@fp8"
IDS = torch.randint(0, 90, (2, 12), generator=torch.Generator().manual_seed(1))


def decoded(model: Any) -> Any:
    return anybit.set_keep(anybit.quantize_(model), "decoded")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [*SPECS, *ROUND])
def test_a_layer_in_every_format(spec: str, dtype: torch.dtype) -> None:
    """Outputs and the gradient of inputs, bit for bit; the weight's is the product's."""
    torch.manual_seed(0)
    layer = nn.Linear(256, 64).to(dtype)
    x = torch.randn(2, 24, 256).to(dtype).requires_grad_()
    w = layer.weight
    assert anybit.fake_quantize_(layer, spec) is layer
    y = layer(x)
    y.backward(random := torch.randn_like(y))
    got, x.grad = x.grad, None
    if "@" not in spec:
        bound = 1e-4 if dtype == torch.float32 else 0.02
        wanted = random.flatten(0, 1).double().T @ x.detach().flatten(0, 1).double()
        assert layer.weight is w
        assert w.grad is not None
        assert (w.grad - wanted).norm() < bound * wanted.norm()
    quantized = decoded(layer)
    assert quantized.scheme == anybit.quantize_(nn.Linear(256, 64), spec).scheme
    z = quantized(x)
    z.backward(random)
    assert torch.equal(y, z)
    assert got is not None
    assert torch.equal(got, x.grad)


def model_of(kind: str) -> Any:
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=2))
    return random_model(*ARCHITECTURES[kind])


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.eval()(input_ids=IDS, use_cache=False).logits
    return out


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model.train()(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("llama", "int3:group=32,rotate=k"),
        ("llama-biases-tied", {"*": "int3:group=32", "*.embed_tokens": "int4:group=32"}),
        ("llama-biases-tied", {"*": "int3:group=32", "lm_head": "int8"}),
        ("gemma2", {"*": "liquid:group=32@int8", "*.embed_tokens": "int5:group=32"}),
        ("gpt2", "int3:group=32@int8"),
        ("mixtral", {"*": "int3:group=32", "*.experts.0.*": None, "*.w2": "fp6"}),
        ("deepseek_v3", {"*": None, "*.experts.*": "int3:group=32@int8"}),
    ],
)
def test_models(kind: str, plan: Any) -> None:
    torch.manual_seed(0)
    model = model_of(kind)
    dense, before = copy.deepcopy(model), {n: id(p) for n, p in model.named_parameters()}
    names = list(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    assert anybit.fake_quantize_(model, plan) is model
    assert {n: id(p) for n, p in model.named_parameters()} == before
    assert list(model.state_dict()) == names
    assert not torch.equal(logits(model), logits(dense))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(again), logits(model))
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    losses = train(model, optimizer)
    assert losses[-1] < losses[0]
    got = logits(model)
    dense.load_state_dict(model.state_dict())
    anybit.quantize_(model)
    wanted = anybit.quantize_(dense, plan)
    assert sum(1 for _ in quantized_modules(model)) > 3
    assert model.config.quantization_config == wanted.config.quantization_config
    tiny.same_state(model, wanted)
    assert torch.equal(logits(anybit.set_keep(model, "decoded")), got)
    tiny.same_output(logits(wanted), got)


@pytest.mark.parametrize("kind", ["gpt_oss", "llama4", "nemotron_h"])
def test_experts_in_other_layouts(kind: str) -> None:
    module, x, routed = tiny_experts(kind)
    model = nn.ModuleDict({"experts": module})
    anybit.fake_quantize_(model, "int4:group=32@int8")
    with torch.no_grad():
        got = model.experts(x, *routed)
    model.experts(x, *routed).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())
    decoded(model)
    with torch.no_grad():
        assert torch.equal(model.experts(x, *routed), got)


def test_the_same_codes_under_autocast() -> None:
    """Which would multiply by the rotation in 16 bits."""
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64), torch.randn(3, 64)
    anybit.fake_quantize_(layer, "int3:group=32,rotate=kn")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got = layer(x)
        assert got.dtype == torch.bfloat16
    assert torch.equal(got, decoded(layer)(x.bfloat16()))


def test_training_after_inference() -> None:
    """What inference mode has cached passes gradients."""
    hadamard.cache_clear()
    layer = anybit.fake_quantize_(nn.Linear(64, 64), "int4:group=32,rotate=kn")
    with torch.inference_mode():
        layer(torch.randn(2, 64))
    layer(torch.randn(2, 64)).sum().backward()
    assert layer.weight.grad is not None


def test_formats_may_change_and_errors_change_nothing() -> None:
    model = tiny.llama(dtype=torch.float32)
    with pytest.raises(InvalidInput, match="quantize_ needs a format"):
        anybit.quantize_(model)
    own = logits(model)
    anybit.fake_quantize_(model, "int8")
    eight = logits(model)
    anybit.fake_quantize_(model, None)
    assert torch.equal(logits(model), own)
    anybit.fake_quantize_(model, "int8")
    with pytest.raises(InvalidInput, match="not a multiple of group=48"):
        anybit.fake_quantize_(model, "int4:group=48")
    with pytest.raises(InvalidInput, match="not a multiple of group=48"):
        anybit.quantize_(model, "int4:group=48")
    assert torch.equal(logits(model), eight)
    anybit.fake_quantize_(model, {"*": None, "*.o_proj": "int2:group=32"})
    assert not torch.equal(logits(model), eight)
    down = model.model.layers[0].self_attn.o_proj
    with torch.no_grad():
        down.weight[3, 4] = torch.nan
    with pytest.raises(InvalidInput, match=r"0\.self_attn\.o_proj: the weight has become NaN"):
        logits(model)
    with torch.no_grad():
        down.weight[3, 4] = 0
    parametrize.register_parametrization(down, "weight", nn.Identity())
    with pytest.raises(InvalidInput, match=r"o_proj has become a Parametrized.* remove"):
        anybit.quantize_(model)
    parametrize.remove_parametrizations(down, "weight")
    part = copy.deepcopy(model.model)
    anybit.quantize_(model)
    assert {m.scheme for _, m in quantized_modules(model)} == {"int2:group=32"}
    anybit.quantize_(part)  # by its own names
    tiny.same_state(part, model.model)


def test_another_format_at_last() -> None:
    """Layers that the new plan keeps are ordinary ones again."""
    model = anybit.fake_quantize_(tiny.llama(), "int4")
    anybit.quantize_(model, {"*": None, "*.up_proj": "int8"})
    dense = anybit.quantize_(tiny.llama(), {"*": None, "*.up_proj": "int8"})
    assert torch.equal(logits(model), logits(dense))
    assert type(model.model.layers[0].mlp.down_proj) is nn.Linear


def test_hooks_and_fast_paths_call_the_layer() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2).eval()
    first = model.layers[0].linear1  # type: ignore[union-attr]
    hooks.add_hook_to_module(first, hooks.ModelHook())
    anybit.fake_quantize_(model, "int2")
    with torch.no_grad():
        got = model(x := torch.randn(2, 5, 32))
        anybit.quantize_(model)
        torch.testing.assert_close(got, model(x))
    assert not any(m._forward_pre_hooks for m in model.modules())
