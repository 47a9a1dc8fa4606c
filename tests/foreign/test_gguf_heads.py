"""Heads for further tokens in GGUF files: what they guess is what those of the source guess."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from anybit.checkpoint.foreign.convert import convert_checkpoint
from anybit.engine.llm import LLM
from anybit.errors import InvalidInput
from anybit.files.directory import read_json
from tests.engine.conftest import prompts
from tests.engine.test_mtp import WHOLE, watched
from tests.engine.test_speculation import drafting
from tests.foreign.gguf_hybrids import HYBRIDS
from tests.foreign.gguf_models import MODELS, NEXT, tiny, write
from tests.needs import pairs

KINDS = ("glm4_moe", "deepseek_v3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
CODES = {"attn_(q|k|v|output)\\.": "Q4_K", "ffn_(gate|up|down)": "Q6_K", "eh_proj": "Q8_0"}


def head_like(model: Any, qwen: bool) -> dict[str, Tensor]:
    """A random head as the model's last layer, with norms to which 1 is added without rounding."""
    layers, size = model.config.num_hidden_layers, model.config.hidden_size
    random = torch.Generator().manual_seed(7)
    like, at = f"model.layers.{layers - 1}.", "mtp" if qwen else f"model.layers.{layers}"
    layer = "mtp.layers.0." if qwen else f"{at}."

    def drawn(shape: torch.Size) -> Tensor:
        numbers = torch.randn(shape, generator=random) * 0.15
        return (numbers * 1024).round() / 1024 if len(shape) == 1 else numbers

    state = model.state_dict().items()
    out = {n.replace(like, layer): drawn(t.shape) for n, t in state if n.startswith(like)}
    names = [*NEXT][:4] if qwen else ["eh_proj", "enorm", "hnorm", "shared_head.norm"]
    shapes = [(size, 2 * size), (size,), (size,), (size,)]
    return out | {
        f"{at}.{name}.weight": drawn(torch.Size(s)) for name, s in zip(names, shapes, strict=True)
    }


def written(name: str, directory: Path, kinds: dict[str, str]) -> tuple[Path, dict[str, Tensor]]:
    """A model with a head, in a file and as transformers has it."""
    model, qwen = tiny(name), name.startswith("qwen")
    head = head_like(model, qwen)
    arch = (MODELS | HYBRIDS)[name][0]
    write(model, directory / "a.gguf", kinds, arch=arch, head=head)
    source = directory / "source"
    model.save_pretrained(source)
    tensors = load_file(source / "model.safetensors") | head
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    return source, head


def guessed(directory: Path) -> list[tuple[list[int], list[int]]]:
    """Texts, and what a head guesses behind them."""
    options: Any = {"dtype": "float32", "device": "cpu", "kv_cache": "model", "length": 64}
    llm = drafting(LLM(directory, draft="mtp", kv_bytes=1 << 22, **options))
    seen = watched(llm)
    llm.generate(prompts(3, longest=20, vocabulary=90), WHOLE)
    return seen


@pytest.mark.parametrize(("name", "kinds"), pairs(KINDS, [{}, CODES]))
def test_heads_guess_as_those_of_the_source(name: str, kinds: Any, tmp_path: Path) -> None:
    source, head = written(name, tmp_path, kinds)
    report = convert_checkpoint(tmp_path / "a.gguf", tmp_path / "out")
    assert "0 tensors dropped" in str(report)
    assert len(seen := guessed(tmp_path / "out")) > 0
    assert seen == guessed(source)
    counts = {read_json(tmp_path / "out/config.json").get(key) for key in
              ("num_nextn_predict_layers", "mtp_num_hidden_layers")}  # fmt: skip
    assert 1 in counts
    if not kinds:
        stored = load_file(tmp_path / "out/model.safetensors")
        for key, tensor in head.items():
            assert ".experts." in key or torch.equal(stored[key], tensor), key


def test_a_head_that_lacks_a_part_is_left_out_and_named(tmp_path: Path) -> None:
    model = tiny("glm4_moe")
    more = {"block_count": model.config.num_hidden_layers + 1, "nextn_predict_layers": 1}
    name = "blk.2.nextn.eh_proj.weight"
    extra = {name: np.ones((256, 512), np.float32)}
    write(model, tmp_path / "a.gguf", {"ffn_down": "Q8_0"}, more, extra)
    report = convert_checkpoint(tmp_path / "a.gguf", tmp_path / "out")
    assert [*report.dropped] == [name]
    assert f"1 tensors dropped, such as {name}: of a head for further tokens" in str(report)


def test_a_head_whose_layer_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    model = tiny("glm4_moe")
    head = head_like(model, qwen=False)
    del head["model.layers.2.self_attn.q_proj.weight"]
    write(model, tmp_path / "a.gguf", {}, head=head)
    with pytest.raises(
        InvalidInput, match=r"no tensor blk\.2\.attn_q\.weight for model\.layers\.2"
    ):
        convert_checkpoint(tmp_path / "a.gguf", tmp_path / "out")
