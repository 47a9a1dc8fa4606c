"""The HTTP server: OpenAI's protocol over the engine, with limits, metrics and a web page."""

import asyncio
import copy
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anybit.engine.async_engine import AsyncEngine, EngineStopped, Stream
from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from anybit.serve import protocol
from anybit.serve.answers import Answer, Failed
from anybit.serve.metrics import Metrics
from anybit.version import __version__

log = logging.getLogger("anybit.serve")

PROTECTED = ("/v1/", "/tokenize")
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": protocol.Error} for status in (400, 401, 404, 413, 500, 503)
}


@dataclass(frozen=True)
class Settings:
    """name: the model's, for clients. api_key: what clients must send, if anything.

    queue: texts that may wait, beyond those that run. queue_tokens: prompt tokens of all requests
    that have not ended. Beyond either, a request gets 503 with Retry-After. body: bytes of a
    request at most. grace: seconds that running requests have to finish at shutdown.
    """

    name: str
    api_key: str | None = None
    queue: int = 256
    queue_tokens: int = 1 << 20
    body: int = 16 << 20
    grace: float = 30.0
    retry_after: int = 1


class Server:
    """What the routes share: the engine, a tokenizer of their own, and the limits."""

    def __init__(self, llm: LLM, settings: Settings):
        self.llm, self.settings = llm, settings
        self.engine = AsyncEngine(llm.engine)
        self.metrics = Metrics(llm.engine, settings.name)
        # Encoding changes a tokenizer's state, so the engine's thread keeps the other one.
        self.tokenizing = ThreadPoolExecutor(1, "anybit-tokenizer")
        self.texts = copy.copy(llm)
        self.texts.tokenizer = copy.deepcopy(llm.tokenizer)
        self.started = int(time.time())

    async def in_tokenizer(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run in the tokenizer's thread; what it cannot take is the client's mistake."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self.tokenizing, function, *args)
        except Exception as error:  # templates and tokenizers raise all kinds
            raise HTTPException(400, f"{type(error).__name__}: {error}") from None

    def submit(self, requests: list[tuple[list[int], SamplingParams]]) -> Stream:
        """Queue prompts, or refuse: 400 for what cannot be served, 503 for too much at once."""
        llm, settings = self.llm, self.settings
        texts = sum(params.n for _, params in requests)
        tokens = sum(len(prompt) for prompt, _ in requests)
        room = llm.engine.scheduler.max_running + settings.queue
        if texts > room or tokens > settings.queue_tokens:
            raise HTTPException(
                400,
                f"{texts} texts from {tokens} prompt tokens are too many for one request; this "
                f"server takes {room} and {settings.queue_tokens}",
            )
        open_tokens = sum(s.tokens for s in set(self.engine.streams.values()))
        if self.engine.texts + texts > room or open_tokens + tokens > settings.queue_tokens:
            raise self.overloaded("the server has too many requests")
        try:
            return self.engine.submit(requests)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        except EngineStopped as error:
            raise self.overloaded(str(error)) from None

    def overloaded(self, message: str) -> HTTPException:
        headers = {"Retry-After": str(self.settings.retry_after)}
        return HTTPException(503, f"{message}; try again later", headers)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.name:
            raise HTTPException(
                404, f"the model {name!r} does not exist; this server has {self.settings.name!r}"
            )

    def token_text(self, token: int) -> str:
        tokenizer = self.texts.tokenizer
        return tokenizer.decode([token]) if tokenizer else str(token)

    async def reply(self, request: Request, answer: Answer, stream: bool) -> Response:
        """Send an answer; the engine drops it as soon as the client is gone."""
        if stream:
            return EventStream(answer, self.engine)
        work = asyncio.ensure_future(answer.whole())
        gone = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return Response(status_code=499)  # nobody reads it
            return JSONResponse(work.result())
        except Failed as error:
            raise HTTPException(error.status, str(error)) from None
        finally:
            work.cancel()
            gone.cancel()
            self.engine.abort(answer.stream)


class EventStream(StreamingResponse):
    """An answer as server-sent events, whose requests end with the response, however it ends."""

    def __init__(self, answer: Answer, engine: AsyncEngine):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(answer.events(), headers=headers, media_type="text/event-stream")
        self.answer, self.engine = answer, engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.engine.abort(self.answer.stream)


async def disconnected(request: Request) -> None:
    """Wait until the client is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def create_app(llm: LLM, settings: Settings) -> FastAPI:
    """The ASGI application. The engine starts and stops with it."""
    server = Server(llm, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.engine.start()
        yield
        await server.engine.stop()
        server.tokenizing.shutdown()

    app = FastAPI(
        title="anybit", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.server = server
    app.add_middleware(Gate, settings=settings)
    app.add_exception_handler(StarletteHTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, unexpected)
    add_generation(app, server)
    add_information(app, server)
    return app


def add_generation(app: FastAPI, server: Server) -> None:
    """The routes that generate."""
    name = server.settings.name

    @app.post("/v1/completions", response_model=protocol.Response, responses=ERRORS)
    async def completions(body: protocol.CompletionRequest, request: Request) -> Response:
        server.check_model(body.model)
        params = parameters(body, body.max_tokens, body.logprobs)
        asked = body.prompts()
        if not 1 <= len(asked) <= protocol.MAX_PROMPTS:
            raise HTTPException(400, f"{len(asked)} prompts; 1 to {protocol.MAX_PROMPTS} are taken")
        if body.echo and body.logprobs is not None:
            raise HTTPException(400, "echo does not go with logprobs; ask for one of them")
        encode = server.texts.encode
        prompts = [await server.in_tokenizer(encode, p) if isinstance(p, str) else p for p in asked]
        echo = None
        if body.echo:
            decode = server.texts.decode
            echo = [
                p if isinstance(p, str) else await server.in_tokenizer(decode, p) for p in asked
            ]
        stream = server.submit([(prompt, params) for prompt in prompts])
        answer = Answer(
            "text_completion", name, prompts, body.n, stream, server.token_text, echo,
            usage(body), body.return_token_ids,
        )  # fmt: skip
        return await server.reply(request, answer, body.stream)

    @app.post("/v1/chat/completions", response_model=protocol.Response, responses=ERRORS)
    async def chat(body: protocol.ChatRequest, request: Request) -> Response:
        server.check_model(body.model)
        logprobs = body.top_logprobs if body.logprobs else None
        params = parameters(body, body.max_completion_tokens or body.max_tokens, logprobs)
        messages = [message.for_template() for message in body.messages]
        prompt = await server.in_tokenizer(
            server.texts.encode_chat, messages, body.add_generation_prompt
        )
        stream = server.submit([(prompt, params)])
        answer = Answer(
            "chat.completion", name, [prompt], body.n, stream, server.token_text,
            usage=usage(body), token_ids=body.return_token_ids,
        )  # fmt: skip
        return await server.reply(request, answer, body.stream)


def add_information(app: FastAPI, server: Server) -> None:
    """The routes that tell."""
    page = files("anybit.serve").joinpath("page.html").read_text("utf-8")

    @app.get("/v1/models", response_model=protocol.Models, responses=ERRORS)
    async def models() -> protocol.Models:
        model = protocol.Model(
            id=server.settings.name, created=server.started, max_model_len=server.llm.length
        )
        return protocol.Models(data=[model])

    @app.post("/tokenize", response_model=protocol.TokenizeResponse, responses=ERRORS)
    async def tokenize(body: protocol.TokenizeRequest) -> protocol.TokenizeResponse:
        server.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise HTTPException(400, "give either a prompt or messages")
        if body.messages is None:
            tokens = await server.in_tokenizer(server.texts.encode, body.prompt)
        else:
            messages = [message.for_template() for message in body.messages]
            tokens = await server.in_tokenizer(
                server.texts.encode_chat, messages, body.add_generation_prompt
            )
        return protocol.TokenizeResponse(
            tokens=tokens, count=len(tokens), max_model_len=server.llm.length
        )

    @app.get("/health", response_model=None, responses={503: {"model": protocol.Error}})
    async def health() -> Response:
        if not server.engine.accepting:
            raise server.overloaded(server.engine.failure or "the server is shutting down")
        return Response()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def root() -> str:
        return page


def parameters(
    body: protocol.Sampling, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    try:
        return body.sampling(max_tokens, logprobs)
    except ValueError as error:
        raise HTTPException(400, str(error)) from None


def usage(body: protocol.Sampling) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


# Errors, all in OpenAI's form.


async def http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    return answer_error(error.status_code, str(error.detail), error.headers)


async def invalid(request: Request, error: Exception) -> Response:
    """A body that is no JSON, or not what the schema says: where, and what is wrong."""
    assert isinstance(error, RequestValidationError)
    problems = (
        f"{'.'.join(str(part) for part in problem['loc'] if part != 'body')}: {problem['msg']}"
        for problem in error.errors()[:5]
    )
    return answer_error(400, "; ".join(problems))


async def unexpected(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return answer_error(500, f"{type(error).__name__}: {error}")


def answer_error(status: int, message: str, headers: Any = None) -> Response:
    body = json.dumps(protocol.error(status, message))  # ASCII: a message may quote anything
    return Response(body, status, dict(headers or {}), "application/json")


class Gate:
    """Refuses bodies that are too large, and requests without the key. Plain ASGI, so that it
    does not come between a response and its client's disconnect."""

    def __init__(self, app: ASGIApp, settings: Settings):
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if scope["path"].startswith(PROTECTED) and not self._has_key(headers):
            challenge = {"WWW-Authenticate": "Bearer"}
            await answer_error(401, "the API key is missing or wrong", challenge)(
                scope, receive, send
            )
            return
        limit = self.settings.body
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > limit:
            await self._too_large(limit)(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > limit:
                raise HTTPException(413, f"the body is larger than {limit} bytes")
            return message

        await self.app(scope, counted, send)

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        key = self.settings.api_key
        sent = headers.get(b"authorization", b"")
        return key is None or secrets.compare_digest(sent, b"Bearer " + key.encode())

    def _too_large(self, limit: int) -> Response:
        return answer_error(413, f"the body is larger than {limit} bytes")


# Running it.


class Uvicorn(uvicorn.Server):
    """Uvicorn that tells the engine when a shutdown begins, so that requests end before it does."""

    def handle_exit(self, sig: int, frame: Any) -> None:
        server: Server = self.config.app.state.server  # type: ignore[union-attr]
        if server.engine.accepting:
            log.warning(
                "shutting down; %d texts have %g s", server.engine.texts, server.settings.grace
            )
            server.engine.accepting = False
            loop = server.engine.loop
            loop.call_soon_threadsafe(
                lambda: setattr(
                    server, "draining", loop.create_task(server.engine.drain(server.settings.grace))
                )
            )
        super().handle_exit(sig, frame)


def run(llm: LLM, settings: Settings, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM; then finish or fail every request, and return."""
    config = uvicorn.Config(
        create_app(llm, settings),
        host,
        port,
        log_level="warning",
        timeout_graceful_shutdown=int(settings.grace) + 10,
    )
    Uvicorn(config).run()
