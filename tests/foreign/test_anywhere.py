"""The table "quantize with anybit, serve anywhere" of docs/foreign.md, a test for each row.

`python -m tests.foreign.test_anywhere` writes it into the page. What vLLM itself runs on a CPU is
in tests/integrations/test_vllm_exports.py, and what llama.cpp reads in `test_gguf_export.py` and
`test_llama_cpp.py`.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import anybit
from anybit.checkpoint.foreign.convert import convert_checkpoint
from anybit.checkpoint.foreign.export import Exported, export_checkpoint
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.files.directory import read_json
from anybit.nn.model import quantized_layers
from tests import tiny

PAGE = Path(__file__).parents[2] / "docs" / "foreign.md"
BEGIN, END = "<!-- anywhere, written by tests/foreign/test_anywhere.py -->", "<!-- end -->"
# A format; what it is written as; the dtype in which transformers holds the same weights of dense
# models, and of experts, "" where it does not read them, "wrong" where it reads others; and what
# vLLM does: "tokens" that are ours on a CPU, "weights" in its layers, "" none.
ROWS = (
    ("int2:group=32", "pack-quantized", "float16", "float16", "weights"),
    ("int3:group=32", "pack-quantized", "float16", "float16", "weights"),
    ("int4:group=32", "pack-quantized", "float16", "float16", "weights"),
    ("int4:group=32,zero", "pack-quantized", "", "", "weights"),
    ("int4:group=32@int8", "pack-quantized", "", "", "weights"),
    ("int5:group=32", "pack-quantized", "float16", "float16", "weights"),
    ("int6:group=32", "pack-quantized", "float16", "float16", "weights"),
    ("int8", "pack-quantized", "float16", "float16", "weights"),
    ("int8@int8", "int-quantized", "", "", "tokens"),
    ("fp8", "naive-quantized", "float32", "float32", "weights"),
    ("fp8@fp8", "float-quantized", "", "", "tokens"),
    ("nvfp4:divide", "nvfp4-pack-quantized", "bfloat16", "wrong", "weights"),
    ("mxfp4", "mxfp4-pack-quantized", "bfloat16", "bfloat16", "weights"),
    ("mxfp6", "mxfp6-pack-quantized", "bfloat16", "bfloat16", ""),
    ("mxfp8", "mxfp8-quantized", "bfloat16", "", "weights"),
)

NOTED = {"int4:group=32@int8"}  # with a note of what vLLM does


def mixture(directory: Path) -> Path:
    """A block of a Qwen3 with 3 random experts."""
    torch.manual_seed(0)
    sizes = {**tiny.SIZES, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 16}
    sizes["num_hidden_layers"] = 1
    config = Qwen3MoeConfig(num_experts=3, num_experts_per_tok=2, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixture(tmp_path_factory.mktemp("moe"))


def exported(source: Path, plan: Any, folder: Path) -> Exported:
    quantize_checkpoint(source, folder / "ours", plan)
    return export_checkpoint(folder / "ours", folder / "theirs")


def weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Of the linear layers of a model of transformers, experts apart."""
    for name, tensor in model.state_dict().items():
        layer, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for i, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                yield from ((f"{layer}.{i}.gate_proj", gate), (f"{layer}.{i}.up_proj", up))
        elif last == "down_proj":
            yield from ((f"{layer}.{i}.down_proj", expert) for i, expert in enumerate(tensor))
        elif last == "weight":
            yield layer, tensor


def greedy(model: Any) -> list[int]:
    ids = torch.arange(3, 15)[None]
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    return list(model.generate(ids, min_new_tokens=12, max_new_tokens=12, **options)[0].tolist())


@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_transformers_has_the_same_weights(
    row: tuple[str, ...], kind: str, moe: Path, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    dtype = row[2] if kind == "dense" else row[3]
    report = exported(tiny.dense(tmp_path / "dense") if kind == "dense" else moe, row[0], tmp_path)
    assert set(report.layers) == {row[1]}
    assert bool(report.notes) == (dtype == "wrong" or row[0] in NOTED)
    if not dtype:
        return
    precision = getattr(torch, dtype, torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=precision).eval()
    tokens = greedy(theirs)  # it decodes dense layers in the first pass
    found = dict(weights(theirs))
    ours = anybit.load(tmp_path / "ours", dtype=precision)
    layers = dict(quantized_layers(ours))
    assert len(layers) > 10
    for name, layer in layers.items():
        same = torch.equal(found[name], layer.dequantize().to(precision))
        assert same == (dtype != "wrong" or "experts" not in name), name
    if kind == "dense" and dtype != "bfloat16":  # in which random weights have equal logits
        assert tokens == greedy(ours)


def table() -> str:
    equal = {"": "-", "wrong": "**others**", "bfloat16": "bf16"}
    equal |= {"float16": "equal", "float32": "equal"}
    rows: dict[tuple[str, ...], list[str]] = {}
    for spec, written, dense, experts, engine in ROWS:
        cells = (f"`{written}`", equal[dense], equal[experts], engine or "-")
        rows.setdefault(cells, []).append(f"`{spec}`")
    lines = [
        "| format | written as | transformers | experts there | vLLM |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {' '.join(specs)} | {' | '.join(cells)} |" for cells, specs in rows.items()]
    return "\n".join(lines)


def test_the_page_has_this_table() -> None:
    text = PAGE.read_text()
    begin = text.index(BEGIN) + len(BEGIN)
    assert text[begin : text.index(END, begin)].strip() == table()


HEADS = {"*": "int4:group=32", "*embed_tokens": "int8:group=32", "lm_head": "int8:group=32"}


@pytest.mark.parametrize("tied", [True, False])
def test_heads_and_embeddings_have_groups_of_their_own(tied: bool, tmp_path: Path) -> None:
    """Engines have other classes for them than `Linear`; a tied head gets a copy of the codes."""
    report = exported(tiny.dense(tmp_path / "dense", tied=tied), HEADS, tmp_path)
    assert not report.notes
    config = read_json(report.out / "config.json")
    assert config["tie_word_embeddings"] is False
    groups = [*config["quantization_config"]["config_groups"].values()]
    named = next(g for g in groups if g["weights"]["num_bits"] == 8)["targets"]
    assert "model.embed_tokens" in named
    assert any(re.match(t[3:], "language_model.lm_head") for t in named if t.startswith("re:"))
    assert groups[-1]["targets"] == ["Linear"]
    convert_checkpoint(report.out, tmp_path / "back")
    want, back = anybit.load(tmp_path / "ours"), anybit.load(tmp_path / "back")
    assert torch.equal(tiny.logits(want), tiny.logits(back))


def test_experts_are_one_target(moe: Path, tmp_path: Path) -> None:
    """By which transformers decodes them, whatever other layers have."""
    pytest.importorskip("compressed_tensors")
    plan = {"*": "int4:group=32", "*.self_attn.*": "int8:group=32", "*.experts.*": "int3:group=32"}
    report = exported(moe, plan, tmp_path)
    groups = read_json(report.out / "config.json")["quantization_config"]["config_groups"]
    (targets,) = [g["targets"] for g in groups.values() if g["weights"]["num_bits"] == 3]
    assert targets == [r"re:.*\.experts\.\d+\.", "Linear"]
    theirs = AutoModelForCausalLM.from_pretrained(report.out, dtype=torch.float16)
    found = dict(weights(theirs))
    for name, layer in quantized_layers(anybit.load(tmp_path / "ours", dtype=torch.float16)):
        if "experts" in name:
            assert torch.equal(found[name], layer.dequantize().half()), name


@pytest.mark.parametrize(
    ("plan", "note"),
    [
        ({"*": "int4", "*q_proj": "int8"}, r"2, the first is model.layers.0.self_attn.q_proj\+k"),
        ({"*": "int4", "*up_proj": None}, r"first is model.layers.0.mlp.gate_proj\+up_proj"),
        ({"*": "int4", "*embed_tokens": "int3:group=32"}, "no embeddings in int3:group=32"),
        (
            {"*": "int4@int8"},
            "int8 activations, such as model.layers.0.*, from 0.26 on, but not in e",
        ),
        ({"*": "int3:group=32@int8", "*o_proj": "int8@int8"}, "only its humming kernels round"),
        ({"*": "int4", "*embed_tokens": "int4:zero"}, "no embeddings in int4:zero"),
    ],
)
def test_what_vllm_does_not_read_is_told(
    plan: dict[str, str | None], note: str, tmp_path: Path
) -> None:
    report = exported(tiny.dense(tmp_path / "dense"), plan, tmp_path)
    (found,) = report.notes
    assert re.search(note, found)
    assert f"\nnote: {found}" in str(report)


def test_experts_of_different_formats_are_told(moe: Path, tmp_path: Path) -> None:
    report = exported(moe, {"*": "int4", "*.experts.1.*": "int8"}, tmp_path)
    assert re.search(r"1, the first is model.layers.0.mlp.experts;", report.notes[0])


if __name__ == "__main__":
    text = PAGE.read_text()
    begin = text.index(BEGIN) + len(BEGIN)
    PAGE.write_text(f"{text[:begin]}\n\n{table()}\n\n{text[text.index(END, begin) :]}")
