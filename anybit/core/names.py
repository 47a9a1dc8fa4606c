"""Names that other tools give to formats: what anybit calls them, or why it has none."""

import re
from collections.abc import Callable

builtin: Callable[[], object]  # registers anybit's own formats; the package says what that is
ALIASES = {  # of llm-compressor and vLLM, MLX and bitsandbytes, llama.cpp
    "w4a16": "int4:group=128",
    "w4a16_asym": "int4:group=128,zero",
    "w8a16": "int8",
    "w8a8": "int8@int8",
    "w4a8": "int4:group=128@int8",
    "w4afp8": "int4:group=128@fp8",
    "fp8_dynamic": "fp8@fp8",
    "nvfp4a16": "nvfp4",
    "mxfp4a16": "mxfp4",
    "2bit": "int2:group=64,zero",
    "3bit": "int3:group=64,zero",
    "4bit": "int4:group=64,zero",
    "5bit": "int5:group=64,zero",
    "6bit": "int6:group=64,zero",
    "8bit": "int8",
    "q4_0": "int4:group=32",
    "q5_0": "int5:group=32",
    "q8_0": "int8:group=32",
}
METHODS = ("gptq", "awq", "hqq", "rtn", "smoothquant", "autoround")
DENSE = ("bf16", "bfloat16", "fp16", "float16", "f16", "fp32", "none")
MIXTURE = re.compile(r"(q[2-6]_k)_[sml]")  # of which nn/mixes.py makes plans of some


def own_spec(spec: str) -> str:
    """A spec with anybit's name in place of another tool's; others are returned as they are.

    Options that follow the name take the place of the alias's own: w4a16:group=64.
    """
    body, at, activation = spec.strip().partition("@")
    name, colon, options = body.partition(":")
    known = ALIASES.get(name.strip().lower())
    if known is None:
        return spec
    known, own_at, own_activation = known.partition("@")
    if colon:
        known = f"{known.partition(':')[0]}:{options}"
    return known + (at + activation or own_at + own_activation)


def explained(name: str) -> str | None:
    """Why a name of another tool is no format here, and what to write; None for unknown names."""
    name = name.lower()
    if name in METHODS:
        return f"{name} is a method and no format: choose a format, such as int4:group=128, for it"
    if name in DENSE:
        return "layers keep their dtype where a plan leaves them unquantized (None)"
    if mixture := MIXTURE.fullmatch(name):
        own = mixture[1]
        return (
            f"{name} is a mixture of formats, for a whole model: give {own}, or a plan of several, "
            f"such as {own} for all and q6_k for *.down_proj"
        )
    return None
