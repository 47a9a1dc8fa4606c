"""What a compiled kernel says of itself: a cubin's ELF sections, and the parameters in its PTX."""

import re
import struct
from collections.abc import Iterator

ENTRY = re.compile(r"\.entry (\w+)\(")
WAIT = 0x8000000079C5  # WARPGROUP.DEPBAR
WGMMA = (0xDF0, 0xDF1, 0xDF3, 0x9F0, 0x9F1)  # HGMMA, IGMMA, QGMMA; HGMMA, IGMMA from shared memory
SIZES = {"u64": 8, "u32": 4, "s32": 4, "b64": 8, "b32": 4}


def entry(ptx: str) -> str:
    """The name of the kernel in this PTX."""
    found = ENTRY.search(ptx)
    assert found is not None
    return found[1]


def parameters(ptx: str) -> list[int]:
    """Bytes of each parameter of the kernel in this PTX."""
    start = ptx.index(".entry")
    out = []
    for line in ptx[start : ptx.index(")", start)].splitlines():
        if ".param" in line:
            array = re.search(r"\.b8 \w+\[(\d+)\]", line)
            plain = re.search(r"\.param \.(\w+)", line)
            out.append(int(array[1]) if array else SIZES[plain[1]])  # type: ignore[index]
    return out


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers of a thread at launch, bytes of its stack) from the cubin's ELF sections."""
    registers = stack = 0
    for name, data in sections(cubin):
        if name != ".nv.info":
            continue
        at = 0
        while at + 4 <= len(data):
            kind, attribute, size = struct.unpack_from("<BBH", data, at)
            at += 4
            if kind != 4:  # a value of two bytes or less lies in the header itself
                continue
            if attribute == 0x11:  # EIATTR_FRAME_SIZE
                stack = max(stack, struct.unpack_from("<II", data, at)[1])
            elif attribute == 0x2F:  # EIATTR_REGCOUNT
                registers = max(registers, struct.unpack_from("<II", data, at)[1])
            at += size
    return registers, stack


def waits(cubin: bytes) -> int:
    """Instructions that wait for WGMMAs."""
    return sum(word == WAIT for word in instructions(cubin))


def products(cubin: bytes) -> int:
    """WGMMAs."""
    return sum(word & 0xFFF in WGMMA for word in instructions(cubin))


def instructions(cubin: bytes) -> Iterator[int]:
    """The first half of every instruction of 16 bytes."""
    for name, code in sections(cubin):
        if name.startswith(".text."):
            yield from (word for word, _ in struct.iter_unpack("<QQ", code))


def sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of a 64-bit ELF file's sections."""
    offset = struct.unpack_from("<Q", elf, 0x28)[0]
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, offset + i * size) for i in range(count)]
    table = headers[names][4]
    for name, _, _, _, at, length in headers:
        end = elf.index(b"\0", table + name)
        yield elf[table + name : end].decode(), elf[at : at + length]
