"""Grammars of calls as `<function=NAME>`, of texts that `functions.called` reads as they are."""

import json
import re
from collections.abc import Callable
from typing import Any

from anybit.engine.references import NOTES, followed, resolved, target
from anybit.engine.schemas import KINDS, json_rule, kind, kinds
from anybit.serve.functions import CLOSE, OPEN, typed

# What a value would be cut at: another parameter, and two marks of a call in a row.
ENDS, SPACE = "|".join(CLOSE), r"[\s\x1c-\x1f]"  # which Python strips
CUTS = f"(</parameter|<parameter=|({ENDS}){SPACE}*({'|'.join((ENDS, *OPEN))}))"
CUTS = CUTS.replace("/", "\\/")
TEXT = f"/(?s:.*)/ & ~/(?s:.*){CUTS}(?s:.*)/"
SCALARS = {
    "null": '"null"',
    "boolean": '"true" | "false"',
    "integer": "/-?(0|[1-9][0-9]{0,14})/",
    "number": r"/-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?/",
}
NAME = re.compile(r"[^\s\"'>]([^>\n]*[^\s\"'>])?")
ROOT = {"type", "properties", "required", "additionalProperties"}
ASIDE = NOTES | {"$schema", "$id", "$defs", "definitions"}


class Unwritable(Exception):
    """The form cannot write all values of a schema, or would read others as values of it."""


class Functions:
    """Rules for calls of several functions. mark: from a mark to its notation."""

    def __init__(self, mark: Callable[[str], str]):
        self.mark = mark
        self.terminals: dict[str, str] = {}  # their names by their definitions

    def rules(self) -> str:
        """Definitions of what the expressions name."""
        return "".join(f"{name}: {text}\n" for text, name in self.terminals.items())

    def call(self, name: str, schema: dict[str, Any]) -> str:
        """A Lark expression of a function's calls. schema: an object, the parameters' document.

        Raises:
            Unwritable: The call must be written otherwise.
        """
        top = resolved(schema, schema)
        if not isinstance(top, dict) or top.keys() - ROOT - ASIDE:
            raise Unwritable
        declared, required = top.get("properties", {}), top.get("required", [])
        if not isinstance(declared, dict) or not isinstance(required, list):
            raise Unwritable
        if not all(isinstance(key, str) for key in required):
            raise Unwritable
        declared, rest = {**declared}, top.get("additionalProperties", not declared)
        for key in required:
            declared.setdefault(key, top.get("additionalProperties", True))
        out = [self.mark("<function="), quoted(f"{name}>\n")]
        for key, inner in declared.items():
            if not NAME.fullmatch(key):
                raise Unwritable
            one = self.parameter(quoted(f"{key}>\n"), inner, schema)
            out.append(one if key in required else f"({one})?")
        if rest is not False:
            names = self.terminal(" | ".join(map(quoted, declared)) or '"-"')
            key = self.terminal(f'{self.terminal(f"/[a-zA-Z0-9_.-]+/ & ~{names}")} ">\\n"')
            out.append(f"({self.parameter(key, rest, schema)})*")
        return " ".join([*out, self.mark("</function>")])

    def parameter(self, key: str, schema: Any, root: dict[str, Any]) -> str:
        return f'{self.mark("<parameter=")} {key} {self.value(schema, root)} "\\n"'

    def terminal(self, text: str) -> str:
        return self.terminals.setdefault(text, f"T{len(self.terminals)}")

    def value(self, schema: Any, root: dict[str, Any]) -> str:
        """An expression of a value and its end mark."""
        end = self.mark("</parameter>")
        if schema is not True and not isinstance(schema, dict):
            raise Unwritable
        if "string" not in kinds(schema, root):
            return f'{json_rule(document(schema, root))} "\\n" {end}'
        parts = leaves(schema, root)
        others = [part for part in parts if part.get("type") in ("array", "object")]
        texts = texts_of([part for part in parts if part not in others])
        text = self.terminal(" | ".join(self.terminal(each) for each in texts))
        if others:
            text = self.terminal(f"{text} & ~/{SPACE}*[\\[{{](?s:.*)/")
        # The end is a part of the text's terminal, which would take it for more text.
        inside, behind = ("</parameter>", "") if end.startswith('"') else ("", f" {end}")
        out = self.terminal(f"{text} {quoted(chr(10) + inside)}") + behind
        rules = [f'{json_rule(document(other, root))} "\\n" {end}' for other in others]
        return f"({' | '.join([out, *rules])})"


def texts_of(parts: list[dict[str, Any]]) -> list[str]:
    """Terminals of values of parts of a schema, one of which is a string."""
    out: list[str] = []
    kept: set[str] = set()  # types of which not all values are taken
    free = False  # whether any text is one
    for part in parts:
        types, keys = part.get("type"), part.keys() - NOTES
        if "enum" in part or "const" in part:
            if keys - {"type", "enum", "const"} or {"enum", "const"} <= keys:
                raise Unwritable
            options = [part["const"]] if "const" in part else part["enum"]
            out += [listed(option, parts) for option in options]
            kept |= {kind(option) for option in options} - {"string", "null"}
        elif keys - {"type", "minLength"} or part.get("minLength", 0) not in (0, 1):
            raise Unwritable  # lengths beside what a text must not hold take a lexer too long
        elif types in SCALARS:
            out.append(SCALARS[types])
        else:
            free = True
            out.append(f"{TEXT} & /(?s:.+)/" if part.get("minLength") else TEXT)
    if not out or (free and kept):
        raise Unwritable
    return out


def listed(option: Any, parts: list[dict[str, Any]]) -> str:
    """A value of an enumeration, which must be read as what it is."""
    text = option if isinstance(option, str) else json.dumps(option)
    read = typed(text, {"anyOf": parts}, {})
    if re.search(CUTS, text) or read != json.dumps(option, ensure_ascii=False):
        raise Unwritable
    return quoted(text)


def leaves(schema: Any, root: Any) -> list[dict[str, Any]]:
    """The parts of a schema of which values are any, each of one type or of all."""
    out: list[dict[str, Any]] = []
    for part in followed({} if schema is True else schema, root):
        keys, types, inner = part.keys() - NOTES, part.get("type"), part.get("anyOf")
        if keys == {"$ref"}:
            inner = [target(part["$ref"], root)]
        if keys in ({"$ref"}, {"anyOf"}):
            if not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
                raise Unwritable
            continue
        options = types if isinstance(types, list) else [types]
        if types is None and keys - {"enum", "const"}:
            raise Unwritable
        if types is not None and set(map(str, options)) - KINDS:
            raise Unwritable
        if keys & {"$ref", "allOf", "anyOf", "oneOf"} or not isinstance(part.get("enum", []), list):
            raise Unwritable
        out += [narrowed(part, each, root) for each in options] if options is types else [part]
    return out


def narrowed(part: dict[str, Any], to: Any, root: Any) -> dict[str, Any]:
    """A schema of several types as of one of them."""
    leaf = part | {"type": to}
    if "enum" in leaf:
        leaf["enum"] = [value for value in leaf["enum"] if to in kinds({"const": value}, root)]
    return leaf


def document(schema: Any, root: dict[str, Any]) -> Any:
    """A part of a document as one of its own, of its draft: its references lead into the other."""
    draft = {"$schema": root["$schema"]} if "$schema" in root else {}
    if '"$ref"' not in json.dumps(schema):
        return draft if schema is True else schema | draft
    inner = {key: moved(value) for key, value in root.items() if key != "$id"}
    return moved(schema) | {"$defs": {"root": inner}} | draft


def moved(schema: Any) -> Any:
    """A schema whose references lead to where `document` puts the root."""
    if isinstance(schema, list):
        return [moved(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: moved(value) for key, value in schema.items()}
    ref = out.get("$ref")
    if isinstance(ref, str) and ref.startswith("#"):
        out["$ref"] = f"#/$defs/root{ref[1:]}"
    return out


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
