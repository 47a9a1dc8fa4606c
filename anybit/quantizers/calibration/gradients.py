"""How much the outputs of a model's layers matter: gradients of its own predictions.

A layer with inputs x and gradients g of the log-likelihood at its outputs has the Fisher
information E[(g x^T) (g x^T)^T], which is close to the Kronecker product of E[g g^T] and E[x x^T]
(K-FAC, https://arxiv.org/abs/1503.05671). The second is what calibration observes block by block;
the first is found here, for the whole model, by tokens that it draws from its own predictions. So
is |g|^2 of each token, by which the second counts tokens: the next step to the closest product.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from anybit.errors import InvalidInput, Unsupported
from anybit.nn.experts import of_all_experts
from anybit.nn.model import linear_at
from anybit.progress import progress

ROWS = 256  # outputs whose joint moments are kept; rounding goes on in all such blocks at once
TILE = 16  # blocks have a multiple of so many rows
MOST = 20  # weight of a token
TOKENS = 4096  # in one backward pass,
LOGITS = 1 << 27  # which has no more logits than so many, 0.5 GB, but for one sample at least


def refuse_gradients(model: nn.Module, data: object, in_parts: bool) -> None:
    """Raise Unsupported where gradients of a model's outputs cannot be had."""
    if in_parts or not isinstance(data, Tensor):
        raise Unsupported(
            f"gradients=True needs a decoder and token ids, not {type(model).__name__} of several "
            "parts, or with batches of other inputs; use GPTQ without it"
        )


class Gradients(NamedTuple):
    """What is known of the gradients g at the outputs (T, N) of a layer.

    Attributes:
        moments: The mean of g g^T over all tokens, (N / 256, 256, 256) fp32: blocks on the
            diagonal, the last one with zeros after the last output; a smaller one for a smaller
            layer, of a multiple of 16.
        weights: |g|^2 of each token over its mean, (T,), summed over layers that read one input,
            and at most 20; empty for experts, which do not see all tokens, and for layers that are
            used several times.
    """

    moments: Tensor
    weights: Tensor


def output_gradients(model: nn.Module, names: Sequence[str], ids: Tensor) -> dict[str, Gradients]:
    """Gradients at the outputs of layers.

    Args:
        model: A dense language model, in memory.
        names: Linear layers.
        ids: Token ids (samples, length).

    Returns:
        By name, moments on the CPU; zeros for experts that no token reached.

    Raises:
        InvalidInput: Predictions or gradients hold NaN or inf, or no gradient reached a layer that
            is no expert.
    """
    found: dict[str, Tensor] = {}
    squares: dict[str, list[Tensor]] = {}
    first: dict[str, str] = {}  # the layer that is the first to read this one's input
    last: list[tuple[str, Tensor]] = []

    def read(name: str, x: Tensor) -> None:
        if not last or last[0][1] is not x:
            last[:] = [(name, x)]
        first.setdefault(name, last[0][0])

    def add(name: str, gradient: Tensor) -> None:
        found[name] = found.get(name, 0) + moments(gradient) / ids.numel()
        squares.setdefault(name, []).append(gradient.float().square().sum(-1).flatten())

    each_gradient(model, names, ids, read, add)
    for name in list(found):
        if not torch.isfinite(found[name]).all():
            raise InvalidInput(
                f"{name}: the gradients of its outputs hold NaN or inf; try the model in bfloat16 "
                "or float32"
            )
        found[name] = found[name].cpu()  # of all layers, they are too much beside a block at work
    for name in names:
        if name not in found:
            found[name] = moments(torch.zeros(1, linear_at(model, name).out_features))
    sums: dict[str, Tensor] = {}
    once = {name for name, parts in squares.items() if sum(map(len, parts)) == ids.numel()}
    for name in once:
        sums[first[name]] = sums.get(first[name], 0) + torch.cat(squares[name])
    none = torch.empty(0)
    weights = {
        name: weights_of(total, ids.numel())
        for name, total in sums.items()
        if name == of_all_experts(name)  # the quantized model sends experts other tokens
    }
    return {
        name: Gradients(m, weights.get(first[name], none) if name in once else none)
        for name, m in found.items()
    }


@torch.enable_grad()
def each_gradient(
    model: nn.Module,
    names: Sequence[str],
    ids: Tensor,
    read: Callable[[str, Tensor], None],
    add: Callable[[str, Tensor], None],
) -> None:
    """Run a model forwards and backwards, from tokens that are drawn from its own predictions.

    Args:
        model: A dense language model, in memory.
        names: Linear layers.
        ids: Token ids (samples, length).
        read: Called with a layer and its input, in the order of the forward pass.
        add: Called with a layer and the gradient of the summed log-likelihood at its outputs.

    Raises:
        InvalidInput: Predictions hold NaN or inf, or no gradient reached a layer that is no expert.
        Unsupported: The model predicts no tokens.
    """
    reached: set[str] = set()
    home = next(model.parameters()).device
    random = torch.Generator(home).manual_seed(0)

    def observe(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def observed(gradient: Tensor) -> None:
            reached.add(name)
            add(name, gradient)

        def watch(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            read(name, args[0])
            output.requires_grad_().register_hook(observed)

        return watch

    learned = [p for p in model.parameters() if p.requires_grad]
    handles = [linear_at(model, name).register_forward_hook(observe(name)) for name in names]
    try:
        model.requires_grad_(False)
        with progress("gradients of predictions", ids.numel()) as step:
            at, samples = 0, 1  # the first sample shows how large logits are
            while at < len(ids):
                part = ids[at : at + samples]
                logits = predictions(model, part.to(home))
                drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=random)
                cross_entropy(logits, drawn.flatten(), reduction="sum").backward()
                at += samples
                samples = max(1, min(TOKENS, LOGITS // logits.shape[1]) // ids.shape[1])
                step(part.numel())
    finally:
        for handle in handles:
            handle.remove()
        for p in learned:
            p.requires_grad_()
    missed = [n for n in names if n not in reached and n == of_all_experts(n)]
    if missed:
        raise InvalidInput(
            f"no gradient reached {', '.join(missed[:3])}: the model's forward pass does not use "
            "these layers on this data; keep them out, or give more data"
        )


def predictions(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits (tokens, vocabulary) fp32."""
    logits = getattr(model(input_ids=ids, use_cache=False), "logits", None)
    if logits is None or logits.ndim != 3 or logits.shape[:2] != ids.shape:
        found = "no logits" if logits is None else f"logits {tuple(logits.shape)}"
        raise Unsupported(
            f"gradients need a model that predicts a token after each; for ids {tuple(ids.shape)} "
            f"{type(model).__name__} returns {found}. Quantize without gradients=True, and plan "
            "without calibration data"
        )
    logits = logits.float().flatten(0, 1)
    if not torch.isfinite(logits).all():
        raise InvalidInput(
            "the model's predictions hold NaN or inf on the calibration data; try the model in "
            "bfloat16 or float32"
        )
    return cast(Tensor, logits)


def weights_of(squares: Tensor, tokens: int) -> Tensor:
    """Squares over their mean, at most `MOST` and with a mean of 1; none if not of all tokens."""
    if len(squares) != tokens or not squares.any():
        return squares[:0]
    most = (squares / squares.mean()).clamp(max=MOST)
    return most / most.mean()


def moments(gradient: Tensor) -> Tensor:
    """The sum of g g^T by blocks of `ROWS`, of gradients (..., N)."""
    g = gradient.flatten(0, -2).float()
    rows = min(-(-g.shape[1] // TILE) * TILE, ROWS)
    blocks = pad(g, (0, -g.shape[1] % rows)).unflatten(1, (-1, rows)).movedim(0, 2)
    return blocks @ blocks.mT
