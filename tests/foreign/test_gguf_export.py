"""Checkpoints written as GGUF, read back by the `gguf` package and by transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, quants
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaTokenizer, PreTrainedModel

import anybit
from anybit.checkpoint.foreign.convert import convert_checkpoint
from anybit.checkpoint.foreign.export import export_checkpoint
from anybit.checkpoint.foreign.gguf_config import metadata_of
from anybit.checkpoint.foreign.gguf_export import GgufFile
from anybit.checkpoint.foreign.gguf_families import FAMILIES
from anybit.errors import InvalidInput
from anybit.files.directory import read_json, write_json
from anybit.nn.model import quantized_layers
from tests.foreign.gguf_models import MODELS, tiny, write

MIX = {"attn_v|ffn_down": "Q6_K", "attn_q": "Q5_1", "ffn_gate.w": "IQ4_XS", "attn|ffn": "Q3_K",
       "^output": "Q8_0"}  # fmt: skip
PLAN = {"*": "q4_k", "*.down_proj": "int8:group=32", "*.o_proj": "int4:group=32", "lm_head": "q6_k"}
READ = ("deepseek_v3", "glm4_moe", "lfm2")  # and not written
IDS = torch.arange(40)[None] * 7 % 90


@pytest.mark.parametrize("name", [n for n in MODELS if n not in READ])
def test_a_file_comes_back_byte_for_byte(name: str, tmp_path: Path) -> None:
    """Every family: converted, exported, and the tensors' bytes and the metadata are the same."""
    write(tiny(name), tmp_path / "model.gguf", MIX)
    convert_checkpoint(tmp_path / "model.gguf", tmp_path / "between")
    report = export_checkpoint(tmp_path / "between", tmp_path / "again.gguf", to="gguf")
    assert sum(report.layers.values()) > 8
    before, after = (GGUFReader(tmp_path / f"{file}.gguf") for file in ("model", "again"))
    wanted = {tensor.name: tensor for tensor in before.tensors}
    assert {tensor.name for tensor in after.tensors} == set(wanted)
    for tensor in after.tensors:
        assert tensor.tensor_type == wanted[tensor.name].tensor_type, tensor.name
        # A norm with 1 added is fp32 less 1 and plus 1 again.
        near = "norm" in tensor.name and name.startswith("gemma")
        same = np.allclose if near else np.array_equal
        assert same(tensor.data, wanted[tensor.name].data), tensor.name
    for key, field in before.fields.items():
        if not key.startswith(("GGUF.", "general.")):
            assert after.fields[key].contents() == pytest.approx(field.contents()), key


def test_a_file_that_could_not_be_read_is_not_written(
    quantized: tuple[Path, PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = GgufFile.layout

    def wrong(self: GgufFile, parts: list[Any]) -> tuple[str, tuple[int, ...], int]:
        kind, shape, nbytes = right(self, parts)
        return kind, shape[::-1] if "token_embd" in parts[0].theirs[0] else shape, nbytes

    monkeypatch.setattr(GgufFile, "layout", wrong)
    with pytest.raises(InvalidInput, match=r"fault of anybit.*token_embd"):
        export_checkpoint(quantized[0], tmp_path / "out.gguf", to="gguf")
    assert not any(tmp_path.iterdir())


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A checkpoint with a tokenizer, and its model."""
    folder = tmp_path_factory.mktemp("gguf")
    write(tiny("llama"), folder / "model.gguf", {"blk": "F16"}, tokens=96)
    convert_checkpoint(folder / "model.gguf", folder / "dense")
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float32)
    anybit.quantize_(model, PLAN)
    anybit.save(model, folder / "out")
    AutoTokenizer.from_pretrained(folder / "dense").save_pretrained(folder / "out")
    return folder / "out", model.eval()


def test_others_read_what_was_quantized_here(
    quantized: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    source, model = quantized
    report = export_checkpoint(source, tmp_path / "model.gguf", to="gguf")
    assert report.layers == {"Q4_K": 10, "Q8_0": 2, "Q4_0": 2, "Q6_K": 1}
    assert "15 layers as gguf (" in str(report)
    layers = dict(quantized_layers(model))
    found = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    for theirs, name in (("ffn_down", "mlp.down_proj"), ("attn_output", "self_attn.o_proj")):
        tensor = found[f"blk.1.{theirs}.weight"]
        got = torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(got, layers[f"model.layers.1.{name}"].dequantize())
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    with torch.no_grad():
        wanted, got = model(IDS).logits, theirs(IDS).logits
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    before, after = (
        AutoTokenizer.from_pretrained(source),
        AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf"),
    )
    text = "abcd<s> Hello, worlds!"
    assert after(text)["input_ids"] == before(text)["input_ids"]
    assert after.chat_template == before.chat_template
    assert after.eos_token_id == before.eos_token_id == 2


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("llama", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                   "high_freq_factor": 4.0, "original_max_position_embeddings": 64}),
        ("qwen2", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
        ("qwen3", {"rope_type": "linear", "factor": 2.0}),
    ],
)  # fmt: skip
def test_stretched_positions_come_back(name: str, rope: dict[str, object], tmp_path: Path) -> None:
    model = tiny(name, rope_parameters={"rope_theta": 10000.0, **rope})
    anybit.quantize_(model, "q6_k")
    anybit.save(model, tmp_path / "out")
    export_checkpoint(tmp_path / "out", tmp_path / "model.gguf", to="gguf")
    again = anybit.load(tmp_path / "model.gguf", dtype=torch.float32)
    ids = torch.arange(120)[None] * 7 % 90
    with torch.no_grad():
        wanted, got = model(ids).logits, again(ids).logits
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    ("plan", "wanted"),
    [
        ("fp6", "14 of 14 layers cannot be exported exactly.*no type of ggml is 'fp6'"),
        ("int4", "no type of ggml is 'int4'; there are int4:group=32, q4_1"),
        ("int8:group=32@int8", "GGUF does not say that activations are quantized to int8"),
    ],
)
def test_formats_without_a_type_are_refused(plan: str, wanted: str, tmp_path: Path) -> None:
    model = tiny("llama")
    anybit.quantize_(model, plan)
    anybit.save(model, tmp_path / "out")
    with pytest.raises(InvalidInput, match=wanted):
        export_checkpoint(tmp_path / "out", tmp_path / "model.gguf", to="gguf")
    assert not list(tmp_path.glob("*.gguf*"))


def test_settings_that_the_file_cannot_say_are_refused(
    quantized: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    source, _ = quantized
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = read_json(tmp_path / "config.json")
    write_json(tmp_path / "config.json", config | {"hidden_act": "relu"})
    with pytest.raises(InvalidInput, match=r"hidden_act is relu, and llama\.cpp's llama would run"):
        export_checkpoint(tmp_path, tmp_path / "model.gguf", to="gguf")
    with pytest.raises(FileExistsError, match="exists; choose another file"):
        export_checkpoint(source, tmp_path / "config.json", to="gguf")


def test_vocabularies_with_bytes_as_a_fallback(tmp_path: Path) -> None:
    """SentencePiece's kind, whose merges become scores."""
    letters = [chr(i) for i in range(97, 123)]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *letters]
    merges = [("b", "c"), ("a", "bc"), ("a", "b"), ("▁", "a"), ("▁", "abc")]
    names += ["".join(merge) for merge in merges]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = LlamaTokenizer(vocab=vocab, merges=merges)
    model = tiny("llama", vocab_size=len(names) + 3, num_hidden_layers=1)
    anybit.quantize_(model, "int8:group=32")
    anybit.save(model, tmp_path / "out")
    tokenizer.save_pretrained(tmp_path / "out")
    export_checkpoint(tmp_path / "out", tmp_path / "model.gguf", to="gguf")
    fields = GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert tokens == [*names, *(f"[PAD{i}]" for i in range(len(names), len(names) + 3))]
    assert fields["tokenizer.ggml.token_type"].contents(slice(0, 4)) == [2, 3, 3, 6]
    scores = dict(zip(tokens, fields["tokenizer.ggml.scores"].contents(), strict=True))
    assert scores["bc"] > scores["abc"] > scores["ab"] > scores["z"]
    again = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in ("abc ab bca", "äbc"):
        wanted = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert again(text, add_special_tokens=False)["input_ids"] == wanted


def test_whole_numbers_where_llama_cpp_reads_floats() -> None:
    config = tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 10000}).config
    (family,) = [f for f in FAMILIES if f.kind == "LlamaForCausalLM"]
    names = ["token_embd.weight", "output.weight", *(f"blk.{i}.attn_norm.weight" for i in range(8))]
    metadata, _ = metadata_of(config, family, names)
    assert isinstance(metadata["llama.rope.freq_base"], float)
    assert isinstance(metadata["llama.block_count"], int)
