"""The harness itself: its arithmetic, its columns, and that it refuses to time a wrong product."""

import importlib.metadata
import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from anybit.errors import Unsupported
from anybit.measure import bench, timing
from anybit.measure.bench import Case, Layer, Row
from anybit.measure.timing import ReadFloor

CPU = torch.device("cpu")
FLOOR = ReadFloor([(1_000_000, 3.0), (2_000_000, 4.0), (10_000_000, 20.0)])
BLANK = Row("gpu", "2026-01-01", "abc", "peer", "int4", "bf16", 2, 3, 4)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Small enough for tests: few copies, short measurements."""
    monkeypatch.setattr(timing, "COLD_BYTES", 1 << 20)
    monkeypatch.setattr(timing, "CPU_SECONDS", 0.002)


def measure(*cases, shape=(32, 64), ms=(1, 5)):
    return list(bench.measure(cases, [shape], list(ms), CPU, "abc", FLOOR))


def dense(prepare=None, peer="other", dtype=torch.bfloat16):
    """A peer that keeps the weight in 16 bits, or does what `prepare` says."""
    keep = bench.dense_case(dtype, CPU).prepare
    return Case(peer, "w16", "bf16", dtype, lambda w: (prepare or (lambda x: x))(keep(w)))


# Rows.


def test_a_row_follows_from_time_and_bytes():
    row = bench.finish(replace(BLANK, us=8.0, M=16, N=1000, K=2000), 6_000_000, FLOOR)
    assert row.weight_gbps == pytest.approx(6e6 / 8e-6 / 1e9)
    assert row.tflops == pytest.approx(2 * 16 * 1000 * 2000 / 8e-6 / 1e12)
    assert row.vs_floor == pytest.approx(8 / 12)


def test_the_columns_are_those_of_the_format():
    assert ",".join(bench.COLUMNS) == (
        "gpu,date,commit,peer,format,activation,M,N,K,us,weight_gbps,tflops,vs_cublas_fp16,"
        "vs_floor,note"
    )


def test_a_csv_comes_back_as_it_was(tmp_path):
    rows = [
        replace(BLANK, us=1234.0, weight_gbps=0.5, tflops=12.0, vs_cublas_fp16=1.0, vs_floor=2.5),
        replace(BLANK, format="codebook:m=2,v=8", note='failed: "this", and that'),
    ]
    path = tmp_path / "a.csv"
    bench.write_csv(path, rows)
    assert bench.read_csv(path) == rows
    assert path.read_text().splitlines()[0] == ",".join(bench.COLUMNS)
    assert list(tmp_path.iterdir()) == [path]


def test_a_csv_with_other_columns_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("peer,us\nx,1\n")
    with pytest.raises(ValueError, match="expected"):
        bench.read_csv(path)


# Correctness comes before time.


def wrong(change):
    """A peer whose product is altered by `change`."""

    def prepare(layer: Layer) -> Layer:
        return replace(layer, run=lambda weight, x: change(x @ weight.T))

    return dense(prepare)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda y: y * 1.0625, "relative error 0.06"),
        (lambda y: torch.cat((y[:, :-1], -y[:, -1:]), 1), "relative error"),  # one wrong output
        (lambda y: y * math.nan, "relative error nan"),
        (lambda y: y[:, 1:], "shape"),
        (lambda y: y.roll(1, 1), "relative error"),
        (torch.zeros_like, "relative error 1"),
    ],
)
def test_a_wrong_product_is_not_timed(change, what):
    rows = [row for row in measure(wrong(change)) if row.peer == "other"]
    assert [row.M for row in rows] == [1, 5]
    for row in rows:
        assert row.note.startswith(f"wrong result: {what}")
        assert row.us is row.vs_floor is row.vs_cublas_fp16 is None


def test_a_right_product_is_timed():
    rows = measure(wrong(lambda y: y * 1.001))  # within what rounding explains
    assert [(row.peer, row.M) for row in rows] == [
        ("torch", 1), ("other", 1), ("torch", 5), ("other", 5),
    ]  # fmt: skip
    assert all(row.us and row.us > 0 and not row.note for row in rows)
    first, ours = rows[:2]
    assert ours.vs_cublas_fp16 == pytest.approx(first.us / ours.us)
    assert ours.vs_floor == pytest.approx(ours.us / FLOOR(32 * 64 * 2))


def test_the_wrong_copy_of_a_weight_is_found():
    """What is timed are copies; one that differs from the original is a wrong result."""

    class Fragile(torch.Tensor):
        def __deepcopy__(self, memo):
            return self.as_subclass(torch.Tensor) + 1

    rows = measure(dense(lambda layer: replace(layer, weight=layer.weight.as_subclass(Fragile))))
    assert rows[-1].note.startswith("wrong result")


def test_a_product_that_changes_while_it_is_timed_is_found():
    calls = []

    def drift(y):
        calls.append(y)
        return y if len(calls) < 4 else y * 1.5

    rows = [row for row in measure(wrong(drift), ms=[1]) if row.peer == "other"]
    assert rows[0].note.startswith("wrong result: relative error 0.5")


@pytest.mark.parametrize(
    "decode", [lambda w: w.flip(0), lambda w: -w, lambda w: w * 3, torch.zeros_like]
)
def test_a_peer_that_decodes_another_weight_is_caught(decode):
    """Its product agrees with its own decoding, and both are wrong."""

    def prepare(layer: Layer) -> Layer:
        other = decode(layer.weight)
        return replace(layer, weight=other, decoded=other)

    rows = [row for row in measure(dense(prepare)) if row.peer == "other"]
    assert {row.note.partition(":")[0] for row in rows} == {"wrong result"}


@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (1.5, False)])
def test_drawn_codes_need_not_resemble_the_weight_but_are_multiplied_right(factor, right):
    def prepare(layer: Layer) -> Layer:
        drawn = torch.randn(layer.weight.shape).bfloat16()
        run = lambda weight, x: x @ weight.T * factor  # noqa: E731
        return replace(layer, weight=drawn, decoded=drawn, run=run, random=True)

    row = measure(dense(prepare), ms=[1])[-1]
    assert (row.us is not None) == right
    assert row.note == ("" if right else "wrong result: relative error 0.5 where 0.013 is allowed")


def test_failures_and_refusals_are_rows_and_the_rest_goes_on():
    def refuse(layer):
        raise bench.Refused("K=64 is not a multiple of 128")

    def crash(layer):
        raise RuntimeError("no kernel\nimage")

    rows = measure(dense(refuse), dense(crash, "broken"), dense(peer="last"), ms=[1])
    assert [(row.peer, row.note) for row in rows] == [
        ("torch", ""),
        ("other", "refused: K=64 is not a multiple of 128"),
        ("broken", "failed: RuntimeError: no kernel image"),
        ("last", ""),
    ]


def test_inputs_and_results_of_a_peer_are_converted_outside_the_product():
    """A product of given int8 codes, whose scales are applied to what it returns."""

    def prepare(w):
        scale = w.abs().amax(1) / 127
        codes = (w / scale[:, None]).round()

        def inputs(x):
            return x.float().round(), 0.5

        return Layer(
            codes,
            lambda codes, x, factor: x @ codes.T,
            codes.numel(),
            codes * scale[:, None],
            inputs,
            lambda x: x.float().round() * 0.5,
            lambda y, given: y * scale * given[1],
        )

    rows = measure(Case("peer", "int8", "int8-given", torch.bfloat16, prepare))
    assert [row.note for row in rows] == [""] * 4


def test_copies_are_distinct_and_exceed_the_cache():
    weight = torch.zeros(1 << 17, dtype=torch.uint8)
    copies = timing.rotated([weight], weight.nbytes)
    assert len({c[0].data_ptr() for c in copies}) == len(copies) >= 2
    assert len(timing.rotated(weight, 1 << 30)) == 2


@pytest.mark.parametrize("scheme", ["int4", "liquid@int8", "fp6", "codebook:m=1,v=2,b=2,group=32"])
@pytest.mark.parametrize("backend", [None, "reference"])
def test_our_layers_are_right_by_the_same_check(scheme, backend):
    rows = [
        r for r in measure(bench.anybit_case(scheme, torch.bfloat16, backend)) if r.peer != "torch"
    ]
    assert [row.note for row in rows] == ["", ""]
    assert {row.peer for row in rows} == {"anybit-reference" if backend else "anybit"}
    assert rows[0].format == bench.parse_scheme(scheme)[0].spec
    assert rows[0].activation == ("int8" if scheme.endswith("@int8") else "bf16")


def test_a_backend_that_refuses_says_why():
    case = bench.anybit_case("trellis:code=sum8", torch.bfloat16, "native")
    rows = measure(case, ms=[1])
    assert "depends on neighbouring codes" in rows[-1].note


# What `anybit bench` runs.


@pytest.fixture
def two_sizes(monkeypatch):
    monkeypatch.setattr(timing.ReadFloor, "measure", classmethod(lambda cls, device: FLOOR))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_run_says_and_writes_every_row(two_sizes, tmp_path):
    said: list[str] = []
    path = tmp_path / "rows.csv"
    rows = bench.run(["int4", "fp6"], [(32, 64), (64, 32)], [1, 3], path, said.append)
    assert [(r.peer, r.format, r.N, r.M) for r in rows if r.N == 32] == [
        ("torch", "bf16", 32, 1), ("anybit", "int4", 32, 1), ("anybit", "fp6", 32, 1),
        ("torch", "bf16", 32, 3), ("anybit", "int4", 32, 3), ("anybit", "fp6", 32, 3),
    ]  # fmt: skip
    assert len(rows) == 12
    assert all(row.note == "" for row in rows)
    assert [(r.peer, r.M, r.N) for r in bench.read_csv(path)] == [(r.peer, r.M, r.N) for r in rows]
    assert len(said) == 13
    assert "32x64" in said[1]
    assert " us " in said[1]


def test_what_breaks_the_gpu_is_named(monkeypatch):
    broken = []

    def breaking(w):
        broken.append(w)
        raise RuntimeError("CUDA error")

    def synchronize(device):
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(timing, "synchronize", synchronize)
    said = (
        r"^culprit w16 bf16 at 32x64 left the GPU unusable \(RuntimeError: CUDA error: an illegal"
    )
    with pytest.raises(Unsupported, match=said):
        measure(dense(peer="first"), dense(breaking, "culprit"), dense(peer="last"))


@pytest.mark.parametrize(
    ("schemes", "where", "message"),
    [
        (["int4", "int99"], "rows.csv", "unknown format 'int99'"),
        (["int4:group=128"], "rows.csv", "K=64 is not a multiple of group=128"),
        (["int4"], "no/rows.csv", "not a directory to write rows.csv into"),
    ],
)
def test_a_run_that_cannot_end_well_does_not_start(two_sizes, tmp_path, schemes, where, message):
    with pytest.raises(ValueError, match=message):
        bench.run(schemes, [(32, 64)], [1], tmp_path / where, pytest.fail)


def test_the_command_measures_what_is_asked_and_names_what_is_wrong(two_sizes, tmp_path):
    from typer.testing import CliRunner

    from anybit.cli.app import app

    path = tmp_path / "rows.csv"
    args = ["bench", "int4", "fp6", "--shape", "32x64", "--shape", "16x32", "--m", "1,2"]
    done = CliRunner().invoke(app, [*args, "--csv", str(path)])
    assert done.exit_code == 0, done.output
    rows = {(row.format, row.N, row.M) for row in bench.read_csv(path)}
    assert rows == {(f, n, m) for f in ("bf16", "int4", "fp6") for n in (32, 16) for m in (1, 2)}
    wrong = CliRunner().invoke(app, ["bench", "int4", "--shape", "32"])
    assert wrong.exit_code == 1
    assert "shape '32' is not NxK" in wrong.output


# The scripts in benchmarks/.


def script(name):
    path = Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return script("peers")


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_the_adapters_of_torch_are_right_where_they_run(name, peers):
    extremes = torch.full((32, 32), 127, dtype=torch.int8)
    if name == "int8" and (torch._int_mm(extremes, extremes.T) != 32 * 127**2).any():
        pytest.skip("torch._int_mm saturates on this processor; the harness refuses its products")
    case = next(case for case in peers.cublas() if case.format == name)
    rows = [row for row in measure(case) if row.peer == "cublas"]
    assert [row.us is not None for row in rows] == [True, True], rows


def test_int4_weights_are_packed_as_gptq_does():
    peers = script("peers_vllm")
    w = torch.randn(6, 256)
    codes, scale, decoded = peers.int4(w, torch.float32)
    groups = (codes.float().view(6, 2, 128) - 8) * scale[..., None]
    assert torch.allclose(groups.view(6, 256), decoded)
    assert float((decoded - w).abs().max()) <= float(scale.max()) * 0.51
    words = peers.gptq_words(codes)
    assert words.shape == (32, 6)
    assert words.is_contiguous()  # Marlin refuses others
    for place in (0, 3, 7):
        assert torch.equal((words >> 4 * place & 15).T, codes[:, place::8].int())


def test_missing_packages_are_named(monkeypatch, peers):
    def gone():
        import a_package_that_nobody_has  # noqa: F401

    monkeypatch.setattr(peers, "PEERS", {"cublas": peers.cublas, "gone": gone})
    found, missing = peers.cases()
    assert {case.peer for case in found} == {"cublas"}
    assert "a_package_that_nobody_has" in missing["gone"]


# Arguments.


def test_shapes_and_counts_are_parsed():
    assert bench.parse_shape("4096x14336") == (4096, 14336)
    assert bench.parse_counts("1,16,256") == [1, 16, 256]


@pytest.mark.parametrize("text", ["4096", "4096x", "0x16", "axb", "1x2x3"])
def test_a_bad_shape_is_named(text):
    with pytest.raises(ValueError, match="is not NxK, such as"):
        bench.parse_shape(text)


@pytest.mark.parametrize("text", ["", "1,,2", "0", "1,-2", "x"])
def test_bad_counts_are_named(text):
    with pytest.raises(ValueError, match="is not a list of token counts"):
        bench.parse_counts(text)


@pytest.fixture
def experts(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    module = script("experts")
    monkeypatch.setattr(module, "DEVICE", CPU)
    return module


def routed(experts):
    """7 tokens, 2 of 4 experts each; the third gets none."""
    chosen = torch.tensor([[0, 1], [3, 0], [0, 3], [1, 0], [0, 3], [1, 3], [3, 0]])
    return experts.Routing(chosen, 4)


def test_tokens_are_sorted_by_expert(experts):
    routing = routed(experts)
    assert routing.starts.tolist() == [0, 6, 9, 9, 14]
    x = torch.arange(7.0)[:, None]
    assert routing.sort(x).flatten().tolist() == [0, 1, 2, 3, 4, 6, 0, 3, 5, 1, 2, 4, 5, 6]


@pytest.mark.parametrize("block", [1, 4, 8])
def test_an_index_has_every_choice_once_in_blocks_of_one_expert(experts, block):
    routing = routed(experts)
    found = script("experts_cases").indexed(routing, block)
    ids, owners = found["sorted_ids"], found["expert_ids"]
    assert len(ids) == len(owners) * block == found["num_tokens_padded"]
    real = ids < 14
    assert sorted(ids[real].tolist()) == list(range(14))
    of_rows = owners.repeat_interleave(block)[real]
    assert torch.equal(routing.chosen.flatten()[ids[real].long()].int(), of_rows)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("wrong", [0, 1])
def test_products_of_experts_are_checked_in_either_order(experts, by_token, wrong):
    routing, x = routed(experts), torch.randn(7, 64).bfloat16()
    w = torch.randn(4, 32, 64)

    def run(x, routing):
        def multiply(weight):
            y = [x[i].float() @ weight[e].T for i, row in enumerate(routing.chosen) for e in row]
            y = torch.stack(y)
            return y + wrong if by_token else y[routing.rows] + wrong

        return multiply

    one = experts.Experts("peer", "fp32", "bf16", w, w.nbytes, w, run, by_token=by_token)
    blank = replace(BLANK, M=7, N=32, K=64)
    (row,) = experts.measure([one], x, routing, blank, FLOOR)
    if wrong:
        assert row.note.startswith("wrong result")
    else:
        assert row.tflops == pytest.approx(2 * 14 * 32 * 64 / row.us / 1e6)


# The run over the weights of many models.


def test_a_layer_that_does_not_fit_is_refused_where_memory_can_be_asked(monkeypatch):
    monkeypatch.setattr(bench, "free_bytes", lambda device: 10**9)
    with pytest.raises(Unsupported, match="1 GB are free"):
        bench.check_memory([(1 << 14, 1 << 14)], [1], CPU)
    monkeypatch.setattr(bench, "free_bytes", lambda device: None)
    bench.check_memory([(1 << 14, 1 << 14)], [1], CPU)
