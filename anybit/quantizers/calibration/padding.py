"""Padded positions of batches, which no statistics may see."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from anybit.errors import InvalidInput
from anybit.nn.experts import Experts


class Masks(NamedTuple):
    """Which positions of a batch are real, (samples, length) each; None: all.

    own: of the sequence that the blocks compute. context: of what they read beside it, an encoder's
    output.
    """

    own: Tensor | None
    context: Tensor | None = None


def masks_of(batch: Mapping[str, Tensor], decoder: bool) -> Masks:
    """The masks of a batch.

    Args:
        batch: A model's inputs by name.
        decoder: Whether the blocks are those of an encoder-decoder's decoder. Where it has no mask,
            labels say what is padding, as for the loss.
    """
    own = real(batch.get("attention_mask"))
    if not decoder:
        return Masks(own)
    mask, labels = batch.get("decoder_attention_mask"), batch.get("labels")
    if mask is None and labels is not None and labels.ndim == 2:
        mask = labels != -100
    return Masks(real(mask), own)


def real(mask: Tensor | None) -> Tensor | None:
    """A mask as booleans; None when nothing is padding."""
    return None if mask is None or bool(mask.bool().all()) else mask.bool()


def real_rows(x: Tensor, mask: Tensor | None) -> Tensor | None:
    """The rows (T, K) of a layer's input that are no padding; None when that cannot be told.

    Args:
        x: (samples, length, K), or (samples * length, K).
        mask: (samples, length); None: all are real.
    """
    rows = x.detach().flatten(0, -2)
    if mask is None:
        return rows
    if x.shape[:-1] not in (mask.shape, (mask.numel(),)):
        return None
    return rows[mask.flatten().to(x.device)]


@contextmanager
def real_tokens_alone(parent: nn.Module, mask: Tensor | None) -> Iterator[None]:
    """Inside, experts below a module compute real tokens only, and return zeros for padding."""
    found = [m for m in parent.modules() if isinstance(m, Experts)] if mask is not None else []
    for module in found:
        assert mask is not None
        module.forward = partial(compute_real, module.forward, mask.flatten())  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in found:
            del module.forward


def compute_real(
    forward: Callable[..., Tensor],
    mask: Tensor,
    hidden_states: Tensor,
    *chosen: Tensor,
    **named: Tensor,
) -> Tensor:
    """`Experts.forward` of the tokens (T,) that the mask names.

    Without chosen experts, hidden_states holds all tokens once for each expert.
    """
    copies, rest = divmod(len(hidden_states), len(mask))
    if rest or ((chosen or named) and copies != 1):
        raise InvalidInput(
            f"experts get {len(hidden_states)} tokens of a batch of {len(mask)}, so padding cannot "
            "be told from tokens; give batches without padding, of one sample each"
        )
    keep = mask.to(hidden_states.device).repeat(copies)
    out = torch.zeros_like(hidden_states)
    some = {name: tensor[keep] for name, tensor in named.items()}
    out[keep] = forward(hidden_states[keep], *(tensor[keep] for tensor in chosen), **some)
    return out
