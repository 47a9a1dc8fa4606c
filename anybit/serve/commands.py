"""The commands `anybit serve` and `anybit chat`. What they need is imported when they run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from anybit.engine.llm import LLM

Model = Annotated[Path, typer.Argument(help="Directory of a model, dense or quantized.")]
Format = Annotated[
    str | None,
    typer.Option("--format", help="Quantize a dense model while loading it: fp6, int4, ..."),
]
Kv = Annotated[
    str,
    typer.Option(help="KV cache: model (its dtype), int8, or auto (int8 if the model has scales)."),
]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
Keep = Annotated[
    str,
    typer.Option(help="Decoded copies of layers without a kernel: auto, packed (none) or decoded."),
]
Length = Annotated[
    int | None, typer.Option(min=2, help="Tokens of the longest text, prompt included.")
]


def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
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
    name: Annotated[
        str | None, typer.Option(help="The model's name for clients. The directory's if absent.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="ANYBIT_API_KEY", help="Key that clients must send.")
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that requests have to finish at shutdown.")
    ] = 30.0,
) -> None:
    """Serve a model over HTTP with OpenAI's protocol, metrics, and a chat page at /."""
    try:
        from anybit.serve.app import Settings, run
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is missing; install it with: pip install 'anybit[serve]'"
        ) from None
    llm = load(model, quantization, kv_cache, keep, dtype, length, kv_gb, max_running)
    name = name or model.resolve().name
    scheduler = llm.engine.scheduler
    tokens = scheduler.blocks.count * scheduler.blocks.block_size
    typer.echo(
        f"{name} on {llm.device}, {llm.dtype} with a KV cache of {llm.kv_dtype}: {tokens:,} tokens "
        f"of up to {scheduler.max_running} sequences, {llm.length:,} in one"
    )
    typer.echo(f"http://{host}:{port}")
    run(llm, Settings(name, api_key, queue, grace=grace), host, port)


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
) -> None:
    """Talk to a model in the terminal. Ctrl-C ends an answer, Ctrl-D the conversation.

    A base model without a chat template continues the text instead of answering.
    """
    from anybit.engine.sequence import SamplingParams
    from anybit.serve.chat import talk

    llm = load(model, quantization, kv_cache, keep, dtype, length, None, 1)
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


def load(
    model: Path,
    quantization: str | None,
    kv_cache: str,
    keep: str,
    dtype: str,
    length: int | None,
    kv_gb: float | None,
    max_running: int,
) -> "LLM":
    from anybit.engine.llm import LLM

    return LLM(
        model,
        quantization,
        dtype=dtype,  # type: ignore[arg-type]  # checked there, with an error that lists them
        kv_cache=kv_cache,  # type: ignore[arg-type]
        keep=keep,  # type: ignore[arg-type]
        length=length,
        kv_bytes=None if kv_gb is None else int(kv_gb * 1e9),
        max_running=max_running,
    )
