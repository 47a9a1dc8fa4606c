"""A KV cache in anybit's formats inside vLLM: an attention backend, and names of such caches.

    vllm serve MODEL --attention-backend CUSTOM --kv-cache-dtype anybit_int4

vLLM's pages have room for what the format keeps, so there are as many more of them. They are read
and written by the engine's kernels, which look at nothing on the host, so CUDA graphs hold steps.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.config.cache import get_kv_cache_dtype_handler, register_kv_cache_dtype
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout, KVQuantMode

from anybit.errors import Unsupported
from anybit.kernels.attention import Batch, Scores
from anybit.kernels.between import of
from anybit.kernels.kv.cache import LayerCache, token_bytes
from anybit.kernels.kv.format import KvFormat, plain
from anybit.kernels.kv.formats import KV_FORMATS

FORMATS = {f"anybit_{name}": format for name, format in KV_FORMATS.items()}  # by vLLM's names
# A spec of vLLM's names no format, but a dtype; so each format has one, which means nothing else.
DTYPES = dict(zip(FORMATS, (torch.int8, torch.uint16, torch.uint8, torch.int16), strict=False))
PLAIN = ("auto", "float16", "bfloat16")  # vLLM's names of a cache in the model's dtype
logger = init_logger(__name__)
BLOCKS = (16, 32, 64, 128)  # tokens of a page that kernels take
LEAST_CAPABILITY = 80


def register() -> None:
    """Enter the backend and the names into vLLM's registries."""
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.{Backend.__name__}")
    for name, dtype in DTYPES.items():
        if get_kv_cache_dtype_handler(name) is None:
            register_kv_cache_dtype(name)(partial(Name, name, dtype))


@dataclass
class Name:
    """What vLLM asks of a name of a KV cache."""

    name: str
    dtype: torch.dtype

    def torch_dtype(self) -> torch.dtype:
        return self.dtype

    def quant_mode(self) -> KVQuantMode:
        return KVQuantMode.CUSTOM


def format_of(dtype: torch.dtype) -> KvFormat:
    """What a spec's dtype stands for."""
    named = [FORMATS[name] for name, own in DTYPES.items() if own == dtype]
    return named[0] if named else plain(dtype)


class Backend(AttentionBackend):
    """As vLLM asks for it; what it does not support, vLLM refuses before it takes memory."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return AttentionBackendEnum.CUSTOM.name

    @staticmethod
    def get_impl_cls() -> type["Attention"]:
        return Attention

    @staticmethod
    def get_builder_cls() -> type["Builder"]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return list(BLOCKS)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype in (None, *PLAIN, *FORMATS)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.to_int() >= LEAST_CAPABILITY)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """A layer's pages one after the other, and in each, heads."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """The bytes that a token's head takes, as vLLM counts pages by them."""
        if spec.head_size != spec.head_size_v:
            raise Unsupported(
                f"K's heads have {spec.head_size} channels and V's {spec.head_size_v}; use another "
                "attention backend"
            )
        size = token_bytes(spec.head_size, format_of(spec.dtype))
        return replace(spec, state_content_bytes=size)


@dataclass
class Step(AttentionMetadata):
    """What a step's layers ask for. batch: its lists on the host are exact for prompts alone."""

    batch: Batch


class Builder(AttentionMetadataBuilder[Step]):
    """Makes a `Step` of what vLLM knows of one."""

    # Of steps in which all texts have as many tokens, grids depend on sizes alone.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        self._init_reorder_batch_threshold(1)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Step:
        """The step, of which texts with one token come first."""
        given = common_attn_metadata
        if given.causal is not True:
            raise Unsupported("tokens see those behind them; use another attention backend")
        tokens, host = given.num_actual_tokens, given.seq_lens_cpu_upper_bound
        decodes = min(tokens, split_decodes_and_prefills(given, decode_threshold=1)[0])
        queries, slots = given.query_start_loc_cpu.diff().tolist(), given.slot_mapping[:tokens]
        return Step(
            Batch(
                positions=slots,  # Q and K are rotated already: nobody asks for positions
                slots=slots,
                tables=given.block_table_tensor,
                contexts=given.seq_lens,
                starts=given.query_start_loc,
                queries=queries,
                lengths=[0] * len(queries) if host is None else host.tolist(),
                decodes=decodes,
            )
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Step:
        step = self.build(0, common_attn_metadata)
        step.batch.contexts.fill_(1)  # with long ones, capturing takes long
        return step


class Attention(AttentionImpl[Step]):
    """Attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ):
        vllm = get_current_vllm_config().cache_config
        dtype = torch.get_default_dtype()  # the model's
        refused = {
            "ALiBi": alibi_slopes,
            "a soft cap of scores": logits_soft_cap,
            f"attention of type {attn_type!r}": attn_type != AttentionType.DECODER,
            "layers that share K and V": kv_sharing_target_layer_name,
            "kv_cache_dtype_skip_layers": vllm.kv_cache_dtype_skip_layers,
            f"kv_cache_dtype={kv_cache_dtype!r} of a model in {dtype}": kv_cache_dtype in PLAIN[1:]
            and kv_cache_dtype != str(dtype).removeprefix("torch."),
            **{name: value not in (None, False, -1) for name, value in others.items()},
        }
        for what in [what for what, there in refused.items() if there]:
            raise Unsupported(
                f"anybit's KV caches do not support {what}; use another attention backend"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.kv_cache_dtype, self.num_kv_heads = kv_cache_dtype, num_kv_heads or num_heads
        self.format = FORMATS.get(kv_cache_dtype) or plain(dtype)
        self.scores = Scores(scale, sliding_window, sinks=sinks)
        self.format.check(head_size)
        if self.format.loss:
            logger.warning_once("%s: %s", kv_cache_dtype, self.format.loss)
        if self.format.finer is not None:  # pages of all layers are equal
            logger.warning_once(
                "%s: models whose K has a large bias (Qwen2.5) write nonsense; use anybit_k8v4",
                kv_cache_dtype,
            )
        size = token_bytes(head_size, self.format)
        # One page, until vLLM has more: so kernels refuse a layer before memory is taken.
        self.use(torch.zeros(1, self.num_kv_heads, BLOCKS[0], size, dtype=torch.uint8))

    def use(self, pages: Tensor) -> None:
        """Keep K and V in pages (blocks, kv_heads, block_size, bytes) from now on."""
        self.pages, self.cache = pages, LayerCache.within(pages, self.head_size, self.format)
        if pages.is_cuda and not self.cache.by_kernels:
            reason = of(pages).refuse_cache(self.cache)
            raise Unsupported(
                f"kv_cache_dtype={self.kv_cache_dtype!r}: {reason}; use another attention backend"
            )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Step | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Store K and V (T, kv_heads, head_size), and attend with queries (T, heads, head_size)."""
        if attn_metadata is None:  # memory is measured; there is no cache yet
            return output.zero_()
        if kv_cache.data_ptr() != self.pages.data_ptr() or len(kv_cache) != len(self.pages):
            self.use(kv_cache.view(torch.uint8))
        batch = attn_metadata.batch
        tokens = len(batch.slots)
        q, k, v = (x[:tokens].flatten(1) for x in (query, key, value))
        family, at = self.cache.family, (batch.positions, batch.slots)
        q = family.write(q, self.cache, None, *at, self.num_heads, kv=(k, v))
        family.attend(q, self.cache, batch, self.scores, output[:tokens].view_as(q))
        return output
