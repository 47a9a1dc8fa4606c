"""The weights of many models: the run that times them, and what is said of it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from anybit.measure import bench
from anybit.measure.timing import ReadFloor
from tests.test_bench import BLANK, FLOOR, script


@pytest.fixture
def gemm(monkeypatch, tmp_path):
    """The script with made-up times: its rows (peer, format, activation, M, N, K) in a CSV."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    module = script("gemm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ReadFloor, "measure", classmethod(lambda cls, device: FLOOR))

    def run(measure, *arguments):
        monkeypatch.setattr(bench, "measure", measure)
        path = tmp_path / "rows.csv"
        monkeypatch.setattr("sys.argv", ["gemm.py", *arguments, "--out", str(path)])
        module.main()
        return bench.read_csv(path)

    return run


def timed(cases, shapes, ms, device, commit, floor):
    for n, k in shapes:
        for m in ms:
            for case in cases:
                label = replace(BLANK, peer=case.peer, format=case.format, M=m, N=n, K=k)
                row = replace(label, activation=case.activation, us=1.0)
                yield bench.finish(row, n * k, FLOOR)


def test_all_weights_of_all_models_are_measured_and_a_table_printed(gemm, capsys):
    rows = gemm(timed, "--models")
    shapes = {(row.N, row.K) for row in rows}
    assert len(shapes) >= 40
    assert {(28672, 4096), (1024, 4096), (3584, 1792), (262144, 2560)} <= shapes
    assert len({row.M for row in rows}) == 16
    assert {(row.peer, row.format) for row in rows if row.K == 2880 and row.peer == "cublas"}
    ours = {(row.format, row.activation) for row in rows if row.K % 128 and row.peer != "cublas"}
    assert ("int4:group=64", "fp16") in ours
    assert ("liquid", "int8-given") in ours
    assert "0 of" in capsys.readouterr().out


def test_other_weights_are_appended(gemm):
    some = gemm(timed, "--models", "Qwen3-0.6B", "--m", "1,2")
    every = gemm(timed, "--models", "Qwen3-0.6B", "Yi-34B", "--m", "1,2", "--append")
    assert {(r.N, r.K) for r in some} < {(r.N, r.K) for r in every}
    assert len({(r.peer, r.format, r.activation, r.M, r.N, r.K, r.note) for r in every}) == len(
        every
    )


def test_a_run_that_is_stopped_keeps_whole_groups(gemm):
    def stopped(*args):
        for i, row in enumerate(timed(*args)):
            if (row.N, row.K, row.M) == (4096, 4096, 16) and i % 2:
                raise KeyboardInterrupt
            yield row

    rows = gemm(stopped, "--shapes", "6144x4096", "4096x4096", "--schemes", "int4", "--m", "1,4,16")
    counts = {}
    for row in rows:
        counts[row.N, row.M] = counts.get((row.N, row.M), 0) + 1
    assert set(counts) == {(6144, 1), (6144, 4), (6144, 16), (4096, 1), (4096, 4)}
    assert len(set(counts.values())) == 1


@pytest.fixture
def efficiency():
    return script("efficiency")


def test_cells_below_cublas_and_far_from_the_floor_are_named(efficiency):
    def row(peer, fmt, m, us):
        label = replace(BLANK, peer=peer, format=fmt, activation="fp16", M=m, N=4096, K=4096, us=us)
        return bench.finish(label, 10_000_000, FLOOR)

    rows = [row("cublas", f, m, 30.0 + (f == "bf16")) for f in ("fp16", "bf16") for m in (1, 2, 64)]
    rows += [row("anybit-hopper", "int4", m, us) for m, us in ((1, 20.0), (2, 40.0), (64, 30.5))]
    found = efficiency.cells(rows)
    assert [(c.m, c.speed) for c in efficiency.slower(found)] == [(2, 0.75)]
    titles, lines = efficiency.table(found, [1, 2, 64])
    assert lines == [["`int4`", "1.50x", "0.75x", "0.98x", "1 of 3"]]
    assert len(titles) == len(lines[0])
    assert efficiency.worst(found) == [
        "`int4`: 0.75 times the speed of cuBLAS (4096x4096, M=2); "
        "50% of the larger floor (4096x4096, M=2, 40.0 us)"
    ]


def test_a_repeat_says_how_far_times_differ_and_is_no_cell(efficiency):
    def row(m, us, note=""):
        label = replace(BLANK, peer="anybit-hopper", format="int4", activation="fp16", note=note)
        return bench.finish(replace(label, M=m, N=4096, K=4096, us=us), 10_000_000, FLOOR)

    rows = [row(1, 10.0), row(2, 10.0), row(1, 11.0, "again"), row(2, 9.8, "again")]
    assert [cell.us for cell in efficiency.cells(rows)] == [10.0, 10.0]
    assert efficiency.repeats(rows) == pytest.approx([0.02, 0.1])
    assert "2 cells were measured again" in efficiency.spread(rows)
    assert efficiency.spread(rows[:2]) == ""
