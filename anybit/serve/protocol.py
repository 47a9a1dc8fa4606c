"""The requests of OpenAI's completions, chat and embeddings, with vLLM's additions.

Types are strict and unknown fields are refused, so that nothing a client asks for is ignored.
null stands for the default everywhere. An unknown field may say no, and what comes back of an
answer may hold annotations.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, Protocol

from pydantic import Discriminator, Field, Tag, model_validator

from anybit.engine.sequence import MAX_LOGPROBS, MAX_SAMPLES, SamplingParams
from anybit.engine.structured import Structured
from anybit.errors import InvalidInput
from anybit.serve.fields import Body, Not, Replayed, offers, reads

MAX_PROMPTS = 256
MAX_STOPS = 16
MAX_SEED = 2**63 - 1
SAMPLING = {field.name for field in fields(SamplingParams)}

Token = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Several = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)


def shape(prompt: Any) -> str:
    """Which kind of prompt this is, by its first item: one error then, not one for each kind.

    Tags are in brackets, so that errors do not name them as if they were fields.
    """
    if not isinstance(prompt, list):
        return "[text]"
    first = prompt[0] if prompt else 0
    if isinstance(first, str):
        return "[texts]"
    return "[lists]" if isinstance(first, list) else "[tokens]"


Prompt = Annotated[
    Annotated[Text, Tag("[text]")]
    | Annotated[Tokens, Tag("[tokens]")]
    | Annotated[list[Text], Several, Tag("[texts]")]
    | Annotated[list[Tokens], Several, Tag("[lists]")],
    Discriminator(shape),
]
Stop = Annotated[
    Annotated[Text, Tag("[text]")]
    | Annotated[list[Text], Field(max_length=MAX_STOPS, fail_fast=True), Tag("[texts]")],
    Discriminator(lambda stop: "[texts]" if isinstance(stop, list) else "[text]"),
]
# A text, or parts of one.
PARTS = Discriminator(lambda content: "[parts]" if isinstance(content, list) else "[text]")


Bias = dict[
    Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]
]


def listed(prompt: str | list[Any]) -> list[str | list[int]]:
    """A list of prompts, from one (text, or token ids) or many."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


class StreamOptions(Body):
    """continuous_usage_stats: every event has the usage so far, as vLLM's."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Not | None = None


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Body):
    type: Literal["text"]


class JsonFormat(Body):
    type: Literal["json_object"]


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class FlatSchema(JsonSchema):
    """The same in other protocols."""

    type: Literal["json_schema"]


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """vLLM's: exactly one of them."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[Text] | None = Field(default=None, min_length=1)
    grammar: str | None = None


class Labels(Body):
    """Names that clients give their requests, tiers, and what saves time; they change no answer."""

    passes = frozenset(("client_metadata", "prediction", "prompt_cache_options"))

    user: str | None = None
    metadata: dict[str, str] | None = None
    request_id: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None


class Prompting(Body):
    """How a prompt becomes tokens; vLLM's."""

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(
        default=None, ge=-1, description="keep so many of the last; -1: as many as the model holds"
    )

    @property
    def form(self) -> str:
        """The fields that say what a text must be."""
        return ""

    def kept(self, length: int) -> int | None:
        """Tokens of a prompt to keep, of which the model holds `length`; None: all."""
        return length if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens


class Sampling(Labels, Prompting):
    """What completions and chat have in common."""

    model: str | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, description="0 or -1: all tokens")
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: Bias | None = None
    seed: int | None = Field(default=None, ge=-MAX_SEED, le=MAX_SEED)
    stop: Stop | None = None
    stop_token_ids: list[Token] | None = Field(default=None, max_length=MAX_STOPS)
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[Text] | None = Field(default=None, min_length=1)
    guided_grammar: str | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def running(self) -> bool:
        """Whether every event of a stream has the usage."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def samples(self) -> int:
        return self.n or 1

    @property
    def usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def form(self) -> str:
        names = ("response_format", "structured_outputs")
        guided = (f"guided_{name}" for name in ("json", "regex", "choice", "grammar"))
        return ", ".join(name for name in (*names, *guided) if getattr(self, name) is not None)

    def structured(self) -> Structured | None:
        """What the text must be; InvalidInput when more than one field says so."""
        forms: list[Structured] = []
        kind = self.response_format
        if isinstance(kind, SchemaFormat):
            forms.append(Structured(json=kind.json_schema.schema_))
        elif isinstance(kind, JsonFormat):
            forms.append(Structured(json=True))
        if self.structured_outputs is not None:
            given = self.structured_outputs
            json = given.json_ if given.json_object is None else True
            if given.json_ is not None and given.json_object:
                raise InvalidInput("structured_outputs: give either json or json_object")
            forms.append(Structured(json, given.regex, given.choice, given.grammar))
        guided = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        if any(form is not None for form in guided):
            forms.append(Structured(*guided))
        if len(forms) > 1:
            raise InvalidInput(
                "response_format, structured_outputs and guided_*: give one of them, not more"
            )
        return forms[0] if forms else None

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """As the engine wants it; InvalidInput for what only a look at all fields can refuse."""
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidInput("prompt_logprobs has no place in a stream; leave out one of them")
        given = {name: getattr(self, name) for name in SAMPLING & type(self).model_fields.keys()}
        given |= {
            "n": self.samples,
            "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()},
            "structured": self.structured(),
            "logprobs": logprobs,
        }
        given = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**given | {"max_tokens": None if max_tokens == -1 else max_tokens})


class CompletionRequest(Sampling):
    """POST /v1/completions. prompt: text, token ids, or a list of either."""

    prompt: Prompt
    suffix: str | None = None
    max_tokens: int | None = Field(default=16, ge=-1, description="-1: as many as fit")
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)


class ContentPart(Replayed):
    type: Literal["text"]
    text: str


class RefusalPart(Replayed):
    """What the assistant has said instead of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


AnyPart = Annotated[
    ContentPart | RefusalPart, Field(discriminator="type"), reads("text", "refusal")
]
Content = Annotated[
    Annotated[str, Tag("[text]")]
    | Annotated[list[AnyPart], Field(min_length=1, fail_fast=True), Tag("[parts]")],
    PARTS,
]


class HasText(Protocol):
    """A part of a content, in any of the protocols."""

    @property
    def text(self) -> str: ...


def plain(content: str | Sequence[HasText] | None) -> str:
    """The text of a message's content."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class Function(Replayed):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Replayed):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    """Those of the tools that may be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, fail_fast=True)


class OnlyTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def choice_kind(choice: Any) -> str:
    if isinstance(choice, str):
        return "[word]"
    kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)
    return "[tools]" if kind == "allowed_tools" else "[tool]"


WORD_OR_TOOL = Discriminator(choice_kind)
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("[word]")]
    | Annotated[OnlyTools, Tag("[tools]")]
    | Annotated[NamedTool, offers("function"), Tag("[tool]")],
    WORD_OR_TOOL,
]


class Called(Replayed):
    name: str
    arguments: str | None = None


class ToolCall(Replayed):
    id: str
    type: Literal["function"] = "function"
    function: Called


class ChatMessage(Replayed):
    """One message. reasoning: vLLM's name for reasoning_content."""

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: Content | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @model_validator(mode="before")
    @classmethod
    def silent(cls, data: Any) -> Any:
        """An assistant that has only called tools may have said a list of nothing."""
        if isinstance(data, dict) and data.get("role") == "assistant" and data.get("content") == []:
            return data | {"content": None}
        return data

    @property
    def text(self) -> str:
        return plain(self.content) or self.refusal or ""

    @property
    def thoughts(self) -> str | None:
        return self.reasoning if self.reasoning_content is None else self.reasoning_content


class Thinking(Body):
    """Whether a model shall think. budget_tokens is no bound here; max_tokens is."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(default=None, ge=1024)
    display: Literal["summarized", "omitted"] | None = None


class ChatRequest(Sampling):
    """POST /v1/chat/completions. Without a limit, the answer may fill the model's context."""

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    max_tokens: int | None = Field(default=None, ge=-1, description="-1: as many as fit")
    max_completion_tokens: int | None = Field(default=None, ge=-1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[Annotated[Tool, offers("function")]] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    modalities: list[Literal["text"]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: Not | None = None


class EmbeddingRequest(Prompting):
    """POST /v1/embeddings. dimensions: numbers of a vector, of which the first are kept."""

    model: str | None = None
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1)
    user: str | None = None


class TokenizeRequest(Body):
    """POST /tokenize, with a prompt or with messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1, fail_fast=True)
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Token] = Field(fail_fast=True)
