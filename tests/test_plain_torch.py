"""Modules of plain torch: what wraps, changes or replaces layers before and after quantizing."""

import copy
import gc
import types
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, stack_module_state, vmap
from torch.nn.utils import parametrizations, prune

import anybit
from anybit.errors import InvalidInput, InvalidType, Unsupported
from anybit.nn.linear import QuantLinear
from anybit.nn.multiplier import Keep

# torch's own forward gradients use what it calls deprecated, as some of these tests do.
pytestmark = pytest.mark.filterwarnings("ignore:`torch")
X = torch.linspace(-1, 1, 3 * 32).view(3, 32)


def two(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))


def quantized(seed: int = 0, spec: str = "int4") -> nn.Sequential:
    model = anybit.quantize_(two(seed), spec)
    assert isinstance(model, nn.Sequential)
    return model


def decoded(model: nn.Module) -> nn.Module:
    return anybit.dequantize_(copy.deepcopy(model))


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def test_the_encoder_of_torch_takes_no_fast_path_around_layers() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    anybit.quantize_(model, "int4")
    assert sum(isinstance(m, QuantLinear) for m in model.modules()) == 4
    x, padding = torch.randn(2, 5, 32), torch.tensor([[False] * 3 + [True] * 2, [False] * 5])
    twin = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    for name, dense in decoded(model).named_modules():
        if isinstance(dense, nn.Linear):
            twin.set_submodule(name, dense)
    with torch.no_grad():
        got = model(x, src_key_padding_mask=padding)
        torch.testing.assert_close(got, twin(x, src_key_padding_mask=padding))


class Called(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = super().__call__(x)
        return out * 10


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-20, 20)


def with_own_forward(layer: nn.Linear) -> nn.Linear:
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias) * 10

    layer.forward = types.MethodType(forward, layer)  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(lambda: with_own_forward(nn.Linear(32, 32)), id="a forward of its own"),
        pytest.param(lambda: Called(32, 32), id="a call of its own"),
        pytest.param(lambda: Clamped(32, 32), id="clamped"),
        pytest.param(lambda: nn.utils.weight_norm(nn.Linear(32, 32)), id="weight_norm"),
        pytest.param(lambda: nn.utils.spectral_norm(nn.Linear(32, 32)).eval(), id="spectral"),
        pytest.param(lambda: prune.l1_unstructured(nn.Linear(32, 32), "weight", 0.5), id="pruned"),
    ],
)
def test_layers_that_do_more_stay_dense(layer: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(layer(), nn.Linear(32, 32)).eval()
    want = model[0](100 * X)
    anybit.quantize_(model, "int8")
    assert [isinstance(m, QuantLinear) for m in model] == [False, True]
    torch.testing.assert_close(model[0](100 * X), want)


def test_a_hook_of_accelerate_is_no_forward_of_its_own() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = two()
    hooks.add_hook_to_module(model[0], hooks.ModelHook())
    with_own_forward(model[2])  # type: ignore[arg-type]
    hooks.add_hook_to_module(model[2], hooks.ModelHook())
    anybit.quantize_(model, "int4")
    assert [isinstance(m, QuantLinear) for m in model] == [True, False, False]


def test_new_parametrizations_are_applied_once_for_all() -> None:
    model = two()
    parametrizations.weight_norm(model[0])
    want = model(X)
    anybit.quantize_(model, "int8")
    assert isinstance(model[0], QuantLinear)
    torch.testing.assert_close(model(X), want, atol=0.02, rtol=0)


def test_backward_hooks_are_taken_over() -> None:
    model, seen = two(), []
    model[0].register_full_backward_hook(lambda module, into, out: seen.append(out[0].shape))
    anybit.quantize_(model, "int4")
    model(X.clone().requires_grad_()).sum().backward()
    assert seen == [(3, 48)]


def test_layers_without_a_shape_are_named() -> None:
    for lazy in (nn.LazyLinear(32), nn.LazyConv1d(32, 3)):
        with pytest.raises(InvalidInput, match=r"^1\.weight has no shape yet; call the model once"):
            anybit.quantize_(nn.Sequential(nn.Linear(32, 32), lazy), "int8")


def test_layers_are_called_as_those_of_torch() -> None:
    layer = quantized()[0]
    assert torch.equal(layer(input=X), layer(X))
    with pytest.raises(Unsupported, match="cannot be written to"):
        layer.reset_parameters()  # type: ignore[operator]


def test_names_with_brackets() -> None:
    layers = {"a[0]": nn.Linear(32, 32), "[CLS]": nn.Linear(32, 8), "b": nn.Linear(32, 32)}
    model = nn.Sequential(nn.Module(), nn.ModuleDict(layers))
    anybit.quantize_(model, {"*": "int8", "1.b": None})
    kinds = {name for name, m in model.named_modules() if isinstance(m, QuantLinear)}
    assert kinds == {"1.a[0]"}
    anybit.quantize_(model, {"*": None, "1.[CLS]": "int4"})
    assert isinstance(model.get_submodule("1.[CLS]"), QuantLinear)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_only_real_weights_are_quantized(dtype: torch.dtype) -> None:
    weight = torch.ones(32, 32, dtype=dtype)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, bias=False))
    model[1].weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(InvalidType, match=f"1: weights of {dtype} are not quantized"):
        anybit.quantize_(model, "int8")
    assert isinstance(model[0], nn.Linear)
    anybit.quantize_(model, {"0": "int8", "1": None})
    with pytest.raises(InvalidType, match=f"weights of {dtype} are not"):
        anybit.quantize_tensor(weight, "int8")


def test_weights_of_8_bits_are_numbers_as_well() -> None:
    weight = torch.linspace(-2, 2, 32 * 32).view(32, 32).to(torch.float8_e4m3fn)
    torch.testing.assert_close(
        anybit.dequantize(anybit.quantize_tensor(weight, "fp:e4m3")),
        anybit.dequantize(anybit.quantize_tensor(weight.float(), "fp:e4m3")),
    )


def test_an_empty_weight_is_refused() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, bias=False))
    model[1].weight = nn.Parameter(torch.empty(0, 32))
    with pytest.raises(InvalidInput, match="1: a weight of N=0, K=32 is empty"):
        anybit.quantize_(model, {"*": "int4", "1": "int4"})


def test_a_sharded_weight_is_refused() -> None:
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.Linear(32, 32, bias=False))
        whole = DTensor.from_local(model[0].weight.detach(), mesh, [Replicate()])
        model[0].weight = nn.Parameter(whole)
        with pytest.raises(InvalidType, match="0: the weight is a DTensor, not a plain tensor"):
            anybit.quantize_(model, "int8")
    finally:
        torch.distributed.destroy_process_group()


def test_a_scripted_part_is_left_alone() -> None:
    scripted = torch.jit.script(nn.Linear(32, 32))  # type: ignore[no-untyped-call]
    model = nn.Sequential(scripted, nn.Linear(32, 32))
    with pytest.raises(InvalidInput, match="no layer matches"):
        anybit.quantize_(model, {"*": "int4", "x": None})
    anybit.quantize_(model, "int4")
    assert isinstance(model[1], QuantLinear)
    torch.testing.assert_close(model(X), model[1](scripted(X)))


@pytest.mark.parametrize("keep", ["packed", "decoded"])
def test_doubles_stay_doubles(keep: Keep) -> None:
    model = anybit.set_keep(anybit.quantize_(two().double(), "int4"), keep)
    got = model(X.double())
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, decoded(model)(X.double()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_reaches_quantized_layers(compiled: bool) -> None:
    model = quantized()
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    with torch.autocast("cpu", torch.bfloat16):
        got, want = call(X), decoded(model)(X)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, atol=0.02, rtol=0.02)
    assert call(X).dtype == torch.float32


def test_biases_are_trained_alone() -> None:
    """Also those of a first layer, whose input needs no gradient."""
    model = quantized().requires_grad_(True)
    twin = decoded(model).requires_grad_(True)
    for m in (model, twin):
        m(X).square().sum().backward()
    for name in ("0.bias", "2.bias"):
        torch.testing.assert_close(
            model.get_parameter(name).grad, twin.get_parameter(name).grad, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("spec", ["int4", "fp6:rotate=kn", "int4:group=16,zero", "nvfp4"])
def test_transforms_of_torch(spec: str) -> None:
    model = quantized(spec=spec)
    twin = decoded(model)
    many = X.view(3, 1, 32)

    def loss(m: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: m(x).square().sum()

    def forward_gradient(m: nn.Module) -> Tensor:
        with forward_ad.dual_level():
            out = m(forward_ad.make_dual(X, X))
            tangent: Tensor = forward_ad.unpack_dual(out).tangent
            return tangent

    for transformed in (
        lambda m: vmap(m)(many),
        lambda m: grad(loss(m))(X[0]),
        lambda m: vmap(grad(loss(m)))(X),
        lambda m: jvp(m, (X,), (X,))[1],
        forward_gradient,
        lambda m: torch.compile(lambda x: vmap(m)(x), backend="aot_eager")(many),
    ):
        torch.testing.assert_close(transformed(model), transformed(twin), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("before", [False, True])
def test_forward_gradients_of_compiled_code(before: bool) -> None:
    """Whether or not it was compiled without them."""
    torch.compiler.reset()
    model = quantized()
    compiled = torch.compile(model, backend="aot_eager")
    if before:
        compiled(X)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(compiled(forward_ad.make_dual(X, X))).tangent
    torch.testing.assert_close(tangent, jvp(decoded(model), (X,), (X,))[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(compiled(X), model(X))


def test_a_profile_names_products() -> None:
    with torch.inference_mode(), torch.profiler.profile() as profile:
        quantized()(X)
    assert "anybit::linear" in {event.key for event in profile.key_averages()}


def test_a_layer_that_is_moved_holds_no_old_tensors() -> None:
    model = quantized()
    old = [weakref.ref(tensor) for tensor in model.buffers()]
    model.to("meta")
    gc.collect()
    assert all(ref() is None for ref in old)


def test_transforms_know_no_quantized_activations() -> None:
    with pytest.raises(Unsupported, match=r"quantizes its activations.*'int8' instead"):
        jvp(quantized(spec="int8@int8"), (X,), (X,))


def test_buffers_of_another_model_are_multiplied_with() -> None:
    models = [quantized(seed) for seed in range(3)]
    a, b, _ = (model(X) for model in models)
    first, second, _ = models
    torch.testing.assert_close(functional_call(first, tensors(second), (X,)), b)
    torch.testing.assert_close(first(X), a)
    if torch.__version__ < "2.13":  # compiled code and vmap are not so far there
        return
    compiled = torch.compile(
        lambda given: functional_call(first, given, (X,)), backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(tensors(second)), b)
    torch.testing.assert_close(compiled(tensors(first)), a)
    # The recipe for ensembles in torch's documentation.
    given, base = stack_module_state(models), copy.deepcopy(first).to("meta")  # type: ignore[arg-type]
    every = vmap(lambda p, b: functional_call(base, (p, b), (X,)))(*given)
    torch.testing.assert_close(every, torch.stack([model(X) for model in models]))


def test_a_state_of_another_format_is_refused() -> None:
    """int6 and fp6 have tensors of the same names, shapes and dtypes."""
    state = quantized(spec="fp6").state_dict()
    with pytest.raises(RuntimeError, match="codes are in format 'fp6', and the layer is in 'int6'"):
        quantized(spec="int6").load_state_dict(state)
    other = quantized(1, "fp6@int8")  # activations are not stored
    other.load_state_dict(state)
    torch.testing.assert_close(decoded(other)(X), decoded(quantized(spec="fp6"))(X))


@pytest.mark.parametrize("spec", ["int6", "int8@int8", "int4:rotate=kn", "codebook:m=1,v=4"])
@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_hold_what_is_stored(spec: str, strict: bool) -> None:
    """So they run on other processors, and with other contents."""
    model, other = quantized(spec=spec), quantized(1, spec)
    program = torch.export.export(model, (X,), strict=strict)
    assert program.state_dict.keys() == model.state_dict().keys()
    assert not program.constants
    exported = program.module()
    torch.testing.assert_close(exported(X), model(X))
    x = X.clone().requires_grad_()
    exported(x).sum().backward()
    assert x.grad is not None
    exported.load_state_dict(other.state_dict())
    torch.testing.assert_close(exported(X), other(X))


def test_traces_see_what_is_written() -> None:
    model = quantized()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, X)
    model.load_state_dict(quantized(1).state_dict())
    torch.testing.assert_close(traced(X), model(X))


def test_what_only_multiplies_is_not_exported() -> None:
    layer = next(m for m in quantized().modules() if isinstance(m, anybit.QuantLinear))
    with pytest.raises(Unsupported, match="only multiplies"):
        torch.export.export(layer.release(), (X,))
