"""A model's forward pass one block at a time, and what its layers see on the way."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

BATCH = {"cpu": 4096, "cuda": 16384}  # tokens in one forward pass; a GPU waits for its launches
SAMPLE = 512  # input rows that `Seen.sample` keeps


@dataclass
class Seen:
    """Statistics of the inputs x (T, K) of a linear layer.

    tokens: T. hessian: the mean of x x^T, (K, K) fp32. largest: max |x| of every channel, (K,).
    mean: mean |x| of every channel, (K,). sample: about 512 rows of x, (S, K), evenly spaced.
    Those that the quantizer does not declare in `statistics` are empty.
    """

    tokens: int = 0
    hessian: Tensor = field(default_factory=lambda: torch.empty(0))
    largest: Tensor = field(default_factory=lambda: torch.empty(0))
    mean: Tensor = field(default_factory=lambda: torch.empty(0))
    sample: Tensor = field(default_factory=lambda: torch.empty(0))

    def add(self, x: Tensor, statistics: tuple[str, ...], every: int) -> None:
        """Take in more inputs (T, K); `every` is the distance of sampled rows."""
        before, self.tokens = self.tokens, self.tokens + len(x)
        if not len(x):
            return
        share = len(x) / self.tokens
        wide = x.float()
        if "hessian" in statistics:
            if not self.hessian.numel():
                self.hessian = wide.new_zeros(x.shape[1], x.shape[1])
            self.hessian.addmm_(wide.T, wide, beta=1 - share, alpha=share / len(x))
        if "largest" in statistics:
            largest = wide.abs().amax(0)
            self.largest = torch.maximum(self.largest, largest) if before else largest
        if "mean" in statistics:
            mean = wide.abs().mean(0)
            self.mean = self.mean.lerp(mean, share) if before else mean
        if "sample" in statistics:
            rows = x[-before % every :: every]
            self.sample = torch.cat((self.sample, rows)) if before else rows.clone()

    def divided(self, s: Tensor) -> "Seen":
        """The statistics of x / s, s (K,)."""
        return Seen(
            self.tokens,
            self.hessian / s / s[:, None] if self.hessian.numel() else self.hessian,
            self.largest / s if self.largest.numel() else self.largest,
            self.mean / s if self.mean.numel() else self.mean,
            (self.sample.float() / s).to(self.sample.dtype) if self.sample.numel() else self.sample,
        )

    def finite(self) -> bool:
        return all(torch.isfinite(t.sum()) for t in (self.hessian, self.largest, self.mean))


class Replay:
    """A model's forward pass, one block at a time: keeps the inputs of the current block.

    ids: token ids (samples, length). The inputs of the current block are as large as
    samples * length * hidden size; nothing else is kept.
    """

    def __init__(self, model: nn.Module, blocks: list[nn.Module], ids: Tensor):
        self.model, self.blocks = model, blocks
        self.tuples = False  # whether blocks return (hidden, ...)
        home = next(model.parameters()).device
        offload = home.type == "cpu" and torch.cuda.is_available()
        self.home, self.device = home, torch.device("cuda") if offload else home
        tokens = BATCH.get(self.device.type, BATCH["cuda"])
        self.batches = ids.split(max(1, tokens // ids.shape[1]))
        self.hidden: list[Tensor | None] = [None] * len(self.batches)

    def watch(
        self, index: int, names: Iterable[str], statistics: tuple[str, ...]
    ) -> dict[str, Seen]:
        """Statistics of the inputs of the named layers in block `index`.

        index = len(blocks) stands for the layers outside all blocks, after the last one. Layers
        that get the same tensor share one `Seen`. Raises ValueError for NaN or inf in an input.
        """
        names = list(names)
        inside = index < len(self.blocks)
        parent = self.blocks[index] if inside else self.model
        seen: dict[str, Seen] = {}
        source: dict[str, str] = {}  # the layer that was first to see this layer's input
        last: list[tuple[str, Tensor]] = []
        every = max(1, sum(b.numel() for b in self.batches) // SAMPLE)

        def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def look(module: nn.Module, args: tuple[Tensor, ...]) -> None:
                x = args[0]
                if not last or last[0][1] is not x:
                    last[:] = [(name, x)]
                first = source.setdefault(name, last[0][0])
                if first == name:
                    rows = x.detach().flatten(0, -2)
                    seen.setdefault(name, Seen()).add(rows, statistics, every)
                if not inside and len(source) == len(names) and name == names[-1]:
                    raise _Done(x)

            return look

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
                raise ValueError(
                    f"{f'block {index}: ' if inside else ''}{name}: its inputs hold NaN or inf on "
                    "the calibration text; try the model in bfloat16 or float32, and look for NaN "
                    "in the weights before this layer"
                )
        return {name: seen.get(source.get(name, name), Seen()) for name in names}

    def output(self, index: int) -> Tensor:
        """What block `index` puts out for the first sample, on the device where it is computed."""
        return self._call(index, 0, samples=1)

    def outputs(self, index: int) -> list[Callable[[], Tensor]]:
        """For each batch, a function that computes what block `index` puts out, there as well."""
        return [partial(self._call, index, batch) for batch in range(len(self.batches))]

    def advance(self, index: int, kv_scales: bool = False) -> None:
        """Run block `index` as it is now, and keep its outputs as the inputs of the next."""
        cache = kv_recorder() if kv_scales else None
        for batch in range(len(self.batches)):
            self.hidden[batch] = self._call(index, batch, cache).to(self.home)
        bad = [h for h in self.hidden if h is not None and not torch.isfinite(h.sum())]
        if bad and not torch.isfinite(bad[0]).all():
            raise ValueError(f"block {index}: its outputs hold NaN or inf on the calibration text")
        if cache is not None:
            cache.store(self.blocks[index])

    def _call(
        self, index: int, batch: int, cache: Any = None, samples: int | None = None
    ) -> Tensor:
        """Run the model on a batch up to the end of block `index`; return its output, on `device`.

        samples: use only the first few of the batch.
        """
        ids, hidden = self.batches[batch][:samples], self.hidden[batch]
        hidden = hidden if hidden is None else hidden[:samples]
        forwards = [block.forward for block in self.blocks]
        before = [vars(block).get("forward") for block in self.blocks]

        def identity(*args: Any, **kwargs: Any) -> Any:
            x = args[0] if args else kwargs["hidden_states"]
            x = x if hidden is None else hidden
            return (x,) if self.tuples else x

        def real(*args: Any, **kwargs: Any) -> Any:
            if hidden is not None:
                if args:
                    args = (hidden, *args[1:])
                else:
                    kwargs["hidden_states"] = hidden
            if self.device != self.home:
                args, kwargs = to_device(args, self.device), to_device(kwargs, self.device)
            out = forwards[index](*args, **kwargs)
            self.tuples = isinstance(out, tuple)
            raise _Done(out[0] if self.tuples else out)

        try:
            for at, block in enumerate(self.blocks):
                block.forward = real if at == index else identity
            more = {} if cache is None else {"past_key_values": cache}
            self.model(input_ids=ids.to(self.home), use_cache=cache is not None, **more)
        except _Done as done:
            return done.output
        finally:
            for block, own in zip(self.blocks, before, strict=True):
                del block.forward  # the instance's attribute, over the class's method
                if own is not None:
                    block.forward = own
        if index < len(self.blocks):
            raise ValueError(f"the model's forward pass does not call its block {index}")
        return torch.empty(0)


class _Done(Exception):
    """Ends a forward pass where nothing more is wanted of it."""

    def __init__(self, output: Tensor):
        super().__init__()
        self.output = output


def find_blocks(model: nn.Module, names: list[str]) -> tuple[str, list[nn.Module]]:
    """The decoder's blocks: the outermost ModuleList that holds most of the named layers."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    held = {n: sum(name.startswith(f"{n}.") for name in names) for n in lists}
    best = max(held, key=lambda n: (held[n], -n.count(".")), default="")
    if not best or not held[best]:
        found = ", ".join(lists) or "none"
        raise ValueError(
            f"{type(model).__name__}: looked for a torch.nn.ModuleList of decoder blocks that "
            f"holds {', '.join(names[:3])}; the ModuleLists of the model are: {found}. Quantize "
            "without calibration (RTN, Clip, HQQ), or name layers inside the blocks"
        )
    return best, list(lists[best])


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
    """A key-value cache that keeps nothing but the largest magnitude of every channel."""
    from transformers import DynamicCache

    class Recorder(DynamicCache):
        def __init__(self) -> None:
            super().__init__()
            self.largest: dict[str, Tensor] = {}

        def update(
            self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            for name, states in (("k_scale", key_states), ("v_scale", value_states)):
                largest = states.detach().float().abs().amax((0, 2))  # (B, heads, L, head_dim)
                known = self.largest.get(name)
                self.largest[name] = largest if known is None else torch.maximum(known, largest)
            return key_states, value_states

        def store(self, block: nn.Module) -> None:
            """Put the scales into the block's attention: k_scale, v_scale (kv_heads, head_dim)."""
            owner = next((m for m in block.modules() if hasattr(m, "layer_idx")), None)
            if owner is None or not self.largest:
                return
            for name, largest in self.largest.items():
                owner.register_buffer(name, (largest / 127).clamp_min(1e-8))

    return Recorder()
