"""Quantize a model from one directory to another by a method's name, as `anybit quantize` does."""

from collections.abc import Mapping
from pathlib import Path

from anybit.checkpoint.calibrated import calibrate_checkpoint
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.errors import InvalidInput
from anybit.quantizers.calibration.data import Calibration
from anybit.quantizers.registry import CALIBRATED, DATA_FREE, default_method


def quantize_directory(
    model: Path,
    out: Path,
    plan: Mapping[str, str | None],
    method: str | None,
    calibration: Calibration | None,
    overwrite: bool,
) -> object:
    """Quantize the model in a directory to another one, without ever holding it in memory.

    Args:
        model: Directory of a dense model.
        out: Directory to write.
        plan: {pattern: scheme or None}, as in `quantize_`.
        method: A name of `DATA_FREE`, or with calibration data of `CALIBRATED`; None chooses.
        calibration: The data to calibrate on.
        overwrite: Replace a checkpoint in `out`.

    Returns:
        What was done, to be printed.

    Raises:
        InvalidInput: The method is unknown, or needs data, or takes none; and as
            `quantize_checkpoint` and `calibrate_checkpoint` do.
    """
    if method is None:
        method = default_method(plan) if calibration else "rtn"
    known = CALIBRATED if calibration else DATA_FREE
    if method not in known:
        other = DATA_FREE if calibration else CALIBRATED
        reason = (
            f"{method!r} {'takes no data' if calibration else 'needs data: --calibrate FILE'}"
            if method in other
            else f"unknown method {method!r}"
        )
        raise InvalidInput(
            f"{reason}; {'with' if calibration else 'without'} calibration data there are "
            f"{', '.join(known)}"
        )
    if calibration:
        quantizer = CALIBRATED[method](calibration)
        return calibrate_checkpoint(model, out, plan, quantizer, overwrite=overwrite)
    return quantize_checkpoint(model, out, plan, DATA_FREE[method](), overwrite=overwrite)
