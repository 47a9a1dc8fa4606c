"""What launches have written, on disk: the same text, numbers and machine write the same again.

A kernel whose text has not changed since it last ran is not emulated once more. Launches that break
a rule are never kept. `make test-emulated` neither reads nor writes here; `make clean` removes it.
"""

import hashlib
import os
import pickle
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from tests.needs import EVERY_KERNEL
from tests.ptx.state import InUse, Parameter, TensorMap

FOLDER = Path(__file__).parents[2] / ".pytest_cache" / "emulated"
DAYS = 7  # after which a launch is forgotten


@cache
def machine() -> bytes:
    """Of the machine's sources; forgets old launches."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in FOLDER.iterdir():
        with suppress(FileNotFoundError):  # others rename and remove files here
            if path.stat().st_mtime < time.time() - DAYS * 86400:
                path.unlink()
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return b"".join(path.read_bytes() for path in sources) + np.__version__.encode()


def place(ptx: str, parameters: Sequence[Parameter], *options: int) -> Path | None:
    """The file of a launch."""
    if EVERY_KERNEL:
        return None
    found = hashlib.sha256(machine())
    found.update(repr((ptx, options)).encode())
    for value in parameters:
        match value:
            case InUse(array):
                found.update(b"in use" + repr(array.shape).encode() + array.tobytes())
            case TensorMap():
                about = (value.rows.shape, value.box, value.element, value.in_use)
                found.update(repr(about).encode() + value.rows.tobytes())
            case np.ndarray():
                found.update(repr(value.shape).encode() + value.tobytes())
            case _:
                found.update(repr(value).encode())
    return FOLDER / found.hexdigest()


def read(path: Path | None, memory: Sequence[np.ndarray]) -> bool:
    """Write what the launch wrote into flat bytes; False where it is not known."""
    if path is None or not path.exists():
        return False
    for at, written in pickle.loads(path.read_bytes()).items():
        memory[at][:] = np.frombuffer(written, np.uint8)
    return True


def write(path: Path | None, before: Sequence[np.ndarray], memory: Sequence[np.ndarray]) -> None:
    """Keep the arrays that have changed."""
    if path is not None:
        pairs = enumerate(zip(before, memory, strict=True))
        changed = {at: new.tobytes() for at, (old, new) in pairs if not np.array_equal(old, new)}
        half = path.with_suffix(f".{os.getpid()}")
        half.write_bytes(pickle.dumps(changed))
        os.replace(half, path)
