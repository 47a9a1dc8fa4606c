"""Other tools' checkpoints of models whose tensors transformers calls otherwise than the files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import anybit
from anybit.checkpoint.foreign.convert import convert_checkpoint, opened, plan_conversion
from anybit.checkpoint.foreign.export import export_checkpoint
from anybit.checkpoint.foreign.fit import OTHERS
from anybit.checkpoint.names import Names
from anybit.checkpoint.places import name_of, saved_names
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.errors import InvalidInput
from anybit.files.directory import read_json
from anybit.files.safetensors import WEIGHTS
from anybit.nn.model import quantized_layers
from tests.models.row import close, forward, representable
from tests.models.zoo import Model, inputs

POWER = 2.0**-6  # with which e4m3 holds the weights of `representable`
LLAVA = "LlavaForConditionalGeneration"
Q = "self_attn.q_proj"


def fp8(source: Path, wanted: Callable[[str], bool]) -> None:
    """Store wanted weights in FP8, as transformers and others do, exactly."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / WEIGHTS).items():
        if name.endswith(".weight") and tensor.ndim == 2 and wanted(name):
            tensors[name] = (tensor / POWER).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.tensor(POWER)
            assert torch.equal(tensors[name].float() * POWER, tensor)
        else:
            tensors[name] = tensor
    save_file(tensors, source / WEIGHTS)
    config = read_json(source / "config.json")
    config["quantization_config"] = {"quant_method": "fp8"}
    (source / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("as_in_model", [False, True])
@pytest.mark.parametrize(
    ("architecture", "decoded"),
    [
        (LLAVA, (0, 0)),  # prefixes
        ("Lfm2MoeForCausalLM", (0, 0)),  # experts' projections
        ("GptOssForCausalLM", (0, 0)),  # experts that are not quantized, in one tensor
        ("HrmTextForCausalLM", (4, 0)),  # several layers in one tensor
        ("SiglipForImageClassification", (1, 1)),  # a Linear that is never called
    ],
)
def test_layers_that_have_other_names(
    architecture: str, decoded: tuple[int, int], as_in_model: bool, tmp_path: Path
) -> None:
    """decoded: layers that become dense. as_in_model: the tool has stored the model's own names."""
    model = Model(architecture)
    dense = representable(model.make())
    given, head = inputs(dense), dense.get_output_embeddings()
    expected, source = forward(dense, given), tmp_path / "source"
    dense.save_pretrained(source)
    table = Names(dense)
    linears = {n for n, m in dense.named_modules() if isinstance(m, nn.Linear) and m is not head}
    if as_in_model:
        own = {n: t for n, t in dense.state_dict().items() if n != "lm_head.weight" or head}
        save_file({n: t.clone() for n, t in own.items()}, source / WEIGHTS)

    def wanted(name: str) -> bool:
        own, converter, _ = table.in_model(name)
        return own.removesuffix(".weight") in linears or converter is not None

    fp8(source, wanted)
    report = convert_checkpoint(source, tmp_path / "out")
    assert not report.unexpected
    assert len(report.decoded) == decoded[as_in_model]
    found = anybit.load(tmp_path / "out")
    assert len(dict(quantized_layers(found))) == len(report.formats)
    close(forward(found.eval(), given), expected)


def test_a_layer_without_weights(tmp_path: Path) -> None:
    """It is named before a weight is read."""
    source = tmp_path / "source"
    representable(Model(LLAVA).make()).save_pretrained(source)
    fp8(source, lambda name: name.endswith(f"{Q}.weight"))
    tensors = load_file(source / WEIGHTS)
    lost = f"language_model.model.layers.1.{Q}.weight"
    del tensors[lost], tensors[f"{lost}_scale_inv"]
    save_file(tensors, source / WEIGHTS)
    with pytest.raises(InvalidInput, match=rf"no file holds 1 .*language_model.layers.1.{Q}"):
        convert_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


MIXTRAL = "MixtralForCausalLM"


def stored_fp8(architecture: str, source: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """A model with FP8 weights, and all tensors that it has."""
    representable(Model(architecture).make()).save_pretrained(source)
    fp8(source, wanted)
    return load_file(source / WEIGHTS)


def test_some_layers_are_rounded(tmp_path: Path) -> None:
    """By the checkpoint's names or the model's; the others stay as they are, bit for bit."""
    source, out = tmp_path / "source", tmp_path / "out"
    tensors = stored_fp8(MIXTRAL, source, lambda n: ".self_attn." in n or ".experts." in n)
    one = "model.layers.0.mlp.experts.1.w1"
    plan = {"*.experts.*": "int4", "*.w2": None, one: "int8"}
    report = convert_checkpoint(source, out, plan)
    loaded = dict(quantized_layers(anybit.load(out)))
    assert loaded[one].scheme == "int8"
    for stored, scheme in report.formats.items():
        name = stored.replace(".block_sparse_moe.", ".mlp.")
        first = name.rpartition(".")[2]
        assert name == one or scheme == ("int4" if first in ("w1", "w3") else "fp8")
        weight = tensors[f"{stored}.weight"].float() * POWER
        if scheme != "fp8":
            weight = anybit.quantize_tensor(weight, scheme).dequantize()
        assert loaded[name].scheme == scheme
        assert torch.equal(loaded[name].dequantize(), weight)
    for wrong in ("*.block_sparse_moe.gate", "*.w4"):
        with pytest.raises(
            InvalidInput, match=r"no quantized layer matches '\*.*; layers are named"
        ):
            convert_checkpoint(source, tmp_path / "other", {wrong: "int4"})


def test_experts_that_stay_dense(tmp_path: Path) -> None:
    """transformers makes experts of text and of images of one numbering."""
    source = tmp_path / "source"
    stored_fp8(
        "Ernie4_5_VLMoeForConditionalGeneration", source, lambda n: n.endswith(f"{Q}.weight")
    )
    assert convert_checkpoint(source, tmp_path / "out").formats


def test_one_of_the_dense_experts_is_lost(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tensors = stored_fp8(MIXTRAL, source, lambda n: ".self_attn." in n)
    del tensors[next(n for n in tensors if n.endswith("experts.1.w2.weight"))]
    save_file(tensors, source / WEIGHTS)
    with pytest.raises(InvalidInput, match=r"no file holds 1 tensors .*experts\.1\.w2\.weight"):
        convert_checkpoint(source, tmp_path / "out")


@pytest.mark.parametrize(("layer", "lost"), [(61, False), (61, True), (7, True)])
def test_experts_of_a_layer_that_the_model_lacks(layer: int, lost: bool, tmp_path: Path) -> None:
    """transformers ignores DeepSeek's layer 61; no such layer excuses a tensor of the others."""
    source, expert = tmp_path / "source", "model.layers.1.mlp.experts.0.up_proj.weight"
    experts = lambda name: ".mlp.experts." in name  # noqa: E731
    tensors = stored_fp8("DeepseekV3ForCausalLM", source, experts)
    extra = {n: tensors[n].clone() for n in (expert, f"{expert}_scale_inv")}
    tensors |= {n.replace("layers.1.", f"layers.{layer}."): t for n, t in extra.items()}
    for name in extra if lost else ():
        del tensors[name]
    save_file(tensors, source / WEIGHTS)
    if lost:
        with pytest.raises(InvalidInput, match=r"no file holds 1 tensors .*experts\.0\.up_proj"):
            convert_checkpoint(source, tmp_path / "out")
        return
    report = convert_checkpoint(source, tmp_path / "out")
    assert report.unexpected == ("model.layers.61.mlp.experts.0.up_proj",)
    assert quantized_layers(anybit.load(tmp_path / "out"))


def test_a_dense_expert_of_another_name(tmp_path: Path) -> None:
    source, model = tmp_path / "source", Model("Lfm2MoeForCausalLM")
    dense = representable(model.make())
    stored_fp8(model.architecture, source, lambda n: ".experts." in n and ".experts.1." not in n)
    convert_checkpoint(source, tmp_path / "out")
    found, given = anybit.load(tmp_path / "out", dtype=torch.float32).eval(), inputs(dense)
    close(forward(found, given), forward(dense, given))


@pytest.mark.parametrize("short", [0, 2])
def test_a_tensor_of_several_layers(short: int, tmp_path: Path) -> None:
    """It is as high as all layers that transformers makes of it; vLLM has it as it is stored."""
    source = tmp_path / "source"
    tensors = stored_fp8("HrmTextForCausalLM", source, lambda n: "mlp.gate_up_proj" in n)
    name = next(n for n in tensors if n.endswith("gate_up_proj.weight"))
    tensors[name] = tensors[name][: len(tensors[name]) - short].clone()
    save_file(tensors, source / WEIGHTS)
    with opened(source) as found:
        layer = plan_conversion(found, 1 << 30, for_transformers=False).layers
        assert layer[name.removesuffix(".weight")].scheme
        if short:
            with pytest.raises(InvalidInput, match=r"gate_up_proj: config\.json asks for a weight"):
                plan_conversion(found, 1 << 30)
        else:
            assert OTHERS in {one.reason for one in plan_conversion(found, 1 << 30).layers.values()}
            plan_conversion(found, 1 << 30, "int4")
            with pytest.raises(InvalidInput, match=r"cannot be rounded to int4, since it becomes"):
                plan_conversion(found, 1 << 30, {"*.gate_up_proj": "int4"})


def test_names_in_plans() -> None:
    """Plans name layers as the model that was saved does."""
    stored = f"language_model.model.layers.0.{Q}"
    with torch.device("meta"):
        model = Model(LLAVA).type(Model(LLAVA).config())
    assert saved_names(model, [stored]) == {stored: f"model.language_model.layers.0.{Q}"}
    experts = "model.layers.0.block_sparse_moe.experts.1.w2"
    with torch.device("meta"):
        mixtral = Model(MIXTRAL).type(Model(MIXTRAL).config())
    assert saved_names(mixtral, [experts]) == {experts: "model.layers.0.mlp.experts.1.w2"}


def test_export_names_layers_as_the_model_does(tmp_path: Path) -> None:
    """So do llm-compressor and transformers; the tensors keep their names."""
    model = Model(LLAVA)
    dense = model.make()
    dense.save_pretrained(tmp_path / "source")
    plan = {"*": "int8:group=32", f"*.{Q}": "int4:group=64", "*.vision_tower.*": None}
    quantize_checkpoint(tmp_path / "source", tmp_path / "ours", plan)
    export_checkpoint(tmp_path / "ours", tmp_path / "theirs")
    config = read_json(tmp_path / "theirs" / "config.json")["quantization_config"]
    q = [f"model.language_model.layers.{i}.{Q}" for i in range(2)]
    assert [group["targets"] for group in config["config_groups"].values()] == [q, ["Linear"]]
    assert any(name.startswith("model.vision_tower.") for name in config["ignore"])
    convert_checkpoint(tmp_path / "theirs", tmp_path / "again")
    ours, again = (load_file(tmp_path / name / WEIGHTS) for name in ("ours", "again"))
    assert ours.keys() == again.keys()
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    stored = f"language_model.model.layers.0.{Q}"
    assert f"{stored}.codes4" in ours
    assert name_of(Names(dense), stored) == q[0]
    pytest.importorskip("compressed_tensors")
    theirs = model.type.from_pretrained(tmp_path / "theirs", dtype=torch.float32).eval()
    nn.Module.float(theirs)  # older versions of transformers leave some of it in halves
    found = anybit.load(tmp_path / "ours", dtype=torch.float32).eval()
    given = inputs(dense)
    close(forward(theirs, given), forward(found, given))
