"""The models that the engine runs itself: one file each, of the parts in `layers`."""

from anybit.errors import InvalidInput


class UnknownModel(InvalidInput):
    """The engine lacks a model, or a part of it that its config.json asks for."""
