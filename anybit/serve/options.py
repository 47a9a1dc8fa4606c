"""The options of the commands that load a model, in the groups that `--help` shows."""

from pathlib import Path
from typing import Annotated

import typer

from anybit.files.server import KEY

# Groups of options in --help.
MODEL, LIMITS, SECURITY, ADVANCED = "Model", "Limits", "Security", "Advanced"
MODEL_HELP = "a directory, a GGUF file, or ORG/NAME of the hub, with @REVISION or :Q4_K_M (GGUF)."
Model = Annotated[Path, typer.Argument(help=f"A model: {MODEL_HELP}")]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="Quantize an unquantized model while loading it: fp6, int4, ...",
        rich_help_panel=MODEL,
    ),
]
Kv = Annotated[
    str,
    typer.Option(
        help="KV cache: model (its dtype), int8, k8v4 (8 bits for K, 4 for V), int4, or auto (int8 "
        "if the model has scales).",
        rich_help_panel=MODEL,
    ),
]
Dtype = Annotated[
    str, typer.Option(help="auto, bfloat16, float16 or float32.", rich_help_panel=MODEL)
]
Keep = Annotated[
    str,
    typer.Option(
        help="Dequantized copies of layers that have no kernel: auto, packed (never) or decoded "
        "(always).",
        rich_help_panel=ADVANCED,
    ),
]
Length = Annotated[
    int | None,
    typer.Option(
        min=2, help="Context length: tokens of a prompt and its output.", rich_help_panel=LIMITS
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        help="Speculative decoding: ngram (what followed earlier in the sequence), mtp (the "
        "model's own head for further tokens), or a smaller model with the same tokenizer.",
        rich_help_panel=ADVANCED,
    ),
]
DraftTokens = Annotated[
    int,
    typer.Option(min=1, help="Most tokens of a draft.", rich_help_panel=ADVANCED),
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any.")]
Names = Annotated[
    list[str] | None,
    typer.Option(
        "--served-model-name",
        "--name",
        help="The model's name for clients; several are aliases. The directory's if absent.",
    ),
]
LogLevel = Annotated[
    str, typer.Option(help="debug, info (a line for each API call), warning or error.")
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        help="File of a chat template, instead of the model's own.", rich_help_panel=MODEL
    ),
]
Lora = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=DIRECTORY of a LoRA adapter; clients ask for it as model NAME.",
        rich_help_panel=MODEL,
    ),
]
KvGb = Annotated[
    float | None,
    typer.Option(
        help="Size of the KV cache in GB; default: as much as is useful.", rich_help_panel=LIMITS
    ),
]
MaxRunning = Annotated[
    int, typer.Option(min=1, help="Sequences that run at the same time.", rich_help_panel=LIMITS)
]
MaxItl = Annotated[
    float | None,
    typer.Option(
        min=1,
        help="Milliseconds that a step with a prompt may take while other sequences run, which "
        "bounds the time between their tokens; default: 20 on a GPU, on a CPU 1.5 times a step "
        "without prompts.",
        rich_help_panel=LIMITS,
    ),
]
Kernels = Annotated[
    Path | None,
    typer.Option(
        help="A file of `anybit build --pack`: compiled kernels, so that no compiler runs. It is "
        "code: one that you trust.",
        rich_help_panel=ADVANCED,
    ),
]
Queue = Annotated[
    int,
    typer.Option(
        min=0,
        help="Sequences that may wait; further requests get 503.",
        rich_help_panel=LIMITS,
    ),
]
FrontEndCount = Annotated[
    int | None,
    typer.Option(
        "--front-ends",
        min=1,
        max=64,
        help="Processes that speak HTTP; default: 1, 2 from 8 cores, 4 from 32.",
        rich_help_panel=ADVANCED,
    ),
]
Grace = Annotated[
    float,
    typer.Option(
        min=0,
        max=86400,
        help="Seconds that requests have to finish at shutdown.",
        rich_help_panel=LIMITS,
    ),
]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        envvar=KEY,
        help="Key that clients must send; any of several. Given here, it replaces those of the "
        "variable.",
        rich_help_panel=SECURITY,
    ),
]
Origins = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-origins",
        help="Web pages that may call the server, https://HOST; * for all.",
        rich_help_panel=SECURITY,
    ),
]
ToolParser = Annotated[
    str | None,
    typer.Option(
        help="Form of tool calls, if the chat template does not tell: hermes, ...",
        rich_help_panel=ADVANCED,
    ),
]
ExactAnswers = Annotated[
    bool,
    typer.Option(
        "--exact-answers",
        help="Layers of @int8 round prompts to 8 bits, and answers to 16.",
        rich_help_panel=ADVANCED,
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="The same output whatever else runs; costs some speed.",
        rich_help_panel=ADVANCED,
    ),
]
