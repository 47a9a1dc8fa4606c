"""Make a source tree what PyPI shows: `python tests/published.py TREE [REPOSITORY]`.

PyPI resolves no relative link. REPOSITORY is the address of the project's pages; without one,
README's links stay as they are, and the project has no addresses.
"""

import re
import sys
from pathlib import Path

LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?!https?:|#|mailto:)([^)\s]+)(\))")


def absolute(text: str, repository: str) -> str:
    """README with links and pictures that work anywhere."""
    return LINK.sub(
        lambda m: f"{m[1]}{m[2]}{repository}/{'raw' if m[1] else 'blob'}/HEAD/{m[3]}{m[4]}", text
    )


def with_addresses(pyproject: str, repository: str) -> str:
    """pyproject.toml with `[project.urls]`."""
    pages = {"Repository": "", "Issues": "/issues", "Changelog": "/blob/HEAD/CHANGELOG.md"}
    lines = "".join(f'{name} = "{repository}{end}"\n' for name, end in pages.items())
    return pyproject.replace("[project.scripts]", f"[project.urls]\n{lines}\n[project.scripts]", 1)


def main(tree: Path, repository: str = "") -> None:
    if not repository:
        print("note: REPOSITORY is not set: README's relative links do not work on PyPI")
        return
    for name, change in (("README.md", absolute), ("pyproject.toml", with_addresses)):
        path = tree / name
        path.write_text(change(path.read_text("utf-8"), repository.rstrip("/")), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
