"""Texts that must follow a JSON schema, a regular expression, a choice or a grammar.

llguidance parses the tokens so far and says which tokens may come next; the sampler gives the
others no probability.
"""

import copy
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anybit.errors import InvalidInput, Unsupported, check_text

KEPT = 64  # compiled grammars that are kept for the next request
# Models that have nothing to say write white space for ever where a grammar lets them.
SPACES = r"[\x20\x0A\x0D\x09]{0,64}"


@dataclass(frozen=True)
class Structured:
    """What a text must be; exactly one of the first four is given.

    json: a JSON schema, as a dict or as text; True: any JSON object. regex: what the whole text
    matches, in the syntax of Rust's `regex`. choice: strings, of which the text is one. grammar:
    Lark as llguidance reads it, or GBNF (rules with `::=`). think: tokens that open and close
    thoughts; what stands between them is free. thinking: whether the prompt has opened them.
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
        if self.thinking and self.think is None:
            raise InvalidInput("thinking=True needs the tokens that open and close thoughts")
        if self.choice is not None and not (self.choice and all(self.choice)):
            raise InvalidInput(f"choice={list(self.choice)!r}: give strings that are not empty")

    def source(self) -> str:
        """The grammar in llguidance's notation."""
        from llguidance import LLMatcher, grammar_from

        for text in (self.json, self.regex, self.grammar, *(self.choice or ())):
            if isinstance(text, str):
                check_text(text)
        if self.regex is not None:
            return LLMatcher.grammar_from_regex(self.regex)
        if self.grammar is not None:
            return grammar_from("grammar", self.grammar)
        if self.choice is not None:
            options = " | ".join(json.dumps(str(option)) for option in self.choice)
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {options}")
        return LLMatcher.grammar_from_lark(f"start: {json_rule(self.json)}")


def json_rule(schema: Any) -> str:
    """A JSON schema as a part of a Lark rule."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise InvalidInput(f"the JSON schema is not JSON: {error}") from None
    if schema is True:
        schema = {"type": "object"}
    if not isinstance(schema, dict):
        raise InvalidInput(f"the JSON schema is {schema!r}; give an object")
    return f"%json {json.dumps(schema | {'x-guidance': {'whitespace_pattern': SPACES}})}"


def reason(grammar: Any) -> str:
    """What is wrong with a grammar, in one line and without its source or llguidance's state."""
    text, *_ = re.split(r"\n *\d+ \||<state>", grammar.get_error(), maxsplit=1)
    return " ".join(text.split())


class Grammars:
    """Compiles grammars for one tokenizer, in any thread.

    vocabulary: the number of the model's logits. eos: tokens that end a text.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, eos: frozenset[int]):
        self.tokenizer, self.vocabulary, self.eos = tokenizer, vocabulary, eos
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._tokens: Any = None

    def matcher(self, structured: Structured) -> "Matcher":
        """A matcher at the beginning of a text; InvalidInput for what llguidance does not take."""
        with self._lock:
            tokens = self._tokens = self._tokens or self._tokenizer()
            source = structured.source()
            found = self._compiled.pop(source, None)
        if found is None:  # compiled without the lock, for which the engine may wait
            from llguidance import LLMatcher

            found = LLMatcher(tokens, source, log_level=0)
            if found.is_error():
                raise InvalidInput(f"the grammar is not taken: {reason(found)}")
            first = found.deep_copy()
            first.compute_bitmask()
            if first.is_error():
                raise InvalidInput(f"the grammar has no text, or is too large: {reason(first)}")
        with self._lock:
            self._compiled[source] = found
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return Matcher(found.deep_copy(), structured, partial(self._forget, source))

    def _forget(self, source: str) -> None:
        """Compile it anew for the next request: all copies share tables, which may be full."""
        with self._lock:
            self._compiled.pop(source, None)

    def _tokenizer(self) -> Any:
        try:
            from llguidance.hf import from_tokenizer
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "structured output needs llguidance; install it with: pip install 'anybit[serve]'"
            ) from None
        if not getattr(self.tokenizer, "is_fast", False):
            raise Unsupported(
                "structured output needs a tokenizer of the `tokenizers` library (tokenizer.json)"
            )
        if not self.eos:
            raise Unsupported("structured output needs an end token, and the model names none")
        return from_tokenizer(self.tokenizer, self.vocabulary, sorted(self.eos))


class Matcher:
    """Where a text stands in its grammar. ended: nothing may follow. error: why it cannot go on.

    failed: is called when there is an error.
    """

    def __init__(self, grammar: Any, structured: Structured, failed: Callable[[], None]):
        self.grammar, self.failed = grammar, failed
        self.open, self.close = structured.think or (-1, -1)
        self.fresh, self.thinking = structured.think is not None, structured.thinking
        self.ended, self.error = False, ""

    def fill(self, bits: Tensor) -> None:
        """Set the bits (words,) int32 of the tokens that may come next, and clear the others."""
        if self.thinking:
            bits.fill_(-1)
            return
        self.grammar.unsafe_compute_mask_ptr(bits.data_ptr(), bits.numel() * bits.element_size())
        self._check()
        if self.fresh:
            word, bit = divmod(self.open, 32)
            bits[word] |= (1 << bit) - (1 << 32 if bit == 31 else 0)

    def copy(self) -> "Matcher":
        """A matcher that goes on from here by itself."""
        other = copy.copy(self)
        other.grammar = self.grammar.deep_copy()
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
            self.grammar.consume_token(token)
            self._check()
            self.ended = not self.error and self.grammar.is_stopped()  # an error stops it, too
        self.fresh = False

    def _check(self) -> None:
        if self.grammar.is_error():
            self.error = f"the grammar cannot go on: {reason(self.grammar)}; make it simpler"
            self.failed()


def constrain(logits: Tensor, matchers: list[Matcher | None]) -> Tensor:
    """Logits (B, V) with -inf for tokens that a row's matcher, if it has one, does not allow."""
    rows = [i for i, matcher in enumerate(matchers) if matcher is not None]
    if not rows:
        return logits
    count = logits.shape[1]
    bits = torch.empty(len(rows), -(-count // 32), dtype=torch.int32)
    for at, i in enumerate(rows):
        matchers[i].fill(bits[at])  # type: ignore[union-attr]
    bits = bits.to(logits.device, non_blocking=True)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (bits[:, :, None] >> shifts).bitwise_and_(1).flatten(1)[:, :count].bool()
    index = torch.tensor(rows).to(logits.device, non_blocking=True)
    return logits.index_copy(0, index, logits[index].masked_fill(~allowed, float("-inf")))
