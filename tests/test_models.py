"""A dozen architectures, each of another kind: right, or refused. `make test-models` has all."""

from pathlib import Path

import pytest

import anybit
from anybit.checkpoint.stream import quantize_checkpoint
from tests.models.page import BEGIN, END, counts, write
from tests.models.row import Row, Wrong, outcome, rows
from tests.models.zoo import Model
from tests.tiny import same_state

STEPS = ("memory", "load", "from_pretrained", "stream")
DOZEN = {
    "LlamaForCausalLM": "plain",
    "GPT2LMHeadModel": "Conv1D",
    "Qwen3MoeForCausalLM": "experts",
    "GptOssForCausalLM": "experts that are transposed, biased and interleaved",
    "Llama4ForCausalLM": "experts that are transposed, and a router with a forward of its own",
    "DeepseekV3ForCausalLM": "latent attention",
    "Gemma3ForCausalLM": "sliding windows",
    "Gemma3ForConditionalGeneration": "an image tower whose head is nn.MultiheadAttention",
    "LlavaForConditionalGeneration": "stored under other names",
    "Mistral3ForConditionalGeneration": "stored under other names, image sizes",
    "MambaForCausalLM": "reads the weight of its layers",
    "JambaForCausalLM": "hybrid with experts",
    "BambaForCausalLM": "hybrid",
    "T5ForConditionalGeneration": "encoder and decoder",
    "WhisperForConditionalGeneration": "encoder and decoder, audio, a tied head of another name",
    "BertForMaskedLM": "encoder, a tied head of another name",
    "Wav2Vec2ForPreTraining": "resets its layers' parameters while it is loaded",
}
# transformers does not run the tiny forms of these.
FILES_ALONE = {"Ernie4_5_VLMoeModel": "experts of text and of images, stored as one list"}


@pytest.mark.parametrize("architecture", DOZEN)
def test_is_right_or_refused(architecture: str, tmp_path: Path) -> None:
    *_, row = rows(architecture, tmp_path, STEPS)
    assert row.unable is None
    assert row.cells.keys() == set(STEPS)
    assert "wrong" not in row.cells.values(), row.notes


@pytest.mark.parametrize("architecture", FILES_ALONE)
def test_every_way_gives_the_same_tensors(architecture: str, tmp_path: Path) -> None:
    model = Model(architecture)
    model.make().save_pretrained(tmp_path / "source")
    want = anybit.quantize_(model.type.from_pretrained(tmp_path / "source"), "fp6")
    anybit.save(want, tmp_path / "saved")
    quantize_checkpoint(tmp_path / "source", tmp_path / "streamed", "fp6")
    config = anybit.AnybitConfig("fp6")
    same_state(anybit.load(tmp_path / "saved"), want)
    same_state(anybit.load(tmp_path / "streamed"), want)
    same_state(model.type.from_pretrained(tmp_path / "source", quantization_config=config), want)


def test_what_is_wrong_is_called_so() -> None:
    def lost() -> None:
        raise Wrong("another result")

    def bug() -> None:
        raise ValueError("not of anybit")

    assert outcome(lambda: None) == ("equal", None)
    assert outcome(lost) == ("wrong", "another result")
    assert outcome(bug)[0] == "wrong"


def test_page(tmp_path: Path) -> None:
    found = [
        Row("LlamaForCausalLM", 1.0, {"memory": "equal", "load": "equal"}),
        Row("BertForMaskedLM", None, {"memory": "refused", "load": "-"}, {"memory": "a tie"}),
        Row("DbrxForCausalLM", unable="no rope_theta"),
    ]
    assert counts(found) == {"equal": 1, "refused": 1, "not tried": 1}
    page = tmp_path / "models.md"
    page.write_text(f"# Models\n\n{BEGIN}\nold\n{END}\nMore.\n")
    write(found, ["memory", "load"], page)
    text = page.read_text()
    assert "| quantized in memory | 1 | 1 | 0 | 0 |" in text
    assert "old" not in text
    rows = (tmp_path / "models.csv").read_text().splitlines()
    assert "LlamaForCausalLM,yes,100%,equal,equal," in rows
    assert "BertForMaskedLM,yes,,refused,-,memory: a tie" in rows
    assert any("no rope_theta" in row for row in rows)
