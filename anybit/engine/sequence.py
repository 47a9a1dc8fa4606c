"""What a user asks for (`SamplingParams`) and one text being generated (`Sequence`)."""

import random
import time
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anybit.engine.structured import Structured
from anybit.errors import InvalidInput

if TYPE_CHECKING:
    from torch import Tensor

    from anybit.engine.detokenizer import Detokenizer
    from anybit.engine.structured import Matcher

MAX_LOGPROBS = 20
MAX_SAMPLES = 128


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when to stop.

    n: texts for each prompt. max_tokens: new tokens at most; None: as many as the model can hold;
    0: none, for what the prompt itself gives.
    temperature: 0 is greedy. top_k: keep the k likeliest tokens (0: all). top_p: keep the
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

    Raises ValueError that names the field when a value is out of range.
    """

    n: int = 1
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    structured: Structured | None = None
    seed: int | None = None
    stop: Items[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Items[int] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    embed: bool = False
    shown: Items[int] = ()
    adapter: str | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        for name, ok, want in (
            ("n", 1 <= self.n <= MAX_SAMPLES, f"1 to {MAX_SAMPLES}"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 0, "0 or more, or None"),
            ("temperature", 0 <= self.temperature <= 100, "0 (greedy) to 100"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty <= 100, "above 0, at most 100"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "-2 to 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "-2 to 2"),
            (
                "logit_bias",
                all(-100 <= bias <= 100 for bias in self.logit_bias.values()),
                "biases from -100 to 100",
            ),
            ("stop", all(self.stop), "strings of at least one character"),
            ("min_tokens", self.min_tokens >= 0, "0 or more"),
            (
                "min_tokens",
                self.max_tokens is None or self.min_tokens <= self.max_tokens,
                "<= max_tokens",
            ),
            ("logprobs", countable(self.logprobs), f"0 to {MAX_LOGPROBS}, or None"),
            ("prompt_logprobs", countable(self.prompt_logprobs), f"0 to {MAX_LOGPROBS}, or None"),
        ):
            if not ok:
                raise InvalidInput(f"{name}={getattr(self, name)!r} is out of range: {want}")

    @property
    def reads_prompt(self) -> bool:
        """Whether the answer needs the model's output at every token of the prompt."""
        return self.embed or self.prompt_logprobs is not None

    @property
    def foreseeable(self) -> bool:
        """Whether the logits of a token stay as they are whatever the token before it is."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return not penalties and self.structured is None


def countable(logprobs: int | None) -> bool:
    return logprobs is None or 0 <= logprobs <= MAX_LOGPROBS


@dataclass(frozen=True)
class Logprob:
    """A sampled token's log probability, and the likeliest tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class Sequence:
    """One text: its tokens, and how much of it the KV cache holds.

    computed: tokens whose K and V are in the cache. blocks: the cache blocks that hold them.
    finish: None while running, then "stop", "length", "abort" or "error".
    """

    request: str
    index: int  # which of the request's n texts
    prompt: list[int]
    params: SamplingParams
    detokenizer: "Detokenizer"
    limit: int  # tokens in all, prompt included
    eos: frozenset[int] = frozenset()
    matcher: "Matcher | None" = None  # where the text stands in its grammar

    tokens: list[int] = field(default_factory=list)  # prompt and output
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of the full blocks, in order
    finish: str | None = None
    stop_reason: str | int | None = None
    cached: int = 0  # prompt tokens that the prefix cache had
    accepted: int = 0  # tokens of the text that were drafted
    rejected: int = 0  # drafted ones that were not taken
    counts: Counter[int] = field(default_factory=Counter)  # of the text's tokens, for penalties
    prompt_logprobs: list[Logprob | None] = field(default_factory=list)  # None: the first token
    pooled: "Tensor | None" = None  # sum of the prompt's hidden states

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
        self.counts[token] += 1
        if self.matcher is not None:
            self.matcher.take(token)
        if self.matcher is not None and self.matcher.ended:
            self.finish, self.silent = "stop", token in self.eos
        elif self.generated >= self.params.min_tokens and token in self.ends:
            self.finish, self.stop_reason = "stop", None if token in self.eos else token
            self.silent = True
        elif len(self.tokens) >= self.limit:
            self.finish = "length"

    def read(self, at: int) -> tuple[str, bool]:
        """What output token `at` adds to the text that is shown; whether a stop string ends it."""
        last = self.finish is not None and at == self.generated - 1
        text, found = self.detokenizer.add(
            [] if last and self.silent else [self.tokens[len(self.prompt) + at]],
            last=last,
            stop=at + 1 >= self.params.min_tokens,
        )
        if found:
            self.finish, self.stop_reason = "stop", found
        return text, found is not None
