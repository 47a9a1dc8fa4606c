"""What the routes share: the engine, the tokenizers, and the limits."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from fastapi.responses import Response

from anybit.engine.sequence import SamplingParams
from anybit.errors import AnybitError
from anybit.serve.answers import Answer, Asked, Failed
from anybit.serve.conversation import Dialect, Prepared, forces
from anybit.serve.encoding import dumps
from anybit.serve.events import EventStream
from anybit.serve.fields import naming
from anybit.serve.mistakes import WrongField
from anybit.serve.model import Model
from anybit.serve.protocol import ChatRequest, Prompting
from anybit.serve.settings import Settings as Settings
from anybit.serve.streams import Engine, Refused, Stream
from anybit.serve.texts import Gone, Job, Texts, room
from anybit.serve.times import PREPARE

T = TypeVar("T")


class Server:
    """What the routes share."""

    def __init__(self, llm: Model, settings: Settings, engine: Engine):
        self.llm, self.settings, self.engine = llm, settings, engine
        self.texts = Texts(llm, llm.max_running + settings.queue)
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
        begun = time.monotonic()
        async with leaving(request) as gone:
            try:
                return await self.texts.run(gone, function, grammar)
            except (AnybitError, ModuleNotFoundError) as error:
                raise HTTPException(400, str(error)) from None
            finally:
                self.engine.times[PREPARE].add(time.monotonic() - begun)

    async def encode(
        self,
        request: Request,
        body: Prompting,
        prompts: list[str | list[int]],
        params: SamplingParams,
    ) -> list[list[int]]:
        """Tokens of prompts, and the grammar of their parameters compiled."""

        def work(job: Job) -> list[list[int]]:
            if params.structured is not None and job.llm.grammars is not None:
                with naming(body.form):
                    job.llm.grammars.tried(params.structured)
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

    async def submit(
        self, request: Request, model: str, requests: list[tuple[list[int], SamplingParams]]
    ) -> Stream:
        """Queue prompts, or refuse: 400 for what cannot be served, 503 for too much at once.

        model: as the client calls it, which may be an adapter.
        """
        if model in self.llm.adapters:
            requests = [(prompt, replace(params, adapter=model)) for prompt, params in requests]
        try:
            return await unless_gone(request, self.engine.submit(requests))
        except Refused as error:
            if error.status == 503:
                raise self.overloaded(str(error)) from None
            raise HTTPException(error.status, str(error)) from None

    async def ask(
        self, request: Request, model: str | None, chat: Callable[[], ChatRequest]
    ) -> Asked:
        """Submit a conversation. chat: makes it, once the model is known."""
        name = self.model(model)
        body = chat()
        prepared = await self.prepare(request, body)
        stream = await self.submit(request, name, [(prepared.prompt, prepared.params)])
        return Asked(
            name,
            [prepared.prompt],
            body.samples,
            stream,
            self.texts.words,
            usage=body.usage,
            token_ids=bool(body.return_token_ids),
            readers=prepared.readers,
            calls=prepared.calls,
            short_ids=prepared.short_ids,
            running=body.running,
            scored=body.prompt_logprobs is not None,
        )

    def overloaded(self, message: str) -> HTTPException:
        headers = {"Retry-After": str(self.settings.retry_after)}
        return HTTPException(503, f"{message}; try again later", headers)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the model, and of its adapters."""
        return *self.settings.names, *self.llm.adapters

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
            return EventStream(answer, self.engine)
        try:
            whole = await unless_gone(request, answer.whole())
            return Response(dumps(whole), media_type="application/json")
        except Failed as error:
            raise HTTPException(error.status, str(error)) from None
        finally:
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


async def unless_gone(request: Request, asked: Coroutine[Any, Any, T]) -> T:
    """What is awaited; it is cancelled, and `Gone` raised, if the client goes before."""
    work = asyncio.ensure_future(asked)
    try:
        async with leaving(request) as gone:
            both: set[asyncio.Future[Any]] = {work, gone}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise Gone
        return work.result()
    finally:
        work.cancel()


def parameters(make: Callable[[], SamplingParams]) -> SamplingParams:
    """Parameters of a request; 400 for what only a look at all fields can refuse."""
    try:
        return make()
    except AnybitError as error:
        raise HTTPException(400, str(error)) from None
