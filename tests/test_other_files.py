"""What lies beside a model's weights: kept, left out, or told of in the card."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import anybit
from anybit.checkpoint.card import old_card
from anybit.checkpoint.foreign.convert import convert_checkpoint
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.errors import InvalidInput
from anybit.files.directory import held
from tests.tiny import dense, llama, same_state

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
    {
        "idx": 3,
        "name": "3",
        "path": "3_Normalize",
        "type": "sentence_transformers.models.Normalize",
    },
]
KEPT = (
    "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json",
    "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "dict.txt",
    "normalizer.json", "params.json", "tokenizer.json", "modeling_own.py", "LICENSE",
    "additional_chat_templates/tool.jinja", "assets/picture.png",
)  # fmt: skip
LEFT = (
    "optimizer.pt", "scheduler.pt", "training_args.bin", "trainer_state.json", "rng_state_0.pth",
    "pytorch_model.bin", "pytorch_model.bin.index.json", "model.gguf", "consolidated.00.pth",
    "data.csv", "train.jsonl", "id.pem", "my-secrets.json", "quant_config.json",
)  # fmt: skip
FOLDERS = ("wandb/run.json", "runs/events.out.1", "original/params.json", "original/a.pth",
           "checkpoint-5/config.json", "onnx/model.onnx", "onnx/config.json")  # fmt: skip
HIDDEN = (".env", ".gitattributes", ".cache/x.json", "__pycache__/a.pyc")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = dense(tmp_path / "model")
    for name in (*KEPT, *LEFT, *FOLDERS, *HIDDEN):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(json.dumps(MODULES if name == "modules.json" else {"a": name}))
    (path / "quant_config.json").write_text("{}")
    return path


@pytest.mark.parametrize("way", ["quantize", "save"])
def test_all_that_a_model_is_comes_along_and_nothing_else(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    (source / "large.dat").touch()
    with open(source / "large.dat", "r+b") as file:
        file.truncate((1 << 26) + 1)
    out = tmp_path / "out"
    if way == "quantize":
        quantize_checkpoint(source, out, "int4")
    else:
        model = type(llama()).from_pretrained(source)
        anybit.save(anybit.quantize_(model, "int4"), out)
    for name in KEPT:
        assert (out / name).read_bytes() == (source / name).read_bytes(), name
    found = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    own = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    assert found == {*KEPT, *own}
    (said,) = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    for name in (*LEFT, "wandb/", "runs/", "original/", "checkpoint-5/", "onnx/", "large.dat"):
        assert name in said, name
    assert ".env" not in said


def test_a_wrong_list_of_parts_is_refused(source: Path, tmp_path: Path) -> None:
    for number, text in enumerate(('[{"path": "../other"}]', '{"a": 1}', '["a"]')):
        (source / "modules.json").write_text(text)
        with pytest.raises(InvalidInput, match=r"modules\.json: "):
            quantize_checkpoint(source, tmp_path / str(number), "int4")


OLD = """---
license: mit
base_model: someone/base
tags: [code]
---
# My model

It writes.
"""


def test_the_card_of_the_dense_model_says_that_it_is_quantized(tmp_path: Path) -> None:
    source = dense(tmp_path / "model")
    (source / "README.md").write_text(OLD)
    quantize_checkpoint(source, tmp_path / "out", {"*": "int4", "*.k_proj": "fp6"})
    text = (tmp_path / "out/README.md").read_text()
    _, front, body = text.split("---\n", 2)
    data = yaml.safe_load(front)
    assert data["license"] == "mit"
    assert data["tags"] == ["code", "anybit"]
    assert data["base_model"] == "someone/base"  # the directory has no name on the hub
    assert body.index("`*.k_proj` | `fp6`") < body.index("# My model")
    assert "by RTN" in body
    # Saved again, it is said once.
    anybit.save(anybit.load(tmp_path / "out"), tmp_path / "again")
    again = (tmp_path / "again/README.md").read_text()
    assert again.count("quantized with anybit") == 1
    assert again.endswith("It writes.\n")
    assert yaml.safe_load(again.split("---\n", 2)[1])["tags"] == ["code", "anybit"]


@pytest.mark.parametrize(
    "front", ["---\na: [\n---\n", "---\n- a\n---\n", "", "--- \r\na: 1\r\n---\r\n"]
)
def test_any_card_is_kept(tmp_path: Path, front: str) -> None:
    source = dense(tmp_path / "models--org--name" / "snapshots" / "1a2b")
    (source / "README.md").write_bytes((front + "# My model\n").encode())
    quantize_checkpoint(source, tmp_path / "out", "int4")
    text = (tmp_path / "out/README.md").read_text()
    assert yaml.safe_load(text.split("---\n", 2)[1])["base_model"] == "org/name"
    assert text.endswith("# My model\n")


def test_nothing_of_a_card_is_lost_or_changed(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("---\nlanguage: [no, en]\ninference: false\n---\n# A\n<!-- anybit -->\nmine\n")
    data, text, said = old_card(path)
    assert data == {"language": ["no", "en"], "inference": False}  # Norwegian
    assert (text, said) == ("# A\n<!-- anybit -->\nmine\n", "")  # its end was edited away


def test_nan_in_a_tensor_that_is_kept_is_found(tmp_path: Path) -> None:
    source = dense(tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"][3, 4] = float("nan")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidInput, match=r"embed_tokens\.weight: 1 values are NaN"):
        quantize_checkpoint(source, tmp_path / "out", "int4")


def test_an_entry_that_was_left_beside_dense_weights_does_not_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = dense(tmp_path / "model")
    raw = json.loads((source / "config.json").read_text())
    left = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (source / "config.json").write_text(json.dumps(raw | {"quantization_config": left}))
    quantize_checkpoint(source, tmp_path / "out", "int4")
    assert "its weights are dense" in caplog.text
    same_state(anybit.load(tmp_path / "out"), anybit.quantize_(llama(), "int4"))
    entry = {"quant_method": "gptq", "bits": 4}
    (source / "config.json").write_text(json.dumps(raw | {"quantization_config": entry}))
    with pytest.raises(InvalidInput, match=r"remove quantization_config from config\.json"):
        anybit.load(source)


def test_code_of_a_checkpoint_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = dense(tmp_path / "model")
    raw = json.loads((source / "config.json").read_text())
    own = {"architectures": ["MyForCausalLM"], "model_type": "mine"}
    own["auto_map"] = {"AutoConfig": "own.MyConfig", "AutoModelForCausalLM": "own.MyForCausalLM"}
    (source / "config.json").write_text(json.dumps(raw | own))
    (source / "own.py").write_text("raise SystemExit('run')")
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("asked"))
    for run in (lambda: quantize_checkpoint(source, tmp_path / "out", "int4"),
                lambda: anybit.LLM(source)):  # fmt: skip
        with pytest.raises(InvalidInput, match=r"which anybit does not run; if you trust them"):
            run()


@pytest.mark.parametrize("place", ["file/work", "/proc/anybit/work"])
def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(OSError, match=r"work cannot be made .*; choose another"),
        held(tmp_path / place),
    ):
        pass


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture = Path(__file__).parent / "foreign" / "fixtures" / "gptq_4bit_v1"
    (tmp_path / "file").touch()
    monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(anybit.errors.Unsupported, match=r"set ANYBIT_CACHE .* anybit convert"):
        anybit.load(fixture)


@pytest.mark.parametrize(
    ("fixture", "name"),
    [("gptq_4bit_v1", "quantize_config.json"), ("awq_gemm", "quant_config.json")],
)
def test_how_a_model_is_quantized_may_stand_beside_config_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixture: str, name: str
) -> None:
    monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path / "cache"))
    place = Path(__file__).parent / "foreign" / "fixtures" / fixture
    copy = shutil.copytree(place, tmp_path / "model")
    raw = json.loads((copy / "config.json").read_text())
    said = raw.pop("quantization_config")
    said.pop("quant_method")
    if name == "quant_config.json":
        said["w_bit"], said["q_group_size"] = said.pop("bits"), said.pop("group_size")
    (copy / "config.json").write_text(json.dumps(raw))
    (copy / name).write_text(json.dumps(said))
    same_state(anybit.load(copy), anybit.load(place))
    [folder] = (tmp_path / "cache/converted").glob("model-*")
    assert not (folder / name).exists()
    with pytest.raises(InvalidInput, match=r"is quantized already, with (gptq|awq)"):
        quantize_checkpoint(copy, tmp_path / "out", "int4")


def test_a_head_that_shares_more_is_told_of(tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    small = T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    torch.manual_seed(0)
    T5ForConditionalGeneration(small).save_pretrained(tmp_path / "t5")
    with pytest.raises(InvalidInput, match=r"lm_head shares its weight .* keep it") as caught:
        quantize_checkpoint(tmp_path / "t5", tmp_path / "out", {"*": "int4", "lm_head": "int8"})
    assert "before" not in str(caught.value)


@pytest.mark.parametrize("storage", ["bfloat16", "float32"])
def test_codes_of_bitsandbytes_may_be_called_numbers(tmp_path: Path, storage: str) -> None:
    """As training with FSDP stores them: the same bytes."""
    place = Path(__file__).parent / "foreign" / "fixtures" / "bnb_nf4"
    copy = shutil.copytree(place, tmp_path / "model")
    tensors = load_file(copy / "model.safetensors")
    for name in [n.removesuffix(".absmax") for n in tensors if n.endswith(".weight.absmax")]:
        tensors[name] = tensors[name].view(-1).view(getattr(torch, storage)).view(-1, 1)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    raw = json.loads((copy / "config.json").read_text())
    raw["quantization_config"]["bnb_4bit_quant_storage"] = storage
    (copy / "config.json").write_text(json.dumps(raw))
    convert_checkpoint(place, tmp_path / "want")
    convert_checkpoint(copy, tmp_path / "got")
    same_state(anybit.load(tmp_path / "got"), anybit.load(tmp_path / "want"))
