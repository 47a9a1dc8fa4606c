"""GGUF files: small models of every family, against transformers with the same weights."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import anybit
from anybit.checkpoint.foreign.convert import Conversion, convert_checkpoint
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from anybit.errors import InvalidInput
from anybit.files.directory import read_json
from anybit.files.safetensors import ShardWriter
from anybit.nn.model import quantized_layers, quantized_modules
from tests.foreign.gguf_hybrids import HYBRIDS
from tests.foreign.gguf_models import LONG, MODELS, tiny, write
from tests.hub import serving, use
from tests.test_cli import run

IDS = torch.arange(48)[None] * 7 % 90
K_MIX = {"attn_v|ffn_down": "Q6_K", "attn|ffn_(gate|up)": "Q4_K", "output|token_embd": "Q6_K"}
HYBRID_MIX = {"ssm_(in|out)": "Q8_0", "attn_(q|k|v|qkv|gate|output)\\.": "Q4_K", "ffn_down": "Q4_K",
              "shortconv.out": "Q8_0", "token_embd|output": "Q8_0"}  # fmt: skip
I_MIX = {"attn_v": "IQ1_M", "attn_q": "IQ2_XS", "attn": "IQ2_S", "ffn_gate": "IQ3_XXS",
         "ffn_up": "IQ1_S", "ffn_down": "IQ3_S", "output": "IQ2_XXS"}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_decoded_model(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    file = tmp_path / "model.gguf"
    write(model, file, K_MIX)
    report = convert_checkpoint(file, tmp_path / "out")
    assert set(report.formats.values()) == {"q4_k", "q6_k"}
    assert all("kv_b_proj" in layer for layer in report.decoded)  # of two parts
    again = anybit.load(tmp_path / "out", dtype=torch.float32)
    # What the file has in two parts is decoded to the model's dtype.
    for layer in report.decoded:
        weight = model.get_parameter(f"{layer}.weight")
        weight.data.copy_(weight.bfloat16())
    with torch.no_grad():
        wanted, got = model(IDS).logits, again(IDS).logits
    assert type(again) is type(model)
    # Embeddings keep their codes, and a head that is tied to them holds the same tensors.
    words, head = again.get_input_embeddings(), again.get_output_embeddings()
    assert words.scheme == head.scheme == "q6_k"
    if model.config.tie_word_embeddings:
        assert all(getattr(words, name) is getattr(head, name) for name in words.names)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", HYBRIDS)
def test_models_with_recurrent_layers(name: str, tmp_path: Path) -> None:
    """Joined, parted, reordered and changed tensors; blocks stay what they are."""
    model, arch = tiny(name), HYBRIDS[name][0]
    write(model, tmp_path / "model.gguf", HYBRID_MIX, arch=arch)
    report = convert_checkpoint(tmp_path / "model.gguf", tmp_path / "out")
    assert set(report.formats.values()) == {"int8:group=32", "q4_k"}
    assert not report.decoded
    again = anybit.load(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        wanted, got = model(IDS).logits, again(IDS).logits
    assert type(again) is type(model)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=5e-4 * float(wanted.abs().max()))
    if name in ("granitemoehybrid", "nemotron_h moe", "qwen3_5_text"):  # the engine, by its names
        llm = LLM(tmp_path / "out", dtype="float32", device="cpu", kv_cache="model", length=64)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        text = llm.generate([IDS[0, :9].tolist()], params, show_progress=False)[0].completions[0]
        whole = again.generate(IDS[:, :9], max_new_tokens=4, min_new_tokens=4, do_sample=False)
        assert text.tokens == whole[0, 9:].tolist()


@pytest.mark.parametrize("name", ["lfm2_moe", "granitemoehybrid", "qwen3_5_moe_text"])
@pytest.mark.parametrize("kind", ["F32", "F16", "TQ1_0"])
def test_experts_without_codes_have_the_names_of_dense_ones(
    name: str, kind: str, tmp_path: Path
) -> None:
    """Files to quantize oneself, and experts of a type that no format of ours has."""
    model, arch = tiny(name), HYBRIDS[name][0]
    write(model, tmp_path / "model.gguf", {"_exps": kind}, arch=arch)
    report = convert_checkpoint(tmp_path / "model.gguf", tmp_path / "out")
    assert len(report.decoded) == (kind == "TQ1_0") * 9 * (1 if name == "lfm2_moe" else 2)
    kind_of: Any = type(model)
    again, info = kind_of.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        wanted, got = model(IDS).logits, again.eval()(IDS).logits
    bound = 0.02 if kind == "TQ1_0" else 1e-5  # decoded to fp16
    torch.testing.assert_close(got, wanted, rtol=0, atol=bound * float(wanted.abs().max()))
    quantize_checkpoint(tmp_path / "out", tmp_path / "int8", "int8")
    anybit.load(tmp_path / "int8")


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text"])
def test_transformers_reads_the_same_from_the_file(name: str, tmp_path: Path) -> None:
    """Its reader decodes everything, and is the oracle of names, orders and norms."""
    # It takes the head size, or what scales queries, of the published models.
    sizes = {"gemma2": 256, "gemma3_text": 256, "qwen3": 128}
    dim = sizes.get(name, 64)
    extra = {"query_pre_attn_scalar": dim} if dim == 256 else {}
    model = tiny(name, head_dim=dim, **extra)
    write(model, tmp_path / "model.gguf", {"attn|ffn": "Q8_0"}, tokens=96)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32, attn_implementation="eager"
    )
    convert_checkpoint(tmp_path / "model.gguf", tmp_path / "out")
    ours = anybit.load(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        wanted, got = theirs(IDS).logits, ours(IDS).logits
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("kinds", [K_MIX, I_MIX], ids=["k", "i"])
def test_a_file_is_loaded_and_run_by_its_path(
    kinds: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its tokenizer and chat template, and a conversion in the cache."""
    monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    write(tiny("llama"), file, kinds, tokens=96)
    model = anybit.load(file, dtype=torch.float32)
    formats = {layer.scheme.partition("@")[0].upper() for _, layer in quantized_layers(model)}
    assert formats == {kind for at, kind in kinds.items() if at != "token_embd"}
    prompt = list(range(5, 25))
    with torch.no_grad():
        wanted = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    llm = anybit.LLM(file, dtype="float32")
    params = anybit.SamplingParams(max_tokens=8, temperature=0)
    [output] = llm.generate([prompt], params)
    assert output.tokens == wanted[0, len(prompt) :].tolist()[: len(output.tokens)]
    assert len(output.tokens) == 8 or output.tokens[-1] == 2
    [folder] = (tmp_path / "cache" / "converted").iterdir()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("abcd")["input_ids"] == [94, 95]
    assert tokenizer.apply_chat_template([{"content": "ab"}], tokenize=False) == "ab"
    assert read_json(folder / "generation_config.json")["eos_token_id"] == [2]


def test_parts_of_a_model_are_read_together(tmp_path: Path) -> None:
    model = tiny("qwen2")
    write(model, tmp_path / "model.gguf", K_MIX, parts=9)
    files = sorted(tmp_path.glob("*.gguf"))
    assert [f.name for f in files[:1]] == ["model-00001-of-00003.gguf"]
    convert_checkpoint(files[1], tmp_path / "out")
    again = anybit.load(tmp_path / "out", dtype=torch.float32)
    for name, layer in quantized_layers(again):
        assert torch.equal(layer.dequantize(), model.get_parameter(f"{name}.weight")), name
    files[2].rename(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"00003-of-00003\.gguf is missing"):
        convert_checkpoint(files[0], tmp_path / "other")
    files[0].rename(tmp_path / "alone.gguf")
    with pytest.raises(InvalidInput, match="one of 3 parts by its header, of 1 by its name"):
        convert_checkpoint(tmp_path / "alone.gguf", tmp_path / "other")


def test_what_is_no_format_of_ours_is_decoded_and_named(tmp_path: Path) -> None:
    model = tiny("qwen3")
    kinds = {"ffn_up": "TQ1_0", "ffn": "Q4_0", "attn_q": "F16", "attn": "BF16"}
    write(model, tmp_path / "model.gguf", kinds)
    report = convert_checkpoint(tmp_path / "model.gguf", tmp_path / "out")
    assert set(report.formats.values()) == {"int4:group=32"}
    assert set(report.decoded.values()) == {"TQ1_0 has no format in anybit"}
    assert "model.layers.0.mlp.up_proj and 1 others: TQ1_0" in str(report)
    again = anybit.load(tmp_path / "out", dtype=torch.float32)
    for name, wanted in model.state_dict().items():
        if "up_proj" in name:
            wanted = wanted.bfloat16().float()
        layer = name.removesuffix(".weight")
        found = dict(quantized_layers(again)).get(layer)
        got = found.dequantize() if found else again.get_parameter(name)
        assert torch.equal(got, wanted), name


def test_decoded_weights_can_be_rounded_to_another_format(tmp_path: Path) -> None:
    model = tiny("llama")
    write(model, tmp_path / "model.gguf", {"ffn": "Q5_1"})
    convert_checkpoint(tmp_path / "model.gguf", tmp_path / "out", to="int8")
    for name, layer in quantized_layers(anybit.load(tmp_path / "out")):
        wanted = anybit.quantize_tensor(model.get_parameter(f"{name}.weight"), "int8")
        assert torch.equal(layer.dequantize(), wanted.dequantize())


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_are_rounded_where_they_are_named(tmp_path: Path, tied: bool) -> None:
    model = tiny("qwen2", tie_word_embeddings=tied)
    write(model, tmp_path / "model.gguf", {"ffn|embd": "Q8_0"})
    words = "model.embed_tokens"
    for to, wanted in (("int4", "int8:group=32"), ({"*.embed_tokens": "int4"}, "int4")):
        convert_checkpoint(tmp_path / "model.gguf", tmp_path / wanted[:4], to)
        loaded = anybit.load(tmp_path / wanted[:4])
        layers = dict(quantized_modules(loaded))
        assert layers[words].scheme == wanted
        assert ("lm_head" in layers) == tied
        weight = anybit.quantize_tensor(model.get_parameter(f"{words}.weight"), wanted)
        assert torch.equal(layers[words].dequantize(), weight.dequantize())
    with pytest.raises(InvalidInput, match=r"embed_tokens: 'int4@int8' quantizes activations"):
        convert_checkpoint(tmp_path / "model.gguf", tmp_path / "o", {"*.embed_tokens": "int4@int8"})


def test_rounding_where_nothing_is_quantized_is_refused(tmp_path: Path) -> None:
    write(tiny("llama"), tmp_path / "dense.gguf", {"blk": "F16"})
    with pytest.raises(InvalidInput, match="no layer is quantized here"):
        convert_checkpoint(tmp_path / "dense.gguf", tmp_path / "out", "int4")
    assert not (tmp_path / "out").exists()


def test_an_unfinished_conversion_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tiny("llama"), tmp_path / "model.gguf", K_MIX, tokens=96)
    whole = convert_checkpoint(tmp_path / "model.gguf", tmp_path / "whole", shard_bytes=100_000)
    real, written = Conversion.write, list[str]()

    def some(self: Conversion, unit: str, shard: ShardWriter) -> None:
        if "layers.1.mlp" in unit and len(written) < 100:
            written.extend(["stop"] * 100)
            raise KeyboardInterrupt
        written.append(unit)
        real(self, unit, shard)

    monkeypatch.setattr(Conversion, "write", some)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(tmp_path / "model.gguf", tmp_path / "out", shard_bytes=100_000)
    before = written[: written.index("stop")]
    written[:] = ["stop"] * 100
    report = convert_checkpoint(tmp_path / "model.gguf", tmp_path / "out", shard_bytes=100_000)
    assert not {*before[:-3]} & {*written}
    assert report.formats == whole.formats
    shards = sorted((tmp_path / "whole").glob("*.safetensors"))
    assert len(shards) > 3
    for path in shards:
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


# Rotary embeddings.


@pytest.mark.parametrize(
    ("name", "rope", "metadata", "factors"),
    [
        (
            "llama",
            {"rope_type": "linear", "factor": 4.0},
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            (),
        ),
        (
            "qwen2",
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
            },
            (),
        ),
        (
            "llama",
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            {},
            ("rope_freqs.weight",),
        ),
        (
            "phi3",
            {"rope_type": "longrope", "original_max_position_embeddings": 128, **LONG},
            {"rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": 1.0690449},
            ("rope_factors_short.weight", "rope_factors_long.weight"),
        ),
    ],
)
def test_stretched_positions_are_those_of_transformers(
    name: str,
    rope: dict[str, Any],
    metadata: dict[str, Any],
    factors: tuple[str, ...],
    tmp_path: Path,
) -> None:
    more = {"original_max_position_embeddings": 128} if name == "phi3" else {}
    model = tiny(name, rope_parameters={"rope_theta": 10000.0, **rope}, **more)
    extra = {}
    if factors == ("rope_freqs.weight",):  # as the converter makes it of the frequencies
        plain = 10000.0 ** -(torch.arange(0, 64, 2).float() / 64)
        extra[factors[0]] = (plain / model.model.rotary_emb.inv_freq).numpy()
    elif factors:
        extra = {n: np.array(LONG[f"{n.split('_')[2][:-7]}_factor"], np.float32) for n in factors}
    write(model, tmp_path / "model.gguf", {"ffn": "Q8_0"}, metadata, extra)
    convert_checkpoint(tmp_path / "model.gguf", tmp_path / "out")
    again = anybit.load(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(120)[None] * 7 % 90
    with torch.no_grad():
        wanted, got = model(ids).logits, again(ids).logits
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


# Files that cannot be read.


def test_keys_that_change_a_model_are_not_passed_over(tmp_path: Path) -> None:
    write(tiny("llama"), tmp_path / "model.gguf", {}, {"attention.temperature_scale": 0.5})
    with pytest.raises(InvalidInput, match=r"llama\.attention\.temperature_scale is 0\.5, which"):
        convert_checkpoint(tmp_path / "model.gguf", tmp_path / "out")
    write(tiny("llama"), tmp_path / "model.gguf", {}, {"rope.scaling.type": "dynamic"})
    with pytest.raises(InvalidInput, match="rotary embeddings of type 'dynamic' cannot be read"):
        convert_checkpoint(tmp_path / "model.gguf", tmp_path / "out")


def test_tensors_that_a_model_does_not_have_are_refused(tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    write(tiny("llama"), tmp_path / "model.gguf", {}, extra=extra)
    with pytest.raises(InvalidInput, match=r"1 tensors are not in .*, such as blk\.0\.attn_sinks"):
        convert_checkpoint(tmp_path / "model.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_more_tokens_than_embeddings_are_refused(tmp_path: Path) -> None:
    """Fewer are usual: rows are padded."""
    for tokens in (80, 99):
        write(tiny("llama"), tmp_path / f"{tokens}.gguf", {}, tokens=tokens)
    convert_checkpoint(tmp_path / "80.gguf", tmp_path / "out")
    with pytest.raises(InvalidInput, match=r"has 99 tokens, and token_embd\.weight 96 rows"):
        convert_checkpoint(tmp_path / "99.gguf", tmp_path / "more")


def test_types_that_nobody_decodes_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(tiny("llama", num_hidden_layers=1), path, {"ffn_up": "Q8_0"})
    data = path.read_bytes()
    name, last = b"ffn_up.weight", 4 + 2 * 8  # dimensions follow the name, then the type
    at = data.index(name) + len(name) + last
    assert data[at : at + 4] == (8).to_bytes(4, "little")
    path.write_bytes(data[:at] + (24).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(InvalidInput, match=r"ffn_up\.weight is I8, which cannot be read"):
        convert_checkpoint(path, tmp_path / "out")


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "rwkv7")
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InvalidInput, match="architecture 'rwkv7' cannot be read, only llama, qwen"):
        convert_checkpoint(tmp_path / "model.gguf", tmp_path / "out")


def test_a_bidirectional_model_stays_one(tmp_path: Path) -> None:
    model = tiny("llama")
    for name, said in (("yes", {"attention.causal": True}), ("no", {"attention.causal": False})):
        write(model, tmp_path / f"{name}.gguf", {"ffn": "Q8_0"}, said)
        convert_checkpoint(tmp_path / f"{name}.gguf", tmp_path / name)
    found = {name: anybit.load(tmp_path / name, dtype=torch.float32) for name in ("yes", "no")}
    assert not hasattr(found["yes"].config, "is_causal")
    assert found["no"].config.is_causal is False
    with torch.no_grad():
        causal, whole = (found[name](IDS).logits for name in ("yes", "no"))
        found["yes"].config.is_causal = False
        torch.testing.assert_close(found["yes"](IDS).logits, whole)
    assert (causal - whole).norm() > 0.1 * whole.norm()


@pytest.mark.parametrize(
    ("kind", "share", "known"),
    [("yarn", 1.0, True), ("yarn", -1.0, True), ("yarn", 0.0, False),
     ("linear", 0.0, True), ("linear", 1.0, False)],
)  # fmt: skip
def test_yarns_share_of_frequencies(tmp_path: Path, kind: str, share: float, known: bool) -> None:
    keys = {"type": kind, "factor": 4.0, "original_context_length": 32, "yarn_ext_factor": share}
    stretched = {f"rope.scaling.{key}": value for key, value in keys.items()}
    write(tiny("llama"), tmp_path / "model.gguf", {"ffn": "Q8_0"}, stretched)
    with nullcontext() if known else pytest.raises(InvalidInput, match="yarn_ext_factor is"):
        convert_checkpoint(tmp_path / "model.gguf", tmp_path / "out")


@pytest.mark.parametrize("name", ["qwen3_5_moe_text", "lfm2_moe"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gate_and_up_of_experts_in_one_tensor(name: str, kind: str, tmp_path: Path) -> None:
    """As llama.cpp's converter writes them with --fuse-gate-up-exps: the rows of gate first."""
    model, arch = tiny(name), HYBRIDS[name][0]
    write(model, tmp_path / "apart.gguf", {"_exps": kind}, arch=arch)
    reader = gguf.GGUFReader(tmp_path / "apart.gguf")
    found = {tensor.name: tensor for tensor in reader.tensors}
    writer = gguf.GGUFWriter(tmp_path / "fused.gguf", arch)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub)
    for own, tensor in found.items():
        if "ffn_up_exps" in own:
            continue
        data = tensor.data
        if "ffn_gate_exps" in own:
            up = found[own.replace("gate", "up")].data
            own, data = own.replace("gate", "gate_up"), np.concatenate((data, up), 1)
        writer.add_tensor(own, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for file in ("apart", "fused"):
        convert_checkpoint(tmp_path / f"{file}.gguf", tmp_path / file)
    a, b = (load_file(tmp_path / file / "model.safetensors") for file in ("apart", "fused"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_files_of_caches_have_no_ending(tmp_path: Path) -> None:
    write(tiny("llama"), tmp_path / "model.gguf", {"ffn": "Q8_0"})
    blob = (tmp_path / "model.gguf").rename(tmp_path / "sha256-0123")
    assert convert_checkpoint(blob, tmp_path / "out").method == "gguf"


def test_an_older_layout_is_named(tmp_path: Path) -> None:
    model = tiny("qwen3_next")
    extra = {"blk.0.ssm_in.weight": np.zeros((4, 256), np.float32)}
    write(model, tmp_path / "model.gguf", {}, extra=extra, arch="qwen3next")
    data = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(data.replace(b"blk.0.attn_qkv", b"blk.0.attn_old"))
    with pytest.raises(InvalidInput, match="before 2026"):
        convert_checkpoint(tmp_path / "model.gguf", tmp_path / "out")


def test_commands_take_a_file_here_or_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is quantized already is not quantized again, and a dense one is."""
    monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "served"
    folder.mkdir()
    write(tiny("llama"), folder / "m-Q4_K_M.gguf", K_MIX, tokens=96)
    write(tiny("llama"), folder / "m-BF16.gguf", {"attn|ffn": "BF16"}, tokens=96)
    few, dense = folder / "m-Q4_K_M.gguf", folder / "m-BF16.gguf"
    with serving({"org/m": folder}) as hub:
        use(hub, tmp_path / "home", monkeypatch)
        for each in (few, "org/m:q4_k_m"):
            stdout, _ = run("generate", each, "ab", "--max-tokens", 2)
            assert stdout.startswith("ab")
            for command in (
                ["quantize", each, "--format", "int4", "-o", "x"],
                ["plan", each, "--bits", 4],
            ):
                _, stderr = run(*command, code=1)
                assert "m-Q4_K_M.gguf is quantized already (Q4_K, Q6_K); start from" in stderr
                assert not Path("x").exists()
        run("quantize", dense, "--format", "fp6", "--method", "rtn", "-o", "here")
        run("quantize", "org/m:BF16", "--format", "fp6", "--method", "rtn", "-o", "there")
        names = {path.name.rpartition("-")[0] for path in (tmp_path / "cache/converted").iterdir()}
        assert names == {"m-Q4_K_M.gguf", "m-BF16.gguf"}
    here, there = (anybit.load(path).state_dict() for path in ("here", "there"))
    assert all(torch.equal(here[name], there[name]) for name in here)
