"""The lists of blocks that a model has."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from anybit.errors import InvalidInput


class Blocks(NamedTuple):
    """A list of blocks that run one after the other.

    name: of the list in the model. modules: the blocks. encoder: whose output they read, for the
    decoder of an encoder-decoder.
    """

    name: str
    modules: list[nn.Module]
    encoder: nn.Module | None = None


def block_lists(model: nn.Module, names: list[str]) -> list[Blocks]:
    """The lists of blocks that hold the named layers, in the order of the forward pass.

    Args:
        model: A decoder, an encoder, or one of both.
        names: Layers to be quantized.

    Returns:
        One list, or the encoder's and the decoder's of an encoder-decoder.

    Raises:
        InvalidInput: As `find_blocks` does.
    """
    config: Any = getattr(model, "config", None)
    encoder = model.get_encoder() if getattr(config, "is_encoder_decoder", False) else None  # type: ignore[operator]
    name = next((n for n, m in model.named_modules() if m is encoder), "")
    own = [n for n in names if name and n.startswith(f"{name}.")]
    if not own:
        return [Blocks(*find_blocks(model, names))]
    out = [Blocks(*find_blocks(model, own))]
    rest = [n for n in names if n not in set(own)]
    if any(isinstance(m, nn.ModuleList) and n and holds(n, rest) for n, m in model.named_modules()):
        out.append(Blocks(*find_blocks(model, rest), encoder))
    return out


def holds(name: str, layers: Iterable[str]) -> bool:
    """Whether any of the layers is below the module of this name."""
    return any(layer.startswith(f"{name}.") for layer in layers)


def find_blocks(model: nn.Module, names: list[str]) -> tuple[str, list[nn.Module]]:
    """The decoder's blocks: the outermost ModuleList that holds most of the named layers.

    Of a model with several parts (vision, audio) it is one of the part for text.

    Args:
        model: A decoder.
        names: Layers to be quantized.

    Returns:
        The list's name in the model, and the blocks.

    Raises:
        InvalidInput: No ModuleList holds any of the layers.
    """
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    held = {n: sum(name.startswith(f"{n}.") for name in names) for n in lists}
    held = {n: count for n, count in held.items() if count}
    if not held:
        found = ", ".join(lists) or "none"
        raise InvalidInput(
            f"{type(model).__name__}: looked for a torch.nn.ModuleList of decoder blocks that "
            f"holds {', '.join(names[:3])}; the ModuleLists of the model are: {found}. Quantize "
            "without calibration (RTN, Clip, HQQ), or name layers inside the blocks"
        )
    text = [n for n in held if is_of_text(model, n)]
    best = max(text or held, key=lambda n: (held[n], -n.count(".")))
    return best, list(lists[best])


def is_of_text(model: Any, name: str) -> bool:
    """Whether the innermost model around a module is configured as the part for text is."""
    try:
        text = type(model.config.get_text_config(decoder=True))
    except (AttributeError, ValueError):  # no model of transformers, or several parts are for text
        return True
    parts = name.split(".")
    above = (model.get_submodule(".".join(parts[:end])) for end in reversed(range(len(parts))))
    return isinstance(next(m.config for m in above if hasattr(m, "config")), text)
