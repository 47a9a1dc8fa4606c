"""Statistics of what layers are given while a block runs."""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from anybit.errors import InvalidInput
from anybit.nn.experts import Experts
from anybit.quantizers.calibration.padding import Masks, real_rows
from anybit.quantizers.calibration.statistics import Statistics

if TYPE_CHECKING:
    from anybit.quantizers.calibration.block_runner import BlockRunner


class Observer:
    """Makes statistics of the inputs of layers; those that get the same tensor share one object.

    Args:
        parent: Has the layers: a block, or the model for layers outside of all blocks.
        inside: Whether it is a block.
        needs: Names of the fields of `Statistics` to collect.
        every: A sample has one row of so many.
        weights: How much each token counts, by layer (T,); 1 for other layers.
        alone: Each layer has statistics of its own, since layers share some inputs and not others.
    """

    def __init__(
        self,
        parent: nn.Module,
        inside: bool,
        needs: tuple[str, ...],
        every: int,
        weights: Mapping[str, Tensor],
        alone: bool,
    ):
        self.inside, self.needs, self.every, self.weights = inside, needs, every, weights
        self.alone, self.mixed = alone, False
        self.experts = tuple(f"{n}." for n, m in parent.named_modules() if isinstance(m, Experts))
        self.seen: dict[str, Statistics] = {}
        self.source: dict[str, str] = {}  # the layer that was first to see this layer's input
        self.calls = Counter[str]()
        self.last: tuple[str, Tensor] | None = None  # an input, and the first layer that saw it
        self.beside: dict[str, Tensor] = {}  # rows of this batch in the dense model

    def see(self, name: str, x: Tensor, runner: "BlockRunner", masks: Masks, dense: bool) -> None:
        """Add a layer's input, of a batch with these masks; dense: in the dense model."""
        if self.last is None or self.last[1] is not x:
            self.last = name, x
        self.calls[name] += 1
        source = name if self.alone else self.last[0]
        self.mixed |= self.source.setdefault(name, source) != source
        if source != name:
            return
        rows = self.rows(name, x, runner, masks)
        if dense:
            self.beside[name] = rows
            return
        one = self.seen.setdefault(name, Statistics())
        counts = self.weights.get(name)
        if counts is not None:
            counts = counts[one.tokens : one.tokens + len(rows)]
        # The same tokens, except in experts.
        alike = None if name.startswith(self.experts) else self.beside.get(name)
        one.add(rows, self.needs, self.every, alike, counts)

    def sound(self) -> bool:
        """Whether layers that share an object got the same tensor in every call."""
        calls, sources = self.calls, self.source.items()
        return not self.mixed and all(calls[name] == calls[source] for name, source in sources)

    def rows(self, name: str, x: Tensor, runner: "BlockRunner", masks: Masks) -> Tensor:
        """The rows of an input that are of tokens, and not of padding."""
        context = x.untyped_storage().data_ptr() in runner.context
        encoded = context and runner.encoder is not None
        rows = real_rows(x, masks.context if encoded else masks.own)
        if rows is not None:
            return rows
        # Experts get no padding. Outside of blocks, and in what blocks read beside hidden states
        # (images), sequences are of other kinds than the mask's.
        if not self.inside or (context and not encoded) or name.startswith(self.experts):
            return x.detach().flatten(0, -2)
        raise InvalidInput(
            f"{name}: its input {tuple(x.shape)} is not of the attention mask's shape, so padding "
            "cannot be told from tokens; give batches without padding, of one sample each"
        )

    def of(self, name: str) -> Statistics:
        """A layer's statistics; empty if it saw nothing."""
        return self.seen.get(self.source.get(name, name), Statistics())
