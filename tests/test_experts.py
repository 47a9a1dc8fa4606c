"""Mixtures of experts, in both layouts that checkpoints have: quantized, stored, loaded and run."""

import copy
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GptOssConfig,
    Llama4TextConfig,
    NemotronHConfig,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

import anybit
from anybit import GPTQ, HQQ, Additive, Clip, Smooth
from anybit.checkpoint.calibrated import calibrate_checkpoint
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from anybit.evaluate.perplexity import score
from anybit.files.safetensors import stored_tensors
from anybit.integrations.transformers import AnybitConfig
from anybit.nn.experts import Experts, fused_experts, published, split
from anybit.nn.gates import gates
from anybit.nn.linear import QuantLinear
from anybit.nn.model import dense_layers, dequantize_, linear_schemes, quantized_layers
from anybit.nn.outline import TINY
from anybit.planning.allocate import plan_formats
from anybit.quantizers.calibration.block_runner import BlockRunner
from tests.engine.conftest import ARCHITECTURES, random_model, reference
from tests.models import zoo
from tests.test_calibration import Killed, killed_after
from tests.tiny import same_output, same_state

KINDS = ("mixtral", "qwen2_moe", "qwen3_moe")
LAYOUTS = ("one by one", "fused")
PROMPT = list(range(2, 40))
CODES = "codebook:m=1,v=4,b=8"


def exact_model(kind):
    """Weights of linear layers are whole numbers to +-127 times 2^-9, which int8 holds exactly."""
    model = random_model(*ARCHITECTURES[kind]).eval()
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1 and "embed" not in name:
                p.copy_(torch.randint(-127, 128, p.shape, generator=random) * 2.0**-9)
                p[..., 0] = 127 * 2.0**-9
    return model


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def layout(kind):
    """One of them, where a test does not try both."""
    return LAYOUTS[KINDS.index(kind) % 2]


@pytest.fixture(scope="module")
def stored(kind, tmp_path_factory):
    """{layout: directory} of the same dense model."""
    made, blocks = {}, 1 if kind == "qwen2_moe" else 2
    for layout, count in zip(LAYOUTS, (0, blocks), strict=True):
        made[layout] = tmp_path_factory.mktemp(f"{kind}-{layout.replace(' ', '-')}")
        exact_model(kind).save_pretrained(
            made[layout], save_original_format=layout == "one by one", max_shard_size="150KB"
        )
        names = stored_tensors(made[layout])
        assert sum(name.endswith("experts.gate_up_proj") for name in names) == count
    return made


def loaded(path, spec=None):
    config = {} if spec is None else {"quantization_config": AnybitConfig(spec)}
    return AutoModelForCausalLM.from_pretrained(path, **config).eval()


def names(kind):
    """A pattern for the experts' gates, and one for their down projections."""
    gate, down = ("w1", "w2") if kind == "mixtral" else ("gate_proj", "down_proj")
    return f"*.experts.*.{gate}", f"*.experts.*.{down}"


def greedy(path, **options):
    answer = LLM(path, dtype="float32", device="cpu", **options).generate(
        [PROMPT], SamplingParams(max_tokens=12, temperature=0)
    )
    return answer[0].tokens


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ways_to_the_same_model(kind, stored, layout, tmp_path):
    """In memory, while loading, streamed; saved and loaded; in the engine. Exact, so equal."""
    dense = stored[layout]
    wanted = anybit.quantize_(loaded(dense), "int8")
    layers = [n for n, _ in quantized_layers(wanted) if ".experts." in n]
    assert len(layers) == (12 if kind == "qwen2_moe" else 24)
    assert not list(fused_experts(wanted))
    for name, tensor in exact_model(kind).state_dict().items():
        if name.endswith("experts.down_proj"):
            down = names(kind)[1].rpartition(".")[2]
            for e, weight in enumerate(tensor):
                got = wanted.get_submodule(name.removesuffix("down_proj") + f"{e}.{down}")
                assert torch.equal(got.dequantize(), weight)
    torch.testing.assert_close(logits_of(wanted), logits_of(loaded(dense)), rtol=1e-4, atol=1e-4)

    same_state(wanted, loaded(dense, "int8"))
    report = quantize_checkpoint(dense, tmp_path / "streamed", "int8")
    assert not report.unexpected
    assert not report.unexpected
    same_state(wanted, anybit.load(tmp_path / "streamed"))
    anybit.save(wanted, tmp_path / "saved")
    stored_names = (stored_tensors(tmp_path / name) for name in ("saved", "streamed"))
    found = [{published(name, kind) for name in names} for names in stored_names]
    assert found[0] == found[1]
    same_state(wanted, anybit.load(tmp_path / "saved"))

    tokens = reference(loaded(dense), PROMPT, 12)
    assert greedy(dense) == tokens
    assert greedy(tmp_path / "saved") == tokens
    assert greedy(tmp_path / "streamed") == tokens
    assert greedy(dense, quantization="int8") == tokens


def logits_of(model):
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits


def test_some_layers_stay_dense(kind, stored, layout, tmp_path):
    gate, down = names(kind)
    plan = {"*": "fp6", gate: "int5:group=16", "*.experts.1.*": None, down: None}
    wanted = anybit.quantize_(loaded(stored[layout]), plan)
    kinds = {
        name: type(m)
        for name, m in wanted.named_modules()
        if ".experts." in name and isinstance(m, QuantLinear | torch.nn.Linear)
    }
    assert {n for n, t in kinds.items() if t is QuantLinear} == {
        n for n in kinds if ".experts.1." not in n and not n.endswith(down.rpartition(".")[2])
    }
    same_state(wanted, loaded(stored[layout], plan))
    quantize_checkpoint(stored[layout], tmp_path / "streamed", plan)
    same_state(wanted, loaded(tmp_path / "streamed"))
    anybit.save(wanted, tmp_path / "saved")
    again = anybit.load(tmp_path / "saved")
    same_state(wanted, again)
    same_output(logits_of(again), logits_of(wanted))
    tokens = reference(wanted, PROMPT, 12)
    assert greedy(tmp_path / "saved") == tokens
    assert greedy(stored[layout], quantization=plan) == tokens


def test_experts_that_all_stay_dense_are_left_as_they_are(kind, stored, tmp_path):
    plan = {"*": "int8", "*.experts.*": None}
    wanted = anybit.quantize_(loaded(stored["fused"]), plan)
    assert len(list(fused_experts(wanted))) == (1 if kind == "qwen2_moe" else 2)
    anybit.save(wanted, tmp_path / "saved")
    again = anybit.load(tmp_path / "saved")
    assert again.anybit_formats == wanted.anybit_formats
    assert plan.items() <= again.anybit_formats.items()  # besides, gates stay dense
    torch.testing.assert_close(logits_of(wanted), logits_of(again), rtol=1e-4, atol=1e-4)
    assert greedy(tmp_path / "saved") == reference(wanted, PROMPT, 12)


@pytest.mark.parametrize("name", ["GraniteMoe", "GraniteMoeHybrid", "GraniteMoeShared", "AriaText"])
def test_a_block_of_dense_experts_beside_one_in_codes(name, tmp_path):
    """Some models' checkpoints have other names for a block's experts as long as they are dense."""
    model = zoo.Model(f"{name}ForCausalLM").make()
    model.save_pretrained(tmp_path / "dense")
    (block, _), *others = fused_experts(model)
    assert others
    plan = {"*": "int8", f"{block}.*": None}
    wanted = anybit.quantize_(model, plan)
    quantize_checkpoint(tmp_path / "dense", tmp_path / "streamed", plan)
    anybit.save(wanted, tmp_path / "saved")
    anybit.save(anybit.load(tmp_path / "streamed"), tmp_path / "again")
    kind: Any = type(wanted)
    for path in ("streamed", "saved", "again"):
        found, info = kind.from_pretrained(tmp_path / path, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        same_state(wanted, found)
        same_state(wanted, anybit.load(tmp_path / path))


GATES = {
    "Qwen3_5ForCausalLM": ("in_proj_a", "in_proj_b"),
    "Qwen3NextForCausalLM": ("in_proj_ba",),
    "JambaForCausalLM": ("dt_proj", "router"),
    "OlmoHybridForCausalLM": ("a_proj", "b_proj"),
    "GraniteMoeForCausalLM": ("layer", "router"),
}


@pytest.mark.parametrize("name", GATES)
def test_gates_and_routers_stay_dense(name, monkeypatch):
    """Unless a pattern names them. Those of tiny models are kept for their size, too."""
    monkeypatch.setattr("anybit.nn.outline.TINY", 1)
    config = zoo.Model(name).config()
    with torch.device("meta"):
        model = zoo.Model(name).type(config)
    shapes = dense_layers(model)
    planned = linear_schemes(model, "int4:group=1")
    kept = {layer.rpartition(".")[2] for layer in shapes.keys() - planned.keys()}
    assert kept - {"lm_head", "shared_expert_gate"} <= set(GATES[name])
    own = [layer for layer in shapes if layer.rpartition(".")[2] in GATES[name]]
    assert not planned.keys() & set(own)
    named = linear_schemes(model, {"*": "int4:group=1", **dict.fromkeys(own[:1], "int8")})
    assert {named.get(layer) for layer in own[:1]} <= {"int8"}


OF_THEIR_SIZE = {  # with 9 layers, which hold all kinds
    "kimi_linear": {"f_a_proj", "f_b_proj", "b_proj"},
    "bailing_hybrid": {"b_proj", "g_proj"},
    "qwen3_next": {"in_proj_ba", "shared_expert_gate"},
    "deepseek_v32": {"weights_proj"},
    "zamba2": set[str](),
    "rwkv": set[str](),
    "qwen3_moe": set[str](),
}


@pytest.mark.parametrize("name", OF_THEIR_SIZE)
def test_gates_of_real_sizes(name):
    """None is taken for one by the number of its outputs, such as an MLP as wide as experts are."""
    if name not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not have it")
    config = AutoConfig.for_model(name)
    config.num_hidden_layers = 9
    for key in ("layer_types", "layers_block_type", "mlp_layer_types"):
        if getattr(config, key, None) is not None:
            setattr(config, key, getattr(config, key)[:9])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    small = {n for n, (rows, columns) in dense_layers(model).items() if min(rows, columns) < TINY}
    assert {layer.rpartition(".")[2] for layer in gates(model) | small} == OF_THEIR_SIZE[name]


def test_decoded_experts_are_a_dense_model(kind, stored, tmp_path):
    model = dequantize_(anybit.quantize_(loaded(stored["one by one"]), "int8"))
    model.save_pretrained(tmp_path / "dense")
    again = loaded(tmp_path / "dense")
    assert list(fused_experts(again))
    same_state(again, loaded(stored["one by one"]))


def test_one_by_one_is_what_transformers_computes(kind, stored):
    fused = loaded(stored["fused"])
    apart = split(loaded(stored["fused"]))
    assert sum(isinstance(m, Experts) for m in apart.modules()) == len(list(fused_experts(fused)))
    torch.testing.assert_close(logits_of(apart), logits_of(fused), rtol=1e-5, atol=1e-5)


def test_both_names_of_mixtrals_layers(tmp_path):
    exact_model("mixtral").save_pretrained(tmp_path / "dense")
    states = []
    for name in ("mlp", "block_sparse_moe"):
        plan = {"*": None, f"model.layers.1.{name}.experts.*": "int4:group=32"}
        out = tmp_path / name
        quantize_checkpoint(tmp_path / "dense", out, plan)
        states.append(anybit.load(out))
        same_state(states[-1], split(anybit.quantize_(loaded(tmp_path / "dense"), plan)))
        assert len(greedy(out)) == 12
    same_state(*states)
    assert len(list(quantized_layers(states[0]))) == 12


def test_an_error_leaves_experts_together(kind, stored):
    model = loaded(stored["fused"])
    before = {n: t.clone() for n, t in model.state_dict().items()}
    name = next(n for n in before if n.endswith("experts.gate_up_proj"))
    layer = f"{name.removesuffix('gate_up_proj')}2.{names(kind)[0].rpartition('.')[2]}"
    model.get_parameter(name).data[2, 3, 5] = torch.nan
    with pytest.raises(ValueError, match=rf"{layer}\.weight: 1 values .*\(3, 5\)"):
        anybit.quantize_(model, "int4:group=32")
    assert model.state_dict().keys() == before.keys()


def test_experts_of_another_layout_are_saved_and_loaded(tmp_path):
    """GPT-OSS has biases, transposed weights, and gate and up interleaved."""
    config = AutoConfig.for_model(
        "gpt_oss", hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=96, num_local_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "dense")
    anybit.quantize_(model, "int8")
    assert "model.layers.1.mlp.experts.3.gate_up_proj" in dict(quantized_layers(model))
    anybit.save(model, tmp_path / "saved")
    same_state(model, anybit.load(tmp_path / "saved"))
    same_state(model, loaded(tmp_path / "dense", "int8"))


# Quantizer.


def text(samples=40):
    return torch.randint(2, 96, (samples, 32), generator=torch.Generator().manual_seed(5))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may sum statistics in another order")
def test_calibrated_from_disk_as_in_memory(kind, stored, layout, tmp_path, monkeypatch):
    plan = {"*": "int4:group=16", names(kind)[1]: "trellis:code=look", "*.experts.0.*": None}
    quantizer = GPTQ(text())
    wanted = split(anybit.quantize_(loaded(stored[layout]), plan, quantizer))
    with monkeypatch.context() as patch:
        killed_after(1, patch)
        with pytest.raises(Killed):
            calibrate_checkpoint(stored[layout], tmp_path / "out", plan, quantizer)
    assert len(list((tmp_path / "out.partial").glob("block_*"))) == 1
    calibrate_checkpoint(stored[layout], tmp_path / "out", plan, quantizer)
    same_state(wanted, anybit.load(tmp_path / "out"))
    assert greedy(tmp_path / "out") == reference(wanted, PROMPT, 12)


@pytest.mark.parametrize(
    ("quantizer", "scheme", "share"), [(GPTQ, "int3:group=16", 0.9), (Smooth, "int4@int8", 0.6)]
)
def test_experts_learn_from_the_tokens_that_they_see(kind, quantizer, scheme, share, tmp_path):
    """Less error than rounding to nearest, on other text of the same kind.

    Some channels are large, both those that the experts read and those inside of them.
    """
    model = random_model(*ARCHITECTURES[kind])
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("post_attention_layernorm.weight"):
                p[::16] *= 20
            elif name.endswith(("experts.gate_up_proj", "mlp.gate.weight", "expert_gate.weight")):
                p[..., ::16] /= 20
                if p.ndim == 3:
                    p[:, p.shape[1] // 2 :: 16] *= 20
            elif name.endswith("experts.down_proj"):
                p[..., ::16] /= 20
    model.save_pretrained(tmp_path)
    plan = {"*": None, "*.experts.*": scheme}
    other = torch.randint(2, 96, (8, 32), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        dense = loaded(tmp_path)(other).logits
        errors = [
            float((anybit.quantize_(loaded(tmp_path), plan, q)(other).logits - dense).norm())
            for q in (quantizer(text()), None)
        ]
    assert errors[0] < share * errors[1], errors


@pytest.mark.parametrize("quantizer", [Clip(), HQQ(), Additive(text(), rounds=1, steps=2)])
def test_other_quantizers(kind, quantizer, tmp_path):
    """Two or three bits for all layers of experts: a smaller KL than by rounding to nearest."""
    random_model(*ARCHITECTURES[kind]).save_pretrained(tmp_path / "dense")
    spec = {Clip: "int3:group=16", HQQ: "int3:group=16,zero"}.get(type(quantizer), CODES)
    dense, other = loaded(tmp_path / "dense"), list(text()[:8])
    plan = {"*": None, "*.experts.*": spec}
    chosen, rounded = (
        score(anybit.quantize_(loaded(tmp_path / "dense"), plan, q), other, window=32, dense=dense)
        for q in (quantizer, None)
    )
    assert chosen.kl < rounded.kl


def test_experts_that_see_nothing_are_named_and_rounded(tmp_path):
    config = ARCHITECTURES["mixtral"][1] | {"num_experts_per_tok": 1}
    model = random_model("mixtral", config).eval()
    for block in model.model.layers:
        router = block.mlp.gate.weight.data
        router[3] = (router[0] + router[1]) / 2  # never the largest
    fused = model.model.layers[1].mlp.experts
    weight = fused.down_proj.data[3].clone()
    with pytest.warns(UserWarning, match=r"6 layers saw fewer .*\.0\.mlp\.experts\.3\.w1 \(0\)"):
        anybit.quantize_(model, "int4:group=16", GPTQ(text()))
    got = model.get_submodule("model.layers.1.mlp.experts.3.w2").packed
    assert torch.equal(got.dequantize(), Clip().quantize(weight, got.format).dequantize())


def test_a_plan_has_one_format_for_the_experts_of_a_block(kind, stored, tmp_path):
    """Predicted KL is that of the quantized experts, within a factor of 2; idle ones are there."""
    model = loaded(stored["fused"])
    dense, ids = logits_of(model), torch.tensor([PROMPT])
    before = [name for name, _ in model.named_modules()]
    choice = plan_formats(model, ids, 4.5, candidates=("int2:group=16", "int4:group=16", "int8"))
    assert [name for name, _ in model.named_modules()] == before
    experts = [g for g in choice.groups if ".experts." in g.names[0]]
    assert len(experts) == (2 if kind == "qwen2_moe" else 4)
    gate, down = (pattern.rpartition(".")[2] for pattern in names(kind))
    assert experts[0].names[0].endswith(f".mlp.experts.*.{gate}")
    assert experts[-1].names == (f"model.layers.1.mlp.experts.*.{down}",)
    weights = sum(
        m.weight.numel() for m in split(model).modules() if isinstance(m, torch.nn.Linear)
    )
    assert sum(group.weights for group in choice.groups) == weights - model.lm_head.weight.numel()
    quantize_checkpoint(stored["one by one"], tmp_path / "out", choice.plan)
    bits = {g.names: o.scheme for g, o in zip(choice.groups, choice.chosen, strict=True)}
    layers = dict(quantized_layers(anybit.load(tmp_path / "out")))
    assert {layers[experts[-1].names[0].replace("*", str(e))].scheme for e in range(4)} == {
        bits[experts[-1].names]
    }
    only = anybit.quantize_(
        loaded(stored["fused"]),
        {"*": None} | {name: "int4:group=16" for group in experts for name in group.names},
    )
    p, q = (torch.log_softmax(logits, -1) for logits in (dense, logits_of(only)))
    measured = float((p.exp() * (p - q)).sum(-1).mean())
    predicted = sum(o.loss for g in experts for o in g.options if o.scheme == "int4:group=16")
    assert measured / 2 < predicted < measured * 2


@pytest.mark.parametrize("quantizer", [GPTQ(text()), Smooth(text(), then=GPTQ())])
def test_hessians_take_no_more_memory_than_the_block(quantizer, tmp_path, monkeypatch):
    """Experts take turns, after smoothing, which takes them all; in memory as from disk."""
    config = ARCHITECTURES["mixtral"][1] | {"intermediate_size": 384, "num_hidden_layers": 1}
    random_model("mixtral", config).save_pretrained(tmp_path / "dense")
    sizes, collect = [], BlockRunner.collect

    def measured(self, *args):
        seen = collect(self, *args)
        sizes.append(sum(s.hessian.nbytes for s in {id(s): s for s in seen.values()}.values()))
        return seen

    monkeypatch.setattr(BlockRunner, "collect", measured)
    plan = {"*": "int3:group=32", "*.k_proj": None}
    model = anybit.quantize_(loaded(tmp_path / "dense"), plan, quantizer)
    dense = loaded(tmp_path / "dense")
    block = sum(p.nbytes for p in dense.model.layers[0].parameters())
    hessians = [4 * 384**2 + 4 * 64**2] * 4
    assert sum(hessians) > block > max(sizes)
    assert sum(sizes) == sum(hessians) + 2 * 4 * 64**2  # those of q and v, and of o
    rounded = anybit.quantize_(loaded(tmp_path / "dense"), plan)
    errors = [float((logits_of(m) - logits_of(dense)).norm()) for m in (model, rounded)]
    assert errors[0] < 0.9 * errors[1], errors
    calibrate_checkpoint(tmp_path / "dense", tmp_path / "out", plan, quantizer)
    same_state(model, anybit.load(tmp_path / "out"))


# Other layouts than the usual one.


def tiny_experts(kind):
    """transformers' own module with random weights, and what it takes besides hidden states."""
    random = torch.Generator().manual_seed(4)
    index = torch.rand(24, 4, generator=random).topk(2).indices
    routed = (index, torch.rand(24, 2, generator=random))
    if kind == "gpt_oss":
        config = GptOssConfig(hidden_size=64, intermediate_size=32, num_local_experts=4)
        module = GptOssExperts(config)
    elif kind == "nemotron_h":
        config = NemotronHConfig(hidden_size=64, moe_intermediate_size=32, n_routed_experts=4)
        config.moe_latent_size = None
        module = NemotronHExperts(config)
    else:
        config = Llama4TextConfig(hidden_size=64, intermediate_size=32, num_local_experts=4)
        module, routed = Llama4TextExperts(config), ()
    config._experts_implementation = "eager"
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=random) / 4)
    return module, torch.randn(24, 64, generator=random), routed


@pytest.mark.parametrize("kind", ["gpt_oss", "llama4", "nemotron_h"])
def test_experts_of_other_layouts_compute_the_same_apart(kind):
    module, x, routed = tiny_experts(kind)
    model = torch.nn.ModuleDict({"experts": module})
    expected = module(x, *routed)
    shapes, before = dense_layers(model), module.state_dict()
    split(model)
    torch.testing.assert_close(model.experts(x, *routed), expected)
    for name in model.experts.layout.tensors:  # for models that look at them
        assert torch.equal(getattr(model.experts, name), before[name])
    assert dense_layers(model) == shapes
    anybit.quantize_(model, "int8")
    got = copy.deepcopy(model).experts(x, *routed)
    assert torch.equal(got, model.experts(x, *routed))
    assert (got - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("normed", [True, False])
def test_experts_of_an_unknown_layout_stay_dense_and_are_named(normed, caplog):
    """Some have a norm of their own, and some say nothing of their layout."""
    module, _, _ = tiny_experts("gpt_oss")
    if normed:
        module.has_post_expert_norm = True
    else:
        del module.is_transposed
    model = torch.nn.ModuleDict({"experts": module, "other": torch.nn.Linear(64, 64)})
    anybit.quantize_(model, "int8")
    assert [name for name, _ in quantized_layers(model)] == ["other"]
    assert "1 blocks of experts stay dense, in a layout that anybit does not know" in caplog.text
