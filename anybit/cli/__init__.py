"""The command line."""

import io
import os
import sys

from anybit.progress import print_lines


def main() -> None:
    """The program `anybit`."""
    # Threads that wait sleep: where other programs use the cores, spinning ones made work three
    # times slower. OpenMP reads that when torch is imported, so it is said here, before.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers reads that, too
    if not os.environ.get("COLUMNS", "").strip("0"):
        os.environ.pop("COLUMNS", None)  # 0 means unknown; rich would print lines of no width
    # Names of files and texts of models may hold what a terminal cannot show.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    print_lines()
    from anybit.cli.app import app

    app()
