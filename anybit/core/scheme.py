"""Schemes: a format and, after an "@", the dtype that activations are quantized to."""

from anybit.core.format import Format, get_format, parser
from anybit.core.names import own_spec
from anybit.errors import InvalidInput, near

ACTIVATIONS = ("int8", "fp8")


@parser
def parse_scheme(scheme: str) -> tuple[Format, str | None]:
    """`"liquid@int8"` -> (the format, "int8"): a layer's weight format and activation notation."""
    spec, at, activation = own_spec(scheme).partition("@")
    activation = activation.strip().lower()
    if at and activation not in ACTIVATIONS:
        raise InvalidInput(
            f"unknown activation {activation!r} in {scheme!r}{near(activation, ACTIVATIONS)}; "
            f"known: {', '.join(ACTIVATIONS)}, or none at all for weights only"
        )
    return get_format(spec), activation or None


def scheme_name(fmt: Format, activation: str | None) -> str:
    """The inverse of `parse_scheme`."""
    return fmt.spec + (f"@{activation}" if activation else "")
