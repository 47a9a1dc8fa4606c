"""The table of docs/foreign.md: every type of every tool.

`python -m tests.foreign.test_table` writes it into the page.
"""

from functools import cache
from pathlib import Path

import pytest
import torch

from anybit.checkpoint.foreign.base import Layer
from anybit.checkpoint.foreign.convert import read_layers
from anybit.core.format import Format
from anybit.core.scheme import parse_scheme
from anybit.files.directory import read_json
from anybit.files.safetensors import stored_tensors
from anybit.kernels.cute.decode import decoder
from anybit.kernels.cute.operands import operand_of
from tests.foreign.make import FIXTURES

PAGE = Path(__file__).parents[2] / "docs" / "foreign.md"
BEGIN, END = "<!-- types, written by tests/foreign/test_table.py -->", "<!-- end -->"
SHAPE = (256, 512)
# Tool, what it stores, what that becomes, and a fixture that the tool made; "" where the layout is
# checked by its formula, "nearly" where products are rounded in another order, "transformers" where
# its own decoder agrees, too, "kernels" where those of the tool made a layer (`test_exl3.py`), and
# "gguf" for the package of that name, in `test_ggml.py`.
ROWS = (
    ("GPTQ, GPTQModel", "2, 3, 4, 8 bits, v1 and v2", "int4:group=16", "gptq_4bit_v1"),
    ("", "act-order", "int4:group=16,order", "gptq_4bit_act_order"),
    ("AWQ", "4 bits, `gemm`", "int4:group=16,zero", "awq_gemm"),
    ("HQQ", "1 to 6 and 8 bits, `axis=1`", "int4:group=16,zero", "hqq_4bit"),
    ("AQLM", "any codebooks", "codebook", "aqlm_2x8"),
    ("bitsandbytes", "nf4", "nf4:group=32", "bnb_nf4"),
    ("", "fp4", "fp4bnb:group=32", "bnb_fp4_double"),
    ("", "int8", "int8", "nearly"),
    ("MLX", "2 to 6 and 8 bits, affine", "q4_1:group=64", "mlx"),
    ("quanto", "2 and 4 bits", "q4_1:group=64", "quanto"),
    ("", "int8, fp8", "int8", "quanto"),
    ("EETQ", "int8", "int8", ""),
    ("FBGEMM", "FP8 of rows", "fp8@fp8", ""),
    ("transformers", "`metal`: 2, 4, 8 bits", "q4_1", "metal"),
    ("", "`gemma`: 2, 4, 8 bits", "int4", "gemma"),
    ("", "`mxfp8`", "mxfp8", "transformers"),
    ("compressed-tensors", "integers, packed", "int4:group=16", "ct_4bit"),
    ("", "integers with int8 tokens (W8A8, W4A8)", "int4:group=32@int8", "ct_activations"),
    ("", "NVFP4", "nvfp4:divide", "ct_floats"),
    ("", "MXFP4", "mxfp4", "ct_floats"),
    ("", "MXFP6", "mxfp6", "ct_floats"),
    ("", "MXFP8", "mxfp8", "ct_floats"),
    ("", "FP8 of rows, with fp8 tokens", "fp8@fp8", "ct_floats"),
    ("", "FP8 of tensors", "fp8", "ct_floats"),
    ("", "FP8 in blocks", "fp8:group=32", "ct_floats"),
    ("torchao", "fp8", "fp8", "torchao"),
    ("", "int8, and fewer bits in bytes", "int8:group=16", "torchao"),
    ("", "int4, packed in pairs or tiles, without shifts", "int4:group=32", ""),
    ("", "MXFP4, MXFP8", "mxfp4", "torchao"),
    ("", "NVFP4", "nvfp4", "torchao"),
    ("GPT-OSS", "MXFP4 experts", "mxfp4", "transformers"),
    ("DeepSeek-V3 and others", "FP8 in 128 x 128 blocks", "fp8:group=128", "transformers"),
    ("DeepSeek-V4", "MXFP4 experts, FP8 blocks with e8m0", "mxfp4", "transformers"),
    ("ModelOpt", "NVFP4", "nvfp4", ""),
    ("", "FP8 of tensors, rows, blocks", "fp8", ""),
    ("", "MXFP4, MXFP8", "mxfp8", ""),
    ("", "integers of 4 and 8 bits (W4A16, W4A8, W8A16, W8A8)", "int4:group=32", ""),
    ("Quark", "MXFP4, MXFP6, FP8", "mxfp6:e3m2", ""),
    ("", "integers of 4 and 8 bits", "int4:group=16,zero", "quark"),
    ("AutoRound", "GPTQ's, AWQ's layouts", "int4:group=32,zero", ""),
    ("", "NVFP4, MXFP4, MXFP8, MXINT4, FP8", "mxfp4", ""),
    ("EXL3", "1 to 8 bits, codes of mul1, mcg, 3inst", "trellis:code=mul1,rotate=kn", "kernels"),
    ("BitNet", "ternary", "int2@int8", "transformers"),
    ("GGUF (llama.cpp)", "Q4_0, Q5_0, Q8_0", "int4:group=32", "gguf"),
    ("", "Q4_1, Q5_1", "q4_1", "gguf"),
    ("", "Q2_K to Q6_K", "q4_k", "gguf"),
    ("", "IQ4_NL", "iq4_nl:group=32", "gguf"),
    ("", "IQ4_XS", "iq4_xs", "gguf"),
    ("", "IQ1_S to IQ3_S", "iq3_s", "gguf"),
    ("", "MXFP4", "mxfp4", "gguf"),
    ("", "TQ2_0", "int2:group=256", "gguf"),
)
TOOLS = {path.name for path in FIXTURES.iterdir()}


def kernels(fmt: Format, activation: str | None) -> str:
    """Which kernels of GPUs multiply the format in its few bits."""
    operand = operand_of(activation, torch.bfloat16)
    hopper = fmt.hopper_decode is not None and not isinstance(decoder(fmt, operand), str)
    hopper = hopper or (fmt.lookup is not None and fmt.bits == 8)
    known = {"Hopper": hopper, "Triton": fmt.triton_decode is not None}
    return ", ".join(name for name, there in known.items() if there)


@cache
def layers(fixture: str) -> dict[str | None, Layer]:
    """A layer of each scheme."""
    source = FIXTURES / fixture
    config, stored = read_json(source / "config.json"), stored_tensors(source)
    return {layer.scheme: layer for layer in read_layers(source, config, stored).values()}


def table() -> str:
    lines = [
        "| tool | stores | becomes | weights equal |",
        "|---|---|---|---|",
    ]
    for tool, what, scheme, by in ROWS:
        known = {
            "": "its formula",
            "transformers": "transformers' decoder",
            "gguf": "`gguf`",
            "kernels": "its kernels",
            "nearly": "the tool to 2e-7",
        }
        check = known.get(by, "the tool")
        lines.append(f"| {tool} | {what} | `{scheme}` | {check} |")
    return "\n".join(lines)


@pytest.mark.parametrize("row", [row for row in ROWS if row[3] in TOOLS])
def test_the_tools_made_such_layers(row: tuple[str, str, str, str]) -> None:
    _, _, scheme, fixture = row
    assert scheme in layers(fixture)


@pytest.mark.parametrize("scheme", sorted({row[2] for row in ROWS}))
def test_kernels_of_gpus_multiply_them(scheme: str) -> None:
    """The page says so of all."""
    assert kernels(*parse_scheme(scheme)) == "Hopper, Triton"


def test_the_page_has_this_table() -> None:
    text = PAGE.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip() == table()


if __name__ == "__main__":
    text = PAGE.read_text()
    new = f"{text[: text.index(BEGIN) + len(BEGIN)]}\n\n{table()}\n\n"
    PAGE.write_text(new + text[text.index(END) :])
