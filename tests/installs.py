"""Whether pip finds versions for every extra of anybit: alone, together, beside its peers.

    python tests/installs.py        # minutes; nothing is installed

pip resolves each list as for an empty environment, and says which packages exclude each other.
"""

import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = sorted(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
)
USERS = [extra for extra in EXTRAS if extra not in ("dev", "docs")]
VLLM = ("vllm==0.33.0", "vllm==0.32.0")
# What a user installs to serve with vLLM, as README and docs/vllm.md say it.
SERVED = "gpu,hopper"


def cases() -> list[tuple[str, ...]]:
    """Lists of requirements; `[...]` stands for anybit with those extras."""
    beside = [(f"[{extra}]", vllm) for vllm in VLLM for extra in (SERVED, ",".join(USERS))]
    return [
        ("[]",),
        *((f"[{extra}]",) for extra in EXTRAS),
        (f"[{','.join(USERS)}]",),
        *beside,
        ("[]", "lm-eval[hf]", "peft"),
    ]


def resolved(wheel: str, case: tuple[str, ...]) -> tuple[str, float]:
    """What pip says against a list, "" if nothing, and the seconds it took."""
    names = [f"anybit{one} @ file://{wheel}" if one[0] == "[" else one for one in case]
    names = [name.replace("anybit[]", "anybit") for name in names]
    start = time.perf_counter()
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    got = subprocess.run([*command, *names], capture_output=True, text=True, check=False)
    said = [line for line in got.stderr.splitlines() if not line.startswith("WARNING")]
    return "\n".join(said) if got.returncode else "", time.perf_counter() - start


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        build = ["pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, str(ROOT)]
        subprocess.run([sys.executable, "-m", *build], check=True)
        wheel = str(next(Path(folder).glob("anybit-*.whl")))
        failed = 0
        with ThreadPoolExecutor(2) as pool:
            for case, (said, seconds) in zip(
                cases(), pool.map(lambda case: resolved(wheel, case), cases()), strict=True
            ):
                failed += bool(said)
                print(f"{'RED' if said else 'ok':4}{seconds:5.0f} s  {' '.join(case)}", flush=True)
                print(said, end="\n" if said else "")
    if failed:
        raise SystemExit(f"error: {failed} of {len(cases())} lists cannot be installed")


if __name__ == "__main__":
    main()
