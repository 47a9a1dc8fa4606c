"""The models that the engine runs itself: one file each, of the parts in `layers`.

All others are transformers' own, on the engine's cache where that is possible (`hosted`).
"""

from anybit.errors import InvalidInput


class UnknownModel(InvalidInput):
    """The engine lacks a model, or a part of it that its config.json asks for."""
