"""`rotate_`: rotations folded into a dense model's weights."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

import anybit
from anybit.core.rotation import hadamard, signs
from anybit.errors import Unsupported
from anybit.quantizers import fold
from tests.tiny import SIZES, llama, logits, same_state

MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FOLDS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "decoder_sparse_step": 2, **MOE},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 48, **MOE},
    "phi3": {"attention_bias": True},
    "deepseek_v3": {
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        **MOE,
    },
    "granite": {"residual_multiplier": 0.5, "embedding_multiplier": 3.0},
}
REFUSED: dict[str, str] = {
    "gemma": "compute something else",  # gains are 1 + weight
    "olmo2": "no input_layernorm.weight",  # norms after attention and MLP
    "olmo": "no input_layernorm.weight",  # LayerNorm without weights
    "cohere": "no post_attention_layernorm.weight",  # side by side, with LayerNorm
    "opt": "no model.embed_tokens",
    "gpt2": "no model.embed_tokens",
    "gpt_oss": "experts",
}


def made(kind: str, **changes: Any) -> Any:
    """A tiny random model in fp32, with gains and biases that are not their defaults."""
    torch.manual_seed(0)
    kinds: Any = transformers.AutoConfig
    options: dict[str, Any] = {**SIZES, "pad_token_id": None, **changes}
    if kind in ("gpt_oss",):
        options |= {"num_local_experts": 4, "head_dim": 16}
    model = AutoModelForCausalLM.from_config(kinds.for_model(kind, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.rand_like(parameter))
    return model


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().norm() / b.detach().norm())


@pytest.mark.parametrize("kind", FOLDS)
def test_rotated_models_compute_what_they_did(kind: str) -> None:
    model = made(kind, **FOLDS[kind])
    before, dense = logits(model), copy.deepcopy(model)
    assert anybit.rotate_(model) is model
    assert difference(logits(model), before) < 1e-5
    for name, parameter in model.named_parameters():
        if (
            name.endswith(("input_layernorm.weight", "attention_layernorm.weight"))
            or name == "model.norm.weight"
        ):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
    embeddings = [m.get_input_embeddings().weight for m in (dense, model)]
    assert difference(*embeddings) > 0.5


def test_outliers_of_the_stream_are_gone() -> None:
    model = llama(dtype=torch.float32)
    with torch.no_grad():
        for block in model.model.layers:  # a channel of the stream, as large models have them
            block.mlp.down_proj.weight[5] *= 100
        model.model.embed_tokens.weight[:, 5] *= 100
        model.model.layers[1].self_attn.v_proj.weight[3] *= 100
    peaks = []
    for _ in range(2):
        seen: dict[str, float] = {}

        def watch(module: nn.Module, args: Any, name: str, seen: dict[str, float] = seen) -> None:
            seen[name] = float(args[0].abs().max() / args[0].square().mean().sqrt())

        handles = [
            model.model.layers[1]
            .get_submodule(name)
            .register_forward_pre_hook(lambda m, a, name=name: watch(m, a, name))
            for name in ("self_attn.q_proj", "mlp.up_proj", "self_attn.o_proj")
        ]
        logits(model)
        for handle in handles:
            handle.remove()
        peaks.append(dict(seen))
        anybit.rotate_(model)
    assert all(peaks[1][name] < peaks[0][name] / 2 for name in peaks[0]), peaks


@pytest.mark.parametrize("size", [16, 48, 128, 256, 384, 1024])
def test_blocks_are_the_largest_that_divide(size: int) -> None:
    block = size & -size
    h = torch.block_diag(*[hadamard(block)] * (size // block))
    x = torch.randn(3, size)
    assert torch.allclose(fold.turned(x), (x * signs(size)) @ h, atol=1e-5)


def test_tied_heads_get_their_own_weight_and_checkpoints_are_plain(tmp_path: Path) -> None:
    model = llama(tied=True, dtype=torch.float32)
    before = logits(model)
    anybit.rotate_(model)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "dense")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert difference(logits(again), before) < 1e-5
    anybit.quantize_(model, {"*": "int8", "*.down_proj": "int8:rotate=k"})
    expected = logits(model)
    anybit.save(model, tmp_path / "packed")
    assert difference(logits(anybit.load(tmp_path / "packed")), expected) < 1e-5
    assert difference(expected, before) < 0.05


@pytest.mark.parametrize("kind", REFUSED)
def test_other_models_are_refused_unchanged(kind: str) -> None:
    model = made(kind)
    before = copy.deepcopy(model)
    with pytest.raises(Unsupported, match=REFUSED[kind]):
        anybit.rotate_(model)
    same_state(model, before)


def shared_block(model: Any) -> None:
    model.model.layers[1] = model.model.layers[0]


def shared_mlp(model: Any) -> None:
    model.model.layers[1].mlp = model.model.layers[0].mlp


def another_norm_in_one_block(model: Any) -> None:
    norm = nn.LayerNorm(model.config.hidden_size, bias=False)
    model.model.layers[1].post_attention_layernorm = norm


def another_norm_at_the_end(model: Any) -> None:
    model.model.norm = GemmaRMSNorm(model.config.hidden_size)


def more_than_embeddings(model: Any) -> None:
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: out + 1)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (shared_block, "share modules"),
        (shared_mlp, "share modules"),
        (another_norm_in_one_block, "compute something else"),
        (another_norm_at_the_end, "logits become others"),
        (more_than_embeddings, "logits become others"),
    ],
)
def test_unusual_parts_are_refused(spoil: Callable[[Any], None], reason: str) -> None:
    model = made("llama")
    spoil(model)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(Unsupported, match=reason):
        anybit.rotate_(model)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_blocks_that_add_little_are_tried_as_well() -> None:
    """Gemma's gains are 1 + weight; next to the residual stream its blocks hardly count here."""
    model = made("gemma", initializer_range=0.005)
    with pytest.raises(Unsupported, match="compute something else"):
        anybit.rotate_(model)


def test_the_default_dtype_does_not_matter() -> None:
    model = made("llama")
    before = logits(model)
    torch.set_default_dtype(torch.bfloat16)
    try:
        anybit.rotate_(model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert difference(logits(model), before) < 1e-5


def test_quantized_models_and_empty_ones_are_refused() -> None:
    model = llama()
    anybit.quantize_(model, "int8")
    with pytest.raises(Unsupported, match="rotate the dense one"):
        anybit.rotate_(model)
    with torch.device("meta"):
        empty = llama()
    with pytest.raises(Unsupported, match="no weights yet"):
        anybit.rotate_(empty)


def test_an_interrupt_leaves_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(tied=True)
    before, state = logits(model), copy.deepcopy(model)

    def interrupted(base: Any) -> None:
        if base is model.model:
            raise KeyboardInterrupt
        real(base)

    real = fold.rotate_blocks
    monkeypatch.setattr(fold, "rotate_blocks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        anybit.rotate_(model)
    same_state(model, state)
    assert torch.equal(logits(model), before)
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_channels_of_values_are_as_large_as_their_readers() -> None:
    """A channel of values that is large, and read by small weights, is no outlier then."""
    plain, model = llama(dtype=torch.float32), llama(dtype=torch.float32)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.v_proj.weight[3] *= 64
        attention.o_proj.weight[:, [3, 19]] /= 64  # of both heads that read it
        before = logits(model)
    assert difference(before, logits(plain)) < 1e-5
    anybit.rotate_(model), anybit.rotate_(plain)
    assert difference(logits(model), before) < 1e-5
    weights = [m.model.layers[0].self_attn.v_proj.weight for m in (model, plain)]
    assert torch.allclose(*weights, atol=1e-6)
