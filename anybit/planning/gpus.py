"""GPUs by the names that people give them, with what their datasheets say of memory and rates."""

import difflib
import re
from dataclasses import dataclass

from anybit.errors import InvalidInput

OLDEST = (8, 0)  # compute capability that the kernels need: tensor cores for bf16


@dataclass(frozen=True)
class Device:
    """Figures of the datasheet, of dense products.

    Attributes:
        name: The GPU's name.
        capability: Compute capability.
        memory: Bytes.
        bandwidth: Bytes/s from memory.
        alu: 32-bit instructions/s of the CUDA cores, one lane each.
        mma: Operations/s of the tensor cores by operand ("int8", "fp8", "fp16"); an FMA is two.
    """

    name: str
    capability: tuple[int, int]
    memory: float
    bandwidth: float
    alu: float
    mma: dict[str, float]


# Name, compute capability, GB, GB/s, 10^12 instructions/s, 10^12 operations/s of int8, fp8, fp16.
TABLE = """
RTX 3060          8.6   12   360   6.4   102    0    51
RTX 3080          8.6   10   760  14.9   238    0   119
RTX 3090          8.6   24   936  17.8   284    0   142
RTX 4060 Ti       8.9   16   288  11     177  177    88
RTX 4070          8.9   12   504  14.6   233  233   117
RTX 4080          8.9   16   717  24.4   390  390   195
RTX 4090          8.9   24  1008  41.3   661  661   330
RTX 5070 Ti      12.0   16   896  22     351  351   176
RTX 5080         12.0   16   960  28.1   450  450   225
RTX 5090         12.0   32  1792  52.4   838  838   419
RTX A6000         8.6   48   768  19.4   310    0   155
RTX 6000 Ada      8.9   48   960  45.5   728  728   364
RTX PRO 6000     12.0   96  1792  62.5  1000 1000   500
T4                7.5   16   320   4     130    0    65
V100              7.0   32   900   7.8     0    0   125
A10               8.6   24   600  15.6   250    0   125
A10G              8.6   24   600  15.6   140    0    70
A30               8.0   24   933   5.2   330    0   165
A40               8.6   48   696  18.7   299    0   150
L4                8.9   24   300  15.1   242  242   121
L40               8.9   48   864  45.3   362  362   181
L40S              8.9   48   864  45.8   733  733   362
A100 40 GB        8.0   40  1555   9.75  624    0   312
A100              8.0   80  2000   9.75  624    0   312
H20               9.0   96  4000  22     296  296   148
H100 PCIe         9.0   80  2000  25.6  1513 1513   756
H100 SXM          9.0   80  3350  34    1979 1979   989
H100 NVL          9.0   94  3900  30    1671 1671   836
GH200             9.0   96  4000  34    1979 1979   989
H200              9.0  141  4800  34    1979 1979   989
B200             10.0  180  8000  40    4500 4500  2250
B300             10.3  288  8000  38     150 4500  2250
"""
# Words in a name that tell no GPU of the table from another.
FILLERS = re.compile(
    r"nvidia|geforce|tesla|quadro|generation|blackwell|workstation|edition|gpu|sxm\d?|hbm\de?"
)


def _read(line: str) -> Device:
    *words, version, memory, bandwidth, alu, int8, fp8, fp16 = line.split()
    major, _, minor = version.partition(".")
    rates = {"int8": float(int8), "fp8": float(fp8), "fp16": float(fp16)}
    return Device(
        " ".join(words),
        (int(major), int(minor)),
        float(memory) * 1e9,
        float(bandwidth) * 1e9,
        float(alu) * 1e12,
        {operand: rate * 1e12 for operand, rate in rates.items() if rate},
    )


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
