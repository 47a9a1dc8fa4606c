"""CPU kernels of the engine, on every level of instructions, against the definitions in torch."""

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anybit.kernels import attention as definition
from anybit.kernels.attention import Batch, Part, Scores
from anybit.kernels.between import rms_norm
from anybit.kernels.kv.cache import LayerCache
from anybit.kernels.kv.format import plain
from anybit.kernels.kv.formats import KV_FORMATS
from anybit.kernels.kv.int4 import spread, unpack
from anybit.kernels.native import attention, build, cache, dense, floats, fused, isa
from anybit.kernels.native.recording import Recording
from tests.kernels.test_native import LEVELS, named
from tests.needs import pairs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # of a rounding
BLOCK, BLOCKS = 8, 64
MODULES: list[ModuleType] = [attention, cache, dense, fused]


@pytest.fixture(scope="module", autouse=True)
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile every kernel: what a user's cache holds is not what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANYBIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(params=LEVELS, ids=lambda level: level.name)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> isa.Isa:
    for module in MODULES:
        monkeypatch.setattr(module, "level", lambda: request.param, raising=False)
    chosen: isa.Isa = request.param
    return chosen


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: Tensor, want: Tensor, ulps: float) -> None:
    """Within so many roundings of the result's dtype."""
    assert got.dtype in EPS
    bound = ulps * EPS[got.dtype] * want.abs().clamp_min(2.0**-10)
    assert ((got.double() - want.double()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_and_sums(level: isa.Isa, dtype: torch.dtype) -> None:
    for m, n, kind in ((1, 64, dtype), (3, 101, torch.float32), (2, 2880, dtype)):
        wide = random(m, 2 * n, dtype=dtype)
        x, delta = wide[:, :n], wide[:, n:]  # rows that do not follow each other
        weight = random(n, dtype=kind, seed=1) + 1
        norm, total = fused.add_norm(x, delta, weight, 1e-5)
        assert torch.equal(total, x + delta)
        # Sums of squares in another order; two roundings that may fall differently.
        ulps = 24 if dtype == torch.float32 else 4
        close(norm, rms_norm(total, weight, 1e-5), ulps)
        norm, total = fused.add_norm(x, None, weight, 1e-5)
        assert total is x
        close(norm, rms_norm(x, weight, 1e-5), ulps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu(level: isa.Isa, dtype: torch.dtype) -> None:
    some = torch.tensor([0.0, -0.0, 30, -30, 100, -100, float("inf"), float("nan")])
    gate = torch.cat([some, random(1200) * 8]).to(dtype)[None].repeat(2, 1)
    up = random(2, 1208, dtype=dtype)
    got = fused.silu_mul(gate, up)
    want = F.silu(gate.double()) * up.double()
    assert got[:, 7].isnan().all()
    assert got[:, 6].isinf().all()
    rest = [i for i in range(1208) if i not in (6, 7)]
    close(got[:, rest], want[:, rest], 2 if dtype != torch.float32 else 12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu(level: isa.Isa, dtype: torch.dtype) -> None:
    gate = torch.cat([torch.tensor([0.0, -0.0, 30, -30, 100]), random(1200) * 4]).to(dtype)[None]
    up = random(1, 1205, dtype=dtype)
    got, want = fused.gelu_mul(gate, up), F.gelu(gate.double(), approximate="tanh")
    # Near -5 what is left of x is the difference of 1 and a tanh that torch rounds, too.
    info, size = torch.finfo(dtype), up.double().abs()
    least = 2 * info.tiny * info.eps  # of subnormal numbers
    bound = (want.abs() * 2 * info.eps + gate.abs().double() * 2.0**-22 + least) * size + least
    assert ((got.double() - want * up.double()).abs() <= bound).all()
    assert fused.gelu_mul(gate * torch.nan, up).isnan().all()


def test_exp_is_exact_to_two_units(level: isa.Isa) -> None:
    """By SiLU(x) / x, which is 1 / (1 + exp(-x))."""
    x = torch.linspace(-80, 80, 20000)[None]
    sigmoid = fused.silu_mul(x, torch.ones_like(x)).double() / x
    odds = 1 / sigmoid - 1
    assert ((odds - (-x.double()).exp()).abs() <= (1 + odds) * 2.0**-21).all()
    assert floats.LEAST < -87.4  # below it, exp is zero in fp32 but for denormal numbers


@pytest.mark.parametrize(("m", "dtype"), pairs([1, 2, 3, 4, 5, 7, 16], DTYPES), ids=str)
def test_dense_products(level: isa.Isa, dtype: torch.dtype, m: int) -> None:
    for n, k in ((37, 77), (5 + m // 5, 640), (130, 129)):
        x = random(m, 2 * k, dtype=dtype)[:, :k]
        weight, bias = random(n, k, dtype=dtype, seed=1), random(n, dtype=dtype, seed=2)
        assert dense.suits(x, weight)
        for b in (None, bias):
            got = dense.linear(x, weight, b).double()
            want = x.double() @ weight.double().T + (0 if b is None else b.double())
            size = x.double().abs() @ weight.double().abs().T
            assert ((got - want).abs() <= EPS[dtype] * want.abs() + 2.0**-21 * size).all()
    eye = torch.eye(77, dtype=dtype)[:m]  # one-hot tokens read the weight
    weight = random(37, 77, dtype=dtype)
    assert torch.equal(dense.linear(eye, weight), weight.T[:m])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_of_another_dtype(level: isa.Isa, dtype: torch.dtype) -> None:
    x = torch.cat([random(2100), torch.tensor([float("nan"), float("inf"), -0.0, 1e-3])])
    for source in DTYPES:
        given, got = x.to(source), torch.empty(len(x), dtype=dtype)
        fused.convert(given, got)
        assert torch.equal(got.nan_to_num(7), given.to(dtype).nan_to_num(7))


# Attention.


def make_cache(kv_heads: int, dim: int, kind: str, dtype: torch.dtype) -> LayerCache:
    """A cache with random contents."""
    scales = None
    if kind == "static":
        scales = (torch.rand(kv_heads, dim) * 0.02 + 0.01, torch.rand(kv_heads, dim) * 0.02 + 0.01)
    format = plain(dtype) if kind == "model" else KV_FORMATS["int4" if kind == "int4" else "int8"]
    out = LayerCache.empty(BLOCKS, kv_heads, BLOCK, dim, format, torch.device("cpu"), scales)
    assert out.by_kernels
    assert out.v.shape[:3] == out.k.shape[:3]
    for i, (how, t, scales) in enumerate(out.sides):
        if how.kind == "int4":
            t.random_(0, 256, generator=torch.Generator().manual_seed(i))
        else:
            t.copy_(random(*t.shape, seed=i) * (40 if kind != "model" else 1))
        if scales is not None and not how.static:
            scales.uniform_(0.005, 0.02)
            if how.kind == "int4":
                scales.mul_(5)
                scales[..., 1].sub_(0.8)  # what code 0 means
    return out


def pages_of(contexts: list[int]) -> Tensor:
    pages = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
    width = -(-max(contexts) // BLOCK) + 1
    tables = [[pages.pop() for _ in range(-(-c // BLOCK))] for c in contexts]
    return torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32)


def attend(
    q: Tensor, own: LayerCache, tables: Tensor, contexts: Tensor, longest: int, scores: Scores,
    starts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The kernel's attention of single tokens, or of the last ones of each text."""
    several = starts is not None
    part = Part(tables, contexts, starts if several else contexts, 1 + several)
    return attention.attend(q, own, part, longest, scores, torch.empty_like(q))


ATTENDED = [  # kind of cache, dtype, heads, of the cache, their dimension
    ("model", torch.float32, 4, 2, 32, Scores(0.3)),
    ("model", torch.bfloat16, 8, 1, 64, Scores(0.2, window=30)),
    ("static", torch.float16, 3, 3, 16, Scores(0.3, softcap=2.0)),
    ("dynamic", torch.bfloat16, 4, 4, 80, Scores(0.1, window=9, softcap=5.0)),
    ("int4", torch.float32, 4, 2, 16, Scores(0.3)),
    ("int4", torch.bfloat16, 3, 1, 80, Scores(0.2, window=30, softcap=3.0)),
    ("int4", torch.float16, 2, 2, 256, Scores(0.1)),
    ("k8v4", torch.float32, 2, 1, 256, Scores(0.1, window=30)),
    ("k8v4", torch.bfloat16, 4, 2, 64, Scores(0.1)),
]


@pytest.mark.parametrize(
    ("case", "level"), pairs(ATTENDED, LEVELS, 2), indirect=["level"], ids=named
)
def test_attention_over_pages(level: isa.Isa, case: tuple) -> None:
    kind, dtype, heads, kv_heads, dim, scores = case
    own = make_cache(kv_heads, dim, kind, dtype)
    contexts = [1, 70, 300, 8]  # parts of a vector of tokens, more than one part of a context
    tables = pages_of(contexts)
    q = random(4, heads, dim, dtype=dtype, seed=5)
    lengths = torch.tensor(contexts, dtype=torch.int32)
    k, v = (t.float() if kind == "model" else t for t in (own.k, own.v))
    wide = LayerCache(own.format, k, v, own.k_scale, own.v_scale)  # the definition in fp32
    batch = Batch(lengths, lengths, tables, lengths, lengths, [1] * 4, contexts, 4)
    want = definition.gathered(q.float(), wide, batch, scores)
    longest = tables.shape[1] * BLOCK
    got = attend(q, own, tables, lengths, longest, scores)
    largest = 1 if kind == "model" else 5
    assert ((got.float() - want).abs() <= EPS[dtype] * want.abs() + 4e-6 * largest).all()
    assert want.abs().max() > 0.1
    nothing = attend(q, own, tables, lengths * 0, longest, scores)
    assert torch.equal(nothing, torch.zeros_like(q))  # a padded row of a batch


@pytest.mark.parametrize(
    ("case", "level"), pairs(ATTENDED, LEVELS, 2), indirect=["level"], ids=named
)
def test_tokens_of_a_text_beside_each_other_are_as_single_ones(level: isa.Isa, case: tuple) -> None:
    """Bit for bit, over borders of vectors, parts and windows; nothing else of `out` changes."""
    kind, dtype, heads, kv_heads, dim, scores = case
    own = make_cache(kv_heads, dim, kind, dtype)
    contexts, counts = [40, 300, 3], [17, 46, 0]
    tables, before, behind = pages_of(contexts), 2, 3  # rows of others, and padding
    starts = torch.tensor([before, 19, 65, 65], dtype=torch.int32)
    tokens = before + sum(counts) + behind
    sinks = random(heads, seed=9) if kind == "model" else None
    scores = scores._replace(sinks=sinks)
    q = random(tokens, heads, dim, dtype=dtype, seed=5)
    lengths, longest = torch.tensor(contexts, dtype=torch.int32), tables.shape[1] * BLOCK
    part = Part(tables, lengths, starts, 63)
    out = torch.full_like(q, 7)
    attention.attend(q, own, part, longest, scores, out)
    own_ends = [c - n + i + 1 for c, n in zip(contexts, counts, strict=True) for i in range(n)]
    owners = [i for i, n in enumerate(counts) for _ in range(n)]
    ends = torch.tensor(own_ends, dtype=torch.int32)
    want = attend(q[before:-behind], own, tables[owners], ends, longest, scores)
    assert torch.equal(out[before:-behind], want)
    assert (out[:before] == 7).all()
    assert (out[-behind:] == 0).all()
    part = Part(tables, lengths * 0, starts * 0, 63)  # a step without such texts
    assert not attention.attend(q, own, part, longest, scores, out).any()


def test_sinks_take_a_part_of_the_weight(level: isa.Isa) -> None:
    own = make_cache(2, 32, "model", torch.float32)
    tables, lengths = pages_of([290]), torch.tensor([290], dtype=torch.int32)
    q, sinks = random(1, 4, 32), torch.tensor([-3.0, 0.0, 4.0, 60.0])
    plain = attend(q, own, tables, lengths, 296, Scores(0.3))
    got = attend(q, own, tables, lengths, 296, Scores(0.3, sinks=sinks))
    k = own.load(tables[0, :37], torch.float32)[0][:, :290].repeat_interleave(2, 0)
    scores = torch.cat([(k @ q[0, :, :, None])[..., 0] * 0.3, sinks[:, None]], 1)
    share = 1 - scores.softmax(1)[:, -1]
    assert torch.allclose(got[0], plain[0] * share[:, None], atol=2e-6)


def test_attention_shows_what_is_not_a_number(level: isa.Isa) -> None:
    own = make_cache(1, 16, "model", torch.float32)
    tables, lengths = pages_of([20]), torch.tensor([20], dtype=torch.int32)
    q = torch.ones(1, 1, 16)
    own.k[tables[0, 1], 0, 3] = float("nan")
    assert attend(q, own, tables, lengths, 24, Scores(0.3)).isnan().all()
    # Outside of the window it is not seen.
    assert attend(q, own, tables, lengths, 24, Scores(0.3, 5)).isfinite().all()


WRITTEN = [  # kind of cache, dtype, dimension of heads, whether they are normed
    ("model", torch.float32, 32, False),
    ("model", torch.bfloat16, 80, True),
    ("static", torch.bfloat16, 80, False),
    ("dynamic", torch.float16, 16, False),
    ("dynamic", torch.float32, 16, True),
    ("int4", torch.float32, 16, False),
    ("int4", torch.bfloat16, 80, False),
    ("int4", torch.float16, 256, False),
    ("k8v4", torch.float32, 256, False),
    ("k8v4", torch.bfloat16, 64, True),
    ("k8v4", torch.float16, 160, False),
    ("int4", torch.float32, 64, True),
]


@pytest.mark.parametrize(
    ("case", "level"), pairs(WRITTEN, LEVELS, 2), indirect=["level"], ids=named
)
def test_write(level: isa.Isa, case: tuple[str, torch.dtype, int, bool]) -> None:
    kind, dtype, dim, normed = case
    heads, kv_heads, tokens = 5, 2, 7
    own, other = (make_cache(kv_heads, dim, kind, dtype) for _ in range(2))
    if kind != "model":
        for a, b in ((own.k_scale, other.k_scale), (own.v_scale, other.v_scale)):
            assert a is not None
            assert b is not None
            b.copy_(a)
    qkv = random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angle = random(64, dim // 2)
    rope = (angle.cos(), angle.sin())
    positions = torch.tensor([0, 5, 63, 7, 8, 9, 1], dtype=torch.int32)
    slots = torch.tensor([3, 17, 500, -1, 88, 89, 511], dtype=torch.int32)
    weights = (random(dim, dtype=dtype, seed=2), random(dim, seed=4))  # of q, and of k
    norms = (weights[0], weights[1].to(dtype), 1e-6) if normed else None
    got = cache.write(qkv, own, rope, positions, slots, heads, norms)

    q, k, v = qkv.unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], 1e-6), rms_norm(k, norms[1], 1e-6)
    cos, sin = (table[positions.long(), None] for table in rope)
    q, k = definition.rotate(q, cos, sin), definition.rotate(k, cos, sin)
    if kind == "int4":
        q = spread(q).to(dtype)
    kept = slots >= 0
    other.store(k[kept], v[kept], slots[kept].long())
    # Without norms everything is exact; their sums of squares may differ in the last bit.
    exact = not normed
    assert (torch.equal(got, q)) if exact else ((got - q).abs() <= 8 * EPS[dtype] * 4).all()
    for a, b in zip(own.of_tokens, other.of_tokens, strict=True):
        eps = max(EPS[dtype], EPS.get(a.dtype, 0))
        limit = 0.0 if exact else 32 * eps if a.is_floating_point() else 1.0
        if a.dtype == torch.uint8:
            a, b = unpack(a), unpack(b)
        assert (a.float() - b.float()).abs().max() <= limit


def test_caches_that_no_kernel_takes() -> None:
    def empty(dim: int, dtype: torch.dtype) -> LayerCache:
        return LayerCache.empty(2, 1, 4, dim, plain(dtype), torch.device("cpu"))

    assert empty(32, torch.bfloat16).by_kernels
    assert not empty(20, torch.bfloat16).by_kernels
    assert not empty(32, torch.float64).by_kernels
    assert "no multiple of 16" in (cache.refuse(empty(20, torch.float32)) or "")


# Recordings.


def steps(f: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], Recording]:
    """What a recorded function gives for three inputs, and the recording."""
    x = random(2, 48)
    recording = Recording(lambda: f(x), {})
    out = []
    for i in range(3):
        x.copy_(random(2, 48, seed=i))
        recording.replay()
        out.append(recording.out.clone())
    return out, recording


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_recordings_do_what_was_recorded(threads: int) -> None:
    weight, bias = random(96, 48), random(96, seed=1)

    def step(x: Tensor) -> Tensor:
        norm, total = fused.add_norm(x, x, bias[:48], 1e-5)
        gate, up = dense.linear(norm, weight, bias).chunk(2, -1)  # a view
        y = fused.silu_mul(gate, up)
        y = y.reshape(-1, 24).flip(0).view(2, 48)  # torch's own
        y += total
        y[0, :3] = total.sum()
        half = torch.empty(2, 48, dtype=torch.bfloat16)
        half.copy_(y)
        one = torch.cat([y[:1], total[1:]], 1)  # one after the other
        return torch.cat([half.float(), torch.full((2, 1), 7.0), one[:, :2].view(2, 1)], 1) * 2

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got, recording = steps(step)
        want = [step(random(2, 48, seed=i)) for i in range(3)]
    finally:
        torch.set_num_threads(before)
    assert recording.refused is None
    assert 1 < len(recording.parts) < 12
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_recordings_have_memory_of_their_own() -> None:
    """Any thread may replay one, beside what the thread that recorded it does meanwhile."""
    found = [build.workspace(64)]
    for _ in range(2):
        Recording(lambda: (found.append(build.workspace(64)), torch.zeros(1))[1], {})
    found.append(build.workspace(64))
    own, first, second, again = (memory.data_ptr() for memory in found)
    assert len({own, first, second}) == 3
    assert again == own


def test_steps_that_the_host_looks_into_run_as_they_are() -> None:
    def step(x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x - 1

    got, recording = steps(step)
    assert recording.refused
    assert [torch.equal(g, step(random(2, 48, seed=i))) for i, g in enumerate(got)] == [True] * 3


def test_workspaces_live_as_long_as_a_recording() -> None:
    own = make_cache(2, 32, "model", torch.float32)
    tables, lengths = pages_of([300]), torch.tensor([300], dtype=torch.int32)
    q = random(1, 4, 32)
    recording = Recording(lambda: attend(q, own, tables, lengths, 304, Scores(0.3)), {})
    want = recording.out.clone()
    more = q.repeat(40, 1, 1)  # a larger workspace, which takes the place of the first
    attend(more, own, tables.repeat(40, 1), lengths.repeat(40), 304, Scores(0.3))
    recording.out.zero_()
    recording.replay()
    assert torch.equal(recording.out, want)
