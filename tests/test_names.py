"""Names of formats: case, names of other tools, and what is said of those that are unknown."""

from dataclasses import dataclass

import pytest

import anybit
from anybit.core.format import FORMATS, known_formats, register
from anybit.core.names import ALIASES
from anybit.core.scheme import parse_scheme, scheme_name
from anybit.errors import InvalidInput, InvalidType
from anybit.formats.liquid import Liquid


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("INT4", "int4"),
        ("Int4:Group=64,ZERO", "int4:group=64,zero"),
        ("FP:E3M2", "fp6"),
        ("trellis:rotate=KN", "trellis:rotate=kn"),
        ("Liquid@INT8", "liquid@int8"),
        ("W4A16", "int4:group=128"),
        ("w4a16:group=64", "int4:group=64"),
        ("w8a8", "int8@int8"),
        ("4bit", "int4:group=64,zero"),
        ("Q4_K", "q4_k"),
        ("NF4", "nf4"),
    ],
)
def test_case_does_not_matter_and_names_of_others_are_known(name: str, own: str) -> None:
    assert scheme_name(*parse_scheme(name)) == own


@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_stands_for_a_scheme_and_hides_no_format(name: str) -> None:
    assert scheme_name(*parse_scheme(ALIASES[name])) == ALIASES[name]
    assert name not in dict(known_formats())


def test_a_name_with_capitals_is_found_first() -> None:
    @register("Upper")
    @dataclass(frozen=True)
    class Upper(Liquid):
        code: str = ""

    try:
        assert anybit.get_format("Upper:code=ABC") == Upper(code="ABC")
    finally:
        del FORMATS["Upper"]


def test_what_is_no_string_is_refused() -> None:
    with pytest.raises(InvalidType, match="a string such as 'int4', or a Format, not 4"):
        anybit.get_format(4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Liqiud", "did you mean liquid"),
        ("q4_k_m", "'q4_k_m': q4_k_m is a mixture of formats, for a whole model: give q4_k"),
        ("AWQ", "awq is a method and no format: choose a format, such as int4:group=128"),
        ("bf16", "layers keep their dtype where a plan leaves them unquantized"),
        ("liquid@int8", "quantizes activations as well; here is a format of weights, 'liquid'"),
    ],
)
def test_what_an_unknown_name_is_told(name: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        anybit.get_format(name)
