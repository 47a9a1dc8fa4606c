"""A model's forward pass, one block at a time, and statistics of its layers' inputs."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from anybit.errors import AnybitError, InvalidInput
from anybit.quantizers.calibration.statistics import SAMPLE, Statistics

BATCH = {"cpu": 4096, "cuda": 16384}  # tokens in one forward pass; a GPU waits for its launches


class BlockRunner:
    """Runs a model one block at a time, and keeps the inputs of the current block.

    These are as large as samples * length * hidden size; nothing else is kept.

    Args:
        model: A decoder.
        blocks: Its blocks in order, as `find_blocks` finds them.
        ids: Token ids (samples, length).
    """

    def __init__(self, model: nn.Module, blocks: list[nn.Module], ids: Tensor):
        self.model, self.blocks = model, blocks
        # What a block returns after the hidden states: how many values (None: it returns no tuple),
        # and which of them the next block gets. `rehearse` finds out.
        self.tails: dict[int, int | None] = {}
        self.carried: dict[int, frozenset[int]] = {}
        real = (p.device for p in model.parameters() if not p.is_meta)  # blocks on disk are not
        home = next(real, torch.device("cpu"))
        offload = home.type == "cpu" and torch.cuda.is_available()
        self.home, self.device = home, torch.device("cuda") if offload else home
        tokens = BATCH.get(self.device.type, BATCH["cuda"])
        self.batches = ids.split(max(1, tokens // ids.shape[1]))
        self.hidden: list[Tensor | None] = [None] * len(self.batches)
        self.passed: dict[int, tuple[Any, ...]] = {}  # beside them, by batch

    def collect(
        self, index: int, names: Iterable[str], needs: tuple[str, ...]
    ) -> dict[str, Statistics]:
        """Run a block on all data, and collect statistics of its layers' inputs.

        Args:
            index: Of the block; len(blocks) stands for the layers outside all blocks, after the
                last one.
            names: Layers, by names relative to the block, or to the model.
            needs: Names of the fields of `Statistics` to collect.

        Returns:
            Statistics by layer. Layers that get the same tensor share one object.

        Raises:
            InvalidInput: An input holds NaN or inf.
        """
        names = list(names)
        inside = index < len(self.blocks)
        parent = self.blocks[index] if inside else self.model
        seen: dict[str, Statistics] = {}
        source: dict[str, str] = {}  # the layer that was first to see this layer's input
        last: list[tuple[str, Tensor]] = []
        every = max(1, sum(b.numel() for b in self.batches) // SAMPLE)

        def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def observe(module: nn.Module, args: tuple[Tensor, ...]) -> None:
                x = args[0]
                if not last or last[0][1] is not x:
                    last[:] = [(name, x)]
                first = source.setdefault(name, last[0][0])
                if first == name:
                    rows = x.detach().flatten(0, -2)
                    seen.setdefault(name, Statistics()).add(rows, needs, every)
                if not inside and len(source) == len(names) and name == names[-1]:
                    raise Done(x)

            return observe

        handles = [parent.get_submodule(n).register_forward_pre_hook(hook(n)) for n in names]
        try:
            for batch in range(len(self.batches)):
                self._call(index, batch)
                last.clear()
        finally:
            for handle in handles:
                handle.remove()
        for name, statistic in seen.items():
            if not statistic.finite():
                raise InvalidInput(
                    f"{f'block {index}: ' if inside else ''}{name}: its inputs hold NaN or inf on "
                    "the calibration data; try the model in bfloat16 or float32, and look for NaN "
                    "in the weights before this layer"
                )
        return {name: seen.get(source.get(name, name), Statistics()) for name in names}

    def output(self, index: int) -> Tensor:
        """The output of block `index` for the first sample, on the device that computes it."""
        return self._call(index, 0, samples=1)

    def outputs(self, index: int) -> list[Callable[[], Tensor]]:
        """For each batch, a function that computes the output of block `index`."""
        return [partial(self._call, index, batch) for batch in range(len(self.batches))]

    def advance(self, index: int, kv_scales: bool = False) -> None:
        """Run block `index` as it is now, and keep its outputs as the inputs of the next."""
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

    def _call(
        self,
        index: int,
        batch: int,
        cache: Any = None,
        samples: int | None = None,
        advancing: bool = False,
    ) -> Tensor:
        """Run the model on a batch up to the end of block `index`; return its output, on `device`.

        samples: use only the first few of the batch. advancing: keep what the next block gets.
        """
        ids, hidden, passed = self.batches[batch], self.hidden[batch], self.passed.get(batch, ())
        if samples is not None:
            ids, hidden, passed = to_each((ids, hidden, passed), lambda x: x[:samples])

        def real(at: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if self.device != self.home:
                args, kwargs = to_each((args, kwargs), lambda x: x.to(self.device))
            output, tail = parted(forward(*args, **kwargs))
            self.tails[at] = None if tail is None else len(tail)
            if advancing:
                chosen = self.carried.get(at, frozenset())
                kept = [x if i in chosen else None for i, x in enumerate(tail or ())]
                self.passed[batch] = to_each(tuple(kept), lambda x: x.to(self.home))
            raise Done(output)

        found = self.run_one(index, ids, hidden, passed, real, cache)
        return torch.empty(0) if found is None else found

    def run_one(
        self,
        index: int,
        ids: Tensor,
        hidden: Tensor | None,
        passed: tuple[Any, ...],
        real: Callable[[int, Callable[..., Any], Any, Any], Any],
        cache: Any = None,
    ) -> Any:
        """Run the model up to block `index`, which alone is called.

        Args:
            index: Of the block; len(blocks) stands for what comes after the last one.
            ids: Token ids (samples, length).
            hidden: The block's input; None for the first block's.
            passed: What the block before it returned beside that.
            real: Called with index, forward and the arguments of the block; raises `Done`.
            cache: For keys and values.

        Returns:
            What `real` is done with; None after the last block.
        """

        def instead(at: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if hidden is not None:
                if args:
                    args = (hidden, *args[1:])
                else:
                    kwargs = kwargs | {"hidden_states": hidden}
            if at == index:
                return real(at, forward, args, kwargs)
            x, tail = args[0] if args else kwargs["hidden_states"], self.tails.get(at)
            return x if tail is None else (x, *(*passed, *(None,) * tail)[:tail])

        more = {} if cache is None else {"past_key_values": cache}
        try:
            self.run_all(ids, instead, use_cache=cache is not None, **more)
        except Done as done:
            return done.output
        if index < len(self.blocks):
            raise InvalidInput(f"the model's forward pass does not call its block {index}")
        return None

    def run_all(
        self,
        ids: Tensor,
        instead: Callable[[int, Callable[..., Any], Any, Any], Any],
        **options: Any,
    ) -> None:
        """Run the model with a function in the place of each block's forward.

        Raises:
            InvalidInput: The model does not run on token ids alone.
        """
        before = [vars(block).get("forward") for block in self.blocks]

        def replaced(at: int, forward: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: instead(at, forward, args, kwargs)

        try:
            for at, block in enumerate(self.blocks):
                block.forward = replaced(at, block.forward)
            self.model(input_ids=ids.to(self.home), **options)
        except (Done, AnybitError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of a model that is no decoder of tokens, or no plain one
            reason = str(error).strip().partition("\n")[0]
            raise InvalidInput(
                f"{type(self.model).__name__} does not run block by block on token ids alone "
                f"({type(error).__name__}: {reason}); quantize it without calibration data"
            ) from error
        finally:
            for block, own in zip(self.blocks, before, strict=True):
                del block.forward  # the instance's attribute, over the class's method
                if own is not None:
                    block.forward = own


class Done(Exception):
    """Ends a forward pass early, with what was asked for."""

    def __init__(self, output: Any):
        super().__init__()
        self.output = output


def parted(output: Any) -> tuple[Tensor, tuple[Any, ...] | None]:
    """The hidden states that a block returns, and what it returns after them; None: no tuple."""
    several = isinstance(output, tuple | list)
    return (output[0], tuple(output[1:])) if several else (output, None)


def find_blocks(model: nn.Module, names: list[str]) -> tuple[str, list[nn.Module]]:
    """The decoder's blocks: the outermost ModuleList that holds most of the named layers.

    Of a model with several parts (vision, audio) it is one of the part for text.

    Args:
        model: A decoder.
        names: Layers to be quantized.

    Returns:
        The list's name in the model, and the blocks.

    Raises:
        InvalidInput: No ModuleList holds any of the layers.
    """
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    held = {n: sum(name.startswith(f"{n}.") for name in names) for n in lists}
    held = {n: count for n, count in held.items() if count}
    if not held:
        found = ", ".join(lists) or "none"
        raise InvalidInput(
            f"{type(model).__name__}: looked for a torch.nn.ModuleList of decoder blocks that "
            f"holds {', '.join(names[:3])}; the ModuleLists of the model are: {found}. Quantize "
            "without calibration (RTN, Clip, HQQ), or name layers inside the blocks"
        )
    text = [n for n in held if is_of_text(model, n)]
    best = max(text or held, key=lambda n: (held[n], -n.count(".")))
    return best, list(lists[best])


def is_of_text(model: Any, name: str) -> bool:
    """Whether the innermost model around a module is configured as the part for text is."""
    try:
        text = type(model.config.get_text_config(decoder=True))
    except (AttributeError, ValueError):  # no model of transformers, or several parts are for text
        return True
    parts = name.split(".")
    above = (model.get_submodule(".".join(parts[:end])) for end in reversed(range(len(parts))))
    return isinstance(next(m.config for m in above if hasattr(m, "config")), text)


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
