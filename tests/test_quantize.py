"""quantize_: which layers, which formats, and that nothing is left half-done."""

import ast
import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_overloads, get_type_hints

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import anybit
from anybit.errors import AnybitError, InvalidType
from anybit.nn.linear import QuantLinear
from anybit.nn.model import dense_layers, is_linear, quantized_layers
from anybit.nn.plan import resolve
from tests.specs import SPECS


class Block(nn.Module):
    def __init__(self, k=256):
        super().__init__()
        self.q_proj = nn.Linear(k, k, bias=False)
        self.down_proj = nn.Linear(k, k)

    def forward(self, x):
        return x + self.down_proj(torch.relu(self.q_proj(x)))


class Model(nn.Module):
    def __init__(self, tied=False, k=256):
        super().__init__()
        self.embed = nn.Embedding(32, k)
        self.layers = nn.ModuleList(Block(k) for _ in range(2))
        self.lm_head = nn.Linear(k, 32, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.layers:
            x = block(x)
        return self.lm_head(x)


def model(**kwargs):
    torch.manual_seed(0)
    return Model(**kwargs).bfloat16()


def schemes(m):
    return {name: q.scheme for name, q in quantized_layers(m)}


@pytest.mark.parametrize("spec", SPECS)
def test_every_format_quantizes_a_model(spec):
    dense, x = nn.Linear(256, 48), torch.randn(6, 256)
    m = nn.Sequential(copy.deepcopy(dense), nn.Tanh())
    decoded = anybit.quantize_tensor(dense.weight.detach(), spec).dequantize()
    expected = nn.functional.linear(x, decoded, dense.bias).tanh()
    assert schemes(anybit.quantize_(m, spec)).keys() == {"0"}
    assert (m(x) - expected).norm() < 0.02 * expected.norm()


def test_last_match_wins_and_the_head_is_kept():
    plan = {"*": "int3", "*.down_proj": "int4:group=64", "layers.1.*": None}
    m = anybit.quantize_(model(), plan)
    assert schemes(m) == {"layers.0.q_proj": "int3", "layers.0.down_proj": "int4:group=64"}
    assert type(m.lm_head) is nn.Linear


def test_the_head_is_quantized_when_named():
    m = anybit.quantize_(model(), {"*": None, "lm_head": "int8"})
    assert schemes(m) == {"lm_head": "int8"}


def test_formats_may_be_objects_and_quantize_activations():
    assert set(schemes(anybit.quantize_(model(), anybit.get_format("fp5"))).values()) == {"fp5"}
    assert set(schemes(anybit.quantize_(model(), "liquid@int8")).values()) == {"liquid@int8"}


def test_dequantize_turns_back_to_dense_layers_of_the_same_function():
    ids = torch.arange(12).view(2, 6)
    m = anybit.quantize_(model(), "fp6")
    quantized = m(ids)
    anybit.dequantize_(m)
    assert schemes(m) == {}
    assert (m(ids) - quantized).float().norm() < 0.01 * quantized.float().norm()


@pytest.mark.parametrize("other", [(), (torch.nn.Embedding(32, 32),)])
def test_models_without_linear_layers(other):
    convolution = torch.nn.Conv1d(32, 32, 3)
    with pytest.raises(ValueError, match=r"nothing to quantize: the model has no linear layers$"):
        anybit.quantize_(torch.nn.Sequential(convolution, *other), "int8")


BAD = [
    ({"*": "int4", "*.up_proj": "int8"}, r"no layer matches '\*\.up_proj'; layers are named like"),
    ({"*.q_proj": "int4"}, r"no pattern matches layer 'layers\.0\.down_proj' .*give '\*'"),
    ({"*": None}, "nothing to quantize"),
    ("int44", "unknown format 'int44'"),
    (
        "int4:group=96",
        r"layers\.0\.q_proj: K=256 is not a.*group=96.*use group=64 or group=128",
    ),
]


@pytest.mark.parametrize(("spec", "message"), BAD)
def test_bad_plans_are_explained_and_change_nothing(spec, message):
    m = model()
    with pytest.raises(ValueError, match=message):
        anybit.quantize_(m, spec)
    assert schemes(m) == {}


def test_a_broken_weight_is_named_before_anything_changes():
    m = model()
    m.layers[1].down_proj.weight.data[3, 5] = torch.nan
    with pytest.raises(ValueError, match=r"layers\.1\.down_proj\.weight: 1 values are NaN or inf"):
        anybit.quantize_(m, "int4")
    assert schemes(m) == {}


def test_doubles_are_quantized_as_floats():
    weight = torch.randn(32, 64, dtype=torch.float64)
    got, want = (anybit.quantize_tensor(w, "int4") for w in (weight, weight.float()))
    assert torch.equal(got.dequantize(), want.dequantize())
    weight[3, 5] = 1e300
    with pytest.raises(ValueError, match=r"1 values are NaN or inf, the first at \(3, 5\)"):
        anybit.quantize_tensor(weight, "int4")


def test_an_interrupt_changes_nothing():
    class Interrupted(anybit.RTN):
        def quantize(self, w, fmt):
            if getattr(type(self), "seen", False):
                raise KeyboardInterrupt
            type(self).seen = True
            return super().quantize(w, fmt)

    m = model()
    with pytest.raises(KeyboardInterrupt):
        anybit.quantize_(m, "int4", Interrupted())
    assert schemes(m) == {}


def test_tied_weights_are_respected():
    m = anybit.quantize_(model(tied=True), "int8")
    assert m.lm_head.weight is m.embed.weight
    with pytest.raises(ValueError, match="lm_head shares its weight with embed; untie them first"):
        anybit.quantize_(model(tied=True), {"*": "int8", "lm_head": "int8"})


def test_a_quantized_model_is_not_quantized_again():
    m = anybit.quantize_(model(), {"*": "int8", "lm_head": "int8"})
    with pytest.raises(ValueError, match="quantized already"):
        anybit.quantize_(m, "int4")


def test_patterns_see_shapes_before_any_work():
    with pytest.raises(ValueError, match=r"a\.b: K=100 is not a multiple of vectors of 8"):
        resolve({"a.b": (4, 100)}, "codebook")


def test_import_is_light():
    code = (
        "import sys, anybit; "
        "print(*{'torch', 'transformers', 'triton', 'numpy', 'cutlass'} & sys.modules.keys())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.split() == []


# Layers of all kinds.


class Gate(nn.Linear):
    """Routers of transformers are like this."""

    def forward(self, x):
        return super().forward(x).softmax(-1)


class Kinds(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.gate, self.tiny = nn.Linear(64, 64), Gate(64, 64), nn.Linear(64, 2)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.conv = Conv1D(48, 64)
        self.again = self.first

    def forward(self, x):
        x = self.gate(self.again(self.first(x)))
        return self.conv(x), self.tiny(self.attention(x, x, x)[0])


def test_what_is_quantized_computes_what_it_did(caplog):
    caplog.set_level("INFO")
    m = Kinds()
    seen, names = [], ["first", "conv"]
    handle = m.first.register_forward_hook(lambda *args: seen.append(args[0]))
    anybit.quantize_(m, "fp6")
    assert list(schemes(m)) == names
    assert m.anybit_formats == {"*": "fp6", "tiny": None}
    assert m.again is m.first
    assert "1 layers stay dense, of fewer than 16 inputs or outputs: tiny" in caplog.text
    assert "2 layers stay dense, which do more than to multiply: gate" in caplog.text
    x = torch.randn(2, 5, 64)
    quantized = m(x)
    assert seen == [m.first] * 2
    handle.remove()
    anybit.dequantize_(m)
    assert m.again is m.first
    assert type(m.conv) is Conv1D
    assert m.conv.weight.shape == (64, 48)
    for got, want in zip(m(x), quantized, strict=True):
        torch.testing.assert_close(got, want)
    assert len(seen) == 2


def test_a_pattern_may_name_a_tiny_layer():
    assert "tiny" in schemes(anybit.quantize_(Kinds(), {"*": "fp6", "tiny": "int8"}))


def test_a_layer_by_itself_is_returned_quantized():
    dense, x = nn.Linear(64, 32), torch.randn(3, 64)
    q = anybit.quantize_(dense, "int8")
    assert isinstance(q, QuantLinear)
    assert (q(x) - dense(x)).norm() < 0.02 * dense(x).norm()


def test_a_model_without_contents_says_what_to_do():
    with torch.device("meta"):
        m = model()
    with pytest.raises(ValueError, match=r"on the meta device .* load it first, or quantize its"):
        anybit.quantize_(m, "int4")


def test_dense_tensors_are_checked_as_well():
    m = model()
    m.embed.weight.data[1, 2] = torch.inf
    with pytest.raises(ValueError, match=r"embed\.weight: 1 values are NaN or inf"):
        anybit.quantize_(m, "int4")


def test_quantized_in_steps():
    m = anybit.quantize_(model(), {"*": None, "*.q_proj": "fp6"})
    anybit.quantize_(m, {"*": None, "*_proj": "int8"})
    assert set(schemes(m).values()) == {"fp6", "int8"}
    with pytest.raises(ValueError, match="layers are quantized already, and of the others"):
        anybit.quantize_(m, "int4")
    assert resolve(dense_layers(model()), m.anybit_formats) == schemes(m)


class ByHand(nn.Linear):
    """As Falcon's layers."""

    def forward(self, x):
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Router(nn.Linear):
    def forward(self, x):
        return super().forward(x).softmax(-1)


class InFloat32(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x.float(), self.weight.float())


class Scaled(nn.Linear):
    factor = 0.5

    def forward(self, x):
        return super().forward(x * self.factor)


class Grouped(nn.Linear):
    def forward(self, x, groups):
        return super().forward(x)


@pytest.mark.parametrize("bias", [False, True])
def test_subclasses_that_do_the_same_are_linear_layers(bias):
    kinds = (ByHand, Router, InFloat32, Scaled, Grouped)
    for device in ("cpu", "meta"):
        with torch.device(device):
            layers = [kind(64, 32, bias=bias) for kind in kinds]
            assert [is_linear(layer) for layer in layers] == [True, False, False, False, False]
    m = nn.ModuleDict({"layer": ByHand(64, 32, bias=bias)})
    x = torch.randn(3, 64)
    expected = m.layer(x)
    anybit.quantize_(m, "int8")
    assert (m.layer(x) - expected).norm() < 0.02 * expected.norm()


def test_every_layer_tied_to_an_embedding_is_a_head():
    m = nn.ModuleDict(
        {"words": nn.Embedding(48, 64), "out": nn.Linear(64, 48), "fc": nn.Linear(64, 48)}
    )
    m.out.weight = m.words.weight
    anybit.quantize_(m, "int8")
    assert [name for name, _ in quantized_layers(m)] == ["fc"]
    with pytest.raises(ValueError, match="out shares its weight with words"):
        anybit.quantize_(m, {"out": "int8"})


@pytest.mark.parametrize(
    "call",
    [
        lambda: anybit.quantize_("models/pico", "fp6"),  # type: ignore[type-var]
        lambda: anybit.dequantize_("models/pico"),  # type: ignore[type-var]
        lambda: anybit.rotate_(Path("models/pico")),  # type: ignore[type-var]
        lambda: anybit.set_keep(None, "packed"),  # type: ignore[type-var]
        lambda: anybit.save("models/pico", "out"),
        lambda: anybit.pv_tune("models/pico", nn.Linear(3, 4), []),  # type: ignore[arg-type]
    ],
)
def test_a_name_is_no_model(call: Callable[[], object]) -> None:
    with pytest.raises(InvalidType, match=r"takes a loaded model, not \w+; load it with"):
        call()


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("x", r"a weight is a tensor \(N, K\), not str"),
        (torch.ones(4, 64, dtype=torch.int64), "weights of torch.int64 are not quantized"),
        (torch.ones(4, 64, device="meta"), "the weight is on the meta device"),
        (torch.ones(64), r"a weight has shape \(N, K\); found \(64,\)"),
    ],
)
def test_what_is_no_weight_is_refused(weight: Any, message: str) -> None:
    with pytest.raises(AnybitError, match=message):
        anybit.quantize_tensor(weight, "int4")


def test_types_say_what_comes_back() -> None:
    """Of checkers: a misspelled name is none, and the model keeps its class."""
    tree = ast.parse(Path(anybit.__file__).read_text("utf-8"))
    assert "__getattr__" not in {getattr(node, "name", None) for node in tree.body}
    linear, model = (get_type_hints(f)["return"] for f in get_overloads(anybit.quantize_))
    assert linear is anybit.QuantLinear
    assert isinstance(model, TypeVar)
