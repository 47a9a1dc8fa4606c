"""Between texts and tokens, for many clients: in a few threads, which stop when a client goes."""

import asyncio
import copy
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from anybit.engine.plain import settings
from anybit.engine.sequence import SamplingParams
from anybit.errors import AnybitError, InvalidInput, in_a_line
from anybit.serve.model import Model

WORKERS = 2
PIECE = 1 << 16  # characters that are tokenized without a look at the client
NORMALIZERS = {"Prepend": 1, "NFC": 3}  # by which factor they may shorten a text in bytes
BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Gone(Exception):
    """The client has closed the connection."""


class Words:
    """What single tokens stand for."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.normalizer = backend and settings(backend.normalizer)
        decoders = {kind for kind, _ in flat(backend and settings(backend.decoder), "decoders")}
        self.byte_level, self.byte_fallback = "ByteLevel" in decoders, "ByteFallback" in decoders
        self.added = getattr(tokenizer, "added_tokens_decoder", {})

    def bytes(self, token: int) -> bytes:
        """A token's bytes, which may be a part of a character."""
        if self.tokenizer is None:
            return str(token).encode()
        if token in self.added:
            return self.added[token].content.encode()
        if self.byte_level or self.byte_fallback:
            piece = self.tokenizer.convert_ids_to_tokens(token)
            if piece is None:  # a row of the output head without a token
                return b""
            if self.byte_level and all(char in BYTES for char in piece):
                return bytes(BYTES[char] for char in piece)
            if self.byte_fallback:
                byte = BYTE.fullmatch(piece)
                text = piece.replace("\u2581", " ")
                return bytes([int(byte[1], 16)]) if byte else text.encode()
        return self.tokenizer.decode([token]).encode("utf-8", "replace")

    def text(self, token: int) -> str:
        """A token's text, with U+FFFD for bytes that are no character."""
        return self.bytes(token).decode("utf-8", "replace")

    def name(self, token: int) -> str:
        """A token's text; of a part of a character, its bytes, as OpenAI writes them."""
        raw = self.bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    @cached_property
    def longest(self) -> int | None:
        """Bytes of a text that one token can stand for at most; None if there is no limit.

        There is none where unknown characters become one token, and where spaces are dropped.
        """
        whole = self.byte_level or self.byte_fallback
        if not whole or any(entry.lstrip or entry.rstrip for entry in self.added.values()):
            return None
        factor = 1
        for kind, part in flat(self.normalizer, "normalizers"):
            if kind == "Replace" and len(part["content"]) >= len(part["pattern"].get("String", "")):
                continue
            if kind not in NORMALIZERS or "Regex" in part.get("pattern", {}):
                return None
            factor *= NORMALIZERS[kind]
        return factor * max(len(self.bytes(token)) for token in range(len(self.tokenizer)))


def flat(part: Any, inner: str) -> list[tuple[str, dict[str, Any]]]:
    """The (type, settings) of a part of tokenizer.json, of which a Sequence holds several."""
    if not part:
        return []
    if part["type"] == "Sequence":
        return [entry for one in part[inner] for entry in flat(one, inner)]
    return [(part["type"], part)]


def byte_characters() -> dict[str, int]:
    """The character that byte-level tokenizers write for each byte, the other way round."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


BYTES = byte_characters()


class Job:
    """What a worker does for a client. llm: the worker's own, to encode and decode with."""

    def __init__(self, llm: Model, words: Words, gone: threading.Event):
        self.llm, self.words, self.gone = llm, words, gone

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Tokens of a prompt; InvalidInput, soon, for one that cannot fit.

        A long text is counted in pieces before. Pieces may have a few tokens more than the whole,
        which has at most half of them only if it is not the text that its pieces are.
        """
        length = self.llm.length
        most = None if self.words.longest is None else self.words.longest * length
        size = len(text.encode("utf-8", "replace"))
        if most is not None and size > most:
            raise InvalidInput(
                f"the prompt has {size} bytes, and {length} tokens hold at most {most}; shorten it"
            )
        count = 0
        for at in range(0, len(text) if len(text) > PIECE else 0, PIECE):
            if self.gone.is_set():
                raise Gone
            count += len(self.llm.encode(text[at : at + PIECE], special=False))
            if count > 2 * length:
                raise InvalidInput(
                    f"the prompt has more than {length} tokens, which the model cannot hold"
                )
        return self.llm.encode(text, special)

    def prompt(self, prompt: str | list[int], special: bool, kept: int | None) -> list[int]:
        """Tokens of a prompt. kept: only so many of the last ones, however long it is."""
        if isinstance(prompt, str):
            prompt = (
                self.encode(prompt, special) if kept is None else self.llm.encode(prompt, special)
            )
        return prompt if kept is None else prompt[max(len(prompt) - kept, 0) :]


def room(llm: Model, params: SamplingParams) -> int:
    """Tokens of the longest prompt that an answer may follow."""
    return llm.length - (params.max_tokens != 0)


def shared(tokenizer: Any) -> bool:
    """Whether threads may use a tokenizer side by side: one in Rust whose state never changes.

    A file may ask to cut or pad texts. The first encoding ends that for all that follow.
    """
    from transformers import PreTrainedTokenizerFast

    encode = getattr(type(tokenizer), "_encode_plus", None)
    if not getattr(tokenizer, "is_fast", False) or (
        encode is not PreTrainedTokenizerFast._encode_plus
    ):
        return False
    tokenizer.encode("a")
    return True


class Texts:
    """Threads that tokenize, with one tokenizer or one for each. most: jobs that may wait.

    What compiles a grammar has threads of its own: that takes seconds, and one runs at a time.
    """

    def __init__(self, llm: Model, most: int):
        self.llm, self.most = llm, most
        self.shared = shared(llm.tokenizer)
        self.words = Words(llm.tokenizer if self.shared else copy.deepcopy(llm.tokenizer))
        self._pool = ThreadPoolExecutor(WORKERS, "anybit-tokenizer")
        self._slow = ThreadPoolExecutor(WORKERS, "anybit-grammars")
        self._own = threading.local()
        self._copying = threading.Lock()
        self.jobs = 0

    @property
    def full(self) -> bool:
        return self.jobs >= self.most

    async def run(
        self, gone: "asyncio.Future[None]", function: Callable[[Job], Any], grammar: bool = False
    ) -> Any:
        """Do a job in a thread. Gone if the client goes before it has ended.

        grammar: whether the job compiles one.

        Raises:
            Gone: The client's connection has ended; the job stops soon.
            InvalidInput: The text cannot be tokenized, or a template does not take it. Any other
                error is a bug, of us or a library.
        """
        stop = threading.Event()
        self.jobs += 1
        pool = self._slow if grammar else self._pool
        work = asyncio.get_running_loop().run_in_executor(pool, self._do, function, stop)
        work.add_done_callback(self._done)
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise Gone
            return work.result()
        finally:
            stop.set()
            work.cancel()

    def _done(self, work: "asyncio.Future[Any]") -> None:
        self.jobs -= 1
        if not work.cancelled():
            work.exception()  # of a job whose client has gone, nobody asks for it

    def _do(self, function: Callable[[Job], Any], stop: threading.Event) -> Any:
        if stop.is_set():
            raise Gone
        try:
            return function(Job(self._language(), self.words, stop))
        except AnybitError:
            raise
        except (ValueError, OverflowError, RecursionError) as error:  # libraries' refusals
            raise InvalidInput(in_a_line(error)) from None

    def _language(self) -> Model:
        """What the thread encodes and decodes with."""
        if self.shared:
            return self.llm
        own: Model | None = getattr(self._own, "llm", None)
        if own is None:
            own = self._own.llm = copy.copy(self.llm)
            with self._copying:
                own.tokenizer = copy.deepcopy(self.words.tokenizer)
        return own

    def close(self) -> None:
        for pool in (self._pool, self._slow):
            pool.shutdown(wait=False, cancel_futures=True)
