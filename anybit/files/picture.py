"""Whether a plot can be written, asked before the work is done."""

from pathlib import Path

from anybit.errors import InvalidInput
from anybit.files.directory import check_folder

PICTURES = (".png", ".svg", ".pdf")


def require_matplotlib() -> None:
    """Raise ImportError that names the remedy when matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError(
            "the plot needs matplotlib, which is in the extra `plot`: pip install 'anybit[plot]', "
            "or in a clone of the repository: pip install --editable '.[plot]'"
        ) from None


def check_picture(path: str | Path) -> None:
    """Raise ImportError or ValueError when a plot cannot be written; call it before the work."""
    require_matplotlib()
    path = Path(path)
    if path.suffix not in PICTURES:
        raise InvalidInput(f"{path}: a plot's name ends in {', '.join(PICTURES)}")
    check_folder(path)
