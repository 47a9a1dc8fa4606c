"""Files for those who host and build the project: they parse, and agree with each other."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import anybit

ROOT = Path(__file__).parents[1]
FILES = [
    *(ROOT / ".github").rglob("*.yml"),
    ROOT / ".pre-commit-config.yaml",
    ROOT / "CITATION.cff",
]
FORMS = [p for p in FILES if p.parent.name == "ISSUE_TEMPLATE" and p.name != "config.yml"]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def parsed(path: Path) -> dict:
    return yaml.safe_load(path.read_text("utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_yaml_parses(path: Path) -> None:
    assert isinstance(parsed(path), dict)


@pytest.mark.parametrize("path", FORMS, ids=lambda p: p.name)
def test_issue_forms_have_what_github_requires(path: Path) -> None:
    form = parsed(path)
    assert {"name", "description", "body"} <= form.keys()
    fields = [field["id"] for field in form["body"]]
    assert len(fields) == len(set(fields))
    assert all(field["attributes"]["label"] for field in form["body"])


def test_workflows_run_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    called = set()
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        called |= set(re.findall(r"\bmake ([a-z0-9-]+)", path.read_text()))
    assert called
    assert called <= targets


def test_make_finds_the_tests_that_need_a_gpu_or_emulate_every_kernel() -> None:
    """It looks for what they ask for, in some folders: no other has such a test."""
    searches = re.findall(r"grep -lwE '([^']+)' ([^)]+)\)", (ROOT / "Makefile").read_text())
    assert len(searches) == 2
    for words, places in searches:
        looked = {path for place in places.split() for path in ROOT.glob(place)}
        asking = {
            path
            for path in (ROOT / "tests").rglob("test_*.py")
            if re.search(rf"\b({words})\b", path.read_text(encoding="utf-8"))
        }
        assert asking
        assert asking <= looked


def test_the_versions_of_python_are_those_that_are_tested() -> None:
    matrix = parsed(ROOT / ".github/workflows/test.yml")["jobs"]["test"]["strategy"]["matrix"]
    classifiers = PYPROJECT["project"]["classifiers"]
    stated = [c.rpartition(" ")[2] for c in classifiers if re.search(r":: 3\.\d+$", c)]
    assert matrix["python"] == stated
    assert PYPROJECT["project"]["requires-python"] == f">={stated[0]}"


def test_the_citation_has_the_version() -> None:
    assert parsed(ROOT / "CITATION.cff")["version"] == anybit.__version__


def test_types_are_relaxed_for_modules_that_exist() -> None:
    overrides = PYPROJECT["tool"]["mypy"]["overrides"]
    named = {name for override in overrides for name in override["module"]}
    ours = {name.removesuffix(".*") for name in named if name.startswith("anybit.")}
    places = [ROOT / name.replace(".", "/") for name in ours]
    assert places
    assert not [p for p in places if not p.is_dir() and not p.with_suffix(".py").is_file()]
