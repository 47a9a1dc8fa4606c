"""What transformers writes for a quantized model: config.json says what the layers are by then.

Parts of a model may have been quantized, or made dense again, by themselves, and a part may be
saved by itself. Without the formats in its config.json, such a checkpoint would be loaded with
random weights, and no more than a warning.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

from transformers import modeling_utils

from anybit.checkpoint.names import codes_as_they_are
from anybit.nn.model import plan_in, quantized_modules
from anybit.nn.plan import METHOD, quantization_config


def register() -> None:
    """Have `save_pretrained` of all models look at their layers first. Idempotent."""
    kind: Any = modeling_utils.PreTrainedModel
    plain = kind.save_pretrained
    if hasattr(plain, "of_anybit"):
        return

    @wraps(plain)
    def save_pretrained(self: Any, *args: Any, **options: Any) -> Any:
        if getattr(self, "peft_config", None):  # of which it writes the adapters alone
            return plain(self, *args, **options)
        quantized = dict(quantized_modules(self))
        names = codes_as_they_are(self) if quantized else nullcontext()
        with stated(self.config, plan_in(self) if quantized else None), names:
            return plain(self, *args, **options)

    save_pretrained.of_anybit = True  # type: ignore[attr-defined]
    kind.save_pretrained = save_pretrained


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
