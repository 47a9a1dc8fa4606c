"""docs/tables/fill.py: the tables of the pages equal benchmarks/results."""

import re
import sys
from itertools import product
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "tables"))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import accuracy_tables
import codebook_tables
import engine_tables
import fill
import first_tables
import paper_tables
import peer_tables
import plot
import results

from anybit.measure.bench import COLUMNS

ROOT = Path(__file__).parents[1]
CSV = f"""{",".join(COLUMNS)}
g,d,c,anybit-hopper,fp6,bf16,1,28672,4096,{{us}},1,1,2.5,1.2,{{note}}
g,d,c,anybit-hopper,fp6,fp16,1,28672,4096,30,1,1,2,1.5,
g,d,c,anybit-hopper,fp6,bf16,1,28672,4096,9,1,1,2,1.5,pdl sweep: a tile
g,d,c,cublas,fp16,fp16,1,28672,4096,50,1,1,1,1.1,
"""
STEPS = """model,format,kv,batch,step_us,backends
llama-3-8b,bf16,int8,1,4000,
llama-3-8b,fp6,int8,1,{us},hopper
llama-3-8b,fp6+int8,int8,1,1000,hopper
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


def test_tables_equal_the_measurements():
    """If it fails: python docs/tables/fill.py, and read what it changed."""
    made = fill.pages()
    stale = [path.name for path, text in made.items() if path.read_text(encoding="utf-8") != text]
    assert not stale


def test_every_table_stands_on_a_page():
    text = "".join(path.read_text() for path in fill.pages())
    named = re.findall(r"<!-- (\w+), written by docs/tables/fill.py -->", text)
    named.remove("cards")  # README.md and docs/formats.md
    assert sorted(named) == sorted(fill.tables())
    assert all(fill.tables().values())


def test_the_first_page_has_the_numbers_of_the_pages_behind_it():
    """One number for one quantity: each stands in the table that its page shows."""
    benchmarks = (ROOT / "docs/benchmarks.md").read_text()
    accuracy = (ROOT / "docs/accuracy.md").read_text()
    for row in first_tables.large().splitlines()[3:-2]:
        bits, _, lost, kl = (cell.strip() for cell in row.split("|")[3:7])
        assert f"| {bits} | {lost} | {kl} |" in accuracy
    for row in first_tables.speed().splitlines()[2:]:
        name, _, one, many = (cell.strip() for cell in row.split("|")[1:-1])
        line = next(x for x in benchmarks.splitlines() if x.startswith(f"| {name.strip('`')} |"
                    if name == "`bf16`" else f"| {name} | bf16 |"))  # fmt: skip
        assert f"| {one.partition(' ')[0]} |" in line
        assert f"| {many.partition(' ')[0]} |" in line


def test_other_tools_stand_beside():
    lines = first_tables.beside().splitlines()[2:]
    assert len(lines) == len(first_tables.FILES) + len(first_tables.PACKAGES) + 1
    assert "| anybit, `gptq` | 4.38 | 0.0618 | 0.0897 |" in lines


def test_a_card_holds_the_weights_and_a_cache():
    """8B in int8 has 9.1 GB, 8,192 tokens 1.07: they fit in 90 % of 12 GB and not of 11."""
    model = first_tables.LLAMA_8B
    assert model.cached * 2 * first_tables.TOKENS == 1_073_741_824
    assert first_tables.most(model, 12) == "8 bits, 9.1"
    assert first_tables.most(model, 11) == "6 bits, 7.3"
    assert first_tables.most(model, 3) == "-"


def test_sizes_are_those_of_the_engine():
    """Gigabytes that are computed equal the ones that a run measured."""
    rows = [r for r in results.read("h200_engine_steps") if "+" not in r["format"]]
    for row in rows:
        if row["format"] != "trellis":  # whose bits depend on nothing but its name
            assert first_tables.LLAMA_8B.gigabytes(row["format"]) == pytest.approx(
                float(row["weights_gb"]), abs=0.02
            )
    assert rows


def test_a_speed_is_over_the_bf16_of_its_run(folder):
    (folder / "h200_engine_steps.csv").write_text(STEPS.format(us=2000))
    assert first_tables.rate("fp6") == "500 (2.0x)"
    assert first_tables.rate("bf16") == "250"
    assert first_tables.rate("int4") == first_tables.NOT_RUN
    assert "| `fp6` | bf16 | 2.00 | 500 | 2.00x |" in engine_tables.engine_steps()
    assert "| `fp6` | int8 | 1.00 | 1,000 | 4.00x |" in engine_tables.engine_steps()


def test_a_star_is_said_where_a_loss_is_of_another_text():
    cells = [line.split("|") for line in first_tables.hardware().splitlines()[2:]]
    stars = {row[2].strip() for row in cells if row[4].strip().endswith("*")}
    assert stars == {"`int4:group=32`, calibrated"}


def test_traffic_is_the_newest_run_of_random_arrivals_with_new_prompts(folder):
    titles = "server,weights,load,rate_per_s,known_share,ttft_p50_ms,ttft_p99_ms,tpot_p50_ms"
    lines = [f"{titles},itl_p99_ms,date"]
    for load, known, date in product(
        ("poisson", "burst"), ("0", "0.5"), ("2026-01-01", "2026-02-01")
    ):
        lines += [f"one,fp8,{load},16,{known},1,2,3,4,{date}"]
    (folder / "h200_http.csv").write_text("\n".join(lines))
    table = engine_tables.traffic().splitlines()
    assert table[2:] == ["| 16 | one | fp8 | 1 | 2 | 3 | 4 |"]


def test_bits_at_equal_kl(folder):
    """Halfway between two points in the logarithm of their KLs; none beyond the curve's ends."""
    lines = ["model,spec,method,text,bits,kl,loss,loss_error", "m,bf16,dense,,16,0,0,0"]
    lines += ["m,trellis,gptq,code,2,0.01,0,0", "m,trellis:bits=4,gptq,code,4,0.0001,0,0"]
    lines += ["m,trellis,rtn,,2,0.5,0,0", "m,trellis:bits=5,rtn,,5,0.001,0,0"]  # another quantizer
    lines += ["m,int4,gptq,code,4,0.001,0,0", "m,int2,gptq,code,2,0.1,0,0"]
    (folder / "some.csv").write_text("\n".join(lines))
    table = accuracy_tables.front("some", "m")
    assert "| int4, gptq | 4.00 | 0.00100 | 0.0000 ± 0.0000 | 3.00 | +1.00 |" in table
    assert "| int2, gptq | 2.00 | 0.10000 | 0.0000 ± 0.0000 |  |  |" in table
    assert "rtn" not in table


def test_a_time_is_that_of_a_layer(folder):
    """Of the faster dtype, and none of a sweep of tiles."""
    (folder / "h200_gemm.csv").write_text(CSV.format(us=20.04, note=""))
    row = results.find(
        results.cells()[28672, 4096, 1], ("", results.OURS, ("fp6",), results.HALVES, "")
    )
    assert row is not None
    assert results.us(row) == "20.0"


def test_a_page_follows_the_results(folder):
    page = "a\n<!-- engine_steps, written by docs/tables/fill.py -->\nold\n<!-- end -->\nb"
    assert fill.filled(page, {"engine_steps": ""}) == page  # nothing measured: the old table stays
    (folder / "h200_engine_steps.csv").write_text(STEPS.format(us=2000))
    new = fill.filled(page, {"engine_steps": engine_tables.engine_steps()})
    assert new.startswith("a\n<!-- engine_steps")
    assert new.endswith("<!-- end -->\nb")
    assert "| 2.00 | 500 | 2.00x |" in new
    assert "old" not in new


def test_tables_of_another_gpu_are_shown(folder, monkeypatch, tmp_path_factory):
    monkeypatch.setattr(results, "DEVICE", "h200")  # is put back
    own = tmp_path_factory.mktemp("own")
    (own / "h100_peers.csv").write_text(PEERS)
    (own / "h100_traffic.csv").write_text("engine\n")
    text = fill.shown(own)
    assert "## docs/benchmarks.md: peers\n\n" in text
    assert "`int4:group=128` | humming, Machete" in text
    assert "engine" not in text  # nothing was measured
    (own / "a100_gemm.csv").write_text("")
    with pytest.raises(SystemExit, match="has files of a100, h100; keep those of one GPU"):
        fill.shown(own)


def test_half_of_a_model_is_what_two_gpus_take_at_least(folder):
    steps = "model,format,kv,batch,context,step_us,gemm_us,attention_us,rest_us,tokens_per_s\n"
    steps += "llama-3-70b,fp6,model,4,1280,20000,15000,4000,500,200\n"
    steps += "llama-3-70b-half,bf16,model,4,1280,25000,22000,2000,400,160\n"
    steps += "llama-3-70b-half,bf16,int8,4,1280,9000,9000,0,0,160\n"  # another cache
    (folder / "h200_papers_engine.csv").write_text(steps)
    row = "| 1,280 | 4 | 20.0 / 25.0 | 15.0 / 22.0 | 4.0 / 2.0 | 0.5 / 0.4 | 200 | 2.50x |"
    assert row in paper_tables.llama70b()


def test_a_peak_is_of_one_run_and_fits(folder):
    head = "model,format,kv,batch,context,step_us,tokens_per_s,batch_in_80gb,backends,commit\n"
    rows = "yi-34b,bf16,int8,64,1280,1,900,64,,c1\n"
    rows += "yi-34b,liquid@int8,int8,64,1280,1,1200,64,hopper,c1\n"
    (folder / "h200_engine.csv").write_text(head + rows)
    path = folder / "h200_papers_engine.csv"
    path.write_text(head + "yi-34b,bf16,int8,64,1280,1,100,64,,c2\n")  # a run without liquid
    assert paper_tables.peaks().endswith("| 900 (64) |  |  | 1,200 (64) | 1.33x | c1 |")
    results.read.cache_clear()
    rows = "yi-34b,bf16,int8,8,1280,1,500,60,,c2\nyi-34b,bf16,int8,64,1280,1,700,60,,c2\n"
    path.write_text(head + rows + "yi-34b,liquid@int8,int8,64,1280,1,800,90,hopper,c2\n")
    assert paper_tables.peaks().endswith("| 500 (8) |  |  | 800 (64) | 1.60x | c2 |")


@pytest.mark.parametrize("page", sorted((ROOT / "docs/papers").glob("*.md")), ids=lambda p: p.stem)
def test_a_claim_has_a_source_and_a_verdict(page):
    table = (
        page.read_text(encoding="utf-8").partition("\n## Claim by claim")[2].partition("\n## ")[0]
    )
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in row] for row in rows if row[0] != " claim "]
    assert rows
    for claim, _, _, source, verdict in rows:
        assert verdict.startswith(("met", "missed", "contradicted", "cannot tell", "not run")), (
            claim
        )
        for name in re.findall(r"`([\w./]+)`", source):
            assert (results.RESULTS / f"{name}.csv").exists() or (ROOT / name).exists(), name


def test_the_system_is_of_one_cache(folder):
    head = "model,format,kv,batch,context,step_us,backends\n"
    rows = "llama-3-8b,bf16,int8,1,1280,4000,\nllama-3-8b,bf16,model,1,1280,5000,\n"
    rows += "llama-3-8b,liquid@int8,int8,1,1280,2000,hopper\n"
    rows += "llama-3-8b,liquid@int8,int8,1,1280,9000,triton\n"
    (folder / "h200_papers_engine.csv").write_text(head + rows)
    assert engine_tables.system_steps() == {"bf16": {1: 4.0}, "liquid@int8": {1: 2.0}}


def test_a_layer_is_the_sum_of_its_products(folder):
    rows = "model,format,N,K,M,us\nsquare-8,bf16,8,8,1,6\nsquare-8,fp6,8,8,1,2\n"
    rows += "".join(f"opt-30b,fp6,{n},1,8,{us}\n" for n, us in ((1, 9), (2, 6)))
    (folder / "h200_layers.csv").write_text(rows)
    assert "| OPT-30B | `fp6` | 15.0 |" in paper_tables.layers("fp6", ("fp6",), (8,))
    assert paper_tables.squares().endswith("| `fp6` | 3.00x |")


def test_runs_are_of_the_files_that_a_page_names(folder):
    rows = "us,commit,date,gpu\n1,a1,2026-01-02,G\n,lost,2026-01-04,G\n"
    rows += "1,b2,2026-01-03,G\n1,a1,2026-01-01,G\n"
    (folder / "h200_layers.csv").write_text(rows)
    page = "Of `h200_layers`; again (`h200_layers.csv`), and `h200_none`."
    assert paper_tables.runs(page) == "Runs, G, 2026: layers a1, b2, 01-01 to 01-03."
    assert paper_tables.runs("none") == ""


def test_a_cell_is_of_the_newest_run(folder):
    """Not of the fastest: an older kernel's time is not the one that is shipped."""
    old = CSV.format(us=10, note="").replace("g,d,c", "g,2026-01-01,c")
    new = CSV.format(us=20, note="").replace("g,d,c", "g,2026-01-02,c").partition("\n")[2]
    (folder / "h200_gemm.csv").write_text(old + new)
    column = ("", results.OURS, ("fp6",), results.HALVES, "")
    assert results.us(results.find(results.cells()[28672, 4096, 1], column)) == "20.0"


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
    assert peer_tables.worst(found) == (
        "- `int4:group=128` beside humming, Machete: slower in 1 of 2 results, at worst 0.50 times "
        "as fast (64x128, M=2, humming)."
    )
    assert peer_tables.worst(found[:1]) == "None."
    assert peer_tables.worst([]) == ""


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
    assert "at worst 0.95 times as fast (Qwen3-30B-A3B 2048x768, M=16, humming)" in text


STUDY_COLUMNS = (
    "model,spec,method,text,samples,length,bits,gb,tokens,loss,loss_error,kl,agreement,windows,gpu"
)
STUDY = f"""{STUDY_COLUMNS}
q,bf16,dense,,0,0,16,3,900,0.001,0.001,0.0002,0.99,26 of 4096,H
q,int8,rtn,,0,0,8,2,900,0.002,0.001,0.001,0.98,26 of 4096,H
q,int8,kv,,0,0,8.25,3,900,0.0001,0.001,0.0001,0.98,26 of 4096,H
q,"int4:group=64,zero",rtn,,0,0,4.375,1,900,0.04,0.001,0.04,0.9,26 of 4096,H
q,"int4:group=64,zero",hqq,,0,0,4.5,1,900,0.03,0.001,0.03,0.9,26 of 4096,H
q,"int4:group=64,zero",gptq,mixed,128,1024,4.375,1,900,0.02,0.001,0.02,0.9,26 of 4096,H
q,"trellis:bits=4,rotate=kn",gptq+gradients,mixed,128,1024,4.07,1,900,0.01,0,0.01,0.9,26 of 4096,H
q,plan:4.5,gptq,mixed,128,1024,4.5,1,900,0.01,0.001,0.01,0.9,26 of 4096,H
"""
TASKS = """model,pass1,pass1_error,valid,valid_error
qwen.gguf,0.7,0.04,0.98,0.01
int4-group-64-zero-gptq,0.65,0.04,0.9,0.02
"""


def test_the_first_table_shows_what_is_recommended(folder):
    name = "qwen2.5-coder-1.5b.csv"
    (folder / f"study_{name}").write_text(STUDY)
    lines = first_tables.large().splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:7]] == [
        ["| `bf16`", "16-bit products"], ["| `int8`", "rounded"], ["| `plan:4.5`", "`gptq`"],
        ["| `int4:group=64,zero`", "`gptq`"], ["| `trellis:bits=4,rotate=kn`", "`gptq+gradients`"],
    ]  # fmt: skip
    assert lines[-1] == (
        "*Half English, half Python: 900 tokens in windows of 4096 (H); calibrated on 128 windows "
        "of 1024.*"
    )
    results.read.cache_clear()
    (folder / f"tasks_{name}").write_text(TASKS)
    lines = first_tables.large().splitlines()
    assert lines[2].endswith("| 0.0010 ± 0.0010 | 0.0002 | 70 ± 4 | 98 ± 1 |")
    assert lines[3].endswith("| 0.0010 |  |  |")
    assert lines[5].endswith("| 65 ± 4 | 90 ± 2 |")
    assert "| int8 KV cache |  | 8.25 |" in accuracy_tables.tables()["studied"]
    assert plot.study() == {
        "rounded": {4.375: 0.04, 8.0: 0.001}, "GPTQ": {4.375: 0.02}, "trellis": {4.07: 0.01},
    }  # fmt: skip


@pytest.mark.parametrize("name", ["engine", "gemm", "models", "calibrated", "quality"])
def test_a_picture_has_at_most_four_lines(name):
    lines = getattr(plot, name)()
    assert 1 < len(lines) <= 4
    assert all(len(found) >= 2 for found in lines.values())


FILES = re.compile(r"`((?:h200|cpu|kv|real|serving)_\w+)(?:\.csv)?`")


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda p: p.name)
def test_files_that_pages_name_are_there(page):
    """The papers' figures are typed; the file that each is from exists."""
    for name in FILES.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / "benchmarks/results" / f"{name}.csv").is_file(), name
    if page.parent.name == "papers":
        table = page.read_text().split("## Claim by claim")[1]
        rows = [row for row in table.splitlines() if row.startswith("| ")]
        assert len(rows) > 4
        assert all(row.count("|") == 6 for row in rows)  # claim, theirs, ours, from, verdict
