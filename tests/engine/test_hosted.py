"""transformers' models on the engine's cache: the same tokens, or a refusal in words."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import anybit
from anybit.engine.llm import LLM
from anybit.engine.models import UnknownModel
from anybit.engine.models.hosted import Hosted
from anybit.engine.models.trial import window_in
from anybit.engine.sequence import SamplingParams
from tests.engine.conftest import prompts, random_model, reference

GREEDY = SamplingParams(max_tokens=12, temperature=0)
WINDOW = {"sliding_window": 12}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Layer norms, parallel blocks, other rotations, learned positions, chunks, routers of all kinds.
KINDS: dict[str, dict[str, Any]] = {
    "apertus": {},
    "cohere2": WINDOW,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "granitemoe": EXPERTS,
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "llama4_text": {
        "head_dim": 16, "attention_chunk_size": 12, "num_local_experts": 4, "num_hidden_layers": 4,
        "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2,
    },
    "mimo_v2_flash": {
        "head_dim": 16, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
    },
    "minimax_m2": EXPERTS | {"head_dim": 16, "rotary_dim": 8},
    "ministral3": {"head_dim": 16},
    "nemotron": {},
    "phi": {},
    "starcoder2": WINDOW,
}  # fmt: skip


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            random_model(kind, KINDS[kind]).save_pretrained(made[kind])
        return made[kind]

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_transformers(
    make: Callable[[str], Path], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Batched, in chunks of prompts, across windows, with a cached prefix."""
    model = AutoModelForCausalLM.from_pretrained(make(kind), attn_implementation="eager")
    with caplog.at_level(logging.INFO, "anybit.engine"):
        llm = LLM(make(kind), max_tokens=16, block_size=4)
    assert isinstance(llm.engine.runner.model, Hosted)  # type: ignore[attr-defined]
    assert "on the engine's KV cache" in caplog.text
    many = prompts(4)
    many.append(many[1] + [5, 6])
    for prompt, output in zip(many, llm.generate(many, GREEDY), strict=True):
        assert output.tokens == reference(model, prompt, 12)


@pytest.mark.parametrize("kind", ["cohere2", "minimax_m2"])
def test_quantized(make: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    model = anybit.quantize_(AutoModelForCausalLM.from_pretrained(make(kind)), "fp6")
    anybit.save(model, tmp_path / "out")
    want = [reference(model, prompt, 12) for prompt in prompts(2)]
    for llm in (LLM(tmp_path / "out"), LLM(make(kind), "fp6")):
        assert [o.tokens for o in llm.generate(prompts(2), GREEDY)] == want


def test_options_of_the_cache(make: Callable[[str], Path]) -> None:
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=5)
    exact = LLM(make("starcoder2")).generate(prompts(3), params)
    llm = LLM(make("starcoder2"), kv_cache="int8", kv_bytes=1 << 18)
    assert llm.kv_cache == "int8"
    for a, b in zip(exact, llm.generate(prompts(3), params), strict=True):
        (x,), (y,) = a.completions[0].logprobs or (), b.completions[0].logprobs or ()
        assert 0 < abs(x.top[0][1] - y.top[0][1]) < 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_sixteen_bits(make: Callable[[str], Path], dtype: Any) -> None:
    for kind in ("cohere2", "minimax_m2", "llama4_text"):
        llm = LLM(make(kind), dtype=dtype)
        assert isinstance(llm.engine.runner.model, Hosted)  # type: ignore[attr-defined]
        assert all(
            len(o.tokens) == 12 or o.tokens[-1] == 1 for o in llm.generate(prompts(2), GREEDY)
        )


class Mixing(nn.Module):
    """A layer that looks at the token before."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.roll(1, 1)


@pytest.fixture
def llama() -> Any:
    return random_model("llama", {}).eval()


def test_several_embeddings_are_refused(llama: Any) -> None:
    """As Musicgen has one for each of its codebooks."""
    llama.model.embed_tokens = torch.nn.ModuleList([llama.model.embed_tokens])
    with pytest.raises(UnknownModel, match="is not a decoder below a head"):
        Hosted(llama, 64)


def test_what_attention_does_not_do_is_refused(llama: Any) -> None:
    llama.model.layers[1].mlp = Mixing()
    before = llama.config._attn_implementation
    with pytest.raises(UnknownModel, match="other than attention that look at other tokens"):
        Hosted(llama, 64)
    assert llama.config._attn_implementation == before


def test_positions_of_its_own_are_refused(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rotate = llama.model.rotary_emb.forward

    def forward(x: Tensor, position_ids: Tensor) -> Any:
        return rotate(x, torch.arange(x.shape[1])[None])

    monkeypatch.setattr(llama.model.rotary_emb, "forward", forward)
    with pytest.raises(UnknownModel, match="does not take the positions"):
        Hosted(llama, 64)


def test_more_than_the_plain_attention_is_refused(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.eager_attention_forward

    def twice(*args: Any, **kwargs: Any) -> Any:
        out, weights = plain(*args, **kwargs)
        return out * 2, weights

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", twice)
    with pytest.raises(UnknownModel, match="LlamaAttention does more in its attention"):
        Hosted(llama, 64)


@pytest.mark.parametrize(
    ("mask", "window"),
    [
        (lambda b, h, q, k: k <= q, 0),
        (lambda b, h, q, k: (k <= q) & (k > q - 7), 7),
        (lambda b, h, q, k: (k <= q) & (k // 7 == q // 7), None),
        (lambda b, h, q, k: k <= q + 1, None),
        (lambda b, h, q, k: (k <= q) & (k > q - 100), 0),
    ],
)
def test_windows_are_found_in_masks(mask: Any, window: int | None) -> None:
    assert window_in(mask, 50, torch.device("cpu")) == window
