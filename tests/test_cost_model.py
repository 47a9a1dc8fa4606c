"""The cost model against the numbers that LiquidGEMM derives from it (section 3.3)."""

from pathlib import Path

import pytest

from anybit.measure.roofline import measured_times, plot, roofline, show
from anybit.planning.cost_model import DEVICES, cost, instructions, threshold

H100, A100 = DEVICES["h100"], DEVICES["a100"]


def test_thresholds_of_the_paper() -> None:
    assert threshold(H100, 8, "int8") == pytest.approx(300, rel=0.02)  # W8A8
    assert threshold(H100, 4, "int8") == pytest.approx(150, rel=0.02)  # W4A8
    assert threshold(A100, 8, "int8") == pytest.approx(156, rel=0.001)


def test_alpha_of_the_paper() -> None:
    """Instructions per weight that hide under loading (5.07), and under 150 tokens' products."""
    hidden = H100.alu * 4 / 8 / H100.bandwidth
    assert hidden == pytest.approx(5.07, abs=0.005)
    assert H100.alu * 2 * 150 / H100.mma["int8"] == pytest.approx(5.05, rel=0.025)
    # "Including unpacking, eight elements take seven instructions" (section 5.3); the operand here
    # is unsigned, which saves the XOR.
    assert instructions("liquid@int8") < 7 / 8 < hidden


def test_bounds_change_where_the_rates_cross() -> None:
    n = k = 8192
    m = round(threshold(H100, 4, "int8"))
    assert cost(H100, m - 10, n, k, 4, "int8", alpha=1).bound == "memory"
    assert cost(H100, m + 10, n, k, 4, "int8", alpha=1).bound == "tensor core"
    assert cost(H100, 16, n, k, 4, "int8", alpha=6).bound == "decoding"


def test_equation_6_by_hand() -> None:
    # 300 tokens are two tiles of 256, each of which loads and decodes all weights again.
    c = cost(H100, 300, 1000, 2000, 4, "int8", alpha=2)
    assert c.load == pytest.approx(2 * 1000 * 2000 * 0.5 / 3.35e12)
    assert c.decode == pytest.approx(2 * 2 * 1000 * 2000 / 34e12)
    assert c.multiply == pytest.approx(2 * 256 * 2 * 1000 * 2000 / 1979e12)
    assert c.in_turns == pytest.approx(c.decode + c.multiply)
    assert c.in_turns > c.seconds == c.multiply
    few = cost(H100, 1, 1000, 2000, 4, "int8", alpha=2)
    assert few.in_turns == few.seconds == few.load


def test_unknown_operand_is_named() -> None:
    with pytest.raises(ValueError, match="no tensor core for 'fp8'; it has int8, fp16"):
        cost(A100, 1, 128, 128, 4, "fp8")


def test_instructions_by_format() -> None:
    # int8 codes are the operand: nothing to do. fp6: two planes for two weights in a register.
    assert instructions("int8@int8") == 0
    assert instructions("fp6") == pytest.approx((16 * 2 + 14 + 12) / 32, abs=0.2)
    assert instructions("int4:group=128") > instructions("int4")
    with pytest.raises(ValueError, match="codebook"):
        instructions("codebook")


def test_roofline_is_drawn(tmp_path: Path) -> None:
    measured = {("fp6", 16): 30e-6}
    points = roofline(
        DEVICES["h200"], ["fp6", "liquid@int8"], [1, 16, 256], (28672, 4096), measured
    )
    assert [p.measured for p in points] == [None, 30e-6, None, None, None, None]
    fp6 = points[1]
    assert fp6.cost.bound == "memory"
    assert fp6.cost.seconds == pytest.approx(28672 * 4096 * 6 / 8 / 4.8e12, rel=0.01)
    plot(points, tmp_path / "roofline.svg", "H200")
    assert "liquid@int8" in (tmp_path / "roofline.svg").read_text()


def test_measured_times_stand_beside_predictions(tmp_path: Path) -> None:
    csv = tmp_path / "times.csv"
    rows = [
        "anybit-hopper,liquid,int8-given,1,28672,4096,20.5,,,,,plain",
        "anybit-hopper,liquid,int8-given,1,28672,4096,15.2,,,,,pdl",
        "anybit-hopper,liquid,int8,1,28672,4096,9.0,,,,,quantizes as well: not compared",
        "humming,int4:group=64,int8-given,1,28672,4096,1.0,,,,,",
        "anybit-hopper,fp6,fp16,1,6144,4096,2.0,,,,,another shape",
        "anybit-triton,fp6,fp16,1,28672,4096,29.7,,,,,",
    ]
    head = "gpu,date,commit,peer,format,activation,M,N,K,us,weight_gbps,tflops,vs_cublas_fp16,"
    csv.write_text("\n".join([head + "vs_floor,note", *(f"g,d,c,{row}" for row in rows)]))
    assert measured_times(csv, (28672, 4096)) == {
        ("liquid@int8", 1): pytest.approx(15.2e-6),
        ("fp6", 1): pytest.approx(29.7e-6),
    }
    text = show("h200", "28672x4096", ["liquid@int8", "fp6"], csv)
    lines = [line.split() for line in text.splitlines()]
    assert len(lines) == 21
    first = lines[1]  # format, M, us, "us", in turns, "us", bound, measured, "us", ratio
    assert first[:2] == ["liquid@int8", "1"]
    assert first[6:8] == ["memory", "15.2"]
    assert float(first[9]) == pytest.approx(15.2 / float(first[2]), abs=0.01)
    with pytest.raises(ValueError, match="unknown device 'b900'; known: a100, h100, h200"):
        show("b900", "28672x4096")
