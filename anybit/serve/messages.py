"""Anthropic's Messages over a chat: /v1/messages."""

import json
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from anybit.serve import mistakes, protocol
from anybit.serve.answers import Answer, Asked, Block, Failed, Text
from anybit.serve.encoding import Frame, around, event
from anybit.serve.events import Events
from anybit.serve.fields import ANNOTATIONS, Body, Replayed, offers, reads
from anybit.serve.protocol import ChatMessage, ChatRequest, plain
from anybit.serve.reading import Plain
from anybit.serve.server import Server

STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class TextPart(Replayed):
    type: Literal["text"]
    text: str


class ThinkingPart(Replayed):
    type: Literal["thinking"]
    thinking: str


class RedactedPart(Replayed):
    """Thoughts that only Anthropic can read."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUsePart(Replayed):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] | None


class TextSource(Body):
    """A document that is text. media_type: its only one, by the protocol."""

    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class DocumentPart(Replayed):
    type: Literal["document"]
    source: Annotated[TextSource, reads("text")]
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        """Its parts as lines of the message."""
        return "\n".join(filter(None, (self.title, self.context, self.source.data))) + "\n"


Texts = Annotated[
    Annotated[str, Tag("[text]")]
    | Annotated[
        list[
            Annotated[
                TextPart | DocumentPart,
                Field(discriminator="type"),
                reads("text", "document"),
            ]
        ],
        Tag("[parts]"),
    ],
    protocol.PARTS,
]


class ToolResultPart(Replayed):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None


AnyPart = Annotated[
    TextPart | DocumentPart | ThinkingPart | RedactedPart | ToolUsePart | ToolResultPart,
    Field(discriminator="type"),
    reads("text", "document", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]


class MessageParam(Replayed):
    role: Literal["user", "assistant"]
    content: Annotated[
        Annotated[str, Tag("[text]")]
        | Annotated[list[AnyPart], Field(fail_fast=True), Tag("[parts]")],
        protocol.PARTS,
    ]


class ToolParam(Replayed):
    # How arguments are streamed, and samples of them.
    passes = ANNOTATIONS | {"eager_input_streaming", "input_examples"}

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Body):
    """effort: "high" is the same as none, by the protocol."""

    format: protocol.FlatSchema | None = None
    effort: str | None = None


class Thinking(protocol.Thinking):
    @model_validator(mode="after")
    def budgeted(self) -> "Thinking":
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise PydanticCustomError(
                "budget", "budget_tokens goes with the type enabled, and only it"
            )
        return self


class CountRequest(Body):
    """POST /v1/messages/count_tokens: a conversation."""

    passes = frozenset(("cache_control",))  # prefixes are always cached

    model: str
    messages: list[MessageParam] = Field(min_length=1, fail_fast=True)
    system: Texts | None = None
    tools: list[Annotated[ToolParam, offers("custom")]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # Edits save tokens of long conversations. None is made here, and the answer says so.
    context_management: dict[str, Any] | None = None


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    stop_sequences: list[protocol.Text] | None = Field(default=None, max_length=protocol.MAX_STOPS)
    stream: bool | None = None
    metadata: dict[str, Any] | None = None

    def chat(self) -> ChatRequest:
        """The same as a request of /v1/chat/completions."""
        messages = []
        if self.system:
            messages.append(ChatMessage(role="system", content=plain(self.system)))
        for message in self.messages:
            messages += chat_messages(message)
        last = self.messages[-1]
        if last.role == "assistant" and not last.content and len(messages) > 1:
            messages.pop()  # it begins nothing
        fields: dict[str, Any] = {}
        if self.tools:
            fields["tools"] = [
                protocol.Tool(
                    type="function",
                    function=protocol.Function(
                        name=tool.name, description=tool.description, parameters=tool.input_schema
                    ),
                )
                for tool in self.tools
            ]
        if self.tool_choice is not None:
            choice = self.tool_choice
            if (choice.type == "tool") != (choice.name is not None):
                raise HTTPException(400, "tool_choice: a name goes with the type tool, and only it")
            named = {"type": "function", "function": {"name": choice.name}}
            fields["tool_choice"] = (
                named if choice.name else {"any": "required"}.get(choice.type, choice.type)
            )
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        config = self.output_config or OutputConfig()
        if config.format is not None:
            schema = {"schema": config.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if config.effort != "high":
            fields["reasoning_effort"] = config.effort
        return ChatRequest(
            messages=messages,
            thinking=self.thinking,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences or None,
            continue_final_message=messages[-1].role == "assistant",
            **fields,
        )


class Counted(BaseModel):
    input_tokens: int


class MessageReply(BaseModel):
    id: str
    type: str
    role: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    stop_details: None = None
    container: None = None
    usage: dict[str, Any]


def chat_messages(message: MessageParam) -> list[ChatMessage]:
    """A message as chat has it: results of tools are messages of their own there."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    out, text, thoughts, calls = [], "", "", []
    for part in message.content:
        if isinstance(part, TextPart | DocumentPart):
            text += part.text
        elif isinstance(part, ThinkingPart):
            thoughts += part.thinking
        elif isinstance(part, RedactedPart):
            pass
        elif isinstance(part, ToolUsePart):
            function = protocol.Called(name=part.name, arguments=json.dumps(part.input or {}))
            calls.append(protocol.ToolCall(id=part.id, function=function))
        else:
            result = plain(part.content)
            result = f"Error: {result}" if part.is_error else result
            out.append(ChatMessage(role="tool", content=result, tool_call_id=part.tool_use_id))
    if message.role == "user" and (thoughts or calls):
        raise HTTPException(400, "messages: a user neither thinks nor calls tools")
    if message.role == "assistant" and out:
        raise HTTPException(400, "messages: results of tools are the user's")
    if text or thoughts or calls or not out:
        out.append(
            ChatMessage(
                role=message.role,
                content=text,
                reasoning_content=thoughts or None,
                tool_calls=calls or None,
            )
        )
    return out


class MessagesAnswer(Answer):
    """The answer, with a block for each part. silent: blocks of thoughts are empty."""

    def __init__(self, asked: Asked, edits: bool, silent: bool):
        super().__init__(asked, "msg_")
        self.edited: dict[str, Any] = {"context_management": {"applied_edits": []}} if edits else {}
        self.silent = silent

    async def whole(self) -> dict[str, Any]:
        await self.end()
        (text,) = self.texts
        blocks = [
            shown(replace(block, text="") if self._hidden(block.kind) else block)
            for block in text.blocks
        ]
        usage = self._usage() | SERVICE
        return self._message(blocks, self._stop(text)) | {"usage": usage} | self.edited

    def frame(self, index: int) -> Frame | None:
        (text,) = self.texts
        at = len(text.blocks) - 1
        if at < 0 or type(text.reader) is not Plain:
            return None
        return around(lambda text: self._delta(at, "content", text))

    def events(self) -> Events:
        (text,) = self.texts
        usage = self._usage() | {"output_tokens": 0} | SERVICE
        message = self._message([], stopped(None))
        out = named({"type": "message_start", "message": message | {"usage": usage}})
        at = -1
        try:
            while self.open:
                deltas = yield out
                out = b""
                for step in map(self.step, deltas):
                    for piece, new in zip(step.pieces, step.new, strict=True):
                        if new:
                            out += self._stopped(text, at)
                            at += 1
                            block = text.blocks[at] if piece.kind == "call" else Block(piece.kind)
                            start = shown(Block(block.kind, "", block.id, block.name))
                            out += named(
                                {"type": "content_block_start", "index": at, "content_block": start}
                            )
                        if self._hidden(piece.kind):
                            continue
                        if piece.text and (piece.kind != "call" or is_object(text.blocks[at].text)):
                            out += self._delta(at, piece.kind, piece.text)
        except Failed as failed:
            return named(mistakes.anthropic_error(failed.status, str(failed)))
        usage = self._usage()
        out += self._stopped(text, at) + named(
            {"type": "message_delta", "delta": self._stop(text), "usage": usage} | self.edited
        )
        return out + named({"type": "message_stop"})

    def _delta(self, at: int, kind: str, text: str) -> bytes:
        body = {"type": "content_block_delta", "index": at, "delta": delta(kind, text)}
        return named(body)

    def _stopped(self, text: Text, at: int) -> bytes:
        if at < 0:
            return b""
        stop = named({"type": "content_block_stop", "index": at})
        return (
            self._delta(at, "signature", "") + stop if text.blocks[at].kind == "reasoning" else stop
        )

    def _message(self, content: list[dict[str, Any]], stop: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.asked.model,
            "content": content,
        } | stop

    def _stop(self, text: Text) -> dict[str, Any]:
        reason, sequence = STOPS[text.finish or "stop"], text.completion.stop_reason
        if isinstance(sequence, str) and reason == "end_turn":
            return stopped("stop_sequence", sequence)
        return stopped(reason)

    def _hidden(self, kind: str) -> bool:
        return self.silent and kind == "reasoning"

    def _usage(self) -> dict[str, Any]:
        prompt, written, cached = self.counts
        thoughts = sum(text.thoughts for text in self.texts)
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,  # writing prefixes into the cache costs nothing
            "cache_read_input_tokens": cached,
            "output_tokens": written,
            "output_tokens_details": {"thinking_tokens": thoughts},
            "server_tool_use": None,
        }


# What else the usage of a message tells.
SERVICE: dict[str, Any] = {
    "cache_creation": {"ephemeral_1h_input_tokens": 0, "ephemeral_5m_input_tokens": 0},
    "inference_geo": None,
    "service_tier": "standard",
}


def stopped(reason: str | None, sequence: str | None = None) -> dict[str, Any]:
    """Why a message has ended, in the fields of a message and of its last delta."""
    return {
        "stop_reason": reason,
        "stop_sequence": sequence,
        "stop_details": None,
        "container": None,
    }


def shown(block: Block) -> dict[str, Any]:
    """A part of an answer in Anthropic's form."""
    if block.kind == "content":
        return {"type": "text", "text": block.text, "citations": None}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    arguments = {}
    if is_object(block.text):
        # Not of a text that has ended in the middle of it.
        with suppress(ValueError, RecursionError):
            arguments = json.loads(block.text, strict=False)
    call = {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}
    return call | {"caller": {"type": "direct"}}


def is_object(arguments: str) -> bool:
    """Whether a call's arguments are an object, or begin as one; the protocol has no others."""
    return arguments.lstrip()[:1] == "{"


def delta(kind: str, text: str) -> dict[str, Any]:
    if kind == "content":
        return {"type": "text_delta", "text": text}
    if kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    if kind == "signature":  # without which clients drop thoughts, though there is none
        return {"type": "signature_delta", "signature": text}
    return {"type": "input_json_delta", "partial_json": text}


def named(body: dict[str, Any]) -> bytes:
    return event(body, body["type"])


class ErrorReply(BaseModel):
    type: str
    error: dict[str, str]
    request_id: str | None = None


def add_routes(app: FastAPI, server: Server) -> None:
    """The routes of Anthropic's protocol."""
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorReply} for status in mistakes.ERRORS
    }

    @app.post("/v1/messages", response_model=MessageReply, responses=errors | mistakes.STREAM)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        asked = await server.ask(request, body.model, body.chat)
        silent = body.thinking is not None and body.thinking.display == "omitted"
        answer = MessagesAnswer(asked, bool(body.context_management), silent)
        return await server.reply(request, answer, body.stream)

    @app.post("/v1/messages/count_tokens", response_model=Counted, responses=errors)
    async def count_tokens(body: CountRequest, request: Request) -> Counted:
        server.model(body.model)
        whole = MessagesRequest(**dict(body), max_tokens=1)
        return Counted(input_tokens=len((await server.prepare(request, whole.chat())).prompt))
