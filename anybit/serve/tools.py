"""The forms in which families of models write tool calls: how to know, read and force them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anybit.engine.schemas import json_rule, kinds
from anybit.errors import InvalidInput
from anybit.serve.functions import called
from anybit.serve.harmony import Harmony
from anybit.serve.reading import Calls, Piece, Plain, Reader

Tools = list[dict[str, Any]]
SEPARATORS = ",;[]"


@dataclass(frozen=True)
class Family:
    """One form of tool calls.

    signs: any of these in a chat template tells the family. marks: of which some are special
    tokens, that the text must then show. reader: of one text whose model was given these tools.
    grammar: of texts that are calls, from the rule of a
    call's JSON object and a function that writes a mark; None if they cannot be forced. bare:
    whether these begin with the object, without a mark.
    """

    signs: tuple[str, ...]
    marks: tuple[str, ...]
    reader: Callable[[Tools], Reader]
    grammar: Callable[[str, Callable[[str], str]], str] | None = None
    bare: bool = False
    arguments: str = "arguments"  # their name in the object
    short_ids: bool = False

    def forced(self, tools: Tools, several: bool, mark: Callable[[str], str]) -> str:
        """A Lark grammar of texts that call these tools, once or several times.

        mark: from a mark to its notation, which differs for special tokens.
        """
        if self.grammar is None:
            raise InvalidInput(
                "tool_choice: calls of this model's form cannot be forced; use auto or none"
            )
        options = " | ".join(self.call(tool["function"]) for tool in tools)
        rules = self.grammar("call" if several else "one", mark)
        return f"start: calls\n{rules}\nobject: {options}\n"

    def optional(self, tools: Tools, several: bool, mark: Callable[[str], str], schema: Any) -> str:
        """The same, or an object of the schema instead. Calls that cannot be forced are free."""
        if self.grammar is not None:
            rules = self.forced(tools, several, mark)
        else:
            inside = " | ".join(map(mark, self.marks))
            rules = f"start: calls\ncalls: {mark(self.marks[0])} (FREE | {inside})*\n"
            rules += "FREE: /(?s:.)+/\n"
        return f"{rules.replace('calls', 'calls | answer', 1)}answer: {json_rule(schema)}\n"

    def begins(self, tools: Tools) -> tuple[str, ...]:
        """What texts of `optional` begin with when they are calls."""
        if not self.bare:
            return self.marks[:1]
        return tuple("".join(self.opening(tool["function"])) for tool in tools)

    def call(self, function: dict[str, Any]) -> str:
        """A call's JSON object as a part of a Lark rule.

        The schema is a document by itself: its references, `$id` and `$schema` mean what they mean
        there, whatever other tools say. Around it, white space is as in all the templates.
        """
        opening = " ".join(map(json.dumps, self.opening(function)))
        schema = function.get("parameters")
        if schema is None:
            schema = {"additionalProperties": False}
        found = kinds(schema, schema)
        if "object" not in found:
            raise InvalidInput(
                f"tools: the parameters of {function['name']!r} are of type "
                f"{' or '.join(sorted(found)) or 'none'!r:.50}; arguments are an object"
            )
        schema = schema if found == {"object"} else schema | {"type": "object"}
        return f'{opening} {json_rule(schema)} "}}"'

    def opening(self, function: dict[str, Any]) -> tuple[str, ...]:
        """A call's JSON object up to its arguments, in words that are JSON's, too.

        A longer one would win against JSON's where the text may be another object instead.
        """
        name, arguments = json.dumps(function["name"]), f'"{self.arguments}"'
        return "{", '"name"', ":", " ", name, ",", " ", arguments, ":", " "


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


def hermes_grammar(rule: str, mark: Callable[[str], str]) -> str:
    one = f'{mark("<tool_call>")} "\\n" object "\\n" {mark("</tool_call>")}'
    return f'calls: {rule}\none: {one}\ncall: one ("\\n" one)*'


def llama_grammar(rule: str, mark: Callable[[str], str]) -> str:
    return "calls: object"


def mistral_grammar(rule: str, mark: Callable[[str], str]) -> str:
    return f'calls: {mark("[TOOL_CALLS]")} "[" {rule} "]"\none: object\ncall: object (", " object)*'


def names(tools: Tools) -> frozenset[str]:
    return frozenset(tool["function"]["name"] for tool in tools)


# In this order: the first whose sign a template has.
FAMILIES = {
    "harmony": Family(
        signs=("<|channel|>",),
        marks=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"),
        reader=lambda tools: Harmony(),
    ),
    "qwen-coder": Family(
        signs=("<function=",),
        marks=("<tool_call>", "</tool_call>"),
        reader=lambda tools: Calls(
            ("<tool_call>",),
            ("</tool_call>", "</function>"),
            tools=names(tools),
            xml=lambda body: called(body, tools),
        ),
    ),
    "hermes": Family(
        signs=("<tool_call>",),
        marks=("<tool_call>", "</tool_call>"),
        reader=lambda tools: Calls(
            ("<tool_call>",), ("</tool_call>",), tools=names(tools), bare=True
        ),
        grammar=hermes_grammar,
    ),
    "mistral": Family(
        signs=("[TOOL_CALLS]",),
        marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        reader=lambda tools: Calls(("[TOOL_CALLS]",), named=True, separators=SEPARATORS),
        grammar=mistral_grammar,
        short_ids=True,
    ),
    "llama": Family(
        signs=("<|python_tag|>", '"parameters":'),
        marks=("<|python_tag|>",),
        reader=lambda tools: Calls(
            ("<|python_tag|>",), tools=names(tools), bare=True, separators=SEPARATORS
        ),
        grammar=llama_grammar,
        bare=True,
        arguments="parameters",
    ),
}


def family_of(template: str) -> str | None:
    """The family whose signs a chat template has."""
    return next(
        (name for name, f in FAMILIES.items() if any(sign in template for sign in f.signs)), None
    )
