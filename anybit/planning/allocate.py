"""A format for every layer, under a budget of bits.

Layers differ in how much a rounding error of theirs costs the model. For each layer and format the
KL divergence from the dense model is predicted to second order, and a knapsack then spends the
budget where it buys most.

With an error D = W' - W of one layer, whose inputs have the second moment H and whose outputs the
loss's mean squared gradients g_n, KL = 1/2 sum_n g_n (D H D^T)_nn in nats per token. This is the
Fisher information in the Kronecker-factored form of K-FAC (Martens and Grosse, 2015), with g from
labels that the model itself draws.

Without text there is neither H nor g. Then the loss of a layer is its relative squared error,
|D|^2 / |W|^2, as if all layers mattered alike.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from anybit.core.format import Format
from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput
from anybit.formats import presets
from anybit.nn.embedding import embedding_layers
from anybit.nn.experts import of_all_experts
from anybit.nn.model import dense_layers, linear_at, quantized_layers, taken_apart
from anybit.nn.plan import is_head
from anybit.nn.tied import sharing_heads, tied_heads
from anybit.planning.allocation import Allocation, Group, Option
from anybit.progress import progress
from anybit.quantizers.base import Quantizer, quantize_weight
from anybit.quantizers.calibration.block_runner import BlockRunner
from anybit.quantizers.calibration.blocks import find_blocks
from anybit.quantizers.calibration.data import Calibration, Source, calibration_from
from anybit.quantizers.calibration.gradients import each_gradient
from anybit.quantizers.calibration.memory import on_device
from anybit.quantizers.calibration.rehearsal import rehearse
from anybit.quantizers.calibration.statistics import Statistics
from anybit.quantizers.clip import Clip
from anybit.quantizers.rtn import RTN

BINS = 1 << 16  # of the budget; rounding up to whole bins wastes less than layers / BINS of it
HEAD = "int8"  # less than 0.0002 nats on models/pico (benchmarks/results/cpu_heads.csv)
PROBE = 16  # tokens that show, without text, which layers read the same input
SAMPLE = 128  # rows that stand for all where quantizing takes long: a block of any rotation
SLACK = 1e-12  # of a budget, by which its sums are rounded

# (layer, its weight (N, K), format, statistics of its inputs) -> loss
Loss = Callable[[str, Tensor, Format, Statistics], float]


def plan_formats(
    model: nn.Module,
    calibration: Source | Calibration | None,
    bits: float,
    *,
    candidates: Sequence[str] = (),
    quantizer: Quantizer | None = None,
    head: str | None = HEAD,
) -> Allocation:
    """Choose a format per layer of least predicted loss under a budget of bits.

    The error of quantized activations (`@int8`) is not predicted.

    Args:
        model: A dense transformers model.
        calibration: Texts, token ids or a file, or a `Calibration` that says more about them. None
            plans by the errors of the weights alone, which predicts much less.
        bits: The budget as stored bits of a weight, on average over the layers, scales included.
        candidates: Schemes to choose from, those of `presets.candidates` by default. A layer that a
            format cannot store does without it.
        quantizer: The one that will be used, whose own data is ignored; `Clip()` by default.
        head: The output head's format, which the budget does not count; None keeps it. Embeddings
            that share its weight share its codes.

    Returns:
        The choice; its `plan` goes to `quantize_`.

    Raises:
        InvalidInput: The budget is below the smallest choice (which is named), the model has no
            dense layers, no candidate can store a layer, the data does not fit the model, or the
            quantizer has gradients=True.
    """
    quantizer = quantizer or Clip()
    check_quantizer(quantizer, calibration is not None)
    if not 0 < bits <= 16:
        raise InvalidInput(
            f"bits={bits:g} is not a budget; an unquantized weight has 16, give fewer"
        )
    candidates = candidates or presets.candidates(bits)
    with taken_apart(model):
        dense = dense_layers(model)
        names = layers_to_plan(model, dense)
        shapes = [dense[name] for name in names]
        weights = sum(map(math.prod, shapes))
        # What needs no measuring: the fewest bits of each layer by itself.
        fewest = sum((min(bits_of(candidates, shape), default=0.0) for shape in shapes), 0.0)
        check_budget(bits, fewest / weights, candidates)
        heads = () if head is None else heads_of(model, dense, head)
        measure = measured(model, names, calibration, quantizer)
        groups = sensitivities(model, names, candidates, *measure)
    costs = [[o.bits for o in g.options] for g in groups]
    check_budget(bits, sum(map(min, costs)) / weights, candidates)
    chosen = knapsack(costs, [[o.loss for o in g.options] for g in groups], bits * weights)
    options = tuple(g.options[c] for g, c in zip(groups, chosen, strict=True))
    kind = "weight error" if calibration is None else "KL"
    planned = Allocation(tuple(groups), options, f"{bits:g} bits", kind, heads)
    return or_uniform(planned, bits)


def measured(
    model: nn.Module,
    names: list[str],
    calibration: Source | Calibration | None,
    quantizer: Quantizer,
) -> tuple[Tensor, Loss, tuple[str, ...]]:
    """Token ids, the loss of a layer in a format, and the statistics of inputs that it needs."""
    if calibration is None:
        return probe(model), partial(weight_error, quantizer), ()
    ids = calibration_from(calibration).tokens(model)
    prefix, _ = find_blocks(model, names)
    inside = [name for name in names if name.startswith(f"{prefix}.")]
    gradients = squared_gradients(model, inside, ids)
    return ids, partial(predicted_kl, quantizer, gradients), ("hessian", *quantizer.needs)


def or_uniform(planned: Allocation, bits: float) -> Allocation:
    """The plan, or one format for all layers where that is within the budget and loses less.

    It may be: `knapsack` rounds costs up, so what takes the whole budget is none of its choices.
    """
    one = [it for it in planned.uniform() if it.bits <= bits * (1 + SLACK)]
    return replace(planned, chosen=min([planned, *one], key=lambda it: it.loss).chosen)


def check_quantizer(quantizer: Quantizer, has_data: bool) -> None:
    """InvalidInput for a quantizer whose losses cannot be predicted."""
    if quantizer.needs and not has_data:
        raise InvalidInput(
            f"{type(quantizer).__name__} needs text to plan with; give calibration data, or plan "
            "with a data-free quantizer (RTN, Clip, HQQ)"
        )
    if "gradients" in quantizer.needs:
        raise InvalidInput(
            "plan_formats knows no gradients between a layer's outputs; plan with the quantizer "
            "without gradients=True, and quantize with it"
        )


def layers_to_plan(model: nn.Module, dense: Iterable[str]) -> list[str]:
    """The dense layers but for output heads; InvalidInput if there are none."""
    names = [name for name in dense if not is_head(name)]
    if not names:
        done = sum(1 for _ in quantized_layers(model))
        why = f", and {done} that are quantized already; give the dense model"
        raise InvalidInput(
            f"{type(model).__name__} has no linear layers to plan for"
            f"{why if done else '; give a model that has some'}"
        )
    return names


def bits_of(candidates: Sequence[str], shape: tuple[int, ...]) -> list[float]:
    """What a weight takes in each format that can store it."""
    n, k = shape
    formats = [parse_scheme(scheme)[0] for scheme in candidates]
    return [f.bits_per_weight((n, k)) * n * k for f in formats if fits(f, (n, k))]


def check_budget(bits: float, least: float, candidates: Sequence[str]) -> None:
    """InvalidInput if not even the smallest choice is within the budget, in bits of a weight."""
    if bits < least:
        raise InvalidInput(
            f"a budget of {bits:g} bits is below the smallest choice of these formats, "
            f"{least:.3f} bits; raise it, or offer smaller formats than {', '.join(candidates)}"
        )


def heads_of(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], scheme: str
) -> tuple[tuple[str, str], ...]:
    """Output heads, and the scheme that they get, behind embeddings whose weight they share.

    A head is kept whose weight would still be needed as it is.
    """
    fmt, _ = parse_scheme(scheme)
    tied, words = tied_heads(model), embedding_layers(model)
    heads = dict.fromkeys(filter(is_head, shapes), scheme)
    shared = {tied[name]: fmt.spec for name in heads if tied.get(name) in words}
    sharing = sharing_heads(model, shared | heads)
    for name in [name for name in heads if name in tied and name not in sharing]:
        del heads[name]
    for name in heads:
        fmt.check(*shapes[name])
    return tuple(({name: shared[name] for name in sharing.values()} | heads).items())


def probe(model: nn.Module) -> Tensor:
    """Token ids (1, T) without meaning."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    return torch.arange(PROBE)[None] % int(embedding.num_embeddings)


def weight_error(
    quantizer: Quantizer, name: str, w: Tensor, fmt: Format, statistics: Statistics
) -> float:
    """A `Loss`: the squared error over the weight's square.

    A sample of rows says how it compares with what takes no time and is known of all rows: the
    error of rounding to nearest, or the square where encoding itself takes long. All rows are
    measured where they share a table or are rotated together.
    """
    square = sum_of_squares(w)
    fmt = quantizer.format(fmt, (len(w), w.shape[1]))
    apart = fmt.rowwise and "n" not in fmt.rotate
    whole = fmt.searched and not apart
    rows = torch.arange(len(w), device=w.device) if whole else sampled_rows(w, fmt)
    known = partial(squared_error, RTN(), fmt) if fmt.searched else sum_of_squares
    error = squared_error(quantizer, fmt, w[rows])
    if len(rows) < len(w):
        part = known(w[rows])
        error = error * known(w) / part if part else squared_error(quantizer, fmt, w)
    return error / square if square else 0.0


def sum_of_squares(w: Tensor) -> float:
    return float(w.float().square().sum())


def squared_error(quantizer: Quantizer, fmt: Format, w: Tensor) -> float:
    """Of all weights together."""
    return sum_of_squares(quantize_weight(quantizer, w, fmt).dequantize() - w.float())


def predicted_kl(
    quantizer: Quantizer,
    gradients: Mapping[str, Tensor],
    name: str,
    w: Tensor,
    fmt: Format,
    statistics: Statistics,
) -> float:
    """A `Loss`: the KL divergence to second order, 0 for a layer that saw no token.

    Of a sample of rows, whose outputs stand for those of all by their part of sum_n g_n E y_n^2.
    """
    if not statistics.tokens:
        return 0.0
    g = gradients[name].to(w.device)
    rows = torch.arange(len(w), device=w.device) if fmt.searched else sampled_rows(w, fmt)
    error = quantize_weight(quantizer, w[rows], fmt, statistics).dequantize() - w[rows].float()
    loss = 0.5 * float((squares(error, statistics) * g[rows]).sum())
    if len(rows) == len(w):
        return loss
    power = squares(w.float(), statistics) * g
    part = float(power[rows].sum())
    return loss * float(power.sum()) / part if part else 0.0


def squares(w: Tensor, statistics: Statistics) -> Tensor:
    """The mean squared outputs (N,) of a weight (N, K)."""
    return (w @ statistics.hessian).mul_(w).sum(1)


def sampled_rows(w: Tensor, fmt: Format) -> Tensor:
    """Indices of evenly spaced tiles of a weight (N, K), or of all rows where these are few."""
    n, height = len(w), fmt.tile[0]
    if n <= SAMPLE:
        return torch.arange(n, device=w.device)
    starts = torch.linspace(0, n // height - 1, SAMPLE // height, dtype=torch.float64).long()
    starts = starts.to(w.device) * height
    return (starts[:, None] + torch.arange(height, device=w.device)).flatten()


def sensitivities(
    model: nn.Module,
    names: list[str],
    candidates: Sequence[str],
    ids: Tensor,
    loss: Loss,
    needs: tuple[str, ...],
) -> list[Group]:
    """Predict the loss of each candidate for each group of a decoder's layers.

    Memory beyond the model: the activations of the data, and one block's Hessians.

    Args:
        model: A dense model whose experts are layers of their own.
        names: Its layers.
        candidates: Schemes to choose from.
        ids: Token ids (samples, length).
        loss: Of one layer in one format.
        needs: The statistics that it needs.

    Returns:
        The groups in the model's order.
    """
    prefix, blocks = find_blocks(model, names)
    runner, groups = BlockRunner(model, blocks, ids), []
    with torch.no_grad():
        rehearse(runner, lambda index: on_device(blocks[index], runner.device))
    with torch.no_grad(), progress("measuring layers", len(blocks)) as step:
        for index, block in enumerate(blocks):
            start = f"{prefix}.{index}."
            own = [n.removeprefix(start) for n in names if n.startswith(start)]
            with ExitStack() as at_work:
                for one in blocks if runner.whole else [block]:
                    at_work.enter_context(on_device(one, runner.device))
                statistics = runner.collect(index, own, needs)
                for patterns, readers in same_input(own, statistics).items():
                    layers = {start + name: linear_at(block, name) for name in readers}
                    inputs = [statistics[name] for name in readers]
                    options = options_of(layers, inputs, candidates, loss)
                    if not options:
                        raise InvalidInput(
                            f"{start}{readers[0]}: none of {', '.join(candidates)} can store a "
                            f"weight of {tuple(linear_at(block, readers[0]).weight.shape)}; offer "
                            "another format"
                        )
                    weights = sum(layer.weight.numel() for layer in layers.values())
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


def options_of(
    layers: Mapping[str, nn.Linear],
    statistics: Sequence[Statistics],
    candidates: Sequence[str],
    loss: Loss,
) -> tuple[Option, ...]:
    """What each candidate costs all the layers together."""
    out = []
    shapes = [(layer.out_features, layer.in_features) for layer in layers.values()]
    for scheme in candidates:
        fmt = parse_scheme(scheme)[0]
        if not all(fits(fmt, shape) for shape in shapes):
            continue
        losses = [
            loss(name, layer.weight.detach(), fmt, one)
            for (name, layer), one in zip(layers.items(), statistics, strict=True)
        ]
        bits = sum(fmt.bits_per_weight(shape) * shape[0] * shape[1] for shape in shapes)
        out.append(Option(scheme, bits, sum(losses)))
    return tuple(out)


def squared_gradients(model: nn.Module, names: Sequence[str], ids: Tensor) -> dict[str, Tensor]:
    """Mean squared gradients of each layer's outputs over tokens.

    Args:
        model: A dense transformers model.
        names: Its layers.
        ids: Token ids (samples, length).

    Returns:
        (N,) fp32 by layer; zeros for experts that no token reached.

    Raises:
        InvalidInput: No gradient reached a layer that is not an expert.
    """
    sums = {name: torch.zeros(linear_at(model, name).out_features) for name in names}

    def add(name: str, gradient: Tensor) -> None:
        squares = gradient.float().flatten(0, -2).square().sum(0)
        sums[name] = sums[name].to(squares.device) + squares

    each_gradient(model, names, ids, lambda name, x: None, add)
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
    step = spare / BINS if spare > 0 else math.ulp(budget)
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
    at, out = int(np.argmin(best)), []
    for group, floor, pick in zip(reversed(costs), reversed(floors), reversed(picks), strict=True):
        option = int(pick[at])
        out.append(option)
        at -= int(np.ceil((group[option] - floor) / step - 1e-9))
    return out[::-1]


def fits(fmt: Format, shape: tuple[int, int]) -> bool:
    """Whether a format can store a weight of this shape (N, K)."""
    try:
        fmt.check(*shape)
    except ValueError:
        return False
    return True
