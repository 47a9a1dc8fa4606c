"""The HTTP server's routes: OpenAI's protocol, and what runs beside it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware

from anybit.engine.sequence import SamplingParams
from anybit.serve import messages, mistakes, protocol, replies, responses, site
from anybit.serve.answers import Asked, ChatAnswer, CompletionsAnswer
from anybit.serve.bodies import Route
from anybit.serve.gate import Gate
from anybit.serve.infill import infill
from anybit.serve.mistakes import WrongField
from anybit.serve.model import Model
from anybit.serve.server import Server, Settings, parameters
from anybit.serve.streams import Engine
from anybit.version import __version__

NOTHING: dict[int | str, dict[str, Any]] = {200: {"content": {}, "description": "Well"}}
METRICS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}


def create_app(llm: Model, settings: Settings, engine: Engine) -> FastAPI:
    """The ASGI application of a front end."""
    server = Server(llm, settings, engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        server.texts.close()

    app = FastAPI(
        title="anybit",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # it would send clients to whatever Host they have named
    )
    app.state.server = server
    app.router.route_class = Route
    app.add_middleware(Gate, settings=settings, stopping=server.stopping)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    mistakes.add_handlers(app)
    add_generation(app, server)
    messages.add_routes(app, server)
    responses.add_routes(app, server)
    add_tokens(app, server)
    add_information(app, server)
    site.add_routes(app, server)
    return app


def add_generation(app: FastAPI, server: Server) -> None:
    """The routes that generate."""
    answers = mistakes.ERRORS | mistakes.STREAM

    @app.post("/v1/completions", response_model=replies.Response, responses=answers)
    async def completions(body: protocol.CompletionRequest, request: Request) -> Response:
        name = server.model(body.model)
        params = completion_params(server, body)
        asked = protocol.listed(body.prompt)
        if body.suffix is not None:
            if body.echo:
                raise WrongField("suffix", "echo does not go with suffix; leave out one of them")
            asked = [infilled(server, prompt, body.suffix) for prompt in asked]
        prompts = await server.encode(request, body, asked, params)
        echo = None
        if body.echo:
            if body.truncate_prompt_tokens is not None:  # what is left is what is answered
                asked = [*prompts]
            shown = params.shown
            echo = await server.in_worker(
                request,
                lambda job: [p if isinstance(p, str) else job.llm.decode(p, shown) for p in asked],
            )
        stream = await server.submit(request, name, [(prompt, params) for prompt in prompts])
        answer = CompletionsAnswer(
            Asked(
                name,
                prompts,
                body.samples,
                stream,
                server.texts.words,
                params.n,
                body.usage,
                bool(body.return_token_ids),
                running=body.running,
                scored=body.prompt_logprobs is not None,
            ),
            echo,
            body.logprobs is not None,
            server.llm.special,
            params.shown,
        )
        return await server.reply(request, answer, body.stream)

    @app.post("/v1/chat/completions", response_model=replies.Response, responses=answers)
    async def chat(body: protocol.ChatRequest, request: Request) -> Response:
        asked = await server.ask(request, body.model, lambda: body)
        return await server.reply(request, ChatAnswer(asked), body.stream)


def completion_params(server: Server, body: protocol.CompletionRequest) -> SamplingParams:
    """Parameters of a completion's texts, `best_of` of them; 400 for what does not go together."""
    n = body.samples
    texts, logprobs = body.best_of or n, body.logprobs
    if texts < n or (texts > n and body.stream):
        message = f"best_of={texts} must be at least n={n}, and not streamed"
        raise WrongField("best_of", message)
    if texts > n and logprobs is None:
        logprobs = 0  # by which the best are found
    limit = 16 if body.max_tokens is None else body.max_tokens
    params = replace(parameters(lambda: body.sampling(limit, logprobs)), n=texts)
    if body.echo and body.logprobs is not None:
        if body.prompt_logprobs not in (None, body.logprobs):
            message = "with echo, prompt_logprobs and logprobs are one number"
            raise WrongField("prompt_logprobs", message)
        params = replace(params, prompt_logprobs=body.logprobs)
    return server.showing(params) if body.skip_special_tokens is False else params


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

    @app.post("/v1/embeddings", response_model=replies.Embeddings, responses=mistakes.ERRORS)
    async def embeddings(body: protocol.EmbeddingRequest, request: Request) -> Response:
        name, width = server.model(body.model), server.llm.hidden
        if body.dimensions is not None and body.dimensions > width:
            message = f"dimensions={body.dimensions}: this model's vectors have {width} numbers"
            raise WrongField("dimensions", message)
        params = SamplingParams(max_tokens=0, embed=True)
        prompts = await server.encode(request, body, protocol.listed(body.input), params)
        stream = await server.submit(request, name, [(prompt, params) for prompt in prompts])
        answer = replies.EmbeddingsAnswer(
            Asked(name, prompts, 1, stream, server.texts.words),
            body.encoding_format == "base64",
            body.dimensions,
        )
        return await server.reply(request, answer, False)

    @app.post("/tokenize", response_model=replies.Tokenized, responses=mistakes.ERRORS)
    async def tokenize(body: protocol.TokenizeRequest, request: Request) -> replies.Tokenized:
        server.model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise HTTPException(400, "give either a prompt or messages")
        if body.messages is None:
            special, prompt = body.add_special_tokens is not False, body.prompt or ""
            tokens = await server.in_worker(request, lambda job: job.encode(prompt, special))
        else:
            chat = protocol.ChatRequest(
                **body.model_dump(exclude={"model", "prompt", "return_token_strs"}, by_alias=True)
            )
            tokens = (await server.prepare(request, chat)).prompt
        names = list(map(server.texts.words.name, tokens)) if body.return_token_strs else None
        return replies.Tokenized(
            tokens=tokens,
            count=len(tokens),
            max_model_len=server.llm.length,
            token_strs=names,
        )

    @app.post("/detokenize", response_model=replies.Detokenized, responses=mistakes.ERRORS)
    async def detokenize(body: protocol.DetokenizeRequest, request: Request) -> replies.Detokenized:
        server.model(body.model)
        if server.llm.tokenizer is None:
            raise HTTPException(400, "the model directory has no tokenizer")
        vocabulary = server.llm.vocabulary
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

    @app.get("/v1/models", response_model=replies.Models, responses=mistakes.ERRORS)
    async def models() -> replies.Models:
        return replies.Models(data=[model(name) for name in server.names])

    @app.get("/v1/models/{name:path}", response_model=replies.Model, responses=mistakes.ERRORS)
    async def one_model(name: str) -> replies.Model:
        return model(server.model(name))

    @app.get("/health", response_class=Response, responses=NOTHING | {503: mistakes.ERRORS[503]})
    async def health() -> Response:
        if not server.engine.accepting:
            raise server.overloaded(server.engine.failure or "the server is shutting down")
        if server.engine.preparing:
            raise server.overloaded("the server is still starting")
        return Response()

    @app.get("/version", responses={401: mistakes.ERRORS[401]})
    async def version() -> replies.Version:
        return replies.Version(version=__version__)

    @app.get("/metrics", response_class=Response, responses=METRICS | {401: mistakes.ERRORS[401]})
    async def metrics() -> Response:
        return Response(await server.engine.metrics(), media_type="text/plain; version=0.0.4")
