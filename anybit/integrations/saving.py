"""What transformers writes for a quantized model: config.json says what the layers are by then.

Parts of a model may have been quantized, or made dense again, by themselves, and a part may be
saved by itself. Without the formats in its config.json, such a checkpoint would be loaded with
random weights, and no more than a warning.
"""

from functools import wraps
from typing import Any

from transformers import modeling_utils

from anybit.checkpoint.names import codes_as_they_are
from anybit.nn.model import plan_in, quantized_layers, record
from anybit.nn.plan import METHOD


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
        if any(True for _ in quantized_layers(self)):
            record(self, plan_in(self))
            with codes_as_they_are(self):
                return plain(self, *args, **options)
        if method_of(self.config) == METHOD:
            record(self, None)
        return plain(self, *args, **options)

    save_pretrained.of_anybit = True  # type: ignore[attr-defined]
    kind.save_pretrained = save_pretrained


def method_of(config: Any) -> Any:
    """The quantization that a configuration states, of whatever tool."""
    found = getattr(config, "quantization_config", None)
    given = found if isinstance(found, dict) else getattr(found, "__dict__", {})
    return given.get("quant_method")


register()
