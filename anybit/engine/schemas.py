"""JSON schemas as llguidance enforces them: what it would round, ignore or not know.

llguidance keeps numbers as doubles, which it reads with an error of up to one unit in the last
place, and integers of 64 bits. What it cannot keep is refused.
"""

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from itertools import combinations
from typing import Any, NoReturn
from urllib.parse import urldefrag, urljoin

from anybit.engine.keys import declared, name_keys, pattern, patterns_of
from anybit.engine.keywords import TYPES, check_keywords, is_number, number
from anybit.engine.references import (
    NOTES,
    drop_ignored,
    effective,
    followed,
    place,
    resolved,
    target,
)
from anybit.errors import InvalidInput

# White space as models write it: none, or one space behind `,` and `:`. Where a grammar lets them,
# models that have nothing to say write it for ever.
GUIDANCE = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
ITEMS = ("items", "prefixItems", "additionalItems")
PARTS = frozenset(("properties", "patternProperties", "additionalProperties", "required", *ITEMS))
SIDES = ("minimum", "maximum")
BOUNDS = {"minimum": -1, "maximum": 1, "exclusiveMinimum": -1, "exclusiveMaximum": 1}
# Of JSON Schema. Others are annotations, such as pydantic's `binary` and OpenAPI's `int64`.
FORMATS = frozenset(
    (
        "date-time",
        "date",
        "time",
        "duration",
        "email",
        "idn-email",
        "hostname",
        "idn-hostname",
        "ipv4",
        "ipv6",
        "uri",
        "uri-reference",
        "iri",
        "iri-reference",
        "uuid",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
        "regex",
    )
)
KINDS = frozenset(TYPES)
PYTHON: tuple[tuple[Any, str], ...] = (  # in this order: True is an int, too
    (type(None), "null"),
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list | tuple, "array"),
    (dict, "object"),
)
OPTIONS = 500  # of oneOf, of which each two are compared
STEPS = 100_000  # parts that are merged, counted for each merger
MERGED = 100_000  # characters of the names that all objects which are merged get
LOCAL, BY_NAME = re.compile(r'"\$ref": "#["/]'), re.compile(r'"\$ref": "(?!#["/])')
INT64 = 2**63
LOWEST = 1024 - INT64  # the lowest that llguidance can bound integers by, 1024 above int64's


def json_rule(schema: Any) -> str:
    """A JSON schema, as an object or as text, as a part of a Lark rule; True: any object.

    Raises:
        InvalidInput: It is no schema, or has numbers that llguidance would round.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"the JSON schema is not JSON: {error}") from None
    if schema is True:
        schema = {"type": "object"}
    if not isinstance(schema, dict):
        raise InvalidInput(f"the JSON schema is {schema!r:.100}; give an object")
    try:
        # Of tuples and numbers of other libraries, too.
        schema = json.loads(json.dumps(schema), parse_float=number)
        drop_ignored(schema)
        check_keywords(schema, lambda ref: target(ref, schema))
        text = json.dumps(Rewriter(schema).whole(), allow_nan=False)
    except InvalidInput:
        raise
    except RecursionError:
        raise InvalidInput("the JSON schema is nested too deeply; make it flatter") from None
    except (TypeError, ValueError) as error:  # a set, NaN, or an integer of thousands of digits
        raise InvalidInput(f"the JSON schema is not JSON: {error}") from None
    return f"%json {text}"


class Rewriter:
    """Of one schema document, into another that llguidance enforces exactly."""

    def __init__(self, root: dict[str, Any]):
        self.root = root
        self.multiples: set[Fraction] = set()
        self.merges = False  # whether llguidance makes one schema of several
        self.kinds: dict[str, frozenset[str]] = {}  # by reference
        # Objects with further properties than those declared: as they are, and rewritten.
        self.open: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.layers: dict[int, int] = {}  # of a part: its depth
        # Of a part that is merged with others: names and patterns of properties of all of them.
        self.joined: dict[int, tuple[dict[str, None], dict[str, None]]] = {}
        self.groups: set[frozenset[int]] = set()  # of parts that were joined
        # What names of parts are relative to, and the parts by (URI, fragment).
        self.base, self.names = "", {("", ""): root}
        self.named = BY_NAME.search(json.dumps(root)) is not None  # whether a reference has a name
        self.merged = self.steps = 0  # characters of names that objects have got; parts

    def whole(self) -> dict[str, Any]:
        out: dict[str, Any] = self.schema(self.root)
        given = out.get("x-guidance", {})
        if not isinstance(given, dict):
            raise InvalidInput("the JSON schema: x-guidance is not an object")
        out["x-guidance"] = GUIDANCE | given
        merged = [self.joined.get(id(source)) or ({}, {}) for source, _ in self.open]
        for (_, inner), (names, patterns) in zip(self.open, merged, strict=True):
            name_keys(inner, names, patterns)
        scale = math.lcm(*(m.denominator for m in self.multiples))
        factors = [int(m * scale) for m in self.multiples]
        if self.merges and len(factors) > 1 and math.lcm(*factors) * max(factors) >= 2**32:
            raise InvalidInput(
                "the JSON schema: its values of multipleOf have no common multiple of 32 bits; "
                "leave some out"
            )
        return out

    def schema(self, schema: Any) -> Any:
        """A schema, or a list or a map of schemas under a keyword that is not known."""
        if isinstance(schema, list):
            return [self.schema(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        outside = self.enter(schema)
        out: dict[str, Any] = {}
        for key, value in schema.items():
            if key in NOTES or (key == "uniqueItems" and isinstance(value, bool)):
                continue
            if key == "format" and isinstance(value, str) and value not in FORMATS:
                continue
            if key in NAMED and isinstance(value, dict):
                named = patterns_of(value) if key == "patternProperties" else value
                out[key] = {name: self.schema(inner) for name, inner in named.items()}
            elif key == "oneOf" and "anyOf" not in schema and self.exclusive(value):
                out["anyOf"] = self.schema(value)
            elif key == "pattern" and isinstance(value, str):
                out[key] = pattern(value)
            elif key in ("enum", "const"):
                check_data(value)
                out[key] = value
            else:
                out[key] = value if key.startswith("x-") else self.schema(value)
        if "prefixItems" in out and not isinstance(out.get("items"), list):
            # Beside additionalItems, of earlier drafts, llguidance ignores prefixItems.
            rest = out.pop("additionalItems", True)
            out.setdefault("items", rest)
        bounded(out)
        count_keys(out)
        if is_number(out.get("multipleOf")):
            self.multiples.add(multiple(out["multipleOf"]))
        applied = out.keys() & {"$ref", "anyOf", "oneOf", "enum", "const"}
        merges = "allOf" in out or bool(applied and out.keys() - applied - NAMED)
        self.merges |= merges
        if merges and self.depth(schema) > 1:
            self.join([schema])
        names = declared([out]) or out.get("patternProperties")
        if names and out.get("additionalProperties") is not False:
            self.open.append((schema, out))
        self.base = outside
        return out

    def enter(self, schema: dict[str, Any]) -> str:
        """Note the names of a part, and what they are relative to in it; what they were before.

        Refuse a name of the whole, or that references have, of another part that says something
        else: one would be enforced for both. And one of a part with references (`#`).
        """
        outside, key = self.base, "id" if "draft-04" in str(self.root.get("$schema")) else "$id"
        for keyword in (key, "$anchor", "$dynamicAnchor"):
            name = schema.get(keyword)
            if not isinstance(name, str):
                continue
            name = name if keyword == key else f"#{name}"
            uri, fragment = urldefrag(urljoin(self.base, name))
            if not name.startswith("#"):
                self.base, fragment = uri, ""
            first = self.names.setdefault((uri, fragment), schema)
            same = first is schema or json.dumps(first) == json.dumps(schema)
            if not same and (self.named or first is self.root):
                places = f"at {place(first, self.root)} and at {place(schema, self.root)}"
                raise InvalidInput(
                    f"the JSON schema: {keyword} {name!r:.100} names two schemas, {places:.300}; "
                    "rename one"
                )
            if uri != outside and schema is not self.root and LOCAL.search(json.dumps(schema)):
                raise InvalidInput(
                    f"the JSON schema: {key} {name!r:.100} has references (#) into a part of the "
                    f"schema instead of the whole; leave out that {key}"
                )
        return outside

    def depth(self, schema: Any) -> int:
        """How many schemas that say what its parts may be a value may have to fit; 2: or more."""
        if not isinstance(schema, dict):
            return 0
        if id(schema) not in self.layers:
            self.layers[id(schema)] = 0  # of a reference that leads here
            count = int(not schema.keys().isdisjoint(PARTS))
            count += self.depth(target(schema.get("$ref"), self.root))
            for key, of in (("allOf", sum), ("anyOf", max), ("oneOf", max)):
                options = schema.get(key)
                count += of(map(self.depth, options)) if options and type(options) is list else 0
            self.layers[id(schema)] = min(count, 2)
        return self.layers[id(schema)]

    def join(self, schemas: list[Any]) -> None:
        """Note what one value may be held to by several objects, and what its parts may be."""
        unique = {id(part): part for each in schemas for part in followed(each, self.root)}
        group, parts = frozenset(unique), [*unique.values()]
        if group in self.groups or sum(map(self.depth, schemas)) < 2:
            return
        self.groups.add(group)
        names = dict.fromkeys(declared(parts))
        mapped = [part for part in parts if isinstance(part.get("patternProperties"), dict)]
        patterns = {
            name: None for each in mapped for name in patterns_of(each["patternProperties"])
        }
        rests = [part.get("additionalProperties") for part in parts]
        rests += [inner for part in mapped for inner in part["patternProperties"].values()]
        rests = [rest for rest in rests if isinstance(rest, dict)]
        opened = [part for part in parts if part.get("additionalProperties") is not False]
        self.merged += len(opened) * sum(map(len, names))
        if self.merged > MERGED:
            raise InvalidInput(
                "the JSON schema: objects that are merged (allOf) have too many names; give them "
                "additionalProperties: false"
            )
        for part in opened:
            known = self.joined.setdefault(id(part), ({}, {}))
            known[0].update(names)
            known[1].update(patterns)
        inside: dict[str, list[Any]] = {}
        for part in parts:
            properties = part.get("properties")
            for name, inner in properties.items() if isinstance(properties, dict) else ():
                inside.setdefault(name, []).append(inner)
        self.steps += len(parts) + len(inside) * len(rests)
        if self.steps > STEPS:
            raise InvalidInput("the JSON schema: too many parts are merged; make it smaller")
        for inners in inside.values():
            self.join([*inners, *rests])
        self.join(rests)
        items = [part.get(key) for part in parts for key in ITEMS]
        self.join([each for item in items for each in (item if type(item) is list else [item])])

    def exclusive(self, options: Any) -> bool:
        """Whether a value fits one of these options at most, by its type or a required constant."""
        if not isinstance(options, list) or len(options) > OPTIONS:
            return False
        types = [kinds(option, self.root, self.kinds) for option in options]
        texts = [constants(resolved(option, self.root)) for option in options]

        def apart(one: int, other: int) -> bool:
            a, b = texts[one], texts[other]
            if types[one].isdisjoint(types[other]):
                return True
            return any(a[name].isdisjoint(b[name]) for name in a.keys() & b.keys())

        return all(apart(*pair) for pair in combinations(range(len(options)), 2))


def count_keys(schema: dict[str, Any]) -> None:
    """Refuse what two keys of one name would get round: they count as one."""
    least: Any = schema.get("minProperties")
    required = schema.get("required")
    known = len(set(map(str, required))) if isinstance(required, list) else 0
    if is_number(least) and least > max(known + 1, 1):
        raise InvalidInput(
            f"the JSON schema: minProperties {least} with {known} names in required cannot be "
            "kept, as keys may come twice; name more in required, or leave minProperties out"
        )


def kinds(schema: Any, root: Any, known: dict[str, frozenset[str]] | None = None) -> frozenset[str]:
    """The types of JSON that values of a schema in a document may have; all that are not excluded.

    root: the document, for references. known: those of references; all for one that leads here.
    """
    known = {} if known is None else known
    if schema is False:
        return frozenset()
    found = KINDS
    if not isinstance(schema, dict):
        return found
    schema = effective(schema, root)
    ref, types = schema.get("$ref"), schema.get("type")
    if isinstance(ref, str):
        if ref not in known:
            known[ref] = KINDS
            known[ref] = kinds(target(ref, root), root, known)
        found &= known[ref]
    if isinstance(types, str | list):
        found &= frozenset([types] if isinstance(types, str) else map(str, types))
        found |= {"integer"} if "number" in types else frozenset()
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list):
            found &= frozenset().union(*(kinds(option, root, known) for option in options))
    parts = schema.get("allOf")
    for part in parts if isinstance(parts, list) else ():
        found &= kinds(part, root, known)
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return found & frozenset(map(kind, listed)) if isinstance(listed, list) else found


def kind(value: Any) -> str:
    """The type of JSON that a value of Python has."""
    if isinstance(value, float) and value.is_integer():
        return "integer"
    return next((name for types, name in PYTHON if isinstance(value, types)), "")


def constants(schema: Any) -> dict[str, set[str]]:
    """The strings that each required property of an object may be, where they are listed."""
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return {}  # what is no object would not be told apart
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    out: dict[str, set[str]] = {}
    for name, inner in properties.items():
        if name in required and isinstance(inner, dict):
            listed = [inner["const"]] if "const" in inner else inner.get("enum")
            if isinstance(listed, list) and all(isinstance(value, str) for value in listed):
                out[name] = set(listed)
    return out


def refuse(value: Any, key: str, remedy: str) -> NoReturn:
    raise InvalidInput(
        f"the JSON schema: {value!r:.50} in {key} cannot be kept exactly, as a double; {remedy}"
    )


def check_data(value: Any) -> None:
    """Refuse numbers of enum or const that would be written with other digits."""
    if isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            check_data(inner)
    elif is_number(value) and value != INT64 - 1:  # which llguidance's conversion holds
        if abs(value) < INT64 and kept(value, isinstance(value, int)):
            return
        refuse(value, "enum or const", "give a number of fewer digits, or a string")


def bounded(schema: dict[str, Any]) -> None:
    """Refuse bounds that would be rounded, and replace those that llguidance holds wrongly.

    Integers are held to int64 where bounds name its ends. Of it, the lowest 1023 are not written:
    they cannot be told apart from what is below.
    """
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    integer = "integer" in kinds and "number" not in kinds
    for key, side in BOUNDS.items():
        value: Any = schema.get(key)
        if not is_number(value):
            continue
        flag = f"exclusive{key.title()}"  # of draft 4
        strict = key not in SIDES or schema.get(flag) is True
        if integer and side < 0 and value < LOWEST and float(value) >= -INT64:
            new: int | float = LOWEST
        elif integer and side > 0 and value >= INT64 - 1 + strict and float(value) <= INT64:
            new = INT64 - 1
        elif not kept(value, integer) or abs(value) >= (2**53 if strict else INT64):
            refuse(value, key, "give a bound that is no larger than 2**53")
        elif strict and not integer and value % 1 == 0 and value * side <= 0:
            # A number that must be above 0 and below 0.5 might be 0, for llguidance.
            places = 15 - len(str(abs(int(value))))
            new = -side * float(f"{abs(int(value))}.{1:0{max(places, 1)}}")
        else:
            continue
        del schema[key]
        if schema.get(flag) is True:
            del schema[flag]
        least = min if side > 0 else max
        schema[SIDES[side > 0]] = least(schema.get(SIDES[side > 0], new), new)


def kept(value: int | float, integer: bool) -> bool:
    """Whether a number keeps its digits: as an integer, or also as a number with a fraction."""
    if not exact(value) or abs(value) < 2**53:
        return exact(value)
    digits, double = Decimal(repr(value)), float(value)
    return Decimal(double) == digits and (integer or Decimal(repr(double)) == digits)


def exact(value: int | float) -> bool:
    """Whether llguidance reads a number as it is: one rounding at most, of a power of ten."""
    if isinstance(value, int):
        return abs(value) <= 2**1000 and int(float(value)) == value
    if not math.isfinite(value):
        return False
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int)
    read = float(int("".join(map(str, digits))))
    while exponent < -308:
        read, exponent = read / 1e308, exponent + 308
    power = float(f"1e{abs(exponent)}")
    return (read * power if exponent > 0 else read / power) == abs(value)


def multiple(value: int | float) -> Fraction:
    """multipleOf as a fraction, which llguidance makes of it by multiplying with ten."""
    if not exact(value) or value <= 0:
        refuse(value, "multipleOf", "give a positive number of few digits")
    want = Fraction(Decimal(repr(value)))
    number, power = float(value), 0
    while number % 1:
        number, power = number * 10, power + 1
    if number >= 2**32 or power > 9 or Fraction(int(number), 10**power) != want:
        refuse(value, "multipleOf", "give a number of fewer digits")
    return want


# What a user's Lark says: strings, regular expressions, comments, schemas and special tokens.
LARK = re.compile(
    r'"(?:\\.|[^"\\\n])*"|/(?!/)(?:\\.|[^/\\\n])+/|(?:#|//)[^\n]*|(%json)\s*|(<[^<>\s\[\]]+>)'
)


def lark(text: str, special: Mapping[str, int]) -> str:
    """A user's Lark grammar: its JSON schemas rewritten, and special tokens by number.

    special: from a special token's text to its number.
    """
    out, start, at = [], 0, 0
    while found := LARK.search(text, at):
        at = found.end()
        if found[2] in special:
            out += [text[start : found.start()], f"<[{special[found[2]]}]>"]
            start = at
        elif found[1]:
            try:
                schema, at = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                raise InvalidInput(f"the grammar's JSON schema is not JSON: {error}") from None
            out += [text[start : found.start()], json_rule(schema)]
            start = at
    return "".join(out) + text[start:]
