"""What a released wheel must be: run by the python of an environment that holds only that wheel.

`make release` makes both: .venv-release/empty/bin/python tests/wheel.py dist
"""

import importlib.util
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

import anybit

LARGEST = 2_000_000  # bytes


def main(folder: Path) -> None:
    wheels = list(folder.glob("*.whl"))
    check(
        len(wheels) == 1, f"{folder} holds {len(wheels)} wheels, not one; empty it and build again"
    )
    (wheel,) = wheels
    release = version("anybit")
    check(wheel.name == f"anybit-{release}-py3-none-any.whl", f"not pure Python: {wheel.name}")
    check(wheel.stat().st_size < LARGEST, f"{wheel.stat().st_size} bytes are {LARGEST} or more")
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "anybit/py.typed",
        "anybit/serve/page/index.html",
        "anybit/serve/page/vendor/LICENSES.txt",
        "anybit/evaluate/tasks/python_parses.yaml",
        "anybit/formats/liquid.py",
    ):
        check(name in names, f"{name} is not in the wheel")
    check(not any(n.startswith(("models/", "tests/")) for n in names), "models or tests are in it")

    check(anybit.__version__ == release, f"{anybit.__version__} says the package, {release} pip")
    home = Path(anybit.__file__).resolve()
    check("site-packages" in home.parts, f"{home} is not the installed wheel")
    for extra in ("triton", "fastapi", "matplotlib", "cutlass"):
        if importlib.util.find_spec(extra):
            print(f"note: {extra} is installed, though anybit alone does not ask for it")
    for spec in ("fp6", "int4:group=64", "liquid@int8", "sparse", "codebook:m=1,v=4"):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(128, 64)), torch.randn(3, 128)
        dense = model(x)
        error = (anybit.quantize_(model, spec)(x) - dense).norm() / dense.norm()
        check(0 < error < (0.8 if spec == "sparse" else 0.4), f"{spec}: relative error {error:.3f}")

    check("int4" in command("formats")[1], "anybit formats does not list int4")
    check(release in command("--version")[1], "anybit --version does not say it")
    code, output = command("demo")
    check(code == 1 and "clone" in output and "Traceback" not in output, f"anybit demo: {output}")
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, {len(names)} files; installed and tried")


def command(*args: str) -> tuple[int, str]:
    """Exit code and output of the installed `anybit`."""
    program = Path(sys.executable).parent / "anybit"
    got = subprocess.run([program, *args], capture_output=True, text=True, check=False)
    return got.returncode, got.stdout + got.stderr


def check(right: bool, what: str) -> None:
    if not right:
        raise SystemExit(f"error: {what}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
