"""Calibrated quantization of a checkpoint of any size: one block in memory at a time.

Finished blocks lie in `OUT.partial`, so a run that was killed goes on where it stopped; they are
the shards of `OUT`, which appears, complete, at the end.
"""

import os
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anybit.checkpoint.beside import into_one_index
from anybit.checkpoint.card import write_card
from anybit.checkpoint.foreign.ready import dense_directory
from anybit.checkpoint.rewrite import check_paths, check_unused, fingerprint, partial_of
from anybit.checkpoint.stream import Quantization, Report, plan_quantization, report_of
from anybit.errors import InvalidInput, in_a_line, probing
from anybit.files.directory import (
    check_absent,
    check_space,
    copy_others,
    destination,
    held,
    move_directory,
    write_json,
)
from anybit.files.safetensors import ShardWriter
from anybit.nn.experts import split
from anybit.nn.model import take_apart
from anybit.nn.plan import Plan, Spec
from anybit.nn.quantized import Quantized
from anybit.quantizers.base import Quantizer
from anybit.quantizers.calibration.blocks import block_lists
from anybit.quantizers.calibration.driver import calibrate, calibration_of
from anybit.quantizers.calibration.resume import SETTINGS
from anybit.quantizers.calibration.stored_blocks import StoredBlocks
from anybit.quantizers.embeddings import apart, quantize_embeddings

REST = "rest.safetensors"


def calibrate_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    spec: Spec | Plan,
    quantizer: Quantizer,
    *,
    overwrite: bool = False,
) -> Report:
    """Quantize a transformers checkpoint from one directory to another with calibration.

    The result is that of `quantize_`. Peak memory: the embeddings and the head, one block with its
    statistics, and the activations of the calibration data.

    Args:
        source: Directory of a dense model, or org/name of the hub.
        out: Directory to write.
        spec: As in `quantize_`.
        quantizer: A calibrated quantizer with its data.
        overwrite: Replace a checkpoint in `out`.

    Returns:
        What was done.

    Raises:
        FileExistsError: `out` exists, or `OUT.partial` holds something else than such a run.
        FileNotFoundError: The source is incomplete.
        InvalidInput: As `quantize_checkpoint` and `quantize_` do; also when another run is writing
            into `OUT.partial`, or blocks are stored under other names.
        OSError: The disk is too small.
    """
    started, out = time.monotonic(), destination(out)
    calibration = calibration_of(quantizer)
    calibration.check_file()
    source = dense_directory(check_paths(source, out, overwrite))
    work = plan_quantization(source, spec, quantizer, as_in_model=True)
    schemes = {work.names[n].removesuffix(".weight"): scheme for n, scheme in work.schemes.items()}
    schemes, words = apart(work.model, schemes)
    model, prefix = without_blocks(work.model, source, schemes, work.heads)
    quantize_embeddings(model, words, quantizer)
    partial = partial_of(out)
    with held(partial):
        check_absent(out, overwrite)  # another run may have written it meanwhile
        if not (partial / SETTINGS).is_file():
            check_unused(partial)
        check_space(partial, work.needed(list(work.shards)))
        tensors = {name: work.stored[key] for key, name in work.names.items()}
        stored = StoredBlocks(tensors, f"files {fingerprint(source, work.stored)}")
        resumed = len(list(partial.glob("block_*.safetensors")))
        try:
            calibrate(model, schemes, quantizer, replace(calibration, work=partial), stored)
        except BaseException as error:
            refused = isinstance(error, InvalidInput) and not resumed  # as it would be again
            if refused or not any(partial.glob("block_*")):  # nothing to go on from
                shutil.rmtree(partial)
            raise
        finish(partial, source, work, model, prefix)
        write_card(partial, str(source), work.quantized, described(quantizer))
        move_directory(partial, out)
        (out / SETTINGS).unlink()
    return report_of(work, out, resumed, started)


def described(quantizer: Quantizer) -> str:
    """A quantizer and its data, for the model card."""
    data = calibration_of(quantizer)
    given = isinstance(data.source, str | Path)
    source = f" of {Path(str(data.source)).name}" if given else ""
    windows = f"at most {data.samples} windows of {data.length} tokens"
    name = type(quantizer).__name__ + " with gradients" * ("gradients" in quantizer.needs)
    return f"{name}, calibrated on {windows}{source}"


def without_blocks(
    whole: Any, source: Path, names: Iterable[str], heads: Mapping[str, str]
) -> tuple[nn.Module, str]:
    """Load everything of a model but its blocks, which are on the meta device.

    transformers loads the rest, as it loads any model, into one whose blocks were taken out.

    Args:
        whole: The model on the meta device.
        source: Directory of a dense model.
        names: Layers that are to be quantized.
        heads: Those that get the weight of an embedding -> its name.

    Returns:
        The model, its layers taken apart as `quantize_` does, and the name of its list of blocks.

    Raises:
        InvalidInput: No list of blocks holds any of the layers, or transformers does not load the
            model without it.
    """
    from transformers.utils import logging

    names = list(names)
    take_apart(split(whole), names)
    lists = block_lists(whole, names)
    if len(lists) > 1:
        raise InvalidInput(
            f"{source}: a {type(whole).__name__} cannot be calibrated from disk, since its decoder "
            "reads all of its encoder; load it with transformers and use anybit.quantize_"
        )
    prefix, kind, taken = lists[0].name, type(whole), []

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        taken.append(self.get_submodule(prefix))
        self.set_submodule(prefix, nn.ModuleList())

    bare: Any = type(kind.__name__, (kind,), {"__init__": make, "__module__": kind.__module__})
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # the blocks' tensors are unexpected there
    try:
        with probing():
            model = bare.from_pretrained(source, config=whole.config, local_files_only=True)
    except Exception as error:
        raise InvalidInput(
            f"{source}: a {kind.__name__} cannot be calibrated from disk, since transformers does "
            f"not load it without its blocks ({in_a_line(error)}); load it and use "
            "anybit.quantize_"
        ) from error
    finally:
        logging.set_verbosity(level)
    model.__class__ = kind
    model.set_submodule(prefix, taken[0])
    for head, words in heads.items():
        weight = model.get_submodule(words).weight.detach().clone()
        model.get_submodule(head).weight = nn.Parameter(weight, requires_grad=False)
    take_apart(split(model), names)
    fill_buffers(model, prefix)
    return model, prefix


def fill_buffers(model: Any, prefix: str) -> None:
    """Give blocks on the meta device the buffers that no file holds, as transformers does."""
    for module in model.get_submodule(prefix).modules():
        for name in module._non_persistent_buffers_set:
            if (buffer := module._buffers[name]) is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    parts = prefix.split(".")
    for end in range(len(parts)):  # some fill the buffers of modules below them
        model.get_submodule(".".join(parts[:end]))._is_hf_initialized = False
    with torch.no_grad():
        model.initialize_weights()  # what was loaded is marked, and stays


def finish(partial: Path, source: Path, work: Quantization, model: nn.Module, prefix: str) -> None:
    """Name the blocks' files as shards, add one with all other tensors, and the other files."""
    rest = [n for n in work.stored if not work.names.get(n, "").startswith(f"{prefix}.")]
    with ShardWriter(partial / REST, work.outputs(rest)) as shard:
        for name in rest:
            if name not in work.schemes:
                work.write(name, shard)
                continue
            layer = name.removesuffix(".weight")
            quantized = model.get_submodule(work.names[name].removesuffix(".weight"))
            assert isinstance(quantized, Quantized)
            for key, tensor in quantized.packed.tensors().items():
                shard.add(f"{layer}.{key}", tensor)
    into_one_index(partial, [*sorted(partial.glob("block_*.safetensors")), partial / REST])
    write_json(partial / "config.json", work.new_config)
    copy_others(source, partial)
    work.try_out(partial)
