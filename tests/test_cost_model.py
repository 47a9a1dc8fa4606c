"""The cost model against the numbers that LiquidGEMM derives from it (section 3.3)."""

import pytest

from anybit.planning.cost_model import cost, instructions
from anybit.planning.gpus import DEVICES, Device, gpu

H100, A100 = DEVICES["h100"], DEVICES["a100"]


def threshold(device: Device, bits: float, operand: str) -> float:
    """Tokens from which on tensor cores are the limit: the time of loading is that of products."""
    one = cost(device, 1, 1024, 1024, bits, operand)
    return one.load / one.multiply


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


def test_what_takes_longest_changes_where_the_rates_cross() -> None:
    n = k = 8192
    m = round(threshold(H100, 4, "int8"))
    below, above = (cost(H100, m + more, n, k, 4, "int8", alpha=1) for more in (-10, 10))
    assert below.seconds == below.load > below.multiply
    assert above.seconds == above.multiply > above.load
    slow = cost(H100, 16, n, k, 4, "int8", alpha=6)
    assert slow.seconds == slow.decode > slow.load


def test_equation_6_by_hand() -> None:
    # 300 tokens are two tiles of 256, each of which loads and decodes all weights again.
    c = cost(H100, 300, 1000, 2000, 4, "int8", alpha=2)
    assert c.load == pytest.approx(2 * 1000 * 2000 * 0.5 / 3.35e12)
    assert c.decode == pytest.approx(2 * 2 * 1000 * 2000 / 34e12)
    assert c.multiply == pytest.approx(2 * 256 * 2 * 1000 * 2000 / 1979e12)
    assert c.seconds == c.multiply


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


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("rtx4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("rtx 5070ti", "RTX 5070 Ti"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("h100-pcie", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("a100 40gb", "A100 40 GB"),
        ("l40s", "L40S"),
        ("H200", "H200"),
        ("b200", "B200"),
    ],
)
def test_a_gpu_is_known_by_any_usual_name(name: str, key: str) -> None:
    assert gpu(name).name == key


def test_other_gpus_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"T4 is too old: its compute capability is 7\.5"):
        gpu("Tesla T4")
    with pytest.raises(
        ValueError, match=r"unknown GPU 'rtx409'; did you mean RTX 4090\? known: RTX"
    ):
        gpu("rtx409")


def test_the_table_of_gpus_has_sensible_figures() -> None:
    for device in DEVICES.values():
        assert 1e11 < device.bandwidth < 1e13, device
        assert 8e9 < device.memory < 3e11, device
        assert device.alu < device.mma["fp16"] < 1e16, device
        assert ("fp8" in device.mma) == (device.capability >= (8, 9)), device
