"""The models that the engine runs itself, as `layers.Decoder`s of the parts in `parts`.

Those that differ from Llama in options alone are in `llama`, the others have a file each.

All others are transformers' own, on the engine's cache where that is possible (`hosted`).
"""

from anybit.errors import InvalidInput


class UnknownModel(InvalidInput):
    """The engine lacks a model, or a part of it that its config.json asks for."""
