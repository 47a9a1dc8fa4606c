"""Sums of bytes in a profile's assembly (`benchmarks/stalls.py`)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import stalls

CODE = [
    "LDS R2, [R9]", "IMAD R4, R2, R8, RZ", "LOP3.LUT R0, R4, 0x7f7f7f7f, RZ, 0xc0, !PT",
    "@P0   LOP3.LUT R13, R41, 0x7f7f7f7f, RZ, 0xc0, !PT", "IADD3 R5, R4, R2, RZ",
    "LOP3.LUT R3, R41, 0x80808080, R4, 0x48, !PT", "IMAD.IADD R8, R0.reuse, 0x1, R13",
    "LOP3.LUT R7, R8, R3, RZ, 0x3c, !PT", "LOP3.LUT R6, R7, R3, RZ, 0x3c, !PT",
]  # fmt: skip
PROFILE = """"Kernel Name","a",
"Address","Source","Warp Stall Sampling (All Samples)","Instructions Executed"
"0x10","LOP3.LUT R0, R4, 0x7f7f7f7f, RZ","3","8"
"0x20","BRA","1","8"
"Kernel Name","b",
"Address","Source","Warp Stall Sampling (All Samples)","Instructions Executed"
"0x10","EXIT","5","2"
"""


def test_masks_their_sum_and_what_joins_both_halves_are_found():
    assert stalls.of_sums(CODE) == [False] * 2 + [True] * 2 + [False] + [True] * 3 + [False]


def test_each_launch_has_its_part():
    first, second = map(stalls.part_of, stalls.kernels(PROFILE))
    assert first == {"samples": 4, "samples_of_sums": 3, "executed": 16, "executed_of_sums": 8}
    assert (second["samples"], second["samples_of_sums"]) == (5, 0)
