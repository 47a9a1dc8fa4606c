"""Calibration: run a model on text, block by block, and show quantizers what its layers see.

The blocks of a decoder are quantized in order. Each one is run on the outputs of the quantized
blocks before it: once to collect statistics of its layers' inputs, and once, quantized, to make
the inputs of the next.
"""

import ctypes
import dataclasses
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from anybit.dispatch import parse_scheme
from anybit.experts import of_all_experts
from anybit.files import Stored
from anybit.format import Format, Packed
from anybit.linear import QuantLinear, check_finite
from anybit.progress import progress
from anybit.quantizers.columns import recordings
from anybit.quantizers.replay import Replay, Seen, find_blocks
from anybit.quantizers.text import Calibration, Source
from anybit.quantizers.work import Work, digest

T = TypeVar("T")


@dataclass(frozen=True)
class Calibrated:
    """A quantizer that looks at the inputs of the layers.

    calibration: texts, token ids or a file, or a `Calibration` that says more about them.
    """

    calibration: Source | Calibration | None = None

    statistics: ClassVar[tuple[str, ...]] = ()  # the fields of `Seen` that it wants
    whole: ClassVar[bool] = False  # whether `quantize_block` must get all layers of a block at once

    def wanted(self) -> tuple[str, ...]:
        """The fields of `Seen` that this instance wants."""
        return self.statistics

    def transform(
        self,
        block: nn.Module,
        schemes: Mapping[str, str],
        seen: dict[str, Seen],
        output: Callable[[], Tensor],
    ) -> dict[str, Seen]:
        """Rewrite a block (new parameters, same function) before its layers are quantized.

        Names of layers are relative to the block. output: computes what the block puts out for a
        little text. Returns the statistics after the change.
        """
        return seen

    def quantize_block(
        self,
        block: nn.Module,
        schemes: Mapping[str, str],
        seen: Mapping[str, Seen],
        outputs: Sequence[Callable[[], Tensor]],
    ) -> None:
        """Quantize a block's layers in place.

        outputs: for each batch of the text, computes what the block puts out, as it is then.
        """
        quantize_layers(block, schemes, self, seen)

    def quantize(self, w: Tensor, fmt: Format, seen: Seen) -> Packed:
        """Weights (N, K) of any float dtype, and what their layer saw -> Packed."""
        raise NotImplementedError(f"{type(self).__name__}.quantize")


def run(
    model: nn.Module,
    schemes: Mapping[str, str],
    quantizer: Calibrated,
    show_progress: bool | None = None,
    stored: "StoredBlocks | None" = None,
) -> None:
    """Quantize the layers named in `schemes` (name -> scheme) in place.

    stored: where the weights of blocks on the meta device are; each block is then in memory only
    while it is at work, and ends up in the work folder alone.

    On a machine with a GPU, a model on the CPU visits it block by block. An error or an interrupt
    puts the dense layers back; with `Calibration(work=...)` finished blocks are on disk by then,
    and the next run with the same settings goes on from there.
    """
    if quantizer.calibration is None:
        name = type(quantizer).__name__
        raise ValueError(
            f"{name} needs text to calibrate on: {name}(calibration=['some text', ...]), token "
            "ids, or a .txt or .jsonl file"
        )
    calibration = quantizer.calibration
    if not isinstance(calibration, Calibration):
        calibration = Calibration(calibration)
    ids = calibration.tokens(model)
    prefix, blocks = find_blocks(model, list(schemes))
    replay = Replay(model, blocks, ids)
    settings = settings_of(model, schemes, quantizer, calibration, ids, stored)
    config = getattr(model, "config", None)
    work = Work(calibration.work, settings, getattr(config, "model_type", None))
    weights = {name: linear_at(model, name).weight.numel() for name in schemes}
    few: dict[str, int] = {}
    saving = little_memory() if stored else nullcontext()
    with restored_on_error(model), recordings(), saving, torch.no_grad():
        model.eval()
        with progress("calibrating", sum(weights.values()), show_progress) as step:
            for index, block in enumerate(blocks):
                start = f"{prefix}.{index}."
                own = inside(schemes, start)
                loaded = stored.loaded(block, start) if stored else nullcontext()
                with loaded, visiting(block, replay.device):
                    if not work.restore(index, block, own, start) and own:
                        few |= quantize_block(block, own, quantizer, replay, index, start)
                    replay.advance(index, calibration.kv_scales)
                    work.save(index, block, start)
                trim_memory()
                step(sum(inside(weights, start).values()), start[:-1])
            outside = {n: s for n, s in schemes.items() if not n.startswith(f"{prefix}.")}
            if outside:
                seen = replay.watch(len(blocks), outside, quantizer.wanted())
                few |= too_few(seen, model, "")
                quantize_layers(model, outside, quantizer, seen)
                forget_dtypes(model.get_submodule(name) for name in outside)
                step(sum(weights[name] for name in outside))
    if few:
        listed = ", ".join(f"{name} ({tokens})" for name, tokens in list(few.items())[:8])
        warnings.warn(
            f"{len(few)} layers saw fewer calibration tokens than they have inputs (K), so they "
            f"are calibrated badly, or at 0 tokens rounded to nearest: {listed}"
            f"{', ...' if len(few) > 8 else ''}. Give more text",
            stacklevel=3,
        )


def quantize_block(
    block: nn.Module,
    schemes: Mapping[str, str],
    quantizer: Calibrated,
    replay: Replay,
    index: int,
    prefix: str,
) -> dict[str, int]:
    """Watch, transform and quantize block `index`; returns layers that saw too few tokens."""
    output, outputs = partial(replay.output, index), replay.outputs(index)
    wanted, few = quantizer.wanted(), dict[str, int]()
    parted = "hessian" in wanted and not quantizer.whole
    parts = portions(block, schemes) if parted else [dict(schemes)]
    if len(parts) > 1:  # what `transform` wants of all layers is small without Hessians
        light = tuple(name for name in wanted if name != "hessian")
        quantizer.transform(block, schemes, replay.watch(index, schemes, light), output)
    for part in parts:
        seen = replay.watch(index, part, wanted)
        few |= too_few(seen, block, prefix)
        if len(parts) == 1:
            seen = quantizer.transform(block, part, seen, output)
        quantizer.quantize_block(block, part, seen, outputs)
    return few


def portions(block: nn.Module, schemes: Mapping[str, str]) -> list[dict[str, str]]:
    """A block's layers in parts whose Hessians, 4 K^2 bytes each, are no larger than the block.

    Only experts are parted, since all others together see few inputs. Those come first.
    """
    rest = [name for name in schemes if name == of_all_experts(name)]
    experts = (name for name in schemes if name != of_all_experts(name))

    def size(names: list[str]) -> int:
        return sum(4 * linear_at(block, name).in_features ** 2 for name in names)

    parts, filled, limit = [rest], size(rest), sum(p.nbytes for p in block.parameters())
    for _, own in groupby(experts, lambda name: name.rpartition(".")[0]):
        names = list(own)
        if filled and filled + size(names) > limit:
            parts.append([])
            filled = 0
        parts[-1] += names
        filled += size(names)
    return [{name: schemes[name] for name in part} for part in parts]


def quantize_layers(
    parent: nn.Module,
    schemes: Mapping[str, str],
    quantizer: Calibrated,
    seen: Mapping[str, Seen],
) -> None:
    """Quantize layers below `parent` by what they saw, and put them in place.

    Layers of one scheme that read the same input are quantized as one weight, since their work is
    the same: GPTQ's factorization, and its loop over columns.
    """
    alike: dict[tuple[str, object], list[str]] = {}
    for name, scheme in schemes.items():
        shared = id(seen[name]) if parse_scheme(scheme)[0].rowwise else name
        alike.setdefault((scheme, shared), []).append(name)
    for (scheme, _), names in alike.items():
        fmt, activation = parse_scheme(scheme)
        layers = [linear_at(parent, name) for name in names]
        weights = [layer.weight.detach() for layer in layers]
        whole = weights[0] if len(weights) == 1 else torch.cat(weights)
        packed, start = quantizer.quantize(whole, fmt, seen[names[0]]), 0
        for name, layer in zip(names, layers, strict=True):
            part = packed
            if len(names) > 1:  # copies, so that a checkpoint finds no tensors that share memory
                rows = packed.rows(slice(start, start := start + layer.out_features))
                tensors = {key: t.clone() for key, t in rows.tensors().items()}
                part = Packed.from_tensors(fmt, rows.shape, tensors)
            quantized = QuantLinear(part, layer.bias, activation, layer.weight.dtype)
            parent.set_submodule(name, quantized)


@dataclass(frozen=True)
class StoredBlocks:
    """The weights of a checkpoint's blocks. identity: names its files and their state."""

    tensors: Mapping[str, Stored]
    identity: str

    @contextmanager
    def loaded(self, block: nn.Module, prefix: str) -> Iterator[None]:
        """The block's tensors are in memory inside, and on the meta device after it."""
        modules = list(block.modules())  # those that are replaced may be referred to elsewhere
        for name, value in [*block.named_parameters(), *block.named_buffers()]:
            if prefix + name not in self.tensors:
                raise ValueError(
                    f"{prefix}{name} is in no file of the checkpoint under this name, so the model "
                    "cannot be calibrated block by block from disk; load it and use quantize_"
                )
            real = self.tensors[prefix + name].read().to(value.dtype)
            check_finite(real, prefix + name)
            parent, _, key = name.rpartition(".")
            owner = block.get_submodule(parent)
            if key in owner._parameters:
                owner._parameters[key] = nn.Parameter(real, requires_grad=False)
            else:
                owner._buffers[key] = real
        yield
        for module in (*modules, *block.modules()):
            if isinstance(module, QuantLinear):
                module.prepared = []
            for own in (module._parameters, module._buffers):
                for key, tensor in own.items():
                    if tensor is not None:
                        own[key] = tensor.to("meta")  # type: ignore[assignment]


M_MMAP_THRESHOLD = -3  # glibc's malloc.h
MAPPED, LARGEST = 1 << 20, 32 << 20  # bytes; the second is the most that glibc sets by itself


@contextmanager
def little_memory() -> Iterator[None]:
    """Inside, freed pieces of 1 MB and more go back to the system at once.

    glibc keeps freed pieces of up to 32 MB, and the gaps that they leave are filled badly: GPTQ of
    blocks of hidden size 768 took 0.71 to 0.86 GB, more in later blocks, and 0.65 GB in each of
    them with this.
    """
    malloc_option(M_MMAP_THRESHOLD, MAPPED)
    try:
        yield
    finally:
        malloc_option(M_MMAP_THRESHOLD, LARGEST)


def malloc_option(option: int, value: int) -> None:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(option, value)


def trim_memory() -> None:
    """Give what is free in smaller pieces back to the system, too."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def linear_at(parent: nn.Module, name: str) -> nn.Linear:
    return cast(nn.Linear, parent.get_submodule(name))


def inside(values: Mapping[str, T], prefix: str) -> dict[str, T]:
    """The entries below `prefix`, by their names relative to it."""
    return {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}


def too_few(seen: Mapping[str, Seen], parent: nn.Module, prefix: str) -> dict[str, int]:
    """Layers that saw fewer tokens than they have inputs (rare experts), and how many."""
    return {
        prefix + name: statistics.tokens
        for name, statistics in seen.items()
        if statistics.tokens < linear_at(parent, name).in_features
    }


@contextmanager
def visiting(block: nn.Module, device: torch.device) -> Iterator[None]:
    """The block is on `device` inside, and its quantized layers know the dtype of their input.

    Parameters that it has lost by then are those of dense layers, which `restored_on_error` keeps;
    they are back where they were, and take no memory of `device`.
    """
    home = next(block.parameters()).device
    before = [] if device == home else [(p, p.data) for p in block.parameters()]
    block.to(device)
    try:
        yield
    finally:
        forget_dtypes(block.modules())
        block.to(home)
        kept = set(block.parameters())
        for p, data in before:
            if p not in kept:
                p.data = data


def forget_dtypes(modules: Iterable[nn.Module]) -> None:
    """Quantized layers choose a kernel anew when they are called, since the model may be cast."""
    for module in modules:
        if isinstance(module, QuantLinear):
            module.dtype, module.prepared = None, []


@contextmanager
def restored_on_error(model: nn.Module) -> Iterator[None]:
    """On an exception, put back all modules and parameters that were there before."""
    before = [(m, dict(m._modules), dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    training = model.training
    try:
        yield
    except BaseException:
        for module, children, parameters, buffers in before:
            module._modules, module._parameters, module._buffers = children, parameters, buffers
        raise
    finally:
        model.train(training)


def settings_of(
    model: nn.Module,
    schemes: Mapping[str, str],
    quantizer: Calibrated,
    calibration: Calibration,
    ids: Tensor,
    stored: "StoredBlocks | None",
) -> dict[str, str]:
    """What a resumed run must have in common with the one before, by name."""
    if stored:
        identity = stored.identity
    else:
        identity = f"weights {digest([linear_at(model, name).weight for name in schemes])}"
    return {
        "model": f"{type(model).__name__}, {identity}",
        "quantizer": repr(dataclasses.replace(quantizer, calibration=None)),
        "text": f"{ids.shape[0]} samples of {ids.shape[1]} tokens, {digest([ids])}",
        "formats": json.dumps(dict(schemes)),
        "kv_scales": str(calibration.kv_scales),
    }
