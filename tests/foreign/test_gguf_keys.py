"""GGUF files: keys that change nothing, and what llama.cpp takes where there is none."""

from pathlib import Path
from typing import Any

import pytest

from anybit.checkpoint.foreign.convert import convert_checkpoint
from anybit.errors import InvalidInput
from anybit.files.directory import read_json
from tests.foreign import gguf_models
from tests.foreign.gguf_models import tiny, write


@pytest.mark.parametrize(
    ("key", "value", "known"),
    [
        ("logit_scale", 1.0, True),
        ("logit_scale", 0.0, True),
        ("logit_scale", 2.0, False),
        ("expert_weights_norm", False, True),
        ("some.switch", False, False),  # nobody knows what it is without the key
        ("rope.scaling.yarn_ext_factor", 0.0, True),  # of positions that are not stretched
        ("rope.scaling.yarn_ext_factor", 1.0, True),
        ("rope.scaling.yarn_ext_factor", -1.0, True),
        ("rope.scaling.yarn_attn_factor", 1.0, True),
        ("rope.scaling.yarn_attn_factor", 0.0, False),
        ("rope.scaling.yarn_attn_factor", 2.0, False),
        ("rope.scale_linear", 1.0, True),
        ("rope.scale_linear", 2.0, False),
        ("rope.scaling.factor", 0.0, True),
        ("attention.clamp_kqv", 0.0, True),
        ("attention.causal", 1, False),
    ],
)
def test_values_that_change_nothing_are_known_by_key(
    tmp_path: Path, key: str, value: Any, known: bool
) -> None:
    write(tiny("llama"), tmp_path / "model.gguf", {"ffn": "Q8_0"}, {key: value})
    if known:
        convert_checkpoint(tmp_path / "model.gguf", tmp_path / "out")
        return
    with pytest.raises(InvalidInput, match=f"llama.{key} is "):
        convert_checkpoint(tmp_path / "model.gguf", tmp_path / "out")


def test_what_llama_cpp_has_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of 4096 in Gemma 2; no default of the norms' epsilon."""
    keys = gguf_models.keys

    def without(name: str) -> None:
        def some(config: Any, arch: str) -> dict[str, Any]:
            return {k: v for k, v in keys(config, arch).items() if k != name}

        monkeypatch.setattr(gguf_models, "keys", some)

    without("attention.sliding_window")
    write(tiny("gemma2"), tmp_path / "a.gguf", {"ffn": "Q8_0"})
    convert_checkpoint(tmp_path / "a.gguf", tmp_path / "out")
    assert read_json(tmp_path / "out/config.json")["sliding_window"] == 4096
    without("attention.layer_norm_rms_epsilon")
    write(tiny("llama"), tmp_path / "b.gguf", {"ffn": "Q8_0"})
    with pytest.raises(InvalidInput, match=r"has no attention\.layer_norm_rms_epsilon"):
        convert_checkpoint(tmp_path / "b.gguf", tmp_path / "other")
