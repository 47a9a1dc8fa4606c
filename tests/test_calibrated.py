"""Calibration from disk to disk: the same tensors as in memory, one block at a time."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import anybit
from anybit import GPTQ, Additive, Calibration, Smooth
from anybit.checkpoint.calibrated import calibrate_checkpoint
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.quantizers.calibration.block_runner import BlockRunner
from anybit.quantizers.calibration.stored_blocks import StoredBlocks
from tests.models.row import rows
from tests.test_calibration import VOCAB, Killed, killed_after, llama, tokens

PLAN = {"*": "int4:group=32", "*.0.mlp.down_proj": None, "lm_head": "int8"}


def saved(path: Path, **changes: Any) -> Path:
    llama(**changes).save_pretrained(path)
    (path / "merges.txt").write_text("kept")
    return path


def compare(out: Path, model: nn.Module) -> None:
    loaded = anybit.load(out)
    want, got = model.state_dict(), loaded.state_dict()
    assert want.keys() == got.keys()
    for name, tensor in want.items():
        assert torch.equal(tensor, got[name]), name


@pytest.mark.parametrize("quantizer", [GPTQ, Smooth])
def test_same_as_in_memory(quantizer: type, tmp_path: Path) -> None:
    source, out = saved(tmp_path / "dense"), tmp_path / "out"
    assert calibrate_checkpoint(source, out, PLAN, quantizer(tokens())).out == out
    compare(out, anybit.quantize_(llama(), PLAN, quantizer(tokens())))
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "merges.txt", "model-00004-of-00004.safetensors"} <= names
    assert not any("block" in name or "settings" in name for name in names)
    assert not out.with_name("out.partial").exists()


@pytest.mark.filterwarnings("ignore:.*saw fewer calibration tokens")
@pytest.mark.parametrize(
    "architecture",
    {
        "GPT2LMHeadModel": "stores transposed weights",
        "CpmAntForCausalLM": "its first parameters are those of its blocks",
        "BartForCausalLM": "its number of blocks is no num_hidden_layers",
        "ModernBertDecoderForCausalLM": "has tables of its layers' kinds",
    },
)
def test_other_architectures_as_in_memory(architecture: str, tmp_path: Path) -> None:
    *_, row = rows(architecture, tmp_path, ("gptq", "gptq_stream"))
    assert set(row.cells.values()) == {"equal"}, row.notes


def test_codebooks_and_tuned_norms_are_those_of_memory(tmp_path: Path) -> None:
    plan = {"*": "int4:group=32", "*.down_proj": "codebook:m=1,v=4,b=4,group=32"}

    def quantizer() -> Additive:
        return Additive(tokens(), rounds=1, steps=3)

    out = calibrate_checkpoint(saved(tmp_path / "dense"), tmp_path / "out", plan, quantizer()).out
    model = anybit.quantize_(llama(), plan, quantizer())
    assert not torch.equal(model.model.layers[0].input_layernorm.weight, torch.ones(64))
    compare(out, model)


def test_tied_head_is_kept(tmp_path: Path) -> None:
    source = saved(tmp_path / "dense", tie_word_embeddings=True)
    calibrate_checkpoint(source, tmp_path / "out", "int4", GPTQ(tokens()))
    model = anybit.load(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = tokens()
    with torch.no_grad():
        dense = AutoModelForCausalLM.from_pretrained(source)(ids).logits
        error = (model(ids).logits - dense).norm() / dense.norm()
    assert 0 < float(error) < 0.5


def test_one_block_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors in memory after each block, wherever they are referred to from: always as many."""
    live: list[int] = []
    advance = BlockRunner.advance

    def counting(self: BlockRunner, index: int, kv_scales: bool = False) -> None:
        advance(self, index, kv_scales)
        gc.collect()
        tensors = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
        live.append(sum(t.nbytes for t in tensors if t.device.type == "cpu"))
        assert not any(t.shape == (128, 128) for t in tensors)  # the Hessian of down_proj

    monkeypatch.setattr(BlockRunner, "advance", counting)
    source = saved(tmp_path / "dense", num_hidden_layers=4)
    gc.collect()
    gc.freeze()  # what other tests of the process left does not count
    try:
        calibrate_checkpoint(source, tmp_path / "out", "int4", GPTQ(tokens()))
    finally:
        gc.unfreeze()
    assert len(live) == 4
    assert len(set(live[1:])) == 1


def test_killed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = saved(tmp_path / "dense"), tmp_path / "out"
    with monkeypatch.context() as patch:
        killed_after(2, patch)
        with pytest.raises(Killed):
            calibrate_checkpoint(source, out, PLAN, GPTQ(tokens()))
    assert not out.exists()
    with pytest.raises(ValueError, match=r"quantizer: GPTQ.*damping=0\.1.* then, .*damping=0\.3"):
        calibrate_checkpoint(source, out, PLAN, GPTQ(tokens(), damping=0.3))
    watched: list[int] = []
    collect = BlockRunner.collect
    monkeypatch.setattr(
        BlockRunner,
        "collect",
        lambda self, i, *rest: (watched.append(i), collect(self, i, *rest))[1],
    )
    calibrate_checkpoint(source, out, PLAN, GPTQ(tokens()))
    assert watched == [2, 3]  # the last block, and the head
    compare(out, anybit.quantize_(llama(), PLAN, GPTQ(tokens())))


def test_another_kind_of_run_keeps_its_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = saved(tmp_path / "dense"), tmp_path / "out"
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "manifest.json").write_text("{}")
    with monkeypatch.context() as patch:
        killed_after(0, patch)
        with pytest.raises(FileExistsError, match=r"in use: it holds manifest\.json; finish the"):
            calibrate_checkpoint(source, out, PLAN, GPTQ(tokens()))
        assert [path.name for path in partial.iterdir()] == ["manifest.json"]
        (partial / "manifest.json").rename(partial / "settings.tmp")  # of a run that was killed
        with pytest.raises(Killed):
            calibrate_checkpoint(source, out, PLAN, GPTQ(tokens()))
        assert not partial.exists()
    with monkeypatch.context() as patch:
        killed_after(1, patch)
        with pytest.raises(Killed):
            calibrate_checkpoint(source, out, PLAN, GPTQ(tokens()))
    with pytest.raises(FileExistsError, match=r"it holds block_0000\.safetensors"):
        quantize_checkpoint(source, out, "int4", overwrite=True)
    calibrate_checkpoint(source, out, PLAN, GPTQ(tokens()))
    assert out.is_dir()


def test_bad_input(tmp_path: Path) -> None:
    source = saved(tmp_path / "dense")
    with pytest.raises(ValueError, match="GPTQ needs data to calibrate on"):
        calibrate_checkpoint(source, tmp_path / "out", "int4", GPTQ())
    with pytest.raises(ValueError, match="outside the model's vocabulary"):
        calibrate_checkpoint(source, tmp_path / "out", "int4", GPTQ(tokens() + VOCAB))
    with pytest.raises(FileExistsError):
        calibrate_checkpoint(source, source, "int4", GPTQ(tokens()))
    block = llama().model.layers[0]
    with (
        pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj\.weight is in no file"),
        StoredBlocks({}, "").loaded(block, "model.layers.0."),
    ):
        pass


def test_kv_scales_travel_with_the_checkpoint(tmp_path: Path) -> None:
    source, out = saved(tmp_path / "dense"), tmp_path / "out"
    calibrate_checkpoint(source, out, "int4", GPTQ(Calibration(tokens(), kv_scales=True)))
    from anybit.files.safetensors import stored_tensors

    scale = stored_tensors(out)["model.layers.1.self_attn.k_scale"]
    assert (scale.shape, scale.torch_dtype) == ((2, 16), torch.float32)
    ids = tokens()
    with torch.no_grad():
        assert torch.isfinite(anybit.load(out)(ids).logits).all()
