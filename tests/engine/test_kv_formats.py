"""KV caches of 4 bits and others: definitions, and models on them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from anybit.errors import InvalidInput, Unsupported
from anybit.kernels.kv import int4
from anybit.kernels.kv.cache import LayerCache
from anybit.kernels.kv.format import KvFormat, Numbers
from anybit.kernels.kv.formats import KV_FORMATS
from anybit.kernels.kv.int8 import Int8
from tests.engine.conftest import prompts, random_model

Checkpoint = Callable[[str], Path]
CPU = torch.device("cpu")


@pytest.mark.parametrize(("dim", "run"), [(64, 32), (80, 8), (6, 1), (128, 64)])
def test_spread_is_a_rotation(dim: int, run: int) -> None:
    """A Hadamard matrix over runs of the halves; itself the way back."""
    matrix = int4.spread(torch.eye(dim, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim))
    torch.testing.assert_close(matrix, matrix.T)
    assert ((matrix != 0).sum(0) == 2 * run).all()  # every channel goes into so many
    assert matrix.unique().numel() == (2 if 2 * run == dim else 3)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_codes_are_the_nearest(groups: int) -> None:
    x = torch.randn(50, 3, 32) * torch.logspace(-5, 3, 50)[:, None, None]
    codes, grid = int4.encode(x, groups)
    assert codes.shape == (50, 3, 16)
    assert grid.shape == (50, 3, groups, 2)
    scale, low = (t.float().repeat_interleave(32 // groups, -1) for t in grid.unbind(-1))
    levels = torch.arange(16.0)[:, None, None, None] * scale + low
    nearest = (levels - x).abs().amin(0)
    assert torch.equal((int4.decode(codes, grid) - x).abs(), nearest)
    # Half a step, and what rounding a scale and a low to fp16 takes from the ends.
    assert (nearest <= scale * 0.51 + low.abs() * 2.0**-11).all()


def test_a_byte_holds_both_halves() -> None:
    x = torch.arange(16.0)[None]  # 0 to 15: the codes
    codes, grid = int4.encode(x, 1)
    assert torch.equal(codes, (torch.arange(8) | torch.arange(8, 16) << 4).byte()[None])
    assert grid.tolist() == [[[1.0, 0.0]]]


def test_zeros_stay_zeros() -> None:
    codes, grid = int4.encode(torch.zeros(2, 8), 2)
    assert not int4.decode(codes, grid).any()


def test_outlier_channels_are_spread() -> None:
    """K with two channels of 20 times the others: scores by a cache in int4."""
    torch.manual_seed(0)
    q, k = torch.randn(64, 128), torch.randn(500, 1, 128)
    k[..., [3, 90]] *= 20
    cache = LayerCache.empty(63, 1, 8, 128, KV_FORMATS["int4"], CPU)
    slots = torch.arange(500)
    cache.store(k, k, slots)
    rotated, plain = cache.load(torch.arange(63), torch.float32)
    want = q @ k[:, 0].T
    error = (int4.spread(q) @ rotated[0, :500].T - want).norm() / want.norm()
    without = (q @ plain[0, :500].T - want).norm() / want.norm()  # V, which is not rotated
    assert error < 0.08
    assert without > 2 * error


def test_memory() -> None:
    """A token and head: codes, 32 bits for each group of int4, and for K in int8."""
    cache = LayerCache.empty(10, 2, 16, 128, KV_FORMATS["int4"], CPU)
    assert cache.nbytes == 320 * (128 + 4 * 4)
    assert cache.head_dim == 128
    mixed = LayerCache.empty(10, 2, 16, 256, KV_FORMATS["k8v4"], CPU)
    assert mixed.nbytes == 320 * (256 + 4 + 128 + 8 * 4)
    assert mixed.head_dim == 256


@pytest.mark.parametrize(
    ("dim", "groups"), [(16, 2), (128, 2), (130, 10), (192, 4), (256, 4), (576, 12)]
)
def test_groups_are_as_few_as_may_be(dim: int, groups: int) -> None:
    """Of equal size, at most 64 channels, each in one half."""
    assert int4.groups_of(dim, 64) == groups


def test_heads_without_halves_are_refused() -> None:
    with pytest.raises(Unsupported, match="head_dim is 15; use int8"):
        LayerCache.empty(4, 1, 8, 15, KV_FORMATS["int4"], CPU)


def test_wide_heads_are_refused(tmp_path: Path) -> None:
    """4 bits for K of a head of 256 cost Gemma 0.1 nats; 8 bits, and 4 for V, do not."""
    random_model("gemma2", {"head_dim": 256}).save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match=r"at most 128 channels, and these have 256: .* k8v4"):
        LLM(tmp_path, kv_cache="int4")
    assert LLM(tmp_path, kv_cache="k8v4").kv_cache == "k8v4"


def test_what_loses_much_says_so(checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    for kv in ("int8", "k8v4"):
        LLM(checkpoint("llama"), kv_cache=kv)
    assert not caplog.messages
    LLM(checkpoint("llama"), kv_cache="int4")
    assert "nats a token" in caplog.messages[0]


@pytest.mark.parametrize(("kv", "bias", "kinds"), [
    ("int4", 30, ("dynamic", "int4")), ("int4", 300, ("model", "model")),
    ("k8v4", 300, ("model", "model")), ("int8", 300, ("model", "model")),
])  # fmt: skip
def test_k_with_a_large_bias_has_more_bits(
    kv: str, bias: float, kinds: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Codes would have the bias's range, and what differs between tokens would be lost."""
    model = random_model("qwen2", {})
    model.model.layers[0].self_attn.k_proj.bias.data[1] = bias
    model.save_pretrained(tmp_path)
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=20)

    def told(kv: str) -> tuple[LLM, list[dict[int, float]]]:
        llm = LLM(tmp_path, kv_cache=kv, block_size=4, max_tokens=16, kv_bytes=1 << 20)
        outputs = llm.generate(prompts(3), params)
        return llm, [dict(o.completions[0].logprobs[0].top) for o in outputs]

    def error(found: list[dict[int, float]]) -> float:
        pairs = zip(found, exact, strict=True)
        return max(abs(p - b[t]) for a, b in pairs for t, p in a.items() if t in b)

    _, exact = told("model")
    llm, found = told(kv)
    first, second = (cache.kinds for cache in llm.engine.runner.states)
    assert first == kinds
    assert second == (KV_FORMATS[kv].k.kind, KV_FORMATS[kv].v.kind)
    assert ["1 of 2 layers" in text for text in caplog.messages] == [True] * (kv == "int4")
    for numbers in (int4.Int4, Int8):
        monkeypatch.setattr(numbers, "most_bias", 1e9)
    llm, lost = told(kv)
    assert {cache.kinds for cache in llm.engine.runner.states} == {second}
    assert error(found) < error(lost) / 2


class Fp8(Numbers):
    """A way of one's own: fp8 without scales."""

    kind = None

    def __init__(self) -> None:
        super().__init__(torch.float8_e4m3fn)

    def encode(self, x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        return x.float().clamp(-448, 448).to(self.dtype), None

    def decode(
        self, codes: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        return codes.to(dtype)


def test_a_format_is_one_class(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes a format that nothing but its own class knows."""
    monkeypatch.setitem(KV_FORMATS, "fp8", KvFormat("fp8", Fp8(), Fp8()))
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=20, ignore_eos=True)
    options = {"block_size": 4, "max_tokens": 16, "kv_bytes": 1 << 20}
    exact, llm = (LLM(checkpoint("llama"), kv_cache=kv, **options) for kv in ("model", "fp8"))
    assert llm.kv_cache == "fp8"
    assert not any(cache.by_kernels for cache in llm.engine.runner.states)
    for a, b in zip(
        exact.generate(prompts(3), params), llm.generate(prompts(3), params), strict=True
    ):
        x, y = (o.completions[0].logprobs[0] for o in (a, b))
        differences = [abs(p - dict(y.top)[t]) for t, p in x.top if t in dict(y.top)]
        assert 0 < max(differences) < 0.3
    with pytest.raises(InvalidInput, match="auto, model, int8, k8v4, int4, fp8"):
        LLM(checkpoint("llama"), kv_cache="fp9")


@pytest.mark.parametrize("kv", ["int4", "k8v4"])
@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gemma2", "mistral", "gpt_oss", "deepseek_v3", "starcoder2"]
)
def test_models_stay_close(checkpoint: Checkpoint, tmp_path: Path, name: str, kv: str) -> None:
    """Windows, soft caps, sinks, norms of heads, latent attention, and models of transformers."""
    if name == "starcoder2":
        random_model(name, {}).save_pretrained(tmp_path)
    directory = tmp_path if name == "starcoder2" else checkpoint(name)
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=20, ignore_eos=True)
    exact = LLM(directory, kv_cache="model").generate(prompts(3), params)
    llm = LLM(directory, kv_cache=kv, max_tokens=16, block_size=4, kv_bytes=1 << 20)
    assert llm.kv_cache == kv
    differences = []
    for a, b in zip(exact, llm.generate(prompts(3), params), strict=True):
        (x, *_), (y, *_) = a.completions[0].logprobs or (), b.completions[0].logprobs or ()
        others = dict(y.top)
        differences += [abs(p - others[t]) for t, p in x.top if t in others]
    assert 0 < sum(differences) / len(differences) < 0.3
    assert len(differences) > 3 * 12


def test_a_cached_prefix_gives_the_same(checkpoint: Checkpoint) -> None:
    llm = LLM(checkpoint("llama"), kv_cache="int4", block_size=4)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    prompt = prompts(1)[0] * 4
    first, again = (llm.generate([prompt], params)[0].tokens for _ in range(2))
    assert llm.engine.scheduler.prefix_hits > 0
    assert first == again


def test_static_scales_are_for_int8(checkpoint: Checkpoint, tmp_path: Path) -> None:
    from tests.engine.test_models import with_scales

    llm = LLM(with_scales(checkpoint("llama"), tmp_path), kv_cache="int4")
    assert llm.kv_cache == "int4"
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].tokens
