"""Models whose layers vLLM names, merges or orders otherwise than the files (`make test-vllm`)."""

import pytest
import torch
from torch.nn.functional import normalize
from transformers import (
    AutoModel,
    AutoTokenizer,
    BloomConfig,
    FalconConfig,
    GPT2Config,
    GraniteMoeConfig,
    OPTConfig,
    Phi3Config,
    Qwen3Config,
    Qwen3Model,
)

from anybit.checkpoint.foreign.export import export_checkpoint
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.errors import Unsupported
from tests.integrations.conftest import SIZES, made
from tests.integrations.generate import PICO, PROMPTS, by_transformers, by_vllm, engine

END = {"eos_token_id": 2}  # those of some configurations lie outside of this vocabulary
HEADS = {key: n for key, n in SIZES.items() if key != "num_key_value_heads"} | END
CONFIGS = {
    "bloom": BloomConfig(**(HEADS | {"num_attention_heads": 2})),
    "falcon": FalconConfig(
        **HEADS, num_kv_heads=2, new_decoder_architecture=True, alibi=False, bias=False
    ),
    "gpt2": GPT2Config(
        n_embd=128, n_layer=2, n_head=4, vocab_size=4100, initializer_range=0.2, **END
    ),
    "granitemoe": GraniteMoeConfig(**SIZES, **END, intermediate_size=192, num_local_experts=4),
    "opt": OPTConfig(**HEADS, ffn_dim=192, word_embed_proj_dim=128, init_std=0.2),
    "phi3": Phi3Config(**SIZES, **END, intermediate_size=192, pad_token_id=0),
}
PLAN = {"*": "int4:group=32", "*.0.*": "fp6", "*.1.*": "int8"}  # no merged layer has unlike parts


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_checkpoint(tmp_path, name, stored):
    """Stored in codes, and quantized while it is loaded, which gives the same codes."""
    source = made(CONFIGS[name], tmp_path / "source")
    quantize_checkpoint(source, tmp_path / "out", PLAN)
    options = {"quantization": "anybit", "hf_overrides": {"anybit": {"formats": PLAN}}}
    got = by_vllm(tmp_path / "out") if stored else by_vllm(source, **options)
    assert got == by_transformers(tmp_path / "out")


@pytest.mark.parametrize("stored", [True, False])
def test_base_model(tmp_path, stored):
    """Files whose names lack the base's prefix, as those of models for embeddings."""
    config = Qwen3Config(**SIZES, **END, intermediate_size=192, head_dim=32)
    torch.manual_seed(0)
    Qwen3Model(config).save_pretrained(tmp_path / "source")
    AutoTokenizer.from_pretrained(PICO).save_pretrained(tmp_path / "source")
    quantize_checkpoint(tmp_path / "source", tmp_path / "out", PLAN)
    model = AutoModel.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        last = [model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in PROMPTS]
    options = {"quantization": "anybit", "hf_overrides": {"anybit": {"formats": PLAN}}}
    path, options = (tmp_path / "out", {}) if stored else (tmp_path / "source", options)
    with engine(path, runner="pooling", **options) as llm:
        outputs = llm.embed([{"prompt_token_ids": ids} for ids in PROMPTS], use_tqdm=False)
    got = torch.tensor([output.outputs.embedding for output in outputs])
    torch.testing.assert_close(got, normalize(torch.stack(last)), rtol=0, atol=1e-4)


MOVED = r"query_key_value: vLLM puts the rows of this layer into another order, "


@pytest.mark.parametrize("plan", ["int4:group=32,rotate=k", "codebook:m=1,v=4"])
def test_tables_stay_where_vllm_moves_rows(tmp_path, plan):
    """Falcon's Q, K and V are interleaved in the files, and apart in vLLM."""
    quantize_checkpoint(made(CONFIGS["falcon"], tmp_path / "source"), tmp_path / "out", plan)
    assert by_vllm(tmp_path / "out") == by_transformers(tmp_path / "out")


def test_rows_that_need_others_are_not_moved(tmp_path):
    plan = "int4:group=32,rotate=kn"
    quantize_checkpoint(made(CONFIGS["falcon"], tmp_path / "source"), tmp_path / "out", plan)
    with pytest.raises(Unsupported, match=MOVED + f"which '{plan}' does not allow"):
        by_vllm(tmp_path / "out")


def test_what_belongs_to_columns_is_not_moved(tmp_path):
    """Bloom's loader would, where it can: of heads of 96, it reorders the signs of a rotation."""
    config = BloomConfig(**(HEADS | {"hidden_size": 192, "num_attention_heads": 2}))
    source = made(config, tmp_path / "source")
    quantize_checkpoint(source, tmp_path / "out", "int4:group=32,rotate=k")
    with pytest.raises(Unsupported, match=MOVED + "which 'int4:group=32,rotate=k' does not allow"):
        by_vllm(tmp_path / "out")


def test_rows_of_other_tools_layers_are_not_moved(tmp_path):
    """Ours come from the files, so vLLM would leave them in the files' order."""
    source = made(CONFIGS["falcon"], tmp_path / "source")
    quantize_checkpoint(source, tmp_path / "ours", "int4:group=32")
    export_checkpoint(tmp_path / "ours", tmp_path / "theirs")
    with pytest.raises(Unsupported, match=MOVED + "as only a checkpoint of anybit allows"):
        by_vllm(tmp_path / "theirs", quantization="anybit")
