"""Scripts of benchmarks/ and docs/tables/ use each other's names as they are.

Most need a GPU to run, so a name that was changed in one of two files would show late.
"""

import argparse
import ast
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = {
    path.stem: ast.parse(path.read_text(encoding="utf-8"))
    for folder in ("benchmarks", "docs/tables")
    for path in (ROOT / folder).glob("*.py")
}
README = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^python (benchmarks/.+)$", README, re.M)


def test_names_of_other_scripts_are_there() -> None:
    has = {name: defined(tree) for name, tree in SCRIPTS.items()}
    used = [(name, *pair) for name, tree in SCRIPTS.items() for pair in asked(tree)]
    assert len(used) > 100
    assert not [f"{by}: {of}.{name}" for by, of, name in used if name not in has[of]]


class Parsed(Exception):
    """The script knows its arguments; it is not run any further."""


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_page_are_understood(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script, *arguments = shlex.split(command)
    for name in ("parse_args", "parse_intermixed_args"):
        parse = getattr(argparse.ArgumentParser, name)

        def parse_only(self, args=None, parse=parse) -> NoReturn:
            raise Parsed(parse(self, args))

        monkeypatch.setattr(argparse.ArgumentParser, name, parse_only)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # as Python does for a script
    with pytest.raises(Parsed) as parsed:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    if "--out" in arguments:
        assert str(parsed.value.args[0].out) == arguments[arguments.index("--out") + 1]


def test_rows_of_other_columns_are_not_added(tmp_path: Path) -> None:
    add_rows = runpy.run_path(str(ROOT / "benchmarks" / "csv_rows.py"))["add_rows"]
    path = tmp_path / "rows.csv"
    add_rows(path, [{"a": 1, "b": 2}])
    add_rows(path, [{"a": 3, "b": 4}])
    with pytest.raises(SystemExit, match=r"has the columns a,b, and rows have a,c"):
        add_rows(path, [{"a": 5, "c": 6}])
    assert path.read_text() == "a,b\n1,2\n3,4\n"


def defined(tree: ast.Module) -> set[str]:
    """The names of a module: what is imported, assigned or defined outside of functions."""
    found, todo = set(), list[ast.AST](tree.body)
    for node in todo:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        todo += ast.iter_child_nodes(node)
    return found


def asked(tree: ast.Module) -> list[tuple[str, str]]:
    """(Script, name) of the other scripts, imported from them or as their attributes."""
    pairs, modules = [], dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {a.asname or a.name: a.name for a in node.names if a.name in SCRIPTS}
        if isinstance(node, ast.ImportFrom) and node.module in SCRIPTS:
            pairs += [(node.module, alias.name) for alias in node.names]
    named = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    places = [(node.value.id, node.attr) for node in named if isinstance(node.value, ast.Name)]
    return pairs + [(modules[name], attribute) for name, attribute in places if name in modules]
