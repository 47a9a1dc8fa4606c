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
from anybit.nn.model import linear_at

ROWS = 256  # outputs whose joint moments are kept; rounding goes on in all such blocks at once
TILE = 16  # blocks have a multiple of so many rows
MOST = 20  # weight of a token
TOKENS = 4096  # in one backward pass


def refuse_gradients(model: nn.Module, data: object, in_parts: bool) -> None:
    """Raise Unsupported where gradients of a model's outputs cannot be had."""
    if in_parts or not isinstance(data, Tensor):
        raise Unsupported(
            f"gradients=True needs a decoder in memory and token ids, not {type(model).__name__} "
            "from disk, of several parts, or with batches of other inputs; use GPTQ without it"
        )


class Gradients(NamedTuple):
    """What is known of the gradients g at the outputs (T, N) of a layer.

    Attributes:
        moments: The mean of g g^T over all tokens, (N / 256, 256, 256) fp32: blocks on the
            diagonal, the last one with zeros after the last output; a smaller one for a smaller
            layer, of a multiple of 16.
        weights: |g|^2 of each token over its mean, (T,), summed over layers that read one input,
            and at most 20; empty where the layer does not see all tokens (experts).
    """

    moments: Tensor
    weights: Tensor


@torch.enable_grad()
def output_gradients(
    model: nn.Module, names: Sequence[str], ids: Tensor, seed: int = 0
) -> dict[str, Gradients]:
    """Gradients at the outputs of layers.

    Args:
        model: A dense language model, in memory.
        names: Linear layers.
        ids: Token ids (samples, length).
        seed: Of the tokens that are drawn.

    Returns:
        By name; layers that saw no token are left out.

    Raises:
        InvalidInput: Gradients hold NaN or inf.
    """
    found: dict[str, Tensor] = {}
    squares: dict[str, list[Tensor]] = {}
    first: dict[str, str] = {}  # the layer that is the first to read this one's input
    last: list[tuple[str, Tensor]] = []
    home = next(model.parameters()).device

    def observe(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def add(gradient: Tensor) -> None:
            found[name] = found.get(name, 0) + moments(gradient) / ids.numel()
            squares.setdefault(name, []).append(gradient.float().square().sum(-1).flatten())

        def watch(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            if not last or last[0][1] is not args[0]:
                last[:] = [(name, args[0])]
            first.setdefault(name, last[0][0])
            output.requires_grad_().register_hook(add)

        return watch

    random = torch.Generator(home).manual_seed(seed)
    learned = [p for p in model.parameters() if p.requires_grad]
    handles = [linear_at(model, name).register_forward_hook(observe(name)) for name in names]
    try:
        model.requires_grad_(False)
        for part in ids.split(max(1, TOKENS // ids.shape[1])):
            logits = predictions(model, part.to(home))
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=random)
            cross_entropy(logits, drawn.flatten(), reduction="sum").backward()
    finally:
        for handle in handles:
            handle.remove()
        for p in learned:
            p.requires_grad_()
    for name, moment in found.items():
        if not torch.isfinite(moment).all():
            raise InvalidInput(
                f"{name}: the gradients of its outputs hold NaN or inf; try the model in bfloat16 "
                "or float32"
            )
    sums: dict[str, Tensor] = {}
    for name, parts in squares.items():
        sums[first[name]] = sums.get(first[name], 0) + torch.cat(parts)
    weights = {name: weights_of(total, ids.numel()) for name, total in sums.items()}
    return {name: Gradients(moment, weights[first[name]]) for name, moment in found.items()}


def predictions(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits (tokens, vocabulary) fp32."""
    logits = getattr(model(input_ids=ids, use_cache=False), "logits", None)
    if logits is None:
        raise Unsupported(
            f"gradients=True needs a model that predicts tokens; {type(model).__name__} returns no "
            "logits, so use GPTQ without it"
        )
    if not torch.isfinite(logits.sum()):
        raise InvalidInput(
            "the model's predictions hold NaN or inf on the calibration data; try the model in "
            "bfloat16 or float32"
        )
    return cast(Tensor, logits.float().flatten(0, 1))


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
