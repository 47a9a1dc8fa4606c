"""A plan: the format chosen for every group of layers, what it costs, and what else was offered."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from anybit.files.picture import check_picture


@dataclass(frozen=True)
class Option:
    """One format for a group of layers.

    Attributes:
        scheme: The format, and the activations' dtype if they are quantized.
        bits: Stored bits of all weights of the group, scales included.
        loss: What it costs in accuracy, in the measure of the `Allocation`.
    """

    scheme: str
    bits: float
    loss: float


@dataclass(frozen=True)
class Group:
    """Layers that read the same input (q, k and v; gate and up), which engines run as one.

    Attributes:
        names: The layers; those of experts are patterns for all of a block ("*.experts.*.w2").
        weights: Number of weights.
        options: The formats that can store them.
    """

    names: tuple[str, ...]
    weights: int
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Allocation:
    """A format for every group of layers, and how it was arrived at.

    Attributes:
        groups: All groups, in the model's order.
        chosen: An option of each group.
        budget: In words, for tables and plots.
        measure: What losses are: "KL", predicted nats per token, or "weight error", squared errors
            of the weights over their squares, summed over layers.
        heads: Output heads and embeddings that share their weight, and their formats, which the
            budget does not count.
    """

    groups: tuple[Group, ...]
    chosen: tuple[Option, ...]
    budget: str
    measure: str
    heads: tuple[tuple[str, str], ...] = ()

    @property
    def plan(self) -> dict[str, str | None]:
        """{pattern: spec}, for `quantize_` and `anybit quantize --plan`."""
        weights: dict[str, int] = {}
        for group, option in zip(self.groups, self.chosen, strict=True):
            weights[option.scheme] = weights.get(option.scheme, 0) + group.weights
        common = max(weights, key=lambda scheme: weights[scheme])
        out: dict[str, str | None] = {"*": common}
        for group, option in zip(self.groups, self.chosen, strict=True):
            if option.scheme != common:
                out |= dict.fromkeys(group.names, option.scheme)
        return out | dict(self.heads)

    @property
    def bits(self) -> float:
        """Stored bits of a weight, scales included."""
        return sum(o.bits for o in self.chosen) / sum(g.weights for g in self.groups)

    @property
    def loss(self) -> float:
        """The sum over all groups."""
        return sum(option.loss for option in self.chosen)

    def uniform(self) -> list["Allocation"]:
        """One format for all layers, for every format that was offered to all of them."""
        shared = [{o.scheme: o for o in group.options} for group in self.groups]
        return [
            replace(self, chosen=tuple(options[scheme] for options in shared), budget=scheme)
            for scheme in shared[0]
            if all(scheme in options for options in shared)
        ]

    def table(self) -> str:
        """The choice and its alternatives, as text."""
        loss = f"{self.measure} x 1000"
        wide = len(loss)
        schemes = [option.scheme for option in self.chosen] + [scheme for _, scheme in self.heads]
        long = max(22, *map(len, schemes))
        lines = [f"{'layers':48} {'format':{long}} {'bits':>6} {loss}"]
        for group, option in zip(self.groups, self.chosen, strict=True):
            first, *others = group.names
            name = first + "".join(f", {other.rpartition('.')[2]}" for other in others)
            lines.append(
                f"{name:48} {option.scheme:{long}} {option.bits / group.weights:6.3f} "
                f"{option.loss * 1000:{wide}.4f}"
            )
        lines += [f"{name:48} {scheme:{long}} (beside the budget)" for name, scheme in self.heads]
        lines.append("")
        lines.append(f"{'whole model, predicted':48} {'':{long}} {'bits':>6} {loss}")
        for name, it in [
            (f"this plan ({self.budget})", self),
            *((u.budget, u) for u in self.uniform()),
        ]:
            lines.append(f"{name:48} {'':{long}} {it.bits:6.3f} {it.loss * 1000:{wide}.3f}")
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, for `anybit quantize --plan`."""
        Path(path).write_text(json.dumps(self.plan, indent=2) + "\n", "utf-8")

    def plot(self, path: str | Path) -> None:
        """Bits of every group of layers in the model's order, and predicted loss over bits."""
        check_picture(path)
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(2, 1))
        kinds = [
            "/".join(n.rpartition(".")[2].removesuffix("_proj") for n in g.names)
            for g in self.groups
        ]
        for kind in dict.fromkeys(kinds):
            at = [i for i, k in enumerate(kinds) if k == kind]
            bits = [self.chosen[i].bits / self.groups[i].weights for i in at]
            left.plot(at, bits, "o-", lw=0.6, label=kind)
        left.set(xlabel="layers, from input to output", ylabel="stored bits of a weight")
        left.legend(ncols=4, fontsize="small")
        for it in self.uniform():
            right.plot(it.bits, it.loss, "o", color="#888888")
            right.annotate(it.budget, (it.bits, it.loss), fontsize="x-small", rotation=20)
        right.plot(self.bits, self.loss, "*", ms=14, color="#c2410c")
        right.annotate("this plan", (self.bits, self.loss), fontsize="small", color="#c2410c")
        label = "predicted KL (nats)" if self.measure == "KL" else f"predicted {self.measure}"
        right.set(xlabel="stored bits of a weight", ylabel=label, yscale="log")
        figure.savefig(path, dpi=150)
