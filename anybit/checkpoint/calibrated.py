"""Calibrated quantization of a checkpoint of any size: one block in memory at a time.

Finished blocks lie in `OUT.partial`, so a run that was killed goes on where it stopped; they are
the shards of `OUT`, which appears, complete, at the end.
"""

import copy
import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anybit.checkpoint.architecture import meta_model, model_class
from anybit.checkpoint.card import write_card
from anybit.checkpoint.rewrite import check_paths, fingerprint
from anybit.checkpoint.stream import Quantization, plan_quantization
from anybit.errors import AnybitError, InvalidInput
from anybit.files.directory import (
    check_space,
    copy_others,
    move_directory,
    write_json,
)
from anybit.files.safetensors import INDEX, ShardWriter, read_header
from anybit.nn.linear import QuantLinear
from anybit.nn.plan import Plan, Spec
from anybit.quantizers.base import Quantizer
from anybit.quantizers.calibration.block_runner import find_blocks
from anybit.quantizers.calibration.driver import calibrate, calibration_of
from anybit.quantizers.calibration.resume import SETTINGS
from anybit.quantizers.calibration.stored_blocks import StoredBlocks

REST = "rest.safetensors"


def calibrate_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    spec: Spec | Plan,
    quantizer: Quantizer,
    *,
    overwrite: bool = False,
    show_progress: bool | None = None,
) -> Path:
    """Quantize a transformers checkpoint from one directory to another with calibration.

    The result is that of `quantize_`. Peak memory: the embeddings and the head, one block with its
    statistics, and the activations of the calibration data.

    Args:
        source: Directory of a dense model.
        out: Directory to write.
        spec: As in `quantize_`.
        quantizer: A calibrated quantizer with its data.
        overwrite: Replace a checkpoint in `out`.
        show_progress: As in `quantize_`.

    Returns:
        The directory that was written.

    Raises:
        FileExistsError: `out` exists.
        FileNotFoundError: The source is incomplete.
        InvalidInput: As `quantize_checkpoint` and `quantize_` do; also when `OUT.partial` holds an
            unfinished run of other settings, or blocks are stored under other names.
        OSError: The disk is too small.
    """
    source, out = Path(source), Path(out).absolute()
    calibration = calibration_of(quantizer)
    check_paths(source, out, overwrite)
    work = plan_quantization(source, spec, quantizer, as_in_model=True)
    schemes = {work.names[n].removesuffix(".weight"): scheme for n, scheme in work.schemes.items()}
    model, prefix = without_blocks(source, list(schemes))
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    check_space(partial, work.needed(list(work.shards)))
    tensors = {name: work.stored[key] for key, name in work.names.items()}
    stored = StoredBlocks(tensors, f"files {fingerprint(source, work.stored)}")
    calibration = dataclasses.replace(calibration, work=partial)
    try:
        calibrate(model, schemes, quantizer, calibration, show_progress, stored)
    except AnybitError:
        if not any(partial.glob("block_*")):  # nothing to go on from
            shutil.rmtree(partial)
        raise
    finish(partial, source, work, model, prefix)
    write_card(partial, str(source), work.quantized)
    move_directory(partial, out)
    return out


def without_blocks(source: Path, names: list[str]) -> tuple[nn.Module, str]:
    """Load everything of a model but its blocks, which are on the meta device.

    Loaded as a model of no blocks, because that fills what no file holds (rotary frequencies).

    Args:
        source: Directory of a dense model.
        names: Layers that are to be quantized.

    Returns:
        The model, and the name of its list of blocks.
    """
    from transformers.utils import logging

    whole = meta_model(source)
    prefix, blocks = find_blocks(whole, names)
    kind, config = model_class(source)
    count = config.get_text_config().num_hidden_layers
    if config.is_encoder_decoder or count != len(blocks):
        raise InvalidInput(
            f"{source}: a {kind.__name__} cannot be calibrated from disk, only decoders can; load "
            "it with transformers and use anybit.quantize_"
        )
    bare = copy.deepcopy(config)
    bare.get_text_config().num_hidden_layers = 0
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # the blocks' tensors are unexpected there
    try:
        model: Any = kind.from_pretrained(source, config=bare, local_files_only=True)
        model.set_submodule(prefix, nn.ModuleList(blocks))
    except Exception as error:  # what transformers computes from the number of blocks
        raise InvalidInput(
            f"{source}: a {kind.__name__} cannot be calibrated from disk, since transformers does "
            "not load it without its blocks; load it and use anybit.quantize_"
        ) from error
    finally:
        logging.set_verbosity(level)
    for module in model.modules():
        if getattr(module, "config", None) is not None:
            module.config.get_text_config().num_hidden_layers = count
    dtype = next(p.dtype for p in model.parameters())
    for block in blocks:
        block.to(dtype)
    fill_buffers(model, prefix, blocks)
    return model, prefix


def fill_buffers(model: Any, prefix: str, blocks: list[nn.Module]) -> None:
    """Give blocks on the meta device the buffers that no file holds, as transformers does."""
    owners = []
    for module in (module for block in blocks for module in block.modules()):
        absent = [n for n in module._non_persistent_buffers_set if module._buffers[n] is not None]
        for name in absent:
            buffer = module._buffers[name]
            assert buffer is not None
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
        owners += [module] if absent else []
    if not owners:
        return
    parts = prefix.split(".")
    above = [model.get_submodule(".".join(parts[:i])) for i in range(len(parts))]
    for module in (*owners, *above):  # what was loaded is marked, and stays
        model._init_weights(module)


def finish(partial: Path, source: Path, work: Quantization, model: nn.Module, prefix: str) -> None:
    """Name the blocks' files as shards, add one with all other tensors, and the other files."""
    rest = [n for n in work.stored if not work.names.get(n, n).startswith(f"{prefix}.")]
    with ShardWriter(partial / REST, work.outputs(rest)) as shard:
        for name in rest:
            if name not in work.schemes:
                work.write(name, shard)
                continue
            layer = name.removesuffix(".weight")
            quantized = model.get_submodule(work.names[name].removesuffix(".weight"))
            assert isinstance(quantized, QuantLinear)
            for key, tensor in quantized.packed.tensors().items():
                shard.add(f"{layer}.{key}", tensor)
    files = [*sorted(partial.glob("block_*.safetensors")), partial / REST]
    where: dict[str, str] = {}
    total = 0
    for number, file in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        for key, entry in read_header(file).items():
            where[key], total = name, total + entry.nbytes
        os.rename(file, partial / name)
    write_json(partial / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    write_json(partial / "config.json", work.new_config)
    copy_others(source, partial)
    (partial / SETTINGS).unlink()
