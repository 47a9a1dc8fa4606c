"""What this processor can do, and what of it the kernels use.

`ANYBIT_CPU_ISA` (the name of a level below, or none) uses less than there is, as oneDNN's own
`ONEDNN_MAX_CPU_ISA` does on x86, which is respected too.
"""

import ctypes
import os
import platform
import sys
from dataclasses import dataclass
from functools import cache

from anybit.errors import InvalidInput


@dataclass(frozen=True, eq=False)  # one object for each, which is looked up in every product
class Isa:
    """A set of instructions.

    arm: whether they are Arm's, not those of x86. bits: of a vector register. bf16: whether
    products of bf16 are added up in pairs. byte_operand: the kind of `Operand` whose products with
    int8 are added up in fours; "" where there is none. features: LLVM's names.
    """

    name: str
    arm: bool
    bits: int
    bf16: bool
    byte_operand: str
    features: tuple[str, ...]

    @property
    def registers(self) -> int:
        return 32 if self.arm or self.bits == 512 else 16

    @property
    def floats(self) -> int:
        """Numbers of 32 bits in a vector."""
        return self.bits // 32

    @property
    def entries(self) -> int:
        """Entries of a table of bytes that one instruction looks up."""
        return 64 if self.arm else 16


_AVX2 = ("avx2", "fma", "f16c", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd")
_VNNI = (*_AVX512, "avx512vnni")
X86 = (  # best first
    Isa("avx512_bf16", False, 512, True, "u8", (*_VNNI, "avx512bf16")),
    Isa("avx512_vnni", False, 512, False, "u8", _VNNI),
    Isa("avx512", False, 512, False, "", _AVX512),
    Isa("avx2_vnni", False, 256, False, "u8", (*_AVX2, "avxvnni")),
    Isa("avx2", False, 256, False, "", _AVX2),
)
ARM = (
    Isa("neon_bf16", True, 128, True, "s8", ("neon", "dotprod", "bf16")),
    Isa("neon_dot", True, 128, False, "s8", ("neon", "dotprod")),
    Isa("neon", True, 128, False, "s8", ("neon",)),
)
# Python's names of machines, the same as at llvmlite in pyproject.toml.
MACHINES = {"x86_64": X86, "AMD64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}
OFF = "none"
ONEDNN = {  # oneDNN's limits, as the best level that they allow
    "SSE41": None,
    "AVX": None,
    "AVX2": "avx2",
    "AVX2_VNNI": "avx2_vnni",
    "AVX2_VNNI_2": "avx2_vnni",
    "AVX512_CORE": "avx512",
    "AVX512_CORE_VNNI": "avx512_vnni",
}
# Of Linux on Arm: words of the auxiliary vector, and bits in them.
AT_HWCAP, AT_HWCAP2 = 16, 26
HWCAP_ASIMD, HWCAP_ASIMDDP, HWCAP2_BF16 = 1 << 1, 1 << 20, 1 << 14


def levels() -> tuple[Isa, ...]:
    """The levels of this kind of processor, best first; none where there are no kernels for it.

    There are none in processes of 32 bits, and none for Arm but on Linux and macOS.
    """
    known = MACHINES.get(platform.machine(), ()) if sys.maxsize > 2**32 else ()
    return () if known is ARM and sys.platform not in ("linux", "darwin") else known


def able() -> list[Isa]:
    """The levels that the processor has, best first."""
    has: dict[str, bool] = {}
    if levels() is ARM:
        has = _arm_features()
    elif levels() is X86:
        from llvmlite import binding

        has = binding.get_host_cpu_features()  # those that the operating system has enabled
    return [level for level in levels() if all(has.get(feature) for feature in level.features)]


def _arm_features() -> dict[str, bool]:
    """What the operating system says of an Arm processor.

    LLVM's own answer lacks dot products and bf16 on Linux.
    """
    system = ctypes.CDLL(None)
    if sys.platform == "darwin":
        place = ctypes.c_void_p
        system.sysctlbyname.argtypes = [ctypes.c_char_p, place, place, place, ctypes.c_size_t]

        def told(name: str) -> bool:
            number, size = ctypes.c_int(0), ctypes.c_size_t(4)
            key = f"hw.optional.arm.{name}".encode()
            failed = system.sysctlbyname(key, ctypes.byref(number), ctypes.byref(size), None, 0)
            return not failed and number.value != 0

        return {"neon": True, "dotprod": told("FEAT_DotProd"), "bf16": told("FEAT_BF16")}
    system.getauxval.argtypes, system.getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    first, second = system.getauxval(AT_HWCAP), system.getauxval(AT_HWCAP2)
    return {
        "neon": bool(first & HWCAP_ASIMD),
        "dotprod": bool(first & HWCAP_ASIMDDP),
        "bf16": bool(second & HWCAP2_BF16),
    }


@cache
def isa() -> Isa | None:
    """The best level that the processor has and the switches allow; None where there is none.

    Raises:
        ValueError: `ANYBIT_CPU_ISA` names a level that is unknown or that the processor lacks.
    """
    known = [level.name for level in levels()]
    if not known:
        return None
    wanted = os.environ.get("ANYBIT_CPU_ISA", "")
    if wanted == OFF:
        return None
    there = able()
    if wanted:
        chosen = [level for level in there if level.name == wanted]
        if not chosen:
            names = ", ".join(level.name for level in there) or "none of them"
            raise InvalidInput(
                f"ANYBIT_CPU_ISA={wanted}: known are {', '.join(known)} and {OFF}, and this "
                f"processor has {names}"
            )
        return chosen[0]
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if levels() is X86 and limit in ONEDNN:
        best = ONEDNN[limit]
        allowed = known[known.index(best) :] if best else []
        there = [level for level in there if level.name in allowed]
    return there[0] if there else None


def why_none() -> str:
    """Why `isa` gives none on a machine that has levels."""
    if os.environ.get("ANYBIT_CPU_ISA") == OFF:
        return f"ANYBIT_CPU_ISA={OFF} turns it off"
    lowest = levels()[-1].name
    if not able():
        return f"the processor has no {lowest}"
    return f"ONEDNN_MAX_CPU_ISA={os.environ.get('ONEDNN_MAX_CPU_ISA')} allows less than {lowest}"
