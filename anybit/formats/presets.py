"""Formats that a command uses where the user names none."""

import torch

# Of `anybit plan`. On published models int4:group=64,zero has less KL than int4:group=32 in fewer
# bits, and fp:e2m3 less than 6-bit integers (benchmarks/results/study_qwen2.5-coder-1.5b.csv).
CANDIDATES = (
    "int2:group=32,zero",
    "int3:group=128",
    "int3:group=32",
    "int4:group=128",
    "int4:group=64,zero",
    "int4:group=32",
    "int5:group=128",
    "fp5",
    "fp:e2m3",
    "int8",
)
# Beside them where the budget is below 3 bits, with which integers lose over a nat. Encoding takes
# long on a CPU, and `look` is the code that all kernels multiply in its bits.
FEW_BITS = ("trellis:code=look,rotate=kn", "trellis:bits=3,code=look,rotate=kn")
HOPPER = (  # of `anybit build`
    "liquid@int8",
    "int8@int8",
    "int4@int8",
    "sparse@int8",
    "fp6",
    "fp5",
    "fp4",
    "fp8",
    "sparse",
    "fp6@fp8",
    "int4@fp8",
    "mxfp4@fp8",
    "mxfp4",
    "nvfp4",
    "mxfp8",
    "fp8:group=128",
    "fp8:group=128@fp8",
    "int4:group=128@fp8",
    "int8",
    "int4:group=128",
    "int4:group=64",
    "int4:group=128,zero",
    "int3:group=64",
    "int2:group=64",
    "codebook:m=1,v=4,group=128",
    "codebook:m=2,v=8,group=128",
)


def candidates(bits: float) -> tuple[str, ...]:
    """What `anybit plan` chooses from under a budget of so many bits a weight."""
    return CANDIDATES + FEW_BITS if bits < 3 else CANDIDATES


def default_format(calibrated: bool) -> tuple[str, str]:
    """The format of `anybit quantize` on this machine, and why, in words.

    calibrated: whether there is text to calibrate on. Without it 4 bits lose much, and of 6 bits
    `fp:e2m3` loses half of what `fp6` does (docs/accuracy.md).
    """
    if not calibrated:
        return "fp:e2m3", "6 bits, rounded to nearest: close to the unquantized model, in seconds"
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:
        return "liquid@int8", "4 bits with the fastest kernels of this GPU"
    return "int4:group=64,zero", "4 bits, which calibration keeps close to the unquantized model"
