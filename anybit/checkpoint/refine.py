"""Tune a quantized checkpoint against its dense model, as `anybit refine` does."""

import os
from typing import Any

import torch

from anybit.checkpoint.foreign.ready import dense_directory
from anybit.checkpoint.rewrite import check_paths
from anybit.checkpoint.save_load import load, load_dense, save
from anybit.errors import InvalidInput
from anybit.files.directory import destination
from anybit.nn.model import quantized_layers
from anybit.quantizers.calibration.data import Calibration
from anybit.quantizers.pv_tuning import pv_tune

PART = 0.1  # of the steps, over which the first and the last loss are means


def refine_checkpoint(
    quantized: str | os.PathLike[str],
    dense: str | os.PathLike[str],
    out: str | os.PathLike[str],
    calibration: Calibration,
    *,
    steps: int,
    batch: int,
    overwrite: bool = False,
) -> str:
    """Write a quantized checkpoint whose scales, norms and codes are tuned to agree with the dense.

    On a GPU where there is one. Memory: as `pv_tune`, for both models. Formats whose weights share
    bits, such as trellis codes, keep their codes.

    Args:
        quantized: A checkpoint of anybit, or of another tool that `load` takes.
        dense: The model that it was made of.
        out: Directory to write.
        calibration: The data to tune on.
        steps, batch: As of `pv_tune`.
        overwrite: Replace a checkpoint in `out`.

    Returns:
        What was done, to be printed.

    Raises:
        FileExistsError: `out` exists.
        InvalidInput: As `load` and `pv_tune` do; also for two vocabularies.
    """
    place = destination(out)
    check_paths(quantized, place, overwrite)
    source = dense_directory(check_paths(dense, place, overwrite))
    calibration.check_file()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = load(quantized, device, keep="packed")
    stored = model.dtype
    other: Any = load_dense(source).to(device)
    sizes = [each.config.get_text_config().vocab_size for each in (model, other)]
    if sizes[0] != sizes[1]:
        raise InvalidInput(
            f"{quantized} has a vocabulary of {sizes[0]} tokens, and {dense} of {sizes[1]}; name "
            "the dense model that it was made of"
        )
    if device == "cpu":  # where 16-bit products are slow
        model.to(torch.float32), other.to(torch.float32)
    options: dict[str, Any] = {"steps": steps, "batch": batch}
    if any(layer.format.window for _, layer in quantized_layers(model)):
        options["share"] = 0.0
    losses = pv_tune(model, other, calibration, **options)
    save(model.to(stored), place, overwrite)
    few = max(1, round(PART * steps))
    first, last = (sum(part) / few for part in (losses[:few], losses[-few:]))
    return f"wrote {place}: KL on the text {first:.4f} -> {last:.4f} nats a token, {steps} steps"
