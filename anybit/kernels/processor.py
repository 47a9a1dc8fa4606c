"""The name of the processor."""

import platform
from pathlib import Path

from anybit.kernels.native.isa import ARM, levels


def processor() -> str:
    """As the system has it, else LLVM's name of its kind."""
    about = Path("/proc/cpuinfo")
    for line in about.read_text().splitlines() if about.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    if levels() is ARM:
        from llvmlite import binding

        return str(binding.get_host_cpu_name())
    return platform.processor() or platform.machine()
