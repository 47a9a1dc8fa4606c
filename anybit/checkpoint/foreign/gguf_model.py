"""Models in GGUF files, as llama.cpp stores them, seen as checkpoints of transformers.

Names are those of transformers, by the tables of the `gguf` package. Rows that ggml wants in pairs
are put back in order, whole, so that blocks stay what they are.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from anybit.checkpoint.architecture import bare_model
from anybit.checkpoint.foreign.base import Layer
from anybit.checkpoint.foreign.ggml import CHUNK, TYPES, unpack
from anybit.checkpoint.foreign.gguf_config import config_of, family_of
from anybit.checkpoint.foreign.gguf_families import Family
from anybit.checkpoint.foreign.gguf_file import DENSE, Block, Contents, read_model
from anybit.checkpoint.names import Names
from anybit.errors import InvalidInput, in_a_line
from anybit.files.directory import write_json
from anybit.files.safetensors import Stored
from anybit.nn.embedding import factor_of
from anybit.nn.experts import published, split

log = logging.getLogger(__name__)

HEAD = "lm_head.weight"
EXPERT = re.compile(r"\.experts\.(\d+)\.")
ENDS = ("eos", "eot", "eom")  # tokens that end a text
LEFT = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # in config


@dataclass(frozen=True)
class Made:
    """A dense tensor that a file does not store as the model has it.

    Attributes:
        stored: Where it lies.
        kind: ggml's type.
        shape: As the model has it.
        torch_dtype: What it becomes: fp32, or the model's dtype where it is decoded.
        rows: Rows of the file in the model's order; None where it is the same.
        minus: Subtracted from its numbers.
    """

    stored: Stored
    kind: str
    shape: tuple[int, ...]
    torch_dtype: torch.dtype
    rows: Tensor | None = None
    minus: float = 0

    @property
    def file(self) -> Path:
        return self.stored.file

    @property
    def dtype(self) -> str:
        return self.kind

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.stored.nbytes

    def meta(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.torch_dtype, device="meta")

    def read(self) -> Tensor:
        numbers = decoded(in_order(self.stored, self.rows), self.kind, self.torch_dtype, "tensor")
        return (numbers - self.minus if self.minus else numbers).reshape(self.shape)


def in_order(stored: Stored, rows: Tensor | None) -> Tensor:
    """A stored tensor with its rows in the model's order."""
    tensor = stored.read()
    return tensor if rows is None else tensor[rows]


def decoded(stored: Tensor, kind: str, dtype: torch.dtype, name: str) -> Tensor:
    """Numbers, or blocks (N, bytes) uint8 of a type, a few rows at a time, in a dtype."""
    if kind in DENSE:
        return stored.to(dtype)
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    number = GGMLQuantizationType[kind]
    columns, nbytes = GGML_QUANT_SIZES[number]
    k = stored.shape[1] // nbytes * columns
    out = torch.empty(len(stored), k, dtype=dtype)
    for at in range(0, len(stored), max(1, CHUNK // k)):
        rows = stored[at : at + max(1, CHUNK // k)]
        if kind in TYPES:
            some = unpack(TYPES[kind], rows, name).dequantize()
        else:
            some = torch.from_numpy(quants.dequantize(rows.numpy(), number))
        out[at : at + len(rows)] = some
    return out


@cache
def decodable(kind: str) -> bool:
    """Whether tensors of a type can be read."""
    if kind in DENSE or kind in TYPES:
        return True
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    number = GGMLQuantizationType[kind]
    try:
        quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[number][1]), np.uint8), number)
    except NotImplementedError:
        return False
    return True


def open_model(
    path: Path, directory: Path
) -> tuple[dict[str, Any], dict[str, "Stored | Made"], dict[str, Layer], Names, nn.Module]:
    """Read the headers of a model, and write what is no tensor into a directory.

    Args:
        path: The file, or one of its parts.
        directory: Gets config.json, generation_config.json and the tokenizer.

    Returns:
        Of config.json; the tensors by transformers' names; those of them that are quantized linear
        layers and embeddings; transformers' tables of names; and its model, without memory.

    Raises:
        FileNotFoundError: A part is missing.
        InvalidInput: A file is damaged, or the model or a type cannot be read.
        Unsupported: The `gguf` package is missing.
    """
    contents = read_model(path)
    family, config = family_of(contents), config_of(contents)
    write_json(directory / "config.json", config)
    ends = [contents.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ENDS]
    known = sorted({token for token in ends if isinstance(token, int)})
    if known:
        write_json(directory / "generation_config.json", {"eos_token_id": known})
    bare = bare_model(directory, {n: block.stored for n, block in contents.tensors.items()})
    names, model = Names(bare), split(bare)
    write_tokenizer(contents, directory)
    return config, *placed(contents, family, config, model), names, model


def write_tokenizer(contents: Contents, directory: Path) -> None:
    """The tokenizer and the chat template, as transformers reads them from such a file."""
    if "tokenizer.ggml.model" not in contents.metadata:
        return
    from transformers import AutoTokenizer

    first = contents.files[0]
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            first.parent, gguf_file=first.name, local_files_only=True
        )
        tokenizer.save_pretrained(directory)
    except Exception as error:  # whatever transformers trips over; weights do not depend on it
        log.warning(
            "%s: transformers cannot read its tokenizer (%s); copy that of the original model "
            "into the directory", first, in_a_line(error),
        )  # fmt: skip


class Named(NamedTuple):
    """A tensor of a model, by several names.

    Attributes:
        own: In transformers' model.
        name: In its checkpoints.
        theirs: In GGUF files.
        expert: Which part of the tensor there it is; None: all of it.
    """

    own: str
    name: str
    theirs: str
    expert: int | None


def named(path: Path, family: Family, layers: int, tied: bool, model: nn.Module) -> list[Named]:
    """All tensors of a model, but a head that is tied.

    Raises:
        InvalidInput: The `gguf` package has no name for one.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == family.arch)
    table, out = get_tensor_name_map(arch, layers), []
    for own in model.state_dict():
        name = published(own, family.model_type)
        if name == HEAD and tied:
            continue
        expert = EXPERT.search(name)
        general = EXPERT.sub(".experts.", name).replace("correction_bias", "correction.bias")
        theirs = table.get_name(general, try_suffixes=(".weight", ".bias"))
        theirs = "output.weight" if name == HEAD else theirs
        if theirs is None:
            raise InvalidInput(f"{path}: ggml's {family.arch} has no tensor for {name}")
        out.append(Named(own, name, theirs, int(expert[1]) if expert else None))
    return out


def placed(
    contents: Contents, family: Family, config: Mapping[str, Any], model: nn.Module
) -> tuple[dict[str, "Stored | Made"], dict[str, Layer]]:
    """Every tensor of the model, found in the file."""
    path = contents.files[0]
    stored: dict[str, Stored | Made] = {}
    layers: dict[str, Layer] = {}
    used, experts, tensors = {*LEFT}, dict[str, list[Stored]](), model.state_dict()
    tied = config["tie_word_embeddings"]
    for own, name, theirs, expert in named(path, family, config["num_hidden_layers"], tied, model):
        shape = tuple(tensors[own].shape)
        block = contents.tensors.get(theirs)
        if block is None and theirs.endswith("attn_kv_b.weight"):
            halves = [theirs.replace("kv_b", f"{which}_b") for which in "kv"]
            k, v = (contents.tensors.get(half) for half in halves)
            if k is not None and v is not None:
                used.update(halves)
                layer = name.rpartition(".")[0]
                stored[name], layers[layer] = k.stored, latent(layer, k, v, shape)
                continue
        if block is None:
            raise InvalidInput(f"{path}: has no tensor {theirs} for {name}")
        used.add(theirs)
        if not decodable(block.kind):
            raise InvalidInput(f"{path}: {theirs} is {block.kind}, which cannot be read")
        if expert is not None:
            if theirs not in experts:
                experts[theirs] = list(block.stored.each()) if len(block.shape) == 3 else []
            if expert >= len(experts[theirs]):
                raise InvalidInput(f"{path}: {theirs} of {block.shape} holds too few experts")
            block = Block(block.kind, block.shape[1:], experts[theirs][expert])
        if [n for n in block.shape if n > 1] != [n for n in shape if n > 1]:
            raise InvalidInput(f"{path}: {theirs} has shape {block.shape}, and {name} {shape}")
        rows = unpaired(name, family, config, block.shape[0])
        module = model.get_submodule(own.rpartition(".")[0])
        kept = isinstance(module, nn.Linear)
        if isinstance(module, nn.Embedding) and block.kind in TYPES:
            kept = factor_of(module) is not None
        if kept and block.kind not in DENSE and len(block.shape) == 2:
            layer = name.rpartition(".")[0]
            stored[name] = block.stored
            layers[layer] = linear(layer, block, rows)
        else:
            stored[name] = dense(block, shape, rows, config, family, name)
    drafts = range(config["num_hidden_layers"], contents.metadata[f"{family.arch}.block_count"])
    ignored = tuple(f"blk.{number}." for number in drafts)
    unknown = [name for name in contents.tensors if not (name in used or name.startswith(ignored))]
    if unknown:
        raise InvalidInput(
            f"{path}: {len(unknown)} tensors are not in transformers' {family.kind}, such as "
            f"{unknown[0]}"
        )
    return stored, layers


def linear(name: str, block: Block, rows: Tensor | None) -> Layer:
    """A quantized layer; dense where its type has no format of ours."""
    shape = (block.shape[0], block.shape[1])
    kind = TYPES.get(block.kind)
    if kind is None:
        reason = f"{block.kind} has no format in anybit"
        return Layer(
            shape, (f"{name}.weight",), None,
            lambda: decoded(in_order(block.stored, rows), block.kind, torch.float32, name), reason,
        )  # fmt: skip
    return Layer(
        shape,
        (f"{name}.weight",),
        kind.format,
        lambda: unpack(kind, in_order(block.stored, rows), name),
    )


def latent(name: str, k: Block, v: Block, shape: tuple[int, ...]) -> Layer:
    """What makes keys and values of a latent, from parts of each head: K (heads, latent, channels),
    and V (heads, channels, latent).
    """

    def read() -> Tensor:
        parts = [
            decoded(block.stored.read().flatten(0, 1), block.kind, torch.float32, name).view(
                block.shape
            )
            for block in (k, v)
        ]
        return torch.cat((parts[0].transpose(1, 2), parts[1]), 1).reshape(shape)

    both = (*k.shape, *v.shape)
    if (
        len(k.shape) != 3
        or len(v.shape) != 3
        or k.shape[:2] != v.shape[::2]
        or shape != (both[0] * (both[2] + both[4]), both[1])
    ):
        raise InvalidInput(f"{name}: parts of shapes {k.shape} and {v.shape} are none of {shape}")
    reason = "its file has it in two parts, one of them transposed"
    return Layer((shape[0], shape[1]), (f"{name}.weight",), None, read, reason)


def dense(
    block: Block,
    shape: tuple[int, ...],
    rows: Tensor | None,
    config: Mapping[str, Any],
    family: Family,
    name: str,
) -> "Stored | Made":
    """A tensor that stays dense, or becomes so: an embedding of a type without a format of ours."""
    minus = 1.0 if family.plus_one and name.endswith("norm.weight") else 0.0
    if block.kind in DENSE and rows is None and not minus:
        return block.stored._replace(shape=shape)
    dtype = block.stored.torch_dtype if block.kind in DENSE else getattr(torch, config["dtype"])
    return Made(block.stored, block.kind, shape, dtype, rows, minus)


def unpaired(name: str, family: Family, config: Mapping[str, Any], n: int) -> Tensor | None:
    """Rows of q and k in the model's order, as the file has them; None where they are the same.

    ggml rotates neighbours, transformers the two halves of a head.
    """
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }.get(name.split(".")[-2] if "." in name else "")
    if not family.paired or heads is None:
        return None
    return torch.arange(n).view(heads, -1, 2).transpose(1, 2).flatten()
