"""Models whose layers vLLM names, merges or orders otherwise than the files (`make test-vllm`)."""

from importlib.util import find_spec

import pytest
import torch
import vllm
from PIL import Image
from torch import nn
from torch.nn.functional import normalize
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    FalconH1Config,
    Gemma3Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    LlavaOnevisionConfig,
    OPTConfig,
    PaliGemmaConfig,
    Phi3Config,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Config,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3Model,
    Qwen3NextConfig,
    SiglipVisionConfig,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from anybit.checkpoint.foreign.export import export_checkpoint
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.errors import Unsupported
from tests.integrations.conftest import SIZES, made
from tests.integrations.generate import (
    PICO,
    PROMPTS,
    TOKENS,
    by_transformers,
    by_vllm,
    engine,
    judge,
    model_of,
)
from tests.integrations.test_vllm_engine import quantized_and_decoded

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
    # Their mixers have paths in vLLM's names, and numbers, that no tensor has.
    "falcon_h1": FalconH1Config(
        **(SIZES | {"head_dim": 32}), **END, intermediate_size=192, mamba_n_heads=8,
        mamba_d_head=32, mamba_d_ssm=256, mamba_d_state=32, mamba_n_groups=1,
    ),
    "granitemoehybrid": GraniteMoeHybridConfig(
        **SIZES, **END, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=192, layer_types=["mamba", "attention"], mamba_n_heads=8,
        mamba_d_head=32, mamba_d_state=32, mamba_n_groups=1, position_embedding_type="rope",
    ),
    "granitemoe": GraniteMoeConfig(**SIZES, **END, intermediate_size=192, num_local_experts=4),
    "opt": OPTConfig(**HEADS, ffn_dim=192, word_embed_proj_dim=128, init_std=0.2),
    "phi3": Phi3Config(**SIZES, **END, intermediate_size=192, pad_token_id=0),
}  # fmt: skip
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


DELTA = {
    "head_dim": 32, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"], "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
DELTAS = {
    "qwen3_next": Qwen3NextConfig(
        **(SIZES | END | DELTA), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    ),
    "qwen3_5": Qwen3_5TextConfig(**(SIZES | END | DELTA), intermediate_size=192),
}  # fmt: skip
needs_torchvision = pytest.mark.skipif(not find_spec("torchvision"), reason="needs torchvision")


@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("qwen3_5", marks=needs_torchvision)])
def test_delta_rule(tmp_path, name):
    """vLLM divides Qwen 3.5's Q, K and V, one layer, and adds Z. On a CPU it demands bf16."""
    source = made(DELTAS[name], tmp_path / "source")
    plan = {"*": "int4:group=32", "*.in_proj_qkv*": "codebook:m=1,v=4", "*.out_proj": "fp6"}
    quantize_checkpoint(source, tmp_path / "out", plan)
    got = by_vllm(tmp_path / "out", dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    judge(model, got, likeliest=0.8)


def test_latent_attention(tmp_path):
    """DeepSeek's, with merged layers of unlike parts and many experts.

    On a CPU, vLLM attends otherwise than transformers, without us too: so it runs both, by the
    attention that takes fp32 (that for AMX, which it prefers on such a CPU, takes bf16 only).
    """
    config = DeepseekV3Config(
        **(SIZES | END | {"num_key_value_heads": 4, "topk_method": "noaux_tc"}),
        intermediate_size=192, moe_intermediate_size=64, q_lora_rank=64, kv_lora_rank=512,
        qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32, n_routed_experts=16,
        num_experts_per_tok=4, n_group=2, topk_group=1, first_k_dense_replace=1,
    )  # fmt: skip
    source = made(config, tmp_path / "source")
    plan = {"*": "int4:group=32", "*.q_a_proj": "int8", "*.down_proj": "fp6"}
    quantized_and_decoded(source, tmp_path, plan)
    fp32 = {"attention_config": {"backend": "CPU_MLA"}}
    assert by_vllm(tmp_path / "codes", **fp32) == by_vllm(tmp_path / "decoded", **fp32)


@needs_torchvision
def test_pictures(tmp_path):
    """A language model in 4 bits, and the tower that reads pictures in 8."""
    marks = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    tokenizer.add_special_tokens({"additional_special_tokens": [*marks]})
    first = tokenizer.convert_tokens_to_ids(marks[0])
    parts = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6]}
    config = Qwen2_5_VLConfig(
        text_config=SIZES | END | {"intermediate_size": 192, "rope_scaling": rope},
        vision_config={
            "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2,
            "out_hidden_size": 128, "fullatt_block_indexes": [1], "initializer_range": 0.2,
        },
        **{part: first + at for at, part in enumerate(parts)},
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "source")
    processor = Qwen2_5_VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor())
    processor.save_pretrained(tmp_path / "source")
    plan = {"*": "int4:group=32", "*.visual.*": "int8"}
    quantize_checkpoint(tmp_path / "source", tmp_path / "out", plan)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        tmp_path / "out", dtype=torch.float32
    ).eval()
    text = f"{marks[2]}{marks[0]}{marks[3]}def main("
    picture = Image.linear_gradient("L").resize((56, 84)).convert("RGB")
    given = processor(text=[text], images=[picture], return_tensors="pt")
    options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    wanted = model.generate(**given, **options)[0, given["input_ids"].shape[1] :].tolist()
    with engine(tmp_path / "out", skip_mm_profiling=True) as llm:
        prompt = {"prompt": text, "multi_modal_data": {"image": picture}}
        sampling = vllm.SamplingParams(temperature=0, max_tokens=TOKENS, min_tokens=TOKENS)
        output = llm.generate([prompt], sampling, use_tqdm=False)[0]
    assert list(output.outputs[0].token_ids) == wanted


TEXT = SIZES | END | {"intermediate_size": 192, "head_dim": 32}
TOWER = SiglipVisionConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
    image_size=56, patch_size=14,
)  # fmt: skip
TOWERS = {
    # In the files, its layers lack a part of vLLM's names.
    "gemma3": Gemma3Config(
        text_config=Gemma3TextConfig(**TEXT), vision_config=TOWER, mm_tokens_per_image=4
    ),
    # vLLM does not know what its merged layers are made of, and has plain layers behind it.
    "llava_onevision": LlavaOnevisionConfig(
        text_config=Qwen2Config(**TEXT), vision_config=TOWER, image_grid_pinpoints=[[56, 56]]
    ),
    "paligemma": PaliGemmaConfig(
        text_config=GemmaConfig(**TEXT), vision_config=TOWER, projection_dim=128, hidden_size=128
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["paligemma", *(pytest.param(n, marks=needs_torchvision) for n in TOWERS if n != "paligemma")],
)
def test_towers(tmp_path, monkeypatch, name):
    """All layers are in codes; a tower and what follows it give transformers' numbers."""
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # of GPUs alone
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(TOWERS[name]).save_pretrained(tmp_path / "source")
    AutoTokenizer.from_pretrained(PICO).save_pretrained(tmp_path / "source")
    quantize_checkpoint(tmp_path / "source", tmp_path / "out", "int8")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32)
    x = torch.randn(1, 16, 64)  # a patch of 14 x 14 pixels each
    with torch.no_grad(), model_of(tmp_path / "out", tmp_path) as own:
        wanted = model.model.vision_tower.encoder(x).last_hidden_state
        got = own.vision_tower.vision_model.encoder(x, False)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
        after = model.model.multi_modal_projector(wanted)
        torch.testing.assert_close(own.multi_modal_projector(wanted), after, rtol=0, atol=1e-4)
        methods = [getattr(m, "quant_method", m) for m in own.modules()]
    dense = [m for m in methods if isinstance(m, nn.Linear | UnquantizedLinearMethod)]
    assert not dense


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
