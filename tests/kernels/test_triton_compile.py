"""The GEMM compiles for every supported architecture, on a machine without a GPU."""

import re
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

import pytest

from tests.kernels.compiling import HOPPER, Made, product
from tests.needs import pairs

pytest.importorskip("triton")

# Target, and what its matrix unit is called in the assembly.
TARGETS = {
    ("cuda", 80, 32): "mma.sync", ("cuda", 89, 32): "mma.sync", HOPPER: "wgmma",
    ("cuda", 100, 32): "mma", ("cuda", 120, 32): "mma.sync",
    ("hip", "gfx942", 64): "v_mfma", ("hip", "gfx1100", 32): "v_wmma",
}  # fmt: skip
SCHEMES = (
    "int4:group=128", "fp6", "q4_k", "liquid@int8", "trellis", "trellis:bits=3,code=pair8@int8",
    "trellis:bits=4,code=look@int8",
)  # fmt: skip
PAGE = Path(__file__).resolve().parents[2] / "docs" / "add_a_format.md"


def lines(made: Made) -> list[str]:
    """Of the assembly, but for those that name files."""
    return [line for line in made.text.splitlines() if '"' not in line]


@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_gemm_compiles_without_a_gpu(compilers: Callable[..., Executor], backend: str) -> None:
    """Every target, and every scheme."""
    for target, scheme in pairs(list(TARGETS), SCHEMES):
        if target[0] == backend:
            made = compilers(backend).submit(product, target, scheme).result()
            unit = [line for line in lines(made) if "mma" in line or "mfma" in line]
            assert unit, (target, scheme)
            assert TARGETS[target] in unit[0], unit[0]


def test_a_users_decoder_is_as_short_as_a_built_in_one(
    compilers: Callable[..., Executor], tmp_path: Path
) -> None:
    """The format of docs/add_a_format.md beside int2, whose codes have as many bits."""
    source = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert source
    (tmp_path / "ternary.py").write_text(source[1])
    own, built_in = (
        sum(line.rstrip().endswith(";") for line in lines(made))
        for made in (
            compilers().submit(product, HOPPER, "ternary", str(tmp_path)).result(),
            compilers().submit(product, HOPPER, "int2").result(),
        )
    )
    assert own == built_in > 100
