"""The model card of a quantized checkpoint: what it was made of, and how to load it."""

import math
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput
from anybit.files.directory import read_json, write_whole
from anybit.files.hub import repository_of
from anybit.nn.plan import stored_plan
from anybit.version import __version__

NAME = "README.md"
BEGIN, END = "<!-- anybit -->", "<!-- /anybit -->"  # around what is written here
FIGURES = "<!-- anybit eval -->", "<!-- /anybit eval -->"  # around figures
FRONT = re.compile(r"\A---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
CARD = """{begin}
# {title}, quantized

{title}, quantized with anybit {version}{how}: {weights:.4g} million weights of {layers} linear
layers in {bits:.2f} bits each, scales and tables included. All other tensors are as they were.

| layers | format |
|---|---|
{formats}

The last pattern that matches a layer's name decides.

```python
import anybit

model = anybit.load(DIRECTORY)  # or AutoModelForCausalLM.from_pretrained, once anybit is imported
```
```
anybit serve DIRECTORY
```
{end}
"""


class Front(yaml.SafeLoader):  # type: ignore[misc]
    """YAML 1.2, as the hub reads it, where `no` is Norwegian."""


BOOL = "tag:yaml.org,2002:bool"
Front.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag != BOOL]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Front.add_implicit_resolver(BOOL, re.compile("^(true|True|TRUE|false|False|FALSE)$"), [*"tTfF"])


def write_card(
    directory: Path, source: str, layers: Iterable[tuple[str, tuple[int, int]]], how: str = ""
) -> None:
    """Say in a finished checkpoint's README.md what it is; what stands there already follows.

    Args:
        directory: Of the checkpoint, with the dense model's README.md if that has one.
        source: The dense model: a name of the hub, or a directory, of which the name is told.
        layers: Scheme and shape (N, K) of each quantized layer.
        how: The quantizer and its data, in words.
    """
    hub = repository_of(source)
    if not hub and source.count("/") == 1 and not Path(source).exists():
        hub = source
    layers = list(layers)
    weights = sum(math.prod(shape) for _, shape in layers)
    bits = sum(
        parse_scheme(scheme)[0].bits_per_weight(shape) * math.prod(shape)
        for scheme, shape in layers
    )
    plan = stored_plan(read_json(directory / "config.json")["quantization_config"])
    table = "\n".join(f"| `{p}` | {f'`{s}`' if s else 'dense'} |" for p, s in plan.items())
    data, text, said = old_card(directory / NAME)
    if f"{table}\n\n" in said:  # of the same model, with more of how it was made
        return
    card = CARD.format(
        begin=BEGIN,
        end=END,
        title=hub or Path(source).name or "A model",
        version=__version__,
        how=f", by {how}" if how else "",
        weights=weights / 1e6,
        layers=len(layers),
        bits=bits / weights,
        formats=table,
    )
    tags = data.get("tags")
    data = {"library_name": "transformers"} | data
    data |= {"base_model": hub, "base_model_relation": "quantized"} if hub else {}
    others = tags if isinstance(tags, list) else [tags] if isinstance(tags, str) else []
    data["tags"] = [*(tag for tag in others if tag != "anybit"), "anybit"]
    front = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    whole = f"---\n{front}---\n\n{card}" + (f"\n{text}" if text else "")
    (directory / NAME).write_text(whole, "utf-8")


def check_card(directory: Path) -> None:
    """InvalidInput for a model that is no directory, whose card is not the user's to write."""
    if not (directory / "config.json").is_file():
        raise InvalidInput(
            f"{directory} is no directory of a model, into whose {NAME} figures can be put; give "
            "one, or leave --card out"
        )


def write_figures(directory: Path, figures: str) -> None:
    """Put figures (Markdown) into a model's README.md, in the place of older ones."""
    path = directory / NAME
    text = path.read_text("utf-8-sig", errors="replace") if path.is_file() else ""
    begin, end = FIGURES
    before, found, rest = text.partition(begin)
    block = f"{begin}\n{figures}\n{end}"
    if found:
        block += rest.partition(end)[2]
    elif END in text:  # below what was written here
        before, found, rest = text.partition(END)
        block = f"{found}\n\n{block}{rest}"
    else:
        before = f"{text.rstrip()}\n\n" if text else ""
        block += "\n"
    write_whole(path, before + block)


def old_card(path: Path) -> tuple[dict[str, Any], str, str]:
    """The metadata of a README.md, its text, and what was written here before."""
    if not path.is_file():
        return {}, "", ""
    text = path.read_text("utf-8-sig", errors="replace")
    found = FRONT.match(text)
    data: Any = None
    if found:
        with suppress(yaml.YAMLError):
            data = yaml.load(found[1], Front)
    if found and isinstance(data, dict):
        text = text[found.end() :]
    before, _, rest = text.partition(BEGIN)
    said, end, after = rest.partition(END)
    if not end:  # somebody has edited it
        before, said = text, ""
    return data if isinstance(data, dict) else {}, (before + after).lstrip(), said
