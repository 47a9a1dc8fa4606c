"""What transformers writes for a quantized model: config.json says what the layers are by then.

Parts of a model may have been quantized, or made dense again, by themselves, and a part may be
saved by itself. Without the formats in its config.json, such a checkpoint would be loaded with
random weights, and no more than a warning.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from torch import distributed
from transformers import modeling_utils

from anybit.checkpoint.beside import Beside
from anybit.checkpoint.names import codes_as_they_are
from anybit.nn.model import plan_in, quantized_modules
from anybit.nn.plan import METHOD, quantization_config

ELSEWHERE = ("push_to_hub", "variant", "distributed_checkpoint")  # options that write otherwise

log = logging.getLogger(__name__)


def register() -> None:
    """Have `save_pretrained` of all models look at their layers first. Idempotent."""
    kind: Any = modeling_utils.PreTrainedModel
    plain = kind.save_pretrained
    if hasattr(plain, "of_anybit"):
        return

    @wraps(plain)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **options: Any) -> Any:
        quantized = dict(quantized_modules(self))
        if getattr(self, "peft_config", None):  # of which it writes the adapters alone
            return plain(self, save_directory, *args, **options)
        if not quantized:
            with stated(self.config, None):
                return plain(self, save_directory, *args, **options)
        beside = Beside(self, Path(save_directory))
        with stated(self.config, plan_in(self)), codes_as_they_are(self):
            done = plain(self, save_directory, *args, **options)
        add(self, beside, Path(save_directory), *args, **options)
        return done

    save_pretrained.of_anybit = True  # type: ignore[attr-defined]
    kind.save_pretrained = save_pretrained


def add(
    model: Any,
    beside: Beside,
    out: Path,
    is_main_process: bool = True,
    *args: Any,
    **options: Any,
) -> None:
    """Save what a model's class lacks, too. After `out`: arguments of `save_pretrained`."""
    several = distributed.is_available() and distributed.is_initialized()
    if not beside.tensors or not is_main_process or (several and distributed.get_rank()):
        return
    if elsewhere := [key for key in ELSEWHERE if options.get(key)]:
        log.warning(
            "%s: %d tensors that no %s has, such as %s, are left out with %s; save it without",
            out,
            len(beside.tensors),
            type(model).__name__,
            next(iter(beside.tensors)),
            elsewhere[0],
        )
    else:
        beside.add_to(out)


@contextmanager
def stated(config: Any, plan: dict[str, str | None] | None) -> Iterator[None]:
    """A configuration that states a plan, or none of anybit's; afterwards it is as it was.

    A part of a model has the configuration of the whole.
    """
    before = getattr(config, "quantization_config", None)
    if plan is not None:
        config.quantization_config = quantization_config(plan)
    elif method_of(config) == METHOD:
        del config.quantization_config
    try:
        yield
    finally:
        if before is not None:
            config.quantization_config = before
        elif hasattr(config, "quantization_config"):
            del config.quantization_config


def method_of(config: Any) -> Any:
    """The quantization that a configuration states, of whatever tool."""
    found = getattr(config, "quantization_config", None)
    given = found if isinstance(found, dict) else getattr(found, "__dict__", {})
    return given.get("quant_method")


register()
