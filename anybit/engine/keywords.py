"""What stands behind the keywords of JSON Schema: values of a wrong kind, by keyword and value."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from anybit.errors import InvalidInput

OLD = re.compile("draft-0[0-3]")
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


class Kind(NamedTuple):
    """What a keyword takes, in words. fits: whether a value is that. parts: the schemas in it."""

    words: str
    fits: Callable[[Any], bool]
    parts: Callable[[Any], list[Any]] = lambda value: []


def is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(text: str) -> int | float:
    """A number with a point or an exponent, as an integer if it is one that doubles tell apart."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def are_schemas(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_schema, value))


def are_types(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) for name in names)


def are_names(value: Any) -> bool:
    """Or true or false, which draft 3 has at a property; nothing reads it there any more."""
    return isinstance(value, bool) or (
        isinstance(value, list) and all(isinstance(name, str) for name in value)
    )


TEXT = Kind("a string", lambda value: isinstance(value, str))
COUNT = Kind("a whole number of 0 to 2**53", is_count)
NUMBER = Kind("a number", is_number)
BOUND = Kind("a number", lambda value: is_number(value) or isinstance(value, bool))  # draft 4
DRAFT = Kind(
    "the name of draft 4 or of a later one",  # others have keywords that later ones ignore
    lambda value: isinstance(value, str) and not OLD.search(value),
)
SCHEMA = Kind("a schema (an object, true or false)", is_schema, lambda value: [value])
SCHEMAS = Kind("a list of schemas", are_schemas, list)
ITEMS = Kind(
    "a schema (an object, true or false) or a list of schemas",
    lambda value: is_schema(value) or are_schemas(value),
    lambda value: value if isinstance(value, list) else [value],
)
NAMED = Kind(
    "an object of schemas (objects, true or false)",
    lambda value: isinstance(value, dict) and all(map(is_schema, value.values())),
    lambda value: [*value.values()],
)
KINDS = {
    "$schema": DRAFT,
    "type": Kind(f"one of {', '.join(TYPES)}, or a list of them", are_types),  # names: llguidance
    "required": Kind("a list of strings", are_names),
    "enum": Kind("a list", lambda value: isinstance(value, list)),
    "items": ITEMS,
    **dict.fromkeys(("pattern", "format", "$ref"), TEXT),
    **dict.fromkeys(
        [f"{side}{what}" for side in ("min", "max") for what in ("Length", "Items", "Properties")],
        COUNT,
    ),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), BOUND),
    **dict.fromkeys(("additionalProperties", "additionalItems", "not"), SCHEMA),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), SCHEMAS),
    # Definitions are looked at where one refers to them.
    **dict.fromkeys(("properties", "patternProperties"), NAMED),
}


def check_keywords(schema: Any, target: Callable[[Any], Any]) -> None:
    """InvalidInput for a keyword whose value is of a wrong kind, in a schema or its parts.

    target: what a reference leads to.
    """
    for part in parts_of(schema, target):
        for key, value in part.items():
            kind = KINDS.get(key)
            if kind is not None and not kind.fits(value):
                given = json.dumps(value)[:100]
                raise InvalidInput(f"the JSON schema: {key} is {given}, not {kind.words}")


def parts_of(schema: Any, target: Callable[[Any], Any]) -> Iterator[dict[str, Any]]:
    """A schema, and all that are in it or that its references lead to, each once.

    target: as of `check_keywords`. What is of a wrong kind has no parts.
    """
    todo, seen = [schema], set[int]()
    while todo:
        part = todo.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        for key, value in part.items():
            kind = KINDS.get(key)
            todo += kind.parts(value) if kind is not None and kind.fits(value) else []
        todo.append(target(part.get("$ref")))
