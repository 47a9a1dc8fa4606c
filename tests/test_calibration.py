"""Calibration: what layers see, block by block, with every error in words."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

import anybit
from anybit import GPTQ, Additive, Calibration
from anybit.nn.linear import QuantLinear
from anybit.nn.model import linear_at
from anybit.quantizers.base import Quantizer, quantize_layers
from anybit.quantizers.calibration.block_runner import BlockRunner, batches_of
from anybit.quantizers.calibration.blocks import find_blocks
from anybit.quantizers.calibration.memory import on_device
from anybit.quantizers.calibration.statistics import Statistics
from tests import tiny

VOCAB, LENGTH, SAMPLES = 96, 32, 20
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def llama(**changes: Any) -> Any:
    settings = {"vocab_size": VOCAB, "num_hidden_layers": 3, "initializer_range": 0.1}
    return tiny.llama(dtype=torch.float32, **settings | {"max_position_embeddings": 64} | changes)


def tokens(samples: int = SAMPLES) -> Tensor:
    return torch.randint(VOCAB, (samples, LENGTH), generator=torch.Generator().manual_seed(1))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# What layers see.


def test_statistics_are_those_of_the_whole_model() -> None:
    model, ids = llama(), tokens()
    inputs: dict[str, Tensor] = {}
    names = [
        f"model.layers.{i}.{part}"
        for i in range(3)
        for part in ("self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")
    ]
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args, name=name: inputs.__setitem__(name, args[0].flatten(0, -2))
        )
    with torch.no_grad():
        model(ids)
    want = dict(inputs)
    prefix, blocks = find_blocks(model, names)
    replay = BlockRunner(model, blocks, batches_of(ids, 7))  # uneven
    with torch.no_grad():
        for index in range(3):
            own = [n.removeprefix(f"{prefix}.{index}.") for n in names if f".{index}." in n]
            seen = replay.collect(index, own, ("hessian", "amax", "mean_abs", "sample"))
            replay.advance(index)
            for name, statistics in seen.items():
                x = want[f"{prefix}.{index}.{name}"]
                assert statistics.tokens == len(x) == ids.numel()
                torch.testing.assert_close(
                    statistics.hessian, x.T @ x / len(x), atol=1e-4, rtol=1e-4
                )
                torch.testing.assert_close(statistics.amax, x.abs().amax(0), atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(
                    statistics.mean_abs, x.abs().mean(0), atol=1e-4, rtol=1e-4
                )
                every = ids.numel() // 512
                torch.testing.assert_close(statistics.sample, x[::every], atol=1e-4, rtol=1e-4)


def test_layers_with_one_input_share_statistics() -> None:
    model, ids = llama(), tokens()
    replay = BlockRunner(model, list(model.model.layers), ids)
    names = [*(f"self_attn.{p}" for p in ATTENTION), "mlp.gate_proj", "mlp.up_proj"]
    with torch.no_grad():
        seen = replay.collect(0, names, ("hessian",))
    assert seen["self_attn.q_proj"] is seen["self_attn.k_proj"] is seen["self_attn.v_proj"]
    assert seen["mlp.gate_proj"] is seen["mlp.up_proj"]
    assert len({id(statistics) for statistics in seen.values()}) == 3


@pytest.mark.parametrize("spec", ["int4:group=32", "liquid", "codebook:m=1,v=4,b=4,group=32"])
def test_layers_with_one_input_get_what_each_gets_alone(spec: str) -> None:
    model = llama()
    blocks = list(model.model.layers)
    block = blocks[0]
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj")
    seen = BlockRunner(model, blocks, tokens()).collect(0, names, ("hessian",))
    fmt, quantizer = anybit.get_format(spec), GPTQ()
    alone = {n: quantizer.quantize(linear_at(block, n).weight, fmt, seen[n]) for n in names}
    quantize_layers(block, dict.fromkeys(names, spec), quantizer, seen)
    for name in names:
        layer = block.get_submodule(name)
        for key, tensor in alone[name].tensors().items():
            got = getattr(layer, key)
            assert torch.equal(got, tensor), (name, key)
            assert got.untyped_storage().nbytes() == got.nbytes  # shared by no other layer


def test_later_blocks_see_quantized_ones() -> None:
    """Replaying with quantized blocks gives exactly what the quantized model computes."""
    model, ids = llama(), tokens()
    blocks = list(model.model.layers)
    anybit.quantize_(model, {"*": None, "*.layers.0.*": "int3"})
    replay = BlockRunner(model, blocks, ids)
    with torch.no_grad():
        for index in range(3):
            replay.advance(index)
        want = model.model(ids, output_hidden_states=True)
    got = torch.cat([h for h in replay.hidden if h is not None])
    torch.testing.assert_close(model.model.norm(got), want.last_hidden_state, atol=1e-4, rtol=1e-4)


def test_statistics_of_divided_inputs() -> None:
    x, s = torch.randn(50, 8), torch.rand(8) + 0.5
    kinds = ("hessian", "amax", "mean_abs", "sample")
    seen, want = Statistics(), Statistics()
    seen.add(x, kinds, 5)
    want.add(x / s, kinds, 5)
    for name, value in vars(seen.divided(s)).items():
        torch.testing.assert_close(value, getattr(want, name), msg=name)


# Whole models.


@pytest.mark.parametrize("spec", ["int3:group=32", "liquid:group=32@int8", "fp4"])
def test_gptq_is_nearer_to_the_dense_model(spec: str) -> None:
    ids, dense = tokens(64), llama()
    fresh = tokens(74)[64:]

    def distance(model: nn.Module) -> float:
        with torch.no_grad():
            return float((model(fresh).logits - dense(fresh).logits).norm())

    calibrated = anybit.quantize_(llama(), spec, GPTQ(ids))
    assert all(isinstance(m, QuantLinear) for n, m in calibrated.named_modules() if "_proj" in n)
    rounded = anybit.quantize_(llama(), spec)
    assert distance(calibrated) < 0.9 * distance(rounded)


def test_head_is_calibrated_on_the_outputs_of_all_blocks() -> None:
    ids = tokens()
    plan = {"*": None, "lm_head": "int4"}
    model, twin = llama(), llama()
    anybit.quantize_(model, plan | {"*.2.mlp.up_proj": "int8"}, GPTQ(ids))
    anybit.quantize_(twin, {"*": None, "*.2.mlp.up_proj": "int8"}, GPTQ(ids))
    with torch.no_grad():
        x = twin.model(ids).last_hidden_state.flatten(0, 1)
    seen = Statistics()
    seen.add(x, ("hessian",), 1)
    want = GPTQ().quantize(twin.lm_head.weight, anybit.get_format("int4"), seen)
    agree = (model.lm_head.packed.codes() == want.codes()).float().mean()
    assert agree > 0.99  # sums in another order may tip a rounding


def test_experts_that_saw_too_little_are_named() -> None:
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj = nn.Linear(64, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.up_proj(x)

    class Block(nn.Module):
        """Two experts; the second gets the tokens whose first channel is above a bar."""

        def __init__(self, bar: float) -> None:
            super().__init__()
            self.experts, self.bar = nn.ModuleList([Expert(), Expert()]), bar

        def forward(self, x: Tensor) -> Tensor:
            flat, second = x.flatten(0, 1), x.flatten(0, 1)[:, 0] > self.bar
            out = torch.zeros_like(flat)
            for expert, mask in zip(self.experts, (~second, second), strict=True):
                if mask.any():
                    out[mask] = expert(flat[mask])
            return x + out.view_as(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, 64)
            self.layers = nn.ModuleList([Block(0.0), Block(1e9)])

        def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
            x = self.embed(input_ids)
            for layer in self.layers:
                x = layer(x)
            return x

    torch.manual_seed(0)
    model = Model()
    with pytest.warns(
        UserWarning, match=r"1 layers saw fewer.*layers\.1\.experts\.1\.up_proj \(0\)"
    ):
        anybit.quantize_(model, "int4", GPTQ(tokens()))
    assert isinstance(model.layers[1].experts[1].up_proj, QuantLinear)


def test_kv_scales_are_the_largest_keys_and_values() -> None:
    ids, plan = tokens(), {"*": None, "*.1.mlp.up_proj": "int8"}
    model = anybit.quantize_(llama(), plan, GPTQ(Calibration(ids, kv_scales=True)))
    with torch.no_grad():
        out = model(ids, use_cache=True)
    cache = out.cache if "cache" in out else out.past_key_values  # its name since transformers 5.24
    for index, layer in enumerate(model.model.layers):
        for name, states in (
            ("k_scale", cache.layers[index].keys),
            ("v_scale", cache.layers[index].values),
        ):
            scale = getattr(layer.self_attn, name)
            assert scale.shape == (2, 16)
            torch.testing.assert_close(scale * 127, states.abs().amax((0, 2)), atol=1e-4, rtol=1e-4)
    assert "model.layers.2.self_attn.v_scale" in model.state_dict()


# Resuming.


class Killed(BaseException):
    pass


def killed_after(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the calibration die when it has finished so many blocks."""
    advance, done = BlockRunner.advance, []

    def dying(self: BlockRunner, index: int, kv_scales: bool = False) -> None:
        if len(done) == blocks:
            raise Killed
        advance(self, index, kv_scales)
        done.append(index)

    monkeypatch.setattr(BlockRunner, "advance", dying)


def test_killed_run_goes_on_and_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration = Calibration(tokens(), work=tmp_path, kv_scales=True)
    want = weights(anybit.quantize_(llama(), "int4", GPTQ(Calibration(tokens(), kv_scales=True))))
    model = llama()
    before = weights(model)
    with monkeypatch.context() as patch:
        killed_after(2, patch)
        with pytest.raises(Killed):
            anybit.quantize_(model, "int4", GPTQ(calibration))
    assert same(weights(model), before)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "block_0000.safetensors",
        "block_0001.safetensors",
        "settings.json",
    ]
    quantized: list[int] = []
    collect = BlockRunner.collect
    monkeypatch.setattr(
        BlockRunner,
        "collect",
        lambda self, index, *rest: (quantized.append(index), collect(self, index, *rest))[1],
    )
    anybit.quantize_(model, "int4", GPTQ(calibration))
    assert quantized == [2]
    assert same(weights(model), want)


@pytest.mark.parametrize(
    ("spec", "quantizer", "difference"),
    [
        (
            "int4",
            GPTQ(damping=0.05),
            r"quantizer: GPTQ\(.*damping=0.1.* then, .*damping=0.05.* now",
        ),
        ("int3", GPTQ(), "formats: int4 then, int3 now, of 21 layers"),
        (
            {"*": "int4", "*.0.mlp.up_proj": None, "*.1.*": "int8"},
            GPTQ(),
            "formats: int4 then, int8 now, of 7 layers, int4 then, none now, of 1 layer",
        ),
    ],
)
def test_other_settings_are_refused(
    spec: Any, quantizer: GPTQ, difference: str, tmp_path: Path
) -> None:
    import dataclasses

    anybit.quantize_(llama(), "int4", GPTQ(Calibration(tokens(), work=tmp_path)))
    changed = dataclasses.replace(quantizer, calibration=Calibration(tokens(), work=tmp_path))
    with pytest.raises(ValueError, match=difference):
        anybit.quantize_(llama(), spec, changed)


def test_other_text_and_weights_are_refused(tmp_path: Path) -> None:
    anybit.quantize_(llama(), "int4", GPTQ(Calibration(tokens(), work=tmp_path)))
    with pytest.raises(
        ValueError, match=r"data: 20 samples of 32 tokens, of other contents\).*rm -r "
    ):
        anybit.quantize_(llama(), "int4", GPTQ(Calibration(tokens().flip(0), work=tmp_path)))
    with pytest.raises(
        ValueError, match=r"data: 20 samples of 32 tokens then, 19 samples of 32 tokens now\)"
    ):
        anybit.quantize_(llama(), "int4", GPTQ(Calibration(tokens(19), work=tmp_path)))
    other = llama()
    other.model.layers[1].mlp.up_proj.weight.data.neg_()
    with pytest.raises(ValueError, match="model: LlamaForCausalLM, weights, of other contents"):
        anybit.quantize_(other, "int4", GPTQ(Calibration(tokens(), work=tmp_path)))


# Bad input.


class Characters:
    """A tokenizer of single characters."""

    def __call__(self, text: str, verbose: bool = True) -> Any:
        return type("Encoding", (), {"input_ids": [ord(c) % VOCAB for c in text]})


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        (None, r"GPTQ needs data to calibrate on"),
        (["x"], r"the calibration data has 1 tokens, less than one sample of 64"),
        ([b"bytes"], r"calibration text 0: expected an object with .*, found bytes"),
        (Calibration(7), r"token ids or a file, and no int"),  # type: ignore[arg-type]
        (torch.full((4, 8), VOCAB), r"32 calibration tokens lie outside.*of 96, the first is 96"),
        (torch.full((4, 8), -1), r"outside the model's vocabulary"),
        (torch.rand(4, 8), r"token ids are integers of shape.*float32 \(4, 8\)"),
    ],
)
def test_bad_text(calibration: Any, message: str) -> None:
    model = llama()
    if isinstance(calibration, list):
        calibration = Calibration(calibration, tokenizer=Characters())
    with pytest.raises(ValueError, match=message):
        anybit.quantize_(model, "int4", GPTQ(calibration))
    assert isinstance(model.model.layers[0].mlp.up_proj, nn.Linear)


def test_nan_in_activations_names_the_layer() -> None:
    model = llama()
    model.model.layers[1].post_attention_layernorm.weight.data[3] = 3e38  # times 2 is inf
    before = weights(model)
    with pytest.raises(ValueError, match=r"block 1: mlp\.gate_proj: its inputs hold NaN"):
        anybit.quantize_(model, "int4", GPTQ(tokens()))
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(weights(model).values(), before.values(), strict=True)
    )


def test_model_without_blocks() -> None:
    model = nn.Sequential(nn.Embedding(VOCAB, 32), nn.Linear(32, 32))
    with pytest.raises(
        ValueError, match=r"looked for a torch\.nn\.ModuleList.*of the model are: none"
    ):
        anybit.quantize_(model, "int4", GPTQ(tokens()))


def test_text_runs_once_through_blocks_that_stay_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the next block, and not for statistics or a tuning towards what they are."""
    ran: list[int] = []
    call = BlockRunner._call

    def counted(self: BlockRunner, index: int, *args: Any, **kwargs: Any) -> Any:
        ran.append(index)
        return call(self, index, *args, **kwargs)

    monkeypatch.setattr(BlockRunner, "_call", counted)
    model = llama()
    before = weights(model)
    plan = {"*": "codebook:m=1,v=4,b=4", "model.layers.1.*": None}
    anybit.quantize_(model, plan, Additive(tokens(), rounds=1, steps=1))
    assert ran.count(1) == 1
    assert ran.count(0) == ran.count(2) > 1
    after = weights(model)
    kept = [name for name in before if name.startswith("model.layers.1.")]
    assert kept
    assert all(torch.equal(before[name], after[name]) for name in kept)


@pytest.mark.parametrize(
    ("quantizer", "scheme"),
    [(GPTQ(), "int4"), (Additive(rounds=1, steps=1), "codebook:m=1,v=4,b=4")],
)
def test_layers_know_their_inputs_dtype_while_text_runs(
    quantizer: Quantizer, scheme: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Or a float32 model would get kernels for 16 bits when its blocks visit a GPU.

    Afterwards none does, since the model may be cast; the head neither, which is in no block.
    """
    quantizer = replace(quantizer, calibration=Calibration(tokens(), work=tmp_path))
    known: list[torch.dtype | None] = []
    advance = BlockRunner.advance

    def looking(self: BlockRunner, index: int, kv_scales: bool = False) -> None:
        advance(self, index, kv_scales)
        layers = [m for m in self.blocks[index].modules() if isinstance(m, QuantLinear)]
        known.extend(layer.dtype for layer in layers)
        assert all(layer.prepared for layer in layers)

    monkeypatch.setattr(BlockRunner, "advance", looking)
    for _ in range(2):  # the second time, from the work folder
        model = llama()
        anybit.quantize_(model, {"*": scheme, "lm_head": scheme}, quantizer)
        assert known == [torch.float32] * 21
        layers = [m for m in model.modules() if isinstance(m, QuantLinear)]
        assert [layer.dtype for layer in layers] == [None] * 22
        known.clear()


class Travelling(nn.Sequential):
    """Moves as `nn.Module.to` does between a CPU and a GPU: parameters stay, their data change."""

    def to(self, *args: Any, **kwargs: Any) -> "Travelling":
        for parameter in self.parameters():
            parameter.data = parameter.data.clone()
        return self


def test_what_is_replaced_on_another_device_is_where_it_was() -> None:
    """Or dense layers, kept in case of an error, would fill the GPU, and come back there."""
    block = Travelling(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))
    before = {p: p.data_ptr() for p in block.parameters()}
    replaced = {block[0].weight, block[0].bias, block[1].weight}
    with on_device(block, torch.device("cpu", 0)):  # not the same as no number
        assert not any(p.data_ptr() == at for p, at in before.items())
        block[0] = QuantLinear(anybit.quantize_tensor(block[0].weight, "int4:group=32"))
        block[1]._parameters["weight"] = nn.Parameter(torch.ones(32))
        with torch.no_grad():
            block[2].weight.fill_(7)
    assert {p for p, at in before.items() if p.data_ptr() == at} == replaced
    assert bool((block[2].weight == 7).all())


def test_training_mode_is_kept() -> None:
    model = llama().train()
    anybit.quantize_(model, "int4", GPTQ(tokens()))
    assert model.training


def test_architecture_with_fused_experts_calibrates_its_linears() -> None:
    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
        )
    ).eval()
    ids = tokens()
    with torch.no_grad():
        dense = model(ids).logits
        anybit.quantize_(model, {"*": None, "*_proj": "int8"}, GPTQ(ids))
        error = (model(ids).logits - dense).norm() / dense.norm()
    assert 0 < error < 0.02
