"""What every tensor of a checkpoint is in a model, without reading one.

`layout` follows transformers' tables (`names.py`): a tensor may be one of the model's, one of those
that transformers makes it of (`Made`), or hold the experts of a block, which it cuts.
"""

import copy
import logging
import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybit.checkpoint.names import (
    Names,
    ignored_unexpected,
    is_merge,
    known_layout,
    missing_in,
    natural,
    targets_of,
)
from anybit.errors import InvalidInput, in_a_line, probing
from anybit.files.safetensors import DTYPES, NAMES, Stored
from anybit.nn.experts import Layout as ExpertLayout
from anybit.nn.experts import layers_of

log = logging.getLogger(__name__)
LISTED = 3  # names in a message


@dataclass(frozen=True, eq=False)
class Conversion:
    """Stored tensors of which transformers makes one or several of a model's.

    Attributes:
        converter: transformers' WeightConverter.
        first: The model's name for the first of the tensors that it makes.
        sources: The stored tensors by name, by each of the converter's patterns.
        names: Of the model.
    """

    converter: Any
    first: str
    sources: Mapping[str, dict[str, Stored]]
    names: Names

    @classmethod
    def begun(cls, converter: Any, first: str, names: Names) -> "Conversion":
        """One whose sources are to be added."""
        return cls(converter, first, {known: {} for known in converter.source_patterns}, names)

    @property
    def stored(self) -> dict[str, Stored]:
        """The stored tensors by name."""
        return {name: t for tensors in self.sources.values() for name, t in tensors.items()}

    @property
    def one(self) -> Stored:
        """The first of the stored tensors."""
        return next(iter(self.stored.values()))

    @property
    def patterns(self) -> str:
        """What the stored tensors are named like."""
        return ", ".join(pattern for pattern, tensors in self.sources.items() if tensors)

    @property
    def targets(self) -> list[str]:
        """The model's names for all tensors that it makes."""
        return targets_of(self.first, self.converter, self.names.state)

    @property
    def whole(self) -> bool:
        """Whether all that it needs is stored; of a merge, every expert."""
        counts = {len(tensors) for tensors in self.sources.values()}
        if is_merge(self.converter):
            return counts == {len(self.names.state[self.first])}
        return (all(counts) and len(counts) == 1) or self.spares

    @property
    def spares(self) -> bool:
        """Whether it makes tensors of the model's shapes without those that are not stored.

        Scales are not stored beside dense weights, say.
        """
        state, found = self.names.state, self.tried
        return all(n in found and found[n].shape == state[n].shape for n in self.targets)

    @cached_property
    def tried(self) -> dict[str, Tensor]:
        """What it makes, without contents; nothing where transformers can make nothing of it."""
        try:
            return run(self, Stored.meta)
        except InvalidInput:
            return {}

    def experts(self, layout: ExpertLayout) -> dict[str, Stored]:
        """Of a merge: the tensors of single experts, by their names in the model."""
        of, _, tensor = self.first.rpartition(".")
        return {
            f"{of}.{e}.{key}.weight": one
            for key, tensors in zip(layout.layers[tensor], self.sources.values(), strict=True)
            for e, one in enumerate(tensors.values())
        }


@lru_cache(maxsize=1)  # q, k and v are made of one tensor, and asked for one after the other
def convert(conversion: Conversion) -> dict[str, Tensor]:
    """Read, and make the model's tensors."""
    return run(conversion, Stored.read)


def run(conversion: Conversion, read: Callable[[Stored], Tensor]) -> dict[str, Tensor]:
    """Make the model's tensors of those that `read` returns."""
    converter, model = copy.deepcopy(conversion.converter), conversion.names.model
    for pattern, tensors in conversion.sources.items():
        for tensor in tensors.values():
            converter.add_tensor(conversion.first, pattern, pattern, read(tensor))
    try:
        with probing():
            made = converter.convert(conversion.first, model=model, config=model.config)
    except Exception as error:  # transformers skips what it cannot make
        raise InvalidInput(
            f"{conversion.one.file}: transformers cannot make {conversion.first} of "
            f"{conversion.patterns}: {in_a_line(error)}"
        ) from error
    return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}


@dataclass(frozen=True)
class Made:
    """A tensor that is made of stored ones: like a `Stored`, made when it is read.

    Attributes:
        of: The first of those.
        shape: Of what is made.
        make: Reads and makes it.
        dtype: Of what is made, as in headers of safetensors.
    """

    of: Stored
    shape: tuple[int, ...]
    make: Callable[[], Tensor]
    dtype: str

    @property
    def file(self) -> Path:
        return self.of.file

    @property
    def start(self) -> int:
        return self.of.start

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    def read(self) -> Tensor:
        return self.make().contiguous()


Tensors = Stored | Made


def made(conversion: Conversion, name: str, shape: tuple[int, ...]) -> Made:
    """A weight of the model that transformers makes of stored tensors."""
    one = conversion.one
    made_of_codes = one.nbytes == math.prod(one.shape) and name in conversion.tried
    dtype = NAMES[conversion.tried[name].dtype] if made_of_codes else one.dtype

    def make() -> Tensor:
        found = convert(conversion).get(name)
        if found is None or tuple(found.shape) != shape:
            other = "nothing" if found is None else tuple(found.shape)
            raise InvalidInput(
                f"{one.file}: transformers makes {other} of {conversion.patterns}, "
                f"where {name} has shape {shape}"
            )
        return found

    return Made(one, shape, make, dtype)


def transposed(stored: Tensors) -> Made:
    """A matrix, transposed when it is read."""
    of = stored if isinstance(stored, Stored) else stored.of
    return Made(of, stored.shape[::-1], lambda: stored.read().T, stored.dtype)


@dataclass(frozen=True)
class Layout:
    """A checkpoint's tensors, experts one by one, and what they are in the model.

    Attributes:
        stored: By the names that the tensors have in a checkpoint of ours, in the order of files.
        names: The model's names for those that are one of its tensors as they are.
        missing: Tensors of the model that no file holds, and that transformers would make up.
        unexpected: Stored tensors that fit none of the model.
    """

    stored: Mapping[str, Tensors]
    names: Mapping[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def without(self, names: Iterable[str]) -> "Layout":
        """The same but for some tensors, by the model's names."""
        dropped = set(names)
        stored = {n: t for n, t in self.stored.items() if self.names.get(n) not in dropped}
        own = {name: there for name, there in self.names.items() if there not in dropped}
        return replace(self, stored=stored, names=own)

    def named_for_codes(self, model: Any, layers: Container[str]) -> "Layout":
        """The same with names that end in ".weight" for layers to quantize, as their codes' do."""
        layer_of = {n: own.removesuffix(".weight") for n, own in self.names.items()}
        other = [n for n, own in layer_of.items() if own in layers and not n.endswith(".weight")]
        if not other:
            return self
        table = Names(model)
        new = {name: f"{table.stored(layer_of[name])}.weight" for name in other}
        stored = {new.get(name, name): tensor for name, tensor in self.stored.items()}
        names = {new.get(name, name): own for name, own in self.names.items()}
        return replace(self, stored=stored, names=names)


def check_missing(source: object, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Raise InvalidInput when parameters of a model are not stored.

    Args:
        source: Directory of the model.
        missing: Parameters that no file holds.
        unexpected: Stored tensors that fit no parameter.
    """
    lost, strange = sorted(missing), sorted(unexpected)
    if lost:
        other = f", and {len(strange)} tensors fit none ({some(strange)})" if strange else ""
        raise InvalidInput(
            f"{source}: no file holds {len(lost)} tensors of the model ({some(lost)}){other}; "
            + reason(lost[0], strange)
        )


def reason(lost: str, strange: Iterable[str]) -> str:
    """Why a tensor of a model may be missing, and what to do. strange: those that fit none."""
    for name in strange:
        if name.endswith(f".{lost}"):
            prefix = name.removesuffix(lost)
            return f"names begin with {prefix!r}: save the model itself, not what wraps it"
        if name.replace(".base_layer.", ".") == lost:
            return "an adapter lies in it: merge it with peft's merge_and_unload(), and save that"
    return "a file is missing, or config.json is another model's"


def check_fit(
    source: object,
    names: Mapping[str, str],
    stored: Mapping[str, Any],
    state: Mapping[str, Tensor],
) -> None:
    """Raise InvalidInput when dense tensors are not those of a model.

    transformers would print a table of shapes, and take whole numbers for weights: they are what is
    left of another tool's codes when config.json no longer tells of them.

    Args:
        source: Directory of the model.
        names: The model's names for those that are one of its tensors as they are.
        stored: The tensors.
        state: The model's, on the meta device.
    """
    for name, own in names.items():
        if own not in state:  # one of several experts
            continue
        want, tensor = state[own], stored[name]
        whole = want.is_floating_point() and not tensor.torch_dtype.is_floating_point
        if whole or tensor.shape != want.shape:
            kind = "floats" if want.is_floating_point() else "numbers"
            raise InvalidInput(
                f"{source}: {name}: config.json asks for {kind} of shape {tuple(want.shape)}, "
                f"{tensor.file.name} holds {tensor.dtype} of {tensor.shape}"
            )


def some(names: list[str]) -> str:
    return ", ".join(names[:LISTED]) + (", ..." if len(names) > LISTED else "")


def tell_strange(source: Path, names: list[str]) -> None:
    """Warn of tensors that stay as they are."""
    if names:
        log.warning(
            "%s: %d tensors fit no parameter of the model, and stay as they are: %s",
            source,
            len(names),
            some(names),
        )


def left_out(dropped: Mapping[str, str]) -> str:
    """How many tensors are left out, and why, for a summary. dropped: reasons by name."""
    first = next(iter(dropped), None)
    why = f", such as {first}: {dropped[first]}" if first is not None else ""
    return f"{len(dropped)} tensors dropped{why}"


def layout(stored: Mapping[str, Stored], model: Any, wanted: Callable[[str], bool]) -> Layout:
    """What every tensor of a checkpoint is in a model.

    Args:
        stored: The checkpoint's tensors.
        model: On the meta device, its experts not taken apart.
        wanted: Whether a weight of the model must be there by itself, also when transformers makes
            it of others. Those that are not wanted are left as they are stored.
    """
    names = Names(model)
    fused = names.fused
    experts = {f"{n}.{key}": m for n, m in fused.items() for key in known_layout(m).tensors}
    split = {n for n, m in fused.items() if any(wanted(f"{n}.{x}.weight") for x in layers_of(m))}
    apart = {tensor for tensor in experts if tensor.rpartition(".")[0] in split}
    out, in_model, joint = dict[str, Tensors](), dict[str, str](), dict[str, Conversion]()
    covered, unexpected, cuts = set[str](), list[str](), dict[str, Tensors]()
    for name in sorted(stored, key=natural):
        found, converter, pattern = names.in_model(name)
        covered |= {found} if converter is None else set()
        if found not in names.state:
            unexpected.append(name)
            out[name] = stored[name]
        elif converter is not None:
            conversion = joint.setdefault(found, Conversion.begun(converter, found, names))
            conversion.sources[pattern][name] = stored[name]
        elif found in apart:
            cuts |= cut(found, stored[name], experts[found])
        else:
            out[name], in_model[name] = stored[name], found
    for first, conversion in joint.items():
        own, targets = conversion.stored, conversion.targets
        covered |= {*targets} if conversion.whole else set()
        each = {t: made(conversion, t, tuple(names.state[t].shape)) for t in targets}
        merged = first in experts and is_merge(conversion.converter)
        if merged and conversion.whole:
            cuts |= conversion.experts(known_layout(experts[first]))
        elif merged:  # of a quantized model: some experts are codes
            out |= own
            in_model |= {name: names.renamed(name) for name in own}
        elif apart.intersection(targets):
            for target, one in each.items():  # of text and of images, say
                cuts |= cut(target, one, experts[target]) if target in apart else {target: one}
        elif any(wanted(target) for target in targets):
            out |= each
            in_model |= {target: target for target in targets}
        else:
            out |= own
    for own_name, tensor in cuts.items():
        name = names.stored(own_name)
        out[name], in_model[name] = tensor, own_name
    ignored = ignored_unexpected(model)
    return Layout(
        stored=dict(sorted(out.items(), key=lambda item: (item[1].file, item[1].start))),
        names=in_model,
        missing=tuple(missing_in(model, covered)),
        unexpected=tuple(n for n in unexpected if not ignored(n) and not ignored(names.renamed(n))),
    )


def cut(name: str, tensor: Tensors, module: Any) -> dict[str, Tensors]:
    """A fused tensor of experts as tensors of layers, by their names in the model."""
    wanted = tuple(module._parameters[name.rpartition(".")[2]].shape)
    if tensor.shape != wanted:
        raise InvalidInput(
            f"{name}: config.json asks for shape {wanted}, {tensor.file.name} holds {tensor.shape}"
        )
    return cut_as(name, tensor, known_layout(module))


def cut_as(name: str, tensor: Tensors, how: ExpertLayout) -> dict[str, Tensors]:
    """As `cut`, by how a module holds its experts."""
    experts, _, key = name.rpartition(".")
    count, *shape = tensor.shape
    layers, end = how.layers[key.removesuffix("_bias")], "bias" if len(shape) == 1 else "weight"
    own = shape[0] // len(layers)
    out: dict[str, Tensors] = {}
    for e in range(count):
        for i, layer in enumerate(layers):
            part: Tensors
            if isinstance(tensor, Made):
                index = (e, slice(i * own, (i + 1) * own))
                make = partial(piece, tensor, index)
                part = replace(tensor, shape=(own, *shape[1:]), make=make)
            else:
                size = tensor.nbytes // (count * len(layers))
                start = tensor.start + (e * len(layers) + i) * size
                part = tensor._replace(shape=(own, *shape[1:]), start=start, nbytes=size)
            turned = how.transposed and end == "weight"
            out[f"{experts}.{e}.{layer}.{end}"] = transposed(part) if turned else part
    return out


def piece(tensor: Made, index: tuple[int | slice, ...]) -> Tensor:
    return tensor.make()[index]
