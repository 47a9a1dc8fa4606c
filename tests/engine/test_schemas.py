"""Schemas against another reader: what a grammar takes is valid, however keys are spelled."""

import itertools
import json
import random
import re
import time
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest
from transformers import AutoTokenizer

from anybit.engine.keys import pattern
from anybit.engine.keywords import KINDS
from anybit.engine.schemas import Rewriter, json_rule, kinds
from anybit.engine.structured import Grammars, Structured
from anybit.errors import InvalidInput
from tests.engine.conftest import PICO

Takes = Callable[[Any, str], bool]
KEYS = [
    "a",
    "ab",
    "b",
    "k\n",
    "x/y",
    "",
    "\u00e9",
    'q"',
    "q\\",
    "x1",
    "long" * 9,
    "long" * 9 + "er",
]
VALUES = ["1", '"s"', "null", "true", "[]", "{}"]
TYPES: list[Any] = [{"type": "integer"}, {"type": "string"}, True, {"type": ["null", "boolean"]}]


@pytest.fixture(scope="module")
def takes() -> Takes:
    """Whether the grammar of a schema takes a text; InvalidInput if there is none."""
    tokenizer = AutoTokenizer.from_pretrained(PICO)
    grammars = Grammars(tokenizer, len(tokenizer), frozenset([0]))

    def written(schema: Any, text: str) -> bool:
        matcher = grammars.matcher(Structured(json=schema))
        for token in tokenizer.encode(text, add_special_tokens=False):
            if not matcher.allows(token):
                return False
            matcher.take(token)
        return bool(matcher.grammar.is_accepting())

    return written


def an_object(rng: random.Random) -> dict[str, Any]:
    names = rng.sample(KEYS, rng.randint(0, 4))
    out: dict[str, Any] = {"type": "object"} if rng.random() < 0.8 else {}
    if names:
        out["properties"] = {name: rng.choice(TYPES) for name in names}
    if rng.random() < 0.6:
        out["required"] = rng.sample(KEYS if rng.random() < 0.3 else names or KEYS, 1)
    if rng.random() < 0.7:
        out["additionalProperties"] = rng.choice([False, *TYPES])
    if rng.random() < 0.3:
        out["patternProperties"] = {rng.choice(["^x", "b$", '^[^"]$']): rng.choice(TYPES)}
    if rng.random() < 0.3:
        out[rng.choice(["minProperties", "maxProperties"])] = rng.randint(1, 3)
    return out


def a_schema(rng: random.Random) -> dict[str, Any]:
    one, other = an_object(rng), an_object(rng)
    return rng.choice(
        [
            {"allOf": [one, other]}, {"allOf": [one], **other}, one | {"anyOf": [other, one]},
            {"$ref": "#/$defs/o", "$defs": {"o": one}, **other},
            {"allOf": [{"anyOf": [one, {"properties": {"b": {"const": 1}}}]}, other]},
            {"allOf": [{"additionalProperties": one}, {"properties": {"a": other}}]},
            {"allOf": [{"properties": {"a": one}}, {"properties": {"a": other, "b": one}}]},
            {"allOf": [{"additionalProperties": one}, {"additionalProperties": other}]},
            one, {"anyOf": [one, an_object(rng)]}, {"$ref": "#/$defs/o", "$defs": {"o": one}},
            one | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ]
    )  # fmt: skip


def a_text(rng: random.Random, schema: dict[str, Any]) -> str:
    order = [*schema.get("properties", ()), *KEYS]
    keys = [rng.choice(KEYS) for _ in range(rng.randint(0, 4))]
    if rng.random() < 0.7:
        keys.sort(key=order.index)
    values = [*VALUES, a_text(rng, schema) if rng.random() < 0.4 else "0"]
    return "{" + ",".join(f"{spelled(rng, key)}:{rng.choice(values)}" for key in keys) + "}"


def spelled(rng: random.Random, key: str) -> str:
    """A key in JSON, with escapes that nobody needs."""
    if rng.random() < 0.4:
        return json.dumps(key)
    escaped = (f"\\u{ord(c):04x}" if rng.random() < 0.5 else json.dumps(c)[1:-1] for c in key)
    return f'"{"".join(escaped)}"'


def test_what_grammars_take_is_valid(takes: Takes) -> None:
    taken = 0
    for seed in range(300):
        rng = random.Random(seed)
        schema = a_schema(rng)
        judge = jsonschema_rs.validator_for(schema)
        for _ in range(25):
            text = a_text(rng, schema)
            try:
                took = takes(schema, text)
            except InvalidInput:
                break
            taken += took
            assert not took or judge.is_valid(json.loads(text)), (schema, text)
    assert taken > 200


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ('^[^"]*$', '"a\\n"', '"a\\""'),
        (r"^[^\\]$", '"a"', '"\\\\"'),
        (r'^[^"\\\n]+$', '"ab"', '"a\\n"'),
        (r"^\[[^\x22]\]$", '"[a]"', '"[\\"]"'),
        ("^[^a]$", '"\\""', '"a"'),
    ],
)
def test_patterns_exclude_what_json_escapes(
    takes: Takes, pattern: str, right: str, wrong: str
) -> None:
    string = {"type": "string", "pattern": pattern}
    keys = {"type": "object", "patternProperties": {pattern: True}, "additionalProperties": False}
    assert [takes(string, right), takes(string, wrong)] == [True, False]
    assert [takes(keys, f"{{{text}: 1}}") for text in (right, wrong)] == [True, False]


def test_keys_that_count_twice_are_refused(takes: Takes) -> None:
    two = {"type": "object", "minProperties": 2}
    with pytest.raises(InvalidInput, match="minProperties 2 with 0 names in required"):
        takes(two, "{}")
    one = two | {"properties": {"a": {}}, "required": ["a"]}
    assert takes(one, '{"a":1,"b":2}')
    assert not takes(one, '{"a":1,"\\u0061":2}')


MERGED: dict[str, Any] = {
    "allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": True}}]
}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (MERGED, '{"a":1,"b":"s","c":[]}', '{"\\u0061":"s"}'),
        (MERGED | {"required": ["d"]}, '{"a":1,"d":2}', '{"\\u0064":2}'),
        ({"allOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"a":1,"b":2,"c":3}', '{"a":1}'),
        ({"properties": {"a": True}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
         '{"b":1,"c":1}', '{"\\u0061":1}'),
        ({"type": "object", "required": ["a"], "minProperties": 2}, '{"a":1,"b":2}',
         '{"a":1,"\\u0061":2}'),
        ({"properties": {"a": {"type": "integer"}}, "patternProperties": {"^x": True}},
         '{"a":1,"xy":2}', '{"\\u0061":"s"}'),
        ({"properties": {"n" * 3000: {"type": "integer"}, "a": {"type": "integer"}}},
         '{"a":1}', '{"\\u0061":"s"}'),
        ({"allOf": [{"properties": {"p": {"properties": {"a": {"type": "integer"}}}}},
                    {"properties": {"p": {"properties": {"b": True}}}}]},
         '{"p":{"a":1,"b":2,"c":3}}', '{"p":{"\\u0061":"s"}}'),
        ({"allOf": [{"additionalProperties": each} for each in MERGED["allOf"]]},
         '{"k":{"a":1,"b":2,"c":3}}', '{"k":{"\\u0061":"s"}}'),
        ({"properties": {"l": {"allOf": [{"type": "array", "items": {"items": each}}
                                         for each in MERGED["allOf"]]}}},
         '{"l":[[{"a":1,"b":2,"c":3}]]}', '{"l":[[{"\\u0061":"s"}]]}'),
        ({"properties": {"l": {"items": MERGED["allOf"][0], "$ref": "#/$defs/l"}},
          "$defs": {"l": {"prefixItems": MERGED["allOf"][1:]}}},
         '{"l":[{"a":1,"b":2,"c":3},{"a":1,"b":"s"}]}', '{"l":[{"\\u0061":"s"}]}'),
    ],
)  # fmt: skip
def test_a_declared_key_has_one_spelling(
    takes: Takes, schema: dict[str, Any], right: str, wrong: str
) -> None:
    schema = {"type": "object"} | schema
    assert [takes(schema, right), takes(schema, wrong)] == [True, False]


def test_unions_that_types_tell_apart(takes: Takes) -> None:
    tag = {"$ref": "#/$defs/tag", "title": "T"}
    tags = {"$defs": {"tag": {"type": ["string", "null"]}}}
    apart = {"oneOf": [tag, {"type": "array", "items": tag}, {"type": "number"}]} | tags
    for text, took in (('"x"', True), ('["x"]', True), ("1.5", True), ("true", False)):
        assert takes(apart, text) == took
    for options in ([tag, {"type": "string"}], [{"type": "number"}, {"enum": [1.0]}], [tag, {}]):
        assert not Rewriter(tags).exclusive(options)
        with pytest.raises(InvalidInput, match="options that may overlap"):
            takes({"oneOf": options} | tags, "{}")


def test_references_that_double_take_no_time() -> None:
    """Two at each level: their types are found once."""
    names = [f"d{i}" for i in range(41)]
    both = {a: {"anyOf": 2 * [{"$ref": f"#/$defs/{b}"}]} for a, b in itertools.pairwise(names)}
    schema = {"$defs": both | {"d40": {"type": "string"}}}
    begun = time.process_time()
    json_rule(schema | {"oneOf": [{"$ref": "#/$defs/d0"}, {"type": "integer"}]})
    tagged = [tag(str(i)) for i in range(400)]
    json_rule({"oneOf": tagged})
    closed = [{"properties": {f"k{i}": {}}, "additionalProperties": False} for i in range(2000)]
    json_rule({"allOf": closed})
    with pytest.raises(InvalidInput, match="too many names"):
        json_rule({"allOf": [{"properties": {f"k{i}": {}}} for i in range(2000)]})
    assert time.process_time() - begun < 2


def tag(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}


def test_a_key_may_begin_as_a_declared_one() -> None:
    line = "customer_billing_address_line_"
    schema = {"type": "object", "properties": {f"{line}1": {"type": "integer"}}}
    rule = json.loads(json_rule(schema).removeprefix("%json "))
    (others,) = rule["patternProperties"]
    others = re.sub(r"\\x\{([0-9a-f]+)\}", lambda found: re.escape(chr(int(found[1], 16))), others)
    assert re.fullmatch(others, f"{line}2")
    assert re.fullmatch(others, line)
    assert not re.fullmatch(others, f"{line}1")


def test_an_escape_before_a_class_is_no_escape_of_it() -> None:
    assert pattern(r'^\\[^"]$') == r'^\\[^\x{0}"]$'
    assert pattern(r'^\[^"]$') == r'^\[^"]$'


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"required": [["x"]]}, r'required is \[\["x"\]\], not a list of strings'),
        ({"required": [1]}, r"required is \[1\], not a list of strings"),
        ({"required": None}, "required is null, not a list of strings"),
        ({"patternProperties": [1]}, r"patternProperties is \[1\], not an object of schemas"),
        ({"properties": {"a": 1}}, 'properties is {"a": 1}, not an object of schemas'),
        ({"items": 3}, r"items is 3, not a schema \(an object, true or false\) or a list"),
        ({"type": [3]}, r"type is \[3\], not one of null, boolean, .*, or a list of them"),
        ({"type": [["string"]]}, r'type is \[\["string"\]\], not one of'),
        ({"enum": "a"}, 'enum is "a", not a list'),
        ({"anyOf": [3]}, r"anyOf is \[3\], not a list of schemas"),
        ({"minLength": -1}, "minLength is -1, not a whole number of 0 to"),
        ({"maxItems": 2.5}, "maxItems is 2.5, not a whole number of 0 to"),
        ({"maxItems": 1e20}, "maxItems is 1e.20, not a whole number of 0 to"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "[$]schema is .* of draft 4 or"),
        ({"$id": "a", "anyOf": [{"$ref": "#/x"}, {}]}, "[$]id 'a' has references"),
        ({"$id": ""}, "[$]id '' names two schemas"),
        ({"maximum": True}, "maximum is true, not a number"),
        ({"$ref": ["#"]}, r'\$ref is \["#"\], not a string'),
        ({"$ref": "#/x/y", "x": {"y": {"pattern": 3}}}, "pattern is 3, not a string"),
    ],
)
def test_a_wrong_value_is_named_with_its_keyword(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=f"^the JSON schema: {said}"):
        json_rule({"type": "array", "items": schema} if "$ref" not in schema else schema)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "minLength": 3.0}, '"abc"', '"ab"'),
        ({"type": "array", "maxItems": 2.0}, "[1,2]", "[1,2,3]"),
        ({"type": "object", "minProperties": 1.0, "maxProperties": 1e0}, '{"a":1}', "{}"),
        ('{"type": "string", "maxLength": 20e-1}', '"ab"', '"abc"'),
        ({"type": "integer", "multipleOf": 2.0, "minimum": 1.0}, "2", "1"),
    ],
)
def test_a_whole_number_may_have_a_point(takes: Takes, schema: Any, right: str, wrong: str) -> None:
    assert takes(schema, right)
    assert not takes(schema, wrong)


@pytest.mark.parametrize("name", ["foo", "https://x/foo", "https://x/foo#"])
def test_a_part_has_another_name_than_the_whole(takes: Takes, name: str) -> None:
    """Or else it would be enforced instead."""
    schema = {"$id": "https://x/foo#", "type": "string", "$defs": {"part": {"$id": name}}}
    with pytest.raises(InvalidInput, match="names two schemas"):
        takes(schema, "1")
    assert not takes(schema | {"$defs": {"part": {"$id": "food"}}}, "1")


@pytest.mark.parametrize(
    ("part", "draft"),
    [
        ({"$id": "part"}, "https://json-schema.org/draft/2020-12/schema"),
        ({"$id": "part#"}, "http://json-schema.org/draft-07/schema#"),
        ({"id": "part"}, "http://json-schema.org/draft-04/schema#"),
        ({"$id": "#part"}, "http://json-schema.org/draft-06/schema#"),
        ({"$anchor": "part"}, "https://json-schema.org/draft/2019-09/schema"),
    ],
)
def test_two_parts_have_two_names(part: dict[str, str], draft: str) -> None:
    """Or else the later is enforced for both."""
    ((key, name),) = part.items()
    name = f"#{name}" if key == "$anchor" else name
    said = f"^the JSON schema: [{key[0]}]{key[1:]} '{name}' names two schemas, at #/[$]defs/a and "
    both = {"a": part | {"type": "string"}, "b": part | {"type": "integer"}}
    with pytest.raises(InvalidInput, match=f"{said}at #/[$]defs/b; rename one$"):
        json_rule({"$schema": draft, "$defs": both, "properties": {"x": {"$ref": name}}})
    inside = {"a": {"$id": "in/", "$defs": {"c": {"$id": "../b"}}}, "b": {"$id": "b"}}
    with pytest.raises(InvalidInput, match=r"at #/\$defs/b and at #/\$defs/a/\$defs/c;"):
        json_rule({"$id": "https://x/y", "$defs": dict(reversed(inside.items())), "$ref": "b"})
    json_rule({"$defs": {"a": {"$id": "in/", "$defs": {"c": {"$id": "b"}}}, "b": {"$id": "b"}}})


def test_parts_that_say_the_same_or_that_nothing_refers_to_may_share_a_name(takes: Takes) -> None:
    """As a definition has that a tool writes out at each of its places, and old tools' items."""
    word: dict[str, Any] = {"$id": "part", "type": "string"}
    for other in (word, {"$ref": "part"}):
        schema = {"properties": {"x": word, "y": other, "z": word}, "required": ["x", "y", "z"]}
        assert takes(schema, '{"x":"a","y":"b","z":"c"}')
        assert not takes(schema, '{"x":"a","y":"b","z":3}')
        assert not takes(schema, '{"x":"a","y":3,"z":"c"}')
    schema = {"properties": {"x": word, "y": word | {"type": "integer"}}, "required": ["x", "y"]}
    assert takes(schema, '{"x":"a","y":3}')
    assert not takes(schema, '{"x":3,"y":3}')
    assert not takes(schema, '{"x":"a","y":"b"}')
    true, one = ({"$id": "part", "const": value} for value in (True, 1))
    with pytest.raises(InvalidInput, match="'part' names two schemas"):
        takes({"properties": {"x": true, "y": one, "z": {"$ref": "part"}}}, "{}")


@pytest.mark.parametrize("number", ["4", "6", "7"])
def test_what_stands_beside_a_reference_applies_as_of_2019(takes: Takes, number: str) -> None:
    """Until draft 7 nothing does, whatever reads the schema."""
    small: dict[str, Any] = {"$ref": "#/definitions/n", "maximum": 5, "minLength": -1}
    root = {"properties": {"n": small}, "required": ["n"], "definitions": {"n": {"maximum": 9}}}
    for start in ("http", "https"):
        old = {"$schema": f"{start}://json-schema.org/draft-0{number}/schema#"} | root
        for document in (old, {"$ref": "#/definitions/whole", "type": "null"} | old):
            document["definitions"] = root["definitions"] | {"whole": root | {"type": "object"}}
            assert takes(document, '{"n":9}')
            assert not takes(document, '{"n":10}')
        assert kinds(old | {"$ref": "#/definitions/n", "type": "null"}, old) != {"null"}
    del small["minLength"]
    for new in ({}, {"$schema": "https://json-schema.org/draft/2019-09/schema#"}):
        assert takes(new | root, '{"n":5}')
        assert not takes(new | root, '{"n":9}')


def test_prefix_items_hold_beside_additional_items(takes: Takes) -> None:
    schema = {"type": "array", "prefixItems": [{"type": "string"}], "additionalItems": False}
    assert takes(schema, '["a"]')
    assert not takes(schema, "[1]")
    assert not takes(schema, '["a",1]')
    assert takes(schema | {"items": {"type": "integer"}}, '["a",1]')


def test_any_value_behind_any_keyword_is_taken_or_named() -> None:
    """What is in an enum, a default or an extension is no schema."""
    values: list[Any] = [None, True, -1, 1.5, "x", [], [1], [["x"]], {}, {"a": 1}, {"a": [{}]}]
    for keyword, value in itertools.product(KINDS, values):
        for outer in ({}, {"oneOf": [{"type": "object"}, {"type": "null"}]}, {"allOf": [{}]}):
            try:
                json_rule({"properties": {"a": outer | {keyword: value}}})
            except InvalidInput as error:
                assert keyword in str(error)  # noqa: PT017
                assert "is not JSON" not in str(error)  # noqa: PT017
    for where in ("default", "x-more", "const"):
        json_rule({where: {"type": 3, "required": [["x"]]}})


def test_keys_that_may_match_two_patterns_are_refused(takes: Takes) -> None:
    """Also where parts of an allOf have one each; as one pattern they count once."""
    parts = [{"type": "object", "patternProperties": {p: {}}} for p in ("^a", "b$")]
    both = {"^a": {"const": True}, "b$": {"const": 1}}
    for schema in ({"allOf": parts}, {"type": "object", "patternProperties": both}):
        with pytest.raises(InvalidInput, match="a key may match two of its patternProperties"):
            takes(schema, "{}")
    assert takes({"allOf": [parts[0], parts[0]]}, '{"ab": 1}')


def test_patterns_of_one_schema_may_match_one_key(takes: Takes) -> None:
    integer = {"type": "integer"}
    patterns = {"^a": integer, "^c": integer, "^.*b$": integer, "^x.*a$": {"type": "string"}}
    schema = {"type": "object", "patternProperties": patterns, "properties": {"cab": True}}
    for text, took in (
        ('{"ab":1,"ba":1}', False),
        ('{"cb":1,"ca":2}', True),
        ('{"ab":1,"bb":2,"cb":3}', True),
        ('{"ab":"s"}', False),
        ('{"cab":"s"}', False),
        ('{"xa":"s"}', True),
        ('{"xa":1}', False),
    ):
        assert takes(schema, text) == took, text
    # Those that begin otherwise stay as they are, so that another part may name one of them.
    assert takes({"allOf": [schema, {"patternProperties": {"^x.*a$": True}}]}, '{"xa":"s"}')
    apart = {"type": "object", "patternProperties": {"^a": integer, "^c": integer}}
    assert takes({"allOf": [apart, {"patternProperties": {"^a": {"minimum": 2}}}]}, '{"a":2}')
