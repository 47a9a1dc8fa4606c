"""What multiplies is derived from what a layer stores: it never travels, and is never stale."""

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import anybit
from anybit.errors import InvalidInput, Unsupported
from anybit.nn import op as ops
from anybit.nn.linear import QuantLinear
from anybit.nn.multiplier import Multiplier

N, K = 48, 64
SPECS = ["int4:group=32", "fp6", "int8@int8", "codebook:m=1,v=4", "int4:rotate=kn"]
X = torch.randn(3, K, generator=torch.Generator().manual_seed(3))


def layer(spec: str = "int4:group=32", seed: int = 0, **options: Any) -> QuantLinear:
    spec, _, activation = spec.partition("@")
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * 0.02
    return QuantLinear(anybit.quantize_tensor(w, spec), None, activation or None, **options)


def assert_current(q: QuantLinear, call: Callable[[Tensor], Tensor] | None = None) -> None:
    """Products are those of the weight that the layer stores now."""
    want = X @ q.dequantize().T
    error = ((q if call is None else call)(X) - want).norm() / want.norm()
    assert error < (0.02 if q.activation else 1e-5)


def saved(q: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(q, file)
    return file.getvalue()


def loaded(content: bytes, **options: Any) -> Any:
    return torch.load(io.BytesIO(content), weights_only=False, **options)


@pytest.mark.parametrize("keep", ["packed", "decoded"])
@pytest.mark.parametrize("spec", SPECS)
def test_only_what_is_stored_travels(spec: str, keep: Any) -> None:
    q = layer(spec, keep=keep)
    q(X)
    stored = sum(tensor.nbytes for tensor in q.state_dict().values())
    content = saved(q)
    assert len(content) < stored + 8192  # names, of classes and of Python's
    for other in (loaded(content), pickle.loads(pickle.dumps(q)), copy.deepcopy(q), copy.copy(q)):
        assert other.prepared is None
        assert other.backend == ""
        assert torch.equal(other(X), q(X))


def test_a_layer_that_is_loaded_elsewhere_multiplies_there() -> None:
    content = saved(layer())
    away = loaded(content, map_location="meta")
    with pytest.raises(Unsupported, match="has no contents in codes4, scale; load a checkpoint"):
        away(X)
    assert away(X.to("meta")).shape == (3, N)


def test_a_copy_goes_its_own_way() -> None:
    q = layer()
    other = copy.deepcopy(q)
    other.scale.mul_(2)
    assert_current(other)
    assert_current(q)
    assert torch.equal(other(X), 2 * q(X))


def in_inference_mode(q: QuantLinear) -> None:
    with torch.inference_mode():
        q.scale.mul_(2)


def by_optimizer(q: QuantLinear) -> None:
    ema = [tensor.lerp(tensor * 2, 0.5) for tensor in (q.scale,)]
    torch._foreach_copy_([q.scale], ema)


def fill_codes(q: QuantLinear) -> None:
    q.codes4.copy_(layer(seed=1).codes4)


def other_memory(q: QuantLinear) -> None:
    q.scale.data = q.scale * 2


def other_memory_twice(q: QuantLinear) -> None:
    """The second may lie where the first one lay."""
    other_memory(q)
    other_memory(q)


def swap_buffers(q: QuantLinear) -> None:
    q.scale = q.scale * 2


def load_in_place(q: QuantLinear) -> None:
    q.load_state_dict(layer(seed=1).state_dict())


def load_by_assigning(q: QuantLinear) -> None:
    q.load_state_dict(layer(seed=1).state_dict(), assign=True)


def move_and_write(q: QuantLinear) -> None:
    state = {name: tensor.clone() for name, tensor in layer(seed=1).state_dict().items()}
    q.to("meta").to_empty(device="cpu")
    for name, tensor in q.named_buffers():
        tensor.copy_(state[name])


WRITES = [
    in_inference_mode, by_optimizer, fill_codes, other_memory, other_memory_twice, swap_buffers,
    load_in_place, load_by_assigning, move_and_write,
]  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("keep", ["packed", "decoded"])
def test_contents_that_are_written_are_multiplied_with(
    write: Callable[[QuantLinear], None], keep: Any
) -> None:
    q = layer(keep=keep)
    before = q(X)
    write(q)
    assert_current(q)
    assert not torch.equal(q(X), before)


def test_layers_of_inference_mode_see_what_is_written() -> None:
    """Its tensors count no versions."""
    with torch.inference_mode():
        q = layer()
        q(X)
        for write in (in_inference_mode, other_memory, swap_buffers, load_in_place):
            write(q)
            assert_current(q)
    assert_current(q)


@pytest.mark.parametrize("write", [in_inference_mode, fill_codes, load_in_place])
def test_compiled_layers_see_what_is_written(write: Callable[[QuantLinear], None]) -> None:
    torch.compiler.reset()
    q = layer()
    compiled = torch.compile(q, backend="aot_eager", fullgraph=True)
    for no_grad in (torch.no_grad, torch.enable_grad):
        with no_grad():
            assert_current(q, compiled)
            write(q)
            assert_current(q, compiled)  # before the layer itself has been called
            q.prepare()
            assert_current(q, compiled)


def test_compiled_layers_decode_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    q = layer()
    asked: list[str] = []
    compiled = torch.compile(q, backend="aot_eager", fullgraph=True)
    found = ops.get_backend

    def spy(name: str) -> Any:
        asked.append(name)
        return found(name)

    monkeypatch.setattr(ops, "get_backend", spy)
    compiled(X)
    assert asked == [q.backend] != ["reference"]


def test_contents_that_torch_does_not_count_are_prepared_by_hand() -> None:
    q = layer()
    q.scale.data.mul_(2)
    assert_current(q.prepare())


def test_only_other_contents_are_laid_out_anew() -> None:
    q = layer()
    before = q.prepared
    q.to("cpu").eval().float()
    q(X)
    assert q.prepared is before
    other = layer(seed=1)
    functional_call(q, dict(other.named_buffers()), (X,))
    assert_current(q)


@pytest.mark.parametrize("missing", [["codes4"], ["scale"], ["codes4", "scale"]])
def test_missing_contents_are_named(missing: list[str]) -> None:
    q = QuantLinear.empty("int4:group=32", (N, K))
    for name in {"codes4", "scale"} - set(missing):
        setattr(q, name, getattr(layer(), name))
    for call in (lambda: q(X), lambda: q(X.requires_grad_()), q.release, q.prepare):
        with pytest.raises(Unsupported, match=f"no contents in {', '.join(missing)}; load a"):
            call()  # type: ignore[operator]


def test_contents_that_nobody_wrote_are_no_weight() -> None:
    assert QuantLinear.empty("int4:group=32", (N, K), device="cpu")(X).isnan().all()


def test_activations_elsewhere_are_refused() -> None:
    for q in (layer(), layer().release()):
        with pytest.raises(InvalidInput, match=r"x is on meta, and .* on cpu"):
            q(X.to("meta"))


def test_multipliers_multiply_as_their_layer() -> None:
    for spec in SPECS:
        q = layer(spec)
        q.bias = nn.Parameter(torch.randn(N))
        assert torch.equal(q.release()(X), q(X))
        activation = spec.partition("@")[2] or None
        made = Multiplier.of(q.packed, activation, X.dtype, bias=q.bias)
        assert torch.equal(made(X), q(X))


def test_a_layer_is_imported_without_the_compiler() -> None:
    code = "import sys, anybit.nn.linear; print('torch._dynamo' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
