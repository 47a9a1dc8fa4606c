"""The commands `anybit serve` and `anybit chat`. What they need is imported when they run."""

import logging
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anybit.errors import InvalidInput
from anybit.files.directory import read_text
from anybit.progress import say

if TYPE_CHECKING:
    from anybit.engine.llm import LLM

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+|null|\*")  # of a web page, as browsers send it
Model = Annotated[Path, typer.Argument(help="Directory of a model, dense or quantized.")]
Format = Annotated[
    str | None,
    typer.Option("--format", help="Quantize a dense model while loading it: fp6, int4, ..."),
]
Kv = Annotated[
    str,
    typer.Option(
        help="KV cache: model (its dtype), int8, int4, or auto (int8 if the model has scales)."
    ),
]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
Keep = Annotated[
    str,
    typer.Option(help="Decoded copies of layers without a kernel: auto, packed (none) or decoded."),
]
Length = Annotated[
    int | None, typer.Option(min=2, help="Tokens of the longest text, prompt included.")
]

Draft = Annotated[
    str | None,
    typer.Option(
        help="Guess tokens to run together: ngram (what the text said before), auto (the model in "
        "4 bits), or the directory of a smaller model with the same tokens."
    ),
]
DraftTokens = Annotated[int, typer.Option(min=1, help="Tokens guessed at a time, at most.")]


def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any.")] = 8000,
    quantization: Format = None,
    kv_cache: Kv = "auto",
    keep: Keep = "auto",
    dtype: Dtype = "auto",
    length: Length = None,
    kv_gb: Annotated[
        float | None, typer.Option(help="Size of the KV cache in GB. As much as helps if absent.")
    ] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Texts written at once.")] = 256,
    queue: Annotated[
        int, typer.Option(min=0, help="Texts that may wait; beyond them clients get 503.")
    ] = 256,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name",
            "--name",
            help="The model's name for clients; several are aliases. The directory's if absent.",
        ),
    ] = None,
    api_keys: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key", envvar="ANYBIT_API_KEY", help="Key that clients must send; any of several."
        ),
    ] = None,
    origins: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-origins", help="Web pages that may call the server, https://HOST; * for all."
        ),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="File of a chat template, instead of the model's own.")
    ] = None,
    tool_parser: Annotated[
        str | None,
        typer.Option(help="Form of tool calls, if the chat template does not tell: hermes, ..."),
    ] = None,
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="The same text whatever else runs; costs some speed."),
    ] = False,
    lora: Annotated[
        list[str] | None,
        typer.Option(help="NAME=DIRECTORY of a LoRA adapter, a model of its own for clients."),
    ] = None,
    draft: Draft = None,
    draft_tokens: DraftTokens = 4,
    grace: Annotated[
        float,
        typer.Option(min=0, max=86400, help="Seconds that requests have to finish at shutdown."),
    ] = 30.0,
    log_level: Annotated[
        str, typer.Option(help="debug, info (a line for each request), warning or error.")
    ] = "info",
) -> None:
    """Serve a model over HTTP with OpenAI's protocol, metrics, and a chat page at /."""
    try:
        from anybit.serve.run import bind, run
        from anybit.serve.server import Settings
        from anybit.serve.tools import FAMILIES
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is missing; install it with: pip install 'anybit[serve]'"
        ) from None
    choose("--tool-parser", tool_parser, ("none", *FAMILIES))
    choose("--log-level", log_level, ("debug", "info", "warning", "error"))
    if not all(api_keys or ()):
        raise InvalidInput("--api-key is empty; give a key, or leave the option out")
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
    with bind(host, port) as listener:  # a port in use is told before the model is loaded
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
            tuple(api_keys or ()),
            queue,
            grace=grace,
            origins=tuple(origins or ()),
            tool_parser=tool_parser,
        )
        drafts = f"; drafts by {draft}, up to {draft_tokens} tokens" if draft else ""
        typer.echo(f"{' = '.join(settings.names)} {summary(llm)}{drafts}")
        typer.echo(f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}")
        run(llm, settings, listener)


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
    api_key: Annotated[str | None, typer.Option(envvar="ANYBIT_API_KEY", help="Key.")] = None,
) -> None:
    """Put load on a running server and print throughput and latencies: `anybit bench serve`."""
    from anybit.serve.bench import run

    run(url, streams, requests, prompt, output, largest_token, api_key, typer.echo)


def load(model: Path, quantization: str | None, **options: Any) -> "LLM":
    """The model with options of `LLM`, which says what is wrong with them."""
    say(f"loading {model}")
    from anybit.engine.llm import LLM

    return LLM(model, quantization, **options)
