"""The options of the commands that load a model, in the groups that `--help` shows."""

import dataclasses
import inspect
import math
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer import Argument, Option

from anybit.engine.config import ADVANCED, LIMITS, MODEL, EngineConfig, texts
from anybit.errors import InvalidInput
from anybit.files.server import KEY

SECURITY = "Security"
GROUPS = ("", MODEL, LIMITS, SECURITY, ADVANCED)  # of options in --help
MODEL_HELP = "a directory, a GGUF file, or ORG/NAME of the hub, with @REVISION or :Q4_K_M (GGUF)."
Model = Annotated[Path, Argument(help=f"A model: {MODEL_HELP}")]
Host = Annotated[str, Option(help="Address to listen on.")]
Port = Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0: any.")]
Names = Annotated[
    list[str] | None,
    Option(
        "--served-model-name",
        "--name",
        help="The model's name for clients; several are aliases. The directory's if absent.",
    ),
]
LogLevel = Annotated[str, Option(help="debug, info (a line for each API call), warning or error.")]
ChatTemplate = Annotated[
    Path | None,
    Option(help="File of a chat template, instead of the model's own.", rich_help_panel=MODEL),
]
Queue = Annotated[
    int,
    Option(
        min=0,
        help="Sequences that may wait; further requests get 503.",
        rich_help_panel=LIMITS,
    ),
]
FrontEndCount = Annotated[
    int | None,
    Option(
        "--front-ends",
        min=1,
        max=64,
        help="Processes that speak HTTP; default: 1, 2 from 8 cores, 4 from 32.",
        rich_help_panel=ADVANCED,
    ),
]
Grace = Annotated[
    float,
    Option(
        min=0,
        max=86400,
        help="Seconds that requests have to finish at shutdown.",
        rich_help_panel=LIMITS,
    ),
]
ApiKeys = Annotated[
    list[str] | None,
    Option(
        "--api-key",
        envvar=KEY,
        help="Key that clients must send; any of several. Given here, it replaces those of the "
        "variable.",
        rich_help_panel=SECURITY,
    ),
]
Origins = Annotated[
    list[str] | None,
    Option(
        "--allowed-origins",
        help="Web pages that may call the server, https://HOST; * for all.",
        rich_help_panel=SECURITY,
    ),
]
ToolParser = Annotated[
    str | None,
    Option(
        help="Form of tool calls, if the chat template does not tell: hermes, ...",
        rich_help_panel=ADVANCED,
    ),
]


def bytes_of(gigabytes: float | None) -> int | None:
    """Bytes of a KV cache."""
    if gigabytes is None:
        return None
    if not 0 < gigabytes < math.inf:  # nor is NaN
        raise typer.BadParameter(
            f"{gigabytes:g} is not a size; give 4, for example", param_hint="--kv-gb"
        )
    return int(gigabytes * 1e9)


def adapters_of(given: list[str] | None) -> dict[str, Path]:
    """Directories by names, from NAME=DIRECTORY."""
    pairs = [text.partition("=") for text in given or []]
    complete = all(name and place for name, _, place in pairs)
    if not complete or len({name for name, _, _ in pairs}) < len(pairs):
        raise InvalidInput(f"--lora {' '.join(given or [])}: give NAME=DIRECTORY, each name once")
    return {name: Path(place) for name, _, place in pairs}


class Form(NamedTuple):
    """How commands take a field of `EngineConfig` that is no plain value: a type, None by default.

    Attributes:
        type: Of what is given.
        read: Makes the field of it.
        metavar: What `--help` shows for it.
    """

    type: Any
    read: Callable[[Any], Any]
    metavar: str | None = None


FORMS = {
    "kv_bytes": Form(float | None, bytes_of),
    "max_itl": Form(float | None, lambda limit: "auto" if limit is None else limit),
    "adapters": Form(list[str] | None, adapters_of, "NAME=DIRECTORY"),
}


def option(field: "dataclasses.Field[Any]", text: str) -> inspect.Parameter:
    """The option of a field of `EngineConfig`. text: what stands below the field."""
    form, default = FORMS.get(field.name), field.default
    if form is not None:
        kind, default = form.type, None
    elif default is None:
        kind = int | None if field.type == int | None else str | None
    else:
        kind = type(default)
    flag = field.metadata.get("flag") or f"--{field.name.replace('_', '-')}"
    shown = Option(
        flag,
        help=text.partition("\n\n")[0].replace("\n", " "),
        min=field.metadata.get("min"),
        metavar=form and form.metavar,
        rich_help_panel=field.metadata["group"],
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, shown],
    )


def group_of(parameter: inspect.Parameter) -> int:
    """The place of a parameter's group in --help."""
    (shown,) = parameter.annotation.__metadata__
    return GROUPS.index(shown.rich_help_panel or "")


def engine_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options for fields of `EngineConfig`, which it gets as `engine`, a dict.

    names: those fields; none: all that have a group.
    """
    fields = [f for f in dataclasses.fields(EngineConfig) if f.metadata]
    chosen = [f for f in fields if not names or f.name in names]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def call(**given: Any) -> None:
            engine = {field.name: given.pop(field.name) for field in chosen}
            for name in engine.keys() & FORMS.keys():
                engine[name] = FORMS[name].read(engine[name])
            command(**given, engine=engine)

        said, own = texts(), dict(inspect.signature(command).parameters)
        del own["engine"]
        parameters = [
            *(option(field, said[field.name]) for field in chosen),
            *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.values()),
        ]
        parameters.sort(key=group_of)
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        return call

    return decorate
