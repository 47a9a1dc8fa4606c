"""Between the names of a checkpoint's tensors and those of a model, by transformers' own tables.

transformers renames tensors while it loads (`language_model.model.*` to `model.language_model.*`),
merges some (experts) and cuts others (fused q, k and v). `Names` applies its tables to names alone;
`layout.py` says what each tensor of a checkpoint is.
"""

import copy
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from anybit.core.packed import is_codes
from anybit.nn.experts import Layout as ExpertLayout
from anybit.nn.experts import fused_experts, layout_of


class Names:
    """transformers' tables for one model.

    Args:
        model: A model of transformers, on any device, its experts not taken apart.
    """

    def __init__(self, model: Any):
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming

        self.model = model
        self.state: dict[str, Tensor] = model.state_dict()
        self.base: str = getattr(model, "base_model_prefix", "")
        self.fused: dict[str, Any] = dict(fused_experts(model))
        table = get_model_conversion_mapping(model)
        self.renamings: list[Any] = [c for c in table if isinstance(c, WeightRenaming)]
        self.converters: list[Any] = [c for c in table if isinstance(c, WeightConverter)]
        # As transformers saves a model that it did not load.
        own = get_model_conversion_mapping(model, add_legacy=False)
        self.back: list[Any] = [
            c.reverse_transform()
            for c in own[::-1]
            if isinstance(c, WeightRenaming) and not isinstance(c, PrefixChange)
        ]

    def in_model(self, name: str) -> tuple[str, Any, str]:
        """The model's name for a stored tensor, as transformers loads it.

        Some tables depend on which names came before: ask in the order of `natural`.

        Returns:
            The name, which the model may lack; the converter that makes the tensor, or None; and
            the converter's pattern that the stored name matched.
        """
        from transformers.core_model_loading import rename_source_key

        known: dict[str, Any] = self.state
        found, pattern = rename_source_key(name, self.renamings, self.converters, self.base, known)
        if found not in known and name in known:
            found, pattern = rename_source_key(name, [], [], self.base, known)
        if pattern is None:
            return found, None, ""
        converter = next(c for c in self.converters if pattern in c.source_patterns)
        return found, converter, pattern

    def renamed(self, name: str) -> str:
        """The model's name by the renamings alone."""
        from transformers.core_model_loading import rename_source_key

        return str(rename_source_key(name, self.renamings, [])[0])

    def stored(self, name: str) -> str:
        """The name in checkpoints of a tensor or layer of the model."""
        from transformers.core_model_loading import rename_source_key

        return str(rename_source_key(name, self.back, [], reverse=True)[0])

    def before(self, name: str) -> str:
        """The name in checkpoints that transformers' renamings make this one of."""
        for renaming in self.back:
            name, _ = renaming.rename_source_key(name)
        return name


def natural(name: str) -> list[tuple[int, int | str]]:
    """A key that sorts names as transformers does: numbers by value."""
    return [(0, int(p)) if p.isdigit() else (1, p) for p in re.split(r"(\d+)", name) if p]


def as_they_are(table: Names, names: Iterable[str]) -> dict[str, str]:
    """The model's names for stored tensors that it has as they are."""
    out = {}
    for name in sorted(names, key=natural):
        found, converter, _ = table.in_model(name)
        if converter is None and found in table.state:
            out[name] = found
    return out


def known_layout(module: Any) -> ExpertLayout:
    """The layout of one of `fused_experts`."""
    found = layout_of(module)
    assert found is not None
    return found


def is_merge(converter: Any) -> bool:
    """Whether a converter stacks weights of experts, and no more."""
    kinds = [type(operation).__name__ for operation in converter.operations]
    return kinds in (["MergeModulelist"], ["MergeModulelist", "Concatenate"])


def targets_of(first: str, converter: Any, state: Container[str]) -> list[str]:
    """The model's names of all tensors that a converter makes together with `first`."""
    start, *rest = converter.target_patterns
    others = [first.replace(start, pattern) for pattern in rest]
    return [first, *(name for name in others if name in state)]


def missing_in(model: Any, covered: Container[str]) -> list[str]:
    """Tensors of a model that are not covered, nor tied to one that is, nor made by its class."""
    tensors = model.state_dict(keep_vars=True)
    alike: dict[int, set[str]] = {}
    for name, tensor in tensors.items():
        alike.setdefault(id(tensor), set()).add(name)
    for name, other in getattr(model, "all_tied_weights_keys", {}).items():
        if name in tensors and other in tensors:
            both = alike[id(tensors[name])] | alike[id(tensors[other])]
            alike |= dict.fromkeys((id(tensors[n]) for n in both), both)
    ignored = any_of(model._keys_to_ignore_on_load_missing)
    return [
        name
        for name, tensor in tensors.items()
        if not any(n in covered for n in alike[id(tensor)]) and not ignored(name)
    ]


def ignored_unexpected(model: Any) -> Callable[[str], bool]:
    """Whether transformers leaves a stored tensor out without a word."""
    buffers = [name for name, _ in model.named_buffers()]
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return any_of(patterns)


def any_of(patterns: Iterable[str] | None) -> Callable[[str], bool]:
    """Whether one of some regular expressions is found in a name."""
    compiled = [re.compile(pattern) for pattern in patterns or ()]
    return lambda name: any(pattern.search(name) for pattern in compiled)


def conversions(names: Mapping[str, str], table: Iterable[Any]) -> list[Any]:
    """A table for transformers' loader: the given names, and its own for all others.

    Args:
        names: Names in the model by names in the checkpoint.
        table: transformers' own.
    """
    from transformers.core_model_loading import WeightRenaming

    own = frozenset(names.values())
    renamings = [c for c in table if isinstance(c, WeightRenaming)]

    class Renaming(WeightRenaming):
        def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
            if source_key in names:
                return names[source_key], None
            for other in renamings:
                source_key, _ = other.rename_source_key(source_key)
            return source_key, None

    def sparing(converter: Any) -> Any:
        """The converter for all tensors but those that have their names."""
        kind: Any = type(converter)

        class Sparing(kind):  # type: ignore[misc]
            __slots__ = ()

            def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
                if source_key in own:
                    return source_key, None
                renamed: tuple[str, str | None] = converter.rename_source_key(source_key)
                return renamed

        own_copy = copy.copy(converter)
        own_copy.__class__ = Sparing
        return own_copy

    others = [c for c in table if not isinstance(c, WeightRenaming)]
    return [Renaming("", ""), *map(sparing, others)]


@contextmanager
def codes_as_they_are(model: Any) -> Iterator[None]:
    """Inside, transformers saves codes without the conversions that it has for dense weights.

    Some of its tables would merge the codes of q, k and v as if they were weights.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightRenaming

    before = getattr(model, "_weight_conversions", None)
    table = before
    if table is None:
        table = get_model_conversion_mapping(model, add_legacy=False)
        table = [c for c in table if not isinstance(c, PrefixChange)]
    codes = [name for name in model.state_dict() if is_codes(name)]

    def harmless(conversion: Any) -> bool:
        back = conversion.reverse_transform()
        return isinstance(conversion, WeightRenaming) or not any(
            back.rename_source_key(name)[1] for name in codes
        )

    model._weight_conversions = [c for c in table if harmless(c)]
    try:
        yield
    finally:
        if before is None:
            del model._weight_conversions
        else:
            model._weight_conversions = before
