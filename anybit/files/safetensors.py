"""Checkpoints as files: safetensors headers, checked; shards and directories, written whole or not.

The safetensors format is 8 bytes of header length, a JSON header and the tensors' bytes. Headers
are read here rather than through a library because they are checked before a byte of data is read,
tensors are read without mapping whole shards into memory, and shards are written tensor by tensor.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import torch
from torch import Tensor

from anybit.errors import InvalidInput
from anybit.files.directory import COPY, OTHER_WEIGHTS, read_json, sync

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PIECE, READERS = 1 << 23, 8  # bytes that are read at once; threads that read a tensor
LARGEST_HEADER = 100_000_000  # the format's own limit

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U32": torch.uint32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Readable(Protocol):
    """A tensor that is read, or made, when it is needed."""

    def read(self) -> Tensor:
        """The tensor."""


class Stored(NamedTuple):
    """A tensor in a safetensors file: where it lies, and its dtype and shape as the header says."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def meta(self) -> Tensor:
        """A tensor of this dtype and shape without contents."""
        return torch.empty(self.shape, dtype=self.torch_dtype, device="meta")

    def read(self, pinned: bool = False) -> Tensor:
        """The tensor, in the host's memory, whatever torch's default device.

        Pieces are read side by side: one thread fills 2 GB of new memory a second at best.

        pinned: for a GPU, which copies it several times as fast; torch keeps and reuses the memory.
        """
        data = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        view = data.numpy().data

        def fill(at: int) -> int:
            with open(self.file, "rb") as file:
                file.seek(self.start + at)
                return file.readinto(view[at : at + PIECE])

        starts = range(0, self.nbytes, PIECE)
        if len(starts) > 1:
            with ThreadPoolExecutor(min(len(starts), READERS)) as pool:
                got = sum(pool.map(fill, starts))
        else:
            got = sum(map(fill, starts))
        if got != self.nbytes:
            raise InvalidInput(f"{self.file}: ends {self.nbytes - got} bytes early; copy it again")
        return data.view(self.torch_dtype).reshape(self.shape)

    def each(self) -> "Iterator[Stored]":
        """Its parts along the first dimension, as tensors of their own."""
        size = self.nbytes // max(self.shape[0], 1)
        for i in range(self.shape[0]):
            yield self._replace(shape=self.shape[1:], start=self.start + i * size, nbytes=size)

    def chunks(self) -> Iterator[bytes]:
        """The tensor's bytes, a few megabytes at a time."""
        with open(self.file, "rb") as file:
            file.seek(self.start)
            for at in range(0, self.nbytes, COPY):
                yield file.read(min(COPY, self.nbytes - at))

    def equals(self, other: "Stored") -> bool:
        """Whether another tensor has the same numbers; of one dtype, read a few MB at a time."""
        if self.shape != other.shape:
            return False
        if self.dtype == other.dtype:
            return all(a == b for a, b in zip(self.chunks(), other.chunks(), strict=True))
        wide = torch.promote_types(self.torch_dtype, other.torch_dtype)
        return torch.equal(self.read().to(wide), other.read().to(wide))

    @property
    def torch_dtype(self) -> torch.dtype:
        if self.dtype not in DTYPES:
            raise InvalidInput(f"{self.file}: dtype {self.dtype} is not supported")
        return DTYPES[self.dtype]


# Reading.


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """All tensors of a checkpoint directory, single or sharded, by name.

    Reads headers only, and checks them: ValueError for a file that is cut or damaged,
    FileNotFoundError for a missing one.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is not a directory with a checkpoint")
    if (directory / WEIGHTS).is_file():  # before an index, as in transformers: that may be old
        return read_header(directory / WEIGHTS)
    if (directory / INDEX).is_file():
        return tensors_of_shards(directory)
    raise without_weights(directory)


def tensors_of_shards(directory: Path) -> dict[str, Stored]:
    """The tensors that a directory's index names; raises as `stored_tensors` does."""
    index = directory / INDEX
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise InvalidInput(f"{index}: has no weight_map; copy it again")
    for file in where.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise InvalidInput(f"{index}: names {file!r}, which is not a file of its directory")
    files = sorted(set(where.values()))
    missing = [file for file in files if not (directory / file).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{directory}: {len(missing)} of {len(files)} shards that the index names are missing, "
            f"the first is {missing[0]}; copy them again"
        )
    found = {file: read_header(directory / file) for file in files}
    for name, file in where.items():
        if name not in found[file]:
            raise InvalidInput(f"{directory / file}: has no tensor {name!r}, which the index names")
    file_of: dict[str, str] = {}
    for file, own in found.items():
        for name in own:
            if (other := file_of.setdefault(name, file)) != file:
                raise InvalidInput(
                    f"{directory}: {other} and {file} both hold {name!r}, and readers do not "
                    "agree on which counts; copy the files again, or save the model anew"
                )
    return {n: t for own in found.values() for n, t in own.items() if n in where}


def without_weights(directory: Path) -> Exception:
    """What a directory without a checkpoint in safetensors is refused with."""
    files = sorted(directory.iterdir())
    if named := [p.name for p in files if p.suffix == ".safetensors"]:
        if shards := [name for name in named if "-of-" in name]:
            return FileNotFoundError(
                f"{directory} has shards, such as {shards[0]}, and the index is missing: {INDEX}; "
                "copy it again"
            )
        return InvalidInput(
            f"{directory} has neither {WEIGHTS} nor {INDEX}, only {named[0]}; rename it if it "
            "holds the whole model as transformers names tensors"
        )
    if other := next((p for p in files if p.suffix in OTHER_WEIGHTS), None):
        remedy = (
            "give the path of that file"
            if other.suffix == ".gguf"
            else "convert it first: load it with transformers and call save_pretrained"
        )
        return InvalidInput(f"{directory} has no safetensors, only {other.name}; {remedy}")
    return FileNotFoundError(f"{directory} has neither {WEIGHTS} nor {INDEX}")


def read_header(path: Path) -> dict[str, Stored]:
    """Tensors of one safetensors file by name, in the order of their data."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LARGEST_HEADER):
            raise InvalidInput(
                f"{path}: damaged or no safetensors file: {size} bytes, with a header of {length}; "
                "copy it again"
            )
        try:
            header = json.loads(file.read(length), object_pairs_hook=_unique)
            header.pop("__metadata__", None)
            tensors = {n: _stored(path, 8 + length, entry) for n, entry in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InvalidInput(
                f"{path}: damaged safetensors header ({error}); copy it again"
            ) from None
    end = max((t.start + t.nbytes for t in tensors.values()), default=8 + length)
    if end != size:
        raise InvalidInput(
            f"{path}: cut or damaged: its header describes {end} bytes, the file has {size}; "
            "copy it again"
        )
    tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)))
    at = 8 + length
    for name, tensor in tensors.items():
        if tensor.start != at:
            what = "shares bytes with another tensor" if tensor.start < at else "follows a gap"
            raise InvalidInput(f"{path}: damaged safetensors header ({name} {what}); copy it again")
        at += tensor.nbytes
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, whose parser would keep the last of two entries of one name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise InvalidInput(f"{name} stands in it twice")
    return found


def _stored(path: Path, data: int, entry: dict[str, Any]) -> Stored:
    """One entry of a header."""
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    wanted = (
        math.prod(shape) * DTYPES[entry["dtype"]].itemsize if entry["dtype"] in DTYPES else None
    )
    numbers_ok = all(isinstance(v, int) and 0 <= v < 1 << 62 for v in (*shape, begin, end))
    if not numbers_ok or end < begin or (wanted is not None and end - begin != wanted):
        raise InvalidInput(f"shape {shape} of {entry['dtype']} does not fit bytes {begin} to {end}")
    return Stored(path, entry["dtype"], shape, data + begin, end - begin)


# Writing.


class ShardWriter:
    """Writes one safetensors file tensor by tensor; the file appears, complete, on a clean exit.

    Data goes to `<path>.tmp` behind space that is kept for the header, which comes last, padded
    with blanks. So the memory needed is that of one tensor, not of a shard. Tensors whose size is
    no multiple of 8 bytes wait for the end, so that every tensor is aligned to its dtype.
    """

    def __init__(self, path: Path, names: Iterable[str]):
        self.path, self.temporary = path, path.with_name(path.name + ".tmp")
        entry = len('"":{"dtype":"F8_E4M3","shape":[,],"data_offsets":[,]},') + 8 * 20
        room = len('{"__metadata__":{"format":"pt"}}') + sum(
            len(json.dumps(name)) + entry for name in names
        )
        self.room = room + -room % 8
        self.header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self.late: list[tuple[str, Tensor]] = []
        self.at = 0

    def __enter__(self) -> "ShardWriter":
        self.file: BinaryIO = open(self.temporary, "wb")
        self.file.seek(8 + self.room)
        return self

    def add(self, name: str, tensor: Tensor) -> None:
        if tensor.nbytes % 8:
            self.late.append((name, tensor))
        else:
            self._write(name, tensor)

    def copy(self, name: str, stored: Stored) -> None:
        """Add a tensor of another file as it is, without holding it in memory."""
        if stored.nbytes % 8:
            self.add(name, stored.read())
            return
        self._entry(name, stored.dtype, stored.shape, stored.nbytes)
        for part in stored.chunks():
            self.file.write(part)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self._finish()
        except BaseException:
            kind = OSError
            raise
        finally:
            self.file.close()
            if kind is not None:
                self.temporary.unlink(missing_ok=True)
        if kind is None:
            os.replace(self.temporary, self.path)
            sync(self.path.parent)

    def _finish(self) -> None:
        for name, tensor in sorted(self.late, key=lambda item: -item[1].itemsize):
            self._write(name, tensor)
        text = json.dumps(self.header, separators=(",", ":")).encode()
        self.file.seek(0)
        self.file.write(self.room.to_bytes(8, "little") + text.ljust(self.room))
        self.file.flush()
        os.fsync(self.file.fileno())

    def _write(self, name: str, tensor: Tensor) -> None:
        self._entry(name, NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        self.file.write(data.numpy().data)

    def _entry(self, name: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
        offsets = [self.at, self.at + nbytes]
        self.header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        self.at += nbytes
