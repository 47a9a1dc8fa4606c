"""Whether what was written can be read: names and shapes, against the class that will read them.

No weight is read: the model is built without memory, and changed as it is when it is loaded.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from anybit.checkpoint.architecture import bare_model, check_model
from anybit.checkpoint.layout import Conversion, check_fit, check_missing
from anybit.checkpoint.names import (
    Names,
    as_they_are,
    conversions,
    ignored_unexpected,
    missing_in,
    natural,
)
from anybit.checkpoint.swap import put, swap_for_stored
from anybit.errors import InvalidInput
from anybit.files.directory import quantization_of, read_json
from anybit.files.safetensors import Stored, stored_tensors
from anybit.nn.plan import METHOD, stored_plan


@contextmanager
def unreadable() -> Iterator[None]:
    """Says of an InvalidInput within that it is a fault of what was written."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(
            f"what was written could not be loaded, which is a fault of anybit; please report it: "
            f"{error}"
        ) from error


def try_out(directory: Path) -> None:
    """Raise InvalidInput when transformers would not find every tensor of a model that was written.

    directory: of a dense model, or of one of ours.
    """
    with unreadable():
        quantization = quantization_of(read_json(directory / "config.json"), directory)
        check = check_coded if quantization.get("quant_method") == METHOD else check_model
        check(directory)


def read_as(directory: Path) -> tuple[Names, dict[str, Stored]]:
    """transformers' tables for the model of a directory, as it is when it is loaded, and tensors.

    directory: as in `try_out`.

    Raises:
        FileNotFoundError: Files are missing.
        InvalidInput: As `bare_model` does, or the plan does not fit the model.
    """
    stored, model = stored_tensors(directory), bare_model(directory)
    quantization = quantization_of(read_json(directory / "config.json"), directory)
    if quantization.get("quant_method") != METHOD:
        return Names(model), stored
    fill, names = swap_for_stored(model, stored_plan(quantization, directory), stored)
    put(model, fill)
    table = Names(model)
    table.renamings, *table.converters = conversions(names, [*table.renamings, *table.converters])
    table.renamings = [table.renamings]
    return table, stored


def check_coded(directory: Path) -> None:
    """As `check_model` does for dense models."""
    table, stored = read_as(directory)
    found = as_they_are(table, stored)
    covered = {*found.values()} | merged(table, stored)
    ignored = ignored_unexpected(table.model)
    unexpected = [n for n in stored if table.in_model(n)[0] not in table.state and not ignored(n)]
    check_missing(directory, missing_in(table.model, covered), unexpected)
    check_fit(directory, found, stored, table.state)


def merged(table: Names, stored: Mapping[str, Stored]) -> set[str]:
    """The model's names for tensors that transformers makes of stored ones, which are all there."""
    joint: dict[str, Conversion] = {}
    for name in sorted(stored, key=natural):
        found, converter, pattern = table.in_model(name)
        if converter is not None and found in table.state:
            conversion = joint.setdefault(found, Conversion.begun(converter, found, table))
            conversion.sources[pattern][name] = stored[name]
    return {target for one in joint.values() if one.whole for target in one.targets}
