"""Before calibration: whether a model runs block by block as it runs whole."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybit
from anybit import GPTQ
from anybit.quantizers.calibration.block_runner import BlockRunner

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


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Between, "block 1 depends on more than the results of the one before it"),
        (Shared, "block 2 depends on more than the results of the one before it"),
        (Twice, r"runs its 3 blocks in the order \[0, 1, 2, 0, 1, 2\] on token ids"),
    ],
)
def test_is_refused_before_any_work(
    kind: type[Plain], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kind()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    monkeypatch.setattr(BlockRunner, "collect", None)  # nothing is collected
    with pytest.raises(ValueError, match=message):
        anybit.quantize_(model, {"*": None, "layers.*": "int4"}, GPTQ(tokens()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any("forward" in vars(layer) for layer in model.layers)


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
