"""Before calibration: whether a model runs block by block as it runs whole."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybit
from anybit import GPTQ, Calibration
from anybit.quantizers.calibration.block_runner import BlockRunner
from anybit.quantizers.calibration.rehearsal import rehearse

WIDTH, VOCAB = 32, 40


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor, chosen: Tensor | None = None) -> Any:
        return hidden_states + torch.tanh(self.fc(hidden_states))


class Plain(nn.Module):
    """A decoder of three blocks."""

    kind: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(self.kind() for _ in range(3))
        self.between = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x  # type: ignore[no-any-return]


class Between(Plain):
    """Has layers between its blocks."""

    def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = self.between(layer(x))
        return x  # type: ignore[no-any-return]


class Twice(Plain):
    """Runs its blocks twice."""

    def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
        x = self.embedding(input_ids)
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        return x  # type: ignore[no-any-return]


class Shared(Plain):
    """Its blocks get what the first one returned."""

    def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
        x = first = self.layers[0](self.embedding(input_ids))
        for layer in self.layers[1:]:
            x = layer(x, first)
        return x  # type: ignore[no-any-return]


class Choosing(Block):
    """Hands on which channels the first block chose, and returns something large as well."""

    def forward(self, hidden_states: Tensor, chosen: Tensor | None = None) -> Any:
        if chosen is None:
            chosen = hidden_states.abs() > 0.5
        out = super().forward(hidden_states * chosen)
        return out, torch.zeros(1000), chosen


class Handing(Plain):
    """Its blocks hand on more than the hidden states."""

    kind = Choosing

    def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
        x, chosen = self.embedding(input_ids), None
        for layer in self.layers:
            x, _, chosen = layer(x, chosen)
        return x  # type: ignore[no-any-return]


def tokens() -> Tensor:
    return torch.randint(VOCAB, (6, 16), generator=torch.Generator().manual_seed(1))


class Common(Plain):
    """Its first and last block have a layer in common."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].fc = self.layers[0].fc


class Two(Block):
    """A block whose layers read one input, or in later calls inputs of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor, chosen: Tensor | None = None) -> Tensor:
        beside = hidden_states if chosen is None else chosen
        return hidden_states + torch.tanh(self.fc(hidden_states) + self.other(beside))


class Messages(Plain):
    """Runs its blocks twice, the second time with messages to one of their layers."""

    kind = Two

    def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
        x, first = self.embedding(input_ids), list[Tensor]()
        for layer in self.layers:
            x = layer(x)
            first.append(x.tanh())
        for layer, message in zip(self.layers, first, strict=True):
            x = layer(x, message)
        return x  # type: ignore[no-any-return]


class Skipping(Plain):
    """Leaves a block out."""

    def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
        return self.layers[2](self.layers[0](self.embedding(input_ids)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Between, Shared, Twice, Common, Messages])
def test_hessians_are_of_all_uses(kind: type[Plain], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of models that do not run block by block, on the outputs of the quantized blocks before."""
    model, ids, seen = kind(), tokens(), list[str]()
    collect = BlockRunner.collect

    def checked(self: BlockRunner, index: int, names: Any, *args: Any, **options: Any) -> Any:
        names = list(names)
        inputs: dict[str, list[Tensor]] = {name: [] for name in names}
        handles = [
            self.blocks[index]
            .get_submodule(name)
            .register_forward_pre_hook(lambda _, args, own=inputs[name]: own.append(args[0]))
            for name in names
        ]
        with torch.no_grad():
            model(ids)
        for handle in handles:
            handle.remove()
        found = collect(self, index, names, *args, **options)
        for name in names:
            x = torch.cat(inputs[name]).flatten(0, 1)
            assert found[name].tokens == len(x)
            torch.testing.assert_close(found[name].hessian, x.T @ x / len(x))
            seen.append(f"{index}.{name}")
        return found

    monkeypatch.setattr(BlockRunner, "collect", checked)
    anybit.quantize_(model, {"*": None, "layers.*": "int4"}, GPTQ(ids))
    names = [n for n, m in model.layers.named_modules() if isinstance(m, anybit.QuantLinear)]
    assert sorted(seen) == sorted(names)
    assert kind is not Common or model.layers[2].fc is model.layers[0].fc
    assert not any("forward" in vars(layer) for layer in model.layers)


def test_smoothing_and_tuning_see_outputs_of_all_calls() -> None:
    model = Twice()
    runner = BlockRunner(model, list(model.layers), tokens())
    with torch.no_grad():
        rehearse(runner, lambda index: nullcontext())
        assert len(runner.output(1)) == 2
        first = runner.outputs(2)[0]()
        torch.testing.assert_close(first[len(tokens()) :], model(tokens()))


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (GPTQ(tokens(), follow=True), "follow"),
        (GPTQ(Calibration(tokens(), kv_scales=True)), "kv_scales"),
    ],
)
def test_what_needs_single_calls_is_refused_before_any_work(given: GPTQ, word: str) -> None:
    model = Twice()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"{word} needs blocks that run once and in turn"):
        anybit.quantize_(model, {"*": None, "layers.*": "int4"}, given)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_blocks_that_do_not_run_are_refused() -> None:
    model = Skipping()
    with pytest.raises(ValueError, match=r"in the order \[0, 2\] on token ids alone, not all"):
        anybit.quantize_(model, {"*": None, "layers.*": "int4"}, GPTQ(tokens()))
    assert isinstance(model.layers[0].fc, nn.Linear)


def test_what_blocks_hand_on_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more than that: attention weights would take more memory than all else."""
    model, want, got, kept = Handing(), list[Tensor](), list[Tensor](), set[int]()
    for layer in model.layers:
        layer.fc.register_forward_pre_hook(lambda module, args: want.append(args[0]))
    with torch.no_grad():
        model(tokens())
    advance = BlockRunner.advance

    def looking(self: BlockRunner, index: int, kv_scales: bool = False) -> None:
        want.clear()
        advance(self, index, kv_scales)
        got.extend(want)
        kept.update(x.numel() for x in self.passed[0] if x is not None)

    dense, want = list(want), []
    monkeypatch.setattr(BlockRunner, "advance", looking)
    anybit.quantize_(model, {"*": None, "layers.*": "int8"}, GPTQ(tokens()))
    assert len(got) == len(dense) == 3
    for a, b in zip(got, dense, strict=True):
        assert torch.equal(a == 0, b == 0)
        torch.testing.assert_close(a, b, atol=0.1, rtol=0.1)
    assert kept == {tokens().numel() * WIDTH}
