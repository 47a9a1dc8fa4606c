"""`save` and `load`: a quantized transformers model on disk.

A checkpoint is a directory as transformers writes it: config.json, whose `quantization_config`
says which layer has which format, and safetensors with the canonical tensors of every quantized
layer (`<layer>.codes4`, `<layer>.scale`, ...) next to the dense tensors of the others.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from anybit.files import copy_others, new_directory, read_json, stored_tensors
from anybit.quantize import METHOD, dense_layers, plan_of, quantized_layers, record, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARD_BYTES = 5_000_000_000


def save(model: Any, directory: str | os.PathLike[str], overwrite: bool = False) -> None:
    """Write a quantized transformers model to a directory, whole or not at all.

    The files of a local directory that the model was loaded from and that are no weights (the
    tokenizer's, the licence) come along.

    Raises FileExistsError for a directory that exists, unless it holds a checkpoint and `overwrite`
    is set; TypeError for a model that is not transformers'; ValueError for a dense one.
    """
    if not hasattr(model, "save_pretrained"):
        raise TypeError(
            f"{type(model).__name__} is no transformers model; save its state_dict() instead"
        )
    record(model, plan_in(model))
    out, source = Path(directory).absolute(), Path(str(getattr(model, "name_or_path", "")))
    needed = sum({t.data_ptr(): t.nbytes for t in model.state_dict().values()}.values())
    with new_directory(out, overwrite, needed) as temporary:
        model.save_pretrained(temporary, max_shard_size=SHARD_BYTES)
        if (source / "config.json").is_file():
            copy_others(source, temporary)


def load(
    directory: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "auto",
) -> "PreTrainedModel":
    """Load a checkpoint of `save` or `anybit quantize`, ready to run on a device.

    dtype: of activations and of the weights that are not quantized; the saved one by default.

    Raises FileNotFoundError for missing files; ValueError for damaged ones, for a checkpoint that
    is not anybit's, or of a newer version, and for tensors that do not fit the config.
    """
    path = Path(directory)
    stored_tensors(path)
    method = (read_json(path / "config.json").get("quantization_config") or {}).get("quant_method")
    if method != METHOD:
        raise ValueError(
            f"{path} is {f'quantized with {method}' if method else 'not quantized'}, not a "
            "checkpoint of anybit; load it with transformers"
        )
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.to(device)


def plan_in(model: nn.Module) -> dict[str, str | None]:
    """The plan that describes a model's quantized layers as they are now."""
    schemes = {name: layer.scheme for name, layer in quantized_layers(model)}
    if not schemes:
        raise ValueError(f"{type(model).__name__} has no quantized layers; quantize_ it first")
    quantized = {n: (m.out_features, m.in_features) for n, m in quantized_layers(model)}
    shapes = dense_layers(model) | quantized
    with suppress(ValueError):  # a layer was replaced since then, by hand
        plan = getattr(model, "anybit_formats", None)
        if plan and resolve(shapes, plan) == schemes:
            return plan_of(plan)
    return {"*": None, **schemes}
