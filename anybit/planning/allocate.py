"""A format for every layer, under a budget of memory or predicted time.

Layers differ in how much a rounding error of theirs costs the model. For each layer and format the
KL divergence from the dense model is predicted to second order, and a knapsack then spends the
budget where it buys most.

With an error D = W' - W of one layer, whose inputs have the second moment H and whose outputs the
loss's mean squared gradients g_n, KL = 1/2 sum_n g_n (D H D^T)_nn in nats per token. This is the
Fisher information in the Kronecker-factored form of K-FAC (Martens and Grosse, 2015), with g from
labels that the model itself draws.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anybit.core.format import Format
from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput
from anybit.files.picture import check_picture
from anybit.formats.presets import CANDIDATES
from anybit.nn.experts import Experts, of_all_experts
from anybit.nn.model import dense_layers, linear_at, taken_apart
from anybit.nn.plan import is_head
from anybit.planning.cost_model import DEVICES, cost, instructions, operand_of
from anybit.progress import progress
from anybit.quantizers.base import Quantizer
from anybit.quantizers.calibration.block_runner import BlockRunner, find_blocks
from anybit.quantizers.calibration.data import Calibration, Source
from anybit.quantizers.calibration.memory import on_device
from anybit.quantizers.calibration.rehearsal import rehearse
from anybit.quantizers.calibration.statistics import Statistics
from anybit.quantizers.clip import Clip

BINS = 1 << 16  # of the budget; rounding up to whole bins wastes less than layers / BINS of it


@dataclass(frozen=True)
class Option:
    """One format for a group of layers.

    Attributes:
        scheme: The format, and the activations' dtype if they are quantized.
        bits: Stored bits of all weights of the group, scales included.
        seconds: Predicted time of the group's products in one forward pass.
        kl: Predicted KL divergence that it adds, nats per token.
    """

    scheme: str
    bits: float
    seconds: float
    kl: float


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
    """

    groups: tuple[Group, ...]
    chosen: tuple[Option, ...]
    budget: str

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
        return out

    @property
    def bits(self) -> float:
        """Stored bits of a weight, scales included."""
        return sum(o.bits for o in self.chosen) / sum(g.weights for g in self.groups)

    @property
    def seconds(self) -> float:
        """Predicted time of all layers in one forward pass."""
        return sum(option.seconds for option in self.chosen)

    @property
    def kl(self) -> float:
        """Predicted KL divergence from the dense model, nats per token."""
        return sum(option.kl for option in self.chosen)

    def uniform(self) -> list["Allocation"]:
        """One format for all layers, for every format that was offered to all of them."""
        shared = [{o.scheme: o for o in group.options} for group in self.groups]
        return [
            Allocation(self.groups, tuple(options[scheme] for options in shared), scheme)
            for scheme in shared[0]
            if all(scheme in options for options in shared)
        ]

    def table(self) -> str:
        """The choice and its alternatives, as text."""
        lines = [f"{'layers':48} {'format':22} {'bits':>6} {'KL x 1000':>10}"]
        for group, option in zip(self.groups, self.chosen, strict=True):
            first, *others = group.names
            name = first + "".join(f", {other.rpartition('.')[2]}" for other in others)
            lines.append(
                f"{name:48} {option.scheme:22} {option.bits / group.weights:6.3f} "
                f"{option.kl * 1000:10.4f}"
            )
        lines.append("")
        lines.append(
            f"{'whole model, predicted':48} {'':22} {'bits':>6} {'KL x 1000':>10} {'us':>9}"
        )
        for name, it in [
            (f"this plan ({self.budget})", self),
            *((u.budget, u) for u in self.uniform()),
        ]:
            lines.append(
                f"{name:48} {'':22} {it.bits:6.3f} {it.kl * 1000:10.3f} {it.seconds * 1e6:9.2f}"
            )
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, for `anybit quantize --plan`."""
        Path(path).write_text(json.dumps(self.plan, indent=2) + "\n", "utf-8")

    def plot(self, path: str | Path) -> None:
        """Bits of every group of layers in the model's order, and predicted KL over bits."""
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
            right.plot(it.bits, it.kl, "o", color="#888888")
            right.annotate(it.budget, (it.bits, it.kl), fontsize="x-small", rotation=20)
        right.plot(self.bits, self.kl, "*", ms=14, color="#c2410c")
        right.annotate("this plan", (self.bits, self.kl), fontsize="small", color="#c2410c")
        right.set(xlabel="stored bits of a weight", ylabel="predicted KL (nats)", yscale="log")
        figure.savefig(path, dpi=150)


def plan_formats(
    model: nn.Module,
    calibration: Source | Calibration,
    bits: float | None = None,
    *,
    seconds: float | None = None,
    candidates: Sequence[str] = CANDIDATES,
    quantizer: Quantizer | None = None,
    device: str = "h200",
    tokens: int = 1,
    show_progress: bool | None = None,
) -> Allocation:
    """Choose a format per layer of least predicted KL under a budget: bits, or seconds.

    The error of quantized activations (`@int8`) is not predicted. The output head is kept.

    Args:
        model: A dense transformers model.
        calibration: Texts, token ids or a file, or a `Calibration` that says more about them.
        bits: The budget as stored bits of a weight, on average over the layers, scales included.
        seconds: The budget as predicted time of all layers in a forward pass of `tokens` tokens on
            `device`, by `planning.cost_model`. Give one of both budgets.
        candidates: Schemes to choose from. A layer that a format cannot store does without it.
        quantizer: The one that will be used, whose own data is ignored; `Clip()` by default.
        device: A name of `cost_model.DEVICES`.
        tokens: In one forward pass, for predicted times.
        show_progress: As in `quantize_`.

    Returns:
        The choice; its `plan` goes to `quantize_`.

    Raises:
        InvalidInput: The budget is below the smallest choice (which is named), there is not one
            budget, the device is unknown, no candidate can store a layer, or the data does not fit
            the model.
    """
    if (bits is None) == (seconds is None):
        raise InvalidInput("give one budget: bits=4.5, or seconds=50e-6")
    if device not in DEVICES:
        raise InvalidInput(f"unknown device {device!r}; known: {', '.join(DEVICES)}")
    if not isinstance(calibration, Calibration):
        calibration = Calibration(calibration)
    with taken_apart(model):
        groups = sensitivities(
            model,
            calibration.tokens(model),
            candidates,
            quantizer or Clip(),
            partial(predicted_seconds, device=device, tokens=tokens),
            show_progress,
            busy_experts(model, tokens),
        )
    if bits is not None:
        budget, costs = (
            bits * sum(g.weights for g in groups),
            [[o.bits for o in g.options] for g in groups],
        )
        unit, name = sum(g.weights for g in groups), f"{bits:g} bits"
    else:
        assert seconds is not None
        budget, costs = seconds, [[o.seconds for o in g.options] for g in groups]
        unit, name = 1e-6, f"{seconds * 1e6:g} us"  # type: ignore[assignment]
    least = sum(map(min, costs))
    if budget < least:
        what = "bits" if bits is not None else "us"
        raise InvalidInput(
            f"a budget of {name} is below the smallest choice of these formats, "
            f"{least / unit:.3f} {what}; raise it, or offer smaller formats than "
            f"{', '.join(candidates)}"
        )
    chosen = knapsack(costs, [[o.kl for o in g.options] for g in groups], budget)
    return Allocation(
        tuple(groups), tuple(g.options[c] for g, c in zip(groups, chosen, strict=True)), name
    )


def sensitivities(
    model: nn.Module,
    ids: Tensor,
    candidates: Sequence[str],
    quantizer: Quantizer,
    seconds_of: Callable[[str, tuple[int, int]], float],
    show_progress: bool | None = None,
    busy: float = 1.0,
) -> list[Group]:
    """Predict the KL of each candidate for each group of a decoder's layers.

    Memory beyond the model: the activations of the data, and one block's Hessians.

    Args:
        model: A dense model whose experts are layers of their own.
        ids: Token ids (samples, length).
        candidates: Schemes to choose from.
        quantizer: Chooses the codes.
        seconds_of: (scheme, (N, K)) -> predicted seconds of one product.
        show_progress: As in `quantize_`.
        busy: Fraction of the experts that a forward pass reads.

    Returns:
        The groups in the model's order.
    """
    names = [name for name in dense_layers(model) if not is_head(name)]
    prefix, blocks = find_blocks(model, names)
    runner, groups = BlockRunner(model, blocks, ids), []
    with torch.no_grad():
        rehearse(runner, lambda index: on_device(blocks[index], runner.device))
    gradients = output_gradients(model, [n for n in names if n.startswith(f"{prefix}.")], ids)
    with torch.no_grad(), progress("measuring layers", len(blocks), show_progress) as step:
        for index, block in enumerate(blocks):
            start = f"{prefix}.{index}."
            own = [n.removeprefix(start) for n in names if n.startswith(start)]
            with on_device(block, runner.device):
                statistics = runner.collect(index, own, ("hessian", *quantizer.needs))
                for patterns, readers in same_input(own, statistics).items():
                    layers = [linear_at(block, name) for name in readers]
                    g = [gradients[start + name].to(layers[0].weight.device) for name in readers]
                    inputs = [statistics[name] for name in readers]
                    options = options_of(layers, g, inputs, candidates, quantizer, seconds_of)
                    if not options:
                        raise InvalidInput(
                            f"{start}{readers[0]}: none of {', '.join(candidates)} can store a "
                            f"weight of {tuple(layers[0].weight.shape)}; offer another format"
                        )
                    if patterns != tuple(readers):
                        options = tuple(replace(o, seconds=o.seconds * busy) for o in options)
                    weights = sum(layer.weight.numel() for layer in layers)
                    groups.append(Group(tuple(start + n for n in patterns), weights, options))
                runner.advance(index)
            step(1, f"{prefix}.{index}")
    return groups


def same_input(
    names: Sequence[str], statistics: Mapping[str, Statistics]
) -> dict[tuple[str, ...], list[str]]:
    """Patterns of layers that read the same input -> these layers, of all experts alike.

    An expert that no token reached has no input; it goes with the others.
    """
    readers: dict[int, list[str]] = {}
    for name in names:
        if statistics[name].tokens or name == of_all_experts(name):
            readers.setdefault(id(statistics[name]), []).append(name)
    patterns = {tuple(dict.fromkeys(map(of_all_experts, group))) for group in readers.values()}
    owner = {pattern: group for group in patterns for pattern in group}
    out: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        out.setdefault(owner[of_all_experts(name)], []).append(name)
    return out


def busy_experts(model: nn.Module, tokens: int) -> float:
    """The share of experts that a forward pass of so many tokens reads, if all are as likely."""
    counts = {len(m) for m in model.modules() if isinstance(m, Experts)}
    top_k = getattr(getattr(model, "config", None), "num_experts_per_tok", None)
    if not counts or top_k is None:
        return 1.0
    return 1 - (1 - top_k / max(counts)) ** tokens


def options_of(
    layers: list[nn.Linear],
    gradients: list[Tensor],
    statistics: list[Statistics],
    candidates: Sequence[str],
    quantizer: Quantizer,
    seconds_of: Callable[[str, tuple[int, int]], float],
) -> tuple[Option, ...]:
    """What each candidate costs all the layers together; those that saw no token add no KL."""
    out = []
    for scheme in candidates:
        fmt = parse_scheme(scheme)[0]
        shapes = [(layer.out_features, layer.in_features) for layer in layers]
        if not all(fits(fmt, shape) for shape in shapes):
            continue
        kl = 0.0
        for layer, g, one in zip(layers, gradients, statistics, strict=True):
            if not one.tokens:
                continue
            w = layer.weight.detach()
            error = quantizer.quantize(w, fmt, one).dequantize() - w.float()
            kl += 0.5 * float(((error @ one.hessian).mul_(error).sum(1) * g).sum())
        bits = sum(fmt.bits_per_weight(shape) * shape[0] * shape[1] for shape in shapes)
        out.append(Option(scheme, bits, sum(seconds_of(scheme, s) for s in shapes), kl))
    return tuple(out)


def output_gradients(model: nn.Module, names: Sequence[str], ids: Tensor) -> dict[str, Tensor]:
    """Mean squared gradients of each layer's outputs over tokens.

    The loss is the model's own: the negative log-likelihood of labels drawn from its predictions.

    Args:
        model: A dense transformers model.
        names: Its layers.
        ids: Token ids (samples, length).

    Returns:
        (N,) fp32 by layer; zeros for experts that no token reached.

    Raises:
        InvalidInput: No gradient reached a layer that is not an expert.
    """
    sums: dict[str, Tensor] = {}
    random = torch.Generator().manual_seed(0)

    def hook(name: str) -> Any:
        def forward(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
            def backward(g: Tensor) -> None:
                squares = g.detach().float().flatten(0, -2).square().sum(0)
                sums[name] = sums[name] + squares if name in sums else squares

            y.register_hook(backward)

        return forward

    handles = [model.get_submodule(n).register_forward_hook(hook(n)) for n in names]
    device = next(model.parameters()).device
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    handles.append(embedding.register_forward_hook(lambda m, a, y: y.requires_grad_()))
    try:
        with frozen(model), torch.enable_grad():
            for window in ids:
                logits = model(input_ids=window[None].to(device), use_cache=False).logits[0].float()
                with torch.no_grad():
                    p = torch.softmax(logits, -1).cpu()
                    labels = torch.multinomial(p, 1, generator=random)[:, 0].to(device)
                nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    finally:
        for handle in handles:
            handle.remove()
    idle = [name for name in names if name not in sums]
    missing = [name for name in idle if name == of_all_experts(name)]
    if missing:
        raise InvalidInput(
            f"no gradient reached {', '.join(missing[:3])}: the model's forward pass does not use "
            "these layers on this data; keep them out, or give more data"
        )
    sums |= {name: torch.zeros(linear_at(model, name).out_features) for name in idle}
    return {name: total / ids.numel() for name, total in sums.items()}


def knapsack(costs: list[list[float]], losses: list[list[float]], budget: float) -> list[int]:
    """Choose one option of each group, of least total loss with a total cost within budget.

    Dynamic programming over the budget in `BINS` steps; costs are rounded up to whole steps, above
    the cheapest choice, so the result never exceeds the budget.

    Args:
        costs: Of each option of each group.
        losses: Of the same options.
        budget: At least the sum of the cheapest options' costs.

    Returns:
        The index of the chosen option of each group.
    """
    floors = [min(group) for group in costs]
    spare = budget - sum(floors)
    step = spare / BINS if spare > 0 else 1.0
    best = np.zeros(BINS + 1)
    picks = []
    for group, floor, loss in zip(costs, floors, losses, strict=True):
        totals = np.full((len(group), BINS + 1), np.inf)
        for option, (cost_, loss_) in enumerate(zip(group, loss, strict=True)):
            steps = int(np.ceil((cost_ - floor) / step - 1e-9))
            if steps <= BINS and (spare > 0 or steps == 0):
                totals[option, steps:] = best[: BINS + 1 - steps] + loss_
        picks.append(totals.argmin(0).astype(np.int16))
        best = totals.min(0)
    at, out = int(best.argmin()), []
    for group, floor, pick in zip(reversed(costs), reversed(floors), reversed(picks), strict=True):
        option = int(pick[at])
        out.append(option)
        at -= int(np.ceil((group[option] - floor) / step - 1e-9))
    return out[::-1]


def predicted_seconds(scheme: str, shape: tuple[int, int], device: str, tokens: int) -> float:
    """Time of one product by the cost model; decoding is free where no kernel was counted."""
    try:
        alpha = instructions(scheme)
    except (ValueError, ImportError):
        alpha = 0.0
    bits = parse_scheme(scheme)[0].bits_per_weight(shape)
    return cost(DEVICES[device], tokens, *shape, bits, operand_of(scheme), alpha).seconds


def fits(fmt: Format, shape: tuple[int, int]) -> bool:
    """Whether a format can store a weight of this shape (N, K)."""
    try:
        fmt.check(*shape)
    except ValueError:
        return False
    return True


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Inside, no parameter collects gradients."""
    before: Mapping[nn.Parameter, bool] = {p: p.requires_grad for p in model.parameters()}
    model.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, value in before.items():
            parameter.requires_grad_(value)
