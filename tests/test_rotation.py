"""Rotated layers: blockwise Hadamard transforms between a layer's inputs and its stored weight."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import anybit
from anybit.checkpoint.calibrated import calibrate_checkpoint
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.core.packed import Packed, stack
from anybit.core.rotation import Rotation, block, hadamard, signs, turned
from anybit.kernels.backend import Activations, LayerSpec
from anybit.kernels.between import of
from anybit.kernels.native import fused
from anybit.kernels.native import rotation as kernel
from anybit.kernels.registry import refusals
from anybit.nn.model import quantized_layers
from anybit.nn.sharding import Piece, check_columns, same
from anybit.planning.allocate import plan_formats
from anybit.quantizers.base import Quantizer, quantize_weight
from anybit.quantizers.calibration.statistics import Statistics
from anybit.quantizers.registry import CALIBRATED
from tests.needs import pairs
from tests.specs import NAMES
from tests.tiny import dense, llama, logits, same_output, same_state

N, K = 96, 256  # blocks of 32 and 128
IDS = torch.randint(0, 256, (8, 32), generator=torch.Generator().manual_seed(1))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(size: int) -> Tensor:
    """H of a size, from the recursion's closed form: the parity of the bits that i and j share."""
    b = block(size)
    small = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(b)] for i in range(b)])
    return torch.block_diag(*[small / b**0.5] * (size // b)).double()


@pytest.mark.parametrize("size", [16, 48, 128, 192, 384])
def test_h_is_sylvesters_and_its_own_inverse(size: int) -> None:
    h, x = matrix(size), random(3, size)
    assert torch.equal(
        torch.block_diag(*[hadamard(block(size)).double()] * (size // block(size))).float(),
        h.float(),
    )
    assert torch.allclose(turned(x.double()), x.double() @ h, atol=1e-12)
    assert torch.allclose(turned(turned(x)), x, atol=1e-5)
    assert torch.allclose(h @ h.T, torch.eye(size).double(), atol=1e-12)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("size", [16, 32, 64, 128, 112, 640])
def test_kernels_rotate_tokens(size: int, after: bool) -> None:
    if not fused.able():
        pytest.skip("no kernels for this processor")
    vector = random(size, seed=1).half()
    eye, h = torch.eye(size), matrix(size).float()
    want = h * vector.float() if after else vector.float()[:, None] * h
    assert torch.allclose(kernel.rotate(eye, vector, after), want, rtol=1e-6, atol=0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = random(9, 2 * size)[:, :size].to(dtype)
        exact = x.double() @ (h * vector.float() if after else vector.float()[:, None] * h).double()
        error = (kernel.rotate(x, vector[:, None], after).double() - exact).norm() / exact.norm()
        assert error < 2 * torch.finfo(dtype).eps
        assert of(x).rotate(x, vector, after).dtype == dtype


@pytest.mark.parametrize("sides", ["k", "kn"])
def test_a_rotated_weight_is_the_stored_one_between_two_transforms(sides: str) -> None:
    plain = anybit.quantize_tensor(random(N, K), "int8")
    vector_in = random(K, seed=1).half().abs() + 0.5
    out = random(N, 1, seed=2).half() - 3 if sides == "kn" else None
    packed = plain.rotated_by(Rotation(vector_in, out))
    want = plain.dequantize().double() @ matrix(K) * vector_in.double()
    if out is not None:
        want = out.double() * (matrix(N) @ want)
    assert torch.allclose(packed.dequantize().double(), want, atol=1e-5)
    assert torch.allclose(
        Rotation.of(packed.grid).rotated(packed.dequantize()), plain.dequantize(), atol=1e-5
    )
    bias = random(N, seed=3)
    layer = anybit.QuantLinear(packed, bias)
    assert torch.allclose(layer(torch.eye(K)), packed.dequantize().T + bias, atol=1e-4)
    x = random(2, 5, K)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize(("name", "sides"), pairs(NAMES, ["k", "kn"]))
def test_every_format_is_rotated(name: str, sides: str) -> None:
    spec = f"{name}:rotate={sides}"
    w, x = random(N, K), random(7, K, seed=1)
    packed = anybit.quantize_tensor(w, spec)
    assert packed.format.spec == spec == anybit.get_format(spec).spec
    own = anybit.quantize_tensor(Rotation.of(packed.grid).rotated(w), name)
    assert torch.equal(own.codes(), packed.codes())
    assert own.format == packed.stored().format == packed.format.plain()
    want = x @ packed.dequantize().T
    assert torch.allclose(anybit.linear(x, packed), want, atol=1e-3 * float(want.abs().max()))
    extra = (K + (N if sides == "kn" else 0)) * 16 / (N * K)
    assert packed.format.bits_per_weight((N, K)) == pytest.approx(
        own.format.bits_per_weight((N, K)) + extra
    )
    assert packed.nbytes() == own.nbytes() + extra * N * K / 8
    layer = anybit.QuantLinear(packed)
    empty = anybit.QuantLinear.empty(layer.scheme, (N, K), device="cpu")
    empty.load_state_dict(layer.state_dict())
    assert torch.equal(empty(x), layer(x))


def test_gradients_pass_through_rotated_layers() -> None:
    packed = anybit.quantize_tensor(random(N, K), "int8:rotate=kn")
    x = random(3, K, seed=1).requires_grad_()
    anybit.QuantLinear(packed)(x).backward(torch.ones(3, N))
    assert x.grad is not None
    assert torch.allclose(x.grad, torch.ones(3, N) @ packed.dequantize(), atol=1e-4)


def test_parts_are_whole_blocks() -> None:
    packed = anybit.quantize_tensor(random(256, 512), "int4:group=64,rotate=kn")
    w = packed.dequantize()
    for part, want in (
        (packed.rows(slice(128, 256)), w[128:]),
        (packed.columns(slice(128, 384)), w[:, 128:384]),
        (packed.rows(slice(0, 128)).columns(slice(256, 512)), w[:128, 256:]),
    ):
        assert torch.allclose(part.dequantize(), want, atol=1e-5)
    for cut in (
        lambda: packed.rows(slice(64, 192)),
        lambda: packed.rows(slice(0, 64)),
        lambda: packed.columns(slice(64, 192)),
        lambda: packed.columns(slice(0, 64)),
        lambda: check_columns(packed.format, 512, 8),
    ):
        with pytest.raises(ValueError, match="split"):
            cut()
    with pytest.raises(ValueError, match="split"):  # blocks of 32 would be blocks of 64 in the part
        anybit.quantize_tensor(random(16, 96), "int8:rotate=k").columns(slice(0, 64))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reads_its_part_of_a_stored_weight(rank: int) -> None:
    packed = anybit.quantize_tensor(random(256, 512), "int4:group=64,rotate=kn")
    for piece, first, want in (
        (Piece("row", "int4:group=64,rotate=kn", 256, 512, slice(rank * 256, rank * 256 + 256)), 0,
         packed.dequantize()[:, rank * 256 : rank * 256 + 256]),
        (Piece("column", "int4:group=64,rotate=kn", 128, 512), rank * 128,
         packed.dequantize()[rank * 128 : rank * 128 + 128]),
    ):  # fmt: skip
        for key, tensor in packed.tensors().items():
            piece.take(key, tensor, first)
        part = piece.finish()
        assert isinstance(part, Packed)
        assert torch.allclose(part.dequantize(), want, atol=1e-5)


def test_layers_of_one_input_become_one_weight() -> None:
    parts = [
        anybit.quantize_tensor(random(n, K, seed=n), "int4:rotate=kn") for n in (256, 128, 128)
    ]
    assert same([*parts])
    whole = stack(parts).dequantize()
    assert torch.allclose(whole, torch.cat([p.dequantize() for p in parts]), atol=1e-5)
    small = anybit.quantize_tensor(random(64, K), "int4:rotate=kn")
    assert not same([small, small])  # its blocks of 64 would become one of 128
    grid = parts[1].grid | {"rotate_in": -parts[1].grid["rotate_in"]}
    assert not same([parts[2], dataclasses.replace(parts[1], grid=grid)])


def test_what_cannot_be_done_says_so() -> None:
    with pytest.raises(ValueError, match="K=40 cannot be rotated"):
        anybit.quantize_tensor(random(32, 40), "int4:rotate=k")
    with pytest.raises(ValueError, match="N=40 cannot be rotated"):
        anybit.quantize_tensor(random(40, 32), "int4:rotate=kn")
    with pytest.raises(ValueError, match="rotate=k or rotate=kn"):
        anybit.get_format("int4:rotate=n")
    with pytest.raises(ValueError, match="not rotated"):
        anybit.get_format("int4:order,rotate=k")
    with pytest.raises(ValueError, match="holds zeros"):
        Rotation(torch.zeros(64)).rotated(random(32, 64))
    fmt = anybit.get_format("int4:rotate=k")
    with pytest.raises(ValueError, match="quantize_tensor"):
        anybit.RTN().quantize(random(32, 64), fmt)
    with pytest.raises(ValueError, match=r"Packed\.stored"):
        refusals(LayerSpec(fmt, None, (N, K), torch.device("cpu")))
    codes = Activations(
        torch.ones(1, 64).to(torch.int8), torch.ones(1), torch.ones(1).int(), torch.float32
    )
    layer = anybit.QuantLinear(anybit.quantize_tensor(random(32, 64), fmt), activation="int8")
    with pytest.raises(ValueError, match="without a rotation"):
        layer(codes)


@pytest.mark.parametrize("activation", [None, "int8"])
def test_a_layer_takes_tokens_that_are_rotated_alone(activation: str | None) -> None:
    packed = anybit.quantize_tensor(random(32, 64), "int4:rotate=k")
    layer = anybit.QuantLinear(packed, activation=activation)
    x, nothing = random(3, 64), torch.empty(0)
    turned = of(x).rotate(x, layer.get_buffer("rotate_in"), False)
    assert torch.equal(layer(Activations(turned, nothing, nothing, x.dtype, True)), layer(x))
    with pytest.raises(ValueError, match="without a rotation"):
        layer(Activations(x, nothing, nothing, x.dtype))


# Models.


def odd() -> Any:
    """A model of which one kind of layer has no blocks: K=40, and the others N=40."""
    return llama(intermediate_size=40)


def test_rotate_finds_the_layers_that_can_be() -> None:
    model = anybit.quantize_(odd(), "int8", anybit.Rotate(rotate="kn"))
    formats = {n.rpartition(".")[2]: m.scheme for n, m in quantized_layers(model)}
    assert formats == {
        "q_proj": "int8:rotate=kn", "k_proj": "int8:rotate=kn", "v_proj": "int8:rotate=kn",
        "o_proj": "int8:rotate=kn", "gate_proj": "int8", "up_proj": "int8", "down_proj": "int8",
    }  # fmt: skip
    plan = model.anybit_formats
    assert plan["*"] == "int8:rotate=kn"
    assert plan["model.layers.0.mlp.up_proj"] == "int8"
    same_state(model, anybit.quantize_(odd(), plan))


@pytest.mark.parametrize("sides", ["k", "kn"])
def test_a_rotated_model_computes_what_the_dense_one_does(sides: str, tmp_path: Path) -> None:
    before, spec = llama(dtype=torch.float32), "int8:group=16"
    want = logits(before)
    plain = logits(anybit.quantize_(copy.deepcopy(before), spec))
    model = anybit.quantize_(before, f"{spec},rotate={sides}")
    got = logits(model)
    assert (got - want).norm() < 1.5 * (plain - want).norm()
    anybit.save(model, tmp_path / "out")
    loaded = anybit.load(tmp_path / "out")
    same_state(model, loaded)
    assert torch.equal(logits(loaded), got)
    same_output(logits(anybit.dequantize_(model)), got)


def test_checkpoints_are_rotated_tensor_by_tensor(tmp_path: Path) -> None:
    dense(tmp_path / "dense", intermediate_size=40)
    quantize_checkpoint(tmp_path / "dense", tmp_path / "out", "int4", anybit.Rotate(rotate="kn"))
    want = anybit.quantize_(odd(), "int4", anybit.Rotate(rotate="kn"))
    same_state(anybit.load(tmp_path / "out"), want)


def test_gptq_gets_rotated_weights_and_statistics(tmp_path: Path) -> None:
    spec = "int4:group=16,rotate=kn"
    model = anybit.quantize_(llama(), spec, anybit.GPTQ(IDS))
    other = anybit.quantize_(llama(), "int4:group=16", anybit.Rotate(IDS, anybit.GPTQ(), "kn"))
    same_state(model, other)
    dense(tmp_path / "dense")
    calibrate_checkpoint(tmp_path / "dense", tmp_path / "out", spec, anybit.GPTQ(IDS))
    same_state(anybit.load(tmp_path / "out"), model)
    w, x = random(N, K), random(4096, K, seed=1) * (1 + 9 * (torch.arange(K) % 64 == 5))
    seen = Statistics()
    seen.add(x, ("hessian", "sample"), 1)
    fmt = anybit.get_format("int4:rotate=k")
    packed = quantize_weight(anybit.GPTQ(), w, fmt, seen)
    turn = Rotation.of(packed.grid)
    own = Statistics()
    own.add(turned(x * turn.rotate_in), ("hessian", "amax", "mean_abs"), 1)
    for key in ("hessian", "amax", "mean_abs"):
        got = getattr(seen.rotated(turn), key)
        assert torch.allclose(got, getattr(own, key), atol=1e-3), key
    alone = anybit.GPTQ().quantize(turn.rotated(w), fmt.plain(), own)
    e = packed.dequantize() - alone.rotated_by(turn).dequantize()
    assert ((e @ seen.hessian) * e).sum() < 1e-3 * ((w @ seen.hessian) * w).sum()
    assert relative_error(packed, w, x) < relative_error(
        anybit.GPTQ().quantize(w, fmt.plain(), seen), w, x
    )


def relative_error(packed: Packed, w: Tensor, x: Tensor) -> float:
    want = x @ w.T
    return float((x @ packed.dequantize().T - want).norm() / want.norm())


@pytest.mark.parametrize(
    ("spec", "quantizer"),
    [
        ("int4:rotate=kn@int8", anybit.Smooth(IDS)),
        ("int4:rotate=k", anybit.Smooth(IDS, anybit.Rotate(then=anybit.GPTQ()))),
        ("codebook:m=1,v=4,b=4,rotate=kn", anybit.Additive(IDS, steps=2, rounds=1)),
    ],
    ids=["smooth", "smooth-rotate-gptq", "additive"],
)
def test_quantizers_are_combined(spec: str, quantizer: Quantizer) -> None:
    model = anybit.quantize_(llama(num_hidden_layers=1), spec, quantizer)
    assert {m.scheme for _, m in quantized_layers(model)} == {spec}
    got = logits(model)
    if "@" not in spec:
        same_output(logits(anybit.dequantize_(model)), got)


def test_the_method_of_the_command_line() -> None:
    method = CALIBRATED["rotate+gptq"](anybit.Calibration(IDS))
    model = anybit.quantize_(llama(num_hidden_layers=1), "int4", method)
    assert {m.scheme for _, m in quantized_layers(model)} == {"int4:rotate=k"}


def test_plans_may_choose_it() -> None:
    """A weight with outliers in one column of each row loses less after a rotation."""
    model = llama(num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[:, ::32] *= 20
    candidates = ("int4", "int4:rotate=k")
    chosen = plan_formats(model, None, bits=4.9, candidates=candidates, quantizer=anybit.RTN())
    anybit.quantize_(model, chosen.plan)
    assert model.model.layers[0].mlp.down_proj.scheme == "int4:rotate=k"


def test_defaults_of_torch_change_no_rotation() -> None:
    hadamard.cache_clear()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            h, s = hadamard(64), signs(64)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (h.device.type, h.dtype, s.device.type) == ("cpu", torch.float32, "cpu")
    assert torch.equal(h @ h, torch.eye(64))
