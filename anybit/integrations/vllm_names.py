"""What vLLM's models, transformers' and checkpoints call the same layer."""

from typing import Any

from torch import nn

from anybit.errors import InvalidInput


def merged_in(model: nn.Module) -> dict[str, list[str]]:
    """Parts of merged layers, by the last parts of their names, as a model's parts load them."""
    out: dict[str, list[str]] = {}
    for module in model.modules():
        stacked = getattr(getattr(module, "hf_to_vllm_mapper", None), "orig_to_new_stacked", {})
        for part, (merged, _) in stacked.items():
            parts = out.setdefault(merged.strip("."), [])
            parts += [part.strip(".")] * (part.strip(".") not in parts)
    return out


def renamed(layer: str, renamings: list[Any]) -> str:
    """The name of a layer in transformers' model."""
    from transformers.core_model_loading import rename_source_key

    return str(rename_source_key(f"{layer}.weight", renamings, [])[0]).removesuffix(".weight")


def block_and_last(name: str) -> tuple[str, str]:
    """A layer's block, up to the last number of its name, and the last part of the name."""
    parts = name.split(".")
    ends = [at for at, part in enumerate(parts[:-1], 1) if part.isdigit()]
    return ".".join(parts[: ends[-1]]) if ends else "", parts[-1]


def transformers_class(config: Any, architectures: list[str] | None, model_name: str) -> Any:
    """The class of transformers for a checkpoint, whose modules say what a linear layer is.

    architectures: names of classes; None for the configuration's.

    Raises:
        InvalidInput: transformers has none.
    """
    import transformers

    names = architectures or getattr(config, "architectures", None) or ()
    for name in names:
        kind = getattr(transformers, name, None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind
    raise InvalidInput(
        f"{model_name}: transformers {transformers.__version__} has no class "
        f"{', '.join(names) or 'for an unnamed architecture'}, which would "
        "say what layers can be quantized; use a checkpoint that is quantized already"
    )
