"""Every way to quantize that checkpoints name: what reads it, or why nothing does and what to do.

A test holds this against transformers' own list.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from anybit.errors import InvalidInput, near
from anybit.files.directory import stated_quantization
from anybit.nn.plan import METHOD

# quant_method in config.json, and the module that reads such checkpoints.
METHODS = {
    "gptq": "gptq",
    "awq": "awq",
    "hqq": "hqq",
    "aqlm": "aqlm",
    "compressed-tensors": "compressed_tensors",
    "bitsandbytes": "bitsandbytes",
    "mxfp4": "mxfp4",
    "fp8": "fp8",
    "mxfp8": "fp8",
    "modelopt": "modelopt",
    "quark": "quark",
    "bitnet": "bitnet",
    "auto-round": "auto_round",
    "intel/auto-round": "auto_round",  # as its first versions said
    "exl3": "exl3",
    "torchao": "torchao",
    "mlx": "mlx",
    "gemma": "gemma",
    "metal": "metal",
    "fbgemm_fp8": "fbgemm_fp8",
    "quanto": "quanto",
    "eetq": "eetq",
}
ANEW = "quantize the unquantized model: anybit quantize MODEL {} -o OUT"
ROTATED = "its layers also transform their inputs, which anybit does not do by this tool's rule"
# Those that nothing reads: why, and what to do.
REFUSED = {
    "gguf": (
        "the weights are in a GGUF file, which config.json only names",
        "give that file: anybit convert FILE.gguf -o OUT",
    ),
    "nvfp4": (
        "transformers rounds to it while it loads an unquantized model, and cannot save it",
        "if the weights are unquantized, remove quantization_config from config.json; "
        + ANEW.format("--format nvfp4"),
    ),
    "fouroversix": (
        "what lies in such a file differs by that tool's version and backend",
        ANEW.format("--format nvfp4"),
    ),
    "fp_quant": (ROTATED, ANEW.format("--format nvfp4 --method rotate+gptq")),
    "higgs": (
        f"{ROTATED}, and its codes lie in the order of one GPU's kernels",
        ANEW.format("--format int4:group=64,zero --method rotate+gptq"),
    ),
    "humming": (
        "its codes may lie in the order of its kernels, with blocks that its own settings name",
        "take the same model in compressed-tensors, which `anybit convert` reads, or "
        + ANEW.format("--format trellis"),
    ),
    "sinq": (
        "its columns have scales of their own beside those of groups",
        ANEW.format("--format int4:group=64,zero"),
    ),
    "spqr": (
        "single weights of 16 bits lie beside its tiles of 3 bits",
        ANEW.format("--format int3:group=64,zero"),
    ),
    "vptq": (
        "its vectors are sums of codewords over permuted columns, with outliers apart",
        ANEW.format("--format trellis"),
    ),
    "exl2": (
        "the rows of a layer have different bits",
        "take an EXL3 file of the same model, which `anybit convert` reads, or "
        + ANEW.format("--format trellis:bits=3,rotate=kn"),
    ),
    "quip": (ROTATED, ANEW.format("--format trellis:rotate=kn")),
    "qtip": (ROTATED, ANEW.format("--format trellis:rotate=kn")),
    "paroquant": (ROTATED, ANEW.format("--format int4:group=128 --method rotate+gptq")),
    "qqq": (
        "its codes lie in the order of one kernel, with scales of groups inside those of rows",
        ANEW.format("--format int4:group=128@int8"),
    ),
    "marlin": (
        "its codes lie in the order of one kernel",
        "take the GPTQ checkpoint that it was made of, which `anybit convert` reads",
    ),
    "ctranslate2": (
        "model.bin holds another layout, and neither names nor settings of the model it was",
        ANEW.format("--format int8"),
    ),
}
ALIASES = {"quip_sharp": "quip", "quip#": "quip", "quipsharp": "quip"}
# Settings of tools by which layers also rotate their inputs, or add products of low rank.
BESIDE = ("rotation", "rotation_config", "spinquant_config", "transform_config", "krot", "adapter")


def method_of(source: Path, config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The tool that quantized a checkpoint, and how; before any tensor is looked at.

    Raises:
        InvalidInput: None did, or one whose checkpoints cannot be read.
    """
    quantization = stated_quantization(source, config)
    if quantization is None:
        raise InvalidInput(
            f"{source} is not quantized: its config.json has no quantization_config; quantize it "
            "with `anybit quantize`"
        )
    method = quantization.get("quant_method")
    if method == METHOD:
        raise InvalidInput(f"{source} is a checkpoint of anybit already; load it with anybit.load")
    if method not in METHODS:
        raise refusal(source, method)
    meta = quantization.get("meta")
    for part in (quantization, meta if isinstance(meta, dict) else {}):
        if key := next((key for key in BESIDE if part.get(key)), None):
            raise InvalidInput(
                f"{source}: {method}: {key} is {str(part[key])[:80]}, so the model computes more "
                "than products with its weights, which cannot be read"
            )
    return str(method), quantization


def refusal(source: Path, method: Any) -> InvalidInput:
    """The error about a tool whose checkpoints cannot be read."""
    word = str(method).lower()
    word = ALIASES.get(word, word)
    if word in REFUSED:
        why, remedy = REFUSED[word]
        return InvalidInput(
            f"{source} is quantized with {method!r}, which cannot be read: {why}; {remedy}"
        )
    return InvalidInput(
        f"{source} is quantized with {method!r}, which cannot be read; known: "
        f"{', '.join(METHODS)}{near(word, METHODS)}; {ANEW.format('--format FORMAT')}"
    )


def reader_of(method: str) -> Any:
    """The module that reads checkpoints of a tool."""
    return import_module(f"anybit.checkpoint.foreign.{METHODS[method]}")
