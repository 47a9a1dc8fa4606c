"""Plans: which layer of a model gets which scheme, by patterns over module names."""

import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

from anybit.core.format import Format
from anybit.core.scheme import parse_scheme, scheme_name
from anybit.errors import InvalidInput
from anybit.files.directory import read_text
from anybit.nn.experts import MIXTRALS, published, unpublished
from anybit.version import __version__

Spec = str | Format
Plan = Mapping[str, Spec | None]
HEADS = ("lm_head", "embed_out", "output_projection")  # output layers, kept unless named
METHOD, VERSION = "anybit", 1  # in a checkpoint's config.json; VERSION is that of its layout


def resolve(
    shapes: Mapping[str, tuple[int, ...]],
    spec: Spec | Plan,
    embeddings: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> dict[str, str]:
    """Which scheme each layer gets.

    Args:
        shapes: Shapes (N, K) of a model's linear layers, by name.
        spec: One format for all, or a plan, as in `quantize_`.
        embeddings: Shapes of its embeddings, which are kept unless a pattern names them.

    Returns:
        Schemes of the layers to be quantized, by name.

    Raises:
        InvalidInput: A pattern matches no layer or a layer no pattern, a format is unknown or
            cannot store a layer's shape, or no layer is left to quantize.
    """
    plan = plan_of(spec)
    unused, out = set(plan), {}
    for name, shape in {**shapes, **embeddings}.items():
        matches = patterns_for(name, plan, name in embeddings)
        unused -= set(matches) | {p for p in plan if p == "*" and is_head(name)}
        if not matches:
            if is_head(name) or name in embeddings:
                continue
            raise InvalidInput(
                f"no pattern matches layer {name!r} (patterns: {', '.join(plan)}); give '*', all "
                "other layers, a format, or none to leave them unquantized"
            )
        scheme = plan[matches[-1]]
        if scheme is None:
            continue
        try:
            fmt, activation = parse_scheme(scheme)
            fmt.check(*shape)
        except ValueError as error:
            raise InvalidInput(f"{name}: {error}") from None
        if name in embeddings:
            check_rows(name, fmt, activation)
        out[name] = scheme
    if not shapes and unused == {"*"}:
        raise InvalidInput("nothing to quantize: the model has no linear layers")
    if unused - {"lm_head"}:
        raise InvalidInput(
            f"no layer matches {', '.join(map(repr, sorted(unused)))}; layers are named like "
            f"{', '.join(map(repr, list(shapes)[:3]))}"
        )
    if not out:
        raise InvalidInput(
            "nothing to quantize: every layer is kept (None), a head, tiny, or none that only "
            "multiplies by a matrix"
        )
    return out


def check_rows(name: str, fmt: Format, activation: str | None) -> None:
    """Raise InvalidInput for a scheme that an embedding cannot have."""
    if activation or "n" in fmt.rotate:
        raise InvalidInput(
            f"{name}: {scheme_name(fmt, activation)!r} "
            f"{'quantizes activations' if activation else 'mixes rows'}, and an embedding looks up "
            "rows by their numbers; leave that out"
        )


def patterns_for(name: str, plan: Plan, embedding: bool = False) -> list[str]:
    """The patterns of a plan that match a layer; the last one decides.

    A layer of Mixtral's may be called as its checkpoint or as its model calls it. A name matches
    itself, even if it has brackets.

    embedding: whether it is one, which only a pattern means that says more of its last name than
        "*": "*.embed_tokens" does, and "model.*" does not.
    """
    names = {name, unpublished(name, MIXTRALS[0]), published(name, MIXTRALS[0])}
    matches = [p for p in plan if p in names or any(fnmatchcase(n, p) for n in names)]
    if embedding:
        return [p for p in matches if p.rpartition(".")[2].strip("*?")]
    return [p for p in matches if not (p == "*" and is_head(name))]


def plan_of(spec: Spec | Plan | Iterable[tuple[str, Spec | None]]) -> dict[str, str | None]:
    """The plan that a spec, or a list of (pattern, spec), stands for, in canonical spec strings.

    Raises:
        InvalidInput: It is none of these, or a format is unknown.
    """
    try:
        plan: dict[str, Spec | None] = {"*": spec} if isinstance(spec, Spec) else dict(spec)
    except (TypeError, ValueError):
        raise InvalidInput(
            f"{spec!r} is not a plan; write a format, or {{pattern: format or None}}"
        ) from None
    for pattern, value in plan.items():
        if not isinstance(pattern, str) or not isinstance(value, Spec | None):
            raise InvalidInput(
                f"{pattern!r}: {value!r} in a plan: a pattern is text, and what it stands for the "
                "name of a format, a Format or None"
            )
    return {p: None if value is None else canonical(value) for p, value in plan.items()}


def quantization_config(plan: Plan) -> dict[str, Any]:
    """What config.json says about a model that was quantized by this plan.

    `formats` maps patterns to formats, or is a list of such pairs when the patterns are in another
    order than the alphabet's: transformers sorts the keys of config.json, and the last match wins.
    """
    formats = dict(plan) if list(plan) == sorted(plan) else [list(pair) for pair in plan.items()]
    return {"quant_method": METHOD, "version": VERSION, "formats": formats}


def stored_plan(
    config: Mapping[str, Any], where: object = "quantization_config"
) -> dict[str, str | None]:
    """The plan that a checkpoint's `quantization_config` holds; the inverse of the above.

    Args:
        config: The `quantization_config`.
        where: What errors begin with: the checkpoint's directory, where it is known.

    Raises:
        InvalidInput: The layout is newer than this anybit reads, the keys are others than ours, or
            the formats are no plan.
    """
    version, formats = config.get("version", VERSION), config.get("formats")
    if type(version) is not int or version < 1:
        raise InvalidInput(
            f"{where}: the layout version is {version!r}, and must be an integer from 1 on; copy "
            "config.json again, or quantize the model anew"
        )
    if version > VERSION:
        raise InvalidInput(
            f"{where}: the checkpoint has layout version {version}, anybit {__version__} reads up "
            f"to {VERSION}; upgrade anybit"
        )
    strange = config.keys() - {"quant_method", "version", "formats"}
    if formats is None or config.get("quant_method") != METHOD or strange:
        given = {key: value for key, value in config.items() if key != "version"}
        raise InvalidInput(
            f"{where}: anybit's quantization_config has formats and version, not {given}"
        )
    try:
        return plan_of(formats)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: formats: {error}") from None


def canonical(spec: Spec) -> str:
    """The spec string of a format or scheme in its shortest form."""
    return spec.spec if isinstance(spec, Format) else scheme_name(*parse_scheme(spec))


def is_head(name: str) -> bool:
    """Whether a layer is the model's output head, which plans keep unless they name it."""
    return name.rpartition(".")[2] in HEADS


def plan_from(formats: list[str], option: str = "--format") -> dict[str, str | None]:
    """A plan from the options of a command.

    Args:
        formats: Like ["int3", "*.down_proj=int4:group=64", "*.q_proj=none"]. Options of a spec
            contain "=" as well, but only after a ":", which no module name has.
        option: Their name, for errors.

    Returns:
        {pattern: spec or None}.

    Raises:
        InvalidInput: A pattern is given twice, or a part is empty.
    """
    plan: dict[str, str | None] = {}
    for text in formats:
        pattern, equals, spec = text.partition("=")
        if not equals or ":" in pattern:
            pattern, spec = "*", text
        pattern, spec = pattern.strip(), spec.strip()
        if pattern in plan:
            raise InvalidInput(f"{option} is given twice for {pattern!r}; which one is meant?")
        if not pattern or not spec:
            raise InvalidInput(f"{option} {text!r}: write FORMAT or PATTERN=FORMAT")
        plan[pattern] = None if spec.lower() == "none" else spec
    return plan


def read_plan(path: Path) -> dict[str, str | None]:
    """A plan from a JSON file.

    Raises:
        InvalidInput: The file is not a JSON object of strings and nulls.
        FileNotFoundError: There is no such file.
    """
    text = read_text(path)
    try:
        plan = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not JSON: {error}") from None
    if not isinstance(plan, dict) or not all(
        v is None or isinstance(v, str) for v in plan.values()
    ):
        raise InvalidInput(f'{path} is not a plan; write {{"*": "int4", "*.down_proj": null}}')
    return plan
