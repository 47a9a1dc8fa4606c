"""Run the tests that lie closest to what differs from main, for at most so many seconds.

    python tests/quick.py [--base main] [--seconds 40]

First the tests whose names have a changed file's, or a format's that it registers: those of such
files, and parameters of others. Then files of tests that import or name it; where there are none,
all that import from its folder, or from the folder above. Tests left when the time is up are
counted as skipped: `make test` runs them all.
"""

import argparse
import ast
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import pytest

from anybit.core.format import known_formats

ROOT = Path(__file__).parents[1]


class Only:
    """Runs some files of tests, and skips what begins after the time is up.

    Tests whose names have one of `names` come first; others follow in the order of the files.

    Files given on pytest's command line would be collected even where a conftest.py leaves them
    out, since a package is missing.
    """

    def __init__(self, tests: Sequence[str], seconds: float, names: Iterable[str] = ()):
        self.names = word(names)
        self.places = {ROOT / test: place for place, test in enumerate(tests)}
        self.seconds, self.end = seconds, float("inf")

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        other = collection_path.name.startswith("test_") and collection_path not in self.places
        return True if other else None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(
            key=lambda item: (not self.names.search(item.nodeid), self.places[item.path]),
        )
        self.end = time.monotonic() + self.seconds  # of tests, not of what they import

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() >= self.end:
            pytest.skip("the time is up")


def changed(base: str) -> list[str]:
    """Files that differ from where this branch left the base, or that git does not know yet."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.split("\n")[:-1]

    (start,) = git("merge-base", base, "HEAD")
    differ = git("diff", "--name-only", start)
    return differ + git("ls-files", "--others", "--exclude-standard")


def word(names: Iterable[str]) -> re.Pattern[str]:
    """Finds any of some names where no letter or digit goes on; nothing where there are none."""
    any_of = "|".join(map(re.escape, sorted(names))) or "(?!)"
    return re.compile(rf"(?<![a-z0-9])(?:{any_of})(?![a-z0-9])", re.IGNORECASE)


def formats(file: str) -> set[str]:
    """Names of formats that a file registers."""
    module = ".".join(Path(file).with_suffix("").parts)
    return {name for name, fmt in known_formats() if fmt.__module__ == module}


def names(files: Iterable[str]) -> set[str]:
    """What tests of these files may be called by."""
    code = [Path(f) for f in files if f.endswith(".py") and f.startswith(("anybit/", "tests/"))]
    stems = {path.parent.name if path.stem == "__init__" else path.stem for path in code}
    return stems.union(*(formats(str(path)) for path in code))


@cache
def imported(text: str) -> set[str]:
    """Modules that a file imports, and names from them as if they were modules, too."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def chosen(files: Iterable[str]) -> list[str]:
    """Files of tests, the closest first."""
    texts = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
    }
    modules = {test: imported(text) for test, text in texts.items()}
    ranks: dict[str, int] = {}

    def take(rank: int, tests: Iterable[str]) -> bool:
        before = [ranks.setdefault(test, rank) for test in tests]
        return bool(before)

    for file in files:
        path = Path(file)
        module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        top = path.parts[0] if len(path.parts) > 1 else path.name
        close = [take(0, {file} & texts.keys())]
        close += [take(1, [t for t in texts if Path(t).stem == f"test_{path.stem}"])]
        if path.suffix == ".py" and top in ("anybit", "tests"):
            close += [take(2, [t for t in texts if module in modules[t]])]
            if called := formats(file):  # in a text, or in the list of all formats
                found, every = word(called), {"tests.specs.SPECS", "tests.specs.NAMES"}
                take(4, [t for t in texts if found.search(texts[t]) or every & modules[t]])
        elif top != "anybit":
            named = re.compile(rf"(?<![\w.]){re.escape(top)}(?=[\"/`])")
            close += [take(2, [t for t in texts if named.search(texts[t])])]
        if top == "anybit" and not any(close):
            for folder in list(path.parents)[:-2]:  # anybit itself is everybody's
                room = ".".join(folder.parts) + "."
                if take(3, [t for t in texts if any(m.startswith(room) for m in modules[t])]):
                    break
    return sorted(ranks, key=lambda test: (ranks[test], test))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base", default="main")
    parser.add_argument("--seconds", type=float, default=40)
    args = parser.parse_args()
    files = changed(args.base)
    tests = chosen(files)
    if not tests:
        print(f"no test is close to what differs from {args.base}")
        return 0
    print(f"{len(tests)} files of tests: {' '.join(tests)}", flush=True)
    options = ["-q", "-rs", "-x", "-p", "no:randomly", str(ROOT / "tests")]
    return int(pytest.main(options, [Only(tests, args.seconds, names(files))]))


if __name__ == "__main__":
    sys.exit(main())
