"""From a chat request to a prompt, parameters, and a reader of the answer."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from anybit.engine.sequence import SamplingParams
from anybit.engine.structured import Structured, by_number
from anybit.errors import AnybitError, InvalidInput, in_a_line
from anybit.serve.fields import naming
from anybit.serve.harmony import Harmony
from anybit.serve.model import Model
from anybit.serve.protocol import ChatMessage, ChatRequest, NamedTool, OnlyTools
from anybit.serve.reading import Plain, Reader, Thoughts
from anybit.serve.texts import Job, room
from anybit.serve.tools import FAMILIES, Either, Family, family_of

# What clients say outside of chat_template_kwargs.
OWN_FIELDS = (
    "messages",
    "tools",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
)
THINK = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


@dataclass(frozen=True)
class Prepared:
    """A conversation that is ready to run. calls: tool calls of an answer at most."""

    prompt: list[int]
    params: SamplingParams
    readers: Callable[[], Reader] = Plain
    calls: int | None = None
    short_ids: bool = False


class Dialect:
    """How a model writes tool calls and thoughts, by its chat template.

    parser: the family of tool calls, if not the template tells it; "none": no calls are read.
    """

    def __init__(self, llm: Model, parser: str | None = None):
        self.template = template_text(llm.tokenizer)
        name = parser or family_of(self.template) if self.template else None
        self.family: Family | None = FAMILIES.get(name or "none")
        self.harmony = name == "harmony"
        self.think = next((pair for pair in THINK if pair[1] in self.template), None)
        special = {
            entry.content: token
            for token, entry in getattr(llm.tokenizer, "added_tokens_decoder", {}).items()
        }
        self.tokens = special
        marks = (*(self.family.marks if self.family else ()), *(self.think or ()))
        # What a special token says is shown, or readers would not find it.
        self.shown = tuple(special[mark] for mark in marks if special.get(mark) in llm.special)
        self.numbered = by_number(llm.tokenizer)

    def prepare(self, body: ChatRequest, params: SamplingParams, job: Job) -> Prepared:
        """Render, tokenize, compile; InvalidInput for what this model's template does not take."""
        tools = self._tools(body)
        begun = self._begun(body)
        options = self._options(body) | ({} if begun is None else {"continue_final_message": True})
        answer = body.add_generation_prompt is not False and begun is None
        messages = [self._message(message) for message in body.messages]
        try:
            text = job.llm.chat_text(messages, answer, tools=tools or None, **options)
        except AnybitError:
            raise
        except Exception as error:  # templates raise all kinds
            raise InvalidInput(untaken(messages, error, begun)) from None
        special = body.add_special_tokens
        special = not self.template if special is None else special
        prompt = job.prompt(text, special, body.kept(room(job.llm, params)))
        thinking = self.think is not None and text.rstrip().endswith(self.think[0])
        if self.think is not None and begun is not None:
            thinking = begun.rfind(self.think[0]) > begun.rfind(self.think[1])
        with naming(body.form):
            structured, begins = self._form(params.structured, body, tools)
        if structured is not None:
            start, end = (self.tokens.get(mark) for mark in self.think or ("", ""))
            think = None if start is None or end is None else (start, end)
            if thinking and think is None:
                raise InvalidInput(
                    f"structured output cannot begin after {self.think}: they are no tokens"
                )
            structured = replace(structured, think=think, thinking=thinking)
            if job.llm.grammars is not None:
                fields = [*(["tools"] if tools else []), *([body.form] if body.form else [])]
                with naming(", ".join(fields)):
                    job.llm.grammars.tried(structured)  # which is kept for the engine
                self._check_apart(structured, begins, job.llm)
        params = replace(params, structured=structured, shown=(*params.shown, *self.shown))
        return Prepared(
            prompt,
            params,
            lambda: self.reader(tools, thinking, begins, structured is None),
            1 if body.parallel_tool_calls is False else None,
            self.family is not None and self.family.short_ids,
        )

    def reader(
        self,
        tools: list[dict[str, Any]],
        thinking: bool,
        begins: tuple[str, ...] = (),
        free: bool = True,
    ) -> Reader:
        """A reader of one answer. begins: how calls do, if the answer is calls or an object.

        free: whether no grammar holds it; then a call ends thoughts.
        """
        if self.harmony:
            return Harmony()
        rest = self.family.reader(tools) if tools and self.family else Plain()
        if begins:
            rest = Either(rest, begins)
        calls = self.family.begun(tools) if free and self.family else ()
        return Thoughts(*self.think, thinking, rest, calls) if self.think else rest

    def _tools(self, body: ChatRequest) -> list[dict[str, Any]]:
        """The tools that the template shall show."""
        if body.tool_choice == "none" or not body.tools:
            if forces(body):
                raise InvalidInput("tool_choice asks for a tool, and the request has no tools")
            return []
        if self.family is None or "tools" not in self.template:
            raise InvalidInput(
                "tools: the model's chat template has none, or writes them in a form that is not "
                f"known; start the server with --tool-parser ({', '.join(FAMILIES)}), or leave "
                "out tools"
            )
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
        if isinstance(body.tool_choice, OnlyTools):
            names = [tool.function.name for tool in body.tool_choice.allowed_tools.tools]
            tools = [named(tools, name) for name in names]
        return tools

    def _begun(self, body: ChatRequest) -> str | None:
        """The text that the answer goes on with; None: it is a message of its own."""
        if not body.continue_final_message:
            return None
        last = body.messages[-1]
        text = last.text
        if last.role != "assistant" or not text or last.tool_calls or self.harmony:
            raise InvalidInput(
                "messages: only a last message of the assistant with text and no tool calls can be "
                "continued, and none of models that write channels (harmony)"
            )
        if body.add_generation_prompt:
            raise InvalidInput("give either add_generation_prompt or continue_final_message")
        return text

    def _form(
        self, asked: Structured | None, body: ChatRequest, tools: list[dict[str, Any]]
    ) -> tuple[Structured | None, tuple[str, ...]]:
        """What an answer must follow, and how calls begin where it is calls or what is asked."""
        if self.family is None:
            return asked, ()
        several = body.parallel_tool_calls is not False
        if tools and forces(body):
            if isinstance(body.tool_choice, NamedTool):
                tools, several = [named(tools, body.tool_choice.function.name)], False
            return Structured(grammar=self.family.forced(tools, several, self._mark)), ()
        if asked is None or not (tools or self.harmony):
            return asked, ()
        if asked.json is None:
            raise InvalidInput(
                f"{'tools' if tools else 'models that write channels (harmony)'} do not go "
                "with a regex, a choice or a grammar; give response_format"
                f"{', leave out one of them, or say tool_choice: none' if tools else ''}"
            )
        grammar = self.family.optional(tools, several, self._mark, asked.json)
        return Structured(grammar=grammar), self.family.begins(tools)

    def _check_apart(self, structured: Structured, begins: tuple[str, ...], llm: Model) -> None:
        """InvalidInput where an object may begin as calls do."""
        assert llm.grammars is not None
        for begin in begins if self.family and self.family.bare else ():
            # The last token of a call's beginning may hold more than it.
            tokens = llm.encode(begin, special=False)[:-1]
            if llm.grammars.matcher(structured).grammar.validate_tokens(tokens) < len(tokens):
                raise InvalidInput(
                    "response_format: its objects have a property 'name', with which this "
                    "model's tool calls begin, too; name it otherwise, or leave out tools"
                )

    def _mark(self, mark: str) -> str:
        """A mark as llguidance's Lark has it: by number, or as text of one token or several."""
        token = self.numbered.get(mark)
        return json.dumps(mark) if token is None else f"<[{token}]>"

    def _options(self, body: ChatRequest) -> dict[str, Any]:
        """Variables for the template, all of which it must read."""
        options = dict(body.chat_template_kwargs or {})
        effort, thinking = body.reasoning_effort, body.enable_thinking
        if effort == "none" and "reasoning_effort" not in self.template:
            effort, thinking = None, bool(thinking)
        if body.thinking and body.thinking.type == "disabled":
            thinking = False
        elif body.thinking and "enable_thinking" in self.template:  # others think as they do
            thinking = True
        for name, value, usual in (
            ("reasoning_effort", effort, "medium"),
            ("verbosity", body.verbosity, "medium"),
            ("enable_thinking", thinking, False),
        ):
            # The usual asks for nothing where a model has no choice.
            if value is not None and (value != usual or name in self.template):
                options[name] = value
        for name in options:
            if name not in self.template or not name.isidentifier():
                given = "chat_template_kwargs." if name in (body.chat_template_kwargs or ()) else ""
                raise InvalidInput(f"{given}{name}: the model's chat template does not read it")
            if name in OWN_FIELDS:
                raise InvalidInput(f"{name} is a field of its own, not of chat_template_kwargs")
        return options

    def _message(self, message: ChatMessage) -> dict[str, Any]:
        """A message as templates want it."""
        role = message.role
        if role == "developer" and "developer" not in self.template:
            role = "system"
        if (role == "tool" or message.tool_calls) and "tool" not in self.template:
            raise InvalidInput("messages: the model's chat template has no tool calls")
        out: dict[str, Any] = {"role": role, "content": message.text}
        for name, value in (
            ("name", message.name),
            ("tool_call_id", message.tool_call_id),
            ("reasoning_content", message.thoughts),
            ("thinking", message.thoughts if self.harmony else None),
        ):
            if value is not None:
                out[name] = value
        if message.tool_calls:
            out["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": arguments(call)},
                }
                for call in message.tool_calls
            ]
        return out


def forces(body: ChatRequest) -> bool:
    """Whether an answer must call a tool."""
    if isinstance(body.tool_choice, OnlyTools):
        return body.tool_choice.allowed_tools.mode == "required"
    return body.tool_choice not in (None, "none", "auto")


def named(tools: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The tool of a name that tool_choice gives."""
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    raise InvalidInput(f"tool_choice names {name!r}, which is not among the tools")


def arguments(call: Any) -> Any:
    """A call's arguments as templates want them: the object, if the text is one."""
    text = call.function.arguments or "{}"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else {} if found is None else text


def untaken(messages: list[dict[str, Any]], error: Exception, begun: str | None) -> str:
    """Why a template does not take a conversation, and the way out. begun: as `Dialect._begun`."""
    if begun is not None and isinstance(error, ValueError):
        return (
            "messages: the model's chat template changes the assistant's last message, "
            "which can so not be continued; end with a user's message"
        )
    calls = (call["function"] for message in messages for call in message.get("tool_calls", ()))
    for function in calls:
        if not isinstance(function["arguments"], dict):
            return (
                f"messages: the arguments of a call of {function['name']!r} are no JSON object, "
                f"and the model's chat template takes nothing else ({in_a_line(error)})"
            )
    return (
        f"messages: the model's chat template does not take them ({in_a_line(error)}); send others "
        "(such as without a system message), or start the server with another --chat-template"
    )


def template_text(tokenizer: Any) -> str:
    """A tokenizer's chat templates as one text; empty without any."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(template.values()) if isinstance(template, dict) else template
