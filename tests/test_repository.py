"""Files for those who host and build the project: they parse, and agree with each other."""

import ast
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
import yaml

import anybit
from tests.published import absolute, with_addresses

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
        for job in parsed(path)["jobs"].values():
            called |= set(job.get("strategy", {}).get("matrix", {}).get("target", ()))
    assert {"pytest", "release", "test-newest"} <= called <= targets


def test_workflows_use_actions_of_others_by_commit_and_release_what_passes() -> None:
    workflows = {path.name: parsed(path) for path in (ROOT / ".github/workflows").glob("*.yml")}
    jobs = [job for workflow in workflows.values() for job in workflow["jobs"].values()]
    used = [step["uses"] for job in jobs for step in job.get("steps", ()) if "uses" in step]
    assert used
    assert not [name for name in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", name)]
    assert all("timeout-minutes" in job or "uses" in job for job in jobs)
    release = workflows["release.yml"]["jobs"]
    assert release["test"]["uses"] == "./.github/workflows/test.yml"
    assert release["build"]["needs"] == "test"
    assert release["publish"]["needs"] == "build"


def test_the_lock_has_every_package_that_is_asked_for() -> None:
    """`make lock` writes it; pip would take the newest version of a package that it lacks."""
    extras = PYPROJECT["project"]["optional-dependencies"]
    asked = [*PYPROJECT["project"]["dependencies"], *PYPROJECT["build-system"]["requires"]]
    asked += [line for name in extras for line in extras[name] if not line.startswith("anybit")]
    names = {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in asked}
    lock = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.partition(" ;")[0].split("==") for line in lock if "==" in line)
    assert names - {"lm-eval"} <= pins.keys()  # the extra `eval` is in no command of README's
    assert pins["torch"] == PYPROJECT["tool"]["uv"]["override-dependencies"][0].partition("==")[2]


PEERS = {"datasets", "llama-cpp-python", "vllm"}  # users bring them; `datasets` with lm-eval
BROUGHT_BY = {  # what no name of a declared package, or of one that it asks for, tells
    "cuda": "nvidia-cutlass-dsl",
    "cutlass": "nvidia-cutlass-dsl",
    "llama_cpp": "llama-cpp-python",
    "pydantic_core": "fastapi",
}


def test_packages_that_are_imported_are_declared() -> None:
    """By the base or an extra that users install: a room under `serve` asks for its own alone."""
    project = PYPROJECT["project"]
    declared = {
        extra: {name for line in lines if (name := package(line)) != "anybit"}
        for extra, lines in project["optional-dependencies"].items()
        if extra not in ("dev", "docs")
    }
    base = {package(line) for line in project["dependencies"]}
    providers, missing = packages_distributions(), []
    for path in sorted((ROOT / "anybit").rglob("*.py")):
        room = path.relative_to(ROOT / "anybit").parts[0]
        extras = ("serve", "plot") if room == "serve" else declared
        at_hand = base.union(*(declared[extra] for extra in extras))
        at_hand |= {package(line) for name in at_hand for line in brought(name)}
        for name in imports(path) - sys.stdlib_module_names - {"anybit"}:
            by = [BROUGHT_BY[name]] if name in BROUGHT_BY else providers.get(name, [name])
            if not {*map(package, by)} & (at_hand | PEERS):
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert not missing


def package(requirement: str) -> str:
    """The name of a package, as pip compares them."""
    found = re.match(r"[\w.-]+", requirement)
    assert found
    return re.sub(r"[-_.]+", "-", found[0]).lower()


@cache
def brought(name: str) -> list[str]:
    """What a package asks for, apart from its own extras."""
    try:
        return [line for line in requires(name) or () if "extra ==" not in line]
    except PackageNotFoundError:
        return []


def imports(path: Path) -> set[str]:
    """The packages that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_pypi_gets_links_that_work() -> None:
    home = "https://example.org/anybit"
    text = absolute("![a](docs/a.png) [b](docs/b.md#c) [d](https://e.org) [f](#g)", home)
    pages = f"![a]({home}/raw/HEAD/docs/a.png) [b]({home}/blob/HEAD/docs/b.md#c)"
    assert text == f"{pages} [d](https://e.org) [f](#g)"
    readme = absolute((ROOT / "README.md").read_text("utf-8"), home)
    assert not re.findall(r"\]\((?!https?:|#)[^)]*\)", readme)
    project = tomllib.loads(with_addresses((ROOT / "pyproject.toml").read_text(), home))
    assert project["project"]["urls"]["Repository"] == home
    assert project["project"]["scripts"] == PYPROJECT["project"]["scripts"]


def test_make_finds_the_tests_that_need_a_gpu() -> None:
    """It looks for what they ask for, in some folders: no other has such a test."""
    search = re.search(r"grep -lwE '([^']+)' ([^)]+)\)", (ROOT / "Makefile").read_text())
    assert search
    words, places = search.groups()
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
