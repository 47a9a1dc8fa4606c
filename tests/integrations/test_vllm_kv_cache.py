"""KV caches in anybit's formats inside vLLM's engine, whose CPU takes our backend for its own."""

from types import SimpleNamespace

import pytest
import torch
import vllm.config.cache
from transformers import AutoConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, SlidingWindowSpec

import anybit
from anybit.errors import Unsupported
from anybit.kernels.kv.cache import LayerCache, token_bytes
from anybit.kernels.kv.formats import KV_FORMATS
from tests.integrations.generate import PICO, TOKENS, engine, tokens_of

if not hasattr(vllm.config.cache, "register_kv_cache_dtype"):
    pytest.skip("vLLM names KV caches of others since 0.33", allow_module_level=True)

from anybit.integrations import vllm_attention

BLOCK, HEADS, DIM = 16, 8, 128
BF16 = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16)


@pytest.fixture
def on_a_cpu():
    """Our backend in the place of the only one that vLLM's CPU has."""
    vllm_attention.register()
    own = AttentionBackendEnum.CPU_ATTN
    register_backend(own, AttentionBackendEnum.CUSTOM.get_path())
    yield
    own.clear_override()


@pytest.mark.parametrize("name", ["int4", "k8v4"])
def test_tokens_are_those_of_our_engine(name, on_a_cpu):
    """Prompts in parts, from cached prefixes, and beside single tokens."""
    ids = list(range(300, 370))
    prompts = [ids, ids[:41], [5, 6, 7]]
    ours = anybit.LLM(PICO, dtype="float32", kv_cache=name, kv_bytes=1 << 25)
    params = anybit.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    want = [list(out.tokens) for out in ours.generate(prompts, params)]
    options = {"block_size": 32, "max_num_batched_tokens": 32, "kv_cache_dtype": f"anybit_{name}"}
    with engine(PICO, **options) as llm:
        assert [tokens_of(llm, prompts) for _ in range(2)] == [want, want]
        blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    pico = AutoConfig.from_pretrained(PICO)
    token = token_bytes(pico.head_dim, KV_FORMATS[name]) * pico.num_key_value_heads
    assert blocks == (1 << 30) // (32 * token * pico.num_hidden_layers)  # in a GiB


@pytest.mark.parametrize("name", KV_FORMATS)
def test_pages_have_room_for_what_the_format_keeps(name):
    format, sliding = KV_FORMATS[name], SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, sliding_window=9,
        dtype=vllm_attention.DTYPES[f"anybit_{name}"], kv_quant_mode=KVQuantMode.CUSTOM,
    )  # fmt: skip
    spec = vllm_attention.Backend.customize_spec(sliding)
    cache = LayerCache.empty(1, HEADS, BLOCK, DIM, format, torch.device("cpu"))
    assert spec.page_size_bytes == cache.nbytes
    assert BF16.page_size_bytes / cache.nbytes > {"int4": 3.5, "k8v4": 2.4, "int8": 1.9}[name]


@pytest.mark.parametrize(("given", "message"), [
    ({"alibi_slopes": [0.5]}, "ALiBi"),
    ({"logits_soft_cap": 30.0}, "soft cap"),
    ({"attn_type": "encoder_only"}, "encoder_only"),
    ({"kv_sharing_target_layer_name": "layers.1"}, "share K and V"),
    ({"chunk_lookback": 3}, "chunk_lookback"),
    ({"head_size": 256}, "at most 128 channels"),
    ({"kv_cache_dtype": "bfloat16"}, r"kv_cache_dtype='bfloat16' of a model in torch.float32"),
    ({"head_size": 33}, "2 channels in a byte"),
])  # fmt: skip
def test_what_is_refused(monkeypatch, given, message):
    found = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_dtype_skip_layers=[]))
    monkeypatch.setattr(vllm_attention, "get_current_vllm_config", lambda: found)
    with pytest.raises(Unsupported, match=message):
        vllm_attention.Attention(**{
            "num_heads": 4, "head_size": 64, "scale": 1.0, "kv_cache_dtype": "anybit_int4",
        } | given)  # fmt: skip
