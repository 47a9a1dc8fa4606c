"""The forms in which families of models write tool calls: how to know, read and force them."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from anybit.engine.structured import json_rule
from anybit.errors import InvalidInput
from anybit.serve.reading import Calls, Harmony, Reader

Tools = list[dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """One form of tool calls.

    signs: any of these in a chat template tells the family. marks: of which some are special
    tokens, that the text must then show. reader: of one text whose model was given these tools.
    grammar: of texts that are calls, from the rule of a
    call's JSON object and a function that writes a mark; None if they cannot be forced.
    """

    signs: tuple[str, ...]
    marks: tuple[str, ...]
    reader: Callable[[Tools], Reader]
    grammar: Callable[[str, Callable[[str], str]], str] | None = None
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
        return f"{rules}\nobject: {options}\n"

    def call(self, function: dict[str, Any]) -> str:
        """A call's JSON object as a part of a Lark rule.

        The schema is a document by itself: its references, `$id` and `$schema` mean what they mean
        there, whatever other tools say. Around it, white space is as in all the templates.
        """
        start = f'{{"name": {json.dumps(function["name"])}, "{self.arguments}": '
        schema = json_rule(function.get("parameters") or {"type": "object"})
        return f'{json.dumps(start)} {schema} "}}"'


def hermes_grammar(rule: str, mark: Callable[[str], str]) -> str:
    one = f'{mark("<tool_call>")} "\\n" object "\\n" {mark("</tool_call>")}'
    return f'start: {rule}\none: {one}\ncall: one ("\\n" one)*'


def llama_grammar(rule: str, mark: Callable[[str], str]) -> str:
    return "start: object"


def mistral_grammar(rule: str, mark: Callable[[str], str]) -> str:
    return f'start: {mark("[TOOL_CALLS]")} "[" {rule} "]"\none: object\ncall: object (", " object)*'


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
            ("<tool_call>",), ("</tool_call>",), xml=lambda body: arguments_of_xml(body, tools)
        ),
    ),
    "hermes": Family(
        signs=("<tool_call>",),
        marks=("<tool_call>", "</tool_call>"),
        reader=lambda tools: Calls(("<tool_call>",), ("</tool_call>",)),
        grammar=hermes_grammar,
    ),
    "mistral": Family(
        signs=("[TOOL_CALLS]",),
        marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        reader=lambda tools: Calls(("[TOOL_CALLS]",), named=True),
        grammar=mistral_grammar,
        short_ids=True,
    ),
    "llama": Family(
        signs=("<|python_tag|>", '"parameters":'),
        marks=("<|python_tag|>",),
        reader=lambda tools: Calls(("<|python_tag|>",), bare=names(tools)),
        grammar=llama_grammar,
        arguments="parameters",
    ),
}


def family_of(template: str) -> str | None:
    """The family whose signs a chat template has."""
    return next(
        (name for name, f in FAMILIES.items() if any(sign in template for sign in f.signs)), None
    )


def arguments_of_xml(body: str, tools: Tools) -> tuple[str, str]:
    """Name and arguments, as JSON, of `<function=NAME><parameter=KEY>VALUE</parameter>...`."""
    name = body.removeprefix("<function=").partition(">")[0].strip()
    tool: dict[str, Any] = next((t["function"] for t in tools if t["function"]["name"] == name), {})
    types = (tool.get("parameters") or {}).get("properties") or {}
    arguments: dict[str, Any] = {}
    for key, value in re.findall(r"<parameter=([^>]*)>\n?(.*?)\n?</parameter>", body, re.DOTALL):
        arguments[key] = value
        kind = types.get(key)
        if isinstance(kind, dict) and kind.get("type") not in (None, "string"):
            with suppress(ValueError):  # then it stays as the model has written it
                arguments[key] = json.loads(value)
    return name, json.dumps(arguments, ensure_ascii=False)
