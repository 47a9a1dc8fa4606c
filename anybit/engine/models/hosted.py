"""Models of transformers as they are, with their attention on the engine's paged cache.

transformers lets a function take the place of every layer's attention. Where attention is all that
looks at other tokens, the tokens of many sequences can pass through the rest of a model side by
side, in chunks of any size. `Hosted` finds out whether that is so before it takes a model.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from anybit.engine.models import UnknownModel
from anybit.engine.models.interface import NAME, Call, Step, current
from anybit.engine.models.layers import Decoder
from anybit.engine.models.rope import check_length
from anybit.engine.models.trial import Again, Layer, Trial, spoiled
from anybit.errors import in_a_line, probing
from anybit.kernels.attention import Batch, Mask
from anybit.kernels.kv.cache import Heads
from anybit.kernels.kv.format import plain
from anybit.kernels.state import LayerState, Room

TOKENS = 8  # of the trial runs


class Paged:
    """A step over the caches of all layers, in the order in which they are called."""

    def __init__(self, layers: list[Layer], states: Sequence[LayerState], batch: Batch):
        self.layers: Iterator[tuple[Layer, Any]] = iter(zip(layers, states, strict=True))
        self.batch = replace(batch, positions=torch.zeros_like(batch.positions))
        self.still: tuple[Tensor, Tensor] | None = None  # a rotation by nothing, for kernels

    def mask(self, of: Mask, queries: int, keys: int, device: torch.device) -> Tensor:
        return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)  # nobody reads it

    def attend(self, call: Call) -> Tensor:
        layer, cache = next(self.layers)
        heads, width = call.q.shape[1], call.v.shape[3]
        parts = (
            nn.functional.pad(x[0].transpose(0, 1), (0, layer.dim - x.shape[3])).flatten(1)
            for x in (call.q, call.k, call.v)
        )
        rope = self._still(layer.dim, call.q.device) if cache.by_kernels else None
        out = cache.attend(torch.cat(list(parts), 1), heads, self.batch, rope, layer.scores)
        return out[None, ..., :width].contiguous()

    def _still(self, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if self.still is None or self.still[0].shape[1] != dim // 2:
            ones = torch.ones(1, dim // 2, device=device)
            self.still = ones, torch.zeros_like(ones)
        return self.still


class Given(nn.Module):
    """In the place of a model without its head: what that has computed already."""

    class Output(tuple[Tensor]):
        last_hidden_state = property(lambda self: self[0])

        def __getattr__(self, name: str) -> None:
            return None

    def __init__(self, hidden: Tensor):
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> "Given.Output":
        return Given.Output((self.hidden,))


class Hosted(Decoder):
    """A causal language model of transformers.

    model: in evaluation mode, on its device. length: positions that it is prepared for.

    Raises UnknownModel, and leaves the model as it was, where more than attention looks at other
    tokens, or attention is not one that the engine has.
    """

    hosted = True

    def __init__(self, model: Any, length: int):
        nn.Module.__init__(self)
        self.config, self.length, self.model = model.config, length, model
        check_length(model.config.get_text_config(), length)
        embedding = model.get_input_embeddings()
        below = [name for name, m in model.named_children() if embedding in set(m.modules())]
        if (
            len(below) != 1
            or not isinstance(getattr(embedding, "weight", None), Tensor)  # several of them
            or embedding is getattr(model, below[0])
            or model.config.is_encoder_decoder
        ):
            raise UnknownModel(f"{type(model).__name__} is not a decoder below a head")
        (self.base,), self.words = below, embedding
        ids = torch.arange(TOKENS, device=model.device) % self.config.get_text_config().vocab_size
        before = {id(c): (c, c._attn_implementation) for c in configs(model)}
        with torch.inference_mode(), probing():
            try:
                first = model(ids[None], use_cache=True)
                model.set_attn_implementation(NAME)
                self.layers_of_attention = self._try(ids)
                self.memories = [Heads(each.heads, each.dim) for each in self.layers_of_attention]
                self._check_kept(first.get("past_key_values"))
                self._compare(ids, first.logits[0])
            except Exception as error:
                for config, name in before.values():
                    config._attn_implementation_internal = name
                if isinstance(error, UnknownModel):
                    raise
                raise UnknownModel(
                    f"{type(model).__name__} does not run on another's attention "
                    f"({in_a_line(error)})"
                ) from error

    def forward(self, tokens: Tensor, states: Sequence[LayerState], batch: Batch) -> Tensor:
        step = Paged(self.layers_of_attention, states, batch)
        return self._run(step, tokens.long(), batch.positions.long(), masked=True)

    def logits(self, hidden: Tensor) -> Tensor:
        tail = copy.copy(self.model)  # the same modules but for one
        tail._modules = {**self.model._modules, self.base: Given(hidden[None])}
        ids = hidden.new_zeros(1, len(hidden), dtype=torch.long)
        return tail(ids, use_cache=False).logits[0]

    @property
    def capturable(self) -> bool:
        return False  # transformers' modules may wait for the device

    def _run(self, step: Step, tokens: Tensor, positions: Tensor, masked: bool) -> Tensor:
        """Hidden states (T, hidden). masked: with a mask that keeps transformers from making one,
        which takes tokens at positions that jump for texts of their own, and waits to see it."""
        mask = tokens.new_zeros(1, 1, 1, 1, dtype=torch.bool) if masked else None
        token = current.set(step)
        try:
            out = self.model._modules[self.base](
                tokens[None], position_ids=positions[None], attention_mask=mask, use_cache=False
            )
        finally:
            current.reset(token)
        return out[0][0]

    def _try(self, ids: Tensor) -> list[Layer]:
        """The model's attention layers; what its other parts do must not depend on other tokens."""
        at = torch.arange(len(ids), device=ids.device)
        trial, other = Trial(self.length), Again(self.length)
        hidden = self._run(trial, ids, at, masked=False).float()
        if not trial.layers:
            raise UnknownModel(f"{type(self.model).__name__} has no attention to be replaced")
        # The tokens the other way round, one of them NaN, which spreads to whatever looks at it.
        spoilt = len(ids) // 3
        with spoiled(self.model.get_input_embeddings(), spoilt):
            turned = self._run(other, ids.flip(0), at.flip(0), masked=True).float()
        nan = turned.isnan().any(-1)
        if nan.sum() != 1 or not nan[spoilt]:
            raise UnknownModel(
                f"{type(self.model).__name__} has layers other than attention that look at other "
                "tokens"
            )
        pairs = [*zip(trial.seen, other.seen, strict=True), (hidden, turned)]
        if not all(self._alike(a.flip(0)[~nan], b[~nan]) for a, b in pairs):
            raise UnknownModel(
                f"{type(self.model).__name__} does not take the positions that it is given"
            )
        return trial.layers

    def _check_kept(self, cache: Any) -> None:
        """UnknownModel where transformers' cache forgets tokens that attention would look at."""
        layers = getattr(cache, "layers", [])
        for kept, layer in zip(layers, self.layers_of_attention, strict=False):
            if getattr(kept, "is_sliding", False) and layer.scores.mask is None:
                seen = min(layer.scores.window or self.length, self.length)
                if kept.sliding_window < seen:
                    raise UnknownModel(
                        f"{type(self.model).__name__} keeps {kept.sliding_window} tokens in its "
                        f"cache, and looks at {seen} without one"
                    )

    def _compare(self, ids: Tensor, want: Tensor) -> None:
        """Two copies of a text side by side, in chunks, against the model as it was."""
        size, blocks, kv = 2, -(-len(ids) // 2), plain(self.embed_tokens.dtype)
        room = Room(2 * blocks, size, 0, kv, ids.device)
        caches = [memory.empty(room) for memory in self.memories]
        tables = torch.arange(2 * blocks, device=ids.device, dtype=torch.int32).view(2, blocks)
        got = []
        for first, last in ((0, 3), (3, 4), (4, len(ids))):
            at = torch.arange(first, last, device=ids.device, dtype=torch.int32)
            count = last - first
            batch = Batch(
                positions=at.repeat(2),
                slots=torch.cat([row[at // size] * size + at % size for row in tables]),
                tables=tables,
                contexts=ids.new_full((2,), last, dtype=torch.int32),
                starts=torch.arange(3, device=ids.device, dtype=torch.int32) * count,
                queries=[count] * 2,
                lengths=[last] * 2,
                decodes=2 if count == 1 else 0,
            )
            got.append(self.logits(self.forward(ids[first:last].repeat(2), caches, batch)))
        for i in range(2):
            own = torch.cat([part.chunk(2)[i] for part in got])
            if own.shape != want.shape or not self._alike(own.float(), want.float()):
                raise UnknownModel(
                    f"{type(self.model).__name__} gives other logits without a cache of its own"
                )

    def _alike(self, a: Tensor, b: Tensor) -> bool:
        """Whether tokens (T, values) are the same but for rounding.

        In 16 bits, a token may go to other experts by a hair, so most are enough.
        """
        apart = (a - b).norm(dim=1) / b.norm(dim=1).clamp_min(1e-30)
        if self.embed_tokens.dtype == torch.float32:
            return bool((apart <= 0.01).all())
        return bool(apart.nan_to_num(1).median() <= 0.1)


def configs(model: Any) -> list[Any]:
    """The configurations of a model and of its parts."""
    found = {
        id(c): c
        for m in model.modules()
        if hasattr(c := getattr(m, "config", None), "_attn_implementation")
    }
    return list(found.values())
