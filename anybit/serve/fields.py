"""What all bodies of requests have in common: fields that are known, and those that say no."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from anybit.errors import InvalidInput

# Words by which a client asks for nothing. Tiers are what a server offers to everybody.
NO = ("", "auto", "default", "disabled", "none", "off", "standard", "standard_only")
ANY = frozenset(("web_search_options",))  # fields that ask for something even by `{}`
# What servers and clients write beside an answer's text, and send back with it: none of it is a
# part of the prompt.
ANNOTATIONS = frozenset((
    "additional_kwargs", "annotations", "cache_control", "caller", "citations", "created",
    "created_at", "extra_content", "finish_reason", "id", "index", "logprobs", "metadata", "model",
    "name", "object", "parsed", "parsed_arguments", "phase", "provider_metadata",
    "provider_options", "provider_specific_fields", "reasoning_details", "response_metadata",
    "signature", "status", "stop_reason", "stop_sequence", "thinking_blocks",
    "thought_signature", "timestamp", "token_ids", "type", "usage", "usage_metadata",
))  # fmt: skip


# What to do instead of fields of the protocols that are not offered.
REMEDIES = {
    "functions": "give tools",
    "function_call": "give tool_choice",
    "output_format": "give output_config.format",
    "web_search_options": "there is no search, so leave it out",
    "previous_response_id": "nothing is stored, so send all items in input",
    "conversation": "nothing is stored, so send all items in input",
    "defer_loading": "there is no search for tools, so leave it out, or leave out the tool",
}


def asks(value: Any) -> bool:
    """Whether a field's value asks for anything: `{"type": "disabled"}`, as null, does not."""
    todo = [value]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            todo += part.values()
        elif not (part is None or part is False or part == [] or part in NO):
            return True
    return False


class Body(BaseModel):
    """What clients send. passes: names of further fields that change nothing."""

    passes: ClassVar[frozenset[str]] = frozenset()

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def known(cls, data: Any) -> Any:
        """Refuse the first unknown field, of which there may be many; take 16.0 as an integer.

        JSON has one kind of number. A field that says no asks for nothing, whatever its name.
        """
        if not isinstance(data, dict):
            return data
        names = {field.alias or name for name, field in cls.model_fields.items()}
        known = names | cls.passes
        unknown = next(
            (n for n, v in data.items() if n not in known and (asks(v) or (n in ANY and v == {}))),
            None,
        )
        if unknown is not None:
            raise PydanticCustomError(
                "unknown_field",
                "this server knows no field {name}; {remedy}",
                {
                    "name": repr(unknown)[:200],
                    "remedy": REMEDIES.get(unknown, "leave it out"),
                    "field": unknown[:200],
                },
            )
        return {
            k: int(v) if isinstance(v, float) and v.is_integer() else v
            for k, v in data.items()
            if k in names
        }


class Replayed(Body):
    """What comes back of an earlier answer, or stands in its place."""

    passes = ANNOTATIONS


def refuse_true(value: bool) -> bool:
    if value:
        raise PydanticCustomError(
            "not_offered", "this server does not offer it; only false is taken"
        )
    return value


# What a client may say that it does not want.
Not = Annotated[bool, AfterValidator(refuse_true), WithJsonSchema({"const": False})]


def of_types(code: str, kinds: tuple[str, ...], said: str) -> BeforeValidator:
    """Refuse what has a type, and none of these. said: of these `kinds`, and of its own `kind`."""
    known = ", ".join(kinds)

    def check(part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind is not None and kind not in kinds:
            raise PydanticCustomError(code, said, {"kinds": known, "kind": repr(kind)[:200]})
        return part

    return BeforeValidator(check)


def reads(*kinds: str) -> BeforeValidator:
    """Refuse parts of other types than these in one line."""
    said = "this model reads text only, in parts of type {kinds}, and not {kind}"
    return of_types("no_text", kinds, said)


def offers(kind: str) -> BeforeValidator:
    """Refuse tools of other types than this one: they are a service of whom the protocol is."""
    said = "this server runs no tools itself, so it takes those of type '{kinds}', not {kind}"
    return of_types("no_tool", (kind,), said)


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Have what is said of a schema or a grammar begin with the field that it is of."""
    try:
        yield
    except InvalidInput as error:
        if str(error).startswith(("the JSON schema", "the grammar")):
            raise InvalidInput(f"{field}: {error}") from None
        raise
