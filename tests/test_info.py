"""`anybit info`: its sizes are those of what `anybit quantize` writes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, DeepseekV3Config, LlamaConfig, Qwen3MoeConfig

from anybit.checkpoint.foreign.convert import convert_checkpoint
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.cli.info import bytes_of, cache_of, info
from anybit.errors import InvalidInput
from anybit.files.safetensors import Stored
from tests.foreign.gguf_models import tiny, write
from tests.hub import serving, use
from tests.test_cli import ROOT, run

PICO = ROOT / "models" / "pico"


@pytest.mark.parametrize("scheme", ["fp6", "int4:group=64,zero", "liquid@int8"])
def test_sizes_are_those_of_what_quantize_writes(scheme: str, tmp_path: Path) -> None:
    found = info(PICO, [scheme])
    report = quantize_checkpoint(PICO, tmp_path / "out", scheme)
    dense, quantized = found.sizes
    assert (dense.disk, found.weights) == (report.bytes_before, report.weights)
    assert quantized.disk == pytest.approx(report.bytes_after, rel=0.001)
    assert (found.parameters, found.layers) == (7344384, 56)
    again = info(tmp_path / "out")
    assert [size.format for size in again.sizes] == ["as it is"]
    assert again.sizes[0].disk == report.bytes_after
    assert again.sizes[0].bits == pytest.approx(quantized.bits, rel=0.001)
    assert again.quantized == f"anybit: {scheme}"
    assert again.parameters == found.parameters


def test_sizes_are_those_of_what_convert_writes(tmp_path: Path) -> None:
    """Of another tool's checkpoint, in which one layer is no codes."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "tests/foreign/fixtures/gptq_4bit_v1", source)
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj"
    own = {key for key in tensors if key.startswith(f"{name}.")}
    tensors[f"{name}.weight"] = torch.ones(32, 32).half()
    save_file({k: t for k, t in tensors.items() if k not in own}, source / "model.safetensors")
    found = info(source, ["int8", "int3"])
    for size in found.sizes[1:]:
        report = convert_checkpoint(source, tmp_path / size.format, size.format)
        assert len(report.formats) == 6
        assert size.disk == pytest.approx(report.bytes_after, rel=0.001)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("qwen3_moe", {"down": "Q6_K", "blk": "Q4_K"}), ("llama", {"blk|embd|output": "F16"})],
)
def test_a_gguf_file_is_told_from_its_header(
    name: str, kinds: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    write(tiny(name), file, kinds)
    monkeypatch.setattr(Stored, "read", None)
    monkeypatch.setattr(Stored, "chunks", None)
    found = info(file, ["int8", "w4a16", "int3:group=100"])
    monkeypatch.undo()
    convert_checkpoint(file, tmp_path / "out")
    again = info(tmp_path / "out", ["int8", "w4a16"])
    assert (found.parameters, found.layers) == (again.parameters, again.layers)
    assert found.engine == again.engine
    dense = "Q4_K" not in kinds.values()
    assert found.quantized == ("" if dense else "GGUF: 12 Q4_K, 4 F32, 2 Q6_K, which anybit keeps")
    assert [*found.refused] == ["int3:group=100"]
    for size in found.sizes[1:]:
        out = tmp_path / size.format
        if dense:
            written = quantize_checkpoint(tmp_path / "out", out, size.format).bytes_after
        else:
            written = convert_checkpoint(file, out, size.format).bytes_after
        assert size.disk == pytest.approx(written, rel=0.02 if dense else 1e-9)
        assert info(out).sizes[0].bits == pytest.approx(size.bits, rel=0.001)


def test_what_fits_and_the_bound_of_the_bandwidth() -> None:
    found = info(PICO, ["fp6"], ["RTX 4090"], "0.04GB", 512, 4)
    dense, fp6 = found.sizes
    assert found.cache is not None
    kept = found.cache * 512 * 4
    assert (dense.memory, fp6.memory) == (dense.disk + kept, fp6.disk + kept)
    assert dense.tokens_per_second["RTX 4090 24 GB"] == pytest.approx(4 * 1008e9 / dense.memory)
    assert dense.tokens_per_second["memory of 0.04 GB"] is None
    tight = info(PICO, ["fp6"], ["h200"], "0.011GB", 512, 1).sizes
    assert tight[0].tokens_per_second["memory of 0.011 GB"] == 0
    assert tight[1].tokens_per_second["memory of 0.011 GB"] is None


def test_the_cache_of_other_attentions() -> None:
    def config(kind: type, **sizes: int) -> AutoConfig:
        return kind(num_hidden_layers=3, **sizes)

    heads = {"hidden_size": 64, "num_attention_heads": 4}
    assert cache_of(config(LlamaConfig, num_key_value_heads=2, **heads)) == 3 * 2 * 2 * 16 * 2
    assert cache_of(config(LlamaConfig, num_key_value_heads=2, head_dim=32, **heads)) == 768
    latent = config(DeepseekV3Config, kv_lora_rank=20, qk_rope_head_dim=4, **heads)
    assert cache_of(latent) == 3 * 2 * 24 * 2
    mixed = config(Qwen3MoeConfig, num_key_value_heads=2, head_dim=16, **heads)
    mixed.layer_types = ["linear", "full_attention", "sliding_attention"]
    assert cache_of(mixed) == 2 * 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("text", "want"), [("24GB", 24e9), ("24", 24e9), ("1.5 gb", 1.5e9), ("2GiB", 2**31)]
)
def test_sizes_of_memories(text: str, want: float) -> None:
    assert bytes_of(text) == want
    for wrong in ("", "GB", "-1", "24MB", "0GB", "inf"):
        with pytest.raises(InvalidInput, match="not the size of a memory; give 24GB"):
            bytes_of(wrong)


def test_a_model_of_the_hub_is_told_without_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with serving({"org/pico": PICO}) as hub:
        use(hub, tmp_path / "home", monkeypatch)
        stdout, _ = run("info", "org/pico", "--format", "fp6", "--json", "info.json")
    assert "org/pico: LlamaForCausalLM, 7.344 million parameters, bf16" in stdout
    assert "anybit's engine (serve, chat, LLM)" in stdout
    assert not list((tmp_path / "home").rglob("*.safetensors"))
    found, local = json.loads(Path("info.json").read_text()), info(PICO, ["fp6"])
    assert [size["disk"] for size in found["sizes"]] == [size.disk for size in local.sizes]


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for args, message in (
        (["--device", "t4"], "T4 is too old: its compute capability is 7.5"),
        (["--device", "rtx409"], "did you mean RTX 4090?"),
        (["--memory", "much"], "'much' is not the size of a memory"),
        (["--format", "int9"], "unknown format 'int9'"),
        (["--json", "no/a.json"], "not a directory to write a.json into"),
    ):
        _, stderr = run("info", PICO, *args, code=1)
        assert message in stderr
        assert len(stderr.splitlines()) == 1 + stderr.startswith("reading")
    _, stderr = run("info", "a.gguf", code=1)
    assert "a.gguf is missing" in stderr
    _, stderr = run("info", "org/name:Q4_K_M", code=1)
    assert "download it with `hf download org/name FILE`" in stderr
