"""Classes of configurations without what their validators import and a start does not need.

transformers' validators of fields, which Llama's configuration has, import its table of
activations, and that torch's distributed tensors, sympy and 600 further modules: seconds of a
start. Here the table comes when it is looked at.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

TABLE, VALIDATORS = "transformers.activations", "transformers.utils.type_validators"


class Activations(Mapping[str, Any]):
    """transformers' table of activations, imported when it is looked at."""

    def _table(self) -> Mapping[str, Any]:
        from transformers.activations import ACT2FN

        table: Mapping[str, Any] = ACT2FN
        return table

    def __getitem__(self, name: str) -> Any:
        return self._table()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table())

    def __len__(self) -> int:
        return len(self._table())


def import_validators() -> None:
    """Import the validators with that table, unless either is there already."""
    if {TABLE, VALIDATORS} & sys.modules.keys():
        return
    late = ModuleType(TABLE)
    late.ACT2FN = Activations()  # type: ignore[attr-defined]
    sys.modules[TABLE] = late
    try:
        with suppress(ImportError):  # of other releases, which import it as they do
            import transformers.utils.type_validators  # noqa: F401
    finally:
        sys.modules.pop(TABLE, None)  # which another thread may have done
