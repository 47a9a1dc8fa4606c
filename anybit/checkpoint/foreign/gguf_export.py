"""`anybit export --to gguf`: checkpoints of ours in one file that llama.cpp reads.

Layers become the types of ggml that hold the same weights (`ggml.TYPES`), byte for byte what is
read back. Dense matrices keep their dtype, vectors and routers become F32, as llama.cpp wants them.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anybit.checkpoint.foreign.base import OF_CACHE, of_attention
from anybit.checkpoint.foreign.ct_layers import keys_of
from anybit.checkpoint.foreign.export import Checkpoint, check_all
from anybit.checkpoint.foreign.ggml import TYPES, pack
from anybit.checkpoint.foreign.gguf_config import metadata_of
from anybit.checkpoint.foreign.gguf_families import FAMILIES, Family
from anybit.checkpoint.foreign.gguf_file import block_sizes, read_model
from anybit.checkpoint.foreign.gguf_hybrids import order_of
from anybit.checkpoint.foreign.gguf_model import open_model
from anybit.checkpoint.foreign.gguf_names import Named, named
from anybit.checkpoint.foreign.gguf_tokens import write_vocabulary
from anybit.checkpoint.trial import unreadable
from anybit.core.format import Format
from anybit.core.packed import Packed
from anybit.errors import InvalidInput
from anybit.files.directory import check_space, sync
from anybit.files.safetensors import Stored
from anybit.progress import progress

WRITTEN = {kind.spec: name for name, kind in TYPES.items() if not kind.plus}  # any code is one
NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": np.uint8}


def export_gguf(source: Checkpoint, out: Path, overwrite: bool) -> "GgufFile":
    """Write the file, and return what it holds; see `export_checkpoint`."""
    block_sizes()  # the package is there
    if out.exists() and (out.is_dir() or not overwrite):
        raise FileExistsError(f"{out} exists; choose another file, or pass overwrite=True")
    file = GgufFile(source)
    out.parent.mkdir(parents=True, exist_ok=True)
    check_space(out.parent, file.nbytes)
    partial = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    try:
        file.write(partial)
        try_out(partial)
        sync(partial)
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    sync(out.parent)
    return file


def try_out(path: Path) -> None:
    """Raise InvalidInput when the tensors of a file that was written are not those of its model."""
    with unreadable(), tempfile.TemporaryDirectory() as folder:
        open_model(read_model(path), Path(folder))


def kind_of(fmt: Format, activation: str | None, stored: Mapping[str, Stored]) -> str:
    """ggml's type that holds a layer.

    Raises:
        InvalidInput: There is none, with the reason.
    """
    if activation:
        raise InvalidInput(f"GGUF does not say that activations are quantized to {activation}")
    if fmt.spec not in WRITTEN:
        raise InvalidInput(f"no type of ggml is {fmt.spec!r}; there are {', '.join(WRITTEN)}")
    for key in ("scale", "d", "base"):
        known = (torch.float16, torch.float8_e8m0fnu)
        if key in stored and stored[key].torch_dtype not in known:
            raise InvalidInput(f"its {key} is {stored[key].dtype}, and ggml's numbers are fp16")
    if "d" in stored and not bool((stored["scale"].read() == 1).all()):
        raise InvalidInput("some of its rows are so small or large that they have a scale")
    return WRITTEN[fmt.spec]


class GgufFile:
    """What the file will hold.

    Attributes:
        kinds: ggml's types of the quantized layers.
        parts: ggml's names of all tensors, and what each one is made of: one, or all experts.
        dropped: Tensors of the checkpoint that it will not hold, and why.
        nbytes: Of all tensors.
    """

    def __init__(self, source: Checkpoint):
        self.source, self.config = source, source.model.config
        self.family = family_of(source)
        self.kinds: dict[str, str] = {}
        reasons: dict[str, str] = {}
        for name, (fmt, activation, shape) in source.layers.items():
            own = {key: source.stored[f"{name}.{key}"] for key in keys_of(fmt, shape)}
            try:
                self.kinds[name] = kind_of(fmt, activation, own)
            except InvalidInput as error:
                reasons[name] = str(error)
        check_all(source.directory, reasons, len(source.layers))
        tied = bool(self.config.tie_word_embeddings)
        self.words = self.config.to_dict() | {"tie_word_embeddings": tied}
        self.parts: dict[str, list[Named]] = {}
        for part in named(source.directory, self.family, self.words, source.model):
            self.parts.setdefault(part.theirs[0], []).append(part)
        self.metadata, self.extra = metadata_of(self.config, self.family, self.parts)
        self.check_all_placed(tied)
        self.nbytes = sum(nbytes for *_, nbytes in map(self.layout, self.parts.values()))

    def check_all_placed(self, tied: bool) -> None:
        """InvalidInput when a tensor of the checkpoint would be left behind, or experts differ."""
        names = {part.name for parts in self.parts.values() for part in parts}
        self.dropped: dict[str, str] = {}
        for name in self.source.stored:
            if name in names or name.rpartition(".")[0] in self.kinds:
                continue
            if of_attention(name):
                self.dropped[name] = OF_CACHE
            elif tied and name == "lm_head.weight":
                self.dropped[name] = "the embeddings have its weight"
            else:
                raise InvalidInput(f"{self.source.directory}: GGUF has no place for {name}")
        for theirs, parts in self.parts.items():
            kinds = {self.kind(part) for part in parts}
            if len(kinds) > 1:
                raise InvalidInput(
                    f"{self.source.directory}: experts of {theirs} are {', '.join(sorted(kinds))}; "
                    "GGUF has one type for all"
                )

    def kind(self, part: Named) -> str:
        """ggml's type of a tensor."""
        layer = part.name.rpartition(".")[0]
        if layer in self.kinds and part.name.endswith(".weight"):
            return self.kinds[layer]
        if part.name not in self.source.stored:
            raise InvalidInput(f"{self.source.directory}: has no tensor {part.name}")
        stored = self.source.stored[part.name]
        if stored.dtype not in NUMPY:
            raise InvalidInput(f"{self.source.directory}: {part.name} is {stored.dtype}")
        return "F32" if len(stored.shape) < 2 or "ffn_gate_inp" in part.theirs[0] else stored.dtype

    def layout(self, parts: list[Named]) -> tuple[str, tuple[int, ...], int]:
        """ggml's type, shape (of bytes, but for F32 and F16) and bytes of a tensor."""
        part, kind = parts[0], self.kind(parts[0])
        layer = part.name.rpartition(".")[0]
        if kind in NUMPY:
            shape = self.source.stored[part.name].shape
            if part.theirs[0].endswith("inp_shexp.weight"):
                shape = shape[1:]
            shape = (*shape[:-1], shape[-1] * 2) if kind == "BF16" else shape
            size = np.dtype(NUMPY[kind]).itemsize
        else:
            n, k = self.source.layers[layer][2]
            shape, size = (n, k // TYPES[kind].columns * TYPES[kind].nbytes), 1
        if part.expert is not None:
            shape = (len(parts), *shape)
        return kind, shape, int(np.prod(shape)) * size

    def write(self, path: Path) -> None:
        from gguf import GGMLQuantizationType, GGUFWriter

        writer = GGUFWriter(path, self.family.arch)
        writer.add_name(self.source.directory.name)
        for key, value in self.metadata.items():
            add(writer, key, value)
        write_vocabulary(writer, self.source.directory, self.config.vocab_size)
        for name, tensor in self.extra.items():
            writer.add_tensor_info(name, tuple(tensor.shape), np.dtype(np.float32), tensor.nbytes)
        for theirs, parts in self.parts.items():
            kind, shape, nbytes = self.layout(parts)
            raw = None if kind in ("F32", "F16") else GGMLQuantizationType[kind]
            dtype = np.dtype(NUMPY.get(kind, np.uint8))
            writer.add_tensor_info(theirs, shape, dtype, nbytes, raw)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in self.extra.values():
                writer.write_tensor_data(tensor.numpy())
            with progress("exporting", self.nbytes) as step:
                for theirs, parts in self.parts.items():
                    data = [self.data(part).numpy() for part in parts]
                    writer.write_tensor_data(np.concatenate(data) if data[1:] else data[0])
                    step(sum(part.nbytes for part in data), theirs)
        finally:
            writer.close()

    def data(self, part: Named) -> Tensor:
        """A tensor as the file has it; bf16 and blocks as bytes."""
        layer, kind = part.name.rpartition(".")[0], self.kind(part)
        if kind in NUMPY:
            tensor = self.source.stored[part.name].read()
            if self.family.plus_one and part.name.endswith("norm.weight"):
                tensor = tensor.float() + 1
            tensor = tensor.float() if kind == "F32" else tensor
        else:
            fmt, _, shape = self.source.layers[layer]
            keys = keys_of(fmt, shape)
            tensors = {key: self.source.stored[f"{layer}.{key}"].read() for key in keys}
            packed = Packed.from_tensors(fmt, shape, tensors, layer)
            tensor = pack(TYPES[kind], packed, layer)
        rows = order_of(part.name, self.family, self.words, len(tensor)).rows
        tensor = (tensor if rows is None else tensor[torch.argsort(rows)]).contiguous()
        return tensor.view(torch.uint8) if kind == "BF16" else tensor


def family_of(source: Checkpoint) -> Family:
    """Which family a checkpoint's model is of.

    Raises:
        InvalidInput: None that can be written.
    """
    names = source.config.get("architectures") or []
    families = [family for family in FAMILIES if family.written]
    for family in families:
        if source.config.get("model_type") == family.model_type and family.kind in names:
            return family
    raise InvalidInput(
        f"{source.directory}: {', '.join(map(str, names)) or 'its model'} cannot be written as "
        f"GGUF, only {', '.join(family.kind for family in families)}"
    )


def add(writer: Any, key: str, value: Any) -> None:
    """A value of metadata, in the type that llama.cpp reads it in."""
    if key == "general.architecture":  # the writer's own
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, str(value))
