"""The HTTP server's routes: OpenAI's protocol, and what runs beside it."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.cors import CORSMiddleware

from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from anybit.errors import in_a_line
from anybit.serve import messages, protocol, replies, responses, site
from anybit.serve.answers import Asked, ChatAnswer, CompletionsAnswer
from anybit.serve.gate import Gate
from anybit.serve.infill import infill
from anybit.serve.server import Server, Settings, WrongField, parameters
from anybit.serve.texts import Gone
from anybit.version import __version__

log = logging.getLogger("anybit.serve")

NOTHING: dict[int | str, dict[str, Any]] = {200: {"content": {}, "description": "Well"}}
METRICS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}


def create_app(llm: LLM, settings: Settings) -> FastAPI:
    """The ASGI application. The engine starts and stops with it."""
    server = Server(llm, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.engine.start()
        yield
        await server.engine.stop()
        server.texts.close()

    app = FastAPI(
        title="anybit", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.server = server
    app.add_middleware(Gate, settings=settings, stopping=server.stopping)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    app.add_exception_handler(StarletteHTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(ValidationError, invalid)  # of an adapter's request as a chat
    app.add_exception_handler(Gone, gone)
    app.add_exception_handler(Exception, unexpected)
    add_generation(app, server)
    messages.add_routes(app, server)
    responses.add_routes(app, server)
    add_tokens(app, server)
    add_information(app, server)
    site.add_routes(app, server)
    return app


def add_generation(app: FastAPI, server: Server) -> None:
    """The routes that generate."""
    answers = protocol.ERRORS | protocol.STREAM

    @app.post("/v1/completions", response_model=replies.Response, responses=answers)
    async def completions(body: protocol.CompletionRequest, request: Request) -> Response:
        name, n = server.model(body.model), body.samples
        texts = body.best_of or n
        if texts < n or (texts > n and body.stream):
            message = f"best_of={texts} must be at least n={n}, and not streamed"
            raise WrongField("best_of", message)
        limit = 16 if body.max_tokens is None else body.max_tokens
        params = parameters(lambda: body.sampling(limit, body.logprobs))
        if texts > n and params.logprobs is None:  # by which the best are found
            params = replace(params, logprobs=0)
        params = replace(params, n=texts)
        if body.echo and body.logprobs is not None:
            params = replace(params, prompt_logprobs=body.logprobs)
        if body.skip_special_tokens is False:
            params = server.showing(params)
        asked = protocol.listed(body.prompt)
        if body.suffix is not None:
            if body.echo:
                raise WrongField("suffix", "echo does not go with suffix; leave out one of them")
            asked = [infilled(server, prompt, body.suffix) for prompt in asked]
        prompts = await server.encode(request, asked, params)
        echo = None
        if body.echo:
            shown = params.shown
            echo = await server.in_worker(
                request,
                lambda job: [p if isinstance(p, str) else job.llm.decode(p, shown) for p in asked],
            )
        stream = server.submit(name, [(prompt, params) for prompt in prompts])
        answer = CompletionsAnswer(
            Asked(
                name, prompts, n, stream, server.texts.words, texts,
                body.usage, bool(body.return_token_ids),
            ),
            echo,
            body.logprobs is not None,
            server.llm.special,
            params.shown,
        )  # fmt: skip
        return await server.reply(request, answer, body.stream)

    @app.post("/v1/chat/completions", response_model=replies.Response, responses=answers)
    async def chat(body: protocol.ChatRequest, request: Request) -> Response:
        asked = await server.ask(request, body.model, lambda: body)
        return await server.reply(request, ChatAnswer(asked), body.stream)


def infilled(server: Server, prompt: str | list[int], suffix: str) -> str:
    """The prompt for what stands between it and the suffix; 400 where the model cannot."""
    text = infill(server.dialect.tokens, prompt, suffix)
    if text is None:
        raise WrongField(
            "suffix", "suffix: this model cannot fill in the middle (or the prompt is not text)"
        )
    return text


def add_tokens(app: FastAPI, server: Server) -> None:
    """The routes that turn texts into numbers, and back."""

    @app.post("/v1/embeddings", response_model=replies.Embeddings, responses=protocol.ERRORS)
    async def embeddings(body: protocol.EmbeddingRequest, request: Request) -> Response:
        name = server.model(body.model)
        prompts = await server.encode(request, protocol.listed(body.input))
        params = SamplingParams(max_tokens=0, embed=True)
        stream = server.submit(name, [(prompt, params) for prompt in prompts])
        answer = replies.EmbeddingsAnswer(
            Asked(name, prompts, 1, stream, server.texts.words), body.encoding_format == "base64"
        )
        return await server.reply(request, answer, False)

    @app.post("/tokenize", response_model=replies.Tokenized, responses=protocol.ERRORS)
    async def tokenize(body: protocol.TokenizeRequest, request: Request) -> replies.Tokenized:
        server.model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise HTTPException(400, "give either a prompt or messages")
        if body.messages is None:
            special, prompt = body.add_special_tokens is not False, body.prompt or ""
            tokens = await server.in_worker(request, lambda job: job.encode(prompt, special))
        else:
            chat = protocol.ChatRequest(
                messages=body.messages, add_generation_prompt=body.add_generation_prompt
            )
            tokens = (await server.prepare(request, chat)).prompt
        return replies.Tokenized(tokens=tokens, count=len(tokens), max_model_len=server.llm.length)

    @app.post("/detokenize", response_model=replies.Detokenized, responses=protocol.ERRORS)
    async def detokenize(body: protocol.DetokenizeRequest, request: Request) -> replies.Detokenized:
        server.model(body.model)
        if server.llm.tokenizer is None:
            raise HTTPException(400, "the model directory has no tokenizer")
        vocabulary = server.llm.engine.vocabulary
        wrong = next((token for token in body.tokens if token >= vocabulary), None)
        if wrong is not None:
            message = f"token {wrong} is not in the vocabulary of {vocabulary}"
            raise WrongField("tokens", message)
        shown = tuple(server.llm.special)
        text = await server.in_worker(request, lambda job: job.llm.decode(body.tokens, shown))
        return replies.Detokenized(prompt=text)


def add_information(app: FastAPI, server: Server) -> None:
    """The routes that tell."""

    def model(name: str) -> replies.Model:
        return replies.Model(id=name, created=server.started, max_model_len=server.llm.length)

    @app.get("/v1/models", response_model=replies.Models, responses=protocol.ERRORS)
    async def models() -> replies.Models:
        return replies.Models(data=[model(name) for name in server.names])

    @app.get("/v1/models/{name:path}", response_model=replies.Model, responses=protocol.ERRORS)
    async def one_model(name: str) -> replies.Model:
        return model(server.model(name))

    @app.get("/health", response_class=Response, responses=NOTHING | {503: protocol.ERRORS[503]})
    async def health() -> Response:
        if not server.engine.accepting:
            raise server.overloaded(server.engine.failure or "the server is shutting down")
        return Response()

    @app.get("/version", responses={401: protocol.ERRORS[401]})
    async def version() -> replies.Version:
        return replies.Version(version=__version__)

    @app.get("/metrics", response_class=Response, responses=METRICS | {401: protocol.ERRORS[401]})
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")


# Errors, in the protocol's form.

UNKNOWN = object()  # the body of a request that another route's schema refuses


async def http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    status, message = error.status_code, str(error.detail)
    if message == HTTPStatus(status).phrase:  # the router's
        message = f"{message}: this server has no {request.method} {request.url.path}"
    elif error.__cause__ is not None:  # FastAPI's, of what json has raised
        message = f"the body is not JSON: {error.__cause__}"
    param = error.param if isinstance(error, WrongField) else None
    return answer_error(request, status, message, param, error.headers)


async def invalid(request: Request, error: Exception) -> Response:
    """A body that is no JSON, or not what the schema says: where, and what is wrong."""
    assert isinstance(error, RequestValidationError | ValidationError)
    # Of the errors about one field, those that got furthest: a union has one for each member.
    deepest: dict[Any, Any] = {}
    for problem in error.errors():
        where = tuple(problem["loc"][:2])
        if where not in deepest or len(problem["loc"]) > len(deepest[where]["loc"]):
            deepest[where] = problem
    found = list(deepest.values())[:5]
    fields = [field_of(problem, getattr(error, "body", UNKNOWN)) for problem in found]
    text = "; ".join(map(described, found, fields))
    return answer_error(request, 400, text, fields[0])


def field_of(problem: dict[str, Any], body: Any) -> str | None:
    """The field of a body that a problem of pydantic's is in, such as messages.0.role.

    Where a field may have several types, pydantic also names the type, which is no part of a body.
    """
    if problem["type"] == "json_invalid":
        return None
    where = [part for part in problem["loc"] if part != "body"]
    path: list[str] = []
    for i, part in enumerate(where):
        inside = body is UNKNOWN and not {"[", "("} & {*str(part)}
        if isinstance(body, dict | list):
            inside = part in body if isinstance(body, dict) else isinstance(part, int)
        missing = problem["type"] == "missing" and i == len(where) - 1
        if inside or missing or not path:
            path.append(str(part))
        if inside and body is not UNKNOWN:
            body = body[part]
    return ".".join(path) or None


def described(problem: dict[str, Any], field: str | None) -> str:
    """A problem that pydantic has found, as a sentence about a field."""
    kind, where = problem["type"], [str(part) for part in problem["loc"] if part != "body"]
    if kind == "json_invalid":
        reason = problem.get("ctx", {}).get("error", problem["msg"])
        return f"the body is not JSON: {reason} (at character {where[-1] if where else 0})"
    if not where:
        if isinstance(problem["input"], bytes):
            return "the body is read as JSON, which its header Content-Type must say"
        return "the body is empty" if kind == "missing" else problem["msg"]
    return f"{field}: {problem['msg']}" if field else problem["msg"]


async def gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def unexpected(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return answer_error(request, 500, in_a_line(error))


def answer_error(
    request: Request, status: int, message: str, param: str | None = None, headers: Any = None
) -> Response:
    body = protocol.error_at(request.url.path, status, message, param)
    return Response(body, status, dict(headers or {}), "application/json")
