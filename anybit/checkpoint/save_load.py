"""`save` and `load`: a quantized transformers model on disk.

A checkpoint is a directory as transformers writes it: config.json, whose `quantization_config`
says which layer has which format, and safetensors with the canonical tensors of every quantized
layer (`<layer>.codes4`, `<layer>.scale`, ...) next to the dense tensors of the others.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from anybit.checkpoint.architecture import load_model
from anybit.checkpoint.beside import source_of
from anybit.checkpoint.card import write_card
from anybit.checkpoint.foreign.ready import ready
from anybit.checkpoint.trial import try_out
from anybit.errors import InvalidInput, InvalidType
from anybit.files.directory import (
    copy_others,
    destination,
    new_directory,
    quantization_of,
    read_json,
)
from anybit.files.safetensors import stored_tensors
from anybit.nn.model import check_module, plan_in, quantized_modules, refuse_adapters, set_keep
from anybit.nn.multiplier import Keep
from anybit.nn.plan import METHOD, stored_plan
from anybit.nn.tied import tied_layers, untie

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARD_BYTES = 5_000_000_000


def save(model: Any, directory: str | os.PathLike[str], overwrite: bool = False) -> None:
    """Write a quantized transformers model to a directory, whole or not at all.

    The files of a local directory that the model was loaded from and that are no weights (the
    tokenizer's, the licence) come along. Without a README.md among them, one is written.

    Args:
        model: A transformers model with quantized layers.
        directory: Where to write; made when it does not exist.
        overwrite: Replace a checkpoint in the directory.

    Raises:
        FileExistsError: The directory exists, unless it holds a checkpoint and `overwrite` is set.
        InvalidType: The model is not one of transformers.
        InvalidInput: No layer of the model is quantized.
        OSError: The disk is too small.
    """
    import transformers
    from transformers import PreTrainedModel

    check_module(model, "save")
    refuse_adapters(model)
    if not isinstance(model, PreTrainedModel):
        raise InvalidType(
            f"{type(model).__name__} is not a transformers model; save its state_dict() instead"
        )
    plan_in(model)  # raises without quantized layers; saving records it
    if model._tied_weights_keys and not tied_layers(model):  # files may have untied it
        untie(model.config)
    out, source = destination(directory), source_of(model)
    needed = sum({t.data_ptr(): t.nbytes for t in model.state_dict().values()}.values())
    with new_directory(out, overwrite, needed) as temporary:
        model.save_pretrained(temporary, max_shard_size=SHARD_BYTES)
        if source is not None:
            copy_others(source, temporary)
        if getattr(transformers, type(model).__name__, None) is type(model):
            try_out(temporary)
        layers = [(m.scheme, m.shape) for _, m in quantized_modules(model) if not m.is_copy]
        write_card(temporary, str(getattr(model, "name_or_path", "")), layers)


def load(
    directory: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "auto",
    keep: Keep = "auto",
) -> "PreTrainedModel":
    """Load a checkpoint of `save` or `anybit quantize`, ready to run on a device.

    The model is of the class that config.json names in `architectures`. Of another tool's
    checkpoint, the conversion (`anybit convert`) is made once, in the cache folder, and loaded.

    Args:
        directory: Of the checkpoint; or a GGUF file, or org/name[@revision] of the hub, with
            :Q4_K_M for one of its GGUF files.
        device: Where the model will run.
        dtype: Of activations and of the weights that are not quantized; the saved one by default.
        keep: Whether layers that no kernel multiplies may hold decoded copies of their weights;
            see `QuantLinear`.

    Returns:
        The transformers model.

    Raises:
        FileNotFoundError: Files are missing.
        InvalidInput: Files are damaged, the checkpoint is not one of anybit or of a newer version,
            or tensors do not fit its config.json.
    """
    path = ready(directory)
    stored_tensors(path)
    quantization = quantization_of(read_json(path / "config.json"), path)
    method = quantization.get("quant_method")
    if method != METHOD:
        raise InvalidInput(
            f"{path} is {f'quantized with {method}' if method else 'not quantized'}, not a "
            "checkpoint of anybit; load it with transformers"
        )
    stored_plan(quantization, path)
    model = load_model(path, dtype=dtype)
    set_keep(model.to(device), keep)
    return cast("PreTrainedModel", model)


def load_dense(directory: str | os.PathLike[str]) -> nn.Module:
    """Load a dense transformers model in its own dtype.

    Raises:
        FileNotFoundError: Files are missing.
        InvalidInput: As `load` does.
    """
    return cast(nn.Module, load_model(Path(directory)))
