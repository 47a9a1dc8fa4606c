"""Anthropic's Messages over a chat: /v1/messages."""

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from anybit.serve import protocol
from anybit.serve.answers import Answer, Asked, Block, Failed, Text, event
from anybit.serve.protocol import ChatMessage, ChatRequest
from anybit.serve.server import Server

STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class CacheControl(protocol.Request):
    """Prefixes are always cached here, so that this changes nothing."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class Part(protocol.Request):
    cache_control: CacheControl | None = None


class TextPart(Part):
    type: Literal["text"]
    text: str


class ThinkingPart(Part):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUsePart(Part):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultPart(Part):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextPart] | None = None
    is_error: bool | None = None


AnyPart = Annotated[
    TextPart | ThinkingPart | ToolUsePart | ToolResultPart, Field(discriminator="type")
]


class MessageParam(protocol.Request):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[AnyPart], Field(fail_fast=True)]


class ToolParam(Part):
    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(protocol.Request):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Metadata(protocol.Request):
    user_id: str | None = None


class MessagesRequest(protocol.Request):
    """POST /v1/messages."""

    model: str
    messages: list[MessageParam] = Field(min_length=1, fail_fast=True)
    max_tokens: int = Field(ge=1)
    system: str | list[TextPart] | None = None
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    stop_sequences: list[protocol.Text] | None = Field(default=None, max_length=protocol.MAX_STOPS)
    stream: bool | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    metadata: Metadata | None = None

    def chat(self) -> ChatRequest:
        """The same as a request of /v1/chat/completions."""
        messages = []
        if self.system:
            messages.append(ChatMessage(role="system", content=joined(self.system)))
        for message in self.messages:
            messages += chat_messages(message)
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
            fields["tool_choice"] = named if choice.name else {"any": "required"}.get(
                choice.type, choice.type
            )  # fmt: skip
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        return ChatRequest(
            messages=messages, max_tokens=self.max_tokens, temperature=self.temperature,
            top_p=self.top_p, top_k=self.top_k, stop=self.stop_sequences or None,
            continue_final_message=self.messages[-1].role == "assistant", **fields,
        )  # fmt: skip


class CountRequest(protocol.Request):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[MessageParam] = Field(min_length=1, fail_fast=True)
    system: str | list[TextPart] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None


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
    usage: dict[str, int]


def joined(content: str | list[TextPart] | None) -> str:
    return content or "" if not isinstance(content, list) else "".join(p.text for p in content)


def chat_messages(message: MessageParam) -> list[ChatMessage]:
    """A message as chat has it: results of tools are messages of their own there."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    out, text, thoughts, calls = [], "", "", []
    for part in message.content:
        if isinstance(part, TextPart):
            text += part.text
        elif isinstance(part, ThinkingPart):
            thoughts += part.thinking
        elif isinstance(part, ToolUsePart):
            function = protocol.Called(name=part.name, arguments=json.dumps(part.input))
            calls.append(protocol.ToolCall(id=part.id, function=function))
        else:
            result = joined(part.content)
            result = f"Error: {result}" if part.is_error else result
            out.append(ChatMessage(role="tool", content=result, tool_call_id=part.tool_use_id))
    if message.role == "user" and (thoughts or calls):
        raise HTTPException(400, "messages: a user neither thinks nor calls tools")
    if message.role == "assistant" and out:
        raise HTTPException(400, "messages: results of tools are the user's")
    if text or thoughts or calls or not out:
        out.append(
            ChatMessage(
                role=message.role, content=text, reasoning_content=thoughts or None,
                tool_calls=calls or None,
            )
        )  # fmt: skip
    return out


class MessagesAnswer(Answer):
    """The answer, with a block for each part."""

    def __init__(self, asked: Asked):
        super().__init__(asked, "msg_")

    async def whole(self) -> dict[str, Any]:
        await self.end()
        (text,) = self.texts
        return self._message([shown(block) for block in text.blocks], self._stop(text)) | {
            "usage": self._usage()
        }

    async def events(self) -> AsyncIterator[bytes]:
        (text,) = self.texts
        usage = self._usage() | {"output_tokens": 0}
        message = self._message([], {"stop_reason": None, "stop_sequence": None})
        yield named({"type": "message_start", "message": message | {"usage": usage}})
        at = -1
        try:
            async for steps in self.steps():
                out = b""
                for step in steps:
                    for piece, new in zip(step.pieces, step.new, strict=True):
                        if new:
                            out += self._stopped(at)
                            at += 1
                            block = text.blocks[at] if piece.kind == "call" else Block(piece.kind)
                            start = shown(Block(block.kind, "", block.id, block.name))
                            out += named({"type": "content_block_start", "index": at,
                                          "content_block": start})  # fmt: skip
                        if piece.text:
                            out += named({"type": "content_block_delta", "index": at,
                                          "delta": delta(piece.kind, piece.text)})  # fmt: skip
                if out:
                    yield out
        except Failed as failed:
            yield named(protocol.anthropic_error(failed.status, str(failed)))
            return
        usage = {"output_tokens": self.counts[1]}
        yield self._stopped(at) + named(
            {"type": "message_delta", "delta": self._stop(text), "usage": usage}
        )
        yield named({"type": "message_stop"})

    def _stopped(self, at: int) -> bytes:
        return b"" if at < 0 else named({"type": "content_block_stop", "index": at})

    def _message(self, content: list[dict[str, Any]], stop: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.asked.model,
            "content": content,
        } | stop  # fmt: skip

    def _stop(self, text: Text) -> dict[str, Any]:
        reason, sequence = STOPS[text.finish or "stop"], text.completion.stop_reason
        if isinstance(sequence, str) and reason == "end_turn":
            return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        prompt, written, cached = self.counts
        return {
            "input_tokens": prompt - cached,
            "cache_read_input_tokens": cached,
            "output_tokens": written,
        }


def shown(block: Block) -> dict[str, Any]:
    """A part of an answer in Anthropic's form."""
    if block.kind == "content":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    try:
        arguments = json.loads(block.text or "{}", strict=False)
    except (ValueError, RecursionError):  # such as of a text that has ended in the middle of it
        arguments = {}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}


def delta(kind: str, text: str) -> dict[str, Any]:
    if kind == "content":
        return {"type": "text_delta", "text": text}
    if kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}


def named(body: dict[str, Any]) -> bytes:
    return event(body, body["type"])


class ErrorReply(BaseModel):
    type: str
    error: dict[str, str]


def add_routes(app: FastAPI, server: Server) -> None:
    """The routes of Anthropic's protocol."""
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorReply} for status in protocol.ERRORS
    }

    @app.post("/v1/messages", response_model=MessageReply, responses=errors | protocol.STREAM)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        asked = await server.ask(request, body.model, body.chat)
        return await server.reply(request, MessagesAnswer(asked), body.stream)

    @app.post("/v1/messages/count_tokens", response_model=Counted, responses=errors)
    async def count_tokens(body: CountRequest, request: Request) -> Counted:
        server.model(body.model)
        whole = MessagesRequest(**dict(body), max_tokens=1)
        return Counted(input_tokens=len((await server.prepare(request, whole.chat())).prompt))
