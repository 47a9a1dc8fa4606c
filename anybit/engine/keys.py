"""Keys of objects in JSON schemas: however they are spelled, a declared one is no other."""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

# In a pattern: classes of all characters but some; those that JSON escapes in any place.
NEGATED = re.compile(r"\\.|\[\^((?:\\.|[^\]\\])+)\]", re.DOTALL)  # or an escape, as it is
QUOTED = re.compile(r'"|\\\\|\\x\{?(22|5[cC])')
# Names of declared properties from which others are told apart, in characters: all, and one.
NAMES, LONGEST = 2000, 100
# What a pattern's matches begin with, if it says so, and no option or repetition is about that.
HEAD = re.compile(r"\^((?:[\w-](?![?*{]))*)[^|]*")


def declared(parts: list[dict[str, Any]]) -> list[str]:
    """Names that objects declare or require."""
    found: dict[Any, None] = {}
    for part in parts:
        properties, required = part.get("properties"), part.get("required")
        found |= dict.fromkeys(properties if isinstance(properties, dict) else ())
        found |= dict.fromkeys(map(str, required) if isinstance(required, list) else ())
    return [*found]


def name_keys(schema: dict[str, Any], names: Iterable[str], patterns: Iterable[str]) -> None:
    """Have further keys of an object match a pattern, as which no declared one can be written.

    What llguidance takes as a further key is not declared as it stands there, but may be once its
    escapes are read: `\\u0061` is `a`. A pattern is matched with what they stand for. Objects that
    are merged declare all of these names, and so have one pattern. Where they have patterns of
    their own, they declare these, and get no further keys; nor where there are very many names, or
    long ones, of which a pattern would take seconds to compile.
    """
    rest, required = schema.get("additionalProperties", True), schema.get("required")
    properties, own = schema.setdefault("properties", {}), schema.get("patternProperties") or {}
    for name in [*(required if isinstance(required, list) else ()), *names]:
        properties.setdefault(name, True if any(matches(each, name) for each in own) else rest)
    own |= {each: own.get(each, rest) for each in patterns}
    schema["additionalProperties"] = False
    sizes = [len(name) for name in properties]
    if not own and sum(sizes) <= NAMES and max(sizes, default=0) <= LONGEST:
        own = {f"^{others([*properties])}$": rest}
    schema["patternProperties"] = own


def patterns_of(schemas: dict[str, Any]) -> dict[str, Any]:
    """Schemas by patterns of keys; those of one schema that a key may match both as one pattern.

    llguidance takes no key that matches two. Of two schemas, a key of both would need a pattern of
    its own, and so would the keys of one alone.
    """
    out: dict[str, Any] = {}
    for each, schema in schemas.items():
        new, text = pattern(each), json.dumps(schema)
        alike = [p for p, known in out.items() if json.dumps(known) == text and not apart(p, new)]
        for other in alike:
            new = f"({other})|({new})"
            del out[other]
        out[new] = schema
    return out


def apart(one: str, other: str) -> bool:
    """Whether it is plain that no key matches both patterns: they begin with different texts."""
    heads = [found[1] if (found := HEAD.fullmatch(each)) else "" for each in (one, other)]
    short, long = sorted(heads, key=len)
    return not long.startswith(short)


def matches(pattern: str, name: str) -> bool:
    """Whether a name matches; if Python cannot say, not."""
    with suppress(re.error):
        return bool(re.search(pattern, name))
    return False


def others(names: list[str]) -> str:
    """A regular expression of all texts but those names."""
    heads: dict[str, list[str]] = {}
    for name in names:
        if name:
            heads.setdefault(name[0], []).append(name[1:])
    codes = {char: f"\\x{{{ord(char):x}}}" for char in sorted(heads)}
    options = [pattern(f"[^{''.join(codes.values())}]") + "(?s:.)*" if codes else "(?s:.)+"]
    options += [codes[char] + others(heads[char]) for char in codes]
    return f"({'|'.join(options)}){'' if '' in names else '?'}"


def pattern(text: str) -> str:
    """A pattern whose classes that exclude `"` or `\\` exclude the character 0, too.

    Or else llguidance lets in both, as it does where all control characters may come.
    """

    def without_zero(found: re.Match[str]) -> str:
        inside = found[1] or ""
        return f"[^\\x{{0}}{inside}]" if QUOTED.search(inside) else found[0]

    return NEGATED.sub(without_zero, text)
