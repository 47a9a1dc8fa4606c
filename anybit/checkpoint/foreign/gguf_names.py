"""Names of a model's tensors, and of heads for further tokens behind it, in a GGUF file."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from anybit.checkpoint.foreign.gguf_families import GATED, HEADED, Family
from anybit.checkpoint.foreign.gguf_file import Contents
from anybit.checkpoint.foreign.gguf_hybrids import general, parts_of
from anybit.errors import InvalidInput
from anybit.nn.experts import published

HEAD = "lm_head.weight"
EXPERT = re.compile(r"\.experts\.(\d+)\.")
PROJECT = "eh_proj"  # of a head for further tokens: no layer of the model is like it
# Of such heads, ggml's names, transformers' where each is a layer, those of Qwen's, and what is
# like it in the model. The first four are in all heads.
BESIDE = (
    ("eh_proj", "eh_proj", "fc", PROJECT),
    ("enorm", "enorm", "pre_fc_norm_embedding", "model.norm"),
    ("hnorm", "hnorm", "pre_fc_norm_hidden", "model.norm"),
    ("shared_head_norm", "shared_head.norm", "norm", "model.norm"),
    ("embed_tokens", "embed_tokens", "", "model.embed_tokens"),
    ("shared_head_head", "shared_head.head", "", "lm_head"),
)


class Named(NamedTuple):
    """A tensor of a model, by several names.

    Attributes:
        own: In transformers' model; of a head for further tokens, what it is like there.
        name: In its checkpoints.
        theirs: In GGUF files, where several hold its rows one after another.
        expert: Which part of the tensor there it is; None: all of it.
    """

    own: str
    name: str
    theirs: tuple[str, ...]
    expert: int | None


def named(
    path: Path,
    family: Family,
    config: Mapping[str, Any],
    model: nn.Module,
    stored: Callable[[str], str] = str,
) -> list[Named]:
    """All tensors of a model, but a head that is tied.

    Args:
        path: For errors.
        family: Of the model.
        config: Its config.json.
        model: Without memory, experts apart.
        stored: transformers' names in checkpoints for those in its model.

    Raises:
        InvalidInput: The `gguf` package has no name for one.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == family.arch)
    table, out = get_tensor_name_map(arch, config["num_hidden_layers"]), []
    for own in model.state_dict():
        name = published(own, family.model_type)
        if name == HEAD and config["tie_word_embeddings"]:
            continue
        expert, theirs = EXPERT.search(name), parts_of(name, family, config)
        if not theirs:
            known = general(EXPERT.sub(".experts.", name))
            one = table.get_name(known, try_suffixes=(".weight", ".bias"))
            one = "output.weight" if name == HEAD else one
            if one is None:
                raise InvalidInput(f"{path}: ggml's {family.arch} has no tensor for {name}")
            theirs = (one,)
        out.append(Named(own, stored(name), theirs, int(expert[1]) if expert else None))
    return out


def drafts(family: Family, config: Mapping[str, Any], metadata: Mapping[str, Any]) -> list[str]:
    """Blocks of a file behind those of its model."""
    count = metadata[f"{family.arch}.block_count"]
    return [f"blk.{i}" for i in range(config["num_hidden_layers"], count)]


def further(
    contents: Contents, family: Family, config: Mapping[str, Any], model: list[Named]
) -> Iterator[Named]:
    """The tensors of heads for further tokens, which are like a layer of the model, and more.

    Args:
        contents: Of the file; of a head that lacks one of the four, nothing is named.
        family: Of the model.
        config: Its config.json.
        model: Its tensors.
    """
    if family.arch not in HEADED:
        return
    qwen, count = family.arch in GATED, config["num_hidden_layers"]
    kinds = config.get("layer_types", ["full_attention"] * count)
    like = max((i for i, kind in enumerate(kinds) if kind == "full_attention"), default=-1)
    blocks = drafts(family, config, contents.metadata)
    for i, there in enumerate(blocks[:1] if qwen else blocks):
        at = "mtp" if qwen else f"model.layers.{count + i}"
        layer = "mtp.layers.0" if qwen else at
        beside = [
            Named(f"{own}.weight", f"{at}.{name}.weight", (f"{there}.nextn.{theirs}.weight",), None)
            for theirs, full, short, own in BESIDE
            if (name := short if qwen else full)
        ]
        if any(part.theirs[0] not in contents.tensors for part in beside[:4]):
            continue
        yield from (part for part in beside if part.theirs[0] in contents.tensors)
        old = f"model.layers.{like}."
        for part in model:
            if part.name.startswith(old):
                theirs = tuple(one.replace(f"blk.{like}", there, 1) for one in part.theirs)
                name = part.name.replace(old, f"{layer}.", 1)
                yield part._replace(name=name, theirs=theirs)
