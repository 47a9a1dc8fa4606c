"""`anybit eval`: scores of a model, on text or on tasks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from anybit.cli.group import check_outputs, listed, no_effect
from anybit.progress import say
from anybit.serve.options import MODEL_HELP

Scored = Annotated[
    str | None,
    Argument(help=f"A model: {MODEL_HELP} Or llama.cpp:FILE.gguf, or a server: http://HOST:PORT."),
]
Against = Annotated[
    str | None,
    Option(help="The dense model, or a file of --save-reference: adds KL and others."),
]
Text = Annotated[
    Path | None,
    Option(help="Text to score, as for --calibrate, prose too; modules of Python if absent."),
]
AnswersOnly = Annotated[
    bool, Option("--answers-only", help="Score answers in conversations alone.")
]
Receipt = Annotated[Path | None, Option("--json", help="Write a receipt to this file as well.")]
Card = Annotated[
    bool, Option("--card", help="Put the figures into the README.md of MODEL as well.")
]
SaveReference = Annotated[
    Path | None, Option(help="Keep this pass in a file, as a reference for --against.")
]
Verify = Annotated[
    Path | None, Option(help="Repeat the scoring of this receipt, and tell what differs.")
]
RunCode = Annotated[bool, Option("--run-code", help="Let tasks execute what the model writes.")]
OF_TEXT = ("text", "tokens", "answers_only")
UNTOLD = ("intervals", "thirds", "receipt", "seconds")  # in lines of their own, or in JSON alone


def evaluate(
    context: typer.Context,
    model: Scored = None,
    against: Against = None,
    text: Text = None,
    answers_only: AnswersOnly = False,
    tokens: Annotated[int, Option(min=2, help="Score at most so many tokens.")] = 65536,
    json_file: Receipt = None,
    card: Card = False,
    save_reference: SaveReference = None,
    verify: Verify = None,
    tasks: Annotated[
        str | None, Option(help="Run these tasks of lm-eval instead, separated by ','.")
    ] = None,
    limit: Annotated[int | None, Option(min=1, help="Documents of each task.")] = None,
    batch: Annotated[int, Option(min=1, help="Batch size.")] = 8,
    run_code: RunCode = False,
) -> None:
    """Print a model's perplexity on text, or its results on tasks, beside the dense model's.

    With the dense model: loss, KL divergence both ways with its largest thousandth, and how often
    both find the same token likeliest; each with its 95 % interval over documents. And of 16 greedy
    continuations how many of 64 tokens come before the first difference, and the share of repeated
    4-grams; with --answers-only, of answers to 16 conversations, and how long they are. A receipt
    holds them with hashes of models and text, versions and hardware; --verify exits with 1 where a
    model, a text or a figure is another.

    Tasks that need no network: python_next_line, python_parses, python_docstring.
    """
    chosen_tasks = listed(tasks, "--tasks", separator=",")
    if not chosen_tasks:
        no_effect(context, "without --tasks", "limit", "batch", "run_code")
    else:
        no_effect(context, "with --tasks", *OF_TEXT, "card", "save_reference", "verify")
    if verify:
        no_effect(context, "with --verify", *OF_TEXT, "card", "save_reference")
        repeat(verify, model, against, json_file)
        return
    check_models(context, model, against, save_reference)
    assert model is not None
    say(f"loading {model}" + (f" and {against}" if against else ""))
    check_outputs(json_file, save_reference)
    if chosen_tasks:
        models = [Path(name) for name in (model, against) if name]
        on_tasks(models, chosen_tasks, limit, batch, run_code, json_file)
        return
    from anybit.checkpoint.card import check_card, write_figures
    from anybit.evaluate.receipt import table
    from anybit.evaluate.run import evaluate as run
    from anybit.files.directory import write_json

    if card:
        check_card(Path(model))
    receipt = run(model, against, text, tokens, answers_only, save_reference)
    show(receipt)
    if json_file:
        write_json(json_file, receipt)
    if card:
        write_figures(Path(model), table(receipt))


def check_models(
    context: typer.Context, model: str | None, against: str | None, save_reference: Path | None
) -> None:
    """Refuse options that do not go together with the models that are named."""
    if model is None:
        raise typer.BadParameter("name a model", param_hint="MODEL")
    if against and save_reference:
        raise typer.BadParameter(
            "saves the pass of MODEL, which is the dense one then: leave --against out",
            param_hint="--save-reference",
        )
    if against and Path(against).is_file() and Path(against).suffix != ".gguf":  # as `is_stored`
        no_effect(context, "with a saved reference, which holds its text", *OF_TEXT)


def on_tasks(
    models: list[Path],
    tasks: list[str],
    limit: int | None,
    batch: int,
    run_code: bool,
    json_file: Path | None,
) -> None:
    """Run tasks of lm-eval, and print and write their results."""
    from anybit.evaluate import harness

    results = harness.run_tasks(models, tasks, limit=limit, batch=batch, run_code=run_code)
    typer.echo(harness.table(results))
    if json_file:
        harness.write_results(results, json_file)


def show(receipt: Mapping[str, Any]) -> None:
    """Print a receipt's figures, a line each."""
    for name, value in receipt.items():
        if name in UNTOLD:
            continue
        shown = f"{value:.5g}" if isinstance(value, float) else value
        ends = receipt["intervals"].get(name)
        between = "  [{:.5g}, {:.5g}]".format(*ends) if ends else ""
        typer.echo(f"{name:16} {'unknown: one window' if value is None else shown}{between}")
    name = "kl" if "kl" in receipt else "nll"
    for row in receipt["thirds"] if "against" in receipt else ():
        if row["tokens"]:
            first, last = row["context"]
            typer.echo(f"{name:16} {row[name]:.5g} after {first} to {last} tokens")


def repeat(path: Path, model: str | None, against: str | None, json_file: Path | None) -> None:
    """Score again what a receipt is about, and say what differs; exit code 1 if too much.

    model, against: where they lie now, if elsewhere.
    """
    check_outputs(json_file)
    from anybit.evaluate.receipt import differences, read_receipt
    from anybit.evaluate.run import evaluate as run
    from anybit.files.directory import write_json

    then = read_receipt(path)
    settings = then["receipt"]["settings"]
    say(f"repeating {path}")
    now = run(
        model or settings["model"],
        against or settings["against"],
        settings["text"] and Path(settings["text"]),
        settings["tokens"],
        settings["answers_only"],
    )
    if json_file:
        write_json(json_file, now)
    lines, same = differences(then, now)
    typer.echo("\n".join([*lines, f"{path}: " + ("confirmed" if same else "not confirmed")]))
    if not same:
        raise typer.Exit(1)
