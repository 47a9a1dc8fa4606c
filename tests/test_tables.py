"""docs/tables/fill.py: the tables of the pages equal benchmarks/results."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "tables"))

import accuracy_tables
import codebook_tables
import fill
import kernel_tables
import paper_tables
import peer_tables
import results

from anybit.measure.bench import COLUMNS

CSV = f"""{",".join(COLUMNS)}
g,d,c,anybit-hopper,fp6,bf16,1,28672,4096,{{us}},1,1,2.5,1.2,{{note}}
g,d,c,anybit-hopper,fp6,fp16,1,28672,4096,30,1,1,2,1.5,
g,d,c,anybit-hopper,fp6,bf16,1,28672,4096,9,1,1,2,1.5,pdl sweep: a tile
g,d,c,cublas,fp16,fp16,1,28672,4096,50,1,1,1,1.1,
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of results."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    for function in (results.read, results.cells):
        function.cache_clear()
    yield tmp_path
    for function in (results.read, results.cells):
        function.cache_clear()


def write(folder, us=20.04, note=""):
    (folder / "h200_gemm.csv").write_text(CSV.format(us=us, note=note))


def test_tables_equal_the_measurements():
    """If it fails: python docs/tables/fill.py, and read what it changed."""
    made = fill.pages()
    stale = [path.name for path, text in made.items() if path.read_text(encoding="utf-8") != text]
    assert not stale


def test_every_table_stands_on_a_page():
    text = "".join(path.read_text() for path in fill.pages())
    named = re.findall(r"<!-- (\w+), written by docs/tables/fill.py -->", text)
    assert sorted(named) == sorted(fill.tables())
    assert all(fill.tables().values())


def test_bits_at_equal_kl(folder):
    """Halfway between two points in the logarithm of their KLs; none beyond the curve's ends."""
    lines = ["model,spec,method,text,bits,kl", "m,bf16,dense,,16,0"]
    lines += ["m,trellis,gptq,code,2,0.01", "m,trellis:bits=4,gptq,code,4,0.0001"]
    lines += ["m,trellis,rtn,,2,0.5", "m,trellis:bits=5,rtn,,5,0.001"]  # not on the curve
    lines += ["m,int4,gptq,code,4,0.001", "m,int2,gptq,code,2,0.1", "m,fp6,rtn,,6,0.00001"]
    (folder / "some.csv").write_text("\n".join(lines))
    table = accuracy_tables.front("some", "m")
    assert "| int4, gptq | 4.00 | 0.00100 | 3.00 | +1.00 |" in table
    assert "| int2, gptq | 2.00 | 0.10000 |  |  |" in table
    assert "| fp6, rtn | 6.00 | 0.00001 |  |  |" in table
    assert "int4, gptq, which takes 1.00 bits more. 1 of 1" in table


def test_a_time_is_that_of_a_layer(folder):
    """Of the faster dtype, and none of a sweep of tiles."""
    write(folder)
    column = kernel_tables.ours("", "fp6")
    row = results.find(results.cells()[28672, 4096, 1], column)
    assert row is not None
    assert results.us(row) == "20.0"


def test_a_page_follows_the_results(folder):
    page = "a\n<!-- fp6, written by docs/tables/fill.py -->\nold\n<!-- end -->\nb"
    assert fill.filled(page, fill.tables()) == page  # nothing measured: the old table stays
    write(folder)
    results.read.cache_clear()
    results.cells.cache_clear()
    new = fill.filled(page, fill.tables())
    assert new.startswith("a\n<!-- fp6")
    assert new.endswith("<!-- end -->\nb")
    assert "| 28672x4096 | 1 | 20.0 |  | 50.0 | 2.50x |" in new
    assert "old" not in new


def test_tables_of_another_gpu_are_shown(folder, monkeypatch, tmp_path_factory):
    monkeypatch.setattr(results, "DEVICE", "h200")  # is put back
    write(folder)
    own = tmp_path_factory.mktemp("own")
    (folder / "h200_gemm.csv").rename(own / "h100_gemm.csv")
    text = fill.shown(own)
    assert "## docs/papers/fp6.md: fp6\n\n" in text
    assert "| 28672x4096 | 1 | 20.0 |  | 50.0 | 2.50x |" in text
    assert "engine" not in text  # nothing was measured
    (own / "a100_gemm.csv").write_text("")
    with pytest.raises(SystemExit, match="has files of a100, h100; keep those of one GPU"):
        fill.shown(own)


def test_half_of_a_model_is_what_two_gpus_take_at_least(folder):
    steps = "model,format,kv,batch,context,step_us,tokens_per_s,backends\n"
    steps += "llama-3-70b,fp6,model,4,1280,20000,200,hopper\n"
    steps += "llama-3-70b-half,bf16,model,4,1280,25000,160,\n"
    (folder / "h200_papers_engine.csv").write_text(steps)
    assert paper_tables.gains_at("4") == {"1280": 2.5}
    assert "| 1,280 | 4 | 20.0 | 25.0 | 200 | 80 | 2.50x |" in paper_tables.llama70b()
    with pytest.raises(LookupError, match="batch 16"):
        paper_tables.gains_at("16")


def test_a_peak_is_of_one_run_and_fits(folder):
    head = "model,format,kv,batch,context,step_us,tokens_per_s,batch_in_80gb,backends\n"
    rows = "a,bf16,int8,64,1280,1,900,64,\na,liquid@int8,int8,64,1280,1,1200,64,hopper\n"
    (folder / "h200_engine.csv").write_text(head + rows)
    path = folder / "h200_papers_engine.csv"
    path.write_text(head + "a,bf16,int8,64,1280,1,100,64,\n")  # a run without liquid
    assert paper_tables.over_best("a") == 1200 / 900
    results.read.cache_clear()
    rows = "a,bf16,int8,8,1280,1,500,60,\na,bf16,int8,64,1280,1,700,60,\n"
    path.write_text(head + rows + "a,liquid@int8,int8,64,1280,1,800,90,hopper\n")
    assert paper_tables.over_best("a") == 800 / 500
    assert paper_tables.peak("a", "int8@int8") is None


def test_steps_are_compared_batch_by_batch(folder):
    head = "model,format,kv,batch,context,step_us,backends\n"
    rows = "llama-3-8b,int8@int8,int8,16,1280,3000,hopper\nllama-3-8b,int8@int8,int8,1,1280,2000,\n"
    rows += "llama-3-8b,liquid@int8,int8,16,1280,2400,hopper\n"
    rows += "llama-3-8b,liquid@int8,int8,16,1280,9600,triton\n"
    (folder / "h200_papers_engine.csv").write_text(head + rows)
    assert paper_tables.system("int8@int8") == {"16": 1.25}
    assert paper_tables.without() == {"16": 4.0}
    with pytest.raises(LookupError, match="fp8"):
        paper_tables.system("fp8@fp8")


def test_a_layer_is_the_sum_of_its_products(folder):
    rows = "model,format,N,K,M,us\n"
    rows += "".join(f"a,{f},{n},1,8,{us}\n" for n, f, us in ((1, "bf16", 9), (2, "bf16", 6)))
    (folder / "h200_layers.csv").write_text(rows + "a,fp6,1,1,8,3\na,fp6,2,1,8,2\n")
    assert paper_tables.ratios_of("a", "bf16", "fp6", 8) == 3


def test_losses_are_counted(folder):
    head, row, *_, dense = CSV.splitlines()
    peer = dense.replace("cublas,fp16", "humming,fp6")
    for us, counts in ((49, "0 | 1 | 0"), (52, "0 | 0 | 1"), (40, "1 | 0 | 0")):
        lines = [head, row.format(us=us, note=""), peer, dense.replace(",50,", ",60,")]
        (folder / "h200_gemm.csv").write_text("\n".join(lines))
        results.read.cache_clear()
        results.cells.cache_clear()
        text = kernel_tables.losses()
        assert f"| fp6 | 1 | {counts} |" in text
        assert ("M=1 1.04 (humming)" in text) == (us == 52)


def test_a_block_is_the_sum_of_its_layers(folder):
    """Every layer of a block once, and no number where one of them is missing."""
    head, *_, last = CSV.splitlines()
    shapes = sorted({*codebook_tables.BLOCKS["8B"], *codebook_tables.BLOCKS["70B"]})
    lines = [head]
    for i, (n, k) in enumerate(shapes):
        lines.append(last.replace("28672,4096,50", f"{n},{k},{2**i}"))
    (folder / "h200_codebook.csv").write_text("\n".join(lines))
    want = sum(2 ** shapes.index(shape) for shape in codebook_tables.BLOCKS["8B"])
    assert codebook_tables.block("8B", 1, results.CUBLAS) == want
    assert codebook_tables.block("8B", 2, results.CUBLAS) is None
    weights = {"8B": 218_103_808, "70B": 855_638_016}  # of Llama-3's blocks
    for model, layers in codebook_tables.BLOCKS.items():
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
    assert codebook_tables.weight_bits(name) == bits
    assert codebook_tables.letters(name) == letters


PEERS = f"""{",".join(COLUMNS)}
g,d,c,cublas,bf16,bf16,1,64,128,50,1,1,1,1.1,
g,d,c,anybit-hopper,int4:group=128,fp16,1,64,128,10,1,1,2,1.5,
g,d,c,humming,int4:group=128,fp16,1,64,128,30,1,1,2,1.5,
g,d,c,machete,int4:group=128,bf16,1,64,128,20,1,1,2,1.5,
g,d,c,anybit-hopper,fp6,fp16,1,64,128,10,1,1,2,1.5,
g,d,c,cublas,bf16,bf16,2,64,128,50,1,1,1,1.1,
g,d,c,anybit-hopper,int4:group=128,fp16,2,64,128,40,1,1,2,1.5,
g,d,c,humming,int4:group=128,fp16,2,64,128,20,1,1,2,1.5,
"""


def test_ours_stand_beside_the_fastest_other_of_one_process(folder):
    (folder / "h200_peers.csv").write_text(PEERS)
    found = peer_tables.matches(peer_tables.DENSE, "h200_peers")
    assert [(x.m, x.other, x.ratio) for x in found] == [(1, "machete", 2.0), (2, "humming", 0.5)]
    beside = "`int4:group=128` | humming, Machete"
    assert f"| {beside} | 2.00x | 0.50x | **1.00x** | 1 of 2 |" in peer_tables.means(found)
    assert f"| {beside} | 1.00x |  | 1.00x | 1 of 2 |" in peer_tables.few_and_many(found)
    assert "| 64x128 | 2.00 machete | 0.50 humming |" in peer_tables.ratios(found)
    assert peer_tables.worst(found).splitlines() == [
        "- `int4:group=128` beside humming, Machete: the worst is 0.50 (64x128, M=2, humming).",
        "    - 64x128: M=2 0.50 (humming)",
    ]
    assert peer_tables.worst(found[:1]) == "None."
    assert peer_tables.worst([]) == ""


def test_several_processes_are_named(folder):
    write(folder)
    assert kernel_tables.about() == "1 weights, g, d: all kernels of a weight in one process."
    text = CSV.format(us=20.04, note="").replace("g,d,c,cublas", "g,d,other,cublas")
    (folder / "h200_gemm.csv").write_text(text)
    results.read.cache_clear()
    results.cells.cache_clear()
    # 9 and 30 us at twice the speed of a dense layer that takes 50 here.
    assert "took 0.36 to 1.20 times as long" in kernel_tables.about()


def test_experts_stand_with_their_model(folder):
    head, *_ = PEERS.splitlines()
    rows = [
        "g,d,c,anybit-hopper,liquid,int8-given,16,2048,768,20,1,1,2,1.5,expected 19",
        "g,d,c,humming,int4:group=64,int8-given,16,2048,768,19,1,1,2,1.5,indexed",
        "g,d,c,humming,int4:group=64,int8-given,16,2048,768,30,1,1,2,1.5,grouped_contiguous",
    ]
    (folder / "h200_expert_peers.csv").write_text("\n".join([head, *rows]))
    found = peer_tables.matches(peer_tables.EXPERTS, "h200_expert_peers")
    text = peer_tables.worst(found, peer_tables.expert)
    assert text.endswith("    - Qwen3-30B-A3B 2048x768: M=16 0.95 (humming)")
