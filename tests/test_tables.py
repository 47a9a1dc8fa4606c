"""docs/tables.py: the pages say what benchmarks/results hold."""

import re
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
sys.path.insert(0, str(DOCS))

import aims  # noqa: E402
import paper_tables  # noqa: E402
import results  # noqa: E402
import tables  # noqa: E402

from anybit.bench import COLUMNS  # noqa: E402

CSV = f"""{",".join(COLUMNS)}
g,d,c,anybit-hopper,fp6,bf16,1,28672,4096,{{us}},1,1,2.5,1.2,{{note}}
g,d,c,anybit-hopper,fp6,fp16,1,28672,4096,30,1,1,2,1.5,plain
g,d,c,anybit-hopper,fp6,bf16,1,28672,4096,9,1,1,2,1.5,pdl sweep: a tile
g,d,c,cublas,fp16,fp16,1,28672,4096,50,1,1,1,1.1,
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An own folder of results."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    for function in (results.read, results.cells):
        function.cache_clear()
    yield tmp_path
    for function in (results.read, results.cells):
        function.cache_clear()


def write(folder, us=20.04, note="pdl"):
    (folder / "h200_gemm.csv").write_text(CSV.format(us=us, note=note))


def test_pages_say_what_was_measured():
    """If it fails: python docs/tables.py, and read what it changed."""
    made, missing = tables.pages()
    assert not missing
    stale = [path.name for path, text in made.items() if path.read_text(encoding="utf-8") != text]
    assert not stale


def test_there_are_tables_and_figures():
    pages, _ = tables.pages()
    text = "".join(path.read_text() for path in pages)
    named = set(re.findall(r"<!-- (\w+), written by docs/tables.py -->", text))
    assert named == {"losses", "tables", *paper_tables.made(), *aims.made()}
    assert len(tables.FIGURE.findall(text)) > 20
    # Markdown would take a comment at the start of a line for the end of the paragraph.
    assert not re.findall(r"(?m)^ *<!-- =", text)


def test_a_time_is_that_of_a_layer(folder):
    write(folder)
    assert results.us("fp6", 28672, 4096, 1) == 20.04  # neither plain nor of the sweep
    assert results.speed("fp6", 28672, 4096, 1) == "2.50"
    with pytest.raises(LookupError, match="no time of humming fp6"):
        results.us("fp6", 28672, 4096, 1, "humming")


def test_figures_follow_the_results(folder):
    write(folder)
    page = 'takes <!-- =us("fp6", 28672, 4096, 1) -->99<!-- . --> us, <!-- =nothing() -->'
    missing: list[str] = []
    new = tables.FIGURE.sub(lambda found: tables.figure(found, missing, "a page"), page)
    assert new == page.replace("99", "20.0")
    lost = '<!-- =us("fp6", 1, 1, 1) -->7<!-- . -->'
    assert tables.FIGURE.sub(lambda found: tables.figure(found, missing, "a page"), lost) == lost
    assert missing == [
        "a page: no time of anybit-hopper fp6 ('fp16', 'bf16') at 1x1, M=1 in h200_gemm.csv; "
        "change the text, or measure"
    ]


def test_tables_keep_what_stands_where_nothing_was_measured(folder):
    page = "a\n<!-- codebook_blocks, written by docs/tables.py -->\nold\n<!-- end -->\nb"
    assert tables.filled(page, paper_tables.made()) == page
    write(folder)
    results.read.cache_clear(), results.cells.cache_clear()
    table = paper_tables.made()["fp6"].splitlines()
    assert table[2:] == ["| 28672x4096 | 1 | 20.0 |  | 50.0 | 2.50 |"]


def test_two_processes_are_compared_by_their_dense_layers(folder):
    """A chip that is 1.2 times as slow from 256 tokens on is not the kernel's fault."""
    ours = {"commit": "a", "M": "256", "us": "120", "vs_cublas_fp16": "1"}
    theirs = {"commit": "b", "M": "256", "us": "100", "vs_cublas_fp16": "1"}
    assert results.against(ours, theirs) == 1
    assert results.against(ours, theirs | {"commit": "a"}) == 1.2
    assert results.against(ours | {"M": "64"}, theirs | {"M": "64"}) == 1.2


def test_a_block_is_the_sum_of_its_layers(folder):
    """Every layer of a block once, and no number where one of them is missing."""
    head, *_, last = CSV.splitlines()
    lines = [head]
    for i, (n, k) in enumerate(sorted({*paper_tables.BLOCKS["8B"], *paper_tables.BLOCKS["70B"]})):
        lines.append(last.replace("28672,4096,50", f"{n},{k},{2**i}"))
    (folder / "h200_codebook.csv").write_text("\n".join(lines))
    shapes = sorted({*paper_tables.BLOCKS["8B"], *paper_tables.BLOCKS["70B"]})
    want = sum(2 ** shapes.index(shape) for shape in paper_tables.BLOCKS["8B"])
    assert paper_tables.block("8B", 1, paper_tables.CUBLAS) == want
    assert paper_tables.block("8B", 2, paper_tables.CUBLAS) is None
    weights = {"8B": 218_103_808, "70B": 855_638_016}  # of Llama-3's blocks
    for model, layers in paper_tables.BLOCKS.items():
        assert sum(n * k for n, k in layers) == weights[model]


@pytest.mark.parametrize(
    ("name", "bits", "letters"),
    [
        ("codebook:group=128", 2.125, "m2v8 g128"),
        ("codebook:m=1,v=4", 2, "m1v4, a scale a row"),
        ("codebook:m=1,group=128 binary", 1.125, "m1v8 g128, binary"),
    ],
)
def test_names_of_codebooks(name, bits, letters):
    assert paper_tables.weight_bits(name) == bits
    assert paper_tables.letters(name) == letters
