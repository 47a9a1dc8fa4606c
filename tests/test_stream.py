"""Streaming: the same bytes as quantize_, in little memory, and across kills."""

import errno
import json
import logging
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import anybit
from anybit.checkpoint import rewrite, stream
from anybit.checkpoint.save_load import load_dense
from anybit.checkpoint.stream import Quantization, quantize_checkpoint
from anybit.checkpoint.trial import try_out
from anybit.errors import InvalidInput
from anybit.files.directory import held, write_json
from anybit.files.safetensors import ShardWriter
from tests import forks
from tests.tiny import dense, llama, same_state

SHARD = 60_000  # several shards for a tiny model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = dense(tmp_path_factory.mktemp("dense") / "model", "100KB")
    (path / "tokenizer.json").write_text('{"a": 1}')
    (path / "LICENSE").write_text("to be kept")
    (path / "pytorch_model.bin").write_text("old weights")
    (path / "notes.csv").write_text("somebody's")
    (path / ".cache").mkdir()
    return path


@pytest.fixture
def copy(source, tmp_path):
    return shutil.copytree(source, tmp_path / "source")


def contents(path):
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def tensors_of(path):
    return {k: v for f in sorted(path.glob("*.safetensors")) for k, v in load_file(f).items()}


def test_same_tensors_as_quantize_(source, tmp_path):
    plan = {"*": "fp6", "model.layers.0.*": "codebook:m=1,v=4", "*.down_proj": "int5:zero"}
    report = quantize_checkpoint(source, tmp_path / "out", plan, shard_bytes=SHARD)
    model = anybit.quantize_(llama(), plan)
    same_state(model, anybit.load(tmp_path / "out"))
    stored = tensors_of(tmp_path / "out")
    assert report.bytes_after == sum(t.nbytes for t in stored.values())
    assert report.bytes_before == sum(t.nbytes for t in tensors_of(source).values())
    assert report.weights == sum(p.numel() for n, p in llama().named_parameters() if "proj" in n)
    assert set(report.kept) == stored.keys() & tensors_of(source).keys()
    assert (report.unexpected, report.resumed) == ((), 0)
    assert report.shards == len(list((tmp_path / "out").glob("*.safetensors"))) > 2


def test_other_files_come_along_and_config_is_kept(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "out", "int4")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "LICENSE",
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (tmp_path / "out/tokenizer.json").read_text() == '{"a": 1}'
    old, new = (json.loads((p / "config.json").read_text()) for p in (source, tmp_path / "out"))
    formats = {"quant_method": "anybit", "version": 1, "formats": {"*": "int4"}}
    assert new == old | {"quantization_config": formats}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


# Memory.


def test_memory_does_not_grow_with_the_model(tmp_path):
    """A checkpoint of 55 MB whose largest tensor has 1.6 MB, quantized within 20 MB."""
    source, config = tmp_path / "dense", llama().config
    source.mkdir()
    config.update({"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8})
    config.update({"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(source)
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in type(llama())(config).named_parameters()}
    noise = torch.randn(1 << 20).bfloat16()
    with ShardWriter(source / "model.safetensors", shapes) as shard:
        for name, shape in shapes.items():
            shard.add(name, noise[: shape.numel()].reshape(shape))
    size = (source / "model.safetensors").stat().st_size
    code = f"""if True:
    import resource, torch, transformers, anybit.checkpoint.stream
    from transformers import LlamaForCausalLM
    anybit.checkpoint.stream.quantize_checkpoint({str(source)!r}, {str(tmp_path / "warm")!r},
        {{"*": None, "model.layers.0.*": "fp6"}})
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    before = peak()
    anybit.checkpoint.stream.quantize_checkpoint({str(source)!r}, {str(tmp_path / "out")!r}, "int8")
    print(peak() - before)
    """
    run = forks.run(code)
    assert size > 50e6  # more than what allocators and threads may take beside it
    assert int(run.stdout) < size / 2, f"{int(run.stdout) / 1e6} MB more"


# Kills and interrupts.


def interrupt_at(monkeypatch, count, error):
    """Raise `error` when the weight number `count` is about to be quantized."""
    seen = []

    def check(weight, name):
        seen.append(name)
        if len(seen) == count:
            raise error

    monkeypatch.setattr(stream, "check_finite", check)
    return seen


def test_resumed_after_kill_9_byte_for_byte(source, tmp_path, monkeypatch):
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    code = f"""if True:
    import os, signal, anybit.checkpoint.stream as stream
    seen = []
    def check(weight, name):
        seen.append(name)
        if len(seen) == 8:
            os.kill(os.getpid(), signal.SIGKILL)
    stream.check_finite = check
    stream.quantize_checkpoint({str(source)!r}, {str(out)!r}, "fp6", shard_bytes={SHARD})
    """
    assert forks.run(code).returncode == -9
    assert not out.exists()
    done = {p.name: p.stat().st_mtime_ns for p in partial.glob("*.safetensors")}
    assert done
    assert len(list(partial.glob("*.safetensors.tmp"))) == 1
    seen = interrupt_at(monkeypatch, -1, None)
    report = quantize_checkpoint(source, out, "fp6", shard_bytes=SHARD)
    assert report.resumed == len(done) < report.shards
    assert 0 < len(seen) < 21
    assert {name: (out / name).stat().st_mtime_ns for name in done} == done
    quantize_checkpoint(source, tmp_path / "whole", "fp6", shard_bytes=SHARD)
    assert contents(out) == contents(tmp_path / "whole")
    assert not partial.exists()


@pytest.mark.parametrize("count", [1, 4, 14])
def test_ctrl_c(source, tmp_path, monkeypatch, count):
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    interrupt_at(monkeypatch, count, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, out, "int4", shard_bytes=SHARD)
    assert not out.exists()
    assert partial.exists() == (count > 1)  # nothing was finished at the first weight
    assert not list(tmp_path.rglob("*.tmp"))
    monkeypatch.undo()
    report = quantize_checkpoint(source, out, "int4", shard_bytes=SHARD)
    assert (report.resumed > 0) == (count > 1)
    same_state(anybit.quantize_(llama(), "int4"), anybit.load(out))


@pytest.mark.parametrize("where", ["write", "json", "fsync"])
def test_full_disk(source, tmp_path, monkeypatch, where):
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    full = OSError(errno.ENOSPC, "No space left on device")
    calls = []

    def fail(*args):
        calls.append(args)
        if len(calls) > 2:
            raise full
        return real(*args)

    place, name = {
        "write": (ShardWriter, "_finish"),
        "json": (rewrite, "copy_others"),
        "fsync": (os, "fsync"),
    }[where]
    real = getattr(place, name)
    calls.extend([()] * 2 if where == "json" else [])
    monkeypatch.setattr(place, name, fail)
    with pytest.raises(
        OSError, match=r"not enough disk space.*are needed.*finished shards are kept"
    ):
        quantize_checkpoint(source, out, "int4", shard_bytes=SHARD)
    monkeypatch.undo()
    assert not out.exists()
    assert not list(tmp_path.rglob("*.tmp"))
    assert list(partial.glob("*.safetensors"))
    assert quantize_checkpoint(source, out, "int4", shard_bytes=SHARD).resumed
    same_state(anybit.quantize_(llama(), "int4"), anybit.load(out))


def test_too_small_a_disk_is_noticed_before(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=50_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    seen = interrupt_at(monkeypatch, -1, None)
    with pytest.raises(OSError, match=r"0\.1\d+ MB are needed, 0\.05 MB are free"):
        quantize_checkpoint(source, tmp_path / "out", "int4")
    assert not seen
    assert not list(tmp_path.iterdir())


def test_resume_is_refused_when_something_changed(copy, tmp_path, monkeypatch):
    out = tmp_path / "out"
    interrupt_at(monkeypatch, 8, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(copy, out, "int4", shard_bytes=SHARD)
    monkeypatch.undo()
    kept = contents(tmp_path / "out.partial")
    with pytest.raises(ValueError, match=r"formats was \[\['\*', 'int4'\]\], now.*'int8'"):
        quantize_checkpoint(copy, out, "int8", shard_bytes=SHARD)
    with pytest.raises(ValueError, match="shard_bytes was 60000, now 50000"):
        quantize_checkpoint(copy, out, "int4", shard_bytes=50_000)
    with pytest.raises(ValueError, match=r"quantizer was RTN\(\), now Clip\(\)"):
        quantize_checkpoint(copy, out, "int4", anybit.Clip(), shard_bytes=SHARD)
    monkeypatch.setattr(rewrite, "__version__", "9.9")
    with pytest.raises(ValueError, match=r"anybit was \d.*, now 9\.9"):
        quantize_checkpoint(copy, out, "int4", shard_bytes=SHARD)
    monkeypatch.undo()
    os.utime(copy / "config.json", (1, 1))
    with pytest.raises(ValueError, match=r"differently \(source: config\.json changed\)"):
        quantize_checkpoint(copy, out, "int4", shard_bytes=SHARD)
    assert contents(tmp_path / "out.partial") == kept
    (tmp_path / "out.partial" / "link").symlink_to(copy, target_is_directory=True)
    report = quantize_checkpoint(copy, out, "int8", shard_bytes=SHARD, overwrite=True)
    assert report.resumed == 0
    assert not (out / "link").is_symlink()
    same_state(anybit.quantize_(llama(), "int8"), anybit.load(out))


# Bad input.


def test_two_runs_do_not_write_into_one_directory(source, tmp_path, monkeypatch):
    """The second one is told at once, and the first one ends as if it were alone."""
    out, told = tmp_path / "out", []
    write = Quantization.write

    def beside(self, *args):
        if not told:
            told.append("")
            for overwrite in (False, True):
                with pytest.raises(
                    InvalidInput, match=r"another run is writing into .*out\.partial"
                ):
                    quantize_checkpoint(source, out, "int8", overwrite=overwrite)
        write(self, *args)

    monkeypatch.setattr(Quantization, "write", beside)
    quantize_checkpoint(source, out, "int4:group=32")
    assert told
    monkeypatch.undo()
    quantize_checkpoint(source, tmp_path / "alone", "int4:group=32")
    assert contents(out) == contents(tmp_path / "alone")
    assert not (tmp_path / "out.partial").exists()


def test_an_output_that_another_run_has_finished_meanwhile_is_kept(source, tmp_path, monkeypatch):
    def first(directory):
        monkeypatch.undo()
        quantize_checkpoint(source, tmp_path / "out", "int4:group=32")
        return held(directory)

    monkeypatch.setattr("anybit.checkpoint.rewrite.held", first)
    with pytest.raises(FileExistsError, match="out exists"):
        quantize_checkpoint(source, tmp_path / "out", "int8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_existing_output(source, tmp_path):
    out = tmp_path / "out"
    quantize_checkpoint(source, out, "int4")
    before = contents(out)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        quantize_checkpoint(source, out, "int8")
    assert contents(out) == before
    quantize_checkpoint(source, out, "int8", overwrite=True)
    assert json.loads((out / "config.json").read_text())["quantization_config"]["formats"] == {
        "*": "int8"
    }
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").touch()
    with pytest.raises(FileExistsError, match="no checkpoint"):
        quantize_checkpoint(source, tmp_path / "notes", "int4", overwrite=True)
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "a.txt").touch()
    with pytest.raises(FileExistsError, match="in use"):
        quantize_checkpoint(source, tmp_path / "new", "int4", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new.partial", "notes", "out"]


def test_a_source_is_never_replaced(copy):
    with pytest.raises(ValueError, match="would replace its own source"):
        quantize_checkpoint(copy, copy, "int4", overwrite=True)
    quantize_checkpoint(copy, copy.with_name("out"), "int4")
    with pytest.raises(ValueError, match="is quantized already, with anybit"):
        quantize_checkpoint(copy.with_name("out"), copy.with_name("again"), "int4")


def damage(path, how):
    first = sorted(path.glob("model-*.safetensors"))[0]
    if how == "cut":
        first.write_bytes(first.read_bytes()[:-100])
    elif how == "header":
        first.write_bytes(first.read_bytes()[:8] + b"[" + first.read_bytes()[9:])
    elif how == "gone":
        first.unlink()
    elif how == "shape":
        config = json.loads((path / "config.json").read_text())
        write_json(path / "config.json", config | {"intermediate_size": 96})
    elif how == "config":
        (path / "config.json").write_text("{")
    elif how == "index":
        write_json(path / "model.safetensors.index.json", {"weight_map": {}})
    elif how == "integers":
        tensors = load_file(first)
        name = next(n for n in tensors if "proj" in n)
        tensors[name] = tensors[name].to(torch.int8)
        save_file(tensors, first)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("cut", ValueError, "cut or damaged"),
        ("header", ValueError, "damaged safetensors header"),
        ("gone", FileNotFoundError, r"1 of \d shards.*are missing, the first is model-00001"),
        (
            "shape",
            ValueError,
            r"proj\.weight: config\.json asks for floats of shape .*96.*holds BF",
        ),
        ("config", ValueError, r"config\.json: not valid JSON"),
        ("index", ValueError, "has no weight_map"),
        ("integers", ValueError, r"proj\.weight: config\.json asks for floats.* holds I8"),
    ],
)
def test_damaged_sources(copy, tmp_path, how, error, message):
    damage(copy, how)
    with pytest.raises(error, match=message):
        quantize_checkpoint(copy, tmp_path / "out", "int4")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_names_the_tensor(copy, tmp_path, value):
    last = sorted(copy.glob("model-*.safetensors"))[1]
    tensors = load_file(last)
    name = next(n for n in tensors if "proj" in n)
    tensors[name][1, 2] = value
    save_file(tensors, last, {"format": "pt"})
    with pytest.raises(
        ValueError, match=rf"{name}: 1 values are NaN or inf, the first at \(1, 2\)"
    ):
        quantize_checkpoint(copy, tmp_path / "out", "int4")
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_the_model_is_kept_and_said(tmp_path, caplog):
    source = dense(tmp_path / "dense")
    tensors = load_file(source / "model.safetensors")
    odd = "model.mtp.weight"
    tensors[odd] = torch.ones(8)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with caplog.at_level(logging.WARNING):
        report = quantize_checkpoint(source, tmp_path / "out", "int4")
    assert report.unexpected == (odd,)
    assert odd in report.kept
    assert "1 tensors fit no parameter of the model" in caplog.text
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")[odd], tensors[odd])


def test_what_the_model_lacks_is_an_error(tmp_path):
    source = dense(tmp_path / "dense")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.odd"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    lost = (
        r"no file holds 1 tensors of the model \(.*mlp\.up_proj\.weight\), and 1 tensors fit none"
    )
    with pytest.raises(InvalidInput, match=lost):
        quantize_checkpoint(source, tmp_path / "out", "int4")
    with pytest.raises(InvalidInput, match=lost):
        load_dense(source)
    assert [p.name for p in tmp_path.iterdir()] == ["dense"]


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        (lambda name: f"_orig_mod.{name}", "begin with '_orig_mod.': save the model itself"),
        (lambda name: name.replace("q_proj.", "q_proj.base_layer."), "merge it with peft"),
    ],
)
def test_names_of_wrappers_are_told(tmp_path, rename, message):
    source = dense(tmp_path / "dense")
    tensors = load_file(source / "model.safetensors")
    renamed = {rename(name): tensor for name, tensor in tensors.items()}
    save_file(renamed, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidInput, match=message):
        quantize_checkpoint(source, tmp_path / "out", "int4")


def test_no_layer_of_the_model(tmp_path):
    source = dense(tmp_path / "dense")
    tensors = load_file(source / "model.safetensors")
    save_file({f"x.{n}": t for n, t in tensors.items()}, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"no file holds 21 tensors of the model.* fit none"):
        quantize_checkpoint(source, tmp_path / "out", "int4")


@pytest.mark.parametrize("lost", ["model.norm.weight", "model.layers.1.mlp.up_proj.codes4"])
def test_a_writer_tries_out_what_it_wrote(lost, tmp_path):
    """A tensor that is not there, and one of another shape, by the class that will read them."""
    quantize_checkpoint(dense(tmp_path / "dense"), tmp_path / "out", "int4")
    try_out(tmp_path / "out")
    whole = load_file(tmp_path / "out" / "model.safetensors")
    for damaged in (
        {name: tensor for name, tensor in whole.items() if name != lost},
        whole | {"model.norm.weight": torch.ones(3)},
    ):
        save_file(damaged, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match="could not be loaded, which is a fault of anybit"):
            try_out(tmp_path / "out")
