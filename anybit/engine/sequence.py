"""What a user asks for (`SamplingParams`) and one text being generated (`Sequence`)."""

import random
import time
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from anybit.engine.checks import (
    FLAG,
    LOGPROBS,
    MAX_SEED,
    PENALTY,
    STRUCTURED,
    biases,
    checked,
    instance,
    real,
    strings,
    tokens,
    whole,
)
from anybit.engine.checks import MAX_LOGPROBS as MAX_LOGPROBS
from anybit.engine.checks import MAX_SAMPLES as MAX_SAMPLES
from anybit.engine.structured import Structured
from anybit.errors import InvalidInput

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from anybit.engine.structured import Matcher


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when to stop.

    n: texts for each prompt. max_tokens: new tokens at most; None: as many as the model can hold;
    0: none, for what the prompt itself gives.
    temperature: 0 is greedy. top_k: keep the k likeliest tokens (0 or -1: all). top_p: keep the
    likeliest tokens whose probabilities reach this sum. min_p: keep tokens with at least this
    fraction of the likeliest one's probability. The three apply in this order, after temperature.
    repetition_penalty: divides positive and multiplies negative logits of every token that the
    prompt or the text holds. presence_penalty is subtracted from the logit of every token that the
    text holds, and frequency_penalty as often as it does. logit_bias: added to logits, by token.
    structured: what the text must be, see `Structured`.
    seed: makes the request reproducible, whatever runs beside it.
    stop: strings that end the text and are not part of it, unless include_stop_str_in_output.
    stop_token_ids: tokens that end it.
    min_tokens: no end before so many tokens. ignore_eos: go on after the model's end token.
    logprobs: report the chosen token's log probability and those of so many likeliest tokens,
    taken before temperature and penalties. prompt_logprobs: the same for the prompt's tokens.
    embed: give the mean of the prompt's last hidden states. shown: special tokens that the text
    shows. adapter: the name of the LoRA adapter that the model has for this text.

    Raises InvalidInput or InvalidType that name the field for a value that cannot be.
    """

    n: int = checked(whole(1, MAX_SAMPLES, f"1 to {MAX_SAMPLES}"), 1)
    max_tokens: int | None = checked(whole(0, None, "0 or more, or None", optional=True), 16)
    temperature: float = checked(real("0 (greedy) to 100", lambda x: 0 <= x <= 100), 1.0)
    top_k: int = checked(
        lambda name, k: max(whole(-1, None, "0 or -1 (all tokens), or more")(name, k), 0), 0
    )
    top_p: float = checked(real("above 0 and at most 1", lambda x: 0 < x <= 1), 1.0)
    min_p: float = checked(real("0 to 1", lambda x: 0 <= x <= 1), 0.0)
    repetition_penalty: float = checked(real("above 0, at most 100", lambda x: 0 < x <= 100), 1.0)
    presence_penalty: float = checked(PENALTY, 0.0)
    frequency_penalty: float = checked(PENALTY, 0.0)
    logit_bias: Mapping[int, float] = field(default_factory=dict, metadata={"check": biases})
    structured: Structured | None = field(default=None, metadata={"check": STRUCTURED})
    seed: int | None = checked(whole(-MAX_SEED, MAX_SEED, "64 bits, or None", optional=True), None)
    stop: Items[str] = checked(strings, ())
    include_stop_str_in_output: bool = checked(FLAG, False)
    stop_token_ids: Items[int] = checked(tokens, ())
    min_tokens: int = checked(whole(0, None, "0 or more"), 0)
    ignore_eos: bool = checked(FLAG, False)
    logprobs: int | None = checked(LOGPROBS, None)
    prompt_logprobs: int | None = checked(LOGPROBS, None)
    embed: bool = checked(FLAG, False)
    shown: Items[int] = checked(tokens, ())
    adapter: str | None = checked(instance(str, "the name of an adapter", optional=True), None)

    def __post_init__(self) -> None:
        for name, form in self.__dataclass_fields__.items():
            object.__setattr__(self, name, form.metadata["check"](name, getattr(self, name)))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidInput(
                f"min_tokens={self.min_tokens} is out of range: <= max_tokens={self.max_tokens}"
            )

    @property
    def reads_prompt(self) -> bool:
        """Whether the answer needs the model's output at every token of the prompt."""
        return self.embed or self.prompt_logprobs is not None

    @cached_property
    def penalties(self) -> tuple[float, float, float] | None:
        """Of repetition, presence and frequency, where logits depend on what the text holds."""
        found = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return None if found == (1, 0, 0) else found


@dataclass(frozen=True)
class Logprob:
    """A sampled token's log probability, and the likeliest tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class Sequence:
    """One text: its tokens, and how much of it the KV cache holds.

    computed: tokens whose K and V are in the cache, and which states have seen. blocks: the cache
    blocks that hold them.
    finish: None while running, then "stop", "length", "abort" or "error".
    """

    request: str
    index: int  # which of the request's n texts
    prompt: list[int]
    params: SamplingParams
    limit: int  # tokens in all, prompt included
    eos: frozenset[int] = frozenset()
    matcher: "Matcher | None" = None  # where the text stands in its grammar

    tokens: list[int] = field(default_factory=list)  # prompt and output
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    row: int = 0  # of recurrent states; 0 is nobody's
    fork: int = 0  # tokens of the longest known prefix, with states at its end or without
    keeping: list[tuple[int, int]] = field(default_factory=list)  # rows that its prefixes get
    digests: list[bytes] = field(default_factory=list)  # of the full blocks, in order
    finish: str | None = None
    stop_reason: str | int | None = None
    cached: int = 0  # prompt tokens that the prefix cache had
    accepted: int = 0  # tokens of the text that were drafted
    rejected: int = 0  # drafted ones that were not taken
    # Of the sampler, on devices: what the text holds, and tokens whose logits always change.
    tallies: dict[Any, Any] = field(default_factory=dict)  # see `penalties.py`
    fixed: "dict[tuple[str, torch.device, int], tuple[Tensor, Tensor]]" = field(
        default_factory=dict
    )
    prompt_logprobs: list[Logprob | None] = field(default_factory=lambda: [None])  # of the first
    # Sums of the prompt's hidden states, by the first token of the step that had them.
    pooled: "dict[int, Tensor]" = field(default_factory=dict)

    arrival: float = field(default_factory=time.monotonic)
    started: float | None = None  # first scheduled
    last_token: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.told = False  # whether a delta has had what was asked about the prompt
        self.silent = False  # whether the last token has ended the text, and is not part of it
        self.ends = self.eos if not self.params.ignore_eos else frozenset()
        self.ends |= frozenset(self.params.stop_token_ids)
        seed = self.params.seed
        # Texts of one request differ.
        self.seed = random.Random(None if seed is None else f"{seed}/{self.index}").getrandbits(64)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def remaining(self) -> int:
        """Tokens to run through the model before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def writes(self) -> bool:
        """Whether the next step runs nothing but the token that was sampled last."""
        return self.remaining == 1 and self.generated > 0

    @property
    def held(self) -> bool:
        """Whether it sits the next step out, as that would need a mask that is not ready."""
        matcher = self.matcher
        return matcher is not None and matcher.waits and (self.remaining == 1 or matcher.punctual)

    def key(self, at: int) -> tuple[int, int]:
        """What is random about the choice of output token `at`: two numbers of 32 bits, signed.

        It depends on the place alone, so that a token is the same whether it was drafted or not.
        """
        x = (self.seed + (at + 1) * 0x9E3779B97F4A7C15) % (1 << 64)  # splitmix64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
        x = (x ^ x >> 27) * 0x94D049BB133111EB % (1 << 64)
        x ^= x >> 31
        return (x >> 32) - (1 << 31), x % (1 << 32) - (1 << 31)

    def append(self, token: int) -> None:
        """Take a sampled token, and finish if it is an end or the last that fits."""
        self.last_token = time.monotonic()
        self.tokens.append(token)
        if self.matcher is not None:
            self.matcher.take(token)
        if self.matcher is not None and self.matcher.ended:
            self.finish, self.silent = "stop", token in self.eos
        elif self.generated >= self.params.min_tokens and token in self.ends:
            self.finish, self.stop_reason = "stop", None if token in self.eos else token
            self.silent = True
        elif len(self.tokens) >= self.limit:
            self.finish = "length"


@dataclass  # not frozen, which would take three times as long to make
class Row:
    """A token to choose: output token `at` of a sequence, if the text goes on with `draft`.

    matcher: where the text then stands in its grammar.
    """

    seq: Sequence
    at: int
    draft: tuple[int, ...] = ()
    matcher: "Matcher | None" = None

    def __post_init__(self) -> None:
        if self.matcher is None and not self.draft:
            self.matcher = self.seq.matcher

    def after(self, token: int) -> "Row":
        """The row behind one more drafted token."""
        matcher = self.matcher and self.matcher.copy()
        if matcher:
            matcher.take(token)
        return Row(self.seq, self.at + 1, (*self.draft, token), matcher)
