"""References in JSON schemas: what they name, and what applies beside them."""

import re
from collections import deque
from typing import Any
from urllib.parse import unquote

from anybit.engine.keywords import parts_of

NOTES = frozenset(
    (
        "title",
        "description",
        "$comment",
        "default",
        "example",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
    )
)
OLD = re.compile("draft-0[4-7]")  # in which nothing applies beside a reference
BESIDE = {"$ref", "$schema", "$defs", "definitions", "x-guidance"}  # which say nothing of values
DRAFT = re.compile(r"https?(://json-schema\.org/draft(-0|/)[\d-]+/schema)#?")


def effective(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """What applies of a schema: until draft 7, of one with a reference that alone."""
    old = isinstance(root, dict) and OLD.search(str(root.get("$schema")))
    if not old or not isinstance(schema.get("$ref"), str) or schema.keys() <= BESIDE:
        return schema
    return {key: value for key, value in schema.items() if key in BESIDE}


def drop_ignored(root: dict[str, Any]) -> None:
    """Take from a document what does not apply, and give its draft the name that it has."""
    for part in [*parts_of(root, lambda ref: target(ref, root))]:
        kept = effective(part, root)
        for key in part.keys() - kept.keys() - ({"$id", "id"} if part is root else set()):
            del part[key]
    if found := DRAFT.fullmatch(str(root.get("$schema"))):
        root["$schema"] = f"http{'s' if found[2] == '/' else ''}{found[1]}"


def resolved(schema: Any, root: Any) -> Any:
    """What a schema refers to in a document, if it does nothing but that."""
    for _ in range(8):
        if not isinstance(schema, dict):
            break
        schema = effective(schema, root)
        if schema.keys() - NOTES != {"$ref"}:
            break
        schema = target(schema["$ref"], root)
    return schema


def target(ref: Any, root: Any) -> Any:
    """What a reference names in a document; None if it is of another document, or names nothing."""
    if ref == "#":
        return root
    if not isinstance(ref, str) or ref[:2] != "#/":
        return None
    found = root
    for part in unquote(ref[2:]).split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            found = found.get(part) if isinstance(found, dict) else None
    return found


def followed(schema: Any, root: Any) -> list[dict[str, Any]]:
    """A schema, and those that it refers to or has as parts or options, each once."""
    out: list[dict[str, Any]] = []
    todo, seen = deque([schema]), set()
    while todo:
        part = todo.popleft()
        if isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            part = effective(part, root)
            out.append(part)
            todo.append(target(part.get("$ref"), root))
            for key in ("allOf", "anyOf", "oneOf"):
                options = part.get(key)
                todo += options if isinstance(options, list) else []
    return out


def place(part: Any, root: Any) -> str:
    """Where a part stands in a document, as a reference."""
    todo: list[tuple[str, Any]] = [("#", root)]
    for path, value in todo:
        if value is part:
            return path
        inside = dict(enumerate(value)) if isinstance(value, list) else value
        if isinstance(inside, dict):
            todo += [(f"{path}/{key}", inner) for key, inner in inside.items()]
    return "#"
