"""A format that anybit does not know, as docs/add_a_format.md writes it, through all of anybit."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import anybit
from anybit.format import FORMATS
from anybit.generate import complete, load_text_model

ROOT = Path(__file__).parent.parent
PICO = ROOT / "models" / "pico"
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


def test_it_takes_30_lines_or_fewer() -> None:
    assert SOURCE
    assert len(SOURCE[1].splitlines()) <= 30


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
    model, tokenizer = load_text_model(PICO, "cpu")
    plan = {"*": "int8", "*.mlp.*": "ternary:group=64"}
    anybit.quantize_(model, plan)
    layer = model.get_submodule("model.layers.3.mlp.down_proj")
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
    model, _ = load_text_model(PICO, "cpu")
    anybit.save(anybit.quantize_(model, "ternary"), tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path / "out"), str(module.parent)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    refusal, scheme = done.stdout.splitlines()
    assert "unknown format 'ternary'" in refusal
    assert "codebook, fp, " in refusal
    assert scheme == "ternary"


def test_a_layer_it_cannot_store_is_named(module: Path) -> None:
    model = nn.ModuleDict({"proj": nn.Linear(100, 8)})
    with pytest.raises(ValueError, match=r"proj: K=100 is not a multiple of group=64"):
        anybit.quantize_(model, "ternary:group=64")
