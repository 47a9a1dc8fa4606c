"""The model card of a quantized checkpoint: what it was made of, and how to load it."""

import math
from collections.abc import Iterable
from pathlib import Path

from anybit.core.scheme import parse_scheme
from anybit.files.directory import read_json
from anybit.files.hub import repository_of
from anybit.nn.plan import stored_plan
from anybit.version import __version__

NAME = "README.md"
CARD = """---
library_name: transformers
{base}tags:
- anybit
---

# {title}, quantized

{title}, quantized with anybit {version}: {weights:.4g} million weights of {layers} linear layers in
{bits:.2f} bits each, scales and tables included. All other tensors are as they were.

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
"""


def write_card(directory: Path, source: str, layers: Iterable[tuple[str, tuple[int, int]]]) -> None:
    """Write a README.md into a finished checkpoint that has none.

    Args:
        directory: Of the checkpoint.
        source: The dense model: a name of the hub, or a directory, of which the name is told.
        layers: Scheme and shape (N, K) of each quantized layer.
    """
    if (directory / NAME).exists():
        return
    source = repository_of(source) or source
    hub = source.count("/") == 1 and not Path(source).exists()
    name = source if hub else Path(source).name
    layers = list(layers)
    weights = sum(math.prod(shape) for _, shape in layers)
    bits = sum(
        parse_scheme(scheme)[0].bits_per_weight(shape) * math.prod(shape)
        for scheme, shape in layers
    )
    plan = stored_plan(read_json(directory / "config.json")["quantization_config"])
    rows = (f"| `{pattern}` | {f'`{s}`' if s else 'dense'} |" for pattern, s in plan.items())
    card = CARD.format(
        base=f"base_model: {name}\n" if hub else "",
        title=name or "A model",
        version=__version__,
        weights=weights / 1e6,
        layers=len(layers),
        bits=bits / weights,
        formats="\n".join(rows),
    )
    (directory / NAME).write_text(card, "utf-8")
