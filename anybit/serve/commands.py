"""The commands `anybit serve` and `anybit chat`. What they need is imported when they run."""

import gc
import ipaddress
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from anybit.errors import InvalidInput
from anybit.files.directory import read_text
from anybit.files.server import KEY
from anybit.kernels.context import begin_context
from anybit.progress import START, say
from anybit.serve.options import (
    SECURITY,
    ApiKeys,
    ChatTemplate,
    FrontEndCount,
    Grace,
    Host,
    LogLevel,
    Model,
    Names,
    Origins,
    Port,
    Queue,
    ToolParser,
    engine_options,
)

if TYPE_CHECKING:
    from anybit.engine.llm import LLM

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+|null|\*")  # of a web page, as browsers send it


@engine_options()
def serve(
    model: Model,
    engine: dict[str, Any],
    host: Host = "127.0.0.1",
    port: Port = 8000,
    names: Names = None,
    log_level: LogLevel = "info",
    chat_template: ChatTemplate = None,
    queue: Queue = 256,
    grace: Grace = 30.0,
    api_keys: ApiKeys = None,
    origins: Origins = None,
    tool_parser: ToolParser = None,
    front_ends: FrontEndCount = None,
) -> None:
    """Serve a model over HTTP with OpenAI's protocol, metrics, and a chat page at /."""
    from anybit.serve.run import FrontEnds, bind, front_end_count, run
    from anybit.serve.settings import Settings
    from anybit.serve.tools import FAMILIES

    check_packages()
    choose("--log-level", log_level, ("debug", "info", "warning", "error"))
    keys = keys_of(api_keys)
    if not all(names or ()):
        raise InvalidInput("--served-model-name is empty; give a name, or leave the option out")
    web_pages = origins_of(origins)
    template = None if chat_template is None else read_text(chat_template)
    choose("--tool-parser", tool_parser, ("none", *FAMILIES))
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("anybit").setLevel(log_level.upper())
    with (
        bind(host, port) as listener,  # a port in use is told before the imports and the model
        FrontEnds(listener, front_ends or front_end_count()) as started,
    ):
        if not keys:
            warn_if_open(host, listener.getsockname()[0])
        with importing():
            from anybit.engine.llm import Served  # meanwhile front ends find what they lack
        START.done("imports")
        started.check()
        say(f"loading {model}")
        llm = Served(model, **engine)
        if template is not None:
            set_template(llm, template)
        settings = Settings(
            tuple(names or [served(model)]),
            keys,
            queue,
            grace=grace,
            origins=web_pages,
            tool_parser=tool_parser,
        )
        draft, most = engine["draft"], engine["draft_tokens"]
        drafts = f"; drafts by {draft}, up to {most} tokens" if draft else ""
        typer.echo(f"{' = '.join(settings.names)} {summary(llm)}{drafts}")
        typer.echo(f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}")
        run(llm, settings, started)


@contextmanager
def importing() -> Iterator[None]:
    """No search for garbage while packages are imported: that is a tenth of the time.

    The GPU's context is made meanwhile.
    """
    begin_context()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


PACKAGES = (
    "fastapi",
    "httptools",
    "llguidance",
    "msgspec",
    "orjson",
    "prometheus_client",
    "uvicorn",
)


def check_packages() -> None:
    """Say what a missing package belongs to, before front ends do."""
    for package in PACKAGES:
        if find_spec(package) is None:
            raise ModuleNotFoundError(
                f"{package} is missing; install it with: pip install 'anybit[serve]'"
            )


def keys_of(given: list[str] | None) -> tuple[str, ...]:
    """The keys of a server; InvalidInput for what would leave it open, or could not be sent.

    given: those of --api-key, or else of the environment.
    """
    if not given and KEY in os.environ:
        raise InvalidInput(
            f"{KEY} is set and empty, so that no key is asked for; set a key or unset it"
        )
    for key in given or ():
        if not key.strip():
            raise InvalidInput("--api-key is empty; give a key, or leave the option out")
        if any(char.isspace() for char in key):
            raise InvalidInput("--api-key holds white space; give each key by an option of its own")
    return tuple(given or ())


def origins_of(given: list[str] | None) -> tuple[str, ...]:
    """The web pages of --allowed-origins; InvalidInput for what no browser sends."""
    for origin in given or ():
        if not ORIGIN.fullmatch(origin):
            raise InvalidInput(
                f"--allowed-origins {origin!r} is not an origin; give https://HOST, with :PORT if "
                "it has one and no path, or *"
            )
    return tuple(given or ())


def warn_if_open(host: str, address: str) -> None:
    """Say that other machines may use a server without a key. address: where it listens."""
    if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        text = f"other machines can reach {host}, and no key is asked for; set --api-key or {KEY}"
        typer.secho(f"warning: {text}", fg="yellow", err=True)


def served(model: Path) -> str:
    """What clients call a model: a directory by its name, and one of the hub as the hub does.

    A link is called as it is, and not as what it leads to today.
    """
    return Path(os.path.abspath(model)).name if model.exists() else str(model)


def set_template(llm: "LLM", template: str) -> None:
    """Replace a chat template; InvalidInput for one that is empty or cannot be read."""
    from jinja2 import TemplateSyntaxError

    if llm.tokenizer is None:
        raise InvalidInput("--chat-template: the model directory has no tokenizer")
    llm.tokenizer.chat_template = template
    if not llm.has_template:
        raise InvalidInput("--chat-template is an empty file; give a template, or leave it out")
    try:
        llm.chat_text([{"role": "user", "content": "hello"}])
    except TemplateSyntaxError as error:
        raise InvalidInput(f"--chat-template, line {error.lineno}: {error.message}") from None
    except Exception:  # it may want other messages than this one
        pass


def choose(flag: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise InvalidInput(f"{flag} {value!r}: choose one of {', '.join(choices)}")


def summary(llm: "LLM") -> str:
    """What is served, in a line."""
    scheduler, dtype = llm.engine.scheduler, str(llm.dtype).removeprefix("torch.")
    tokens = scheduler.blocks.count * scheduler.blocks.block_size
    return (
        f"on {llm.device}, {dtype} with a KV cache of {llm.kv_cache}: {tokens:,} tokens of up to "
        f"{scheduler.max_running} sequences, {llm.length:,} in one"
    )


@engine_options("quantization", "kv_cache", "keep", "dtype", "length", "draft", "draft_tokens")
def chat(
    model: Model,
    engine: dict[str, Any],
    system: Annotated[str | None, Option(help="System prompt.")] = None,
    max_tokens: Annotated[int, Option(min=1, help="Tokens of an answer, at most.")] = 512,
    temperature: Annotated[float, Option(min=0.0, help="0: the likeliest token.")] = 0.7,
) -> None:
    """Talk to a model in the terminal. Ctrl-C ends an answer, Ctrl-D the conversation.

    A base model without a chat template continues the text instead of answering.
    """
    from anybit.engine.sequence import SamplingParams
    from anybit.serve.chat import talk

    say(f"loading {model}")
    with importing():
        from anybit.engine.llm import LLM
    llm = LLM(model, **engine | {"max_running": 1, "max_itl": None})
    talk(llm, SamplingParams(max_tokens=max_tokens, temperature=temperature), system)


def bench_serve(
    url: Annotated[str, Argument(help="The server, such as http://127.0.0.1:8000.")],
    rate: Annotated[
        str | None,
        Option(metavar="R,R...", help="Requests a second, at random times; a line for each rate."),
    ] = None,
    seconds: Annotated[float, Option(min=0.1, help="Of arrivals, with --rate.")] = 30.0,
    streams: Annotated[
        str,
        Option(
            metavar="N,N...",
            help="Without --rate: requests at the same time; a line for each number.",
        ),
    ] = "16",
    requests: Annotated[int, Option(min=1, help="Without --rate: requests in all.")] = 64,
    prompt: Annotated[
        str,
        Option(
            metavar="N[~S[:A-B]]",
            help="Tokens of a prompt: 128; or 270~1.0:16-3000, lognormal with this median and "
            "spread, within bounds.",
        ),
    ] = "128",
    output: Annotated[
        str, Option(metavar="N[~S[:A-B]]", help="Tokens of an answer, in the same way.")
    ] = "128",
    largest_token: Annotated[
        int, Option(min=101, help="Prompts use tokens from 100 up to below this.")
    ] = 4096,
    api_key: Annotated[
        str | None, Option(envvar=KEY, help="Key.", rich_help_panel=SECURITY)
    ] = None,
    json: Annotated[Path | None, Option(help="Write the rows to this file, too.")] = None,
    plot: Annotated[Path | None, Option(help="Draw them (PNG, SVG or PDF).")] = None,
) -> None:
    """Put load on a running server, and print what its users see: `anybit bench serve`.

    On any server with OpenAI's /v1/completions or /v1/chat/completions.
    """
    from anybit.serve.bench import Lengths, Load, numbers, run

    lengths = Lengths.read(prompt), Lengths.read(output)
    if rate is None:
        counts = numbers(streams, "--streams", "requests at the same time", int)
        loads = [Load(*lengths, None, seconds, each, requests) for each in counts]
    else:
        each_rate = numbers(rate, "--rate", "requests a second")
        loads = [Load(*lengths, each, seconds) for each in each_rate]
    run(url, loads, largest_token, api_key, typer.echo, json, plot)
