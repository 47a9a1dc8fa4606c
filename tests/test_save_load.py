"""save and load: every format survives bit for bit, and bad input ends in a clear error."""

import errno
import json
import shutil
from copy import deepcopy as copy_of
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import anybit
from anybit.checkpoint import save_load as checkpoint
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.errors import InvalidInput
from anybit.files import safetensors as files
from anybit.nn.model import quantized_layers
from tests.specs import SPECS, columns_of_a_group
from tests.tiny import dense, llama, logits, same_output, same_state

DEEP = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4 + -(-len(SPECS) // 7)}


def every_format(model):
    """A plan that gives each registered format to some layer of the model."""
    linears = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    linears = [n for n in linears if n != "lm_head"]
    assert len(linears) >= len(SPECS)
    plan = dict.fromkeys(linears, "int8") | dict(zip(linears, SPECS, strict=False))
    wide = [name for name in linears if name.endswith("down_proj")]  # that hold groups of 256
    for name, spec in list(plan.items()):
        if columns_of_a_group(spec) == 256 and name not in wide:
            other = next(n for n in wide if columns_of_a_group(plan[n]) < 256)
            plan[name], plan[other] = plan[other], spec
    plan[linears[0]] += "@int8"
    return plan


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A small checkpoint in fp6; tests that damage it work on a copy."""
    path = tmp_path_factory.mktemp("saved") / "model"
    anybit.save(anybit.quantize_(llama(), "fp6"), path)
    return path


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


@pytest.mark.parametrize("tied", [False, True])
def test_every_format_round_trips_bit_for_bit(tmp_path, tied):
    model = llama(tied, **DEEP)
    model = anybit.quantize_(model, every_format(model))
    anybit.save(model, tmp_path / "a")
    loaded = anybit.load(tmp_path / "a")
    same_state(model, loaded)
    same_output(logits(loaded), logits(model))
    wanted = {name: layer.scheme for name, layer in quantized_layers(model)}
    assert {name: layer.scheme for name, layer in quantized_layers(loaded)} == wanted
    anybit.save(loaded, tmp_path / "b")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


def test_the_files_hold_the_canonical_tensors(saved):
    model = anybit.quantize_(llama(), "fp6")
    tensors = load_file(saved / "model.safetensors")
    layer = "model.layers.1.mlp.up_proj"
    packed = model.get_submodule(layer).packed
    for name, tensor in packed.tensors().items():
        assert torch.equal(tensors[f"{layer}.{name}"], tensor), name
    assert f"{layer}.weight" not in tensors
    config = json.loads((saved / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "anybit",
        "version": 1,
        "formats": {"*": "fp6"},
    }
    assert config["dtype"] == "bfloat16"


def test_stored_dtypes_of_scales_win(tmp_path):
    model = llama()
    for name, parameter in model.named_parameters():
        if name.endswith("q_proj.weight"):
            parameter.data *= 2.0**-20  # below fp16's normal numbers, so the scales are bf16
    anybit.save(anybit.quantize_(model, "int4"), tmp_path / "out")
    for dtype in ("auto", torch.float16, torch.float32):
        loaded = anybit.load(tmp_path / "out", dtype=dtype)
        for (name, a), (_, b) in zip(
            quantized_layers(model), quantized_layers(loaded), strict=True
        ):
            same_state(a, b)
            assert b.scale.dtype == (torch.bfloat16 if "q_proj" in name else torch.float16)
        assert loaded.dtype == (model.dtype if dtype == "auto" else dtype)
        assert loaded.to(torch.float64).model.layers[0].self_attn.q_proj.scale.dtype == (
            torch.bfloat16
        )


def test_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 40_000)
    model = anybit.quantize_(llama(), "liquid")
    anybit.save(model, tmp_path / "out")
    shards = sorted(tmp_path.glob("out/model-*.safetensors"))
    assert len(shards) > 2
    same_state(model, anybit.load(tmp_path / "out"))
    shards[1].unlink()
    with pytest.raises(FileNotFoundError, match=rf"1 of {len(shards)} shards.*{shards[1].name}"):
        anybit.load(tmp_path / "out")


def test_the_last_pattern_still_wins_after_loading(tmp_path):
    # In alphabetical order, as transformers writes keys, "*.down_proj" would lose.
    plan = {"model.*": "int8", "*.down_proj": "int2"}
    model = anybit.quantize_(llama(), plan)
    anybit.save(model, tmp_path / "out")
    loaded = anybit.load(tmp_path / "out")
    same_state(model, loaded)
    assert loaded.model.layers[0].mlp.down_proj.scheme == "int2"
    assert loaded.anybit_formats == plan


def test_a_layer_replaced_by_hand_is_saved_as_it_is(tmp_path):
    model = anybit.quantize_(llama(), "int8")
    other = anybit.quantize_(llama(), "int2")
    model.model.layers[1].mlp.up_proj = other.model.layers[1].mlp.up_proj
    anybit.save(model, tmp_path / "out")
    same_state(model, anybit.load(tmp_path / "out"))


def test_a_dequantized_model_is_saved_as_a_dense_one(tmp_path):
    model = anybit.dequantize_(anybit.quantize_(llama(), "int8"))
    model.save_pretrained(tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


def test_a_dequantized_model_has_no_marks_of_a_quantized_one(saved):
    model = anybit.dequantize_(anybit.load(saved))
    assert model.double().dtype == torch.float64  # which transformers refuses for some marks
    assert not {"hf_quantizer", "is_quantized", "quantization_method"} & set(vars(model))


def test_parameters_of_quantized_models_are_counted(saved):
    model = llama()
    counts = [model.num_parameters(exclude_embeddings=e) for e in (False, True)]
    for quantized in (anybit.quantize_(model, "fp6"), copy_of(model), anybit.load(saved)):
        found = [quantized.num_parameters(exclude_embeddings=e) for e in (False, True)]
        assert found == counts
        trainable = sum(p.numel() for p in quantized.parameters() if p.requires_grad)
        assert quantized.num_parameters(only_trainable=True) == trainable
    assert anybit.dequantize_(model).num_parameters() == counts[0]


def test_tokenizer_files_come_along(tmp_path):
    source = dense(tmp_path / "dense")
    (source / "tokenizer.json").write_text("{}")
    config = anybit.AnybitConfig("int4")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config)
    anybit.save(model, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


# What is there already.


def test_an_existing_directory_is_kept(copy):
    model = anybit.quantize_(llama(), "int2")
    before = {p.name: p.read_bytes() for p in copy.iterdir()}
    with pytest.raises(FileExistsError, match="overwrite=True"):
        anybit.save(model, copy)
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == before
    (copy / "stray.txt").write_text("of the old one")
    anybit.save(model, copy, overwrite=True)
    same_state(model, anybit.load(copy))
    assert not (copy / "stray.txt").exists()
    assert [p.name for p in copy.parent.iterdir()] == [copy.name]


def test_a_directory_that_is_no_checkpoint_is_never_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="no checkpoint"):
        anybit.save(anybit.quantize_(llama(), "int2"), tmp_path, overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "not enough disk space"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "not enough disk"),
        (KeyboardInterrupt(), None),
    ],
    ids=["full", "full, said by safetensors", "Ctrl-C"],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_interrupted_save_leaves_nothing(copy, monkeypatch, error, expected, overwrite):
    out = copy if overwrite else copy.with_name("new")
    before = {p: p.read_bytes() for p in copy.rglob("*")}

    def fail(self, directory, **options):
        (directory / "model.safetensors").write_bytes(b"half of it")
        raise error

    model = anybit.quantize_(llama(), "int2")
    monkeypatch.setattr(type(model), "save_pretrained", fail)
    with pytest.raises(OSError if expected else KeyboardInterrupt, match=expected) as caught:
        anybit.save(model, out, overwrite=overwrite)
    if expected:
        assert caught.value.errno == errno.ENOSPC
    assert {p: p.read_bytes() for p in copy.rglob("*")} == before
    assert [p.name for p in copy.parent.iterdir()] == [copy.name]


def test_too_small_a_disk_is_noticed_before(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"0\.08\d+ MB are needed, 0\.001 MB are free"):
        anybit.save(anybit.quantize_(llama(), "int2"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


# Bad checkpoints.


def edit_config(path, **changes):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def test_newer_version(copy):
    edit_config(
        copy, quantization_config={"quant_method": "anybit", "version": 2, "layout": "tiles"}
    )
    for load in (anybit.load, anybit.LLM):
        with pytest.raises(ValueError, match=r"layout version 2.*to 1; upgrade anybit") as raised:
            load(copy)
        assert str(copy) in str(raised.value)


@pytest.mark.parametrize("keep", [0, 4, 8, 300, -1])
def test_cut_file(copy, keep):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors: (cut or )?damaged"):
        anybit.load(copy)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'{"', b'{{"'),
        (b"[64,", b"[65,"),
        (b'"I32"', b'"U8" '),
        (b'"shape":[', b'"shape":{'),
        (b'"data_offsets":[0,', b'"data_offsets":[9,'),
    ],
)
def test_damaged_header(copy, old, new):
    path = copy / "model.safetensors"
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    with pytest.raises(ValueError, match=r"model\.safetensors: (cut or )?damaged"):
        anybit.load(copy)


def test_trailing_bytes(copy):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ValueError, match="cut or damaged: its header describes"):
        anybit.load(copy)


@pytest.mark.parametrize(
    ("spec", "key"),
    [("fp6", "scale"), ("int4:group=32,zero", "scale"), ("mxfp4", "scale"), ("nvfp4", "scale"),
     ("codebook", "codebook")],
)  # fmt: skip
@pytest.mark.parametrize("load", [anybit.load, anybit.LLM, AutoModelForCausalLM.from_pretrained])
def test_numbers_that_are_none(tmp_path, spec, key, load):
    """Of a damaged file, or of weights that held NaN: they would make every answer NaN."""
    anybit.save(anybit.quantize_(llama(), spec), tmp_path)
    path, name = tmp_path / "model.safetensors", f"model.layers.1.mlp.up_proj.{key}"
    tensors = load_file(path)
    broken = torch.full_like(tensors[name].float().flatten()[:2], torch.nan)
    tensors[name].view(-1)[1:3] = broken.to(tensors[name].dtype)
    save_file(tensors, path, {"format": "pt"})
    message = rf"up_proj\.{key}: 2 values are NaN or inf, the first at .* make it anew$"
    with pytest.raises(ValueError, match=message) as raised:
        load(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path}: model.layers.1")


def test_shapes_that_disagree_with_the_config(copy):
    edit_config(copy, intermediate_size=192)
    with pytest.raises(ValueError, match=r"gate_proj\.codes4: expected shape \(192, 8\).*\(128, 8"):
        anybit.load(copy)


def test_formats_that_disagree_with_the_tensors(copy):
    formats = {"quant_method": "anybit", "version": 1, "formats": {"*": "int3"}}
    edit_config(copy, quantization_config=formats)
    with pytest.raises(ValueError, match=r"q_proj: tensor 'codes1' of format 'int3' is missing"):
        anybit.load(copy)
    formats["formats"] = {"*": "fp6", "*.q_proj": None}
    edit_config(copy, quantization_config=formats)
    with pytest.raises(
        ValueError, match=r"q_proj: config\.json says not quantized, but.* holds co"
    ):
        anybit.load(copy)
    formats["formats"] = {"*": "fp6", "lm_head": "fp6"}
    edit_config(copy, quantization_config=formats)
    with pytest.raises(ValueError, match=r"lm_head: config\.json says fp6, but.* holds no codes"):
        anybit.load(copy)
    formats["formats"] = {"*": "fp99"}
    edit_config(copy, quantization_config=formats)
    with pytest.raises(ValueError, match=r"unknown format 'fp99'.*known: "):
        anybit.load(copy)


def test_what_is_no_checkpoint_of_anybit(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent does not exist; give the directory"):
        anybit.load(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json; give the directory"):
        anybit.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="neither"):
        anybit.load(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"only pytorch_model\.bin; convert it"):
        anybit.load(tmp_path)
    with pytest.raises(ValueError, match="not quantized"):
        anybit.load(dense(tmp_path / "dense"))


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match="no quantized layers"):
        anybit.save(llama(), tmp_path / "out")
    with pytest.raises(TypeError, match="Linear is not a transformers model"):
        anybit.save(torch.nn.Linear(2, 2), tmp_path / "out")
    assert not list(tmp_path.iterdir())


# The writer of shards.


def test_shards_are_read_by_safetensors(tmp_path):
    tensors = {
        "odd": torch.arange(7, dtype=torch.uint8),
        "half": torch.randn(3, dtype=torch.float16),
        "wide": torch.randn(5, 3, dtype=torch.float64),
        "brain": torch.randn(9, 9).bfloat16(),
        "transposed": torch.randn(4, 6).T,
        "small": torch.randn(3).to(torch.float8_e4m3fn),
        "single": torch.tensor(7, dtype=torch.int32),
        "empty": torch.empty(0, 4, dtype=torch.int16),
        "yes": torch.tensor([True, False, True]),
        'a "name" of ünusual characters': torch.zeros(2, dtype=torch.int64),
    }
    with files.ShardWriter(tmp_path / "one.safetensors", tensors) as shard:
        for name, tensor in tensors.items():
            shard.add(name, tensor)
        assert not (tmp_path / "one.safetensors").exists()
    stored = files.read_header(tmp_path / "one.safetensors")
    with files.ShardWriter(tmp_path / "two.safetensors", stored) as shard:
        for name, tensor in stored.items():
            shard.copy(name, tensor)
    for path in (tmp_path / "one.safetensors", tmp_path / "two.safetensors"):
        read = load_file(path)
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert read[name].dtype == tensor.dtype
            assert torch.equal(read[name].float(), tensor.float()), name
            found = files.read_header(path)[name]
            assert found.start % tensor.itemsize == 0, f"{name} is not aligned"
            assert torch.equal(found.read().float(), tensor.float())


def test_an_interrupted_shard_leaves_nothing(tmp_path):
    with (  # noqa: PT012
        pytest.raises(KeyboardInterrupt),
        files.ShardWriter(tmp_path / "one.safetensors", ["a"]) as shard,
    ):
        shard.add("a", torch.zeros(1000))
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_the_model_card(tmp_path):
    """Before what the dense model's says; the bits are those of the files."""
    model = anybit.quantize_(llama(), {"*": "int4:group=32", "*.q_proj": "fp6"})
    model.name_or_path = "somebody/tiny"
    anybit.save(model, tmp_path / "tiny-int4")
    card = (tmp_path / "tiny-int4" / "README.md").read_text("utf-8")
    layers = [layer for _, layer in quantized_layers(model)]
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    nbytes = sum(t.nbytes for layer in layers for t in layer.packed.tensors().values())
    assert "base_model: somebody/tiny\n" in card
    assert f"{8 * nbytes / weights:.2f} bits each" in card
    assert "| `*` | `int4:group=32` |\n| `*.q_proj` | `fp6` |" in card

    llama().save_pretrained(tmp_path / "dense")
    quantize_checkpoint(tmp_path / "dense", tmp_path / "streamed", "fp6")
    card = (tmp_path / "streamed" / "README.md").read_text("utf-8")
    assert "# dense, quantized\n" in card
    assert "base_model" not in card
    assert str(tmp_path) not in card
    (tmp_path / "dense" / "README.md").write_text("mine")
    quantize_checkpoint(tmp_path / "dense", tmp_path / "again", "fp6")
    assert (tmp_path / "again" / "README.md").read_text() == card + "\nmine"


def test_dequantize_as_transformers_calls_it(tmp_path, saved):
    """After quantize_, after loading, and after both."""
    model = anybit.quantize_(llama(), "fp6")
    other = copy_of(model).dequantize(torch.float64)
    assert other.dtype == torch.float64
    assert not list(quantized_layers(other))
    want = logits(model)
    for again in (model, anybit.load(saved)):
        same_output(logits(again.dequantize()), want)
        assert not list(quantized_layers(again))
        assert not hasattr(again.config, "quantization_config")
        with pytest.raises(ValueError, match="first quantize"):
            again.dequantize()
    loaded = anybit.quantize_(anybit.load(saved), {"*": None, "lm_head": "int8"})
    assert not list(quantized_layers(loaded.dequantize()))


def test_a_large_tensor_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE", 64)
    x = torch.randn(37, 11)
    save_file({"x": x}, tmp_path / "model.safetensors")
    stored = files.stored_tensors(tmp_path)["x"]
    assert torch.equal(stored.read(), x)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(stored.start + 1000)
    with pytest.raises(InvalidInput, match="ends 628 bytes early"):
        stored.read()
