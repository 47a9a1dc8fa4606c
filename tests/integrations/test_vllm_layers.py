"""anybit in vLLM's own layers, with ranks played in turn (`make test-vllm`; no engine, no GPU)."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.nn.functional import linear
from vllm import distributed
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear as layers
from vllm.model_executor.layers import vocab_parallel_embedding as vocabulary
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.models.utils import WeightsMapper

import anybit
from anybit.core.packed import Packed
from anybit.engine.experts import Apart
from anybit.errors import InvalidInput, Unsupported
from anybit.integrations.vllm import AnybitConfig, register
from anybit.integrations.vllm_foreign import Source, planned
from anybit.integrations.vllm_linear import Stored
from anybit.integrations.vllm_products import all_experts, one_by_one
from anybit.kernels.reference import operand_weight
from tests.foreign.make import FIXTURES
from tests.specs import SPECS

RANKS = (1, 2, 4)
HEADS, KV_HEADS, HEAD, HIDDEN, MIDDLE, WORDS = 4, 2, 8, 512, 768, 200
SMALL = [s for s in SPECS if "128" not in s]  # 512 / 4 and 768 / 4 columns hold whole groups
NEAR = {"rtol": 1e-4, "atol": 1e-3}
MERGED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
SHAPES = {
    "q_proj": (HEADS * HEAD, HIDDEN),
    "k_proj": (KV_HEADS * HEAD, HIDDEN),
    "v_proj": (KV_HEADS * HEAD, HIDDEN),
    "gate_proj": (12, HIDDEN),
    "up_proj": (12, HIDDEN),
    "o_proj": (20, HIDDEN),
    "down_proj": (20, MIDDLE),
    "single": (24, HIDDEN),
    "lm_head": (WORDS, HIDDEN),
}


@pytest.fixture(autouse=True)
def config():
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        yield


@pytest.fixture
def play(monkeypatch):
    """Make vLLM believe that this process is one of several ranks."""

    def rank_of(rank, ranks):
        for module in (layers, parameter, vocabulary):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)

    return rank_of


def checkpoint(plan):
    """Stored tensors and decoded weights of layers model.X, and the configuration."""
    torch.manual_seed(0)
    stored, decoded = {}, {}
    for name, shape in SHAPES.items():
        w = torch.randn(shape)
        scheme = next((s for pattern, s in reversed(plan.items()) if pattern in ("*", name)), None)
        if scheme is None:
            stored[f"model.{name}.weight"] = decoded[name] = w
            continue
        packed = anybit.quantize_tensor(w, scheme)
        stored |= {f"model.{name}.{key}": tensor for key, tensor in packed.tensors().items()}
        decoded[name] = operand_weight(packed, torch.float32)
    own = AnybitConfig({p if p == "*" else f"model.{p}": s for p, s in plan.items()})
    own.packed_modules_mapping = MERGED
    own._survey({name: tuple(tensor.shape) for name, tensor in stored.items()})
    return own, stored, decoded


def load(layer, stored, part, shard=None):
    """Hand over the tensors of one of the checkpoint's layers, as vLLM's models do."""
    for name, tensor in stored.items():
        _, owner, key = name.split(".")
        if owner == part:
            param = getattr(layer, key)
            param.weight_loader(param, tensor, *(() if shard is None else (shard,)))


def run(layer, x):
    layer.quant_method.process_weights_after_loading(layer)
    return layer.quant_method.apply(layer, x, None)


def parallel_outputs(own, stored, rank, ranks, x, middle):
    """Outputs of every kind of layer on one rank."""
    options = {"bias": False, "quant_config": own}
    qkv = layers.QKVParallelLinear(
        HIDDEN, HEAD, HEADS, KV_HEADS, prefix="model.qkv_proj", **options
    )
    for part, shard in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v")):
        load(qkv, stored, part, shard)
    gate_up = layers.MergedColumnParallelLinear(
        HIDDEN, [12, 12], prefix="model.gate_up_proj", **options
    )
    for shard, part in enumerate(("gate_proj", "up_proj")):
        load(gate_up, stored, part, shard)
    down = layers.RowParallelLinear(
        MIDDLE, 20, prefix="model.down_proj", reduce_results=False, **options
    )
    load(down, stored, "down_proj")
    column = layers.ColumnParallelLinear(HIDDEN, 24, prefix="model.single", **options)
    load(column, stored, "single")
    alone = layers.ReplicatedLinear(HIDDEN, 24, prefix="model.single", **options)
    load(alone, stored, "single")
    head = vocabulary.ParallelLMHead(WORDS, HIDDEN, quant_config=own, prefix="model.lm_head")
    load(head, stored, "lm_head")
    width = MIDDLE // ranks
    return {
        "qkv": run(qkv, x),
        "gate_up": run(gate_up, x),
        "down": run(down, middle[:, rank * width : (rank + 1) * width]),
        "column": run(column, x),
        "replicated": run(alone, x),
        "head": run(head, x),
    }


def check(plan, ranks, play):
    own, stored, decoded = checkpoint(plan)
    x, middle = torch.randn(3, HIDDEN), torch.randn(3, MIDDLE)
    wanted = {name: linear(middle if name == "down_proj" else x, w) for name, w in decoded.items()}
    down, heads = 0, []
    for rank in range(ranks):
        play(rank, ranks)
        got = parallel_outputs(own, stored, rank, ranks, x, middle)
        q = wanted["q_proj"].chunk(ranks, 1)[rank]
        kv_ranks = min(ranks, KV_HEADS)  # beyond that, ranks share a head
        k, v = (
            wanted[name].chunk(kv_ranks, 1)[rank * kv_ranks // ranks]
            for name in ("k_proj", "v_proj")
        )
        gate, up = (wanted[name].chunk(ranks, 1)[rank] for name in ("gate_proj", "up_proj"))
        torch.testing.assert_close(got["qkv"], torch.cat([q, k, v], 1), rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(got["gate_up"], torch.cat([gate, up], 1), rtol=1e-4, atol=1e-3)
        single = wanted["single"]
        torch.testing.assert_close(
            got["column"], single.chunk(ranks, 1)[rank], rtol=1e-4, atol=1e-3
        )
        torch.testing.assert_close(got["replicated"], single, rtol=1e-4, atol=1e-3)
        down = down + got["down"]
        heads.append(got["head"])
    torch.testing.assert_close(down, wanted["down_proj"], rtol=1e-4, atol=1e-3)
    words = torch.cat(heads, 1)
    torch.testing.assert_close(words[:, :WORDS], wanted["lm_head"], rtol=1e-4, atol=1e-3)
    assert not words[:, WORDS:].any()


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("spec", SMALL)
def test_every_kind_of_layer(spec, ranks, play):
    fmt = anybit.get_format(spec)
    groups = [entry.group for entry in fmt.entries().values() if entry.group]
    if fmt.tile[0] > 1:  # layers of few rows
        with pytest.raises(InvalidInput, match="is not a multiple of tiles"):
            check({"*": spec, "lm_head": spec}, ranks, play)
    elif any(MIDDLE // ranks % group for group in groups):
        with pytest.raises(InvalidInput, match=r"down_proj: K=768 over .* which splits group"):
            check({"*": spec, "lm_head": spec}, ranks, play)
    else:
        check({"*": spec, "lm_head": spec}, ranks, play)


@pytest.mark.parametrize("ranks", RANKS)
def test_parts_of_a_merged_layer_may_differ(ranks, play):
    plan = {
        "*": "int4:group=64",
        "k_proj": "codebook:m=1,v=4",
        "v_proj": None,
        "up_proj": "int4:group=32,zero",
        "lm_head": "int8",
    }
    check(plan, ranks, play)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("spec", ["int4:group=64", "codebook:m=1,v=4"])
def test_layers_that_are_merged_in_the_checkpoint(spec, ranks, play):
    """As Phi-3's: one weight, one codebook, divided by vLLM."""
    n = (HEADS + 2 * KV_HEADS) * HEAD
    packed = anybit.quantize_tensor(torch.randn(n, HIDDEN), spec)
    stored = {f"model.qkv_proj.{key}": tensor for key, tensor in packed.tensors().items()}
    own = AnybitConfig({"*": spec})
    own.packed_modules_mapping = {"qkv_proj": ["qkv_proj"]}
    own._survey({name: tuple(tensor.shape) for name, tensor in stored.items()})
    x = torch.randn(3, HIDDEN)
    q, k, v = linear(x, operand_weight(packed, torch.float32)).split(
        [HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], 1
    )
    for rank in range(ranks):
        play(rank, ranks)
        layer = layers.QKVParallelLinear(
            HIDDEN, HEAD, HEADS, KV_HEADS, bias=False, quant_config=own, prefix="model.qkv_proj"
        )
        load(layer, stored, "qkv_proj")
        wanted = torch.cat([part.chunk(ranks, 1)[rank] for part in (q, k, v)], 1)
        torch.testing.assert_close(run(layer, x), wanted, rtol=1e-4, atol=1e-3)


def test_columns_in_an_order_of_their_own(play, caplog):
    """Act-order: whole on every rank of a column-parallel layer, dense on a row-parallel one."""
    fmt = anybit.get_format("int4:group=64,order")
    plain = anybit.quantize_tensor(torch.randn(20, MIDDLE), "int4:group=64")
    order = torch.randperm(MIDDLE, dtype=torch.int32)
    packed = anybit.core.packed.Packed(
        fmt, plain.shape, plain.planes, plain.grid | {"order": order}
    )
    stored = {f"model.down_proj.{key}": tensor for key, tensor in packed.tensors().items()}
    own = AnybitConfig({"*": fmt.spec})
    own._survey({name: tuple(tensor.shape) for name, tensor in stored.items()})
    x = torch.randn(3, MIDDLE)
    wanted = linear(x, packed.dequantize())
    options = {"bias": False, "quant_config": own, "prefix": "model.down_proj"}
    down = 0
    for rank in range(2):
        play(rank, 2)
        row = layers.RowParallelLinear(MIDDLE, 20, reduce_results=False, **options)
        load(row, stored, "down_proj")
        down = down + run(row, x.chunk(2, 1)[rank])
        column = layers.ColumnParallelLinear(MIDDLE, 20, **options)
        load(column, stored, "down_proj")
        torch.testing.assert_close(run(column, x), wanted.chunk(2, 1)[rank], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(down, wanted, rtol=1e-4, atol=1e-3)


OTHERS = {  # and what its layers become; hidden sizes of 32 and 64
    "aqlm_2x8": "codebook",
    "awq_gemm": "int4",
    "ct_activations": "int4",
    "ct_floats": "nvfp4",
    "gptq_4bit_act_order": "int4:group=16,order",
    "hqq_4bit": "int4",
    "hqq_axis0": None,
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", OTHERS)
def test_layers_of_other_tools(name, ranks, play):
    """Each rank's part of what `convert` makes of them."""
    directory, block = FIXTURES / name, "model.layers.0"
    work = planned(directory)
    schemes = {n: layer.scheme for n, layer in work.layers.items()}
    assert any((s or "dense").startswith(OTHERS[name] or "dense") for s in schemes.values())
    own = AnybitConfig(dict(work.formats), foreign=True)
    own.source = Source(directory, schemes)
    own.packed_modules_mapping = MERGED
    stored = {n: tensor.read() for n, tensor in work.stored.items()}
    own._survey({n: tuple(tensor.shape) for n, tensor in stored.items()})
    decoded = {n.removesuffix(".weight"): t.float() for n, t in stored.items()}
    for n in schemes:
        weight = work.layers[n].read()
        decoded[n] = weight.dequantize() if isinstance(weight, Packed) else weight
    hidden, middle = (decoded[f"{block}.mlp.{part}_proj"].shape[1] for part in ("up", "down"))
    options = {"bias": False, "quant_config": own}
    x, wide = torch.randn(3, hidden), torch.randn(3, middle)
    loose = {"rtol": 0.05, "atol": 0.05} if any(s and "@" in s for s in schemes.values()) else {}
    down = 0

    def give(layer, part, shard=None):
        owner = f"{block}.{part}."
        for n, tensor in stored.items():
            if n.startswith(owner):
                param = getattr(layer, n.removeprefix(owner))
                param.weight_loader(param, tensor, *(() if shard is None else (shard,)))

    for rank in range(ranks):
        play(rank, ranks)
        qkv = layers.QKVParallelLinear(
            hidden, hidden // 2, 2, 2, prefix=f"{block}.self_attn.qkv_proj", **options
        )
        for shard in "kqv":  # in any order
            give(qkv, f"self_attn.{shard}_proj", shard)
        gate_up = layers.MergedColumnParallelLinear(
            hidden, [middle] * 2, prefix=f"{block}.mlp.gate_up_proj", **options
        )
        for shard, part in enumerate(("gate_proj", "up_proj")):
            give(gate_up, f"mlp.{part}", shard)
        row = layers.RowParallelLinear(
            middle, hidden, prefix=f"{block}.mlp.down_proj", reduce_results=False, **options
        )
        give(row, "mlp.down_proj")
        for layer, group, parts in (
            (qkv, "self_attn", ("q_proj", "k_proj", "v_proj")),
            (gate_up, "mlp", ("gate_proj", "up_proj")),
        ):
            rows = [decoded[f"{block}.{group}.{part}"].chunk(ranks)[rank] for part in parts]
            wanted = linear(x, torch.cat(rows))
            torch.testing.assert_close(run(layer, x), wanted, **(loose or NEAR))
        down = down + run(row, wide.chunk(ranks, 1)[rank])
    wanted = linear(wide, decoded[f"{block}.mlp.down_proj"])
    torch.testing.assert_close(down, wanted, **(loose or NEAR))


def test_a_divided_group_is_an_error_before_anything_is_loaded(play):
    own, _, _ = checkpoint({"*": "int4:group=128", "lm_head": None})
    play(0, 4)
    with pytest.raises(ValueError, match=r"down_proj: K=768 over 4 .* with group=64, use fewer"):
        layers.RowParallelLinear(MIDDLE, 20, bias=False, quant_config=own, prefix="model.down_proj")


class Squared:
    """Experts that multiply by matrices, one by one."""

    def __init__(self, n, k):
        self.count, self.weights = 4, torch.randn(4, n, k)
        self.product = AtOnce(self.weights)

    def __call__(self, x, expert):
        return linear(x, self.weights[expert])


class AtOnce(Apart):
    """The same, all at once."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def forward(self, x, starts):
        y = torch.full((len(x), self.weights.shape[1]), torch.nan)  # rows beyond are not written
        for expert, (first, last) in enumerate(pairwise(starts)):
            y[first:last] = linear(x[first:last], self.weights[expert])
        return y


def test_experts_at_once_are_experts_one_by_one():
    """Tokens sorted by expert, or as a compiled graph; -1 is another rank's, expert 2 has none."""
    x, up, down = torch.randn(9, 16), Squared(24, 16), Squared(16, 24)
    ids = torch.tensor([[0, 1], [1, 3], [-1, 0], [-1, -1], [3, 1], [3, 0], [0, 3], [1, -1], [0, 1]])
    weights = torch.rand(9, 2)
    whole = torch.compile(one_by_one, fullgraph=True, backend="eager")
    ways = all_experts, one_by_one, whole
    got = [way(x, weights, ids, up, down, torch.relu) for way in ways]
    wanted = torch.zeros(9, 16)
    for token in range(9):
        for at in range(2):
            expert = int(ids[token, at])
            if expert >= 0:
                wanted[token] += weights[token, at] * down(up(x[token], expert).relu(), expert)
    for y in got:
        torch.testing.assert_close(y, wanted)


def test_mappers_see_names_as_those_of_tensors():
    """Of Mistral 3, which maps `lm_head.`, with its dot."""
    own, _, _ = checkpoint({"*": "int8", "lm_head": "int8"})
    own.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.lm_head.": "language.lm_head."}))
    assert own.names["language.lm_head"] == "model.lm_head"
    assert own.scheme("language.lm_head") == "int8"


def test_layers_that_a_model_builds_under_another_path():
    """The only layer of its name in the block, or in the block that is built; else it is none."""
    own = AnybitConfig({"*": "int8"})
    layers = ("0.mamba.in_proj", "0.attn.o_proj", "1.mamba.in_proj", "1.a.fc", "1.b.fc")
    own._survey({f"model.layers.{name}.codes8": (32, 8) for name in layers})
    assert own.parts("model.layers.0.attn.o_proj") == ["model.layers.0.attn.o_proj"]
    assert own.parts("model.2.mixer.in_proj") == ["model.layers.0.mamba.in_proj"]
    assert own.parts("model.layers.1.mixer.in_proj") == ["model.layers.1.mamba.in_proj"]
    assert own.parts("model.layers.0.other.in_proj") == ["model.layers.0.other.in_proj"]  # held
    assert own.parts("model.layers.1.c.fc") == ["model.layers.1.c.fc"]  # one of two
    with pytest.raises(Unsupported, match=r"has this layer and model\.2\.mixer\.in_proj"):
        own.parts("model.layers.0.mamba.in_proj")


def test_layers_of_several_parts():
    """A layer of the checkpoint is as many parts as have its rows, on any number of ranks."""
    names, schemes, rows = ["qkv", "z"], ["int8", "fp6"], [64, 32]
    method = Stored(names, schemes, rows, None)
    assert method.each([8, 8, 16, 16]) == [("qkv", "int8")] * 3 + [("z", "fp6")]
    assert method.each([64, 32]) == [("qkv", "int8"), ("z", "fp6")]
    with pytest.raises(InvalidInput, match=r"qkv, z: .* of \[64, 32\] rows into parts of \[40, "):
        method.each([40, 40, 16])


def test_registering_twice_changes_nothing():
    register()
    first = get_quantization_config("anybit")
    register()
    assert get_quantization_config("anybit") is first is AnybitConfig


def embedded(spec, tied):
    """A model of transformers with quantized embeddings, and the configuration for vLLM."""
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=tied, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    anybit.quantize_(model, {"*": "int8", "*.embed_tokens": spec})
    stored = model.state_dict()
    own = AnybitConfig(model.anybit_formats)
    own.packed_modules_mapping = MERGED
    own._survey({name: tuple(tensor.shape) for name, tensor in stored.items()}, config)
    return model, stored, own


@pytest.mark.parametrize("spec", ["int8", "int4:group=32", "nvfp4", "codebook:m=1,v=4"])
@pytest.mark.parametrize("prefix", ["", "model.embed_tokens"])
def test_embeddings_are_looked_up_as_they_are_stored(spec, prefix, play):
    model, stored, own = embedded(spec, tied=True)
    table = model.get_input_embeddings().dequantize()
    for ranks in RANKS:
        for rank in range(ranks):
            play(rank, ranks)
            layer = vocabulary.VocabParallelEmbedding(WORDS, 64, quant_config=own, prefix=prefix)
            head = vocabulary.ParallelLMHead(WORDS, 64, quant_config=own, prefix="lm_head")
            for name, tensor in stored.items():
                if name.startswith("model.embed_tokens."):
                    param = getattr(layer, name.rpartition(".")[2])
                    param.weight_loader(param, tensor)
            layer.quant_method.process_weights_after_loading(layer)
            layer.quant_method.process_weights_after_loading(layer)
            first = layer.shard_indices.org_vocab_start_index
            rows = table[first : layer.shard_indices.org_vocab_end_index]
            ids = torch.arange(len(rows))
            assert torch.equal(layer.quant_method.embedding(layer, ids), rows)
            assert head.tie_weights(layer) is layer
            x = torch.randn(3, 64)
            y = layer.quant_method.apply(layer, x, None)
            torch.testing.assert_close(y[:, : len(rows)], linear(x, rows), **NEAR)


def test_a_head_beside_the_embeddings(play):
    _, stored, own = embedded("int8", tied=False)
    play(0, 1)
    layer = vocabulary.VocabParallelEmbedding(WORDS, 64, quant_config=own)
    assert layer.quant_method.head is None
    assert vocabulary.ParallelLMHead(WORDS, 64, quant_config=own, prefix="lm_head").weight.numel()
    assert "lm_head.weight" in stored


def test_a_model_of_vllms_that_does_not_ask(play, monkeypatch):
    """Of Gemma 2, which builds its embeddings without a configuration."""
    _, _, own = embedded("int8", tied=True)
    play(0, 1)
    monkeypatch.setattr(distributed, "get_pp_group", lambda: SimpleNamespace(is_first_rank=True))
    with pytest.raises(Unsupported, match="takes no quantized embeddings; leave them out"):
        layers.RowParallelLinear(64, 64, quant_config=own, prefix="model.layers.0.mlp.down_proj")


def test_embeddings_are_not_quantized_on_load():
    model = embedded("int8", tied=True)[0]
    own = AnybitConfig({"*": "int8", "*.embed_tokens": "int8"})
    with pytest.raises(InvalidInput, match="not quantized while vLLM loads a model"):
        own._survey({f"{n}.weight": (64, 64) for n in ("a", "b")}, model.config)
