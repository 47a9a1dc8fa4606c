"""A format that anybit does not know, as docs/add_a_format.md writes it, through all of anybit."""

import importlib
import os
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import anybit
from anybit.core.format import FORMATS
from anybit.evaluate.model import complete, load_text_model
from tests import forks, tiny

DEVICE = os.environ.get("ANYBIT_TEST_DEVICE", "cpu")
ROOT = Path(__file__).parent.parent
SOURCE = re.search(r"```python\n(.*?)```", (ROOT / "docs/add_a_format.md").read_text(), re.S)


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The document's first code block as a module outside the package, imported."""
    assert SOURCE
    path = tmp_path_factory.mktemp("own") / "ternary.py"
    path.write_text(SOURCE[1])
    sys.path.insert(0, str(path.parent))
    import ternary  # type: ignore[import-not-found]  # noqa: F401

    yield path
    sys.path.remove(str(path.parent))
    del sys.modules["ternary"], FORMATS["ternary"]


def test_it_takes_few_lines() -> None:
    assert SOURCE
    assert len(SOURCE[1].splitlines()) <= 40


@pytest.mark.parametrize("spec", ["ternary", "ternary:group=64"])
def test_the_weights_are_the_nearest_of_three(module: Path, spec: str) -> None:
    w = torch.randn(24, 192, generator=torch.Generator().manual_seed(0))
    packed = anybit.quantize_tensor(w, spec)
    assert packed.format.spec == spec
    groups = w.view(24, -1, 64 if "group" in spec else 192)
    scale = groups.abs().mean(-1, keepdim=True).half().float()
    levels = torch.tensor([-1.0, 0, 1])
    nearest = levels[(groups[..., None] - scale[..., None] * levels).abs().argmin(-1)]
    assert torch.equal(packed.dequantize(), (nearest * scale).view(24, 192))
    assert torch.equal(packed.format.encode(packed.dequantize(), packed.grid), packed.codes())
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(anybit.linear(x, packed), x @ packed.dequantize().T, atol=1e-4)
    assert packed.nbytes() == 24 * (192 * 2 / 8 + groups.shape[1] * 2)


def test_it_is_saved_loaded_and_writes(module: Path, tmp_path: Path) -> None:
    model, tokenizer = load_text_model(tiny.short_pico(), "cpu")
    plan = {"*": "int8", "*.mlp.*": "ternary:group=64"}
    anybit.quantize_(model, plan)
    layer = model.get_submodule("model.layers.1.mlp.down_proj")
    assert layer.format.bits_per_weight((256, 768)) == 2 + 16 / 64
    before = complete(model, tokenizer, "def read(path):", max_tokens=12)
    anybit.save(model, tmp_path / "out")
    again = anybit.load(tmp_path / "out")
    assert complete(again, tokenizer, "def read(path):", max_tokens=12) == before
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


FRESH = """
import sys, anybit
try:
    anybit.load(sys.argv[1])
except ValueError as error:
    print(error)
sys.path.append(sys.argv[2])
import ternary
print(anybit.load(sys.argv[1]).model.layers[0].mlp.up_proj.scheme)
"""


def test_a_fresh_process_can_load_it_once_the_module_is_imported(
    module: Path, tmp_path: Path
) -> None:
    anybit.save(anybit.quantize_(tiny.llama(), "ternary"), tmp_path / "out")
    done = forks.run(FRESH, str(tmp_path / "out"), str(module.parent))
    assert done.returncode == 0, done.stderr
    refusal, scheme = done.stdout.splitlines()
    assert "unknown format 'ternary'" in refusal
    assert "codebook, fp, " in refusal
    assert scheme == "ternary"


def test_a_module_that_is_reloaded_replaces_the_format(module: Path) -> None:
    before = type(anybit.quantize_tensor(torch.randn(8, 64), "ternary").format)
    again = importlib.reload(sys.modules["ternary"]).Ternary
    layer = anybit.quantize_(nn.Sequential(nn.Linear(64, 64)), "ternary@int8")[0]
    assert type(layer.format) is again is not before
    assert layer.scheme == "ternary@int8"


def test_a_layer_it_cannot_store_is_named(module: Path) -> None:
    model = nn.ModuleDict({"proj": nn.Linear(100, 32)})
    with pytest.raises(ValueError, match=r"proj: K=100 is not a multiple of group=64"):
        anybit.quantize_(model, "ternary:group=64")


@pytest.mark.parametrize("spec", ["ternary", "ternary:group=64"])
@pytest.mark.parametrize("activation", [None, "int8"])
def test_triton_kernels_read_it_back_exactly(
    module: Path, spec: str, activation: str | None
) -> None:
    pytest.importorskip("triton")
    from anybit.kernels.triton import backend

    packed = packed_weight(spec, 40, 192)
    x = torch.eye(192, dtype=torch.float16, device=DEVICE)
    y = backend.linear(x, backend.prepare(packed.to(DEVICE), activation, x.dtype), None)
    want = packed.dequantize().T
    if activation is None:
        assert torch.equal(y.cpu().float(), want)
    else:  # the scale of a token is 1/127, rounded
        torch.testing.assert_close(y.cpu().float(), want, rtol=1e-3, atol=0)


# The operand, the format's options, the dtype of y.
HOPPER = [
    ("ternary", None, torch.float16),
    ("ternary:group=64", None, torch.bfloat16),
    ("ternary", "int8", torch.bfloat16),
]


@pytest.mark.skipif(
    find_spec("cutlass") is None, reason="CuTe DSL is not installed: pip install 'anybit[hopper]'"
)
@pytest.mark.parametrize(("spec", "activation", "dtype"), HOPPER)
def test_hopper_kernels_read_it_back_exactly(
    module: Path, spec: str, activation: str | None, dtype: torch.dtype
) -> None:
    """A compiled kernel, run by the emulator, with one-hot activations."""
    from anybit.kernels.cute import operands
    from anybit.kernels.hopper.tile import Tile
    from tests.kernels.test_hopper_emulated import Emulated

    scheme = spec if activation is None else f"{spec}@{activation}"
    emulated = Emulated(scheme, dtype, Tile(32, ctas=2))
    packed = packed_weight(spec, 128, 128)
    if dtype == torch.bfloat16:  # scales that bf16 holds
        scale = packed.grid["scale"].bfloat16()
        packed = anybit.Packed.from_codes(
            packed.format, packed.shape, packed.codes(), {"scale": scale}
        )
    prepared = operands.layout(packed, emulated.operand)
    for start in range(0, 128, 32):
        codes = torch.zeros(32, 128, dtype=torch.int8 if activation else dtype)
        codes[torch.arange(32), start + torch.arange(32)] = 1
        ones = torch.ones(32) if activation else None
        sums = torch.ones(32, dtype=torch.int32) if activation else None
        y = emulated.run((codes, ones, sums), prepared, 128, 1)
        assert torch.equal(y.float(), packed.dequantize()[:, start : start + 32].T)


def test_hopper_refuses_what_it_cannot_hold(module: Path) -> None:
    from anybit.kernels.cute.decode import decoder

    assert decoder(anybit.get_format("ternary"), "float8_e4m3fn") == (
        "e4m3 takes codes of 2 bits minus 2 only"
    )
    assert decoder(anybit.get_format("ternary:group=64"), "int8") == (
        "int8 and scales of groups take codes of 2 bits minus 2 only"
    )


def packed_weight(spec: str, n: int, k: int) -> anybit.Packed:
    return anybit.quantize_tensor(
        torch.randn(n, k, generator=torch.Generator().manual_seed(3)), spec
    )
