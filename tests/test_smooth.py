"""Smoothing: the function stays, the error of quantized activations goes down."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

import anybit
from anybit import GPTQ, Clip, Smooth
from anybit.nn.linear import QuantLinear
from anybit.quantizers.base import Block
from anybit.quantizers.calibration.block_runner import BlockRunner
from anybit.quantizers.calibration.statistics import Statistics
from anybit.quantizers.smooth import PAIRS, candidates, centred, search

VOCAB = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
}
KINDS = ("amax", "mean_abs", "sample")


def make(config: type, model: type, **changes: Any) -> nn.Module:
    """A small random model whose norms have gains of very different sizes, as trained ones do."""
    torch.manual_seed(0)
    made = model(config(**SIZES | changes)).eval()
    for name, parameter in made.named_parameters():
        if parameter.ndim == 1 and "layernorm" in name:
            parameter.data *= torch.rand_like(parameter) + 0.5
            parameter.data[::16] *= 12
        if "bias" in name:
            parameter.data.normal_(std=0.1)
    return made


def llama(**changes: Any) -> nn.Module:
    return make(LlamaConfig, LlamaForCausalLM, **changes)


def tokens(samples: int = 16) -> Tensor:
    return torch.randint(1, VOCAB, (samples, 32), generator=torch.Generator().manual_seed(1))


def smooth_only(model: nn.Module, spec: str = "int4@int8") -> dict[str, int]:
    """Apply `transform` to every block; returns how often each parameter's name was changed."""
    blocks = list(model.model.layers)
    replay, changed = BlockRunner(model, blocks, tokens()), {}
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        for index, block in enumerate(blocks):
            schemes = {n: spec for n, m in block.named_modules() if isinstance(m, nn.Linear)}
            before = dict(block.named_parameters())
            seen = replay.collect(index, schemes, KINDS)
            after = Smooth().transform(Block(block, schemes, seen, partial(replay.output, index)))
            for name, parameter in block.named_parameters():
                if not torch.equal(parameter, before[name]):
                    changed[name] = changed.get(name, 0) + 1
            again = replay.collect(index, schemes, KINDS)
            for name, statistics in after.items():
                for kind in KINDS:
                    a, b = getattr(statistics, kind).float(), getattr(again[name], kind).float()
                    assert float((a - b).norm() / b.norm()) < 8 * torch.finfo(dtype).eps ** 0.75
            replay.advance(index)
    return changed


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama with biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "gemma2": lambda: make(Gemma2Config, Gemma2ForCausalLM, head_dim=16),
    "phi3": lambda: make(Phi3Config, Phi3ForCausalLM),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore:Smooth left post_attention_layernorm")  # Gemma's is another
def test_function_is_kept(name: str) -> None:
    model = ARCHITECTURES[name]()
    with torch.no_grad():
        want = model(tokens()).logits
        assert "input_layernorm.weight" in smooth_only(model)
        got = model(tokens()).logits
    assert float((got - want).norm() / want.norm()) < 1e-4


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore:Smooth left post_attention_layernorm")
def test_bf16_strays_no_further_than_bf16_does(name: str) -> None:
    make_model = ARCHITECTURES[name]
    model = make_model().bfloat16()
    with torch.no_grad():
        exact = make_model()(tokens()).logits
        own = float((model(tokens()).logits.float() - exact).norm())
        assert "input_layernorm.weight" in smooth_only(model)
        smoothed = float((model(tokens()).logits.float() - exact).norm())
    # Every folded weight is rounded to bf16 once more, so the error grows by sqrt(2) at most.
    assert smoothed < 1.5 * own


def test_all_pairs_of_a_llama_are_folded() -> None:
    changed = smooth_only(llama())
    want = {"input_layernorm", "post_attention_layernorm"}
    want |= {f"self_attn.{n}_proj" for n in "qkvo"} | {
        f"mlp.{n}_proj" for n in ("gate", "up", "down")
    }
    assert set(changed) == {f"{name}.weight" for name in want}


def test_norm_with_other_readers_is_left_alone() -> None:
    """Cohere's attention and MLP both read the one norm of a block."""
    model = make(CohereConfig, CohereForCausalLM)
    with torch.no_grad():
        want = model(tokens()).logits
        with pytest.warns(UserWarning, match="Smooth left input_layernorm -> self_attn.q_proj"):
            changed = smooth_only(model)
        got = model(tokens()).logits
    assert "input_layernorm.weight" not in changed
    assert "mlp.down_proj.weight" in changed
    assert float((got - want).norm() / want.norm()) < 1e-4


@pytest.mark.parametrize("spec", ["int4:group=32@int8", "liquid:group=32@int8", "int8@int8"])
def test_nearer_to_the_dense_model(spec: str) -> None:
    fresh = tokens(40)[32:]

    def distance(model: nn.Module) -> float:
        with torch.no_grad():
            return float((model(fresh).logits - llama()(fresh).logits).norm())

    smoothed = anybit.quantize_(llama(), spec, Smooth(tokens(32)))
    assert sum(isinstance(m, QuantLinear) for m in smoothed.modules()) == 14
    assert distance(smoothed) < 0.9 * distance(anybit.quantize_(llama(), spec))


def test_with_another_quantizer_after_it() -> None:
    fresh, spec = tokens(40)[32:], "int3:group=32@int8"

    def distance(quantizer: Any) -> float:
        model = anybit.quantize_(llama(), spec, quantizer)
        with torch.no_grad():
            return float((model(fresh).logits - llama()(fresh).logits).norm())

    plain, clip, gptq = (
        distance(Smooth(tokens(32), then=q)) for q in (anybit.RTN(), Clip(), GPTQ())
    )
    assert clip < plain
    assert gptq < plain


def test_search_finds_what_outliers_need() -> None:
    """A channel a hundred times the others ruins int8 tokens; the scale takes it out."""
    torch.manual_seed(0)
    x, w = torch.randn(256, 64), torch.randn(32, 64)
    x[:, 5] *= 100
    seen = Statistics()
    seen.add(x, KINDS, 1)
    s = search({"w": (w, "int8@int8")}, seen, None)
    assert s[5] > 4 * s[torch.arange(64) != 5].median()
    weights_only = search({"w": (torch.ones(32, 64), "int8")}, seen, None)
    assert torch.equal(weights_only, torch.ones(64))  # nothing to gain: no scale at all


def test_candidates_of_dead_channels_are_finite() -> None:
    amax, ones = torch.tensor([0.0, 1, 100]), torch.ones(3)
    for s in candidates(amax, amax / 3, ones):
        assert torch.isfinite(s).all()
        assert (s > 0).all()
    assert len(list(candidates(torch.zeros(3), torch.zeros(3), ones))) == 1
    assert centred(torch.tensor([1.0, 4.0])).tolist() == [0.5, 2.0]


def test_heads_that_share_values_share_scales() -> None:
    model = llama()
    before = model.model.layers[0].self_attn.o_proj.weight.detach().clone()
    smooth_only(model)
    ratio = (model.model.layers[0].self_attn.o_proj.weight / before)[0].view(2, 2, 16)
    torch.testing.assert_close(ratio[:, 0], ratio[:, 1])
    assert float(ratio.max() / ratio.min()) > 1.01


def test_pairs_name_what_they_fold_into_once() -> None:
    assert len({(before, after) for before, after in PAIRS}) == len(PAIRS)
