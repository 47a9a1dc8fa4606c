"""llama.cpp's mixtures of formats by name."""

import logging
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from anybit.checkpoint.stream import quantize_checkpoint
from anybit.cli.options import plan_for
from anybit.nn.mixes import Where, format_in
from anybit.nn.model import linear_schemes
from anybit.quantizers.quantize import quantize_

SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}


def tiny(width: int = 512, layers: int = 8) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(intermediate_size=width, num_hidden_layers=layers, **SIZES)  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("mixture", "kind", "more", "special"),
    [
        ("q4_k_m", "v_proj", "q6_k", [0, 1, 2, 3, *range(6, 28, 3), 28, 29, 30, 31]),
        ("q5_k_m", "down_proj", "q6_k", [0, 1, 2, 3, *range(6, 28, 3), 28, 29, 30, 31]),
        ("q4_k_s", "v_proj", "q5_k", [0, 1, 2, 3]),
        ("q4_k_s", "down_proj", "q5_k", [0, 1, 2, 3]),
        ("q3_k_m", "v_proj", "q5_k", [0, 1]),
        ("q3_k_m", "down_proj", "q5_k", [0, 1]),
        ("q3_k_l", "o_proj", "q5_k", [*range(32)]),
        ("q5_k_s", "v_proj", "q6_k", []),
        ("q4_k_m", "q_proj", "q6_k", []),
    ],
)
def test_which_layers_get_more_bits(mixture: str, kind: str, more: str, special: list[int]) -> None:
    found = [format_in(mixture, Where(kind, i, 32, 0, False)) for i in range(32)]
    assert [i for i, name in enumerate(found) if name == more] == special
    rest = {name for name in found if name != more}
    assert rest <= {"q4_k" if mixture == "q3_k_m" else mixture[:4]}
    large = format_in("q4_k_s", Where("v_proj", 40, 80, 0, True))
    eight = format_in("q4_k_m", Where("v_proj", 5, 32, 8, False))
    assert (large, eight) == ("q5_k", "q8_0")


def test_narrow_layers_fall_back(caplog: pytest.LogCaptureFixture) -> None:
    """Those whose width is no multiple of 256, or of 32; heads stay as they are."""
    with torch.device("meta"):
        model, odd = tiny(288), tiny(272)
    schemes = linear_schemes(model, "Q4_K_M")
    values = [schemes[f"model.layers.{i}.self_attn.v_proj"] for i in range(8)]
    down = [schemes[f"model.layers.{i}.mlp.down_proj"] for i in range(8)]
    more = [True, False, False, True, False, False, True, True]
    assert values == ["q6_k" if m else "q4_k" for m in more]
    assert down == ["int8:group=32" if m else "int5:group=32" for m in more]
    assert {s for n, s in schemes.items() if n[-6:] in ("q_proj", "p_proj")} <= {"q4_k"}
    assert "lm_head" not in schemes
    said = "q5_0 for q4_k, as in llama.cpp: 4 layers, whose width is no multiple of its block"
    assert said in caplog.text
    assert not any("down_proj" in name for name in linear_schemes(odd, "q4_k_m"))
    mixed = linear_schemes(model, {"*": "q4_k_m", "*.v_proj": "int8"})
    assert {s for n, s in mixed.items() if n.endswith("v_proj")} == {"int8"}


def test_a_mixture_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same by the command's plan, by files and in memory; the receipt counts formats."""
    caplog.set_level(logging.WARNING)
    model = tiny(288, 2)
    model.save_pretrained(tmp_path / "dense")
    plan = plan_for({"*": "Q4_K_M"}, lambda: model)
    report = quantize_checkpoint(tmp_path / "dense", tmp_path / "out", "Q4_K_M")
    assert report.schemes == linear_schemes(model, plan) == linear_schemes(model, "q4_k_m")
    assert "14 layers with" in str(report)
    assert "(11 q4_k, 1 int5:group=32, 1 q6_k, 1 int8:group=32)" in str(report)
    quantize_(model, "q4_k_m")
    assert plan_for({"*": "int4"}, lambda: pytest.fail("no model is asked for")) == {"*": "int4"}
