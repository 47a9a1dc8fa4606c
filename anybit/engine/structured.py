"""Texts that must follow a JSON schema, a regular expression, a choice or a grammar.

llguidance parses the tokens so far and says which tokens may come next; the sampler gives the
others no probability (`anybit.engine.masks`).
"""

import copy
import hashlib
import json
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from anybit.engine.schemas import json_rule, lark
from anybit.engine.trial import ROOMY_STACK, Trial, compiled, on_stack, reason, tokenizer
from anybit.errors import InvalidInput, InvalidType, Unsupported, check_text
from anybit.kernels.processes import cores

if TYPE_CHECKING:
    from torch import Tensor

KEPT, BYTES = 64, 512 << 20  # grammars that are kept for the next request
STUCK = "the grammar cannot go on"  # which is its fault, not the server's
# Seconds that a mask may take within a step. After one that took longer, so many of its grammar's
# next ones are computed beside the steps, and a text whose mask is not ready sits a step out.
MASK, BESIDE = 5e-3, 64
# Texts that copy a compiled grammar share its lock. So one that takes no more seconds to compile is
# compiled again for every few, up to twice for each thread that computes masks.
QUICK, TEXTS, THREADS = 0.01, 4, min(16, cores())
LANES = 2 * THREADS
GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
KEYS = re.compile(r"Unimplemented keys: \[(.*?)\]")
ADVICE = {  # what users can do about errors that name llguidance's own options
    "oneOf constraints are not supported": (
        "its oneOf has options that may overlap; use anyOf, or give each option, an object, a "
        "required property with a const of its own"
    ),
    "are not disjoint": (
        "a key may match two of its patternProperties (with allOf, of all parts together), which "
        "cannot be enforced; give patterns of which no key matches two"
    ),
}


@dataclass(frozen=True, eq=False)
class Structured:
    """What a text must be; exactly one of the first four is given.

    json: a JSON schema, as a dict or as text; True: any JSON object. There is one space or none
    behind `,` and `:`, and no other white space; `"x-guidance"` in the schema has llguidance's
    options for more. What cannot be enforced is refused, but for annotations, among which are
    `uniqueItems` and formats that JSON Schema does not have (`binary`). Objects with patterns for
    keys, or with declared names of over 2,000 characters in all, get no keys but those.
    regex: what the whole text matches, in the syntax of Rust's `regex`. choice: strings, of which
    the text is one. grammar: Lark as llguidance reads it, or GBNF (rules with `::=`). think: tokens
    that open and close thoughts; what stands between them is free. thinking: whether the prompt has
    opened them.
    """

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    think: tuple[int, int] | None = None
    thinking: bool = False

    def __post_init__(self) -> None:
        names = ("json", "regex", "choice", "grammar")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidInput(
                f"structured output by {' and '.join(given) or 'nothing'}; give exactly one of "
                f"{', '.join(names)}"
            )
        texts: list[Any] = [self.regex, self.grammar]
        if isinstance(self.choice, Iterable) and not isinstance(self.choice, str | bytes):
            object.__setattr__(self, "choice", tuple(self.choice))
            texts += self.choice
        elif self.choice is not None:
            raise InvalidType(f"choice={self.choice!r:.50}: give a list of strings")
        wrong = [text for text in texts if not isinstance(text, str | None)]
        if wrong:
            raise InvalidType(f"{wrong[0]!r:.50} is no string, which {given[0]} needs")
        if self.thinking and self.think is None:
            raise InvalidInput("thinking=True needs the tokens that open and close thoughts")
        if self.choice is not None and not (self.choice and all(self.choice)):
            raise InvalidInput(f"choice={list(self.choice)!r}: give strings that are not empty")

    def source(self, special: Mapping[str, int]) -> tuple[str, str]:
        """The kind of the grammar (lark, gbnf or regex), and its text.

        special: the special tokens' texts and numbers, which Lark may name.
        """
        for text in (self.json, self.regex, self.grammar, *(self.choice or ())):
            if isinstance(text, str):
                check_text(text)
        if self.regex is not None:
            return "regex", self.regex
        if self.grammar is not None:
            if GBNF.search(self.grammar):
                return "gbnf", self.grammar
            return "lark", lark(self.grammar, special)
        if self.choice is not None:
            options = " | ".join(json.dumps(option) for option in self.choice)
            return "lark", f"start: CHOICE\nCHOICE: {options}"
        return "lark", f"start: {json_rule(self.json)}"


@dataclass(eq=False)
class Lane:
    """A grammar, compiled, and its texts."""

    grammar: Any
    texts: "WeakSet[Matcher]" = field(default_factory=WeakSet)


@dataclass(frozen=True)
class Tried:
    """A grammar that a child has tried: its kind (lark or regex), text, and size in bytes."""

    kind: str
    text: str
    size: int


@dataclass(eq=False)
class Compiled:
    """A grammar that was tried. error: why it is refused, or "".

    tried: what may be compiled, if it may be. again: compiles it for another lane; None if that
    takes long. slow: how many of its next masks are computed beside the steps. fresh: whether none
    was timed: the first makes what the next find made.
    """

    error: str
    tried: Tried
    lanes: list[Lane] = field(default_factory=list)
    again: Callable[[], tuple[Any, float]] | None = None
    slow: int = 1
    fresh: bool = True

    def lane(self) -> Lane:
        """The one for a new text."""
        lane = min(self.lanes, key=lambda lane: len(lane.texts))
        if self.again and len(lane.texts) >= TEXTS and len(self.lanes) < LANES:
            lane = Lane(self.again()[0])
            self.lanes.append(lane)
        return lane

    def computed(self, seconds: float) -> None:
        """Note the processor time of a mask."""
        slow = seconds > MASK and not self.fresh
        self.slow, self.fresh = BESIDE if slow else max(self.slow - 1, 0), False


def digest(kind: str, text: str) -> bytes:
    """What a grammar is kept by."""
    return hashlib.sha256(f"{kind} {text}".encode()).digest()


def timed(tokens: Any, kind: str, text: str) -> tuple[Any, float]:
    """A grammar, compiled, and the processor time that this has taken."""
    begun = time.thread_time()
    return compiled(tokens, kind, text), time.thread_time() - begun


def by_number(tokenizer: Any) -> dict[str, int]:
    """Texts and numbers of the tokens that a grammar names by number, and never by their text.

    Those are special tokens, and for llguidance also added ones of the form `<...>`, whether they
    are special or not: Qwen's `<tool_call>` is not.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {
        entry.content: token
        for token, entry in added.items()
        if entry.special or (entry.content.startswith("<") and entry.content.endswith(">"))
    }


class Grammars:
    """Compiles grammars for one tokenizer, in any thread, after a child has survived the same.

    vocabulary: the number of the model's logits. eos: tokens that end a text.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, eos: frozenset[int]):
        self.tokenizer, self.vocabulary, self.eos = tokenizer, vocabulary, eos
        self.special = by_number(tokenizer)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[bytes, Compiled] = OrderedDict()  # by a digest of the text
        # What requests hold, so that the engine, too, finds it, however many there are.
        self._found: WeakKeyDictionary[Structured, Compiled] = WeakKeyDictionary()
        self._trial: Trial | None = None
        self._tokens: Any = None

    def matcher(self, structured: Structured, tried: Tried | None = None) -> "Matcher":
        """A matcher at the beginning of a text. tried: what another process says of it.

        Raises:
            InvalidInput: llguidance does not take the grammar, or does not survive it.
        """
        found = self._of(structured, tried)
        if not found.lanes and not found.error:
            self._compile(found)
        check(found)
        return Matcher(found, structured, partial(self._forget, found), self.vocabulary)

    def tried(self, structured: Structured) -> Tried:
        """What to compile a grammar from, elsewhere, once a child of this process has survived it.

        Raises:
            InvalidInput: As of `matcher`.
        """
        found = self._of(structured)
        check(found)
        return found.tried

    def _of(self, structured: Structured, tried: Tried | None = None) -> Compiled:
        """What is known of a grammar; it is tried if that is nothing."""
        with self._lock:
            found = self._found.get(structured)
        if found is None and tried is not None:
            found = self._kept(tried.kind, tried.text) or Compiled("", tried)
            self._keep(tried.kind, tried.text, found)
        elif found is None:
            kind, text = structured.source(self.special)
            found = self._kept(kind, text) or self._try(kind, text)
            self._keep(kind, text, found)
        if not found.error:
            with self._lock:
                self._found[structured] = found
        return found

    def _try(self, kind: str, text: str) -> Compiled:
        with self._lock:
            trial, _ = self._ready()
        answer = trial.judge(kind, text)  # without the lock, for which the engine may wait
        if kind == "gbnf" and not answer["error"]:
            kind, text = "lark", answer["lark"]
        return Compiled(answer["error"], Tried(kind, text, answer["size"]))

    def _compile(self, found: Compiled) -> None:
        with self._lock:
            _, tokens = self._ready()
        tried = found.tried
        again = partial(on_stack, ROOMY_STACK, timed, tokens, tried.kind, tried.text)
        grammar, seconds = again()
        found.again = again if seconds < QUICK else None
        found.error = reason(grammar) if grammar.is_error() else ""
        found.lanes.append(Lane(grammar))

    def _kept(self, kind: str, text: str) -> Compiled | None:
        with self._lock:
            return self._compiled.get(digest(kind, text))

    def _keep(self, kind: str, text: str, found: Compiled) -> None:
        with self._lock:
            kept, key = self._compiled, digest(kind, text)
            kept[key] = found
            kept.move_to_end(key)
            while len(kept) > 1 and (
                len(kept) > KEPT
                or sum(e.tried.size * max(len(e.lanes), 1) for e in kept.values()) > BYTES
            ):
                kept.popitem(last=False)

    def _forget(self, found: Compiled) -> None:
        """Compile it anew for the next request: all copies share tables, which may be full."""
        with self._lock:
            for key in [key for key, entry in self._compiled.items() if entry is found]:
                del self._compiled[key]
            for held in [held for held, entry in self._found.items() if entry is found]:
                del self._found[held]

    def _ready(self) -> tuple[Trial, Any]:
        """The child, and llguidance's tokenizer."""
        if self._trial is not None:
            return self._trial, self._tokens
        if find_spec("llguidance") is None:
            raise ModuleNotFoundError(
                "structured output needs llguidance; install it with: pip install 'anybit[serve]'"
            )
        if not getattr(self.tokenizer, "is_fast", False):
            raise Unsupported(
                "structured output needs a tokenizer of the `tokenizers` library (tokenizer.json)"
            )
        if not self.eos:
            raise Unsupported("structured output needs an end token, and the model names none")
        backend = copy.copy(self.tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        text = backend.to_str()
        # llguidance tokenizes what a grammar forces, where the text of a special token would become
        # that token. So it gets names for them that no text holds.
        secret = secrets.token_hex(8)
        for content, token in self.special.items():
            text = text.replace(json.dumps(content, ensure_ascii=False), f'"<{token} {secret}>"')
        eos = sorted(self.eos)
        self._tokens = tokenizer(text, self.vocabulary, eos)
        self._trial = Trial(text, self.vocabulary, eos)
        return self._trial, self._tokens


def check(found: Compiled) -> None:
    """InvalidInput for a grammar that is refused."""
    if found.error:
        advice = "; ".join(say for sign, say in ADVICE.items() if sign in found.error)
        if keys := KEYS.search(found.error):
            advice = f"its schema has {keys[1]}, which cannot be enforced; leave that out"
        raise InvalidInput(f"the grammar is not taken: {advice or found.error}")


class Mask(NamedTuple):
    """Tokens that may come next, as bits (words,) int32, once a job is done."""

    job: "Future[None]"
    bits: "Tensor"


class Matcher:
    """Where a text stands in its grammar. ended: nothing may follow. error: why it cannot go on.

    mask: that of the next token, if it was not ready for a step or is computed beside the steps:
    until it is, nothing else may be asked. punctual: steps wait for it. failed: is called when the
    library reports an error. vocabulary: the number of logits.
    """

    mask: Mask | None = None
    punctual = True

    def __init__(
        self,
        found: Compiled,
        structured: Structured,
        failed: Callable[[], None],
        vocabulary: int,
    ):
        self.found, self.failed, self.lane = found, failed, found.lane()
        self.words = -(-vocabulary // 32)
        self.lane.texts.add(self)
        self.grammar = self.lane.grammar.deep_copy()
        self.open, self.close = structured.think or (-1, -1)
        self.fresh, self.thinking = structured.think is not None, structured.thinking
        self.ended, self.error = False, ""

    @property
    def beside(self) -> bool:
        """Whether its next mask is computed beside the steps."""
        return self.mask is not None or (self.found.slow > 0 and not self.thinking)

    @property
    def waits(self) -> bool:
        """Whether its next mask is still being computed."""
        return self.mask is not None and not self.mask.job.done()

    def fill(self, bits: "Tensor") -> None:
        """Set the bits (words,) int32 of the tokens that may come next, and clear the others."""
        begun, size = time.thread_time(), bits.numel() * bits.element_size()
        self.grammar.unsafe_compute_mask_ptr(bits.data_ptr(), size)
        self.found.computed(time.thread_time() - begun)

    def filled(self, bits: "Tensor") -> None:
        """Look for errors, and allow thoughts to begin."""
        self._check()
        if self.fresh:
            word, bit = divmod(self.open, 32)
            bits[word] |= (1 << bit) - (1 << 32 if bit == 31 else 0)

    def copy(self) -> "Matcher":
        """A matcher that goes on from here by itself."""
        other = copy.copy(self)
        other.grammar, other.mask = self.grammar.deep_copy(), None
        return other

    def allows(self, token: int) -> bool:
        """Whether a token may come next."""
        if self.thinking or (self.fresh and token == self.open):
            return True
        return not self.ended and bool(self.grammar.validate_tokens([token]) == 1)

    def take(self, token: int) -> None:
        """Go on with a token."""
        if self.thinking:
            self.thinking = token != self.close
        elif self.fresh and token == self.open:
            self.thinking = True
        else:
            if not self.grammar.consume_token(token):
                self._check()
            self.ended = not self.error and self.grammar.is_stopped()  # an error stops it, too
        self.fresh = False

    def _check(self) -> None:
        if self.grammar.is_error():
            self.error = f"{STUCK}: {reason(self.grammar)}; make it simpler"
            self.failed()
