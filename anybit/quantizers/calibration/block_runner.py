"""A model's forward pass, one block at a time, and statistics of its layers' inputs."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anybit.errors import AnybitError, InvalidInput
from anybit.nn.experts import Experts
from anybit.quantizers.calibration.padding import masks_of, real_rows, real_tokens_alone
from anybit.quantizers.calibration.statistics import SAMPLE, Statistics

BATCH = {"cpu": 4096, "cuda": 16384}  # tokens in one forward pass; a GPU waits for its launches
CHECKED = 64  # tokens of the sample that `check` runs

Batch = Mapping[str, Tensor]


class Blocks(NamedTuple):
    """A list of blocks that run one after the other.

    name: of the list in the model. modules: the blocks. encoder: whose output they read, for the
    decoder of an encoder-decoder.
    """

    name: str
    modules: list[nn.Module]
    encoder: nn.Module | None = None


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
        self.lengths: dict[int, int | None] = {}  # of a block's tuple after hidden; None: no tuple
        home = next(model.parameters()).device
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
        self.carried: list[tuple[Any, ...]] = [()] * len(self.batches)  # what follows hidden
        self.encoded: dict[tuple[int, int | None], Any] = {}  # by batch and number of samples
        self.context: set[int] = set()  # memory of what the block reads besides hidden states

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
            InvalidInput: An input holds NaN or inf, or padding in it cannot be told from tokens.
        """
        names = list(names)
        inside = index < len(self.blocks)
        parent = self.blocks[index] if inside else self.model
        seen: dict[str, Statistics] = {}
        source: dict[str, str] = {}  # the layer that was first to see this layer's input
        last: list[tuple[str, Tensor]] = []
        every = max(1, sum(map(self._rows, range(len(self.batches)))) // SAMPLE)
        experts = tuple(f"{n}." for n, m in parent.named_modules() if isinstance(m, Experts))
        masks = masks_of({}, False)

        def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def observe(module: nn.Module, args: tuple[Tensor, ...]) -> None:
                x = args[0]
                if not last or last[0][1] is not x:
                    last[:] = [(name, x)]
                first = source.setdefault(name, last[0][0])
                if first == name:
                    beside = x.untyped_storage().data_ptr() in self.context
                    encoded = beside and self.encoder is not None
                    rows = real_rows(x, masks.context if encoded else masks.own)
                    # Experts get no padding. Outside of blocks, and in what blocks read beside
                    # hidden states (images), sequences are of other kinds than the mask's.
                    other = not inside or (beside and not encoded)
                    if rows is None and (other or name.startswith(experts)):
                        rows = x.detach().flatten(0, -2)
                    if rows is None:
                        raise InvalidInput(
                            f"{name}: its input {tuple(x.shape)} is not of the attention mask's "
                            "shape, so padding cannot be told from tokens; give batches without "
                            "padding, of one sample each"
                        )
                    seen.setdefault(name, Statistics()).add(rows, needs, every)
                if not inside and len(source) == len(names) and name == names[-1]:
                    raise _Done(x)

            return observe

        handles = [parent.get_submodule(n).register_forward_pre_hook(hook(n)) for n in names]
        try:
            for batch in range(len(self.batches)):
                masks = self._masks(batch)
                with real_tokens_alone(parent, masks.own):
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
        """The output of block `index` for the first sample (or batch), where it is computed."""
        return self._real_output(index, 0, samples=1 if self.tokens else None)

    def outputs(self, index: int) -> list[Callable[[], Tensor]]:
        """For each batch, a function that computes the output of block `index`, less padding."""
        return [partial(self._real_output, index, batch) for batch in range(len(self.batches))]

    def advance(self, index: int, kv_scales: bool = False) -> None:
        """Run block `index` as it is now, and keep its outputs as the inputs of the next."""
        cache = kv_recorder() if kv_scales else None
        carry = True
        for batch in range(len(self.batches)):
            hidden, *more = self._call(index, batch, cache)
            self.hidden[batch] = hidden.to(self.home)
            self.carried[batch] = to_device(tuple(more), self.home) if carry else ()
            if not batch:  # whether the next block reads it
                carry = self._reads_more(index + 1)
                self.carried[batch] = self.carried[batch] if carry else ()
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
        self.carried = [()] * len(self.batches)
        self.encoded.clear()

    @torch.no_grad()
    def check(self) -> None:
        """Raise InvalidInput unless blocks that run alone compute what the whole model does.

        They do not where a block reads what an earlier one left somewhere else, or runs twice. It
        takes two forward passes of a short sample.
        """
        first = self.batches[0]
        if self.tokens:  # others cannot be cut without knowing what they are
            first = {"input_ids": first["input_ids"][:1, :CHECKED]}
        alone = BlockRunner(self.model, self.blocks, [first], self.encoder)
        alone.device, alone.tokens = alone.home, self.tokens
        whole: dict[int, Tensor] = {}
        handles = [
            block.register_forward_hook(
                lambda m, args, out, at=at: whole.__setitem__(at, some_rows(as_tuple(out)[0]))
            )
            for at, block in enumerate(self.blocks)
        ]
        try:
            with alone._explained():
                self.model(**alone._inputs(0, None))
        finally:
            for handle in handles:
                handle.remove()
        for index in range(len(self.blocks)):
            if index in whole and not torch.isfinite(whole[index].sum()):
                return  # which `advance` says of the block that it comes from
            alone.advance(index)
            hidden, want = alone.hidden[0], whole[index]
            assert hidden is not None
            error = (some_rows(hidden) - want).float().norm() / want.float().norm().clamp_min(1e-12)
            if float(error) > max(1e-3, 4 * torch.finfo(want.dtype).eps):
                raise InvalidInput(
                    f"{type(self.model).__name__} does not run block by block: alone, block "
                    f"{index} computes something else (relative error {float(error):.2g}), since "
                    "blocks share more than their outputs; quantize it without calibration data"
                )

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
        """The output of block `index` on a batch, less padding."""
        out: Tensor = self._call(index, batch, samples=samples)[0]
        mask = self._masks(batch).own
        if mask is None or out.shape[:-1] != mask.shape:
            return out
        return out[mask.to(out.device)]

    def _reads_more(self, index: int) -> bool:
        """Whether block `index` is given what the one before it returned after hidden states."""
        more = {x.untyped_storage().data_ptr() for x in tensors_in(self.carried[0])}
        if not more or index >= len(self.blocks):
            return False
        args, kwargs = self._call(index, 0, look=True)
        return any(x.untyped_storage().data_ptr() in more for x in tensors_in((args, kwargs)))

    def _inputs(self, batch: int, samples: int | None) -> dict[str, Any]:
        """The model's arguments."""
        inputs = {k: v.to(self.home) for k, v in self.batches[batch].items()}
        if samples:
            inputs = {k: v[:samples] for k, v in inputs.items()}
        given = self.tokens or "use_cache" in inspect.signature(self.model.forward).parameters
        return inputs | ({"use_cache": False} if given else {})

    def _call(
        self,
        index: int,
        batch: int,
        cache: Any = None,
        samples: int | None = None,
        look: bool = False,
    ) -> tuple[Any, ...]:
        """Run the model on a batch up to the end of block `index`; what it returns, on `device`.

        samples: use only the first few of the batch. look: return the block's arguments instead.
        """
        hidden = self.hidden[batch]
        size = 0 if hidden is None else len(hidden)
        hidden = hidden if hidden is None else hidden[:samples]
        carried = tuple(
            x[:samples] if isinstance(x, Tensor) and x.ndim and len(x) == size else x
            for x in self.carried[batch]
        )

        def identity(at: int, *args: Any, **kwargs: Any) -> Any:
            x = args[0] if args else kwargs["hidden_states"]
            length = self.lengths.get(at)
            more: tuple[Any, ...] = (None,) * (length or 0)
            if hidden is not None and at == index - 1:
                x, more = hidden, carried or more
            return x if length is None else (x, *more)

        def real(*args: Any, **kwargs: Any) -> Any:
            if look:
                raise _Done(args, kwargs)
            if self.device != self.home:
                args, kwargs = to_device(args, self.device), to_device(kwargs, self.device)
            rest = {k: v for k, v in kwargs.items() if k != "hidden_states"}
            beside = tensors_in((args[1:], rest))
            self.context = {x.untyped_storage().data_ptr() for x in beside if x.numel()}
            out = forwards[index](*args, **kwargs)
            self.lengths[index] = len(out) - 1 if isinstance(out, tuple | list) else None
            raise _Done(*as_tuple(out))

        def encode(*args: Any, **kwargs: Any) -> Any:
            if (batch, samples) not in self.encoded:
                self.encoded[batch, samples] = encoder_forward(*args, **kwargs)
            return self.encoded[batch, samples]

        forwards = [block.forward for block in self.blocks]
        replaced: list[tuple[nn.Module, Any]] = [
            (block, real if at == index else partial(identity, at))
            for at, block in enumerate(self.blocks)
        ]
        if self.encoder is not None and index < len(self.blocks):
            encoder_forward = self.encoder.forward
            replaced.append((self.encoder, encode))
        more = {} if cache is None else {"past_key_values": cache, "use_cache": True}
        self.context = set()
        with ExitStack() as stack:
            for module, forward in replaced:
                stack.enter_context(instead(module, forward))
            stack.enter_context(self._explained())
            try:
                self.model(**self._inputs(batch, samples) | more)
            except _Done as done:
                return done.output
        if index < len(self.blocks):
            raise InvalidInput(f"the model's forward pass does not call its block {index}")
        return (torch.empty(0),)

    @contextmanager
    def _explained(self) -> Any:
        """Turns errors of a model that cannot run on the data into InvalidInput."""
        try:
            yield
        except (AnybitError, torch.OutOfMemoryError, _Done):
            raise
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            given = "token ids alone" if self.tokens else f"{', '.join(self.batches[0])} alone"
            raise InvalidInput(
                f"{type(self.model).__name__} does not run block by block on {given} "
                f"({type(error).__name__}: {reason}); give batches of all that it needs "
                "(Calibration([{'input_ids': ...}, ...])), or quantize it without calibration data"
            ) from error


class _Done(Exception):
    """Ends a forward pass early, with what was asked for."""

    def __init__(self, *output: Any):
        super().__init__()
        self.output = output


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


def as_tuple(out: Any) -> tuple[Any, ...]:
    """What a block returns, a tensor or a tuple of which it is the first; no other objects."""
    if not isinstance(out, tuple | list):
        return (out,)
    return (out[0], *(x if isinstance(x, Tensor) else None for x in out[1:]))


def some_rows(x: Tensor) -> Tensor:
    """At most about 2 * `CHECKED` rows of hidden states, evenly spaced, in memory of their own."""
    rows = x.flatten(0, -2)
    return rows[:: max(1, len(rows) // CHECKED)].clone()


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested arguments."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [x for v in value for x in tensors_in(v)] if isinstance(value, tuple | list) else []


def find_blocks(model: nn.Module, names: list[str]) -> tuple[str, list[nn.Module]]:
    """The model's blocks: the outermost ModuleList that holds most of the named layers.

    In a model that sees or hears, those of its language model.

    Args:
        model: A model of blocks.
        names: Layers to be quantized.

    Returns:
        The list's name in the model, and the blocks.

    Raises:
        InvalidInput: No ModuleList holds any of the layers.
    """
    language = model.get_decoder() if hasattr(model, "get_decoder") else None  # type: ignore[operator]
    start = next((f"{n}." for n, m in model.named_modules() if n and m is language), "")
    names = [name for name in names if name.startswith(start)] or names
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    held = {n: sum(name.startswith(f"{n}.") for name in names) for n in lists}
    best = max(held, key=lambda n: (held[n], -n.count(".")), default="")
    if not best or not held[best]:
        found = ", ".join(lists) or "none"
        raise InvalidInput(
            f"{type(model).__name__}: looked for a torch.nn.ModuleList of decoder blocks that "
            f"holds {', '.join(names[:3])}; the ModuleLists of the model are: {found}. Quantize "
            "without calibration (RTN, Clip, HQQ), or name layers inside the blocks"
        )
    return best, list(lists[best])


def block_lists(model: nn.Module, names: list[str]) -> list[Blocks]:
    """The lists of blocks that hold the named layers, in the order of the forward pass.

    Args:
        model: A decoder, an encoder, or one of both.
        names: Layers to be quantized.

    Returns:
        One list, or the encoder's and the decoder's of an encoder-decoder.

    Raises:
        InvalidInput: As `find_blocks` does.
    """
    config: Any = getattr(model, "config", None)
    encoder = model.get_encoder() if getattr(config, "is_encoder_decoder", False) else None  # type: ignore[operator]
    name = next((n for n, m in model.named_modules() if m is encoder), "")
    own = [n for n in names if name and n.startswith(f"{name}.")]
    if not own:
        return [Blocks(*find_blocks(model, names))]
    out = [Blocks(*find_blocks(model, own))]
    rest = [n for n in names if n not in set(own)]
    if any(isinstance(m, nn.ModuleList) and n and holds(n, rest) for n, m in model.named_modules()):
        out.append(Blocks(*find_blocks(model, rest), encoder))
    return out


def holds(name: str, layers: Iterable[str]) -> bool:
    """Whether any of the layers is below the module of this name."""
    return any(layer.startswith(f"{name}.") for layer in layers)


def to_device(value: Any, device: torch.device) -> Any:
    """A copy of nested arguments with their tensors on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple | list):
        return type(value)(to_device(v, device) for v in value)
    if isinstance(value, dict):
        return {k: to_device(v, device) for k, v in value.items()}
    return value


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
