"""The command line. Every command imports what it needs when it runs, so that help is instant."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from anybit.cli import about, authors, scores
from anybit.cli.group import Commands, check_outputs, examples, listed, no_effect, pushing
from anybit.errors import check_text
from anybit.progress import say
from anybit.serve import commands
from anybit.serve.options import MODEL_HELP

AUTHORS = "For authors of kernels and formats"
ENVIRONMENT = """

Environment: ANYBIT_CACHE is the folder of what anybit keeps (see `anybit cache`). HF_HOME,
HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE count for models of the hub. A mistake is one line;
ANYBIT_DEBUG=1 shows where it comes from.
"""
Dense = Annotated[Path, Argument(help=f"An unquantized model: {MODEL_HELP}")]
Out = Annotated[Path, Option("--out", "-o", help="Directory to write.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace an older OUT.")]
Formats = Annotated[
    list[str] | None,
    Option(
        "--format",
        help="A format for all layers, or PATTERN=FORMAT for those whose name matches; "
        "none leaves them unquantized. May be repeated; the last match wins. If absent, one "
        "that suits this machine.",
    ),
]
Calibrate = Annotated[
    str | None,
    Option(
        help="Text to calibrate on: a file of plain text; JSON, CSV or parquet with records of "
        '"text", "messages", or "prompt" and "completion"; or what comes with Python: prose, '
        "its documentation, or python, its modules. If absent, a little of prose for formats "
        "of fewer than 8 bits or with quantized activations."
    ),
]
Method = Annotated[
    str | None,
    Option(
        help="Without text: rtn (rounds to nearest), clip or hqq; grid finds the scales that "
        "the weights were trained on (QAT), if they were. With text: gptq (the "
        "default), gptq+gradients (slower, loses less), additive (the default for codebooks), "
        "rotate+gptq, smooth, or smooth+gptq (the default where activations are quantized too)."
    ),
]
Length = Annotated[int, Option(min=1, help="Tokens in each, at most.")]
PushTo = Annotated[
    str | None,
    Option(
        metavar="ORG/NAME", help="Upload OUT to the hub at the end; a new repository is private."
    ),
]

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        "anybit info Qwen/Qwen3-0.6B",
        "anybit quantize Qwen/Qwen3-0.6B --format fp6 -o qwen3-fp6",
        "anybit chat qwen3-fp6",
        title="First steps",
    )
    + ENVIRONMENT,
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Store and run the linear layers of language models in any number of bits."""
    if version:
        from anybit.version import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.command(
    epilog=examples(
        "anybit demo",
        "anybit demo --formats 'int4;int4:group=64,zero;fp6' --tokens 4096",
    )
)
def demo(
    formats: Annotated[
        str | None, Option(help="Formats to show, separated by ';'. All families if absent.")
    ] = None,
    tokens: Annotated[
        int, Option(min=100, help="Held-out tokens that every format is scored on.")
    ] = 16384,
    out: Annotated[Path, Option("--out", "-o", help="Where the results go.")] = Path("out/demo"),
) -> None:
    """Quantize a small real model to every family of formats, and measure each.

    Shows bits per weight, size, perplexity, KL divergence and agreement; saves one checkpoint, lets
    a fresh process load it and complete a function; writes size_vs_kl.png and results.json. Takes
    under three minutes on two cores.
    """
    from anybit.cli.demo import FORMATS
    from anybit.cli.demo import demo as run

    run(listed(formats, "--formats", FORMATS), tokens, out)


@app.command(
    epilog=examples(
        "anybit quantize Qwen/Qwen3-0.6B -o qwen3",
        "anybit quantize Qwen/Qwen3-0.6B --format fp6 -o qwen3-fp6",
        "anybit quantize MODEL --format int4:group=128,zero -o OUT",
        "anybit quantize MODEL --format int3 --format '*.down_proj=int4' -o OUT",
        "anybit quantize MODEL --format fp6 --format '*.layers.0.*=none' -o OUT",
        "anybit quantize MODEL --plan plan.json -o OUT",
        "anybit quantize MODEL --format int3 --calibrate chats.jsonl -o OUT",
        "anybit quantize MODEL --format liquid@int8 --calibrate text.jsonl -o OUT",
        "anybit quantize MODEL --format int4 --method rtn -o OUT --push-to ORG/NAME",
    )
)
def quantize(
    context: typer.Context,
    model: Dense,
    out: Out,
    formats: Formats = None,
    plan: Annotated[
        Path | None, Option(help="A JSON file {pattern: format or null} instead.")
    ] = None,
    calibrate: Calibrate = None,
    method: Method = None,
    samples: Annotated[int, Option(min=1, help="Windows of text to calibrate on.")] = 128,
    length: Length = 2048,
    kv_scales: Annotated[
        bool, Option("--kv-scales", help="Also store int8 scales of the KV cache.")
    ] = False,
    overwrite: Overwrite = False,
    push_to: PushTo = None,
) -> None:
    """Quantize a model of any size, tensor by tensor: it never has to fit in memory.

    Run the same command again after an interruption: finished parts are kept. `anybit formats`
    lists the formats. Without --calibrate, what cannot be calibrated is rounded to nearest.
    """
    if formats and plan:
        raise typer.BadParameter("give either --format or --plan", param_hint="--format")
    if calibrate is None:
        no_effect(context, "without --calibrate", "samples", "length", "kv_scales")
    say(f"reading {model}")
    from anybit.checkpoint.architecture import bare_model
    from anybit.checkpoint.foreign.ready import dense_directory
    from anybit.checkpoint.quantize import quantize_directory, trained_method
    from anybit.checkpoint.rewrite import check_paths
    from anybit.cli.options import (
        calibration_of,
        default_calibration,
        plan_of_options,
        warn_of_few_bits,
    )

    def directory() -> Path:
        return dense_directory(check_paths(model, out, overwrite))

    chosen = plan_of_options(formats, plan, calibrate is not None, lambda: bare_model(directory()))
    with pushing(out, push_to):
        if method == "grid":
            method = trained_method(directory(), chosen)
        rounded = calibrate is None and method is None
        text = None
        if calibrate is not None and method != "grid":
            text = calibration_of(calibrate, samples, length, kv_scales)
        elif method != "grid" and (formats or plan or method):
            directory()  # before a word of what comes next
            text = default_calibration(chosen, method)
        if text is None:
            warn_of_few_bits(chosen)
        typer.echo(
            quantize_directory(model, out, chosen, method, text, overwrite, or_rounded=rounded)
        )


@app.command(
    epilog=examples(
        "anybit refine out/qwen3-2bit --dense Qwen/Qwen3-0.6B -o out/qwen3-refined",
        "anybit refine out/pico-int2 --dense models/pico -o out/tuned --calibrate python "
        "--length 256 --steps 50",
    )
)
def refine(
    model: Annotated[Path, Argument(help="A checkpoint of anybit.")],
    dense: Annotated[Path, Option("--dense", help=f"The model that it was made of: {MODEL_HELP}")],
    out: Out,
    calibrate: Annotated[
        str, Option(help="Text to tune on, as of quantize --calibrate.")
    ] = "prose",
    steps: Annotated[int, Option(min=1, help="Of gradient descent.")] = 150,
    batch: Annotated[int, Option(min=1, help="Windows of text in a step.")] = 4,
    samples: Annotated[int, Option(min=1, help="Windows of text to tune on.")] = 512,
    length: Annotated[int, Option(min=2, help="Tokens in each, at most.")] = 1024,
    overwrite: Overwrite = False,
    push_to: PushTo = None,
) -> None:
    """Tune a quantized model's scales, norms and codes to predict what the dense model does.

    What 2 and 3 bits need: it took a published model's trellis codes of 2 bits from a loss of 0.55
    to 0.31 nats. Holds both models in memory, on a GPU where there is one; an interruption leaves
    nothing.
    """
    say(f"refining {model} into {out}")
    from anybit.checkpoint.refine import refine_checkpoint
    from anybit.cli.options import calibration_of

    text = calibration_of(calibrate, samples, length)
    with pushing(out, push_to):
        typer.echo(
            refine_checkpoint(
                model, dense, out, text, steps=steps, batch=batch, overwrite=overwrite
            )
        )


@app.command(
    epilog=examples(
        "anybit convert Llama-3.1-8B-GPTQ -o out/llama",
        "anybit convert gpt-oss-20b -o out/gpt-oss",
        "anybit convert DeepSeek-V3 -o out/deepseek --to nvfp4",
        "anybit convert Kimi-K2-Thinking -o out/kimi --to '*.experts.*=int2:group=32,zero'",
        "anybit convert Qwen3-8B-Q4_K_M.gguf -o out/qwen3",
        "anybit convert Qwen/Qwen3-8B-GGUF:Q4_K_M -o out/qwen3",
    )
)
def convert(
    model: Annotated[Path, Argument(help=f"A model that another tool quantized: {MODEL_HELP}")],
    out: Out,
    to: Annotated[
        list[str] | None,
        Option("--to", help="Round to FORMAT instead, or PATTERN=FORMAT; may be repeated."),
    ] = None,
    overwrite: Overwrite = False,
    push_to: PushTo = None,
) -> None:
    """Turn a checkpoint of another tool into one of anybit, with the same weights bit for bit.

    Reads GPTQ, AWQ, HQQ, AQLM, compressed-tensors, bitsandbytes (4 bits), AutoRound, GPT-OSS's
    MXFP4, DeepSeek's FP8, ModelOpt, Quark, torchao and BitNet, by what its config.json says, and
    GGUF files. Streams tensor by tensor: any size, and resumable. Says which layers had to be
    decoded, if any.
    """
    say(f"converting {model} into {out}")
    from anybit.checkpoint.foreign.convert import convert_checkpoint
    from anybit.nn.plan import plan_from

    plan = plan_from(to, "--to") if to else None
    with pushing(out, push_to):
        typer.echo(convert_checkpoint(model, out, plan, overwrite=overwrite))


@app.command(
    epilog=examples(
        "anybit export out/pico-int4 -o out/pico-ct --to compressed-tensors",
        "anybit export out/qwen3 -o qwen3.gguf --to gguf",
    )
)
def export(
    model: Annotated[
        Path, Argument(help="A checkpoint of anybit: a directory, or ORG/NAME of the hub.")
    ],
    out: Annotated[Path, Option("--out", "-o", help="Directory to write; for gguf, the file.")],
    to: Annotated[
        str, Option("--to", help="Target layout: compressed-tensors or gguf.")
    ] = "compressed-tensors",
    overwrite: Overwrite = False,
    push_to: PushTo = None,
) -> None:
    """Write a checkpoint for other engines, with the same weights bit for bit.

    compressed-tensors holds int2 to int8, mxfp, nvfp4:divide and fp8; gguf holds int4, int5 and
    int8 with group=32, q2_k to q6_k and others. A checkpoint with any other format is refused.
    """
    say(f"exporting {model} into {out}")
    from anybit.checkpoint.foreign.export import export_checkpoint

    with pushing(out, push_to):
        typer.echo(export_checkpoint(model, out, to, overwrite=overwrite))


@app.command(
    epilog=examples(
        "anybit plan models/pico --bits 4.5",
        "anybit plan models/pico --bits 4.5 --calibrate python --samples 32 --length 512",
        "anybit plan MODEL --bits 4.5 --calibrate text.jsonl -o plan.json --plot plan.png",
    )
)
def plan(
    context: typer.Context,
    model: Dense,
    bits: Annotated[
        float,
        Option(min=0.1, max=16, help="Stored bits of a weight, on average, with scales."),
    ],
    calibrate: Annotated[
        str | None, Option(help="Text to measure on, as of quantize --calibrate.")
    ] = None,
    candidates: Annotated[
        str | None, Option(help="Formats to choose from, separated by ';'.")
    ] = None,
    head: Annotated[
        str,
        Option(help="Format of the output head, not counted in the budget; none keeps it."),
    ] = "int8",
    samples: Annotated[int, Option(min=1, help="Windows of text to measure on.")] = 32,
    length: Length = 2048,
    out: Annotated[
        Path | None, Option("--out", "-o", help="Write the plan for quantize --plan.")
    ] = None,
    plot: Annotated[Path | None, Option(help="Draw the choice (PNG, SVG or PDF).")] = None,
) -> None:
    """Choose a format for every layer under a budget of memory.

    Measures on text (--calibrate) how much each layer's rounding costs the model, and explains the
    choice. Without text it goes by the errors of the weights, as if all layers mattered alike.
    """
    schemes = listed(candidates, "--candidates")
    if calibrate is None:
        no_effect(context, "without --calibrate", "samples", "length")
    say(f"loading {model}")
    check_outputs(out, plot=plot)
    from anybit.checkpoint.architecture import dense_config
    from anybit.checkpoint.foreign.ready import dense_directory
    from anybit.checkpoint.save_load import load_dense
    from anybit.cli.options import calibration_of
    from anybit.core.scheme import parse_scheme
    from anybit.planning.allocate import plan_formats

    for scheme in schemes:  # what is unknown is told before the model is loaded
        parse_scheme(scheme)
    directory = dense_directory(model)
    dense_config(directory)
    text = None
    if calibrate is None:
        say("no --calibrate: planning by the errors of the weights alone")
    else:
        text = calibration_of(calibrate, samples, length)
        text.check_file()
    chosen = plan_formats(
        load_dense(directory), text, bits, candidates=schemes, head=None if head == "none" else head
    )
    typer.echo(chosen.table())
    if out:
        chosen.save(out)
    if plot:
        chosen.plot(plot)


app.command(
    name="eval",
    epilog=examples(
        "anybit eval out/pico-fp6 --against models/pico --json receipt.json --card",
        "anybit eval --verify receipt.json",
        "anybit eval models/pico --save-reference pico.reference",
        "anybit eval out/pico-fp6 --against pico.reference",
        "anybit eval OUT --text chats.jsonl --answers-only --json receipt.json",
        "anybit eval out/pico-fp6 --tasks python_next_line --against models/pico",
        "anybit eval OUT --tasks piqa,arc_easy,hellaswag,winogrande,humaneval --run-code",
    ),
)(scores.evaluate)


@app.command(
    epilog=examples(
        "anybit generate out/pico-fp6 'def main('",
        "anybit generate out/pico-fp6 'class Stack:' --max-tokens 200 --temperature 0.8 --seed 1",
    )
)
def generate(
    model: Annotated[Path, Argument(help=f"A model: {MODEL_HELP}")],
    prompt: Annotated[str, Argument(help="Text to continue.")],
    max_tokens: Annotated[int, Option(min=1, help="Tokens to write, at most.")] = 128,
    temperature: Annotated[
        float, Option(min=0.0, help="0 always takes the likeliest token.")
    ] = 0.0,
    seed: Annotated[int, Option(min=-(2**63), max=2**64 - 1, help="Seed of the sampling.")] = 0,
) -> None:
    """Continue a prompt, token by token as they come."""
    check_text(prompt)
    say(f"loading {model}")
    from anybit.evaluate.model import complete, load_text_model

    begun = False

    def show(piece: str) -> None:
        nonlocal begun
        typer.echo(piece if begun else prompt + piece, nl=False)
        begun = True

    loaded, tokenizer = load_text_model(model)
    complete(
        loaded,
        tokenizer,
        prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        show=show,
    )
    show("\n")


app.command(
    epilog=examples(
        "anybit info Qwen/Qwen3-0.6B",
        "anybit info MODEL --format 'fp6;int4:group=64' --device l40s --context 32768",
        "anybit info MODEL --memory 24GB --json info.json",
    )
)(about.info)
app.command(epilog=examples("anybit cache", "anybit cache --clear --yes"))(about.cache)


@app.command(
    epilog=examples("anybit doctor", "anybit doctor liquid@int8", "anybit doctor --report gpu.json")
)
def doctor(
    formats: Annotated[
        list[str] | None,
        Argument(help="Formats to explain in full; all of them in short if absent."),
    ] = None,
    report: Annotated[
        Path | None,
        Option(help="Write a JSON file for an issue: versions, self-tests, and times."),
    ] = None,
) -> None:
    """Show which kernels the formats run on, on each device, why not others, and versions."""
    from anybit.cli import doctor as room

    if report:
        room.report(formats or (), report)
    else:
        room.doctor(formats or ())


@app.command(epilog=examples("anybit formats"))
def formats() -> None:
    """List the formats, what they cost, and where they come from."""
    from anybit.cli.doctor import formats as run

    run()


app.command(
    epilog=examples(
        "anybit serve out/pico-fp6 --port 8000", "anybit serve MODEL --format fp6 --kv-cache int8"
    )
)(commands.serve)
app.command(epilog=examples("anybit chat out/pico-fp6"))(commands.chat)
app.command(
    rich_help_panel=AUTHORS,
    epilog=examples(
        "anybit bench int4 --shape 4096x4096 --m 1,16,256",
        "anybit bench fp6 liquid@int8 --shape 4096x4096 --shape 4096x14336 --csv rows.csv",
    ),
)(authors.bench)
app.command(
    "bench-serve",
    hidden=True,
    epilog=examples(
        "anybit bench serve http://127.0.0.1:8000",
        "anybit bench serve http://127.0.0.1:8000 --rate 4,16 --prompt 270~1.0 --plot a.png",
    ),
)(commands.bench_serve)
app.command(
    rich_help_panel=AUTHORS,
    epilog=examples(
        "anybit tune int4:group=128 --shape 4096x4096 --shape 4096x14336",
        "anybit tune fp6 liquid@int8 --shape 6144x4096 --m 1,4,16,64,256",
    ),
)(authors.tune)
app.command(
    rich_help_panel=AUTHORS,
    epilog=examples("anybit build liquid@int8 fp6", "anybit build OUT --gpu A100 --pack FILE"),
)(authors.build)
