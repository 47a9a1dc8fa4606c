"""The headers of GGUF files: what they say of a model, and where its tensors lie.

A header is checked as it is read: counts, lengths and offsets are compared with the size of the
file before anything of that size is made. (The reader of the `gguf` package trusts them.) Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from anybit.errors import InvalidInput, Unsupported
from anybit.files.safetensors import Stored

MAGIC = b"GGUF"
VERSIONS = (2, 3)
LARGEST_HEADER = 1 << 28  # bytes; those of the largest vocabularies are some 20 MB
MOST_NUMBERS = 1 << 22  # of an array in the metadata; vocabularies have fewer tokens
MOST_DIMENSIONS = 4
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9
DENSE = {"F32": "F32", "F16": "F16", "BF16": "BF16"}  # and the names in safetensors
THREE = re.compile(r"_exps\.|\.attn_[kv]_b\.")  # tensors of experts or heads
SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class Block(NamedTuple):
    """A tensor of a file.

    Attributes:
        kind: ggml's name of its type: "F16", "Q4_K".
        shape: Of its numbers.
        stored: Where it lies: numbers as they are, or bytes of blocks, in rows like those of shape.
    """

    kind: str
    shape: tuple[int, ...]
    stored: Stored


@dataclass(frozen=True)
class Contents:
    """What one file holds, or several that are parts of one model.

    Attributes:
        files: Their paths.
        metadata: Values by key, of the first file.
        tensors: By ggml's names.
    """

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Block]


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file: by its ending, or by its first four bytes.

    Caches name files by hashes.
    """
    if path.suffix == ".gguf":
        return not path.is_dir()
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def files_of(path: Path) -> list[Path]:
    """All parts of a model of which this is one.

    Raises:
        FileNotFoundError: One is missing.
    """
    found = SPLIT.search(path.name)
    paths = [path]
    if found:
        stem, index, count = path.name[: found.start()], int(found[1]), int(found[2])
        if not 1 <= index <= count:
            raise InvalidInput(f"{path}: there is no part {index} of {count}")
        paths = [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    missing = [p for p in paths if not p.is_file()]
    if missing:
        raise FileNotFoundError(f"{missing[0]} is missing ({len(missing)} of {len(paths)} files)")
    return paths


def read_model(path: Path) -> Contents:
    """The headers of a file, and of its other parts.

    Raises:
        FileNotFoundError: A part is missing.
        InvalidInput: A file is damaged, or none of this format.
        Unsupported: The `gguf` package is missing.
    """
    paths = files_of(path)
    parts = [read_header(p) for p in paths]
    count = parts[0].metadata.get("split.count", 1)
    if count != len(parts) and (count or len(parts) > 1):
        raise InvalidInput(
            f"{paths[0]}: is one of {count} parts by its header, of {len(parts)} by its name; give "
            "the files the names that they were published with"
        )
    tensors: dict[str, Block] = {}
    for part in parts:
        twice = next((name for name in part.tensors if name in tensors), None)
        if twice:
            raise InvalidInput(f"{part.files[0]}: tensor {twice!r} is in another part, too")
        tensors |= part.tensors
    wanted = parts[0].metadata.get("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise InvalidInput(f"{path}: {wanted} tensors by the header, {len(tensors)} in all parts")
    return Contents(tuple(paths), parts[0].metadata, tensors)


def read_header(path: Path) -> Contents:
    """The header of one file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    with open(path, "rb") as file:
        header = _Header(file, path)
        try:
            return header.read()
        except UnicodeDecodeError:
            raise header.error("a name is not UTF-8 text") from None


class _Header:
    """A header on its way in."""

    def __init__(self, file: BinaryIO, path: Path):
        self.file, self.path, self.size = file, path, path.stat().st_size
        self.left = min(self.size, LARGEST_HEADER)  # bytes that may still be read

    def error(self, what: str) -> InvalidInput:
        return InvalidInput(f"{self.path}: damaged or no GGUF file: {what}; copy it again")

    def read(self) -> Contents:
        if self.take(4) != MAGIC:
            raise self.error("it does not begin with 'GGUF'")
        version = self.one("I")
        if version not in VERSIONS:
            raise InvalidInput(
                f"{self.path}: version {version} of GGUF cannot be read, only "
                f"{' and '.join(map(str, VERSIONS))} (little-endian)"
            )
        tensors, keys = self.count("tensors", 24), self.count("keys", 13)
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self.string()
            if key in metadata:
                raise self.error(f"key {key!r} is there twice")
            metadata[key] = self.value(self.one("I"))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise self.error(f"general.alignment is {alignment!r}")
        infos = [(self.string(), *self.info()) for _ in range(tensors)]
        start = self.file.tell() + -self.file.tell() % alignment
        return Contents((self.path,), metadata, self.placed(infos, start, alignment))

    def take(self, count: int) -> bytes:
        """The next bytes."""
        if count > self.left:
            raise self.error(f"its header goes on for {count} bytes, {self.left} are left")
        self.left -= count
        return self.file.read(count)

    def one(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def count(self, what: str, least: int) -> int:
        """A number of things that take so many bytes each, at least."""
        count = int(self.one("Q"))
        if count > self.left // least:
            raise self.error(f"{count} {what} do not fit into the {self.left} bytes that are left")
        return count

    def string(self) -> str:
        return self.take(self.count("letters", 1)).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.one(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            raise self.error(f"a value of unknown type {kind}")
        inner = self.one("I")
        if inner == STRING:
            return [self.string() for _ in range(self.count("strings", 8))]
        if inner not in SCALARS:
            raise self.error(f"an array of values of type {inner}")
        size = struct.calcsize(SCALARS[inner])
        count = self.count("numbers", size)
        if count > MOST_NUMBERS:
            raise self.error(f"an array of {count} numbers, more than {MOST_NUMBERS}")
        return list(struct.unpack(f"<{count}{SCALARS[inner]}", self.take(count * size)))

    def info(self) -> tuple[tuple[int, ...], int, int]:
        """Shape, type and offset of a tensor."""
        count = self.one("I")
        if not 1 <= count <= MOST_DIMENSIONS:
            raise self.error(f"a tensor of {count} dimensions")
        shape = tuple(self.one("Q") for _ in range(count))[::-1]
        return shape, self.one("I"), self.one("Q")

    def placed(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> dict[str, Block]:
        """Tensors whose bytes lie in the file, each apart from the others."""
        sizes, out = block_sizes(), dict[str, Block]()
        for name, shape, number, offset in infos:
            if name in out:
                raise self.error(f"tensor {name!r} is there twice")
            if number not in sizes:
                raise InvalidInput(f"{self.path}: {name} has the unknown type {number} of ggml")
            kind, columns, nbytes = sizes[number]
            if kind not in DENSE and len(shape) != (3 if THREE.search(name) else 2):
                raise self.error(f"{name} of type {kind} has {len(shape)} dimensions")
            if min(shape) < 1 or math.prod(shape) > self.size * 64 or shape[-1] % columns:
                raise self.error(f"{name} cannot have shape {shape} in type {kind}")
            row = shape[-1] // columns * nbytes
            total = math.prod(shape[:-1]) * row
            if offset % alignment or start + offset + total > self.size:
                raise self.error(
                    f"{name} is at {start + offset} with {total} bytes, the file has {self.size}"
                )
            dtype, kept = (DENSE[kind], shape) if kind in DENSE else ("U8", (*shape[:-1], row))
            stored = Stored(self.path, dtype, kept, start + offset, total)
            out[name] = Block(kind, shape, stored)
        end, last = 0, ""
        for name, block in sorted(out.items(), key=lambda item: item[1].stored.start):
            if block.stored.start < end:
                raise self.error(f"{name} shares bytes with {last}")
            end, last = block.stored.start + block.stored.nbytes, name
        return out


def block_sizes() -> dict[int, tuple[str, int, int]]:
    """Name, columns and bytes of a block of every type of ggml, by its number."""
    try:
        from gguf import GGML_QUANT_SIZES
    except ImportError:
        raise Unsupported("GGUF files need the gguf package: pip install 'anybit[gguf]'") from None
    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
