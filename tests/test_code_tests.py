"""Lines of held-out modules whose code is run (`benchmarks/code_tests.py`)."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import code_tests
from code_tests import TESTS, passed, results, source_of, statements


@pytest.mark.parametrize("name", ["colorsys", "heapq", "textwrap"])
def test_a_line_passes_as_it_is_and_not_when_it_is_lost(name: str) -> None:
    lines = source_of(name).splitlines()
    some = statements(name)[::15]
    assert len(some) > 3
    assert all(passed([(name, at, lines[at]) for at in some]))
    lost = passed([(name, at, code_tests.blank(lines[at]) + "pass") for at in some])
    assert sum(lost) < len(some) / 2  # some lines only save time
    assert not any(passed([(name, at, "    (") for at in some]))


def test_code_that_never_ends_or_writes_files_fails(tmp_path: Path) -> None:
    source = source_of("colorsys").splitlines()
    at = next(i for i in statements("colorsys") if "maxc = max" in source[i])
    kept = source[at].strip()
    room = tmp_path / "new"
    room.touch()
    writes = f"with open({str(room)!r}, 'a') as f: f.write('x') + f.flush()"
    lines = ["while True: maxc = 1", writes, "maxc = bytearray(1 << 31)", kept + " # as before"]
    assert passed([("colorsys", at, "    " + line) for line in lines]) == [False] * 3 + [True]
    assert room.read_text() == ""


@pytest.mark.parametrize("name", TESTS)
def test_expressions_give_the_same_twice_and_mostly_no_errors(name: str) -> None:
    first = results(name, source_of(name))
    assert first == results(name, source_of(name))
    errors = sum(text.isidentifier() and text.endswith(("Error", "Exception")) for text in first)
    assert errors <= len(first) / 2
