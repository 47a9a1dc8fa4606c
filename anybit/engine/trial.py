"""Grammars are tried in a process of their own, which a crash, a hang or a flood of memory ends.

llguidance reads what clients send in recursive code, which no stack is large enough for, and an
overflow cannot be caught. So a child compiles a grammar first and takes some steps; what it has
survived, this process compiles again on a larger stack. This file is the child's program, too:
it imports the standard library only, and llguidance once it knows where that is.
"""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

SECONDS = 4  # of processor time that a trial may take
PATIENCE = 60.0  # seconds by the clock, of which other work may take most
MEMORY = 256 << 20  # bytes that a trial may take
# Bytes of stack: for compiling and for steps in the child, and for compiling what it has survived.
STACK, STEP_STACK, ROOMY_STACK = 16 << 20, 1 << 20, 64 << 20
STEPS = 16  # tokens at most that a trial takes
LEXER_STATES = 50_000  # of 1 to 2 KB each, which a text may make of its grammar
LONGEST = 400  # characters of what llguidance says

_stack_size = threading.Lock()


def on_stack(size: int, function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns, called in a thread with a stack of this many bytes."""
    done: Future[Any] = Future()

    def work() -> None:
        try:
            done.set_result(function(*args))
        except BaseException as error:  # Rust's panics are no Exceptions
            done.set_exception(error)

    with _stack_size:
        before = threading.stack_size(size)
        try:
            threading.Thread(target=work, daemon=True).start()
        finally:
            threading.stack_size(before)
    return done.result()


def compiled(tokens: Any, kind: str, text: str) -> Any:
    """llguidance's matcher for a grammar of a kind (lark, regex), in error or not."""
    from llguidance import LLMatcher, LLParserLimits

    notation = {"lark": LLMatcher.grammar_from_lark, "regex": LLMatcher.grammar_from_regex}[kind]
    limits = LLParserLimits(max_lexer_states=LEXER_STATES, verbose_errors=False)
    return LLMatcher(tokens, notation(text), log_level=0, limits=limits)


def reason(grammar: Any) -> str:
    """What is wrong with a grammar, in one line and without its source."""
    text, *_ = re.split(r"\n *\d+ \|", grammar.get_error(), maxsplit=1)
    return cut(text)


def cut(text: str) -> str:
    """A text in one line, and not too long."""
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."


class Trial:
    """A child that tries grammars for one tokenizer, one at a time, from any thread.

    It starts with the first grammar, again after each that has ended it, and ends with this object
    or process. tokenizer: tokenizer.json as text. vocabulary: number of logits. eos: end tokens.
    """

    def __init__(self, tokenizer: str, vocabulary: int, eos: list[int]):
        self.hello = {"tokenizer": tokenizer, "vocabulary": vocabulary, "eos": eos}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # the process whose child it is, which may have forked since

    def judge(self, kind: str, text: str) -> dict[str, Any]:
        """The error of a grammar of a kind (lark, gbnf, regex), its size in bytes, and its Lark.

        error: "" if there is none. lark: what GBNF has become, or None.

        Raises:
            RuntimeError: It could not be tried, which is not its fault.
        """
        with self._lock:
            answer = self._ask(self._started(), [kind, text])
        if "bug" in answer:
            raise RuntimeError(f"llguidance or anybit fails at grammars:\n{answer['bug']}")
        return answer

    def _started(self) -> "subprocess.Popen[bytes]":
        process = self._process
        if process is not None and self._owner == os.getpid() and process.poll() is None:
            return process
        # -S and -P: nothing of the working directory or of site-packages runs before main().
        process = self._process = subprocess.Popen(
            [sys.executable, "-S", "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"MALLOC_ARENA_MAX": "1"},  # an arena counts as 64 MB of memory
        )
        self._owner = os.getpid()
        self._end = weakref.finalize(self, stop, process, self._owner)
        answer = self._ask(process, self.hello | {"path": sys.path})
        if answer:
            self._end()
            raise RuntimeError(f"the child that tries grammars does not start: {answer}")
        return process

    def _ask(self, process: "subprocess.Popen[bytes]", message: Any) -> dict[str, Any]:
        """The child's answer, or how it ended. RuntimeError if it was killed."""
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(PATIENCE, process.kill)
        timer.daemon = True
        timer.start()
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(message).encode() + b"\n")
                process.stdin.flush()
            line = process.stdout.readline()
        except BaseException:  # such as Ctrl-C: the answer would be taken for the next one's
            self._end()
            raise
        finally:
            timer.cancel()
        if line.endswith(b"\n"):
            answer: dict[str, Any] = json.loads(line)
            return answer
        self._end()
        ends = {
            -signal.SIGXCPU: f"takes more than {SECONDS} s",
            -signal.SIGABRT: f"takes more than {MEMORY >> 20} MiB, or fails",
        }
        if process.returncode == -signal.SIGKILL:
            raise RuntimeError(
                f"the child that tries grammars was killed, by this process after {PATIENCE:.0f} s "
                "or by another"
            )
        how = ends.get(process.returncode, "ends the grammar library's process")
        return {"error": f"compiling it {how}; make it smaller, or nest it less", "size": 0}


def stop(process: "subprocess.Popen[bytes]", owner: int) -> None:
    """End a child, which has no work to save."""
    if os.getpid() != owner:
        return  # a fork of the owner, which keeps the child
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


# The child.


def main() -> None:
    """Answer the lines of stdin, and end with it: at once, whatever is being compiled."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # should memory run out, this process goes before the parent
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.stack_size(STACK)
    threading.Thread(target=work, args=(jobs, out), daemon=True).start()
    for line in sys.stdin.buffer:
        jobs.put(line)
    os._exit(0)


def work(jobs: "queue.SimpleQueue[bytes]", out: Any) -> None:
    tokens: Any = None
    while True:
        message = json.loads(jobs.get())
        try:
            if tokens is None:
                tokens = tokenizer(**message)
                answer: dict[str, Any] = {}
            else:
                answer = judged(tokens, *message)
        except Exception:
            answer = {"bug": traceback.format_exc()}
        out.write(json.dumps(answer) + "\n")
        out.flush()


def tokenizer(
    tokenizer: str, vocabulary: int, eos: list[int], path: list[str] | None = None
) -> Any:
    """llguidance's tokenizer. path: where Python finds modules, in the child."""
    if path is not None:
        sys.path[:] = path
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer, n_vocab=vocabulary, eos_token=eos)


def judged(tokens: Any, kind: str, text: str) -> dict[str, Any]:
    """The answer about a grammar: error, size, and the Lark that GBNF has become."""
    before = after = limit()
    lark = None
    try:
        if kind == "gbnf":
            kind, text = "lark", (lark := from_gbnf(text))
        found = [compiled(tokens, kind, text)]
        if found[0].is_error():
            error = reason(found[0])
        else:
            error, after = on_stack(STEP_STACK, steps, found)
    except NotGbnf as caught:
        error = f"it is no GBNF: {cut(str(caught))}"
    except MemoryError:
        error = f"compiling it takes more than {MEMORY >> 20} MiB"
    except Exception:
        raise
    except BaseException as panic:  # Rust's, which is no Exception
        error = f"the grammar library fails at it: {cut(str(panic))}"
    return {"error": error, "size": max(after - before, 0), "lark": lark}


class NotGbnf(Exception):
    pass


def from_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except MemoryError:
        raise
    except Exception as error:  # of its own kinds, and RecursionError
        raise NotGbnf(str(error)) from None


def steps(found: list[Any]) -> tuple[str, int]:
    """Take a matcher through some tokens, and drop it: what is wrong, and bytes in use before."""
    grammar, state = found.pop().deep_copy(), 1
    for step in range(STEPS):
        mask = grammar.compute_bitmask()
        if grammar.is_error():
            return "" if step else f"it has no text, or is too large: {reason(grammar)}", resident()
        state = state * 48271 % 0x7FFFFFFF  # the same tokens whenever it is tried
        places = [at for at, byte in enumerate(mask) if byte]
        if not places:
            break
        at = places[state % len(places)]
        grammar.consume_token(8 * at + mask[at].bit_length() - 1)
        if grammar.is_stopped():
            break
    return "", resident()


def limit() -> int:
    """Allow the next trial its time and memory, from here; bytes in use."""
    with suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).malloc_trim(0)  # what the last trial has used is not in use
    with suppress(ImportError, OSError, ValueError):
        import resource

        def allow(what: int, most: int) -> None:
            hard = resource.getrlimit(what)[1]
            resource.setrlimit(what, (most if hard < 0 else min(most, hard), hard))

        allow(resource.RLIMIT_CORE, 0)
        allow(resource.RLIMIT_CPU, int(time.process_time()) + SECONDS + 1)
        allow(resource.RLIMIT_AS, pages(0) + MEMORY)
    return resident()


def resident() -> int:
    with suppress(OSError):
        return pages(1)
    return 0


def pages(field: int) -> int:
    """Bytes of this process: addresses (0), or memory (1)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[field]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
