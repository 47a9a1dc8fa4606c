"""The forms in which families of models write tool calls: how to know, read and force them."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anybit.engine.schemas import json_rule, kinds
from anybit.errors import InvalidInput
from anybit.serve.fields import naming
from anybit.serve.function_grammar import Functions, Unwritable
from anybit.serve.harmony import Harmony
from anybit.serve.reading import Calls, Piece, Plain, Reader

Tools = list[dict[str, Any]]
SEPARATORS = ",;[]"
Mark = Callable[[str], str]  # from a mark to its notation, which differs for special tokens


@dataclass(frozen=True)
class Family:
    """One form of tool calls.

    signs: any of these in a chat template tells the family. marks: of which some are special
    tokens, that the text must then show. reader: of one text whose model was given these tools.
    calls: rules of `calls`, one of these tools' or several. answer: an expression of an object
    instead, from that of the object. bare: whether calls begin with the object, without a mark.
    begin: how the template begins a call of NAME; "" where thoughts are not cut by one.
    """

    signs: tuple[str, ...]
    marks: tuple[str, ...]
    reader: Callable[[Tools], Reader]
    calls: "Callable[[Family, Tools, bool, Mark], str]"
    answer: Callable[[str, Mark], str] = lambda rule, mark: rule
    bare: bool = False
    arguments: str = "arguments"  # their name in the object
    short_ids: bool = False
    begin: str = ""

    def forced(self, tools: Tools, several: bool, mark: Mark) -> str:
        """A Lark grammar of texts that call these tools, once or several times."""
        return f"start: calls\n{self.calls(self, tools, several, mark)}"

    def optional(self, tools: Tools, several: bool, mark: Mark, schema: Any) -> str:
        """The same, or an object of the schema instead."""
        start = "calls | answer" if tools else "answer"
        rules = f"start: {start}\n{self.calls(self, tools, several, mark)}"
        return f"{rules}answer: {self.answer(json_rule(schema), mark)}\n"

    def begins(self, tools: Tools) -> tuple[str, ...]:
        """What texts of `optional` begin with when they are calls."""
        if not self.bare:
            return self.marks[:1]
        return tuple("".join(self.opening(tool["function"])) for tool in tools)

    def begun(self, tools: Tools) -> tuple[str, ...]:
        """What calls of these tools begin with, as the template has it."""
        names = (tool["function"]["name"] for tool in tools if self.begin)
        return tuple(self.begin.replace("NAME", name) for name in names)

    def objects(self, tools: Tools) -> str:
        return " | ".join(self.call(tool["function"]) for tool in tools)

    def call(self, function: dict[str, Any]) -> str:
        """A call's JSON object as a part of a Lark rule.

        The schema is a document by itself: its references, `$id` and `$schema` mean what they mean
        there, whatever other tools say. Around it, white space is as in all the templates.
        """
        opening = " ".join(map(json.dumps, self.opening(function)))
        return f'{opening} {arguments_rule(function)} "}}"'

    def opening(self, function: dict[str, Any]) -> tuple[str, ...]:
        """A call's JSON object up to its arguments, in words that are JSON's, too.

        A longer one would win against JSON's where the text may be another object instead.
        """
        name, arguments = json.dumps(function["name"]), f'"{self.arguments}"'
        return "{", '"name"', ":", " ", name, ",", " ", arguments, ":", " "


def arguments_rule(function: dict[str, Any]) -> str:
    """A function's arguments as a part of a Lark rule."""
    schema = parameters(function)
    with naming(f"tools: the parameters of {function['name']!r}"):
        return json_rule(schema)


def parameters(function: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object."""
    schema = function.get("parameters")
    if schema is None:
        schema = {"additionalProperties": False}
    found = kinds(schema, schema)
    if "object" not in found:
        raise InvalidInput(
            f"tools: the parameters of {function['name']!r} are of type "
            f"{' or '.join(sorted(found)) or 'none'!r:.50}; arguments are an object"
        )
    return schema if found == {"object"} else schema | {"type": "object"}


class Either:
    """Calls if the text begins as one, or else content, whatever stands in it."""

    thinking = False

    def __init__(self, calls: Reader, begins: tuple[str, ...]):
        self.calls, self.begins, self.held = calls, begins, ""
        self.chosen: Reader | None = None

    def feed(self, text: str, last: bool = False) -> list[Piece]:
        if self.chosen is None:
            self.held += text
            if self.held.startswith(self.begins):
                self.chosen = self.calls
            elif last or not any(begin.startswith(self.held) for begin in self.begins):
                self.chosen = Plain()
            else:
                return []
            text = self.held
        return self.chosen.feed(text, last)


def marked(form: Family, inside: str, several: bool, mark: Mark) -> str:
    """Rules for calls between a family's marks, from an expression of what stands in one."""
    rest = ' ("\\n" one)*' if several else ""
    one = f'{mark(form.marks[0])} "\\n" ({inside}) "\\n" {mark(form.marks[1])}'
    return f"calls: one{rest}\none: {one}\n"


def hermes_calls(form: Family, tools: Tools, several: bool, mark: Mark) -> str:
    return marked(form, form.objects(tools), several, mark)


def coder_calls(form: Family, tools: Tools, several: bool, mark: Mark) -> str:
    """As functions; as JSON objects, which are read, too, where those cannot say all."""
    functions, options = Functions(mark), []
    for tool in tools:
        function = tool["function"]
        try:
            with naming(f"tools: the parameters of {function['name']!r}"):
                options.append(functions.call(function["name"], parameters(function)))
        except (Unwritable, RecursionError):
            options.append(form.call(function))
    return marked(form, " | ".join(options), several, mark) + functions.rules()


def llama_calls(form: Family, tools: Tools, several: bool, mark: Mark) -> str:
    return f"calls: {form.objects(tools)}\n"


def mistral_calls(form: Family, tools: Tools, several: bool, mark: Mark) -> str:
    rest = ' (", " object)*' if several else ""
    return f'calls: {mark("[TOOL_CALLS]")} "[" object{rest} "]"\nobject: {form.objects(tools)}\n'


def harmony_calls(form: Family, tools: Tools, several: bool, mark: Mark) -> str:
    """One call: `<|call|>` behind it ends an answer."""
    end = mark("<|end|>")
    inside, behind = (end, "") if end.startswith('"') else ("", end)
    thought = f'{mark("<|channel|>")} "analysis" {mark("<|message|>")} THOUGHT {behind}'
    text = f"/(?s:.*)/ & ~/(?s:.*)({'|'.join(map(re.escape, Harmony.ENDS))})(?s:.*)/"
    rules = f'thought: {thought} {mark("<|start|>")} "assistant"\n'
    rules += f"THOUGHT: THINKING {inside}\nTHINKING: {text}\n"
    header = f'{mark("<|constrain|>")} "json" {mark("<|message|>")}'
    options = " | ".join(
        f"{json.dumps(function['name'] + ' ')} {header} {arguments_rule(function)}"
        for function in (tool["function"] for tool in tools)
    )
    begin = f'{mark("<|channel|>")} "commentary to=functions."'
    return f"{rules}calls: thought? {begin} ({options})\n" if tools else rules


def harmony_answer(rule: str, mark: Mark) -> str:
    return f'thought? {mark("<|channel|>")} "final" {mark("<|message|>")} {rule}'


def names(tools: Tools) -> frozenset[str]:
    return frozenset(tool["function"]["name"] for tool in tools)


# Marks of forms that are not known. Their templates may have signs of others, which are longer.
STRANGE = (
    *("<|tool_call", "<tool_calls>", "<tool_sep>", "<TOOLCALL>", "<|START_ACTION|>", "<invoke "),
    *("<\uff5ctool\u2581call", "<|action_start|>"),
)
# In this order: the first whose sign a template has.
FAMILIES = {
    "harmony": Family(
        signs=("<|channel|>",),
        marks=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"),
        reader=lambda tools: Harmony(),
        calls=harmony_calls,
        answer=harmony_answer,
    ),
    "seed": Family(
        signs=("<seed:tool_call>",),
        marks=(
            *("<seed:tool_call>", "</seed:tool_call>", "<function=", "</function>"),
            *("<parameter=", "</parameter>"),
        ),
        reader=lambda tools: Calls(
            ("<seed:tool_call>",),
            ("</seed:tool_call>", "</function>"),
            tools=names(tools),
            xml=tools,
        ),
        calls=coder_calls,
        begin="<seed:tool_call>\n<function=NAME>",
    ),
    "qwen-coder": Family(
        signs=("<function=",),
        marks=(
            *("<tool_call>", "</tool_call>", "<function=", "</function>"),
            *("<parameter=", "</parameter>"),
        ),
        reader=lambda tools: Calls(
            ("<tool_call>",),
            ("</tool_call>", "</function>"),
            tools=names(tools),
            xml=tools,
        ),
        calls=coder_calls,
        begin="<tool_call>\n<function=NAME>",
    ),
    "glm": Family(
        signs=("<arg_key>",),
        marks=(
            *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"),
            *("<arg_value>", "</arg_value>"),
        ),
        reader=lambda tools: Calls(("<tool_call>",), ("</tool_call>",), xml=tools, keyed=True),
        calls=hermes_calls,  # objects, which are read, too: its own form keeps no schema
        begin="<tool_call>NAME\n",
    ),
    "hermes": Family(
        signs=("<tool_call>",),
        marks=("<tool_call>", "</tool_call>"),
        reader=lambda tools: Calls(
            ("<tool_call>",), ("</tool_call>",), tools=names(tools), bare=True
        ),
        calls=hermes_calls,
        begin='<tool_call>\n{"name": "NAME"',
    ),
    "mistral": Family(
        signs=("[TOOL_CALLS]",),
        marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        reader=lambda tools: Calls(("[TOOL_CALLS]",), named=True, separators=SEPARATORS),
        calls=mistral_calls,
        short_ids=True,
    ),
    "llama": Family(
        signs=("<|python_tag|>", '"parameters":'),
        marks=("<|python_tag|>", "<|python_start|>", "<|python_end|>"),  # Llama 3 and 4
        reader=lambda tools: Calls(
            ("<|python_tag|>", "<|python_start|>"),
            ("<|python_end|>",),
            tools=names(tools),
            bare=True,
            separators=SEPARATORS,
        ),
        calls=llama_calls,
        bare=True,
        arguments="parameters",
    ),
}


def family_of(template: str) -> str | None:
    """The family whose signs a chat template has; None for a form that is not known."""
    if any(mark in template for mark in STRANGE):
        return None
    return next(
        (name for name, f in FAMILIES.items() if any(sign in template for sign in f.signs)), None
    )
