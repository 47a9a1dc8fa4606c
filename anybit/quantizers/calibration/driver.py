"""Calibration: run a model block by block, and quantize its layers by what they saw.

The blocks of a model are quantized in order, an encoder's before a decoder's. Each one is run on
the outputs of the quantized blocks before it: once to collect statistics of its layers' inputs, and
once, quantized, to make the inputs of the next.
"""

import copy
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor, nn

from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput
from anybit.nn.experts import of_all_experts
from anybit.nn.linear import QuantLinear
from anybit.nn.model import (
    linear_at,
    quantized_modules,
    restored_on_error,
    under_all_names,
    weight_of,
)
from anybit.progress import progress
from anybit.quantizers.base import Block, Quantizer, quantize_layers
from anybit.quantizers.calibration.block_runner import BlockRunner
from anybit.quantizers.calibration.blocks import Blocks, block_lists
from anybit.quantizers.calibration.data import Calibration, calibration_from
from anybit.quantizers.calibration.gradients import Gradients, output_gradients, refuse_gradients
from anybit.quantizers.calibration.memory import forget_dtypes, on_device, trim_memory
from anybit.quantizers.calibration.rehearsal import rehearse
from anybit.quantizers.calibration.resume import FinishedBlocks, digest
from anybit.quantizers.calibration.statistics import Statistics
from anybit.quantizers.calibration.stored_blocks import StoredBlocks
from anybit.quantizers.columns import recordings

log = logging.getLogger(__name__)
T = TypeVar("T")
NONE: Mapping[str, Gradients] = MappingProxyType({})


def calibration_of(quantizer: Quantizer) -> Calibration:
    """The data of a calibrated quantizer; InvalidInput when it was given none."""
    source = quantizer.calibration
    if source is None:
        name = type(quantizer).__name__
        raise InvalidInput(
            f"{name} needs data to calibrate on: {name}(calibration=['some text', ...]), token "
            "ids, a file of texts, or batches of the model's inputs"
        )
    return calibration_from(source)


def calibrate(
    model: nn.Module,
    schemes: Mapping[str, str],
    quantizer: Quantizer,
    calibration: Calibration,
    stored: StoredBlocks | None = None,
) -> None:
    """Quantize layers in place, block by block, with a calibrated quantizer.

    On a machine with a GPU, a model on the CPU visits it block by block. An error or an interrupt
    puts the dense layers back; with `Calibration(work=...)` finished blocks are on disk by then,
    and the next run with the same settings goes on from there.

    Args:
        model: A model of blocks.
        schemes: Schemes of the layers to quantize, by name.
        quantizer: Chooses the codes.
        calibration: The data to run the model on.
        stored: Where the weights of blocks on the meta device are; each block is then in memory
            only while it is at work, and ends up in the work folder alone. For gradients all are
            in memory at once, on the CPU.

    Raises:
        InvalidInput: The model has no list of blocks, the data does not fit the model, NaN or inf
            appear, or the work folder holds blocks that were made with other settings.

    Warns:
        UserWarning: Layers saw fewer tokens than they have inputs.
    """
    data = calibration.data(model)
    lists = block_lists(model, list(schemes))
    check_model(model, quantizer, calibration, data, several=len(lists) > 1)
    settings = settings_of(model, schemes, quantizer, calibration, data, stored)
    config = getattr(model, "config", None)
    finished = FinishedBlocks(calibration.work, settings, getattr(config, "model_type", None))
    weights = {name: linear_at(model, name).weight.numel() for name in schemes}
    few: dict[str, int] = {}
    done = 0  # blocks

    resident: set[str] = set()

    @contextmanager
    def at_work(found: Blocks, device: torch.device, index: int) -> Iterator[None]:
        """Inside, a block has its weights, on a device."""
        if found.name in resident:
            yield
            return
        block = found.modules[index]
        loaded = stored.loaded(block, f"{found.name}.{index}.") if stored else nullcontext()
        with loaded, on_device(block, device):
            yield

    with restored_on_error(model), recordings(), torch.no_grad(), ExitStack() as all_at_work:
        model.eval()
        runners = [BlockRunner(model, found.modules, data, found.encoder) for found in lists]
        for found, runner in zip(lists, runners, strict=True):
            rehearse(runner, partial(at_work, found, runner.device))
            if runner.whole:
                refuse_whole(model, quantizer, calibration)
                for index in range(len(found.modules)):
                    all_at_work.enter_context(at_work(found, runner.device, index))
                resident.add(found.name)
        beside = [dense_runner(runner, data, quantizer) for runner in runners]
        gradients = dict[str, Gradients]()
        if "gradients" in quantizer.needs and isinstance(data, Tensor):
            names = unfinished(schemes, lists[0], finished)
            with all_loaded(lists[0], stored if names and not resident else None):
                gradients = output_gradients(model, names, data) if names else {}
        with progress("calibrating", sum(weights.values())) as step:
            for found, runner, dense in zip(lists, runners, beside, strict=True):
                for index, block in enumerate(found.modules):
                    start = f"{found.name}.{index}."
                    own = inside(schemes, start)
                    with at_work(found, runner.device, index):
                        if dense is not None and (not own or finished.holds(done)):
                            dense.advance(index)
                        if not finished.restore(done, block, own, start) and own:
                            given = inside(gradients, start)
                            with under_all_names(model) if runner.whole else nullcontext():
                                few |= quantize_block(
                                    block, own, quantizer, runner, index, start, dense, given
                                )
                        runner.advance(index, calibration.kv_scales)
                        finished.save(done, block, start)
                    done += 1
                    trim_memory()
                    step(sum(inside(weights, start).values()), start[:-1])
                if found is not lists[-1]:
                    runner.forget()
                    if dense is not None:
                        dense.forget()
            starts = tuple(f"{found.name}." for found in lists)
            outside = {n: s for n, s in schemes.items() if not n.startswith(starts)}
            if outside:
                few |= quantize_rest(model, outside, quantizer, runners[-1], beside[-1], gradients)
                step(sum(weights[name] for name in outside))
    if few:
        warnings.warn(words_on(few), stacklevel=3)


def check_model(
    model: nn.Module,
    quantizer: Quantizer,
    calibration: Calibration,
    data: Tensor | list[dict[str, Tensor]],
    several: bool,
) -> None:
    """Raise InvalidInput for what a model has not: scales of a cache, or gradients.

    several: whether it is an encoder-decoder.
    """
    if calibration.kv_scales and several:
        raise InvalidInput(
            f"kv_scales: {type(model).__name__} is an encoder-decoder, and scales are of decoders' "
            "caches; leave it out"
        )
    if "gradients" in quantizer.needs:
        refuse_gradients(model, data, several)


def refuse_whole(model: nn.Module, quantizer: Quantizer, calibration: Calibration) -> None:
    """Raise InvalidInput for what needs blocks that run one at a time, and once; or log it."""
    kind, wanted = type(model).__name__, {"kv_scales": calibration.kv_scales}
    wanted["follow"] = "drift" in quantizer.needs
    if found := [name for name, given in wanted.items() if given]:
        raise InvalidInput(
            f"{found[0]} needs blocks that run once and in turn, and {kind} runs whole (blocks "
            "several times, or with more than the results of the one before); leave it out"
        )
    log.warning(
        "%s does not run block by block: all of it is in memory, and runs once for each block", kind
    )


def words_on(few: Mapping[str, int]) -> str:
    """What to say of layers that saw few tokens."""
    listed = ", ".join(f"{name} ({tokens})" for name, tokens in list(few.items())[:8])
    return (
        f"{len(few)} layers saw fewer calibration tokens than they have inputs (K), so they "
        f"are calibrated badly, or at 0 tokens rounded to nearest: {listed}"
        f"{', ...' if len(few) > 8 else ''}. Give more data"
    )


@contextmanager
def all_loaded(found: Blocks, stored: StoredBlocks | None) -> Iterator[None]:
    """Inside, all blocks have their weights, on the CPU."""
    with ExitStack() as whole:
        for index, block in enumerate(found.modules if stored else ()):
            assert stored is not None
            whole.enter_context(stored.loaded(block, f"{found.name}.{index}."))
        yield


def unfinished(schemes: Mapping[str, str], found: Blocks, finished: FinishedBlocks) -> list[str]:
    """Layers outside of the blocks that an earlier run has left in the work folder."""
    held = (i for i in range(len(found.modules)) if finished.holds(i))
    ready = tuple(f"{found.name}.{i}." for i in held)
    return [name for name in schemes if not name.startswith(ready)]


def quantize_block(
    block: nn.Module,
    schemes: Mapping[str, str],
    quantizer: Quantizer,
    runner: BlockRunner,
    index: int,
    prefix: str,
    dense: BlockRunner | None = None,
    gradients: Mapping[str, Gradients] = NONE,
) -> dict[str, int]:
    """Collect statistics of one block's layers, transform it and quantize it.

    Args:
        block: Block `index` of the runner.
        schemes: Its layers to quantize, by names relative to it.
        quantizer: Chooses the codes.
        runner: Holds the block's inputs.
        index: Of the block.
        prefix: The block's name in the model, with a dot at its end.
        dense: Runs the dense model beside; is at the next block afterwards.
        gradients: Of its layers, if the quantizer needs them.

    Returns:
        Names of the layers that saw fewer tokens than they have inputs, and how many they saw.
    """
    output, outputs = partial(runner.output, index), runner.outputs(index)
    needs, few, weights = needed(quantizer, schemes), dict[str, int](), weights_in(gradients)
    split = "hessian" in needs and not quantizer.whole_block
    parts = split_by_memory(block, schemes) if split else [dict(schemes)]
    if len(parts) > 1:  # without Hessians, what `transform` needs of all layers is small
        light = tuple(name for name in needs if name not in ("hessian", "drift"))
        quantizer.transform(Block(block, schemes, runner.collect(index, schemes, light), output))
    for number, part in enumerate(parts):
        beside = None if number else dense  # experts get other tokens in the dense model
        statistics: Mapping[str, Statistics] = runner.collect(index, part, needs, beside, weights)
        few |= too_few_tokens(statistics, block, prefix)
        if len(parts) == 1:
            statistics = quantizer.transform(Block(block, part, statistics, output))
        if beside is None:
            seen = joined(statistics, gradients)
            quantizer.quantize_block(Block(block, part, seen, output, outputs))
            continue
        beside.copies[index] = copy.deepcopy(block)
        for turn, group in enumerate(in_turns(part, statistics)):
            if turn:  # on the outputs of the quantized layers before it
                statistics = runner.collect(index, group, needs, beside, weights)
            seen = joined(statistics, gradients)
            quantizer.quantize_block(Block(block, group, seen, output, outputs))
        beside.advance(index)
        beside.copies.clear()
    return few


def quantize_rest(
    model: nn.Module,
    schemes: Mapping[str, str],
    quantizer: Quantizer,
    runner: BlockRunner,
    dense: BlockRunner | None,
    gradients: Mapping[str, Gradients],
) -> dict[str, int]:
    """Quantize the layers outside of all blocks; arguments and result as of `quantize_block`."""
    needs, after = needed(quantizer, schemes), len(runner.blocks)
    statistics = runner.collect(after, schemes, needs, dense, weights_in(gradients))
    few = too_few_tokens(statistics, model, "")
    quantize_layers(model, schemes, quantizer, joined(statistics, gradients))
    forget_dtypes(model.get_submodule(name) for name in schemes)
    return few


def weights_in(gradients: Mapping[str, Gradients]) -> dict[str, Tensor]:
    """How much each token counts, by layer, where there are gradients of all tokens."""
    return {name: own.weights for name, own in gradients.items() if own.weights.numel()}


def joined(
    statistics: Mapping[str, Statistics], gradients: Mapping[str, Gradients]
) -> Mapping[str, Statistics]:
    """Statistics with the gradients of each layer's outputs, if there are any.

    Layers that read one input no longer share one object then.
    """
    if not gradients:
        return statistics
    return {
        name: replace(one, gradients=gradients[name].moments.to(one.hessian.device))
        for name, one in statistics.items()
    }


def in_turns(
    schemes: Mapping[str, str], statistics: Mapping[str, Statistics]
) -> list[dict[str, str]]:
    """Layers that read one input, or the like in all experts, together, in the order of names."""
    groups: dict[str, dict[str, str]] = {}
    first: dict[int, str] = {}  # the layer that is the first to read an input
    for name, scheme in schemes.items():
        kind = of_all_experts(first.setdefault(id(statistics[name]), name))
        groups.setdefault(kind, {})[name] = scheme
    return list(groups.values())


def dense_runner(
    runner: BlockRunner, data: Tensor | list[dict[str, Tensor]], quantizer: Quantizer
) -> BlockRunner | None:
    """A second runner, for the dense model, where a quantizer asks how far inputs have drifted."""
    if "drift" not in quantizer.needs:
        return None
    dense = BlockRunner(runner.model, runner.blocks, data, runner.encoder)
    dense.tails, dense.carried = runner.tails, runner.carried
    return dense


def needed(quantizer: Quantizer, schemes: Mapping[str, str]) -> tuple[str, ...]:
    """What to collect: magnitudes of rotated inputs come from a sample (`Statistics.rotated`)."""
    needs = quantizer.needs
    rotated = any(parse_scheme(scheme)[0].rotate for scheme in schemes.values())
    return (*needs, "sample") if rotated and {"amax", "mean_abs"} & {*needs} else needs


def split_by_memory(block: nn.Module, schemes: Mapping[str, str]) -> list[dict[str, str]]:
    """A block's layers in parts whose Hessians, 4 K^2 bytes each, are no larger than the block.

    Only experts are split, since all other layers share few inputs. The others come first.
    """
    rest = [name for name in schemes if name == of_all_experts(name)]
    experts = (name for name in schemes if name != of_all_experts(name))

    def size(names: list[str]) -> int:
        return sum(4 * inputs_of(block, name) ** 2 for name in names)

    parts, filled, limit = [rest], size(rest), sum(p.nbytes for p in block.parameters())
    for _, own in groupby(experts, lambda name: name.rpartition(".")[0]):
        names = list(own)
        if filled and filled + size(names) > limit:
            parts.append([])
            filled = 0
        parts[-1] += names
        filled += size(names)
    return [{name: schemes[name] for name in part} for part in parts]


def inputs_of(parent: nn.Module, name: str) -> int:
    """K of a dense or quantized layer below a module."""
    layer = parent.get_submodule(name)
    return layer.in_features if isinstance(layer, QuantLinear) else weight_of(layer).shape[1]


def inside(values: Mapping[str, T], prefix: str) -> dict[str, T]:
    """The entries below `prefix`, by their names relative to it."""
    return {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}


def too_few_tokens(
    statistics: Mapping[str, Statistics], parent: nn.Module, prefix: str
) -> dict[str, int]:
    """Layers that saw fewer tokens than they have inputs (rare experts), and how many."""
    return {
        prefix + name: one.tokens
        for name, one in statistics.items()
        if one.tokens < inputs_of(parent, name)
    }


def settings_of(
    model: nn.Module,
    schemes: Mapping[str, str],
    quantizer: Quantizer,
    calibration: Calibration,
    data: Tensor | list[dict[str, Tensor]],
    stored: StoredBlocks | None,
) -> dict[str, str]:
    """What a resumed run must have in common with the one before, by name."""
    if stored:
        identity = stored.identity
    else:
        identity = f"weights {digest([linear_at(model, name).weight for name in schemes])}"
    if isinstance(data, Tensor):
        given = f"{data.shape[0]} samples of {data.shape[1]} tokens, {digest([data])}"
    else:
        given = f"{len(data)} batches of {', '.join(data[0])}, "
        given += digest([tensor for batch in data for tensor in batch.values()])
    return {
        "model": f"{type(model).__name__}, {identity}",
        "quantizer": repr(quantizer),
        "data": given,
        "formats": json.dumps({n: m.scheme for n, m in quantized_modules(model)} | {**schemes}),
        "kv_scales": str(calibration.kv_scales),
    }
