"""GPUs by the names that people give them, with what their datasheets say of memory."""

import difflib
import re
from dataclasses import dataclass

from anybit.errors import InvalidInput

OLDEST = (8, 0)  # compute capability that the kernels need: tensor cores for bf16


@dataclass(frozen=True)
class Device:
    """Figures of the datasheet.

    Attributes:
        name: The GPU's name.
        capability: Compute capability.
        memory: Bytes.
        bandwidth: Bytes/s from memory.
    """

    name: str
    capability: tuple[int, int]
    memory: float
    bandwidth: float


# Name, compute capability, GB, GB/s.
TABLE = """
RTX 3060          8.6   12   360
RTX 3080          8.6   10   760
RTX 3090          8.6   24   936
RTX 4060 Ti       8.9   16   288
RTX 4070          8.9   12   504
RTX 4080          8.9   16   717
RTX 4090          8.9   24  1008
RTX 5070 Ti      12.0   16   896
RTX 5080         12.0   16   960
RTX 5090         12.0   32  1792
RTX A6000         8.6   48   768
RTX 6000 Ada      8.9   48   960
RTX PRO 6000     12.0   96  1792
T4                7.5   16   320
V100              7.0   32   900
A10               8.6   24   600
A10G              8.6   24   600
A30               8.0   24   933
A40               8.6   48   696
L4                8.9   24   300
L40               8.9   48   864
L40S              8.9   48   864
A100 40 GB        8.0   40  1555
A100              8.0   80  2000
H20               9.0   96  4000
H100 PCIe         9.0   80  2000
H100 SXM          9.0   80  3350
H100 NVL          9.0   94  3900
GH200             9.0   96  4000
H200              9.0  141  4800
B200             10.0  180  8000
B300             10.3  288  8000
"""
# Words in a name that tell no GPU of the table from another.
FILLERS = re.compile(
    r"nvidia|geforce|tesla|quadro|generation|blackwell|workstation|edition|gpu|sxm\d?|hbm\de?"
)


def _read(line: str) -> Device:
    *words, version, memory, bandwidth = line.split()
    major, _, minor = version.partition(".")
    capability = int(major), int(minor)
    return Device(" ".join(words), capability, float(memory) * 1e9, float(bandwidth) * 1e9)


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", FILLERS.sub("", name.lower()))


DEVICES = {_key(device.name): device for device in map(_read, TABLE.strip().splitlines())}


def gpu(name: str) -> Device:
    """A GPU by a usual name: "rtx4090", "RTX 4090", "4090", "NVIDIA H100 80GB HBM3".

    Raises:
        InvalidInput: It is not in the table, or too old for the kernels.
    """
    key = _key(name)
    short = re.sub(r"(141|\d\d)gb", "", key)
    tries = (key, short, short.removesuffix("pcie"))
    device = next((DEVICES[k] for t in tries for k in (t, f"rtx{t}") if k in DEVICES), None)
    if device is None:
        close = difflib.get_close_matches(short, DEVICES, 1)
        hint = f"did you mean {DEVICES[close[0]].name}? " if close else ""
        known = ", ".join(d.name for d in DEVICES.values())
        raise InvalidInput(f"unknown GPU {name!r}; {hint}known: {known}")
    if device.capability < OLDEST:
        raise InvalidInput(
            f"{device.name} is too old: its compute capability is "
            f"{device.capability[0]}.{device.capability[1]}, and the kernels need 8.0 or more"
        )
    return device
