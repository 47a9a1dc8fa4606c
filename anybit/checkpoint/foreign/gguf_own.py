"""The metadata of a GGUF file's architecture, each key of which is understood or refused."""

import math
from typing import Any

from anybit.checkpoint.foreign.gguf_families import (
    COMMON,
    NOT_IDLE,
    OFF,
    OTHERS,
    ROPE,
    USUAL,
    Family,
)
from anybit.checkpoint.foreign.gguf_file import Contents
from anybit.errors import InvalidInput

EXTRAPOLATED = "rope.scaling.yarn_ext_factor"


class Own:
    """The metadata of a file's architecture."""

    def __init__(self, contents: Contents, family: Family):
        prefix = f"{family.arch}."
        self.contents, self.path, self.arch = contents, contents.files[0], family.arch
        self.values = {
            key.removeprefix(prefix): value
            for key, value in contents.metadata.items()
            if key.startswith(prefix)
        }
        self.known = {*COMMON, *family.keys, *ROPE, *OTHERS}

    def number(self, key: str, default: Any = None) -> Any:
        """A number that is not below 0; of one for each layer, that of all."""
        self.known.add(key)
        value = self.values.get(key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise InvalidInput(f"{self.path}: {self.arch}.{key} is not the same in all layers")
            value = value[0]
        if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise InvalidInput(f"{self.path}: {self.arch}.{key} is {str(value)[:40]!r}, no number")
        return value

    def text(self, key: str, default: str) -> str:
        """A word."""
        value = self.values.get(key, default)
        return value if isinstance(value, str) else repr(value)

    def flag(self, key: str, default: bool) -> bool:
        """Yes or no."""
        self.known.add(key)
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise InvalidInput(f"{self.path}: {self.arch}.{key} is {str(value)[:40]!r}, no boolean")
        return value

    def extrapolates(self, factor: float, scaling: str) -> None:
        """Note YaRN's share of frequencies that are not stretched, where it changes nothing.

        Args:
            factor: How far positions are stretched.
            scaling: How; YaRN's usual share is 1, that of others 0, and below 0 is the usual one.
        """
        share = self.values.get(EXTRAPOLATED)
        if not isinstance(share, float) or not math.isfinite(share):
            return
        if factor == 1 or share < 0 or share == (scaling == "yarn"):
            self.known.add(EXTRAPOLATED)

    def has(self, end: str) -> bool:
        """Whether some tensor's name ends like this."""
        return any(name.endswith(end) for name in self.contents.tensors)

    def each_layer(self, key: str) -> list[Any]:
        """What a key says of every layer of the file; InvalidInput where it does not."""
        self.known.add(key)
        values, layers = self.values.get(key), self.contents.metadata[f"{self.arch}.block_count"]
        if not isinstance(values, list) or len(values) != layers:
            raise InvalidInput(f"{self.path}: has no {key} for each layer")
        return values

    def layers(self) -> int:
        """Of the model; those that draft tokens are no part of it."""
        return int(self.number("block_count", 0) - self.number("nextn_predict_layers", 0))

    def check_all_known(self) -> None:
        """InvalidInput when there is a key that nothing here understands."""

        def idle(key: str, value: Any) -> bool:
            if isinstance(value, bool):
                return not value and key in OFF
            return value == USUAL.get(key) or (value in (0, "", None) and key not in NOT_IDLE)

        unknown = [k for k, v in self.values.items() if k not in self.known and not idle(k, v)]
        if unknown:
            key = unknown[0]
            raise InvalidInput(
                f"{self.path}: {self.arch}.{key} is {str(self.values[key])[:40]}, which anybit "
                "does not understand; convert the original model instead"
            )
