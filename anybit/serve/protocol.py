"""The HTTP messages: OpenAI's completions and chat, with vLLM's additions. Unknown fields pass."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from anybit.engine.sequence import MAX_LOGPROBS, MAX_SAMPLES, SamplingParams

MAX_PROMPTS = 256
MAX_STOPS = 16

Stop = str | list[str] | None


class Message(BaseModel):
    """An answer or error is one of these; fields that a client does not know are to be ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class StreamOptions(Message):
    include_usage: bool = False


class Sampling(Message):
    """What completions and chat have in common."""

    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_SAMPLES)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, description="0 or -1: all tokens")
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    seed: int | None = None
    stop: Stop = Field(None, max_length=MAX_STOPS)
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOPS)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """As the engine wants it; ValueError for what only a look at all fields can refuse."""
        return SamplingParams(
            n=self.n,
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            stop=self.stop or (),
            stop_token_ids=self.stop_token_ids or (),
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
        )


class CompletionRequest(Sampling):
    """POST /v1/completions. prompt: text, token ids, or a list of either."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


class ContentPart(Message):
    type: Literal["text"] = "text"
    text: str


class ChatMessage(Message):
    model_config = ConfigDict(extra="allow")  # templates may read more, such as a name
    role: str
    content: str | list[ContentPart] | None = None

    def for_template(self) -> dict[str, Any]:
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content or ""}


class ChatRequest(Sampling):
    """POST /v1/chat/completions. Without a limit, the answer may fill the model's context."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True


class TokenizeRequest(Message):
    """POST /tokenize, with a prompt or with messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool = True


class TokenizeResponse(Message):
    tokens: list[int]
    count: int
    max_model_len: int


class Usage(Message):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


class Response(Message):
    """What /v1/completions and /v1/chat/completions answer."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: Usage | None = None


class Model(Message):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "anybit"
    max_model_len: int


class Models(Message):
    object: str = "list"
    data: list[Model]


class ErrorBody(Message):
    message: str
    type: str
    param: str | None = None
    code: int


class Error(Message):
    error: ErrorBody


def error(status: int, message: str, kind: str | None = None) -> dict[str, Any]:
    """The body of an error answer."""
    kinds = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}
    kind = kind or kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
