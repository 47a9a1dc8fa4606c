"""Export to compressed-tensors: what it writes by the formula, what comes back, what is refused."""

import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import anybit
from anybit.checkpoint.foreign.convert import convert_checkpoint
from anybit.checkpoint.foreign.ct_layers import Written, written
from anybit.checkpoint.foreign.export import export_checkpoint, joined
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.core.packed import Packed
from anybit.files.directory import read_json
from anybit.files.safetensors import stored_tensors
from anybit.nn.model import quantized_layers
from tests import tiny
from tests.foreign.make import FIXTURES, decoded_in_fp32

PLAN = {
    "*": "int4:group=32",
    "*.v_proj": "int3:group=64,zero",
    "*.k_proj": "int5:group=32",
    "*.o_proj": "int8",
    "*.up_proj": "int2:group=32,zero",
    "*.layers.1.mlp.down_proj": "int7:zero",
    "*.layers.0.mlp.down_proj": None,
    "*.layers.1.self_attn.q_proj": "int6",
    "lm_head": "int8:group=32,zero",
}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("export")
    quantize_checkpoint(tiny.dense(place / "dense"), place / "ours", PLAN)
    return place / "ours"


@pytest.fixture(scope="module")
def theirs(ours: Path) -> Path:
    report = export_checkpoint(ours, ours.parent / "theirs", shard_bytes=20_000)
    assert "14 layers as compressed-tensors" in str(report)
    return report.out


def decoded(directory: Path, name: str, bits: int, group: int) -> np.ndarray:
    """One exported weight, bit by bit and by the formula."""
    stored = stored_tensors(directory)
    words = stored[f"{name}.weight_packed"].read().numpy()
    n, k = stored[f"{name}.weight_shape"].read().tolist()

    def codes(words: np.ndarray, count: int) -> np.ndarray:
        flat = np.unpackbits(words.astype("<i4").view(np.uint8), axis=1, bitorder="little")
        each = flat[:, : count * bits].reshape(len(words), count, bits)
        return (each.astype(np.int64) << np.arange(bits)).sum(-1) - 2 ** (bits - 1)

    q = codes(words, k)
    scale = stored[f"{name}.weight_scale"].read().float().numpy()
    zero = np.zeros(scale.shape, np.int64)
    if f"{name}.weight_zero_point" in stored:
        packed = np.ascontiguousarray(stored[f"{name}.weight_zero_point"].read().numpy().T)
        zero = codes(packed, n).T
    repeat = group or k
    return (q - zero.repeat(repeat, 1)).astype(np.float32) * scale.repeat(repeat, 1)


def named(name: str, targets: list[str]) -> bool:
    """Whether a config group names a layer."""
    return any(t == name or (t[:3] == "re:" and re.match(t[3:], name)) for t in targets)


def test_weights_by_the_formula(ours: Path, theirs: Path) -> None:
    layers = dict(quantized_layers(anybit.load(ours)))
    config = read_json(theirs / "config.json")["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert config["ignore"] == ["model.layers.0.mlp.down_proj"]
    groups = list(config["config_groups"].values())
    assert groups[-1]["targets"] == ["Linear"]
    seen = set()
    for name, layer in layers.items():
        group = next((g for g in groups if named(name, g["targets"])), groups[-1])["weights"]
        size = group["group_size"] if group["strategy"] == "group" else 0
        weight = decoded(theirs, name, group["num_bits"], size)
        assert torch.equal(torch.from_numpy(weight), layer.dequantize()), name
        assert group["symmetric"] == ("zero" not in layer.scheme)
        seen.add(group["num_bits"])
    assert seen == {2, 3, 4, 5, 6, 7, 8}


def test_it_comes_back(ours: Path, theirs: Path, tmp_path: Path) -> None:
    convert_checkpoint(theirs, tmp_path / "back")
    before, after = stored_tensors(ours), stored_tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    for name in before:
        assert torch.equal(before[name].read(), after[name].read()), name
    tiny.same_state(anybit.load(ours), anybit.load(tmp_path / "back"))


def test_the_tool_reads_it(theirs: Path, ours: Path) -> None:
    if find_spec("compressed_tensors") is None:
        pytest.skip("compressed_tensors is not installed")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = dict(read_json(theirs / "config.json")["quantization_config"])
    config.pop("version")
    groups = QuantizationConfig(**config).config_groups.values()
    stored = stored_tensors(theirs)
    for name, layer in quantized_layers(anybit.load(ours)):
        schemes = [g for g in groups if named(name, g.targets)] or [list(groups)[-1]]
        keys = [k for k in stored if k.startswith(f"{name}.weight_")]
        state = {k.removeprefix(f"{name}."): stored[k].read() for k in keys}
        state["weight_scale"] = state["weight_scale"].float()
        weight = PackedQuantizationCompressor.decompress(state, schemes[0])["weight"]
        assert torch.equal(weight, layer.dequantize()), name


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("fp6", "14 of 14 layers .*: fp6 is not among the formats that compressed-tensors has"),
        ("nvfp4", "divides scales by the weight's number.*; quantize to nvfp4:divide for it"),
        ("nvfp4:group=32,divide", "groups of 32 columns, compressed-tensors's NVFP4 has 16"),
        ("int4:group=64,rotate=k", "int4:group=64,rotate=k is rotated"),
        ("mxfp6:e3m2", "mxfp6:e3m2 is not among the MX formats"),
        ({"*": "int4", "*.layers.1.*.q_proj": "codebook"}, "1 of 14 layers .*q_proj: codebook is"),
        ("int1", "int1 is not among the integers"),
        ("int8:zero@int8", "quantizes activations"),
        ("mxfp4@fp8", "quantizes activations"),
    ],
)
def test_formats_without_an_equal_are_refused(
    plan: str | dict[str, str | None], message: str, tmp_path: Path
) -> None:
    quantize_checkpoint(tiny.dense(tmp_path / "dense"), tmp_path / "ours", plan)
    with pytest.raises(ValueError, match=message):
        export_checkpoint(tmp_path / "ours", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()
    assert not (tmp_path / "theirs.partial").exists()


@pytest.mark.parametrize(
    ("fixture", "message"),
    [("gptq_4bit_act_order", "columns of a group lie apart"), ("hqq_4bit", "zero points are F16")],
)
def test_what_other_tools_may_store_and_it_cannot(
    fixture: str, message: str, tmp_path: Path
) -> None:
    convert_checkpoint(FIXTURES / fixture, tmp_path / "ours")
    with pytest.raises(ValueError, match=message):
        export_checkpoint(tmp_path / "ours", tmp_path / "theirs")


FLOATS = {
    "*": "nvfp4:divide",
    "*.v_proj": "mxfp4",
    "*.k_proj": "mxfp6",
    "*.o_proj": "mxfp8",
    "*.gate_proj": "fp8",
    "*.up_proj": "fp8:group=32",
    "*.layers.1.mlp.down_proj": None,
}


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("floats")
    quantize_checkpoint(tiny.dense(place / "dense"), place / "ours", FLOATS)
    report = export_checkpoint(place / "ours", place / "theirs", shard_bytes=20_000)
    for name in ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "naive-quantized"):
        assert name in str(report)
    return place / "ours"


def test_floats_come_back(floats: Path, tmp_path: Path) -> None:
    convert_checkpoint(floats.parent / "theirs", tmp_path / "back")
    before, after = stored_tensors(floats), stored_tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    for name in before:
        a, b = (held[name].read().flatten().view(torch.uint8) for held in (before, after))
        assert torch.equal(a, b), name


def numbers(directory: Path) -> dict[str, set[float]]:
    """NVFP4's of the weights that vLLM merges, by where they are."""
    out: dict[str, set[float]] = {}
    for key, tensor in stored_tensors(directory).items():
        if key.endswith(".weight_global_scale"):
            out.setdefault(joined(key.rpartition(".")[0]), set()).add(float(tensor.read()))
    return out


def test_weights_that_vllm_merges_have_one_number(tmp_path: Path) -> None:
    """Of which it takes the largest for all."""
    torch.manual_seed(0)
    model = tiny.llama(dtype=torch.float32)
    for name, weight in model.named_parameters():
        if "k_proj" in name or "up_proj" in name:
            weight.data *= 30
    model.save_pretrained(tmp_path / "dense")
    quantize_checkpoint(tmp_path / "dense", tmp_path / "ours", "nvfp4:divide")
    report = export_checkpoint(tmp_path / "ours", tmp_path / "theirs")
    assert not report.notes
    found = numbers(report.out)
    assert {len(of) for of in found.values()} == {1}
    assert len(found) == 8
    convert_checkpoint(report.out, tmp_path / "back")
    want, back = anybit.load(tmp_path / "ours"), anybit.load(tmp_path / "back")
    for (_, layer), (_, other) in zip(quantized_layers(want), quantized_layers(back), strict=True):
        assert torch.equal(layer.dequantize(), other.dequantize())


def test_numbers_that_cannot_be_one_are_told(tmp_path: Path) -> None:
    """An earlier version's are no powers of two."""
    quantize_checkpoint(tiny.dense(tmp_path / "dense"), tmp_path / "ours", "nvfp4:divide")
    path = tmp_path / "ours" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.k_proj.row_scale"] *= 1.01
    save_file(tensors, path, {"format": "pt"})
    report = export_checkpoint(tmp_path / "ours", tmp_path / "theirs")
    (note,) = report.notes
    assert re.search(r"wrong weights there: 1, the first is .*1.self_attn.q_proj\+k_proj\+v", note)
    sizes = {name: len(of) for name, of in numbers(report.out).items()}
    assert sizes.pop("model.layers.1.self_attn.q_proj+k_proj+v_proj") == 2
    assert {*sizes.values()} == {1}


def test_the_tool_reads_floats(floats: Path) -> None:
    """Its own decompressors, with scales and elements in fp32, give our weights bit for bit."""
    if find_spec("compressed_tensors") is None:
        pytest.skip("compressed_tensors is not installed")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = dict(read_json(floats.parent / "theirs" / "config.json")["quantization_config"])
    assert config["format"] == "mixed-precision"
    config.pop("version")
    groups = [*QuantizationConfig(**config).config_groups.values()]
    stored = stored_tensors(floats.parent / "theirs")
    for name, layer in quantized_layers(anybit.load(floats)):
        scheme = next((g for g in groups if name in g.targets), groups[-1])
        keys = [k for k in stored if k.startswith(f"{name}.weight")]
        state = {k.removeprefix(f"{name}."): stored[k].read() for k in keys}
        kind = BaseCompressor.get_value_from_registry(scheme.format)
        assert torch.equal(decoded_in_fp32(kind, state, scheme), layer.dequantize()), name


def test_transformers_reads_floats(floats: Path) -> None:
    if find_spec("compressed_tensors") is None:
        pytest.skip("compressed_tensors is not installed")
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(floats.parent / "theirs")
    ours = anybit.load(floats)
    prompt = torch.arange(3, 15)[None]
    with torch.no_grad():
        wanted, found = ours(prompt).logits.float(), theirs(prompt).logits.float()
    # It decodes to bf16 or the model's dtype.
    assert (wanted - found).norm() < 0.02 * wanted.norm()


def test_fp8_with_activations_and_in_blocks(tmp_path: Path) -> None:
    w = torch.randn(300, 256, generator=torch.Generator().manual_seed(0))
    scale = torch.rand(3, 2).repeat_interleave(128, 0)[:300] + 0.5
    fmt = anybit.get_format("fp8:group=128")
    blocks = Packed.from_codes(fmt, (300, 256), fmt.encode(w, {"scale": scale}), {"scale": scale})
    rows = anybit.quantize_tensor(w, "fp8")
    for packed, activation, kind in ((blocks, None, "block"), (rows, "fp8", "channel")):
        save_file(packed.tensors(), tmp_path / "model.safetensors")
        held = stored_tensors(tmp_path)
        found = written(packed.format, activation, packed.shape, held, "a")
        assert isinstance(found, Written)
        made = found.tensors(packed)
        assert {key: t.nbytes for key, t in made.items()} == found.sizes
        assert found.group["weights"]["strategy"] == kind
        tall = 128 if kind == "block" else 1
        wide = made["weight_scale"].float().repeat_interleave(tall, 0)[:300]
        wide = wide.repeat_interleave(256 // wide.shape[1], 1)
        assert torch.equal(made["weight"].float() * wide, packed.dequantize())
        assert (found.group["input_activations"] is None) == (activation is None)


def test_wrong_calls(ours: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot export to 'marlin'; known: compressed-t"):
        export_checkpoint(ours, tmp_path / "out", "marlin")
    with pytest.raises(ValueError, match="not a checkpoint of anybit"):
        export_checkpoint(FIXTURES / "ct_4bit", tmp_path / "out")
    with pytest.raises(FileExistsError):
        export_checkpoint(ours, ours.parent / "dense")
