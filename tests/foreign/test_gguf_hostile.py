"""Headers of GGUF files that lie: one line before memory is taken, whatever the bytes are."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from anybit.checkpoint.foreign.convert import convert_checkpoint
from anybit.checkpoint.foreign.gguf_file import read_header, read_model
from anybit.errors import AnybitError, InvalidInput
from tests.foreign.gguf_hybrids import HYBRIDS
from tests.foreign.gguf_models import tiny, write

BIG = 1 << 60


def text(value: str | bytes, length: int | None = None) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data) if length is None else length) + data


def key(name: str, kind: int, data: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + data


def info(name: str, shape: tuple[int, ...], kind: int, offset: int, count: int = -1) -> bytes:
    dims = struct.pack(f"<{len(shape)}Q", *shape)
    number = len(shape) if count < 0 else count
    return text(name) + struct.pack("<I", number) + dims + struct.pack("<IQ", kind, offset)


def file(
    keys: tuple[bytes, ...] = (),
    infos: tuple[bytes, ...] = (),
    counts: tuple[int, int] | None = None,
    magic: bytes = b"GGUF",
    version: int = 3,
    data: int = 4096,
) -> bytes:
    tensors, values = counts or (len(infos), len(keys))
    head = magic + struct.pack("<IQQ", version, tensors, values) + b"".join(keys) + b"".join(infos)
    return head + bytes(-len(head) % 32 + data)


ARCH = key("general.architecture", 8, text("llama"))
Q4_0, F32 = 2, 0
CASES = {
    "no magic": (file(magic=b"GGML"), "does not begin with 'GGUF'"),
    "empty": (b"", "its header goes on for 4 bytes, 0 are left"),
    "cut": (file()[:13], "its header goes on for"),
    "version": (file(version=1), "version 1 of GGUF cannot be read, only 2 and 3"),
    "big-endian": (file(version=0x03000000), "only 2 and 3"),
    "tensor count": (file(counts=(BIG, 0)), "1152921504606846976 tensors do not fit into"),
    "key count": (file(counts=(0, BIG)), "1152921504606846976 keys do not fit into"),
    "key length": (file((text("a", BIG),)), "letters do not fit into"),
    "value length": (file((key("a", 8, text("b", BIG)),)), "letters do not fit into"),
    "value type": (file((key("a", 99, b""),)), "a value of unknown type 99"),
    "array length": (file((key("a", 9, struct.pack("<IQ", 4, BIG)),)), "numbers do not fit"),
    "array of strings": (file((key("a", 9, struct.pack("<IQ", 8, BIG)),)), "strings do not fit"),
    "array of arrays": (file((key("a", 9, struct.pack("<IQ", 9, 5)),)), "values of type 9"),
    "key twice": (file((ARCH, ARCH)), "key 'general.architecture' is there twice"),
    "not UTF-8": (file((text(b"\xff\xfe") + struct.pack("<Ii", 5, 1),)), "not UTF-8"),
    "alignment 0": (file((key("general.alignment", 4, struct.pack("<I", 0)),)), "alignment is 0"),
    "alignment 24": (file((key("general.alignment", 4, struct.pack("<I", 24)),)), "is 24"),
    "alignment in words": (file((key("general.alignment", 8, text("x")),)), "alignment is 'x'"),
    "many dimensions": (file(infos=(info("w", (32,), F32, 0, 1 << 31),)), "2147483648 dimensions"),
    "no dimension": (file(infos=(info("w", (), F32, 0),)), "a tensor of 0 dimensions"),
    "size 0": (file(infos=(info("w", (32, 0), F32, 0),)), "cannot have shape (0, 32)"),
    "huge": (file(infos=(info("w", (BIG, BIG), F32, 0),)), "cannot have shape"),
    "half a block": (file(infos=(info("w", (40, 2), Q4_0, 0),)), "shape (2, 40) in type Q4_0"),
    "unknown type": (file(infos=(info("w", (32,), 4, 0),)), "w has the unknown type 4 of ggml"),
    "beyond the end": (file(infos=(info("w", (2048,), F32, 0),)), "with 8192 bytes, the file has"),
    "offset": (file(infos=(info("w", (32,), F32, BIG),)), "with 128 bytes, the file has"),
    "not aligned": (file(infos=(info("w", (32,), F32, 8),)), "with 128 bytes, the file has"),
    "overlap": (
        file(infos=(info("v", (64,), F32, 0), info("w", (64,), F32, 128))),
        "w shares bytes with v",
    ),
    "tensor twice": (
        file(infos=(info("w", (8,), F32, 0), info("w", (8,), F32, 32))),
        "tensor 'w' is there twice",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_headers_that_lie_are_named(case: str, tmp_path: Path) -> None:
    data, wanted = CASES[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(InvalidInput) as error:
        read_model(path)
    assert wanted in str(error.value)
    assert "\n" not in str(error.value)


def test_a_header_is_no_longer_than_any_there_is(tmp_path: Path) -> None:
    """A file may be large without a header that is: this one has holes."""
    path = tmp_path / "model.gguf"
    path.write_bytes(file((key("a", 9, struct.pack("<IQ", 8, 1 << 33)),)))
    os.truncate(path, 1 << 36)
    with pytest.raises(InvalidInput, match="8589934592 strings do not fit into the 268435"):
        read_model(path)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"block_count": 1 << 30}, "1073741824 layers in its metadata, and"),
        ({"attention.key_length": 0, "attention.value_length": 0}, "head_dim is 0 in its metadata"),
        (
            {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
            "stretched 4.0 times, but of no type",
        ),
        ({"embedding_length": 0}, "no whole number of hidden_size"),
        ({"attention.head_count": 8}, "attn_q.weight has shape"),
        ({"attention.head_count": [4, 2]}, "head_count is not the same in all layers"),
        ({"attention.head_count": "four"}, "head_count is 'four', no number"),
        ({"attention.value_length": 32}, "keys and values of different lengths"),
        ({"feed_forward_length": 1024}, "ffn_gate.weight has shape"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "is 'nan', no number"),
        ({"rope.dimension_count": 32}, "32 of 64 channels are rotated"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.5}, "stretched 0.5 times"),
    ],
)
def test_metadata_that_fits_no_tensor_is_refused(
    change: dict[str, object], wanted: str, tmp_path: Path
) -> None:
    write(tiny("llama"), tmp_path / "model.gguf", {}, change)
    with pytest.raises(InvalidInput) as error:
        convert_checkpoint(tmp_path / "model.gguf", tmp_path / "out")
    assert wanted in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "change", "wanted"),
    [
        ("qwen3_5_text", {"ssm.time_step_rank": 3}, "3 heads of V and 2 of K"),
        ("qwen3_5_text", {"ssm.inner_size": 250}, "ssm.inner_size is 250, no multiple of 4"),
        (
            "qwen3_5_text", {"attention.recurrent_layers": [True]},
            "has no attention.recurrent_layers for each layer",
        ),
        ("qwen3_5_text", {"rope.dimension_sections": "x"}, "sections is no list of numbers"),
        ("jamba", {"attention.head_count_kv": [2, 2, 0, 2]}, "[0, 1, 3] (attn) do not lie equally"),
        ("jamba", {"ssm.state_size": 0}, "has no ssm.state_size in its metadata"),
        ("nemotron_h", {"feed_forward_length": 256}, "has no feed_forward_length for each layer"),
    ],
)  # fmt: skip
def test_metadata_of_recurrent_layers_is_refused(
    name: str, change: dict[str, object], wanted: str, tmp_path: Path
) -> None:
    write(tiny(name), tmp_path / "model.gguf", {}, change, arch=HYBRIDS[name][0])
    with pytest.raises(InvalidInput) as error:
        convert_checkpoint(tmp_path / "model.gguf", tmp_path / "out")
    assert wanted in str(error.value)


def test_any_bytes_are_read_or_refused(tmp_path: Path) -> None:
    """Bytes of a real header changed at random: what is read then lies within the file."""
    path = tmp_path / "model.gguf"
    write(tiny("llama", num_hidden_layers=1), path, {"ffn": "Q4_K"}, tokens=96)
    data, random = path.read_bytes(), np.random.default_rng(0)
    end = min(block.stored.start for block in read_header(path).tensors.values())
    refused = 0
    for _ in range(300):
        changed = bytearray(data)
        for at in random.integers(0, end, random.integers(1, 4)):
            changed[at] = random.integers(0, 256)
        path.write_bytes(changed)
        try:
            tensors = read_header(path).tensors
        except AnybitError:
            refused += 1
            continue
        for block in tensors.values():
            assert block.stored.start + block.stored.nbytes <= len(data)
            assert block.stored.read().dtype in (torch.uint8, torch.float32)
    assert 0 < refused < 300


def test_a_part_that_there_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00000.gguf"
    path.write_bytes(file())
    with pytest.raises(InvalidInput, match="there is no part 1 of 0"):
        read_model(path)
