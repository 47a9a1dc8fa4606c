"""tests/quick.py: which tests lie closest to a change, and what happens when the time is up."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.quick import Only, chosen, names

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("anybit/planning/gpus.py", "tests/test_gpus.py"),  # named after it
        ("tests/test_bits.py", "tests/test_bits.py"),
        ("tests/tiny.py", "tests/test_allocate.py"),  # imports it
        ("docs/index.md", "tests/test_docs.py"),
        ("benchmarks/gemm.py", "tests/test_scripts.py"),
        (".github/workflows/test.yml", "tests/test_repository.py"),
        ("Makefile", "tests/test_repository.py"),
        ("anybit/kernels/hopper/ptx.py", "tests/kernels/test_hopper_emulated.py"),  # its folder
    ],
)
def test_what_lies_close_to_a_file_is_chosen(file: str, test: str) -> None:
    found = chosen([file])
    assert test in found
    assert all((ROOT / name).is_file() for name in found)


def test_the_closest_come_first_and_each_once() -> None:
    found = chosen(["anybit/errors.py", "tests/test_bits.py", "tests/test_deleted.py"])
    assert found[0] == "tests/test_bits.py"
    assert {*found[1:3]} == {"tests/foreign/test_errors.py", "tests/test_errors.py"}
    assert len({*found}) == len(found)
    assert chosen(["anybit/errors.py", "CITATION.cff"])[:2] == found[1:3]


def test_what_names_the_change_comes_first(items: list[SimpleNamespace]) -> None:
    """A format's names are those that its file registers, of which tests have parameters."""
    file = "anybit/formats/iquant.py"
    assert {"iquant", "iq3_s", "iq2_xs"} <= names([file])
    assert names(["anybit/formats/__init__.py", "docs/index.md"]) == {"formats"}
    tests = chosen([file])
    assert {"tests/test_formats.py", "tests/kernels/test_hopper_emulated.py"} <= {*tests}
    Only(tests, 1000, names([file])).pytest_collection_modifyitems(items)
    assert [item.nodeid.partition("::")[2] for item in items] == [
        "test_a[iq3_s@int8]", "test_iquant", "test_a[xiq3_s]", "test_b[fp6]",
    ]  # fmt: skip


@pytest.fixture
def items() -> list[SimpleNamespace]:
    def item(file: str, name: str) -> SimpleNamespace:
        return SimpleNamespace(path=ROOT / file, nodeid=f"{file}::{name}")

    first, last = "tests/kernels/test_hopper_emulated.py", "tests/test_formats.py"
    return [
        item(last, "test_b[fp6]"), item(last, "test_iquant"),
        item(first, "test_a[xiq3_s]"), item(first, "test_a[iq3_s@int8]"),
    ]  # fmt: skip


def test_only_the_chosen_are_collected() -> None:
    only = Only(["tests/test_bits.py"], 1000)
    assert only.pytest_ignore_collect(ROOT / "tests/test_bits.py") is None
    assert only.pytest_ignore_collect(ROOT / "tests/engine") is None
    assert only.pytest_ignore_collect(ROOT / "tests/test_errors.py")


def test_nothing_begins_when_the_time_is_up(request: pytest.FixtureRequest) -> None:
    for seconds, up in ((1000, nullcontext()), (0, pytest.raises(pytest.skip.Exception))):
        only = Only([], seconds)
        only.pytest_runtest_setup(request.node)  # files are still being imported
        only.pytest_collection_modifyitems([])
        with up:
            only.pytest_runtest_setup(request.node)
