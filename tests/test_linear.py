"""QuantLinear on the CPU backends, against the definition."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import anybit
from anybit import dispatch, ops
from anybit.kernels import cpu, reference
from tests.specs import SPECS

N, K = 96, 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def layer(spec, activation=None, bias=True):
    random = torch.Generator().manual_seed(0)
    w = torch.randn(N, K, generator=random) * 0.02
    b = torch.randn(N, generator=random) if bias else None
    return anybit.QuantLinear(anybit.quantize_tensor(w, spec), b, activation)


def tokens(m, dtype):
    return torch.randn(m, K, generator=torch.Generator().manual_seed(m)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS)
def test_one_hot_tokens_read_every_weight_back(spec, dtype):
    q = layer(spec, bias=False)
    weight = reference.operand_weight(q.packed, dtype)
    assert torch.equal(q(torch.eye(K, dtype=dtype)), weight.T.to(dtype))


@pytest.mark.parametrize("spec", SPECS)
def test_fp32_reference_is_the_decoded_matrix(spec):
    q, x = layer(spec), tokens(5, torch.float32)
    expected = x.double() @ q.dequantize(torch.float64).T + q.bias.double()
    got = q(x).double()
    assert (got - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("m", [0, 1, 3, 8, 9, 33])
@pytest.mark.parametrize("activation", [None, "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", ["liquid", "int8", "int4", "int1", "sparse"])
def test_cpu_backend_equals_the_reference(spec, dtype, activation, m):
    q, x = layer(spec, activation), tokens(m, dtype)
    assert q.backend == "cpu"
    expected = reference.linear(
        x, reference.prepare(q.packed, activation), q.bias, q.format, N, activation
    )
    # bf16 sums are rounded once before the scale and once after it.
    bound = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}[dtype]
    got = q(x)
    assert got.shape == (m, N)
    assert (got.float() - expected.float()).norm() <= bound * expected.float().norm()


@pytest.mark.parametrize("activation", ["int8", "fp8"])
def test_quantized_activations_cost_little_and_something(activation):
    x = tokens(16, torch.float32)
    exact = layer("int8")(x)
    error = (layer("int8", activation)(x) - exact).norm() / exact.norm()
    assert 1e-4 < error < {"int8": 0.02, "fp8": 0.05}[activation]


def test_tokens_are_quantized_one_by_one():
    x = torch.stack((torch.ones(K), torch.arange(K) * 1000.0, torch.zeros(K)))
    codes, scale = reference.quantize_tokens(x, "int8")
    assert codes.amax(1).tolist() == [127, 127, 0]
    assert torch.allclose(codes * scale, x, atol=0.5 * float(scale.max()))


def test_batches_and_strides_are_taken_as_they_are():
    q = layer("fp6")
    x = tokens(24, torch.bfloat16)
    assert torch.equal(q(x.view(2, 3, 4, K)), q(x).view(2, 3, 4, N))
    wide = torch.randn(7, 2 * K, dtype=torch.bfloat16)
    assert torch.equal(q(wide[:, ::2]), q(wide[:, ::2].contiguous()))


@pytest.mark.parametrize("spec", ["int8", "liquid@int8", "sparse", "fp6"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_of_x_need_not_be_adjacent(spec, dtype):
    q = layer(*dispatch.parse_scheme(spec))
    for m in (0, 1, 5, 20):
        x = torch.randn(K, m).to(dtype).T
        assert torch.equal(q(x), q(x.contiguous()))


def test_wrong_width_is_explained():
    with pytest.raises(ValueError, match="x has 255 columns, the layer 256 inputs"):
        layer("int4")(torch.randn(1, 255))


def test_casts_leave_codes_and_scales_alone():
    q = layer("int4:group=64,zero")
    before = {name: t.clone() for name, t in q.packed.tensors().items()}
    q.to(torch.bfloat16).half().double()
    for name, tensor in q.packed.tensors().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name])
    assert q.bias.dtype == torch.float64


@pytest.mark.parametrize("spec", ["fp6", "liquid@int8", "codebook:m=1,v=4"])
def test_state_dict_round_trip_into_an_empty_layer(spec):
    fmt, activation = dispatch.parse_scheme(spec)
    q, x = layer(fmt, activation), tokens(4, torch.bfloat16)
    empty = anybit.QuantLinear.empty(spec, (N, K), torch.zeros(N), device="cpu")
    empty.load_state_dict(q.state_dict())
    assert torch.equal(empty(x), q(x))


@pytest.mark.parametrize("spec", ["fp6", "liquid@int8"])
def test_compiles_as_one_graph(spec):
    fmt, activation = dispatch.parse_scheme(spec)
    model = nn.Sequential(layer(fmt, activation), nn.SiLU())
    x = tokens(3, torch.bfloat16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), model(x))


def test_the_operator_describes_itself():
    q, x = layer("fp6"), tokens(3, torch.bfloat16)
    args = (x, q.prepared, q.bias.detach().bfloat16(), q.scheme, N, q.backend)
    torch.library.opcheck(torch.ops.anybit.linear.default, args)


def test_every_refusal_is_in_words():
    answers = dispatch.refusals(
        anybit.get_format("int4:group=64"), None, (N, K), torch.device("cpu")
    )
    assert answers["reference"] is None
    assert "one scale a row" in answers["cpu"]
    assert all(reason is None or len(reason.split()) > 3 for reason in answers.values())


def test_the_cpu_backend_leaves_processors_whose_int8_product_saturates(monkeypatch):
    monkeypatch.setattr(cpu, "int8_product_is_exact", lambda: False)
    assert layer("int8", "int8").backend == "reference"
    assert layer("int8").backend == "cpu"


def test_unknown_activation_lists_the_known():
    with pytest.raises(ValueError, match="unknown activation 'int6' in 'liquid@int6'; known: int8"):
        dispatch.parse_scheme("liquid@int6")


def test_damaged_tensors_are_named():
    packed = anybit.quantize_tensor(torch.randn(8, 64), "fp6")
    tensors = packed.tensors() | {"codes2": torch.zeros(8, 3, dtype=torch.int32)}
    with pytest.raises(
        ValueError, match=r"layer\.codes2: expected shape \(8, 4\) .* found \(8, 3\)"
    ):
        anybit.Packed.from_tensors(packed.format, (8, 64), tensors, "layer")
    without_scale = {k: v for k, v in packed.tensors().items() if k != "scale"}
    with pytest.raises(ValueError, match="layer: tensor 'scale' of format 'fp6' is missing"):
        anybit.Packed.from_tensors(packed.format, (8, 64), without_scale, "layer")


@pytest.mark.parametrize("spec", ["liquid", "fp6"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tokens_quantized_before_give_the_same(spec, dtype):
    q, x = layer(spec, "int8"), tokens(6, dtype).view(2, 3, K)
    codes, scale = reference.quantize_tokens(x, "int8")
    given = anybit.ops.Tokens(codes, scale[..., 0], codes.int().sum(-1).int(), dtype)
    assert torch.equal(q(given), q(x))
    empty = anybit.QuantLinear.empty(q.scheme, (N, K), torch.zeros(N), device="cpu")
    empty.load_state_dict(q.state_dict())
    assert torch.equal(empty(given), q(x))
    with pytest.raises(ValueError, match="x has 255 columns"):
        q(given._replace(codes=codes[..., :-1]))
    for other, wanted in ((None, "plain activations"), ("fp8", "torch.float8_e4m3fn")):
        with pytest.raises(TypeError, match=f"quantized to torch.int8, .* multiplies {wanted}"):
            layer(spec, other)(given)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_layer_that_was_only_loaded_can_be_released(device):
    q, x = layer("liquid", bias=False), tokens(3, torch.bfloat16)
    loaded = anybit.QuantLinear.empty("liquid", (N, K), device=device)
    assert loaded.release().released == (device == "cpu")
    loaded = anybit.QuantLinear.empty("liquid", (N, K), device=device)
    loaded.load_state_dict(q.state_dict(), assign=device == "meta")
    assert loaded.release().released
    assert torch.equal(loaded(x), q(x))


@pytest.mark.parametrize("spec", ["liquid", "int4:group=32"])
def test_a_released_layer_multiplies_and_says_what_it_cannot(spec, monkeypatch):
    q, x = layer(spec, bias=False), tokens(3, torch.bfloat16)
    if q.backend == "reference":  # stands for a backend with a layout of its own
        monkeypatch.setattr(reference, "release", lambda prepared: list(prepared))
    want, names = q(x), set(q.state_dict())
    model = nn.Sequential(q.release(), nn.Linear(N, N))
    assert not {n for n in names if n.startswith("codes")} & set(q._buffers)
    assert torch.equal(model.half()[0](x), want)  # nothing to cast, nothing moved
    for use in (model.state_dict, lambda: model.to("meta"), q.dequantize, q.prepare):
        with pytest.raises(RuntimeError, match=r"release\(\) has dropped .* load"):
            use()


def test_layers_of_the_reference_keep_what_they_multiply():
    q = layer("fp6")
    assert q.backend == "reference"
    assert not q.release().released
    assert q.state_dict()


def test_float32_activations_keep_a_gpu_layer_on_the_reference():
    cuda = torch.device("cuda")
    answers = dispatch.refusals(anybit.get_format("int4"), None, (N, K), cuda, torch.float32)
    assert "not torch.float32" in answers["triton"]
    assert "not torch.float32" in answers["hopper"]
    chosen = dispatch.choose(anybit.get_format("int4"), None, (N, K), cuda, torch.float32)
    assert chosen == "reference"


def test_kernels_run_on_the_device_of_x(monkeypatch):
    """Not on the current one: a model may be spread over several GPUs."""
    current = [0]

    @contextmanager
    def device(wanted):
        current.append(wanted.index)
        yield
        current.pop()

    ran = []
    backend = SimpleNamespace(linear=lambda x, *args: ran.append((x.device.index, current[-1])))
    monkeypatch.setattr(ops, "get_backend", lambda name: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    for index in (0, 1):
        x = SimpleNamespace(is_cuda=True, device=torch.device("cuda", index))
        ops._linear(x, [], None, "int4", N, "triton")
    assert ran == [(0, 0), (1, 1)]
    assert current == [0]
