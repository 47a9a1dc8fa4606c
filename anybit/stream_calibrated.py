"""Calibrated quantization of a checkpoint of any size: one block in memory at a time.

Finished blocks lie in `OUT.partial`, so a run that was killed goes on where it stopped; they are
the shards of `OUT`, which appears, complete, at the end.
"""

import copy
import dataclasses
import os
from pathlib import Path
from typing import Any

from torch import nn

from anybit.experts import unpublished
from anybit.files import (
    INDEX,
    ShardWriter,
    check_absent,
    check_space,
    copy_others,
    move_directory,
    read_header,
    write_json,
)
from anybit.linear import QuantLinear
from anybit.quantize import Plan, Spec
from anybit.quantizers.calibrate import Calibrated, StoredBlocks, run
from anybit.quantizers.replay import find_blocks
from anybit.quantizers.text import Calibration
from anybit.quantizers.work import SETTINGS
from anybit.stream import SHARD_BYTES, Work, fingerprint, plan_work, skeleton

REST = "rest.safetensors"


def calibrate_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    spec: Spec | Plan,
    quantizer: Calibrated,
    *,
    overwrite: bool = False,
    show_progress: bool | None = None,
) -> Path:
    """Quantize a transformers checkpoint from one directory to another with calibration.

    spec, quantizer: as in `quantize_`, with the same result. Peak memory: the embeddings and the
        head, one block with its statistics, and the text's activations.

    Raises as `quantize_checkpoint` and `quantize_` do; ValueError for an unfinished run in
    `OUT.partial` with other settings, and for blocks that are stored under other names.
    """
    source, out = Path(source), Path(out).absolute()
    check_absent(out, overwrite)
    work = plan_work(source, spec, SHARD_BYTES)
    model_type = work.config.get("model_type")
    schemes = {
        unpublished(name, model_type).removesuffix(".weight"): scheme
        for name, scheme in work.schemes.items()
    }
    model, prefix = hollow(source, list(schemes))
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    check_space(partial, work.needed(list(work.shards)))
    calibration = quantizer.calibration
    if calibration is not None and not isinstance(calibration, Calibration):
        calibration = Calibration(calibration)
    if calibration is not None:
        calibration = dataclasses.replace(calibration, work=partial)
    tensors = {unpublished(name, model_type): tensor for name, tensor in work.stored.items()}
    stored = StoredBlocks(tensors, f"files {fingerprint(source, work.stored)}")
    run(
        model,
        schemes,
        dataclasses.replace(quantizer, calibration=calibration),
        show_progress,
        stored,
    )
    finish(partial, source, work, model, prefix)
    move_directory(partial, out)
    return out


def hollow(source: Path, names: list[str]) -> tuple[nn.Module, str]:
    """The model with everything in memory but its blocks, which are on the meta device.

    Loaded as a model of no blocks, because that fills what no file holds (rotary frequencies).
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    whole = skeleton(source)
    prefix, blocks = find_blocks(whole, names)
    config = AutoConfig.from_pretrained(source)
    bare = copy.deepcopy(config)
    bare.num_hidden_layers = 0
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # the blocks' tensors are unexpected there
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(source, config=bare)
    finally:
        logging.set_verbosity(level)
    model.set_submodule(prefix, nn.ModuleList(blocks))
    for module in model.modules():
        if getattr(module, "config", None) is not None:
            module.config.num_hidden_layers = config.num_hidden_layers
    dtype = next(p.dtype for p in model.parameters())
    for block in blocks:
        block.to(dtype)
    return model, prefix


def finish(partial: Path, source: Path, work: Work, model: nn.Module, prefix: str) -> None:
    """Name the blocks' files as shards, add one with all other tensors, and the other files."""
    rest = [name for name in work.stored if not name.startswith(f"{prefix}.")]
    with ShardWriter(partial / REST, work.outputs(rest)) as shard:
        for name in rest:
            if name not in work.schemes:
                shard.copy(name, work.stored[name])
                continue
            layer = name.removesuffix(".weight")
            quantized = model.get_submodule(layer)
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
