"""GPUs by the names that people give them."""

import pytest

from anybit.planning.gpus import DEVICES, gpu


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
