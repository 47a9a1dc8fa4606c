"""How much the outputs of a model's layers matter: gradients of its own predictions.

A layer with inputs x and gradients g of the log-likelihood at its outputs has the Fisher
information E[(g x^T) (g x^T)^T], which is close to the Kronecker product of E[g g^T] and E[x x^T]
(K-FAC, https://arxiv.org/abs/1503.05671). The second is what calibration observes block by block;
the first is found here, for the whole model, by tokens that it draws from its own predictions.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from anybit.errors import InvalidInput, Unsupported
from anybit.nn.model import linear_at

ROWS = 256  # outputs whose joint moments are kept; rounding goes on in all such blocks at once
TILE = 16  # blocks have a multiple of so many rows
TOKENS = 4096  # in one backward pass


def refuse_gradients(model: nn.Module, data: object, in_parts: bool) -> None:
    """Raise Unsupported where gradients of a model's outputs cannot be had."""
    if in_parts or not isinstance(data, Tensor):
        raise Unsupported(
            f"gradients=True needs a decoder in memory and token ids, not {type(model).__name__} "
            "from disk, of several parts, or with batches of other inputs; use GPTQ without it"
        )


@torch.enable_grad()
def output_gradients(
    model: nn.Module, names: Sequence[str], ids: Tensor, seed: int = 0
) -> dict[str, Tensor]:
    """Second moments of the gradients at the outputs of layers.

    Args:
        model: A dense language model, in memory.
        names: Linear layers.
        ids: Token ids (samples, length).
        seed: Of the tokens that are drawn.

    Returns:
        By name the mean of g g^T over all tokens, (N / 256, 256, 256) fp32: blocks on the diagonal,
        the last one with zeros after the last output; a smaller one for a smaller layer, of a
        multiple of 16. Layers that saw no token are left out.

    Raises:
        InvalidInput: Gradients hold NaN or inf.
    """
    found: dict[str, Tensor] = {}

    def observe(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def add(gradient: Tensor) -> None:
            found[name] = found.get(name, 0) + moments(gradient) / ids.numel()

        def watch(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            output.requires_grad_().register_hook(add)

        return watch

    home = next(model.parameters()).device
    random = torch.Generator(home).manual_seed(seed)
    learned = [p for p in model.parameters() if p.requires_grad]
    handles = [linear_at(model, name).register_forward_hook(observe(name)) for name in names]
    try:
        model.requires_grad_(False)
        for part in ids.split(max(1, TOKENS // ids.shape[1])):
            logits = model(input_ids=part.to(home), use_cache=False).logits.float().flatten(0, 1)
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
    return found


def moments(gradient: Tensor) -> Tensor:
    """The sum of g g^T by blocks of `ROWS`, of gradients (..., N)."""
    g = gradient.flatten(0, -2).float()
    rows = min(-(-g.shape[1] // TILE) * TILE, ROWS)
    blocks = pad(g, (0, -g.shape[1] % rows)).unflatten(1, (-1, rows)).movedim(0, 2)
    return blocks @ blocks.mT
