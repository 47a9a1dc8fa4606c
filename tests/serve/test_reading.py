"""Thoughts, content and tool calls, whatever pieces a text arrives in."""

import json
import random
from typing import Any

import pytest

from anybit.serve.functions import called
from anybit.serve.harmony import Harmony
from anybit.serve.infill import infill
from anybit.serve.reading import Calls, Plain, Reader, Thoughts
from anybit.serve.tools import FAMILIES, family_of

ARGS = '{"a": "x}\\"<y>", "b": [1, {"c": null}]}'
HERMES = f'<tool_call>\n{{"name": "get", "arguments": {ARGS}}}\n</tool_call>'
TYPES = {"n": {"type": "integer"}, "s": {"type": "string"}, "l": {"type": "array"}}
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"properties": TYPES}}}]


def read(reader: Reader, text: str, size: int) -> tuple[str, str, list[tuple[str, str]]]:
    """Thoughts, content and calls of a text that comes in parts of so many characters."""
    pieces = []
    for at in range(0, len(text), size):
        pieces += reader.feed(text[at : at + size])
    pieces += reader.feed("", True)
    calls: dict[int, list[str]] = {}
    for piece in pieces:
        if piece.kind == "call":
            if piece.name is not None:
                assert piece.call == len(calls)
                calls[piece.call] = [piece.name, ""]
            calls[piece.call][1] += piece.text
    whole = {
        kind: "".join(p.text for p in pieces if p.kind == kind) for kind in ("reasoning", "content")
    }
    return whole["reasoning"], whole["content"], [(name, args) for name, args in calls.values()]


def hermes(*bodies: str) -> str:
    return "".join(f"<tool_call>{body}</tool_call>" for body in bodies)


XML = """Now.
<tool_call>
<function=get>
<parameter=n>
3
</parameter>
<parameter=s>
4
</parameter>
<parameter=l>
[1, 2]
</parameter>
</function>
</tool_call>"""


def keyed(name: str, **values: str) -> str:
    parts = (f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items())
    return f"<tool_call>{name}\n{''.join(parts)}</tool_call>"


ODD = "a</tool_call>\n<tool_call>b</arg_value>c"
SEED = XML.replace("tool_call>", "seed:tool_call>")
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    # family, text, content, calls
    ("hermes", "just text < 3 <tool", "just text < 3 <tool", []),
    ("hermes", HERMES, "", [("get", ARGS)]),
    ("hermes", f"Let me see.\n{HERMES}\n{HERMES}\n", "Let me see.", [("get", ARGS)] * 2),
    ("hermes", hermes('{"arguments": {"a": 1}, "name": "f"}'), "", [("f", '{"a": 1}')]),
    ("hermes", hermes('{"name": "f"}') + "done", "done", [("f", "{}")]),
    ("hermes", hermes('{"name": "f", "arguments": "{\\"a\\": 1}"}'), "", [("f", '{"a": 1}')]),
    ("hermes", hermes('{"name": "f", "arguments": "\\d"}'), "", [("f", '"\\d"')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    ("hermes", '<tool_call>{"nam', '{"nam', []),
    ("hermes", "<tool_call>what?", "what?", []),
    ("hermes", hermes('{"x": "name"}'), '{"x": "name"}</tool_call>', []),
    ("llama", '{"name": "get", "parameters": {"n": "1"}}', "", [("get", '{"n": "1"}')]),
    (
        "llama",
        '<|python_tag|>{"name": "get", "parameters": {}}; {"name": "get", "parameters": {"n": 2}}',
        "",
        [("get", "{}"), ("get", '{"n": 2}')],
    ),
    ("llama", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    ("llama", "{not json", "{not json", []),
    ("llama", "Use {x}.", "Use {x}.", []),
    ("llama", "<|python_tag|>[x for x in y]", "[x for x in y]", []),
    ("llama", '{"name": "get", "parameters": {}}; ', "", [("get", "{}")]),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "get", "arguments": {"l": [1]}}, {"name": "f", "arguments": {}}]',
        "",
        [("get", '{"l": [1]}'), ("f", "{}")],
    ),
    ("mistral", '[TOOL_CALLS][{"name": "f"}] "Done."', '"Done."', [("f", "{}")]),
    (
        "mistral",
        'ok[TOOL_CALLS]get[ARGS]{"n": {}}[TOOL_CALLS]f_2[CALL_ID]abc[ARGS]{}',
        "ok",
        [("get", '{"n": {}}'), ("f_2", "{}")],
    ),
    ("hermes", hermes('{"name": "f", "arguments": null}'), "", [("f", "{}")]),
    ("hermes", hermes('{"name": "f", "arguments": "null" }'), "", [("f", "{}")]),
    ("hermes", hermes('{"name": "f", "arguments": null, "id": 1}'), "", [("f", "{}")]),
    ("hermes", hermes('{"arguments": null, "name": "f"}'), "", [("f", "{}")]),
    (
        "hermes",
        hermes('{"name": "a,b", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}'),
        "",
        [("a,b", '{"a": 1, "b": 2}')],
    ),
    ("llama", '{"name": "get", "parameters": null}', "", [("get", "{}")]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": null}]', "", [("f", "{}")]),
    # What a limit of tokens cuts behind a call is no content.
    ("hermes", HERMES + "\n<", "", [("get", ARGS)]),
    ("hermes", HERMES + "\n<tool_call", "", [("get", ARGS)]),
    ("hermes", HERMES[:-3], "", [("get", ARGS)]),
    ("hermes", HERMES + '\n<tool_call>\n{"na', "", [("get", ARGS)]),
    ("hermes", HERMES + "\n<tool_call> <b", "<b", [("get", ARGS)]),
    ("hermes", "<tool_call>\n<", "", []),
    ("mistral", '[TOOL_CALLS][{"name": "f"}, ', "", [("f", "{}")]),
    ("mistral", '[TOOL_CALLS][{"name": "f"}, {"n', "", [("f", "{}")]),
    ("mistral", '[TOOL_CALLS][{"name": "f"}][TOOL_CA', "", [("f", "{}")]),
    ("llama", '{"name": "get", "parameters": {}}; <|python', "", [("get", "{}")]),
    (
        "qwen-coder",
        XML + "<tool_call>\n<func",
        "Now.",
        [("get", '{"n": 3, "s": "4", "l": [1, 2]}')],
    ),
    ("qwen-coder", XML, "Now.", [("get", '{"n": 3, "s": "4", "l": [1, 2]}')]),
    ("seed", SEED, "Now.", [("get", '{"n": 3, "s": "4", "l": [1, 2]}')]),
    ("seed", "<seed:tool_call><function=f></function></seed:tool_call>Hm", "Hm", [("f", "{}")]),
    ("glm", "Hm.\n" + keyed("get", n="3", s="4", l="[1, 2]") + "\nDone.", "Hm.\nDone.",
     [("get", '{"n": 3, "s": "4", "l": [1, 2]}')]),
    ("glm", keyed("get", s=ODD) + keyed("f"), "", [("get", json.dumps({"s": ODD})), ("f", "{}")]),
    ("glm", "<tool_call>get</tool_call>", "", [("get", "{}")]),
    ("glm", "<tool_call>get", "", [("get", "{}")]),
    ("glm", "<tool_call>get\n<arg_key>n", "get\n<arg_key>n", []),
    ("glm", keyed("get", n="5").removesuffix("</tool_call>"), "", [("get", '{"n": 5}')]),
    ("glm", keyed("get", n="5").replace("</arg_value>", ""), "", [("get", '{"n": 5}')]),
    ("glm", HERMES, "", [("get", ARGS)]),
    ("glm", HERMES.removesuffix("</tool_call>") + "Done.", "Done.", [("get", ARGS)]),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(("family", "text", "content", "calls"), CASES)
def test_calls(
    family: str, text: str, content: str, calls: list[tuple[str, str]], size: int
) -> None:
    assert read(FAMILIES[family].reader(TOOLS), text, size) == ("", content, calls)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_thoughts(size: int) -> None:
    def thoughts(inside: bool, rest: Reader) -> Thoughts:
        return Thoughts("<think>", "</think>", inside, rest)

    text = "<think>\nHm, </thin is no end.\n</think>\n\nYes."
    want = ("Hm, </thin is no end.\n", "Yes.", [])
    assert read(thoughts(False, Plain()), text, size) == want
    assert read(thoughts(True, Plain()), text.removeprefix("<think>"), size) == want
    assert read(thoughts(False, Plain()), " No <think>.", size) == ("", " No <think>.", [])
    assert read(thoughts(True, Plain()), "cut </th", size) == ("cut </th", "", [])
    assert read(thoughts(False, Plain()), "<thi", size) == ("", "<thi", [])
    hermes = Calls(("<tool_call>",), ("</tool_call>",))
    assert read(thoughts(False, hermes), text + HERMES, size) == (*want[:2], [("get", ARGS)])


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_harmony(size: int) -> None:
    text = (
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get <|constrain|>json<|message|>{"n": 1}<|call|>'
    )
    assert read(Harmony(), text, size) == ("Think.", "", [("get", '{"n": 1}')])
    text = "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>final<|message|>B"
    assert read(Harmony(), text, size) == ("A", "B", [])


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("arguments", "want"),
    [("null", "{}"), ("", "{}"), (" null ", "{}"), ("nul", "nul"), ('{"a": null}', '{"a": null}')],
)
def test_harmony_calls_without_arguments(arguments: str, want: str, size: int) -> None:
    head = "<|channel|>commentary to=functions.get<|message|>"
    assert read(Harmony(), f"{head}{arguments}<|call|>", size)[2] == [("get", want)]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ('{"a": {"b": 1}', '{"a": {"b": 1}'),
        ('{"a": "x}', '{"a": "x}'),
        ("x = {1: 2", "x = {1: 2"),
        (' {"a": ["<|end|>", "<|start|> <|call|><|return|>"]} ', None),
        ('{"a": 1} {', '{"a": 1} {'),
    ],
)
def test_harmony_calls_end(arguments: str, want: str | None, size: int) -> None:
    """Also those whose arguments are broken; not at marks in strings."""
    text = f"<|channel|>commentary to=functions.get<|message|>{arguments}<|call|>"
    calls = [("get", arguments.lstrip() if want is None else want)]
    assert read(Harmony(), text, size) == ("", "", calls)
    text += "<|start|>assistant<|channel|>final<|message|>Hello<|return|>"
    assert read(Harmony(), text, size) == ("", "Hello", calls)


LONG = 'a \n,"<' * 27_000  # 160 kB


@pytest.mark.parametrize(
    ("family", "before", "body", "after"),
    [
        (
            "hermes",
            '<tool_call>{"name": "get", "arguments": {"s": ',
            json.dumps(LONG),
            "}}</tool_call>",
        ),
        ("hermes", '<tool_call>{"arguments": {"s": ', json.dumps(LONG), '}, "name": "get"}'),
        ("llama", '{"name": "get", "parameters": {"s": ', json.dumps(LONG), "}}"),
        ("mistral", '[TOOL_CALLS]get[ARGS]{"s": ', json.dumps(LONG), "}"),
        ("qwen-coder", "<tool_call><function=get><parameter=s>", LONG, "</parameter></function>"),
        ("harmony", '<|channel|>final to=functions.get<|message|>{"s": ', json.dumps(LONG), "}"),
    ],
)
def test_long_calls_take_as_long_a_token_as_short_ones(
    family: str, before: str, body: str, after: str
) -> None:
    """What is held, and would be read again with the next token, stays short."""
    reader: Any = FAMILIES[family].reader(TOOLS)
    pieces, text = [], before + body + after
    for at in range(0, len(text), 4):
        pieces += reader.feed(text[at : at + 4])
        assert len(reader.held) < 100
    pieces += reader.feed("", True)
    arguments = "".join(piece.text for piece in pieces if piece.kind == "call")
    assert json.loads(arguments) == {"s": LONG}
    assert not [piece for piece in pieces if piece.kind == "content"]


@pytest.mark.parametrize(
    ("family", "before", "more"),
    [
        ("llama", "", " "), ("hermes", "a", "\n"), ("hermes", "<tool_call>", " "),
        ("mistral", "[TOOL_CALLS]", ", "), ("mistral", "[TOOL_CALLS]", "name"),
        ("llama", '{"name": "get", "parameters": {}}', ";"), ("harmony", "", "final"),
    ],
)  # fmt: skip
def test_what_goes_on_for_ever_is_not_read_again(family: str, before: str, more: str) -> None:
    reader: Any = FAMILIES[family].reader(TOOLS)
    thoughts: Any = Thoughts("<think>", "</think>", False, Plain())
    reader.feed(before)
    for _ in range(1000):
        reader.feed(more)
        thoughts.feed(" ")
        assert len(reader.held) < 100
        assert len(thoughts.held) < 100


@pytest.mark.parametrize("scrap", ["<arg_key>", "<arg_key>\n", "<arg_key>a</arg_key>", "\n"])
def test_keys_that_nothing_ends_are_read_once(scrap: str) -> None:
    """Not again for each place at which white space beside a key may end."""
    text = f"get<arg_key>{scrap * 20_000}<arg_key> n </arg_key><arg_value>5</arg_value>"
    assert read(FAMILIES["glm"].reader(TOOLS), f"<tool_call>{text}", 1000)[2] == [
        ("get", '{"n": 5}')
    ]


SCRAPS = [
    *(mark for family in FAMILIES.values() for mark in (*family.signs, *family.marks)),
    *'{}[]:,;"\\\n ',
    *("\\d", "</function>", "<parameter=n>", "<|message|>", "<|call|><|start|>"),
    *('"name": "get"', '"arguments": ', '"parameters": ', '{"n": 1}', '"{\\"n\\": 1}"', "é", "get"),
    *("to=functions.", "<think>", "</think>", "</parameter>", "commentary", "null", "\ud800"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_any_text_is_read_the_same_in_any_parts(family: str) -> None:
    rng = random.Random(family)
    for _ in range(1500):
        text = "".join(rng.choice(SCRAPS) for _ in range(rng.randrange(1, 14)))
        if family == "harmony" and rng.random() < 0.7:
            begin = rng.choice(["", " ", '{"n": ', '{"n": "', "{"])
            text = f"<|channel|>final to=functions.get<|message|>{begin}{text}"
        elif rng.random() < 0.5:  # the inside of a call
            mark = FAMILIES[family].marks[0]
            text = f'{mark}{{"name": "get", "{FAMILIES[family].arguments}": {text}}}'
        readers = [FAMILIES[family].reader(TOOLS) for _ in range(2)]
        if family != "harmony" and rng.random() < 0.3:
            readers = [Thoughts("<think>", "</think>", False, reader) for reader in readers]
        whole = read(readers[0], text, len(text))
        assert read(readers[1], text, rng.randrange(1, 6)) == whole, text


def test_families_by_their_templates() -> None:
    for text, name in (
        ('{%- if tools %}...<tool_call>\n{"name"', "hermes"),
        ("... <tool_call>\n<function=example> ...", "qwen-coder"),
        ('respond with JSON {"name": function name, "parameters": ...} <|eot_id|> tools', "llama"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("<|start|>assistant<|channel|>commentary to=functions.", "harmony"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "glm"),
        ("<seed:tool_call>\n<function=example_function_name>", "seed"),
        ('<tool_call>name<tool_sep>```json ... "parameters": {}', None),
        ('<|START_ACTION|>[{"tool_name": "f", "parameters": {}}]<|END_ACTION|>', None),
        ("{{ messages }}", None),
    ):
        assert family_of(text) == name


def test_xml_arguments_follow_the_schema() -> None:
    name, arguments = called("f>\n<parameter=x>\na\nb\n</parameter>\n", TOOLS)
    assert (name, json.loads(arguments)) == ("f", {"x": "a\nb"})


OPTIONAL = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
COUNT = {"$ref": "#/$defs/x"}
LOOP = {"$ref": "#/$defs/loop"}
TEXT = {"type": "string"}
STRICT = {"type": ["string", "null"]}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("schema", "body", "want"),
    [
        (OPTIONAL, "5", 5),
        (OPTIONAL, "null", None),
        (COUNT, "5", 5),
        (LOOP, "5", 5),
        (STRICT, "5", "5"),
        (STRICT, "null", None),
        ({"type": "boolean"}, "True", True),
        ({"type": "array"}, "['a']", ["a"]),
        ({"type": "array"}, "('a', None)", ["a", None]),
        ({"type": "object"}, "{'a': False}", {"a": False}),
        ({"type": "array"}, "{'a'}", "{'a'}"),
        ({"oneOf": [{"type": "boolean"}, {"const": 7}]}, "7", 7),
        ({"allOf": [COUNT, {"minimum": 1}]}, "5", 5),
        ({"allOf": [{"type": ["string", "integer"]}, TEXT]}, "5", "5"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({}, "[1]", [1]),
        ({}, "True", "True"),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", float("inf")),  # as JSON has it
        ({"type": "integer"}, "2.5", "2.5"),
        ({"type": "array"}, "[" * 5000, "[" * 5000),
        (TEXT, "a </parameter> b", "a </parameter> b"),
        (TEXT, "a </function> b", "a </function> b"),
        (TEXT, "a </tool_call> b", "a </tool_call> b"),
        (TEXT, "call <function=f> now", "call <function=f> now"),
        (TEXT, " a\n\n", " a\n\n"),
    ],
)
def test_values_of_any_schema(schema: Any, body: str, want: object, size: int) -> None:
    parameters = {
        "properties": {"a": schema},
        "$defs": {"x": {"type": "integer"}, "loop": {"anyOf": [LOOP, {"type": "integer"}]}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = f"<function=f>\n<parameter=a>\n{body}\n</parameter>\n</function>\n</tool_call>"
    for mark in ("<tool_call>\n", ""):  # Qwen3-Coder leaves it out now and then
        _, content, [(name, found)] = read(FAMILIES["qwen-coder"].reader(tools), mark + text, size)
        assert (content, name, json.loads(found)) == ("", "f", {"a": want})


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "content", "want"),
    [
        ("<parameter=n>\n5\n</function>", "", {"n": 5}),
        ("<parameter=n>5</parameter/></function></tool_call>", "", {"n": 5}),
        ("<parameter=n>5</parameter></parameter></function></tool_call>", "", {"n": 5}),
        ("<parameter=n>5</parameter></function></function></tool_call></tool_call>", "", {"n": 5}),
        ("<parameter=n>5</parameter></tool_call>", "", {"n": 5}),
        ("<parameter=n>5</parameter>", "", {"n": 5}),
        ("<parameter= n >\n5\n</parameter></function>", "", {"n": 5}),
        ("<parameter=n>\n5\n<parameter=s>\n6\n</function>", "", {"n": 5, "s": "6"}),
        ("<parameter=n>5</parameter></function>\nDone.", "Done.", {"n": 5}),
        ("<parameter=n>\n5\n</function>\nDone.", "Done.", {"n": 5}),
        ("</function>", "", {}),
    ],
)
def test_end_marks_that_are_missing_or_repeated(
    text: str, content: str, want: object, size: int
) -> None:
    for before in ("<tool_call>\n<function=get>\n", "<function=get>\n", "<function= get>"):
        _, said, [(name, found)] = read(FAMILIES["qwen-coder"].reader(TOOLS), before + text, size)
        assert (said, name, json.loads(found)) == (content, "get", want)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("family", "text", "content", "calls"),
    [
        ("hermes", f"hi {HERMES} bye", "hi\nbye", 1),
        ("hermes", f"hi {HERMES}{HERMES} bye {HERMES}", "hi\nbye", 3),
        ("hermes", f"{HERMES} bye", "bye", 1),
        ("mistral", 'hi[TOOL_CALLS][{"name": "get"}] bye', "hi\nbye", 1),
        ("qwen-coder", f"{XML} Then.", "Now.\nThen.", 1),
        ("qwen-coder", "<function=other></function>", "<function=other></function>", 0),
        ("qwen-coder", "<function=ge", "<function=ge", 0),
        ("hermes", HERMES.removeprefix("<tool_call>"), "", 1),
        ("hermes", '{"name": "Ann", "arguments": {}}', '{"name": "Ann", "arguments": {}}', 0),
        ("hermes", f"```json\n{ARGS}\n```", f"```json\n{ARGS}\n```", 0),
        ("harmony", "<|channel|>final<|message|>a<|end|><|channel|>final<|message|>b", "a\nb", 0),
    ],
)
def test_text_around_calls(family: str, text: str, content: str, calls: int, size: int) -> None:
    _, said, found = read(FAMILIES[family].reader(TOOLS), text, size)
    assert (said, len(found)) == (content, calls)


def test_infill_prompts() -> None:
    """A suffix needs a model's three tokens for it, and a prompt that is text."""
    qwen = {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"}
    want = "<|fim_prefix|>a = <|fim_suffix|>\nb<|fim_middle|>"
    assert infill(qwen, "a = ", "\nb") == want
    assert infill(qwen, [1, 2], "b") is None
    assert infill({"<|fim_prefix|>"}, "a", "b") is None


def test_a_reader_says_whether_it_is_in_thoughts() -> None:
    reader: Reader = Thoughts("<think>", "</think>", False, Plain())
    inside = []
    for text in ("<think>", "Hm", ".", "</think>", "\n", "Yes"):
        reader.feed(text)
        inside.append(reader.thinking)
    assert inside == [True, True, True, False, False, False]
    reader = Harmony()
    inside = []
    for text in ("<|channel|>analysis", "<|message|>", "Hm", "<|end|>", "<|start|>assistant"):
        reader.feed(text)
        inside.append(reader.thinking)
    assert inside == [False, True, True, False, False]
