"""Triton kernels run on the GPU with ANYBIT_TEST_DEVICE=cuda, else in its interpreter."""

import os

DEVICE = os.environ.get("ANYBIT_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
