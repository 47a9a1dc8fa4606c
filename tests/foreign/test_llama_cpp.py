"""llama.cpp itself reads what is exported here, and what its quantizer writes is read bit for bit.

Skipped unless ANYBIT_LLAMA_CPP names the folder of its library, see `llama_cpp.py`.
"""

from pathlib import Path

import pytest
import torch
from gguf import GGUFReader, quants
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import anybit
from anybit.checkpoint.foreign.convert import convert_checkpoint
from anybit.checkpoint.foreign.export import export_checkpoint
from anybit.nn.model import quantized_layers
from tests.foreign import llama_cpp
from tests.foreign.gguf_hybrids import HYBRIDS
from tests.foreign.gguf_models import tiny, write

pytestmark = pytest.mark.skipif(not llama_cpp.FOLDER, reason="ANYBIT_LLAMA_CPP is not set")

PICO = Path(__file__).parents[2] / "models" / "pico"
TEXT = "def fibonacci(n):\n    if n < 2:\n        return n\n    return"
LAYERS = {  # of llama.cpp and of transformers
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def exported(plan: dict[str, str | None], folder: Path) -> tuple[Path, PreTrainedModel]:
    """Pico in these formats, as a file and as a model."""
    model = AutoModelForCausalLM.from_pretrained(PICO, dtype=torch.float32)
    anybit.quantize_(model, plan)
    anybit.save(model, folder / "own")
    AutoTokenizer.from_pretrained(PICO).save_pretrained(folder / "own")
    export_checkpoint(folder / "own", folder / "pico.gguf", to="gguf")
    return folder / "pico.gguf", model.eval()


def agree(file: Path, model: PreTrainedModel, bound: float) -> None:
    ids = AutoTokenizer.from_pretrained(PICO)(TEXT)["input_ids"]
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0].float()
    error = (llama_cpp.logits(file, ids) - want).norm() / want.norm()
    assert error < bound, error


def test_an_export_runs_in_llama_cpp(tmp_path: Path) -> None:
    """It rounds activations to 8 bits where weights have few, and to bf16 elsewhere."""
    file, model = exported({"*": None, "*.layers.7.mlp.down_proj": "q6_k"}, tmp_path)
    agree(file, model, 0.01)


PLANS: tuple[dict[str, str | None], ...] = (
    {"*": "q4_k", "*_proj": "q6_k", "*.layers.[01].*": None},
    {"*": "int4:group=32"},
    {"*": "int5:group=32"},
    {"*": "mxfp4"},
)


@pytest.mark.parametrize("plan", PLANS)
def test_an_export_in_few_bits_runs_in_llama_cpp(
    plan: dict[str, str | None], tmp_path: Path
) -> None:
    file, model = exported(plan, tmp_path)
    agree(file, model, 0.03)


@pytest.mark.parametrize("kind", ["Q4_K_M", "Q2_K", "IQ4_XS", "Q5_1", "IQ3_S"])
def test_what_its_quantizer_writes_is_read(kind: str, tmp_path: Path) -> None:
    """All weights are those of the `gguf` package."""
    dense, _ = exported({"*": None, "*.layers.7.mlp.down_proj": "q6_k"}, tmp_path)
    llama_cpp.quantize(dense, tmp_path / "file.gguf", kind)
    convert_checkpoint(tmp_path / "file.gguf", tmp_path / "out")
    model = anybit.load(tmp_path / "out", dtype=torch.float32)
    found = dict(quantized_layers(model))
    compared = 0
    for tensor in GGUFReader(tmp_path / "file.gguf").tensors:
        _, _, rest = tensor.name.partition("blk.")
        number, _, layer = rest.removesuffix(".weight").partition(".")
        own = found.get(f"model.layers.{number}.{LAYERS.get(layer)}")
        if own is None:
            continue
        w = torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if layer in ("attn_q", "attn_k"):  # its pairs of rows, put apart
            w = w.unflatten(0, (-1, 32, 2)).transpose(1, 2).flatten(0, 2)
        assert torch.equal(own.dequantize(), w), tensor.name
        compared += 1
    assert compared >= 50
    agree(tmp_path / "file.gguf", model.eval(), 0.06)


OTHERS = ["qwen3", "granite", "glm4", "glm4_moe", "deepseek_v3", "lfm2", *HYBRIDS]


@pytest.mark.parametrize("name", OTHERS)
def test_logits_of_other_families_are_its_own(name: str, tmp_path: Path) -> None:
    kinds, arch = {"ffn_down": "Q8_0"}, HYBRIDS[name][0] if name in HYBRIDS else ""
    write(tiny(name), tmp_path / "model.gguf", kinds, tokens=96, arch=arch)
    convert_checkpoint(tmp_path / "model.gguf", tmp_path / "out")
    model = anybit.load(tmp_path / "out", dtype=torch.float32).eval()
    ids = [i * 7 % 90 + 3 for i in range(20)]
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    error = (llama_cpp.logits(tmp_path / "model.gguf", ids) - want).norm() / want.norm()
    assert error < (0.03 if name.startswith("qwen3_") else 0.01), error  # it rounds activations
