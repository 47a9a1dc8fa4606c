"""Models in GGUF files, as llama.cpp stores them, seen as checkpoints of transformers.

Names are those of transformers, by the tables of the `gguf` package. Rows that ggml wants in pairs
are put back in order, whole, so that blocks stay what they are.
"""

import logging
import math
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anybit.checkpoint.architecture import bare_model
from anybit.checkpoint.foreign.base import Layer
from anybit.checkpoint.foreign.ggml import CHUNK, TYPES, unpack
from anybit.checkpoint.foreign.gguf_config import config_of, family_of
from anybit.checkpoint.foreign.gguf_families import Family
from anybit.checkpoint.foreign.gguf_file import DENSE, Block, Contents
from anybit.checkpoint.foreign.gguf_hybrids import (
    Order,
    change_of,
    order_of,
)
from anybit.checkpoint.foreign.gguf_names import PROJECT, drafts, further, named
from anybit.checkpoint.names import Names
from anybit.errors import InvalidInput, in_a_line
from anybit.files.directory import write_json
from anybit.files.safetensors import Stored
from anybit.nn.embedding import factor_of
from anybit.nn.experts import split

log = logging.getLogger(__name__)

GATE_OR_UP = re.compile(r"\.ffn_(gate|up)_exps\.weight$")  # which one tensor may hold both
ENDS = ("eos", "eot", "eom")  # tokens that end a text
FURTHER = "of a head for further tokens, of which the file lacks a part or anybit knows no names"
LEFT = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # in config


@dataclass(frozen=True)
class Made:
    """A dense tensor that a file does not store as the model has it.

    Attributes:
        blocks: Where its rows lie.
        shape: As the model has it.
        torch_dtype: What it becomes: fp32, or the model's dtype where it is decoded.
        order: Of rows and columns in the file.
        change: What makes the model's numbers of the file's; None: they are the same.
    """

    blocks: tuple[Block, ...]
    shape: tuple[int, ...]
    torch_dtype: torch.dtype
    order: Order
    change: Callable[[Tensor], Tensor] | None = None

    @property
    def file(self) -> Path:
        return self.blocks[0].stored.file

    @property
    def dtype(self) -> str:
        return self.blocks[0].kind

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return sum(block.stored.nbytes for block in self.blocks)

    def meta(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.torch_dtype, device="meta")

    def read(self) -> Tensor:
        numbers = assembled(self.blocks, self.order, self.torch_dtype, "tensor")
        return (self.change(numbers) if self.change else numbers).reshape(self.shape)


def assembled(blocks: tuple[Block, ...], order: Order, dtype: torch.dtype, name: str) -> Tensor:
    """The numbers of parts of a tensor, in the model's order."""
    parts = [decoded(block.stored.read(), block.kind, dtype, name) for block in blocks]
    numbers = joined(parts, order)
    return numbers if order.columns is None else numbers[:, order.columns]


def joined(parts: list[Tensor], order: Order) -> Tensor:
    """The rows of all parts, in the model's order."""
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    return rows if order.rows is None else rows[order.rows]


def in_order(blocks: tuple[Block, ...], order: Order) -> Tensor:
    """Blocks of a type, (N, bytes) uint8, in the model's order."""
    kind, rows = TYPES[blocks[0].kind], joined([block.stored.read() for block in blocks], order)
    if order.columns is None:
        return rows
    each = order.columns[:: kind.columns] // kind.columns
    return rows.unflatten(1, (-1, kind.nbytes))[:, each].flatten(1)


def keeps_blocks(blocks: tuple[Block, ...], order: Order) -> bool:
    """Whether a tensor's blocks are whole, and of one type, in the model's order."""
    kind = TYPES.get(blocks[0].kind)
    if kind is None or any(block.kind != blocks[0].kind for block in blocks):
        return False
    if order.columns is None:
        return True
    if len(order.columns) % kind.columns:
        return False
    each = order.columns.view(-1, kind.columns)
    first = each[:, :1] // kind.columns * kind.columns
    return torch.equal(each, first + torch.arange(kind.columns))


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
    contents: Contents, directory: Path
) -> tuple[
    dict[str, Any],
    dict[str, "Stored | Made"],
    dict[str, Layer],
    Names,
    nn.Module,
    dict[str, str],
]:
    """Find a model's tensors by the headers, and write its settings into a directory.

    Args:
        contents: Of the file or files.
        directory: Gets config.json and generation_config.json.

    Returns:
        Of config.json; the tensors by transformers' names; those of them that are quantized linear
        layers and embeddings; transformers' tables of names; its model, without memory; and
        tensors of the file that are left out, and why.

    Raises:
        InvalidInput: The model or a type cannot be read.
    """
    family, config = family_of(contents), config_of(contents)
    write_json(directory / "config.json", config)
    ends = [contents.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ENDS]
    known = sorted({token for token in ends if isinstance(token, int)})
    if known:
        write_json(directory / "generation_config.json", {"eos_token_id": known})
    bare = bare_model(directory, {n: block.stored for n, block in contents.tensors.items()})
    names, model = Names(bare), split(bare)
    stored, layers, left = placed(contents, family, config, model, names)
    return config, stored, layers, names, model, left


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
            "into the directory",
            first,
            in_a_line(error),
        )


class Search:
    """Tensors of a file, by ggml's names; it knows which were found."""

    def __init__(self, contents: Contents, family: Family):
        self.path, self.tensors, self.family = contents.files[0], contents.tensors, family
        self.used = {*LEFT}
        self.experts: dict[str, list[Stored]] = {}

    def find(self, theirs: str, name: str, expert: int | None) -> Block:
        """A tensor, or one expert of it, for the model's of a name; InvalidInput without it."""
        block, half = self.tensors.get(theirs), None
        if block is None and (of := GATE_OR_UP.search(theirs)):
            theirs, half = theirs.replace(of[1], "gate_up"), ("gate", "up").index(of[1])
            block = self.tensors.get(theirs)
        if block is None:
            old = any(other.endswith(".ssm_in.weight") for other in self.tensors)
            what = f"has no tensor {theirs} for {name}"
            if old and self.family.arch == "qwen3next":
                what += (
                    ": its ssm_in holds q, k, v and z in one, as files of before 2026 do; take a "
                    "newer file, or convert the original model"
                )
            raise InvalidInput(f"{self.path}: {what}")
        self.used.add(theirs)
        if not decodable(block.kind):
            raise InvalidInput(f"{self.path}: {theirs} is {block.kind}, which cannot be read")
        if expert is None:
            return block
        if theirs not in self.experts:
            self.experts[theirs] = list(block.stored.each()) if len(block.shape) == 3 else []
        odd = half is not None and len(block.shape) == 3 and block.shape[1] % 2
        if expert >= len(self.experts[theirs]) or odd:
            raise InvalidInput(f"{self.path}: {theirs} of {block.shape} does not hold the experts")
        return halved(Block(block.kind, block.shape[1:], self.experts[theirs][expert]), half)

    def latent(self, theirs: str) -> list[Block]:
        """What makes keys, and values, of a latent, where they are two tensors; [] elsewhere."""
        if not theirs.endswith("attn_kv_b.weight") or theirs in self.tensors:
            return []
        halves = [theirs.replace("kv_b", f"{which}_b") for which in "kv"]
        found = [self.tensors[half] for half in halves if half in self.tensors]
        self.used.update(halves if len(found) == 2 else ())
        return found if len(found) == 2 else []


def placed(
    contents: Contents,
    family: Family,
    config: Mapping[str, Any],
    model: nn.Module,
    names: Names,
) -> tuple[dict[str, "Stored | Made"], dict[str, Layer], dict[str, str]]:
    """Every tensor of the model, found in the file; its layers; and what is left out, and why."""
    search, size = Search(contents, family), config["hidden_size"]
    stored: dict[str, Stored | Made] = {}
    layers: dict[str, Layer] = {}
    modules = dict(model.named_modules()) | {PROJECT: nn.Linear(2 * size, size, device="meta")}
    own_names = named(search.path, family, config, model, names.stored)
    heads = further(contents, family, config, own_names)
    for own, name, theirs, expert in (*own_names, *heads):
        of, _, end = own.rpartition(".")
        module, shape = modules[of], tuple(modules[of].state_dict()[end].shape)
        layer = name.rpartition(".")[0]
        if both := search.latent(theirs[0]):
            stored[name], layers[layer] = both[0].stored, latent(layer, both[0], both[1], shape)
            continue
        blocks = tuple(search.find(each, name, expert) for each in theirs)
        n = sum(block.shape[0] for block in blocks)
        if not fits((n, *blocks[0].shape[1:]), shape) or any(
            block.shape[1:] != blocks[0].shape[1:] for block in blocks
        ):
            shapes = ", ".join(str(block.shape) for block in blocks)
            raise InvalidInput(f"{search.path}: {theirs[0]} has shape {shapes}, and {name} {shape}")
        order = order_of(name, family, config, n)
        kept = isinstance(module, nn.Linear)
        if isinstance(module, nn.Embedding) and blocks[0].kind in TYPES:
            kept = factor_of(module) is not None
        dense = all(block.kind in DENSE for block in blocks)
        if kept and not dense and len(blocks[0].shape) == 2:
            stored[name] = blocks[0].stored
            layers[layer] = linear(layer, blocks, shape, order)
            continue
        change = change_of(own, family)
        if dense and len(blocks) == 1 and order.same and change is None:
            stored[name] = blocks[0].stored._replace(shape=shape)
        else:
            dtype = blocks[0].stored.torch_dtype if dense else getattr(torch, config["dtype"])
            stored[name] = Made(blocks, shape, dtype, order, change)
    left = left_behind(contents, family, config, search.used)
    return stored, layers, left


def left_behind(
    contents: Contents, family: Family, config: Mapping[str, Any], used: Container[str]
) -> dict[str, str]:
    """Tensors of blocks behind the model's that are left out, and why.

    Raises:
        InvalidInput: Others are not used.
    """
    ignored = tuple(f"{block}." for block in drafts(family, config, contents.metadata))
    unknown = [name for name in contents.tensors if name not in used]
    left = {name: FURTHER for name in unknown if name.startswith(ignored)}
    strange = [name for name in unknown if name not in left]
    if strange:
        raise InvalidInput(
            f"{contents.files[0]}: {len(strange)} tensors are not in transformers' {family.kind}, "
            f"such as {strange[0]}"
        )
    return left


def halved(block: Block, half: int | None) -> Block:
    """The first or second half of a matrix's rows; None: all."""
    if half is None:
        return block
    rows, columns = block.shape[0] // 2, block.shape[1:]
    stored, nbytes = block.stored, block.stored.nbytes // 2
    part = stored._replace(
        shape=(rows, *stored.shape[1:]), start=stored.start + half * nbytes, nbytes=nbytes
    )
    return Block(block.kind, (rows, *columns), part)


def fits(given: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a shape is another one but for ones, or for how a vector is folded."""
    if [n for n in given if n > 1] == [n for n in wanted if n > 1]:
        return True
    return len(wanted) == 1 and math.prod(given) == wanted[0]


def linear(name: str, blocks: tuple[Block, ...], shape: tuple[int, ...], order: Order) -> Layer:
    """A quantized layer; dense where no format of ours has its blocks."""
    size, kinds = (shape[0], shape[1]), list(dict.fromkeys(block.kind for block in blocks))
    kind = TYPES.get(kinds[0])
    if kind is not None and keeps_blocks(blocks, order):
        return Layer(
            size,
            (f"{name}.weight",),
            kind.format,
            lambda: unpack(kind, in_order(blocks, order), name),
        )
    reason = f"{kinds[0]} has no format in anybit"
    if len(kinds) > 1:
        reason = f"its file has it in parts, of {' and '.join(kinds)}"
    elif kind is not None:
        reason = f"its columns are in another order than blocks of {kinds[0]} permit"
    return Layer(
        size,
        (f"{name}.weight",),
        None,
        lambda: assembled(blocks, order, torch.float32, name),
        reason,
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
