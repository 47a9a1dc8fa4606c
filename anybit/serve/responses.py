"""OpenAI's Responses over a chat: /v1/responses, without anything kept between requests."""

import time
import uuid
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from anybit.engine.sequence import MAX_LOGPROBS, Logprob
from anybit.serve import mistakes, protocol
from anybit.serve.answers import Answer, Asked, Block, Failed, Text
from anybit.serve.encoding import event
from anybit.serve.events import Events
from anybit.serve.fields import ANNOTATIONS, Body, Not, Replayed, offers, reads
from anybit.serve.protocol import ChatMessage, ChatRequest, plain
from anybit.serve.server import Server


class InputText(Replayed):
    type: Literal["input_text", "output_text", "text"]
    text: str


Texts = Annotated[
    Annotated[str, Tag("[text]")]
    | Annotated[
        list[
            Annotated[
                InputText | protocol.RefusalPart,
                Field(discriminator="type"),
                reads("input_text", "output_text", "text", "refusal"),
            ]
        ],
        Tag("[parts]"),
    ],
    protocol.PARTS,
]


class MessageItem(Replayed):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts


class CallItem(Replayed):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str | None = None


class OutputItem(Replayed):
    type: Literal["function_call_output"]
    call_id: str
    output: Texts


class ReasoningText(Replayed):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Replayed):
    """Thoughts, which are in `content` alone."""

    passes = ANNOTATIONS | {"summary", "encrypted_content"}

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None


def kept(item: Any) -> Any:
    """Refuse an item that only names one of an earlier answer."""
    if isinstance(item, dict) and item.get("type") == "item_reference":
        raise PydanticCustomError(
            "no_item",
            "this server keeps no answers that an item_reference could name; send the item",
        )
    return item


Item = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[CallItem, Tag("[function_call]")]
    | Annotated[OutputItem, Tag("[function_call_output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")],
    Discriminator(lambda item: f"[{(isinstance(item, dict) and item.get('type')) or 'message'}]"),
    reads("message", "function_call", "function_call_output", "reasoning"),
    BeforeValidator(kept),
]


class FunctionTool(protocol.Function):
    type: Literal["function"]


class NamedTool(Body):
    type: Literal["function"]
    name: str


class OnlyTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, fail_fast=True)


class TextOptions(Body):
    format: (
        Annotated[
            protocol.TextFormat | protocol.JsonFormat | protocol.FlatSchema,
            Field(discriminator="type"),
        ]
        | None
    ) = None
    verbosity: str | None = None


class Reasoning(Body):
    """Thoughts come whole, and are never summed up."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


# What an answer shall include: this server's have no parts for the others.
SCORES = "message.output_text.logprobs"
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
]


class ResponsesRequest(protocol.Labels):
    """POST /v1/responses. max_tool_calls bounds tools that a server runs itself."""

    passes = protocol.Labels.passes | {"max_tool_calls"}

    model: str | None = None
    input: Annotated[
        Annotated[protocol.Text, Tag("[text]")]
        | Annotated[list[Item], Field(min_length=1, fail_fast=True), Tag("[parts]")],
        protocol.PARTS,
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    include: list[Include] | None = None
    tools: list[Annotated[FunctionTool, offers("function")]] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("[word]")]
            | Annotated[OnlyTools, Tag("[tools]")]
            | Annotated[NamedTool, offers("function"), Tag("[tool]")],
            protocol.WORD_OR_TOOL,
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    store: Not | None = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    truncation: Literal["auto", "disabled"] | None = None
    background: Not | None = None

    def chat(self) -> ChatRequest:
        """The same as a request of /v1/chat/completions."""
        messages = []
        if self.instructions:
            messages.append(ChatMessage(role="system", content=self.instructions))
        if isinstance(self.input, str):
            messages.append(ChatMessage(role="user", content=self.input))
        else:
            messages += chat_messages(self.input)
        fields: dict[str, Any] = {}
        if self.tools:
            fields["tools"] = [
                protocol.Tool(
                    type="function",
                    function=protocol.Function(**tool.model_dump(exclude={"type"})),
                )
                for tool in self.tools
            ]
        choice: Any = self.tool_choice
        if isinstance(choice, NamedTool):
            choice = wrapped(choice)
        elif isinstance(choice, OnlyTools):
            allowed = {"mode": choice.mode, "tools": [wrapped(tool) for tool in choice.tools]}
            choice = {"type": "allowed_tools", "allowed_tools": allowed}
        kind: Any = self.text.format if self.text else None
        if isinstance(kind, protocol.FlatSchema):
            kind = {"type": "json_schema", "json_schema": {"schema": kind.schema_}}
        return ChatRequest(
            messages=messages,
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            tool_choice=choice,
            response_format=kind,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            verbosity=self.text.verbosity if self.text else None,
            logprobs=SCORES in (self.include or ()) or bool(self.top_logprobs),
            top_logprobs=self.top_logprobs,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            **fields,
        )


def wrapped(tool: NamedTool) -> dict[str, Any]:
    """A tool's name as chat has it."""
    return {"type": "function", "function": {"name": tool.name}}


class ResponsesReply(BaseModel):
    id: str
    object: str
    created_at: int
    model: str
    status: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None = None


def chat_messages(items: list[Item]) -> list[ChatMessage]:
    """Items as messages of a chat: thoughts and calls are parts of an answer there."""
    out: list[ChatMessage] = []

    def answer() -> ChatMessage:
        """The assistant's message that is being put together."""
        if not out or out[-1].role != "assistant":
            out.append(ChatMessage(role="assistant", content=""))
        return out[-1]

    for item in items:
        if isinstance(item, CallItem):
            function = protocol.Called(name=item.name, arguments=item.arguments)
            call = protocol.ToolCall(id=item.call_id, function=function)
            message = answer()
            message.tool_calls = [*(message.tool_calls or ()), call]
        elif isinstance(item, OutputItem):
            text = plain(item.output)
            out.append(ChatMessage(role="tool", content=text, tool_call_id=item.call_id))
        elif isinstance(item, ReasoningItem):
            message = answer()
            thoughts = "".join(part.text for part in item.content or ())
            message.reasoning_content = (message.reasoning_content or "") + thoughts
        elif item.role == "assistant":
            message = answer()
            message.content = plain(message.content) + plain(item.content)
        else:
            out.append(ChatMessage(role=item.role, content=plain(item.content)))
    return out


class ResponsesAnswer(Answer):
    """The answer, with an item for each part."""

    def __init__(self, asked: Asked, body: ResponsesRequest):
        super().__init__(asked, "resp_")
        said = body.model_dump(by_alias=True, include=set(SAID))
        self.said = {k: default if said[k] is None else said[k] for k, default in SAID.items()}
        told = {k: v for k, v in self.said["text"].items() if v is not None}
        self.said["text"] = SAID["text"] | told
        form = self.said["text"]["format"]
        if form["type"] == "json_schema":  # whose name and strictness an answer always tells
            form |= {"name": form["name"] or "schema", "strict": bool(form["strict"])}
        self.ids: list[str] = []  # of the items
        self.number = 0  # of the events so far

    async def whole(self) -> dict[str, Any]:
        await self.end()
        (text,) = self.texts
        return self._response(text, status(text))

    def events(self) -> Events:
        (text,) = self.texts
        begun = self._response(text, "in_progress")
        out = self._event("response.created", response=begun)
        out += self._event("response.in_progress", response=begun)
        at = -1
        try:
            while self.open:
                deltas = yield out
                out = b""
                for step in map(self.step, deltas):
                    for piece, new in zip(step.pieces, step.new, strict=True):
                        if new:
                            out += self._done(text, at)
                            at += 1
                            out += self._begun(text, at)
                        if piece.text:
                            block, found = text.blocks[at], step.logprobs
                            scores = found if piece is step.pieces[-1] else []
                            kind = DELTAS[piece.kind]
                            out += self._part(block, at, kind, scores, delta=piece.text)
        except Failed as failed:
            response = self._response(text, "failed") | {
                "error": {"code": "server_error", "message": str(failed)}
            }
            return self._event("response.failed", response=response)
        end = status(text)
        out += self._done(text, at, end)
        return out + self._event(f"response.{end}", response=self._response(text, end))

    def _begun(self, text: Text, at: int) -> bytes:
        block = text.blocks[at]
        empty = Block(block.kind, "", block.id, block.name)
        item = self._item(at, empty, "in_progress")
        if block.kind != "call":
            item["content"] = []
        out = self._event("response.output_item.added", output_index=at, item=item)
        if block.kind != "call":
            out += self._part(block, at, "response.content_part.added", part=self._text(empty))
        return out

    def _done(self, text: Text, at: int, state: str = "completed") -> bytes:
        if at < 0:
            return b""
        block = text.blocks[at]
        name = "arguments" if block.kind == "call" else "text"
        more = {"name": block.name} if block.kind == "call" else {}
        kind = DELTAS[block.kind].replace("delta", "done")
        out = self._part(block, at, kind, block.logprobs, **{name: block.text}, **more)
        if block.kind != "call":
            out += self._part(block, at, "response.content_part.done", part=self._text(block))
        item = self._item(at, block, state)
        return out + self._event("response.output_item.done", output_index=at, item=item)

    def _part(
        self, block: Block, at: int, kind: str, scores: Iterable[Logprob] = (), **fields: Any
    ) -> bytes:
        if block.kind != "call":
            fields["content_index"] = 0
        if "output_text" in kind:
            fields["logprobs"] = self.spelled(scores)
        return self._event(kind, item_id=self._id(at, block), output_index=at, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self.number += 1
        return event({"type": kind, "sequence_number": self.number - 1} | fields, kind)

    def _id(self, at: int, block: Block) -> str:
        if len(self.ids) <= at:  # items are named in their order
            self.ids.append(IDS[block.kind] + uuid.uuid4().hex)
        return self.ids[at]

    def _item(self, at: int, block: Block, state: str) -> dict[str, Any]:
        item: dict[str, Any] = {
            "id": self._id(at, block),
            "type": ITEMS[block.kind],
            "status": state,
        }
        if block.kind == "call":
            return item | {"call_id": block.id, "name": block.name, "arguments": block.text}
        if block.kind == "reasoning":
            return item | {"summary": [], "content": [self._text(block)]}
        return item | {"role": "assistant", "content": [self._text(block)]}

    def _text(self, block: Block) -> dict[str, Any]:
        """A block's text in OpenAI's form."""
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        scores = self.spelled(block.logprobs)
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": scores}

    def _response(self, text: Text, state: str) -> dict[str, Any]:
        prompt, written, cached = self.counts
        items = [self._item(i, block, "completed") for i, block in enumerate(text.blocks)]
        if items and state != "completed":
            items[-1]["status"] = "incomplete"
        return self.said | {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "model": self.asked.model,
            "status": state,
            "output": items,
            "error": None,
            "incomplete_details": INCOMPLETE if state == "incomplete" else None,
            "completed_at": int(time.time()) if state == "completed" else None,
            "background": False,
            "store": False,
            "previous_response_id": None,
            "max_tool_calls": None,
            "service_tier": "default",
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens": written,
                "output_tokens_details": {"reasoning_tokens": text.thoughts},
                "total_tokens": prompt + written,
            }
            if state not in ("in_progress", "failed")
            else None,
        }


# What an answer repeats of its request, and what stands for nothing there.
SAID: dict[str, Any] = {
    "frequency_penalty": 0.0,
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "prompt_cache_key": None,
    "reasoning": None,
    "safety_identifier": None,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
INCOMPLETE = {"reason": "max_output_tokens"}
DELTAS = {
    "content": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "call": "response.function_call_arguments.delta",
}
ITEMS = {"content": "message", "reasoning": "reasoning", "call": "function_call"}
IDS = {"content": "msg_", "reasoning": "rs_", "call": "fc_"}


def status(text: Text) -> str:
    return "incomplete" if text.completion.finish == "length" else "completed"


def add_routes(app: FastAPI, server: Server) -> None:
    """The route of OpenAI's newer protocol."""

    @app.post(
        "/v1/responses",
        response_model=ResponsesReply,
        responses=mistakes.ERRORS | mistakes.STREAM,
    )
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        asked = await server.ask(request, body.model, body.chat)
        return await server.reply(request, ResponsesAnswer(asked, body), body.stream)
