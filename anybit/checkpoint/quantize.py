"""Quantize a model from one directory to another by a method's name, as `anybit quantize` does."""

from collections.abc import Mapping
from pathlib import Path

from anybit.checkpoint.calibrated import calibrate_checkpoint
from anybit.checkpoint.rewrite import partial_of
from anybit.checkpoint.stream import plan_quantization, quantize_checkpoint
from anybit.core.scheme import parse_scheme
from anybit.errors import AnybitError, InvalidInput, in_a_line, message, near
from anybit.files.directory import destination
from anybit.progress import say
from anybit.quantizers.calibration.data import Calibration
from anybit.quantizers.registry import CALIBRATED, DATA_FREE, ELSEWHERE, default_method
from anybit.quantizers.rtn import RTN
from anybit.quantizers.trained import trained

LOOKED_AT = (16, 64)  # layers, and rows of each, in search of a trained grid


def trained_method(model: Path, plan: Mapping[str, str | None]) -> str | None:
    """ "grid" where weights were trained on the grids of their formats; else None. Says which.

    Args:
        model: Directory of an unquantized model.
        plan: {pattern: scheme or None}, as in `quantize_`.

    Raises:
        InvalidInput: They were, in groups of another size; and as `quantize_checkpoint` does.
    """
    work = plan_quantization(model, plan, RTN())
    names = [*work.schemes][:: -(-len(work.schemes) // LOOKED_AT[0])]
    some = ((work.stored[n].read(), parse_scheme(work.schemes[n])[0]) for n in names)
    found = trained((w[: LOOKED_AT[1]], fmt) for w, fmt in some)
    where = f"of {found.layers} layers that were looked at, {LOOKED_AT[1]} rows of each"
    if found.other is not None:
        raise InvalidInput(
            f"{model}: the weights were trained on a grid, but with a scale for "
            f"{found.other or 'all'} columns of a row; write group={found.other} in --format"
        )
    if 2 * found.on_grid < found.layers:
        say(
            f"no trained grid: in {found.on_grid} {where}, weights are whole multiples of a scale; "
            "going on as without --method grid"
        )
        return None
    say(
        f"trained grid: in {found.on_grid} {where}, {found.whole} of {found.groups} groups are "
        "whole multiples of a scale, which gives their codes; others are rounded to nearest"
    )
    return "grid"


def quantize_directory(
    model: Path,
    out: Path,
    plan: Mapping[str, str | None],
    method: str | None,
    calibration: Calibration | None,
    overwrite: bool,
    or_rounded: bool = False,
) -> object:
    """Quantize the model in a directory to another one, without ever holding it in memory.

    Args:
        model: Directory of a dense model.
        out: Directory to write.
        plan: {pattern: scheme or None}, as in `quantize_`.
        method: A name of `DATA_FREE`, or with calibration data of `CALIBRATED`; None chooses.
        calibration: The data to calibrate on.
        overwrite: Replace a checkpoint in `out`.
        or_rounded: Round a model to nearest that cannot be calibrated, and say why.

    Returns:
        What was done, to be printed.

    Raises:
        InvalidInput: The method is unknown, or needs data, or takes none; and as
            `quantize_checkpoint` and `calibrate_checkpoint` do.
    """
    if method is None:
        method = default_method(plan) if calibration else "rtn"
    method = method.lower()
    known, other = (CALIBRATED, DATA_FREE) if calibration else (DATA_FREE, CALIBRATED)
    if method not in known:
        data = "takes no data" if calibration else "needs data: --calibrate FILE"
        if method in ELSEWHERE:
            data = "" if calibration else " and --calibrate FILE"
            reason = f"{method!r} is done by --method {ELSEWHERE[method]}{data}"
        elif method in other:
            reason = f"{method!r} {data}"
        else:
            reason = f"unknown method {method!r}{near(method, [*known, *other])}"
        raise InvalidInput(
            f"{reason}; {'with' if calibration else 'without'} calibration data there are "
            f"{', '.join(known)}"
        )
    if not calibration:
        return quantize_checkpoint(model, out, plan, DATA_FREE[method](), overwrite=overwrite)
    try:
        quantizer = CALIBRATED[method](calibration)
        return calibrate_checkpoint(model, out, plan, quantizer, overwrite=overwrite)
    except Exception as error:  # a model's own code may raise anything
        if not or_rounded or partial_of(destination(out)).exists():
            raise  # there are blocks to go on from, or another run is at work
        why = message(error) if isinstance(error, AnybitError) else in_a_line(error)
    done = quantize_checkpoint(model, out, plan, overwrite=overwrite)  # or raises the same
    say(f"rounded to nearest, since it cannot be calibrated: {why}")
    return done
