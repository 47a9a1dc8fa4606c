"""`anybit cache`: what lies in anybit's cache folder, and how to be rid of it."""

import shutil
from pathlib import Path

from anybit.files.directory import cache_folder, megabytes

KINDS = {  # pattern in the folder: what it is
    "converted/*": "models of other tools, converted",
    "cute": "kernels for H100 and H200",
    "native": "kernels for this processor",
    "tiles-*.json": "tiles that `anybit tune` has found",
}


def show() -> str:
    """The folder, and what each kind of contents takes there."""
    lines = [str(cache_folder())]
    for pattern, what in KINDS.items():
        found = entries(pattern)
        each = found if pattern == "converted/*" else []
        if found:
            lines.append(f"{megabytes(sum(map(size, found))):>10}  {what}")
        lines += [f"{megabytes(size(path)):>14}  {path.name}" for path in each]
    return "\n".join(lines if len(lines) > 1 else [*lines, "empty"])


def clear() -> str:
    """Remove what anybit has put into the folder, and nothing else that lies there."""
    freed = 0
    for path in (path for pattern in KINDS for path in entries(pattern)):
        freed += size(path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return f"removed {megabytes(freed)}"


def entries(pattern: str) -> list[Path]:
    return sorted(cache_folder().glob(pattern))


def size(path: Path) -> int:
    """Bytes of a file, or of all files below a directory."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files if file.is_file())
