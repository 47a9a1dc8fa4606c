"""Whether a model of transformers can run on the engine's cache: found out by two short passes.

In both, tokens look at themselves alone, so that what still depends on other tokens shows.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anybit.engine.models import UnknownModel
from anybit.engine.models.interface import Call
from anybit.kernels.attention import Mask, Scores, sdpa, seen

# What models hand to attention that does not change it, or that a mask says as well.
HARMLESS = {
    "dropout",
    "is_causal",
    "sliding_window",
    "position_ids",
    "position_embeddings",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "cache_position",
    "logits_to_keep",
    "output_router_logits",
}


@dataclass(frozen=True)
class Layer:
    """An attention layer. heads: of K; dim: the larger one of K's and V's."""

    scores: Scores
    heads: int
    dim: int


class Trial:
    """Tokens look at themselves alone, and every layer's attention is compared with ours.

    Raises UnknownModel for what `Paged` could not do.
    """

    def __init__(self, length: int):
        self.length = length
        self.masks: list[tuple[Tensor, Mask, int | None]] = []  # as in `window_in`
        self.layers: list[Layer] = []
        self.seen: list[Tensor] = []  # each layer's Q and K, (T, values)

    def mask(self, of: Mask, queries: int, keys: int, device: torch.device) -> Tensor:
        at = torch.arange(max(queries, keys), device=device)
        found = visible(of, at[-queries:], at[-keys:])[None, None]
        self.masks.append((found, of, window_in(of, self.length, device)))
        return found

    def attend(self, call: Call) -> Tensor:
        q, k, v, options = call.q, call.k, call.v, call.options
        name = type(call.module).__name__
        strange = [o for o, x in options.items() if x is not None and o not in HARMLESS]
        if left := sorted(set(strange) - {"softcap", "s_aux"}):
            raise UnknownModel(f"{name} hands {', '.join(left)} to its attention")
        mask = next((found for found in self.masks if found[0] is call.mask), None)
        if mask is None:
            raise UnknownModel(f"{name} gets a mask that the model has made itself")
        if k.shape[2] != q.shape[2]:
            raise UnknownModel(f"{name} attends to more than the tokens of its sequence")
        _, seen_by, window = mask
        softcap = options.get("softcap")
        scores = Scores(
            call.scale,
            window or None,
            None if softcap is None else float(softcap),
            options.get("s_aux"),
            seen_by if window is None else None,
        )
        self.layers.append(Layer(scores, k.shape[1], max(k.shape[3], v.shape[3])))
        compare(call, seen_by, scores)
        return self.alone(call)

    def alone(self, call: Call) -> Tensor:
        """What a layer gives when every token looks at itself."""
        q, k, v = call[1:4]
        self.seen.append(torch.cat([x[0].transpose(0, 1).flatten(1).float() for x in (q, k)], 1))
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2).contiguous()


class Again(Trial):
    """A trial without questions."""

    def attend(self, call: Call) -> Tensor:
        return self.alone(call)


def window_in(mask: Mask, length: int, device: torch.device) -> int | None:
    """The tokens that a token sees by a causal mask; 0: all; None: a mask of another form."""
    at = torch.arange(length, device=device)
    last = visible(mask, at[-1:], at)[0]
    size = int(last.sum())
    rows = torch.linspace(0, length - 1, 64, dtype=torch.float64, device=device).long()
    rows = torch.cat([rows, at[max(size - 2, 0) : size + 3], at[:4]]).unique()
    found = visible(mask, rows, at)
    if not torch.equal(found, (at <= rows[:, None]) & (at > rows[:, None] - size)):
        return None
    return 0 if size == length else size


def visible(mask: Mask, queries: Tensor, keys: Tensor) -> Tensor:
    """What a mask of transformers lets tokens at `queries` see of `keys`: (queries, keys)."""
    return seen(mask, queries[:, None], keys[None]).expand(len(queries), len(keys))


def compare(call: Call, mask: Mask, scores: Scores) -> None:
    """UnknownModel unless the model's own attention is ours, on random numbers in fp32."""
    kind = type(call.module)
    own: Callable[..., Any] | None
    own = next(
        (
            found
            for c in kind.__mro__
            if (found := getattr(sys.modules[c.__module__], "eager_attention_forward", None))
        ),
        None,
    )
    if own is None:
        raise UnknownModel(f"{kind.__name__} has no plain form of its attention")
    random = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(x.shape, generator=random, dtype=torch.float32).to(x.device) for x in call[1:4]
    )
    q = q * (4 / q.shape[3] ** 0.5 / call.scale)  # scores large enough for a soft cap
    at = torch.arange(q.shape[2], device=q.device)
    allowed = visible(mask, at, at)
    least = torch.finfo(torch.float32).min
    options = call.options | {"dropout": 0.0}
    mask_added = torch.where(allowed, 0.0, least)[None, None]
    want = own(call.module, q, k, v, mask_added, scaling=call.scale, **options)[0]
    got = sdpa(q, k, v, allowed[None, None], scores).transpose(1, 2)
    if want.shape != got.shape or not (got - want).norm() <= 1e-3 * want.norm():
        raise UnknownModel(f"{kind.__name__} does more in its attention than the engine's")


@contextmanager
def spoiled(embedding: nn.Module, index: int) -> Iterator[None]:
    """Inside, the embedding of the token at `index` is NaN."""

    def spoil(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        out = out.clone()
        out[:, index] = float("nan")
        return out

    hook = embedding.register_forward_hook(spoil)
    try:
        yield
    finally:
        hook.remove()
