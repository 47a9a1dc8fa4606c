"""Models that the engine does not know: on its cache, or in transformers' `generate`."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from anybit.checkpoint.save_load import load as load_quantized
from anybit.checkpoint.save_load import load_dense
from anybit.engine.generator import UNLIMITED, Generator, longest
from anybit.engine.models import UnknownModel
from anybit.engine.models.hosted import Hosted
from anybit.errors import InvalidInput
from anybit.nn.model import quantized_layers, set_keep
from anybit.nn.multiplier import Keep
from anybit.nn.plan import Plan, Spec
from anybit.quantizers.quantize import quantize_

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("anybit.engine")


def load(
    directory: Path,
    bare: "PreTrainedModel",
    device: torch.device,
    dtype: torch.dtype,
    quantized: bool,
    quantization: Spec | Plan | None,
    length: int | None,
    cache_options: list[str],
    reason: str,
    keep: Keep,
) -> Hosted | Generator:
    """Load a model that the engine does not know: on the engine's cache if that is possible.

    Args:
        bare: The model without contents.
        cache_options: What the user has asked of the engine's KV cache.
        reason: Why the engine does not run the model itself, for the log.
        keep: As in `anybit.load`.

    Raises:
        InvalidInput: The model does not write text from text, or there are cache options for one
            that needs a cache of its own.
    """
    kind = type(bare)
    if not kind.can_generate() or kind.main_input_name != "input_ids":
        raise InvalidInput(
            f"{directory}: {kind.__name__} does not write text from text "
            f"(its input is {kind.main_input_name}); load it with anybit.load"
        )
    positions = longest(bare.config)
    if length and positions and length > positions:
        raise InvalidInput(f"{directory}: length={length}, and the model has {positions} positions")
    if cache_options and not kind._can_set_attn_implementation():
        raise no_cache_options(cache_options, reason)
    model = read(directory, device, dtype, quantized, quantization, keep)
    length = length or positions or UNLIMITED
    try:
        hosted = Hosted(model.eval(), length)
    except UnknownModel as own:
        reason = f"{reason}; {own}"
        if cache_options:
            raise no_cache_options(cache_options, reason) from None
    else:
        log.info("%s; transformers' modules run it, on the engine's KV cache", reason)
        return hosted
    log.warning(
        "%s; transformers' generate runs it, one sequence at a time and without the engine's "
        "kernels between the layers",
        reason,
    )
    return Generator(model, length)


def read(
    directory: Path,
    device: torch.device,
    dtype: torch.dtype,
    quantized: bool,
    quantization: Spec | Plan | None,
    keep: Keep,
) -> Any:
    """transformers' model with its weights, quantized if they are, or as asked."""
    model: Any
    if quantized:
        model = load_quantized(directory, device, dtype, keep)
    else:
        model = load_dense(directory).to(device, dtype)
        if quantization is not None:
            set_keep(quantize_(model, quantization), keep)
    if device.type != "cpu" and dtype == torch.float32:  # which a GPU's kernels do not multiply
        for _, layer in quantized_layers(model):
            layer.dtype = dtype
            layer.prepare()
    return model


def no_cache_options(options: list[str], reason: str) -> InvalidInput:
    return InvalidInput(
        f"{reason}; transformers' generate would run it, with a KV cache of its own; leave out "
        f"{' and '.join(options)}"
    )
