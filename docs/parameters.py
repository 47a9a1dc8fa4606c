"""Parameters in docstrings ("name: what it is") become list items in the API pages."""

import re
from typing import Any

import griffe

ITEM = re.compile(r"^(?=[a-z_]+(, [a-z_]+)*: )", re.M)
FIRST = re.compile(r"(?<=\S)\n(?=- [a-z_]+(, [a-z_]+)*: )")


class Parameters(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = FIRST.sub("\n\n", ITEM.sub("- ", obj.docstring.value))
