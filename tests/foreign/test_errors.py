"""Checkpoints that cannot be read: each says what was found, and nothing is left behind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import anybit
from anybit.checkpoint.foreign import convert
from anybit.checkpoint.foreign.convert import convert_checkpoint
from anybit.files.safetensors import INDEX, WEIGHTS, stored_tensors
from tests.foreign.checks import converted
from tests.foreign.make import FIXTURES

Q = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


def changed(
    fixture: str,
    place: Path,
    tensors: Callable[[Tensors], Any] = lambda t: None,
    config: Callable[[dict[str, Any]], Any] = lambda c: None,
) -> Path:
    """A copy of a fixture with other tensors, or another quantization_config."""
    out = place / "source"
    shutil.copytree(FIXTURES / fixture, out)
    held = load_file(out / WEIGHTS)
    tensors(held)
    save_file({k: v.contiguous() for k, v in held.items()}, out / WEIGHTS)
    text = json.loads((out / "config.json").read_text())
    config(text["quantization_config"])
    (out / "config.json").write_text(json.dumps(text))
    return out


def refused(source: Path, message: str, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error, match=message):
        convert_checkpoint(source, source.parent / "out")
    assert {path.name for path in source.parent.iterdir()} == {source.name}


@pytest.mark.parametrize(
    ("fixture", "settings", "message"),
    [
        ("gptq_4bit_v1", {"quant_method": "owq"}, "quantized with 'owq', .*known: gptq, awq"),
        ("gptq_4bit_v1", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ("gptq_4bit_v1", {"checkpoint_format": "gptq_p"}, "checkpoint_format is 'gptq_p'"),
        ("gptq_4bit_v1", {"format": "qqq"}, "format is 'qqq'"),
        ("gptq_4bit_v1", {"method": "qqq"}, "method is 'qqq'"),
        ("gptq_4bit_v1", {"bits": 5}, "bits is 5, and only 2, 3, 4, 8"),
        ("gptq_4bit_v1", {"pack_dtype": "int16"}, "pack_dtype is 'int16'"),
        ("awq_gemm", {"checkpoint_format": "gemv_fast"}, "checkpoint_format is 'gemv_fast'"),
        ("awq_gemm", {"format": "paroquant"}, "format is 'paroquant'"),
        ("awq_gemm", {"krot": 8}, "awq: krot is 8, so the model"),
        ("awq_gemm", {"bits": 3}, "bits is 3, and only 4"),
        ("aqlm_2x8", {"out_group_size": 2}, "out_group_size is 2, and only 1"),
        ("aqlm_2x8", {"nbits_per_codebook": 12}, "nbits_per_codebook is 12"),
        ("ct_4bit", {"format": "marlin-24"}, "format is 'marlin-24'"),
        ("ct_4bit", {"transform_config": {"a": 1}}, "transform_config is"),
        (
            "ct_4bit",
            {"sparsity_config": {"format": "sparse-bitmask"}},
            "format is 'sparse-bitmask'",
        ),
        ("ct_4bit", {"quantization_status": "frozen"}, "quantization_status is 'frozen'"),
        ("ct_4bit", {"moe_sparsity_config": {"method": "prune"}}, "moe_sparsity_config is"),
        ("ct_4bit", {"config_groups": {"W4A16": ["Linear"]}}, r"config_groups has \['Linear'\]"),
        ("ct_4bit", {"config_groups": {}}, "no config group is for model.layers.0"),
        ("bnb_nf4", {"load_in_8bit": True}, "no tensor is named like"),
        ("bnb_nf4", {"bnb_4bit_quant_storage": "int64"}, "quant_storage is 'int64'"),
        ("gptq_4bit_v1", {"rotation": "hadamard"}, "gptq: rotation is hadamard, so the model"),
        ("awq_gemm", {"meta": {"adapter": {"rank": 8}}}, "awq: adapter is {'rank': 8}"),
        (
            "gptq_4bit_v1",
            {"quant_method": "auto-round", "rotation_config": {"block_size": 32}},
            "auto-round: rotation_config is {'block_size': 32}",
        ),
        ("gptq_4bit_v1", {"quant_method": "bitnet", "use_rms_norm": True}, "use_rms_norm is True"),
        (
            "gptq_4bit_v1",
            {"quant_method": "modelopt", "quant_algo": "FP8", "has_zero_point": True},
            "has_zero_point is True",
        ),
        ("gptq_4bit_v1", {"quant_method": "aqlm", "nbits_per_codebook": 8}, "no tensor is named"),
        ("gptq_4bit_v1", {"quant_method": "anybit"}, "a checkpoint of anybit already"),
    ],
)
def test_layouts_that_are_not_known(
    fixture: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refused(changed(fixture, tmp_path, config=lambda c: c.update(settings)), message)


def test_dense_checkpoints(tmp_path: Path) -> None:
    source = changed("gptq_4bit_v1", tmp_path)
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (source / "config.json").write_text(json.dumps(config))
    refused(source, "is not quantized: .*anybit quantize")


def drop(key: str) -> Callable[[Tensors], Any]:
    return lambda t: t.pop(f"{Q}.{key}")


def put(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Any]:
    return lambda t: t.update({f"{Q}.{key}": change(t[f"{Q}.{key}"])})


def fill(at: int, value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(t: torch.Tensor) -> torch.Tensor:
        t.view(-1)[at] = value
        return t

    return change


@pytest.mark.parametrize(
    ("fixture", "change", "message"),
    [
        (
            "gptq_4bit_v1",
            drop("scales"),
            "scales is missing; there are g_idx, qweight, qzeros",
        ),
        ("gptq_4bit_v1", put("qzeros", lambda t: t[:1]), r"qzeros: expected int32 of shape \(2, 4"),
        ("gptq_4bit_v1", put("scales", lambda t: t.int()), "scales: expected float16 or .*int32"),
        ("gptq_4bit_v1", put("scales", lambda t: t[:, :8]), r"scales: expected .*\(2, 32\)"),
        ("gptq_4bit_v1", put("qweight", lambda t: t[:3]), "do not fit each other"),
        ("gptq_4bit_v1", put("g_idx", fill(3, 7)), "names groups 0 to 7, but scales has 2"),
        ("gptq_4bit_v1", put("g_idx", fill(3, -1)), "names groups -1 to 1"),
        ("gptq_4bit_act_order", put("g_idx", lambda t: t * 0), "groups of 0 to 32 columns"),
        ("gptq_4bit_v1", put("scales", lambda t: t[0, 0]), r"shape \(any, any\), found .* of \(\)"),
        ("gptq_4bit_v1", put("qweight", lambda t: t[0, 0]), r"qweight: expected .* of \(\)"),
        ("gptq_4bit_act_order", drop("g_idx"), "desc_act is set, but without g_idx .* 2 groups"),
        ("gptq_4bit_act_order", put("g_idx", lambda t: t[:0]), "desc_act is set, but"),
        ("awq_gemm", put("qweight", lambda t: t[0, 0]), r"qweight: expected .* of \(\)"),
        ("awq_gemm", put("scales", lambda t: t[0, 0]), r"scales: expected .* of \(\)"),
        ("awq_gemm", put("scales", lambda t: t[:, :8]), "do not fit AWQ's gemm layout"),
        ("hqq_4bit", drop("packing"), f"{Q}.packing is missing"),
        ("hqq_4bit", put("packing", fill(0, 57)), "packing '9bit_u8' cannot be read"),
        ("hqq_4bit", put("W_q", lambda t: t[1:]), r"W_q: expected uint8 of shape \(32, 16\)"),
        ("hqq_4bit", put("quant_zero", fill(0, 1)), "quant_zero is set"),
        (
            "hqq_4bit",
            put("axis", lambda t: t.flatten()[:0]),
            r"axis: expected one number, found \[\]",
        ),
        ("hqq_8bit", put("nbits", fill(0, 5)), r"W_q: holds code \d+, above the largest, 31"),
        ("ct_4bit", put("weight_packed", lambda t: t[:, 1:]), "3 words hold 32 codes of 4 bits"),
        ("ct_4bit", put("weight_shape", fill(1, 48)), "4 words hold 48 codes"),
        ("ct_4bit", put("weight_shape", fill(1, 1 << 40)), "words hold|cannot have groups"),
        ("bnb_nf4", put("weight", lambda t: t[1:]), "the layer's codes take 512 bytes"),
        ("bnb_nf4", put("weight.absmax", lambda t: t[1:]), "absmax: expected float32"),
        (
            "bnb_nf4",
            put("weight.quant_state.bitsandbytes__nf4", lambda t: t[:-9]),
            "quant_state cannot be read",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    fixture: str, change: Callable[[Tensors], Any], message: str, tmp_path: Path
) -> None:
    refused(changed(fixture, tmp_path, change), message)


@pytest.mark.parametrize(
    ("fixture", "tensor"),
    [
        ("gptq_4bit_v1", "scales"),
        ("awq_gemm", "scales"),
        ("ct_4bit", "weight_scale"),
        ("hqq_4bit", "scale"),
        ("hqq_axis0", "scale"),  # becomes a dense weight
        ("bnb_nf4", "weight.absmax"),
    ],
)
def test_numbers_that_are_none(fixture: str, tensor: str, tmp_path: Path) -> None:
    def damage(held: Tensors) -> None:
        held[f"{Q}.{tensor}"].view(-1)[1] = torch.nan

    source = changed(fixture, tmp_path, damage)
    message = rf"{WEIGHTS}: {Q}\.{tensor}: 1 values are NaN or inf, the first at \("
    refused(source, message)


def test_numbers_that_do_not_fit_into_the_models_dtype(tmp_path: Path) -> None:
    def enlarge(held: Tensors) -> None:
        held[f"{Q}.scale"].fill_(30000)

    source = changed("hqq_axis0", tmp_path, enlarge)
    refused(source, rf"{Q}\.weight, converted to torch\.float16: \d+ values are NaN or inf")


def test_nothing_is_left_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(held: Tensors) -> None:
        held[f"{Q}.scales"].fill_(torch.nan)

    source = changed("gptq_4bit_v1", tmp_path, damage)
    monkeypatch.setattr(convert, "SHARD_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=rf"{Q}\.scales: .* values are NaN or inf"):
        anybit.load(source)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_aqlm_codes_out_of_range(tmp_path: Path) -> None:
    def seven_bits(tensors: Tensors) -> None:
        books = next(name for name in tensors if name.endswith("codebooks"))
        tensors[books] = tensors[books][:, :128]

    source = changed("aqlm_2x8", tmp_path, seven_bits, lambda c: c.update(nbits_per_codebook=7))
    refused(source, "codes: -128 to 127 is out of range for 7 bits")


def test_tensors_that_a_layout_does_not_have(tmp_path: Path) -> None:
    source = changed(
        "gptq_4bit_v1", tmp_path, lambda t: t.update({f"{Q}.channel_scale": torch.ones(32)})
    )
    refused(source, "gptq has no tensor .*q_proj.channel_scale")


def test_a_model_of_another_size(tmp_path: Path) -> None:
    source = changed("gptq_4bit_v1", tmp_path)
    config = (source / "config.json").read_text()
    (source / "config.json").write_text(
        config.replace('"intermediate_size": 64', '"intermediate_size": 96')
    )
    refused(source, r"config.json asks for a weight of \((96, 32|32, 96)\), the checkpoint holds")


def test_an_order_that_was_never_found(tmp_path: Path) -> None:
    """compressed-tensors before 0.20 wrote -1 for the groups of layers without calibration."""
    unordered = torch.full((32,), -1, dtype=torch.int32)
    source = changed("ct_4bit", tmp_path, lambda t: t.update({f"{Q}.weight_g_idx": unordered}))
    assert "order" not in converted(source, tmp_path / "out").formats[Q]


def test_biases(tmp_path: Path) -> None:
    """AutoGPTQ writes zeros for layers without bias."""
    source = changed("gptq_4bit_v1", tmp_path, lambda t: t.update({f"{Q}.bias": torch.zeros(32)}))
    assert [*converted(source, tmp_path / "out").dropped] == [f"{Q}.bias"]
    assert f"{Q}.bias" not in stored_tensors(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(source)
    source = changed("gptq_4bit_v1", tmp_path, lambda t: t.update({f"{Q}.bias": torch.ones(32)}))
    refused(source, "bias: not zero, but the model has no bias there")


TWO, THREE = torch.full((128,), 2.0), torch.ones(2, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("fixture", "name", "tensor", "message"),
    [
        ("awq_gemm", "mlp.act.scales", TWO, "AWQ divides the outputs of an"),
        ("ct_4bit", "mlp.experts.up_proj_packed", THREE, "belongs to no layer of compressed-tens"),
    ],
)
def test_tensors_that_change_the_model_are_refused(
    fixture: str, name: str, tensor: torch.Tensor, message: str, tmp_path: Path
) -> None:
    name = f"model.layers.0.{name}"
    refused(changed(fixture, tmp_path, lambda t: t.update({name: tensor})), message)


@pytest.mark.parametrize("fixture", ["awq_gemm", "ct_4bit"])
def test_tensors_that_belong_to_nothing_are_said(
    fixture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "model.layers.0.mlp.act.scales"
    source = changed(fixture, tmp_path, lambda t: t.update({name: torch.ones(128)}))
    converted(source, tmp_path / "out")
    assert f"1 tensors fit no parameter of the model, and stay as they are: {name}" in caplog.text
    assert name in stored_tensors(tmp_path / "out")


def test_codes_of_another_layout_are_not_taken_for_weights(tmp_path: Path) -> None:
    source = changed("ct_4bit", tmp_path, lambda t: None)
    tensors = load_file(source / WEIGHTS)
    other = {name.replace("_proj.weight_", "_proj_"): t for name, t in tensors.items()}
    save_file(other, source / WEIGHTS)
    refused(source, "its codes have a layout that anybit does not know")


OF_ATTENTION = (
    "k_scale", "q_scale", "kv_scale", "attn.v_scale", "q_proj.q_scale", "k_proj.k_scale",
    "k_proj.output_scale", "v_proj.output_scale", "k_zero_point", "k_proj.output_zero_point",
    "k_cache.scale", "kv_cache_scaling_factor", "prob_scale", "k_bmm_quantizer._amax",
    "k_quantizer.scale", "prob_output_scale", "qkv_proj.output_quantizer._amax",
    "k_proj.output_scale_inv", "p_scale", "attn_output_scale", "key_scale",
    "kv_b_proj.output_scale",
)  # fmt: skip


@pytest.mark.parametrize("key", OF_ATTENTION)
@pytest.mark.parametrize("fixture", ["ct_4bit", "gptq_4bit_v1", "quark", "awq_gemm"])
def test_scales_of_attention_are_left_out(fixture: str, key: str, tmp_path: Path) -> None:
    """By one rule, whatever tool wrote them, and said."""
    name = f"model.layers.0.self_attn.{key}"
    scale = torch.ones(1, dtype=torch.int8 if "zero_point" in key else torch.float32)
    source = changed(fixture, tmp_path, lambda t: t.update({name: scale}))
    report = converted(source, tmp_path / "out")
    assert [*report.dropped] == [name]
    assert name in str(report)
    assert name not in stored_tensors(tmp_path / "out")


@pytest.mark.parametrize(
    ("says", "stored", "message"),
    [
        ("gptq", -0x77777778, "which they are 9 and not 8; .* checkpoint_format: gptq_v2"),
        ("gptq_v2", 0x77777777, "which they are 7 and not 8; .* checkpoint_format: gptq "),
    ],
)
def test_zero_points_of_the_other_version(
    says: str, stored: int, message: str, tmp_path: Path
) -> None:
    """What config.json says of them is not what the file holds."""

    def put(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith(".qzeros"):
                tensors[name] = torch.full_like(tensors[name], stored)

    source = changed("gptq_4bit_v1", tmp_path, put)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] |= {"checkpoint_format": says, "sym": True}
    (source / "config.json").write_text(json.dumps(config))
    refused(source, message)
    config["quantization_config"]["sym"] = False
    (source / "config.json").write_text(json.dumps(config))
    report = convert_checkpoint(source, tmp_path / "out")  # as it is said
    assert report.formats[Q] == "int4:group=16,zero"


@pytest.mark.parametrize(
    ("name", "shape"), [("model.norm.weight", (16,)), ("model.embed_tokens.weight", (40, 32))]
)
def test_shapes_of_what_is_not_quantized(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    source = changed("gptq_4bit_v1", tmp_path, lambda t: t.update({name: torch.ones(shape)}))
    refused(source, f"{name}: config.json asks for floats of shape")


def test_layers_that_the_model_does_not_have(tmp_path: Path) -> None:
    """They are kept, and reported."""
    extra = Q.replace("layers.0", "layers.7")

    def add(tensors: Tensors) -> None:
        names = [name for name in tensors if name.startswith(Q)]
        tensors.update({name.replace(Q, extra): tensors[name].clone() for name in names})

    report = convert_checkpoint(changed("gptq_4bit_v1", tmp_path, add), tmp_path / "out")
    assert report.unexpected == (extra,)
    assert extra in str(report)
    assert f"{extra}.codes4" in stored_tensors(tmp_path / "out")


def test_what_described_the_old_quantization_is_not_copied(tmp_path: Path) -> None:
    source = changed("gptq_4bit_v1", tmp_path)
    for name in ("quantize_config.json", "quant_config.json", "tokenizer.json"):
        (source / name).write_text("{}")
    converted(source, tmp_path / "out")
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {"README.md", "config.json", "expected.json", WEIGHTS, "tokenizer.json"}


def test_layers_that_are_no_linear_layers(tmp_path: Path) -> None:
    """GPT-2's are of transformers' class Conv1D, which nothing of ours would fill."""
    name = "transformer.h.0.attn.c_attn"
    save_file(
        {
            f"{name}.qweight": torch.zeros(4, 96, dtype=torch.int32),
            f"{name}.qzeros": torch.zeros(2, 12, dtype=torch.int32),
            f"{name}.scales": torch.ones(2, 96, dtype=torch.float16),
        },
        tmp_path / WEIGHTS,
    )
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 32,
        "n_head": 2,
        "n_layer": 1,
        "quantization_config": {"quant_method": "gptq", "bits": 4},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"{name} is a Conv1D in GPT2LMHeadModel, and"):
        convert_checkpoint(tmp_path, tmp_path / "out")


def test_missing_shards(tmp_path: Path) -> None:
    source = changed("gptq_4bit_v1", tmp_path)
    where = dict.fromkeys(load_file(source / WEIGHTS), "model-00001-of-00002.safetensors")
    (source / WEIGHTS).rename(source / "model-00001-of-00002.safetensors")
    where["lm_head.weight"] = "model-00002-of-00002.safetensors"
    (source / INDEX).write_text(json.dumps({"weight_map": where}))
    refused(source, "1 of 2 shards .* model-00002", FileNotFoundError)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    source = changed("hqq_4bit", tmp_path)
    (source / WEIGHTS).unlink()
    (source / "qmodel.pt").write_bytes(b"\x80\x04")
    refused(source, "has no safetensors, only qmodel.pt")


def test_layers_spread_over_shards_and_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor in a file of its own, small output files, and an interrupt on the way."""
    source = changed("gptq_4bit_act_order", tmp_path)
    where = {}
    for i, (name, tensor) in enumerate(load_file(source / WEIGHTS).items()):
        where[name] = f"model-{i:05}.safetensors"
        save_file({name: tensor}, source / where[name])
    (source / WEIGHTS).unlink()
    (source / INDEX).write_text(json.dumps({"weight_map": where}))
    left = [3]

    def stop(self: convert.Conversion, name: str, shard: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        write(self, name, shard)

    write = convert.Conversion.write
    monkeypatch.setattr(convert.Conversion, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, tmp_path / "out", shard_bytes=1000)
    monkeypatch.setattr(convert.Conversion, "write", write)
    assert not (tmp_path / "out").exists()
    finished = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out.partial").glob("*.s*")}
    assert len(finished) == 2
    convert_checkpoint(source, tmp_path / "out", shard_bytes=1000)
    for name, time in finished.items():
        assert (tmp_path / "out" / name).stat().st_mtime_ns == time
    assert not (tmp_path / "out.partial").exists()
    with pytest.raises(FileExistsError):
        convert_checkpoint(source, tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    converted(source, tmp_path / "out")
