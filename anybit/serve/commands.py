"""The commands `anybit serve` and `anybit chat`. What they need is imported when they run."""

import ipaddress
import logging
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anybit.errors import InvalidInput
from anybit.files.directory import read_text
from anybit.progress import say

if TYPE_CHECKING:
    from anybit.engine.llm import LLM

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+|null|\*")  # of a web page, as browsers send it
KEY = "ANYBIT_API_KEY"
# Groups of options in --help.
MODEL, LIMITS, SECURITY, ADVANCED = "Model", "Limits", "Security", "Advanced"
Model = Annotated[Path, typer.Argument(help="Directory of a model, dense or quantized.")]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="Quantize a dense model while loading it: fp6, int4, ...",
        rich_help_panel=MODEL,
    ),
]
Kv = Annotated[
    str,
    typer.Option(
        help="KV cache: model (its dtype), int8, int4, or auto (int8 if the model has scales).",
        rich_help_panel=MODEL,
    ),
]
Dtype = Annotated[
    str, typer.Option(help="auto, bfloat16, float16 or float32.", rich_help_panel=MODEL)
]
Keep = Annotated[
    str,
    typer.Option(
        help="Decoded copies of layers without a kernel: auto, packed (none) or decoded.",
        rich_help_panel=ADVANCED,
    ),
]
Length = Annotated[
    int | None,
    typer.Option(
        min=2, help="Tokens of the longest text, prompt included.", rich_help_panel=LIMITS
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        help="Guess tokens to run together: ngram (what the text said before), auto (the model in "
        "4 bits), or the directory of a smaller model with the same tokens.",
        rich_help_panel=ADVANCED,
    ),
]
DraftTokens = Annotated[
    int,
    typer.Option(min=1, help="Tokens guessed at a time, at most.", rich_help_panel=ADVANCED),
]


def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any.")] = 8000,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name",
            "--name",
            help="The model's name for clients; several are aliases. The directory's if absent.",
        ),
    ] = None,
    log_level: Annotated[
        str, typer.Option(help="debug, info (a line for each API call), warning or error.")
    ] = "info",
    quantization: Format = None,
    kv_cache: Kv = "auto",
    dtype: Dtype = "auto",
    chat_template: Annotated[
        Path | None,
        typer.Option(
            help="File of a chat template, instead of the model's own.", rich_help_panel=MODEL
        ),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=DIRECTORY of a LoRA adapter, a model of its own for clients.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    length: Length = None,
    kv_gb: Annotated[
        float | None,
        typer.Option(
            help="Size of the KV cache in GB. As much as helps if absent.", rich_help_panel=LIMITS
        ),
    ] = None,
    max_running: Annotated[
        int, typer.Option(min=1, help="Texts written at once.", rich_help_panel=LIMITS)
    ] = 256,
    queue: Annotated[
        int,
        typer.Option(
            min=0,
            help="Texts that may wait; beyond them clients get 503.",
            rich_help_panel=LIMITS,
        ),
    ] = 256,
    grace: Annotated[
        float,
        typer.Option(
            min=0,
            max=86400,
            help="Seconds that requests have to finish at shutdown.",
            rich_help_panel=LIMITS,
        ),
    ] = 30.0,
    api_keys: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            envvar=KEY,
            help="Key that clients must send; any of several. Given here, it replaces those of the "
            "variable.",
            rich_help_panel=SECURITY,
        ),
    ] = None,
    origins: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-origins",
            help="Web pages that may call the server, https://HOST; * for all.",
            rich_help_panel=SECURITY,
        ),
    ] = None,
    keep: Keep = "auto",
    tool_parser: Annotated[
        str | None,
        typer.Option(
            help="Form of tool calls, if the chat template does not tell: hermes, ...",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="The same text whatever else runs; costs some speed.",
            rich_help_panel=ADVANCED,
        ),
    ] = False,
    draft: Draft = None,
    draft_tokens: DraftTokens = 4,
) -> None:
    """Serve a model over HTTP with OpenAI's protocol, metrics, and a chat page at /."""
    with serve_extra():
        from anybit.serve.run import bind, run
    choose("--log-level", log_level, ("debug", "info", "warning", "error"))
    keys = keys_of(api_keys)
    if not all(names or ()):
        raise InvalidInput("--served-model-name is empty; give a name, or leave the option out")
    for origin in origins or ():
        if not ORIGIN.fullmatch(origin):
            raise InvalidInput(
                f"--allowed-origins {origin!r} is no origin; give https://HOST, with :PORT if it "
                "has one and no path, or *"
            )
    template = None if chat_template is None else read_text(chat_template)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("anybit").setLevel(log_level.upper())
    with bind(host, port) as listener:  # a port in use is told before the imports and the model
        if not keys:
            warn_if_open(host, listener.getsockname()[0])
        with serve_extra():
            from anybit.serve.server import Settings
            from anybit.serve.tools import FAMILIES
        choose("--tool-parser", tool_parser, ("none", *FAMILIES))
        llm = load(
            model,
            quantization,
            kv_cache=kv_cache,
            keep=keep,
            dtype=dtype,
            length=length,
            kv_bytes=bytes_of(kv_gb),
            max_running=max_running,
            deterministic=deterministic,
            adapters=adapters_of(lora or []),
            draft=draft,
            draft_tokens=draft_tokens,
        )
        if template is not None:
            if llm.tokenizer is None:
                raise InvalidInput("--chat-template: the model directory has no tokenizer")
            llm.tokenizer.chat_template = template
            check_template(llm)
        settings = Settings(
            tuple(names or [model.resolve().name]),
            keys,
            queue,
            grace=grace,
            origins=tuple(origins or ()),
            tool_parser=tool_parser,
        )
        drafts = f"; drafts by {draft}, up to {draft_tokens} tokens" if draft else ""
        typer.echo(f"{' = '.join(settings.names)} {summary(llm)}{drafts}")
        typer.echo(f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}")
        run(llm, settings, listener)


@contextmanager
def serve_extra() -> Iterator[None]:
    """Say what a missing package belongs to."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is missing; install it with: pip install 'anybit[serve]'"
        ) from None


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


def warn_if_open(host: str, address: str) -> None:
    """Say that other machines may use a server without a key. address: where it listens."""
    if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        text = f"other machines can reach {host}, and no key is asked for; set --api-key or {KEY}"
        typer.secho(f"warning: {text}", fg="yellow", err=True)


def bytes_of(gigabytes: float | None) -> int | None:
    """Bytes of a KV cache."""
    if gigabytes is None:
        return None
    if not 0 < gigabytes < math.inf:  # nor is NaN
        raise typer.BadParameter(
            f"{gigabytes:g} is no size; give 4, for example", param_hint="--kv-gb"
        )
    return int(gigabytes * 1e9)


def check_template(llm: "LLM") -> None:
    """InvalidInput for a chat template that is empty or cannot be read; what it says may be any."""
    from jinja2 import TemplateSyntaxError

    if not llm.has_template:
        raise InvalidInput("--chat-template is an empty file; give a template, or leave it out")
    try:
        llm.chat_text([{"role": "user", "content": "hello"}])
    except TemplateSyntaxError as error:
        raise InvalidInput(f"--chat-template, line {error.lineno}: {error.message}") from None
    except Exception:  # it may want other messages than this one
        pass


def adapters_of(given: list[str]) -> dict[str, Path]:
    """Directories by names, from NAME=DIRECTORY."""
    pairs = [text.partition("=") for text in given]
    complete = all(name and place for name, _, place in pairs)
    if not complete or len({name for name, _, _ in pairs}) < len(pairs):
        raise InvalidInput(f"--lora {' '.join(given)}: give NAME=DIRECTORY, each name once")
    return {name: Path(place) for name, _, place in pairs}


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


def chat(
    model: Model,
    quantization: Format = None,
    kv_cache: Kv = "auto",
    keep: Keep = "auto",
    dtype: Dtype = "auto",
    length: Length = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token.")] = 0.7,
    draft: Draft = None,
    draft_tokens: DraftTokens = 4,
) -> None:
    """Talk to a model in the terminal. Ctrl-C ends an answer, Ctrl-D the conversation.

    A base model without a chat template continues the text instead of answering.
    """
    from anybit.engine.sequence import SamplingParams
    from anybit.serve.chat import talk

    llm = load(
        model,
        quantization,
        kv_cache=kv_cache,
        keep=keep,
        dtype=dtype,
        length=length,
        max_running=1,
        draft=draft,
        draft_tokens=draft_tokens,
    )
    talk(llm, SamplingParams(max_tokens=max_tokens, temperature=temperature), system)


def bench_serve(
    url: Annotated[str, typer.Argument(help="The server, such as http://127.0.0.1:8000.")],
    streams: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 16,
    requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 64,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 128,
    output: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 128,
    largest_token: Annotated[
        int, typer.Option(min=101, help="Prompts use tokens from 100 up to below this.")
    ] = 4096,
    api_key: Annotated[
        str | None, typer.Option(envvar=KEY, help="Key.", rich_help_panel=SECURITY)
    ] = None,
) -> None:
    """Put load on a running server and print throughput and latencies: `anybit bench serve`."""
    from anybit.serve.bench import run

    run(url, streams, requests, prompt, output, largest_token, api_key, typer.echo)


def load(model: Path, quantization: str | None, **options: Any) -> "LLM":
    """The model with options of `LLM`, which says what is wrong with them."""
    say(f"loading {model}")
    from anybit.engine.llm import LLM

    return LLM(model, quantization, **options)
