"""For tests of Arm's kernels in an emulator: LLVM runs outside of it, fifty times as fast.

As a program, on the machine itself: texts of kernels come by standard input, objects go to standard
output. As a plugin of pytest, in the emulator: kernels are compiled by that program; the first one
here as well, which must give the same bytes.
"""

import os
import pickle
import subprocess
import sys

from anybit.kernels.native import build
from anybit.kernels.native.isa import ARM, Isa

TRIPLE = "aarch64-unknown-linux-gnu"


def serve() -> None:
    """Compile what is asked for until nothing more comes."""
    levels = {level.name: level for level in ARM}
    while True:
        try:
            name, text = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        machine, module = build.optimized(text, levels[name], TRIPLE)
        pickle.dump(bytes(machine.emit_object(module)), sys.stdout.buffer)
        sys.stdout.buffer.flush()


def pytest_configure() -> None:
    """Let the host compile; its Python is named by ANYBIT_TEST_HOST."""
    host = subprocess.Popen(
        [os.environ["ANYBIT_TEST_HOST"], "-m", "tests.arm.host"],
        env={},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert host.stdin
    assert host.stdout
    asked, answers = host.stdin, host.stdout
    own, compared = build.compile_text, []

    def compile_text(text: str, isa: Isa) -> bytes:
        pickle.dump((isa.name, text), asked)
        asked.flush()
        code: bytes = pickle.load(answers)
        if not compared:
            compared.append(text)
            assert own(text, isa) == code, "the host's LLVM compiles another object"
        return code

    build.compile_text = compile_text


if __name__ == "__main__":
    serve()
