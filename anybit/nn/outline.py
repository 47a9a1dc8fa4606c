"""What a plan goes by: names and shapes of a model's layers, whoever describes the model."""

import logging
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from anybit.nn.mixes import unmixed
from anybit.nn.plan import Plan, Spec, patterns_for, plan_of, resolve
from anybit.nn.tied import layers_that_share

log = logging.getLogger(__name__)

TINY = 16  # a layer with fewer inputs or outputs (a gate) stays dense, unless a pattern names it


@dataclass(frozen=True)
class Outline:
    """The layers of a model, by their names in transformers' model of it.

    Attributes:
        layers: Shapes (N, K) of dense linear layers, experts one by one.
        words: Of the embeddings that can be quantized.
        heads: Output embeddings, or what a model has for a task in their place.
        tied: Layers that have an embedding's weight -> that embedding.
        gates: Layers that make decays or choose experts.
        config: transformers' configuration, if there is one.
        more: Linear layers that do more than to multiply.
        unknown: Blocks of experts in a layout that anybit does not know.
        others: Whether weights are tied that are no head's.
    """

    layers: Mapping[str, tuple[int, ...]]
    words: Mapping[str, tuple[int, ...]]
    heads: Set[str]
    tied: Mapping[str, str]
    gates: Set[str]
    config: Any = None
    more: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    others: bool = False

    def without_mixtures(self, spec: Spec | Plan) -> Spec | Plan:
        """A spec in which formats of layers take the place of llama.cpp's mixtures."""
        kept = {*self.heads, *self.tied, *self.gates}
        shapes = {n: s for n, s in self.layers.items() if n not in kept and min(s) >= TINY}
        return unmixed(spec, shapes, self.config)

    def full_plan(self, spec: Spec | Plan) -> dict[str, str | None]:
        """The plan that a spec stands for, with the layers that "*" does not mean.

        These are the output embeddings under whatever name, the heads of classifiers and other
        tasks, all layers that share the weight of an embedding, those that make decays or choose
        experts, and layers with fewer than `TINY` inputs or outputs. A head gets the format of the
        embedding that it is tied to, unless a pattern names the head, too. Weights that are no
        linear layers, but look like it, are logged.

        Args:
            spec: As in `quantize_`.

        Returns:
            A plan that needs no model to be understood.
        """
        shapes, plan = self.layers, plan_of(self.without_mixtures(spec))
        for name in sorted(self.tied.keys() & shapes.keys()):
            words = self.tied[name]
            patterns = patterns_for(words, plan, True) if words in self.words else []
            if patterns and not {*patterns_for(name, plan)} - {"*"}:
                plan[name] = plan[patterns[-1]]
        heads = self.heads | self.tied.keys()
        kept = {
            name
            for name, shape in shapes.items()
            if (name in heads or name in self.gates or min(shape) < TINY)
            and patterns_for(name, plan) == ["*"]
        }
        for name in sorted(kept):
            pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
            alike = {other for other in shapes if fnmatchcase(other, pattern)}
            plan[pattern if name in alike and alike <= kept else name] = None
        self._tell(kept - heads)
        return plan

    def _tell(self, kept: Set[str]) -> None:
        """Log what stays dense. kept: layers without heads."""
        tiny = f"layers stay dense, of fewer than {TINY} inputs or outputs"
        for level, names, why in (
            (logging.INFO, sorted(kept - self.gates), tiny),
            (
                logging.INFO,
                sorted(kept & self.gates),
                "layers stay dense, which make decays or choose experts",
            ),
            (logging.INFO, self.more, "layers stay dense, which do more than to multiply"),
            (
                logging.WARNING,
                self.unknown,
                "blocks of experts stay dense, in a layout that anybit does not know",
            ),
        ):
            if names:
                log.log(level, "%d %s: %s, ...", len(names), why, names[0])

    def schemes(self, plan: Plan) -> dict[str, str]:
        """The schemes that a full plan gives layers and embeddings; errors as `resolve`'s."""
        return resolve(self.layers, plan, self.words)

    def sharing(self, schemes: Mapping[str, str | None]) -> dict[str, str]:
        """As `sharing_heads`."""
        return {} if self.others else layers_that_share(self.tied, schemes)
