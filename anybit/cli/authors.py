"""Commands for those who write kernels and formats, and for those who tune a server."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

Schemes = Annotated[
    list[str], Argument(help="Formats; @int8 or @fp8 quantizes activations as well.")
]
Counts = Annotated[str, Option(help="Token counts (batch sizes) to time, such as 1,16,256.")]


def bench(
    formats: Schemes,
    shape: Annotated[
        list[str], Option(help="Outputs x inputs of a layer, NxK. May be repeated.")
    ] = ["4096x4096"],  # noqa: B006
    m: Counts = "1,16,256",
    csv: Annotated[Path | None, Option(help="Write the rows to this file as well.")] = None,
) -> None:
    """Time quantized layers against the unquantized one, on this machine's GPU or CPU.

    Weights are random and not in the cache, results are checked before they are timed, and the time
    to read the weight's bytes and do nothing else, the least possible, is measured in the same run.
    """
    from anybit.measure.bench import parse_counts, parse_shape
    from anybit.measure.bench import run as measure

    measure(formats, [parse_shape(text) for text in shape], parse_counts(m), csv, typer.echo)


def tune(
    formats: Schemes,
    shape: Annotated[list[str], Option(help="Outputs x inputs of a layer, NxK. Repeatable.")],
    m: Counts = "1,4,16,64,256,1024",
) -> None:
    """Find the fastest launches for this GPU, and use them from now on.

    Of the kernels that multiply such a layer: for Hopper, for mma.sync, or Triton's. Without this,
    rules measured on an H200 choose. Takes a minute or more for each format and shape; what is
    found is kept in the cache folder ($ANYBIT_CACHE), for this GPU and version of anybit. Processes
    that run already keep to what they read.
    """
    from anybit.measure.bench import parse_counts, parse_shape
    from anybit.measure.tune import tune as run

    path = run(formats, [parse_shape(text) for text in shape], parse_counts(m), typer.echo)
    typer.echo(f"wrote {path}")


def build(
    formats: Annotated[
        list[str] | None,
        Argument(help="Formats, with @int8 or @fp8, or a checkpoint; none: the usual ones."),
    ] = None,
    cache: Annotated[Path | None, Option(help="A folder instead of the user's cache.")] = None,
    jobs: Annotated[int, Option(min=0, help="Processes; 0 is one a core.")] = 0,
    gpu: Annotated[list[str], Option(help="A GPU's usual name. May be repeated.")] = ["H200"],  # noqa: B006
    pack: Annotated[
        Path | None,
        Option(
            help="Write them, and those that Triton's cache has, to one file for `anybit serve "
            "--kernels`."
        ),
    ] = None,
) -> None:
    """Compile the kernels in CuTe DSL before a layer needs them; needs no GPU."""
    from anybit.cli.build import build as run

    typer.echo(run(formats or (), cache, jobs, gpu, pack))
