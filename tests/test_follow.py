"""GPTQ that follows the dense model: what it sees, and that a run goes on where it stopped."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

import anybit
from anybit import GPTQ, Calibration
from anybit.core.format import Format
from anybit.core.packed import Packed
from anybit.quantizers.calibration.block_runner import BlockRunner
from anybit.quantizers.calibration.statistics import Statistics
from tests import tiny

BLOCKS = 3
seen: list[Statistics] = []


def llama() -> Any:
    return tiny.llama(dtype=torch.float32, num_hidden_layers=BLOCKS, initializer_range=0.1)


def tokens() -> Tensor:
    return torch.randint(64, (20, 32), generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Watched(GPTQ):
    """Notes what it gets."""

    def quantize(self, w: Tensor, fmt: Format, statistics: Statistics | None = None) -> Packed:
        assert statistics is not None
        seen.append(statistics)
        return super().quantize(w, fmt, statistics)


def inputs(model: nn.Module, name: str) -> Tensor:
    """Of a layer, (T, K)."""
    found: list[Tensor] = []
    layer = model.get_submodule(name)
    handle = layer.register_forward_pre_hook(lambda module, args: found.append(args[0]))
    with torch.no_grad():
        model(tokens())
    handle.remove()
    return found[0].flatten(0, -2)


def test_inputs_are_those_of_quantized_layers_and_compared_with_the_dense_model_s() -> None:
    seen.clear()
    model = anybit.quantize_(llama(), "int3", Watched(Calibration(tokens()), follow=True))
    first = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    names = [f"model.layers.{block}.{name}" for block in range(BLOCKS) for name in first]
    assert len(seen) == len(names)
    assert not seen[0].drift.any()
    for name, statistics in zip(names, seen, strict=True):
        x, dense = inputs(model, name), inputs(llama(), name)
        want = (dense - x).T @ x / len(x)
        torch.testing.assert_close(statistics.drift, want, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(statistics.hessian, x.T @ x / len(x), atol=1e-4, rtol=1e-3)
        assert name == names[0] or want.norm() > 1e-3 * statistics.hessian.norm()


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantizer = GPTQ(Calibration(tokens(), work=tmp_path), follow=True)
    whole = anybit.quantize_(llama(), "int3", quantizer).state_dict()
    (tmp_path / f"block_{BLOCKS - 1:04d}.safetensors").unlink()
    again = anybit.quantize_(llama(), "int3", quantizer).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


def test_experts_and_heads_are_quantized_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts get other tokens in the dense model, and a plain GPTQ, but the same turns."""
    turns: list[int] = []
    real = BlockRunner.collect

    def counted(self: BlockRunner, index: int, *args: Any, **kwargs: Any) -> Any:
        turns.append(index)
        return real(self, index, *args, **kwargs)

    monkeypatch.setattr(BlockRunner, "collect", counted)
    torch.manual_seed(0)
    sizes = tiny.SIZES | {"num_local_experts": 4, "intermediate_size": 96}  # one part of the block
    dense = MixtralForCausalLM(MixtralConfig(**sizes)).eval()
    model = copy.deepcopy(dense)
    anybit.quantize_(
        model, {"*": "int8", "lm_head": "int8"}, GPTQ(Calibration(tokens()), follow=True)
    )
    # qkv; o; gate and up, down of all experts
    assert [turns.count(block) for block in range(sizes["num_hidden_layers"])] == [4, 4]
    with torch.no_grad():
        got, want = model(tokens()).logits, dense(tokens()).logits
    assert (got - want).norm() < 0.03 * want.norm()


def test_following_needs_drift() -> None:
    statistics = Statistics(tokens=1, hessian=torch.eye(16))
    with pytest.raises(ValueError, match="needs drift among its statistics"):
        GPTQ(follow=True).quantize(torch.randn(8, 16), anybit.get_format("int4"), statistics)
