"""QuantLinear on the CPU backends, against the definition."""

import copy
import gc
import logging
import pickle
import weakref
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

import anybit
from anybit.cli.doctor import doctor
from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput, InvalidType, Unsupported
from anybit.kernels import dense, reference, registry
from anybit.kernels.backend import Activations, LayerSpec, Prepared
from anybit.kernels.native import backend as native
from anybit.nn import op as ops
from anybit.nn.linear import check_finite
from tests.needs import pairs
from tests.specs import SPECS
from tests.tiny import TOKENS, llama, same_output

N, K = 96, 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def without_compiled_kernels(monkeypatch):
    """These backends serve where LLVM's kernels do not; those have tests of their own."""
    monkeypatch.setattr(native, "refuse", lambda layer: "kernels of LLVM are not asked")


def layer(spec, activation=None, bias=True, keep="packed", dtype=None):
    random = torch.Generator().manual_seed(0)
    w = torch.randn(N, K, generator=random) * 0.02
    b = torch.randn(N, generator=random) if bias else None
    return anybit.QuantLinear(anybit.quantize_tensor(w, spec), b, activation, dtype, keep)


def tokens(m, dtype):
    return torch.randn(m, K, generator=torch.Generator().manual_seed(m)).to(dtype)


@pytest.mark.parametrize(("spec", "dtype"), pairs(SPECS, DTYPES))
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


@pytest.mark.parametrize("spec", ["int8", "liquid", "sparse", "fp6"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_of_x_need_not_be_adjacent(spec, dtype):
    """In numbers whose sums are exact in fp32, so that the order of summation does not matter."""
    q = layer(*parse_scheme(spec))
    q.scale.fill_(2.0**-7)
    q.prepare()
    for m in (0, 1, 5, 20):
        wide = torch.randint(-4, 5, (2 * K, m)).to(dtype)
        for x in (wide[:K].T, wide.T[:, ::2]):
            assert torch.equal(q(x), q(x.contiguous()))


def test_wrong_width_is_explained():
    for shape in ((1, 255), ()):
        with pytest.raises(InvalidInput, match=r"x has shape .*, and the layer 256 inputs"):
            layer("int4")(torch.randn(shape))


@pytest.mark.parametrize("keep", ["packed", "decoded"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64])
def test_activations_are_floats(keep, dtype):
    """Outputs of the same dtype would wrap around, or lose a part."""
    with pytest.raises(InvalidType, match=f"x is {dtype}, and y would be, too; pass"):
        layer("int4", keep=keep)(torch.ones(2, K).to(dtype))


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
    fmt, activation = parse_scheme(spec)
    q, x = layer(fmt, activation), tokens(4, torch.bfloat16)
    empty = anybit.QuantLinear.empty(spec, (N, K), torch.zeros(N), "cpu", "packed")
    empty.load_state_dict(q.state_dict())
    assert torch.equal(empty(x), q(x))


@pytest.mark.parametrize("spec", ["fp6", "liquid@int8"])
def test_compiles_as_one_graph(spec):
    fmt, activation = parse_scheme(spec)
    model = nn.Sequential(layer(fmt, activation), nn.SiLU())
    x = tokens(3, torch.bfloat16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    same_output(compiled(x), model(x))


def test_the_operator_describes_itself():
    q, x = layer("fp6"), tokens(3, torch.bfloat16)
    args = (x, q.prepared.layout, q.bias.detach().bfloat16(), q.scheme, N, q.backend)
    torch.library.opcheck(torch.ops.anybit.linear.default, args)


def test_every_refusal_is_in_words():
    layer = LayerSpec(anybit.get_format("int4:group=64"), None, (N, K), torch.device("cpu"))
    answers = registry.refusals(layer)
    assert answers["reference"] is None
    assert "not on cpu" in answers["triton"]
    assert all(reason is None or len(reason.split()) > 3 for reason in answers.values())


def test_the_first_backend_that_takes_a_layer_is_the_last_to_be_asked(monkeypatch):
    asked = []

    class Asked(Stranger):
        def refuse(self, layer):
            asked.append(layer)

    monkeypatch.setattr(registry, "BACKENDS", dict(registry.BACKENDS))
    anybit.register_backend("asked", Asked(), before="dense")
    cpu = LayerSpec(anybit.get_format("int8"), None, (N, K), torch.device("cpu"))
    assert registry.choose(cpu._replace(decoded=True)) == "asked"
    assert len(asked) == 1


def test_unknown_activation_lists_the_known():
    with pytest.raises(
        ValueError,
        match="'int6' in 'liquid@int6'; did you mean int8; known: int8",
    ):
        parse_scheme("liquid@int6")


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
    given = Activations(codes, scale[..., 0], codes.int().sum(-1).int(), dtype)
    assert torch.equal(q(given), q(x))
    empty = anybit.QuantLinear.empty(q.scheme, (N, K), torch.zeros(N), "cpu", "packed")
    empty.load_state_dict(q.state_dict())
    assert torch.equal(empty(given), q(x))
    with pytest.raises(InvalidInput, match=r"255.*, and the layer 256 inputs"):
        q(given._replace(codes=codes[..., :-1]))
    for other, wanted in ((None, "plain activations"), ("fp8", "torch.float8_e4m3fn")):
        with pytest.raises(TypeError, match=f"quantized to torch.int8, .* multiplies {wanted}"):
            layer(spec, other)(given)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_layer_that_was_only_loaded_can_be_released(device):
    q, x = layer("liquid", bias=False), tokens(3, torch.bfloat16)
    loaded = anybit.QuantLinear.empty("liquid", (N, K), device=device, keep="packed")
    loaded.load_state_dict(q.state_dict(), assign=device == "meta")
    assert torch.equal(loaded.release()(x), q(x))


@pytest.mark.parametrize("spec", ["liquid", "int4:group=32"])
def test_a_released_layer_multiplies_and_says_what_it_cannot(spec):
    q, x = layer(spec, bias=False), tokens(3, torch.bfloat16)
    want = q(x)
    model = nn.Sequential(q.release(), nn.Linear(N, N))
    assert not model[0]._buffers
    assert torch.equal(model.half()[0](x), want)  # nothing to cast, nothing moved
    for use in (
        model.state_dict, lambda: model.to("meta"), lambda: copy.deepcopy(model),
        lambda: pickle.dumps(model), model[0].weight.sum,
    ):  # fmt: skip
        with pytest.raises(Unsupported, match=r"^Multiplier\(.*\) only multiplies: .* again$"):
            use()


def test_a_released_layer_frees_its_codes():
    layer = anybit.quantize_(torch.nn.Linear(64, 64), "int8")
    layer.prepare(torch.float32)
    codes = weakref.ref(layer.codes8)
    layer = layer.release()
    assert codes() is None
    assert layer(torch.randn(3, 64)).shape == (3, 64)


def test_float32_activations_keep_a_gpu_layer_on_the_reference():
    cuda = torch.device("cuda")
    layer = LayerSpec(anybit.get_format("int4"), None, (N, K), cuda, torch.float32)
    answers = registry.refusals(layer)
    assert "not torch.float32" in answers["triton"]
    assert "not torch.float32" in answers["hopper"]
    assert registry.choose(layer) == "dense"
    assert registry.choose(layer._replace(decoded=False)) == "reference"


def test_kernels_run_on_the_device_of_x(monkeypatch):
    """Not on the current one: a model may be spread over several GPUs."""
    current = [0]

    @contextmanager
    def device(wanted):
        current.append(wanted.index)
        yield
        current.pop()

    ran = []

    def linear(x, prepared, bias):
        ran.append((x.device.index, current[-1]))
        return torch.empty(1, N)

    backend = SimpleNamespace(linear=linear)
    monkeypatch.setattr(ops, "get_backend", lambda name: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    for index in (0, 1):
        x = SimpleNamespace(is_cuda=True, device=torch.device("cuda", index), shape=(1, K))
        x.reshape = lambda *shape, x=x: x
        ops.multiply(x, [], None, "int4", N, "triton")
    assert ran == [(0, 0), (1, 1)]
    assert current == [0]


class Stranger:
    """A backend as somebody else writes one: it multiplies a decoded weight in fp64."""

    def refuse(self, layer):
        return None if layer.format.spec == "fp6" else "it knows nothing but fp6"

    def decodes(self, activation):
        return False

    def prepare(self, packed, activation, dtype=None, decoded=False):
        layout = (packed.dequantize().double(),)
        made_for = dtype or torch.get_default_dtype()
        return Prepared(packed.format, packed.shape, activation, layout, made_for)

    def linear(self, x, prepared, bias):
        (weight,) = prepared.layout
        y = x.double() @ weight.T
        return (y if bias is None else y + bias).to(x.dtype)


@pytest.fixture
def stranger(monkeypatch):
    monkeypatch.setattr(registry, "BACKENDS", dict(registry.BACKENDS))
    anybit.register_backend("stranger", Stranger(), devices=["cpu"], before="dense")


def test_a_backend_from_outside_multiplies(stranger, capsys):
    q, x = layer("fp6"), tokens(6, torch.bfloat16).view(2, 3, K)
    assert (q.backend, layer("int4").backend) == ("stranger", "reference")
    want = x.double() @ q.dequantize(torch.float64).T + q.bias
    assert torch.equal(q(x), want.bfloat16())
    compiled = torch.compile(q, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), q(x))
    assert torch.equal(q.release()(x), want.bfloat16())
    doctor()
    shown = " ".join(capsys.readouterr().out.split())
    assert "runs on stranger: fp6" in shown
    assert "not on stranger: it knows nothing but fp6" in shown
    assert not registry.get_backend("stranger").takes_experts(LayerSpec.of(q.packed, None))


def test_names_of_backends_are_checked(stranger):
    with pytest.raises(ValueError, match="'stranger' is registered already"):
        anybit.register_backend("stranger", Stranger())
    with pytest.raises(ValueError, match=r"unknown backend 'x'; known: hopper, .*reference"):
        anybit.register_backend("other", Stranger(), before="x")


def test_a_layout_is_made_anew_for_another_dtype(stranger):
    """`Stranger` says that its layout is for one dtype."""
    q = layer("fp6")
    for dtype in (torch.float16, torch.float16, torch.bfloat16):
        assert q(tokens(3, dtype)).dtype == dtype
        assert q.prepared.dtype == dtype
    with pytest.raises(TypeError, match=r"x is torch.float16, .* for torch.bfloat16 alone"):
        q.release()(tokens(3, torch.float16))


# Decoded copies.


@pytest.mark.parametrize(("spec", "dtype"), pairs(SPECS, DTYPES))
def test_a_decoded_layer_reads_its_rounded_weight_back(spec, dtype):
    q = layer(spec, bias=False, keep="decoded")
    assert torch.equal(q(torch.eye(K, dtype=dtype)), q.dequantize(dtype).T)
    assert q.backend == "dense"
    assert q.prepared.dtype == dtype


@pytest.mark.parametrize("activation", [None, "int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", ["fp6", "int4:group=64,zero"])
def test_decoded_products_are_the_references_but_for_rounding(spec, dtype, activation):
    """Each weight and each quantized activation is rounded once more, and the result."""
    x = tokens(9, dtype)
    got, want = (layer(spec, activation, keep=keep)(x).float() for keep in ("decoded", "packed"))
    unit = torch.finfo(dtype).eps
    weight = layer(spec).dequantize().abs()
    bound = 1.5 * unit * (x.float().abs() @ weight.T * 1.1 + want.abs()) + 1e-5
    assert ((got - want).abs() <= bound).all()


def test_activations_quantized_before_meet_a_decoded_weight():
    q, x = layer("fp6", "int8", keep="decoded"), tokens(6, torch.bfloat16)
    codes, scale = reference.quantize_tokens(x, "int8")
    given = Activations(codes, scale[..., 0], codes.int().sum(-1).int(), x.dtype)
    assert torch.equal(q(given), q(x))


@pytest.mark.parametrize("spec", ["fp6", "int8"])
def test_copies_are_held_while_memory_is_free(spec, monkeypatch):
    size, x = N * K * 2, tokens(20, torch.bfloat16)
    monkeypatch.setattr(dense, "_held", Counter())
    monkeypatch.setattr(dense, "free_bytes", lambda device: 4 * size - held_now())

    def held_now():
        return dense._held[torch.device("cpu")]

    want = layer(spec, bias=False)(x)
    made = [layer(spec, bias=False, keep="auto", dtype=torch.bfloat16) for _ in range(3)]
    assert held_now() == 2 * size
    assert [q.backend for q in made] == ["dense", "dense", "reference"]
    for q in made:
        torch.testing.assert_close(q(x), want, rtol=2**-6, atol=2**-6)
    del made, q
    gc.collect()
    assert held_now() == 0


def test_a_model_is_told_what_to_keep(caplog):
    model = nn.Sequential(layer("fp6", keep="auto"), nn.SiLU(), nn.Linear(N, N)).bfloat16()
    with caplog.at_level(logging.INFO):
        anybit.set_keep(model, "packed")
        assert model[0].backend == "reference"
        assert "1 layers (fp6) are decoded in each call" in caplog.text
        anybit.set_keep(model, "decoded")
    assert model[0].prepared.layout[0].dtype == torch.bfloat16
    assert "1 layers (fp6) are held decoded, in 0.00 GB" in caplog.text
    x = tokens(3, torch.bfloat16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), model(x))
    y, model[0] = model(x), model[0].release()
    assert torch.equal(compiled(x), y)


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
     torch.float8_e4m3fnuz, torch.float8_e5m2fnuz],
)  # fmt: skip
def test_every_pattern_that_is_no_number_is_found(dtype):
    size = 8 * dtype.itemsize
    bits = torch.arange(2**size).to(torch.uint8 if size == 8 else torch.uint16)
    every = bits.view(dtype)
    finite = every.float().isfinite()
    assert 0 < (~finite).sum() < len(finite) / 2
    check_finite(every[finite], "w")
    usual = every[finite][:70].contiguous()  # more than a vector register holds
    for at, pattern in enumerate(every[~finite].split(1)):
        found = usual.clone()
        found[at % 70] = pattern[0]
        with pytest.raises(InvalidInput, match=rf"w: 1 values are NaN or inf.* \({at % 70},\)"):
            check_finite(found, "w")
    with pytest.raises(InvalidInput, match=rf"w: {(~finite).sum()} values"):
        check_finite(every.view(-1, 16).T, "w")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_wide_numbers_that_are_none_are_found(dtype, bad):
    largest = torch.finfo(torch.float32).max
    w = torch.tensor([largest, -largest] * 40, dtype=dtype)
    check_finite(w, "w")
    check_finite(w[:0], "w")
    for at in range(80):
        broken = w.clone()
        broken[at] = bad
        with pytest.raises(InvalidInput, match=rf"w: 1 values are NaN or inf.* \({at},\)"):
            check_finite(broken, "w")


@pytest.mark.parametrize("spec", ["int4:group=32,zero", "mxfp4"])
def test_mixed_precision_of_fsdp_leaves_scales_alone(spec, tmp_path):
    """It casts buffers in place, by `.data`, in the first forward pass."""
    model = anybit.quantize_(llama(dtype=torch.float32), spec)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    half = torch.bfloat16
    distributed.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        policy = MixedPrecision(param_dtype=half, reduce_dtype=half, buffer_dtype=half)
        device = torch.device("cpu")
        whole = FullyShardedDataParallel(
            model, mixed_precision=policy, use_orig_params=True, device_id=device
        )
        for _ in range(2):
            whole(TOKENS).logits.float().sum().backward()
        after = whole.state_dict()
    finally:
        distributed.destroy_process_group()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name


def test_other_scales_by_data_stay():
    layer = anybit.quantize_(nn.Linear(64, 32), "int4:group=32")
    layer.scale.data = layer.scale.float() * 1.5
    wanted = layer.scale.clone()
    assert torch.equal(layer.packed.grid["scale"], wanted)
