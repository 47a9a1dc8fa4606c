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
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
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
Data = Tensor | list[dict[str, Tensor]]  # token ids, or batches of inputs


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
    with restored_on_error(model), recordings(), torch.no_grad(), ExitStack() as resident:
        model.eval()
        chains = [Chain(model, each, data, stored) for each in lists]
        for chain in chains:
            rehearse(chain.runner, chain.at_work)
            if chain.runner.whole:
                refuse_whole(model, quantizer, calibration)
                chain.stay(resident)
            if "drift" in quantizer.needs:
                chain.follow()
        gradients = gradients_of(model, schemes, quantizer, data, chains[0], finished)
        run = Run(model, schemes, quantizer, calibration.kv_scales, finished, gradients)
        with progress("calibrating", sum(weights.values())) as step:
            for chain in chains:
                for index in range(len(chain.blocks.modules)):
                    run.block(chain, index)
                    start = chain.start(index)
                    step(sum(inside(weights, start).values()), start[:-1])
                if chain is not chains[-1]:
                    chain.forget()
            if outside := run.rest(chains):
                step(sum(weights[name] for name in outside))
    if run.few:
        warnings.warn(words_on(run.few), stacklevel=3)


class Chain:
    """A list of blocks, and what runs them.

    Attributes:
        runner: At the block that is to be quantized.
        dense: Runs the dense model beside, where a quantizer asks how far inputs have drifted.
        resident: Whether all blocks are at work throughout.
    """

    def __init__(self, model: nn.Module, blocks: Blocks, data: Data, stored: StoredBlocks | None):
        self.blocks, self.stored, self.resident = blocks, stored, False
        self._runner = partial(BlockRunner, model, blocks.modules, data, blocks.encoder)
        self.runner = self._runner()
        self.dense: BlockRunner | None = None

    def follow(self) -> None:
        """Have a runner for the dense model, too, after the rehearsal."""
        self.dense = self._runner()
        self.dense.tails, self.dense.carried = self.runner.tails, self.runner.carried

    def start(self, index: int) -> str:
        """How names of a block's modules begin."""
        return f"{self.blocks.name}.{index}."

    def loaded(self, index: int) -> AbstractContextManager[None]:
        """Inside, a block has its weights."""
        if self.resident or self.stored is None:
            return nullcontext()
        return self.stored.loaded(self.blocks.modules[index], self.start(index))

    @contextmanager
    def at_work(self, index: int) -> Iterator[None]:
        """Inside, a block has its weights, on the runner's device."""
        moved = on_device(self.blocks.modules[index], self.runner.device)
        with self.loaded(index), nullcontext() if self.resident else moved:
            yield

    def stay(self, resident: ExitStack) -> None:
        """Have all blocks at work from now on."""
        for index in range(len(self.blocks.modules)):
            resident.enter_context(self.at_work(index))
        self.resident = True

    def forget(self) -> None:
        """Let go of all inputs; the last block has been run."""
        for runner in (self.runner, self.dense):
            if runner is not None:
                runner.forget()


@dataclass
class Run:
    """Quantizes blocks in turn, and what lies behind them.

    Attributes:
        model: As in `calibrate`, like `schemes` and `quantizer`.
        kv_scales: As in `Calibration`.
        finished: Blocks that an earlier run has left.
        gradients: Of layers, if the quantizer needs them.
        few: Layers that saw fewer tokens than they have inputs, and how many they saw.
        done: Blocks.
    """

    model: nn.Module
    schemes: Mapping[str, str]
    quantizer: Quantizer
    kv_scales: bool
    finished: FinishedBlocks
    gradients: Mapping[str, Gradients]
    few: dict[str, int] = field(default_factory=dict)
    done: int = 0

    def block(self, chain: Chain, index: int) -> None:
        """Quantize a block, unless it is finished, and go on to the next."""
        block, start, dense = chain.blocks.modules[index], chain.start(index), chain.dense
        own, number = inside(self.schemes, start), self.done
        with chain.at_work(index):
            if dense is not None and (not own or self.finished.holds(number)):
                dense.advance(index)
            if not self.finished.restore(number, block, own, start) and own:
                with under_all_names(self.model) if chain.runner.whole else nullcontext():
                    self.quantize(chain, index, own)
            chain.runner.advance(index, self.kv_scales)
            self.finished.save(number, block, start)
        self.done += 1
        trim_memory()

    def quantize(self, chain: Chain, index: int, schemes: Mapping[str, str]) -> None:
        """Collect statistics of a block's layers, transform it and quantize it.

        schemes: Of these layers, by names relative to the block.
        """
        block, runner, start = chain.blocks.modules[index], chain.runner, chain.start(index)
        gradients, quantizer = inside(self.gradients, start), self.quantizer
        output, outputs = partial(runner.output, index), runner.outputs(index)
        needs, weights = needed(quantizer, schemes), weights_in(gradients)
        split = "hessian" in needs and not quantizer.whole_block
        parts = split_by_memory(block, schemes) if split else [dict(schemes)]
        if len(parts) > 1:  # without Hessians, what `transform` needs of all layers is small
            light = tuple(name for name in needs if name not in ("hessian", "drift"))
            seen = runner.collect(index, schemes, light)
            quantizer.transform(Block(block, schemes, seen, output))
        for number, part in enumerate(parts):
            dense = None if number else chain.dense  # experts get other tokens in the dense model
            statistics: Mapping[str, Statistics] = runner.collect(
                index, part, needs, dense, weights
            )
            self.few |= too_few_tokens(statistics, block, start)
            if len(parts) == 1:
                statistics = quantizer.transform(Block(block, part, statistics, output))
            if dense is None:
                groups = [part]
            else:
                dense.copies[index] = copy.deepcopy(block)
                groups = in_turns(part, statistics)
            for turn, group in enumerate(groups):
                if turn:  # on the outputs of the quantized layers before it
                    statistics = runner.collect(index, group, needs, dense, weights)
                known = joined(statistics, gradients)
                quantizer.quantize_block(Block(block, group, known, output, outputs))
            if dense is not None:
                dense.advance(index)
                dense.copies.clear()

    def rest(self, chains: list[Chain]) -> Mapping[str, str]:
        """Quantize the layers outside of all blocks, which have run; their schemes."""
        starts = tuple(f"{chain.blocks.name}." for chain in chains)
        own = {n: s for n, s in self.schemes.items() if not n.startswith(starts)}
        if own:
            needs, weights = needed(self.quantizer, own), weights_in(self.gradients)
            after, last = len(chains[-1].blocks.modules), chains[-1]
            statistics = last.runner.collect(after, own, needs, last.dense, weights)
            self.few |= too_few_tokens(statistics, self.model, "")
            known = joined(statistics, self.gradients)
            quantize_layers(self.model, own, self.quantizer, known)
            forget_dtypes(self.model.get_submodule(name) for name in own)
        return own


def check_model(
    model: nn.Module,
    quantizer: Quantizer,
    calibration: Calibration,
    data: Data,
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


def gradients_of(
    model: nn.Module,
    schemes: Mapping[str, str],
    quantizer: Quantizer,
    data: Data,
    chain: Chain,
    finished: FinishedBlocks,
) -> dict[str, Gradients]:
    """Of all layers but those of finished blocks, if the quantizer needs them."""
    if "gradients" not in quantizer.needs or not isinstance(data, Tensor):
        return {}
    every = range(len(chain.blocks.modules))
    ready = tuple(chain.start(i) for i in every if finished.holds(i))
    names = [name for name in schemes if not name.startswith(ready)]
    with ExitStack() as whole:
        for index in every if names else ():
            whole.enter_context(chain.loaded(index))
        return output_gradients(model, names, data) if names else {}


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
    data: Data,
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
