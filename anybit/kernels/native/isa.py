"""What this processor can do, and what of it the kernels use.

`ANYBIT_CPU_ISA` (avx2, avx512, avx512_vnni, avx512_bf16) uses less than there is, as oneDNN's own
`ONEDNN_MAX_CPU_ISA` does, which is respected too.
"""

import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from anybit.errors import InvalidInput


@dataclass(frozen=True, eq=False)  # one object for each, which is looked up in every product
class Isa:
    """A set of instructions.

    bits: of a vector register. bf16: vdpbf16ps. vnni: vpdpbusd. features: LLVM's names.
    """

    name: str
    bits: int
    bf16: bool
    vnni: bool
    features: tuple[str, ...]

    @property
    def registers(self) -> int:
        return 32 if self.bits == 512 else 16

    @property
    def floats(self) -> int:
        """Numbers of 32 bits in a vector."""
        return self.bits // 32


_AVX2 = ("avx2", "fma", "f16c", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd")
_VNNI = (*_AVX512, "avx512vnni")
LEVELS = (  # best first
    Isa("avx512_bf16", 512, True, True, (*_VNNI, "avx512bf16")),
    Isa("avx512_vnni", 512, False, True, _VNNI),
    Isa("avx512", 512, False, False, _AVX512),
    Isa("avx2", 256, False, False, _AVX2),
)
ONEDNN = {  # oneDNN's limits, as the level that they allow
    "AVX2": "avx2",
    "AVX2_VNNI": "avx2",
    "AVX2_VNNI_2": "avx2",
    "AVX512_CORE": "avx512",
    "AVX512_CORE_VNNI": "avx512_vnni",
}


def is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def processor() -> str:
    """The processor's name."""
    about = Path("/proc/cpuinfo")
    for line in about.read_text().splitlines() if about.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def isa() -> Isa | None:
    """The best level that the processor has and the switches allow; None when it has none.

    Raises:
        ValueError: `ANYBIT_CPU_ISA` names a level that is unknown or that the processor lacks.
    """
    if not is_x86():
        return None
    from llvmlite import binding

    known = [level.name for level in LEVELS]
    has = binding.get_host_cpu_features()  # those that the operating system has enabled
    able = [level for level in LEVELS if all(has.get(feature) for feature in level.features)]
    wanted = os.environ.get("ANYBIT_CPU_ISA", "")
    if wanted:
        chosen = [level for level in able if level.name == wanted]
        if not chosen:
            there = ", ".join(level.name for level in able) or "none of them"
            raise InvalidInput(
                f"ANYBIT_CPU_ISA={wanted}: known are {', '.join(known)}, and this processor has "
                f"{there}"
            )
        return chosen[0]
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if limit in ("SSE41", "AVX"):
        return None
    least = known.index(ONEDNN[limit]) if limit in ONEDNN else 0
    return next((level for level in able if known.index(level.name) >= least), None)
