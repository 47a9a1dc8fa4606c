"""What the server answers, as far as it is not generated text."""

import base64
import math
import struct
from typing import Any

from pydantic import BaseModel

from anybit.serve.answers import Answer, Asked


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int = 0
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None
    completion_tokens_details: dict[str, int] | None = None


class Response(BaseModel):
    """What /v1/completions and /v1/chat/completions answer."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: Usage | None = None


class Embedding(BaseModel):
    object: str = "embedding"
    index: int
    embedding: list[float] | str


class Embeddings(BaseModel):
    object: str = "list"
    model: str
    data: list[Embedding]
    usage: Usage


class Tokenized(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    prompt: str


class Model(BaseModel):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "anybit"
    max_model_len: int


class Models(BaseModel):
    object: str = "list"
    data: list[Model]


class Version(BaseModel):
    version: str


class EmbeddingsAnswer(Answer):
    """/v1/embeddings. base64: of little-endian fp32 numbers, as OpenAI's client asks for.

    dimensions: the first numbers of a vector, which is then scaled to length 1 again.
    """

    def __init__(self, asked: Asked, base64: bool, dimensions: int | None):
        super().__init__(asked, "embd-")
        self.base64, self.dimensions = base64, dimensions

    async def whole(self) -> dict[str, Any]:
        await self.end()
        data = []
        for text in self.texts:
            vector: Any = text.completion.embedding or []
            if self.dimensions is not None:
                vector = vector[: self.dimensions]
                norm = math.hypot(*vector) or 1.0
                vector = [number / norm for number in vector]
            if self.base64:
                raw = struct.pack(f"<{len(vector)}f", *vector)
                vector = base64.b64encode(raw).decode()
            data.append(
                {"object": "embedding", "index": text.completion.index, "embedding": vector}
            )
        tokens = self.counts[0]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "model": self.asked.model, "data": data, "usage": usage}
