"""What the routes share: the engine, the tokenizers, and the limits."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from fastapi import HTTPException, Request
from fastapi.responses import Response

from anybit.engine.async_engine import AsyncEngine, EngineStopped, Stream
from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from anybit.errors import AnybitError, InvalidInput
from anybit.serve.answers import Answer, Asked, Failed
from anybit.serve.conversation import Dialect, Prepared, forces
from anybit.serve.events import EventStream, dumps
from anybit.serve.metrics import Metrics
from anybit.serve.mistakes import WrongField
from anybit.serve.protocol import ChatRequest, Prompting
from anybit.serve.texts import Gone, Job, Texts, room


@dataclass(frozen=True)
class Settings:
    """names: the model's, for clients. keys: one of which clients must send, if there are any.

    queue: texts that may wait, beyond those that run. queue_tokens: prompt tokens of all requests
    that have not ended. Beyond either, a request gets 503 with Retry-After. body: bytes of a
    request at most. grace: seconds that running requests have to finish at shutdown. patience:
    seconds that a client has for a request's head, for its body, and to read what waits for it.
    origins: web pages that may use the server from a browser; "*": all. tool_parser: the form of
    the model's tool calls, if its chat template does not tell it.
    """

    names: tuple[str, ...]
    keys: tuple[str, ...] = ()
    queue: int = 256
    queue_tokens: int = 1 << 20
    body: int = 4 << 20
    grace: float = 30.0
    patience: float = 60.0
    retry_after: int = 1
    origins: tuple[str, ...] = ()
    tool_parser: str | None = None


class Server:
    """What the routes share."""

    def __init__(self, llm: LLM, settings: Settings):
        self.llm, self.settings = llm, settings
        if twice := set(settings.names) & set(llm.engine.adapters):
            raise InvalidInput(f"{twice.pop()!r} names the model and an adapter; rename one")
        self.engine = AsyncEngine(llm.engine)
        self.metrics = Metrics(llm.engine, settings.names[0], llm.kv_cache)
        # Encoding changes a tokenizer's state, so the engine's thread keeps its own.
        self.texts = Texts(llm, llm.engine.scheduler.max_running + settings.queue)
        self.dialect = Dialect(llm, settings.tool_parser)
        self.stopping = asyncio.Event()  # no more requests are read
        self.started = int(time.time())

    async def in_worker(
        self, request: Request, function: Callable[[Job], Any], grammar: bool = False
    ) -> Any:
        """Do a tokenizer's job for a client; 400 for what it cannot take.

        grammar: whether it compiles one, for which other jobs do not wait.
        """
        if self.texts.full:
            raise self.overloaded("the server has too many requests")
        async with leaving(request) as gone:
            try:
                return await self.texts.run(gone, function, grammar)
            except (AnybitError, ModuleNotFoundError) as error:
                raise HTTPException(400, str(error)) from None

    async def encode(
        self,
        request: Request,
        body: Prompting,
        prompts: list[str | list[int]],
        params: SamplingParams,
    ) -> list[list[int]]:
        """Tokens of prompts, and the grammar of their parameters compiled."""

        def work(job: Job) -> list[list[int]]:
            if params.structured is not None and job.llm.engine.grammars is not None:
                job.llm.engine.grammars.matcher(params.structured)
            kept = body.kept(room(job.llm, params))
            special = body.add_special_tokens is not False
            return [job.prompt(prompt, special, kept) for prompt in prompts]

        return await self.in_worker(request, work, params.structured is not None)

    async def prepare(self, request: Request, body: ChatRequest) -> Prepared:
        """A conversation's prompt and parameters."""
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        if body.top_logprobs and not body.logprobs:
            raise WrongField("top_logprobs", "top_logprobs needs logprobs: true")
        limit = body.max_completion_tokens
        limit = body.max_tokens if limit is None else limit
        params = parameters(lambda: body.sampling(limit, logprobs))
        if body.skip_special_tokens is False:
            params = self.showing(params)
        grammar = params.structured is not None or forces(body)
        return await self.in_worker(
            request, lambda job: self.dialect.prepare(body, params, job), grammar
        )

    def showing(self, params: SamplingParams) -> SamplingParams:
        """The same, with all special tokens in the text."""
        return replace(params, shown=tuple(self.llm.special))

    def submit(self, model: str, requests: list[tuple[list[int], SamplingParams]]) -> Stream:
        """Queue prompts, or refuse: 400 for what cannot be served, 503 for too much at once.

        model: as the client calls it, which may be an adapter.
        """
        llm, settings = self.llm, self.settings
        if model in llm.engine.adapters:
            requests = [(prompt, replace(params, adapter=model)) for prompt, params in requests]
        texts = sum(params.n for _, params in requests)
        tokens = sum(len(prompt) for prompt, _ in requests)
        room = llm.engine.scheduler.max_running + settings.queue
        if texts > room or tokens > settings.queue_tokens:
            raise HTTPException(
                400,
                f"{texts} completions of {tokens} prompt tokens are too many for one request; this "
                f"server takes {room} and {settings.queue_tokens}",
            )
        open_tokens = sum(s.tokens for s in set(self.engine.streams.values()))
        if self.engine.texts + texts > room or open_tokens + tokens > settings.queue_tokens:
            raise self.overloaded("the server has too many requests")
        try:
            return self.engine.submit(requests)
        except EngineStopped as error:
            raise self.overloaded(str(error)) from None
        except AnybitError as error:
            raise HTTPException(400, str(error)) from None

    async def ask(
        self, request: Request, model: str | None, chat: Callable[[], ChatRequest]
    ) -> Asked:
        """Submit a conversation. chat: makes it, once the model is known."""
        name = self.model(model)
        body = chat()
        prepared = await self.prepare(request, body)
        stream = self.submit(name, [(prepared.prompt, prepared.params)])
        return Asked(
            name, [prepared.prompt], body.samples, stream, self.texts.words,
            usage=body.usage, token_ids=bool(body.return_token_ids), readers=prepared.readers,
            calls=prepared.calls, short_ids=prepared.short_ids,
            running=body.running, scored=body.prompt_logprobs is not None,
        )  # fmt: skip

    def overloaded(self, message: str) -> HTTPException:
        headers = {"Retry-After": str(self.settings.retry_after)}
        return HTTPException(503, f"{message}; try again later", headers)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the model, and of its adapters."""
        return *self.settings.names, *self.llm.engine.adapters

    def model(self, name: str | None) -> str:
        """The name under which a client asks for the model; 404 for another model."""
        names = self.names
        if name is not None and name not in names:
            known = " or ".join(repr(known) for known in names)
            message = f"the model {name!r} does not exist; this server has {known}"
            raise WrongField("model", message, 404)
        return name or names[0]

    async def reply(self, request: Request, answer: Answer, stream: bool | None) -> Response:
        """Send an answer; the engine drops it as soon as the client is gone."""
        if stream:
            return EventStream(answer.events(), answer.asked.stream, self.engine)
        work = asyncio.ensure_future(answer.whole())
        try:
            async with leaving(request) as gone:
                both: set[asyncio.Future[Any]] = {work, gone}
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Gone
            return Response(dumps(work.result()), media_type="application/json")
        except Failed as error:
            raise HTTPException(error.status, str(error)) from None
        finally:
            work.cancel()
            self.engine.abort(answer.asked.stream)


@asynccontextmanager
async def leaving(request: Request) -> AsyncIterator["asyncio.Future[None]"]:
    """A future that is done when the client is gone."""

    async def wait() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.ensure_future(wait())
    try:
        yield gone
    finally:
        gone.cancel()


def parameters(make: Callable[[], SamplingParams]) -> SamplingParams:
    """Parameters of a request; 400 for what only a look at all fields can refuse."""
    try:
        return make()
    except AnybitError as error:
        raise HTTPException(400, str(error)) from None
