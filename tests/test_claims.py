"""The papers' tables: every place is there, and every claim has a figure or a reason."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs/tables"))

import claims  # noqa: E402

PAPERS = claims.papers()


@pytest.mark.parametrize("paper", PAPERS)
def test_every_place_is_there(paper: str) -> None:
    """A file, or rows of a CSV; else the reason why nothing was run."""
    table = PAPERS[paper]()  # LookupError where a figure's rows are missing
    assert len(table) > 10
    for claim in table:
        if claim.where.startswith(claims.NOT_RUN):
            assert len(claim.where) > len(claims.NOT_RUN) + 10, claim.what
            assert not claim.ours, claim.what
            continue
        assert claim.ours, claim.what
        for place in claims.places(claim.where):
            if place.partition(": ")[0].endswith(".csv"):
                assert claims.found(place), f"{claim.what}: {place}"
            else:
                assert (ROOT / place).is_file(), f"{claim.what}: {place}"


def test_a_place_without_rows_is_seen() -> None:
    assert claims.found("h200_ablation.csv: scheme=fp6; M=8/16")
    for wrong in ("h200_ablation.csv: scheme=fp7", "h200_nothing.csv", "anybit/none.py"):
        with pytest.raises(LookupError):
            claims.found(wrong)
    assert claims.places("not run: needs a GPU, or two") == []
