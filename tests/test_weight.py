"""The weight of a quantized layer as models see it, and its gradient."""

import pytest
import torch
from torch import nn
from transformers import initialization

import anybit
from anybit.core.scheme import parse_scheme
from tests.specs import SPECS
from tests.test_linear import K, N, layer, tokens, without_compiled_kernels
from tests.tiny import same_output

__all__ = ["without_compiled_kernels"]  # a fixture that all tests here use


def test_models_look_at_the_weight():
    q, x = layer("fp6").bfloat16(), tokens(3, torch.bfloat16)
    weight = q.weight
    assert isinstance(weight, torch.Tensor)
    assert (weight.dtype, weight.shape, weight.device.type) == (torch.bfloat16, (N, K), "cpu")
    decoded = q.dequantize(torch.bfloat16)
    assert torch.equal(nn.functional.linear(x, weight), nn.functional.linear(x, decoded))
    assert torch.equal(weight[:3].float(), decoded[:3].float())
    assert torch.equal(weight.T @ weight, decoded.T @ decoded)
    assert weight.detach().float().numpy().shape == (N, K)
    assert "weight" not in {*q.state_dict(), *dict(q.named_parameters())}
    assert q.half().weight.dtype == torch.float16
    initialization.normal_(weight)  # leaves it alone
    assert torch.equal(q.weight, q.dequantize(torch.float16))
    assert repr(weight) == repr(decoded)


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.zero_(),
        lambda w: w.__setitem__(0, 1.0),
        lambda w: w[0].copy_(torch.zeros(K)),
        lambda w: w.T.mul_(2),
        lambda w: w.data.fill_(1),
        lambda w: w.view(-1)[3:].zero_(),
        lambda w: w.chunk(2)[1].add_(1),
        lambda w: w.mul_(torch.ones(N, 1)),
        lambda w: w.div_(0),
        lambda w: w.requires_grad_(False).clamp_(0),
    ],
)
def test_nothing_is_written_to_a_weight_without_a_word(write):
    q = layer("fp6")
    before = q.dequantize()
    with pytest.raises(RuntimeError, match="cannot be written to; dequantize_"):
        write(q.weight)
    assert torch.equal(q.dequantize(), before)


def test_a_weight_is_multiplied_by_a_number():
    """As RWKV divides the weights of later blocks when it starts to run."""
    q, x = layer("int4:group=64,zero", keep="decoded"), tokens(3, torch.float32)
    q.bias = None
    before, y = q.dequantize(), q(x)
    q.weight.div_(2**2)
    assert torch.equal(q.dequantize(), before / 4)
    assert torch.equal(q(x), y / 4)
    q.weight.mul_(torch.tensor(4.0))
    assert torch.equal(q(x), y)
    with pytest.raises(RuntimeError, match="would be rounded"):
        q.weight.mul_(1 / 3)
    assert torch.equal(q.dequantize(), before)


def test_a_released_weight_has_a_dtype_and_no_values():
    weight = layer("liquid").release().weight
    assert weight.dtype == torch.float32
    with pytest.raises(RuntimeError, match=r"only multiplies: .* load the checkpoint again"):
        weight.sum()


class Looks(nn.Module):
    """As T5 does, and as nn.TransformerEncoderLayer might."""

    def __init__(self):
        super().__init__()
        self.wo = layer("fp6")

    def forward(self, x):
        return self.wo(x.to(self.wo.weight.dtype)) + x.float() @ self.wo.weight.T


def test_models_that_look_compile():
    torch.compiler.reset()
    model, x = Looks(), tokens(3, torch.bfloat16)
    expected = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    same_output(compiled(x), expected)


def check_gradients(q, function):
    grad = torch.randn(2, 3, N, generator=torch.Generator().manual_seed(1))
    x = tokens(6, torch.float32).view(2, 3, K).requires_grad_()
    q.bias.requires_grad_().grad = None
    function(x).backward(grad)
    torch.testing.assert_close(x.grad, grad @ q.dequantize())
    torch.testing.assert_close(q.bias.grad, grad.sum((0, 1)))


@pytest.mark.parametrize("keep", ["packed", "decoded"])
@pytest.mark.parametrize("spec", [*SPECS, "liquid@int8", "fp6@fp8"])
def test_the_gradient_is_that_of_the_decoded_weight(spec, keep):
    q = layer(*parse_scheme(spec), keep=keep)
    check_gradients(q, q)


def test_the_gradient_compiles():
    torch.compiler.reset()  # the other tests' variants of one function have a limit
    q = layer("liquid", "int8")
    check_gradients(q, torch.compile(q, fullgraph=True, backend="aot_eager"))


def test_a_released_layer_has_no_gradient():
    q = layer("liquid").release()
    with pytest.raises(RuntimeError, match="released has no gradient; load"):
        q(tokens(2, torch.float32).requires_grad_()).sum().backward()


def test_the_first_call_may_be_compiled():
    """A layer that waits for its first call is laid out while it is traced, for each dtype anew."""
    layer = anybit.quantize_(torch.nn.Linear(64, 48), "fp6")
    layer.keep = "decoded"
    compiled = torch.compile(layer.prepare(), fullgraph=True, backend="aot_eager")
    assert layer.prepared is None
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        x = torch.randn(3, 64, dtype=dtype)
        with torch.no_grad():
            assert torch.equal(compiled(x), layer(x))
        assert layer.prepared.dtype == dtype
