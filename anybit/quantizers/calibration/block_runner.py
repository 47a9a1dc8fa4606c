"""A model's forward pass, one block at a time, and statistics of its layers' inputs."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from anybit.errors import AnybitError, InvalidInput, in_a_line, probing
from anybit.quantizers.calibration.observer import Observer
from anybit.quantizers.calibration.padding import masks_of, real_tokens_alone
from anybit.quantizers.calibration.statistics import SAMPLE, Statistics

BATCH = {"cpu": 1024, "cuda": 16384}  # tokens in one forward pass; a GPU waits for its launches

Batch = Mapping[str, Tensor]


class Visit(NamedTuple):
    """A call of a block: its index, its forward, and what that is given."""

    at: int
    forward: Callable[..., Any]
    args: Any
    kwargs: Any


Each = Callable[[Visit], Any]  # in the place of a block


class BlockRunner:
    """Runs a model one block at a time, and keeps the inputs of the current block.

    These are as large as samples * length * hidden size. What else blocks hand on to the next
    (T5's position bias) is kept too, and the output of an encoder.

    Args:
        model: Any model that has the blocks.
        blocks: Its blocks in order, as `find_blocks` or `block_lists` finds them.
        data: Token ids (samples, length), or batches of the model's inputs by name.
        encoder: As in `Blocks`.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: list[nn.Module],
        data: Tensor | Sequence[Batch],
        encoder: nn.Module | None = None,
    ):
        self.model, self.blocks, self.encoder = model, blocks, encoder
        # What a block returns after the hidden states: how many values (None: it returns no tuple),
        # and which of them the next block gets. `rehearse` finds out.
        self.tails: dict[int, int | None] = {}
        self.carried: dict[int, frozenset[int]] = {}
        # Of a model that must run whole: for each block, those with layers of it (`rehearse`).
        self.whole: list[set[int]] = []
        real = (p.device for p in model.parameters() if not p.is_meta)  # blocks on disk are not
        home = next(real, torch.device("cpu"))
        offload = home.type == "cpu" and torch.cuda.is_available()
        self.home, self.device = home, torch.device("cuda") if offload else home
        self.tokens = isinstance(data, Tensor)
        self.batches: Sequence[Batch]
        if isinstance(data, Tensor):
            tokens = BATCH.get(self.device.type, BATCH["cuda"])
            self.batches = batches_of(data, max(1, tokens // data.shape[1]))
        else:
            self.batches = data
        self.hidden: list[Tensor | None] = [None] * len(self.batches)
        self.passed: dict[int, tuple[Any, ...]] = {}  # beside them, by batch
        self.copies: dict[int, nn.Module] = {}  # blocks that run in the place of the model's own
        self.encoded: dict[Any, Any] = {}  # outputs of the encoder, by batch and number of samples
        self.context: set[int] = set()  # memory of what the block reads besides hidden states

    def collect(
        self,
        index: int,
        names: Iterable[str],
        needs: tuple[str, ...],
        dense: "BlockRunner | None" = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Statistics]:
        """Run a block on all data, and collect statistics of its layers' inputs.

        Args:
            index: Of the block; len(blocks) stands for the layers outside all blocks, after the
                last one.
            names: Layers, by names relative to the block, or to the model.
            needs: Names of the fields of `Statistics` to collect.
            dense: Another runner of the same data, whose blocks are dense.
            weights: How much each token counts, by layer (T,); 1 by default.

        Returns:
            Statistics by layer. Layers that get the same tensor share one object.

        Raises:
            InvalidInput: An input holds NaN or inf, or padding in it cannot be told from tokens.
        """
        names, inside = list(names), index < len(self.blocks)
        parent = self.blocks[index] if inside else self.model
        every = max(1, sum(map(self._rows, range(len(self.batches)))) // SAMPLE)
        for alone in (False, True):
            observer = Observer(parent, inside, needs, every, weights or {}, alone)
            if self._observe(observer, parent, index, names, dense):
                break
        for name, statistic in observer.seen.items():
            if not statistic.finite():
                raise InvalidInput(
                    f"{f'block {index}: ' if inside else ''}{name}: its inputs hold NaN or inf on "
                    "the calibration data; try the model in bfloat16 or float32, and look for NaN "
                    "in the weights before this layer"
                )
        return {name: observer.of(name) for name in names}

    def _observe(
        self,
        observer: Observer,
        parent: nn.Module,
        index: int,
        names: list[str],
        dense: "BlockRunner | None",
    ) -> bool:
        """Show an observer what layers get on all data; False if they cannot share statistics."""
        masks, runner = masks_of({}, False), self

        def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def observe(module: nn.Module, args: tuple[Tensor, ...]) -> None:
                observer.see(name, args[0], runner, masks, runner is not self)
                done = parent is self.model and len(observer.source) == len(names)
                if done and name == names[-1] and not self.whole:
                    raise Done(args[0])

            return observe

        parents = {parent} if dense is None else {parent, dense.copies.get(index, parent)}
        handles = [
            one.get_submodule(name).register_forward_pre_hook(hook(name))
            for one in parents
            for name in names
        ]
        try:
            for batch in range(len(self.batches)):
                masks = self._masks(batch)
                for runner in (self,) if dense is None else (dense, self):
                    with real_tokens_alone(parent, masks.own):
                        runner._call(index, batch)
                    observer.last = None
                observer.beside.clear()
                if not observer.sound():
                    return False
        finally:
            for handle in handles:
                handle.remove()
        return True

    def output(self, index: int) -> Tensor:
        """The output of block `index` for the first sample (or batch), where it is computed."""
        return self._real_output(index, 0, samples=1 if self.tokens else None)

    def outputs(self, index: int) -> list[Callable[[], Tensor]]:
        """For each batch, a function that computes the output of block `index`, less padding."""
        return [partial(self._real_output, index, batch) for batch in range(len(self.batches))]

    def advance(self, index: int, kv_scales: bool = False) -> None:
        """Run block `index` as it is now, and keep its outputs as the inputs of the next."""
        if self.whole:
            return
        cache = kv_recorder() if kv_scales else None
        for batch in range(len(self.batches)):
            self.hidden[batch] = self._call(index, batch, cache, advancing=True).to(self.home)
        bad = [h for h in self.hidden if h is not None and not torch.isfinite(h.sum())]
        if bad and not torch.isfinite(bad[0]).all():
            raise InvalidInput(
                f"block {index}: its outputs hold NaN or inf on the calibration data"
            )
        if cache is not None:
            cache.store(self.blocks[index])

    def forget(self) -> None:
        """Let go of all inputs; the last block has been run."""
        self.hidden = [None] * len(self.batches)
        self.passed.clear()
        self.encoded.clear()

    @property
    def given(self) -> str:
        """What the model gets, in words."""
        return "token ids alone" if self.tokens else f"{', '.join(self.batches[0])} alone"

    def _masks(self, batch: int) -> Any:
        return masks_of(self.batches[batch], self.encoder is not None)

    def _rows(self, batch: int) -> int:
        """About how many rows a batch gives the layers."""
        hidden, inputs = self.hidden[batch], self.batches[batch]
        names = ("decoder_input_ids", "labels") if self.encoder else ()
        main = next(inputs[n] for n in (*names, "input_ids", *inputs) if n in inputs)
        if hidden is not None:
            return hidden.shape[:-1].numel()
        return main.numel() if main.ndim < 3 else main.shape[0] * max(main.shape[1:])

    def _real_output(self, index: int, batch: int, samples: int | None = None) -> Tensor:
        out = self._call(index, batch, samples=samples)
        mask = self._masks(batch).own
        if mask is not None and out.shape[1:-1] == mask.shape[1:] and not len(out) % len(mask):
            return out[mask.repeat(len(out) // len(mask), 1).to(out.device)]
        return out

    def _call(
        self,
        index: int,
        batch: int,
        cache: Any = None,
        samples: int | None = None,
        advancing: bool = False,
    ) -> Tensor:
        """Run the model on a batch up to the end of block `index`; return its output, on `device`.

        Of a model that runs whole, the outputs of all its calls, one after the other.

        samples: use only the first few of the batch. advancing: keep what the next block gets.
        """
        inputs, hidden, passed = self.batches[batch], self.hidden[batch], self.passed.get(batch, ())
        if samples is not None:
            size = len(next(iter(inputs.values())))
            inputs, hidden, passed = to_each(
                (dict(inputs), hidden, passed),
                lambda x: x[:samples] if x.ndim and len(x) == size else x,
            )

        if self.whole:
            return self._run_whole(index, inputs, (batch, samples))

        def real(visit: Visit) -> Any:
            output, tail = parted(self._run_block(visit))
            self.tails[visit.at] = None if tail is None else len(tail)
            if advancing:
                chosen = self.carried.get(visit.at, frozenset())
                kept = [x if i in chosen else None for i, x in enumerate(tail or ())]
                self.passed[batch] = to_each(tuple(kept), lambda x: x.to(self.home))
            raise Done(output)

        self.context = set()
        found = self.run_one(index, inputs, hidden, passed, real, (batch, samples), cache)
        return torch.empty(0) if found is None else found

    def _run_block(self, visit: Visit) -> Any:
        """What a block, or its copy, returns on `device`; notes what it reads."""
        at, forward, args, kwargs = visit
        if self.device != self.home:
            args, kwargs = to_each((args, kwargs), lambda x: x.to(self.device))
        beside = (args[1:], {k: v for k, v in kwargs.items() if k != "hidden_states"})
        tensors = [x for x in tree_leaves(beside) if isinstance(x, Tensor) and x.numel()]
        self.context = {x.untyped_storage().data_ptr() for x in tensors}
        return self.copies.get(at, forward)(*args, **kwargs)

    def _run_whole(self, index: int, inputs: Batch, key: Any) -> Tensor:
        """Run the model on a batch.

        Returns:
            What block `index`, and those that have a layer of it, returned in all calls, as one.
        """
        found: list[Tensor] = []
        inside = index < len(self.blocks)

        def each(visit: Visit) -> Any:
            out = self._run_block(visit)
            if inside and visit.at in self.whole[index]:
                found.append(parted(out)[0])
            return to_each(out, lambda x: x.to(self.home))

        wanted = inspect.signature(self.model.forward).parameters
        fewer = {"logits_to_keep": 1} if inside and "logits_to_keep" in wanted else {}
        self.context = set()
        self.run_all(inputs, each, key if inside else None, **fewer)
        return torch.cat(found) if found else torch.empty(0)

    def run_one(
        self,
        index: int,
        inputs: Batch,
        hidden: Tensor | None,
        passed: tuple[Any, ...],
        real: Each,
        key: Any,
        cache: Any = None,
    ) -> Any:
        """Run the model up to block `index`, which alone is called.

        Args:
            index: Of the block; len(blocks) stands for what comes after the last one.
            inputs: Of the model.
            hidden: The block's input; None for the first block's.
            passed: What the block before it returned beside that.
            real: Called in the place of the block; raises `Done`.
            key: By which the output of the encoder is kept.
            cache: For keys and values.

        Returns:
            What `real` is done with; None after the last block.
        """

        def skip(visit: Visit) -> Any:
            at, _, args, kwargs = visit
            if hidden is not None:
                if args:
                    args = (hidden, *args[1:])
                else:
                    kwargs = kwargs | {"hidden_states": hidden}
            if at == index:
                return real(visit._replace(args=args, kwargs=kwargs))
            x, tail = args[0] if args else kwargs["hidden_states"], self.tails.get(at)
            return x if tail is None else (x, *(*passed, *(None,) * tail)[:tail])

        more = {} if cache is None else {cache_argument(self.model): cache, "use_cache": True}
        inside = index < len(self.blocks)
        try:
            self.run_all(inputs, skip, key if inside else None, **more)
        except Done as done:
            return done.output
        if inside:
            raise InvalidInput(f"the model's forward pass does not call its block {index}")
        return None

    def run_all(
        self,
        inputs: Batch,
        each: Each,
        key: Any = None,
        **options: Any,
    ) -> None:
        """Run the model with a function in the place of each block's forward.

        Args:
            inputs: Of the model.
            each: Called in the place of a block.
            key: By which the output of the encoder is kept; None: it is computed anew.
            options: More arguments of the model.

        Raises:
            InvalidInput: The model does not run on these inputs.
        """

        def encode(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if key not in self.encoded:
                self.encoded[key] = forward(*args, **kwargs)
            return self.encoded[key]

        def replaced(at: int, forward: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: each(Visit(at, forward, args, kwargs))

        uses_cache = self.tokens or "use_cache" in inspect.signature(self.model.forward).parameters
        given: dict[str, Any] = {k: v.to(self.home) for k, v in inputs.items()}
        given |= ({"use_cache": False} if uses_cache else {}) | options
        with ExitStack() as stack:
            for at, block in enumerate(self.blocks):
                stack.enter_context(instead(block, replaced(at, block.forward)))
            if self.encoder is not None and key is not None:
                stack.enter_context(instead(self.encoder, partial(encode, self.encoder.forward)))
            try:
                with probing():
                    self.model(**given)
            except (Done, AnybitError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # of a model that needs more than it is given
                raise InvalidInput(
                    f"{type(self.model).__name__} does not run block by block on {self.given} "
                    f"({in_a_line(error)}); give batches of all that it needs "
                    "(Calibration([{'input_ids': ...}, ...])), or quantize it without calibration "
                    "data"
                ) from error


def cache_argument(model: Any) -> str:
    """What a model calls the argument for keys and values: `cache` since transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class Done(Exception):
    """Ends a forward pass early, with what was asked for."""

    def __init__(self, output: Any):
        super().__init__()
        self.output = output


def parted(output: Any) -> tuple[Tensor, tuple[Any, ...] | None]:
    """The hidden states that a block returns, and what it returns after them; None: no tuple."""
    several = isinstance(output, tuple | list)
    return (output[0], tuple(output[1:])) if several else (output, None)


@contextmanager
def instead(module: nn.Module, forward: Callable[..., Any]) -> Any:
    """Inside, a module has another forward, over the class's method."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def batches_of(ids: Tensor, samples: int) -> list[Batch]:
    """Token ids (samples, length) as batches of so many samples."""
    return [{"input_ids": part} for part in ids.split(samples)]


def to_each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Nested arguments with a function of each tensor in its place."""
    return tree_map(lambda x: change(x) if isinstance(x, Tensor) else x, value)


def kv_recorder() -> Any:
    """A key-value cache that keeps nothing but the amax of every channel."""
    from transformers import DynamicCache

    class Recorder(DynamicCache):
        def __init__(self) -> None:
            super().__init__()
            self.amax: dict[str, Tensor] = {}

        def update(
            self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            for name, states in (("k_scale", key_states), ("v_scale", value_states)):
                amax = states.detach().float().abs().amax((0, 2))  # (B, heads, L, head_dim)
                known = self.amax.get(name)
                self.amax[name] = amax if known is None else torch.maximum(known, amax)
            return key_states, value_states

        def store(self, block: nn.Module) -> None:
            """Put the scales into the block's attention: k_scale, v_scale (kv_heads, head_dim)."""
            owner = next((m for m in block.modules() if hasattr(m, "layer_idx")), None)
            if owner is None or not self.amax:
                return
            for name, amax in self.amax.items():
                owner.register_buffer(name, (amax / 127).clamp_min(1e-8))

    return Recorder()
