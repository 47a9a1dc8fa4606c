"""Logits after penalties, biases and bans: what texts hold lies in a table on the device."""

from collections.abc import Mapping
from functools import cache
from threading import Lock

import torch
from torch import Tensor
from torch.nn.functional import pad

from anybit.engine.sequence import Row, Sequence

PROMPT = 1 << 30  # the bit of a token's count that says that the prompt holds it
# Penalties below TINY are one, and logits above HUGE are: so their quotients are finite in fp32.
TINY, HUGE = 1e-25, 1e30


class Table:
    """Tokens of texts on one device: in a row those of a prompt, each once, then all written ones.

    A token's place never changes, so what runs again writes what is there.
    """

    def __init__(self, device: torch.device):
        self.tokens = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self.rows = 0  # that texts have had
        self.free: list[int] = []  # of these, nobody's
        self.lock = Lock()  # engines in several threads may share the device

    def row(self) -> int:
        """A row that is nobody's: steps that still run have read it before it is written."""
        if len(self.free) == self.rows:
            self.tokens, self.rows = self.tokens.new_zeros(0, 0), 0
            self.free.clear()
        if self.free:
            return self.free.pop()
        self.rows += 1
        return self.rows - 1

    @torch.inference_mode()
    def write(self, rows: list[int], places: list[int], tokens: list[int] | Tensor) -> None:
        """Put tokens in places of rows; the table grows by doubling."""
        if not rows:
            return
        sizes = zip((self.rows, max(places) + 1), self.tokens.shape, strict=True)
        more = [max(need - have, have) if need > have else 0 for need, have in sizes]
        if any(more):
            self.tokens = pad(self.tokens, (0, more[1], 0, more[0]))
        device = self.tokens.device
        new = numbers(tokens, device) if isinstance(tokens, list) else tokens.clamp_min(0)
        self.tokens.index_put_(numbers([rows, places], device).unbind(), new.int())


@cache
def table_of(device: torch.device) -> Table:
    return Table(device)


class Tally:
    """A text's row of a table, as long as there is the text.

    prompt: tokens of the prompt there. written: others; -1: not even those of the prompt.
    """

    def __init__(self, seq: Sequence, table: Table):
        self.table, self.row, self.written = table, table.row(), -1
        self.prompt = len(set(seq.prompt)) if seq.params.repetition_penalty != 1 else 0

    def __del__(self) -> None:
        self.table.free.append(self.row)

    def missing(self, seq: Sequence) -> tuple[int, list[int]]:
        """Tokens that the host knows and the table lacks, and the place of the first."""
        if self.written >= 0:
            return self.prompt + self.written, seq.tokens[len(seq.prompt) + self.written :]
        prompt = dict.fromkeys(seq.prompt) if self.prompt else ()
        return 0, [*prompt, *seq.tokens[len(seq.prompt) :]]


def penalize(logits: Tensor, rows: "list[Row]", given: Tensor | None = None) -> Tensor:
    """Logits (B, V) after penalties and biases, and without ends that come too early.

    given (B,): each text's last token, on the device, where the host does not know it yet.
    """
    out = logits
    index = [i for i, row in enumerate(rows) if row.seq.params.penalties]
    if index:
        if given is not None and len(index) < len(rows):
            given = given[numbers(index, logits.device)]
        out = penalized(logits, index, [rows[i] for i in index], given)
    biased = [i for i, row in enumerate(rows) if row.seq.params.logit_bias]
    if biased:
        changes = [fixed(rows[i].seq, "bias", logits) for i in biased]
        out = put(out.float(), biased, changes, accumulate=True)
    early = [i for i, row in enumerate(rows) if row.at < row.seq.params.min_tokens]
    if early:
        out = put(out, early, [fixed(rows[i].seq, "ends", logits) for i in early])
    return out


def penalized(logits: Tensor, index: list[int], rows: "list[Row]", given: Tensor | None) -> Tensor:
    """A copy of logits (B, V) in fp32 after the penalties of those rows."""
    which, tokens, counts = counted(rows, given, logits.device)
    each = torch.tensor([row.seq.params.penalties for row in rows])
    repetition, presence, frequency = each.to(logits.device, non_blocking=True)[which].unbind(1)
    repetition = repetition.clamp_min(TINY)
    if len(index) < len(logits):
        which = numbers(index, logits.device)[which]
    at = which * logits.shape[1] + tokens
    held = logits.new_zeros(logits.numel(), dtype=torch.int32)
    counts = held.scatter_add_(0, at, counts)[at]
    out = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    x = out.view(-1)[at]
    x = torch.where(x > 0, x / repetition, x * repetition).clamp_max_(HUGE)
    written = counts & (PROMPT - 1)
    x -= frequency * written + presence * (written > 0)
    out.view(-1)[at] = x  # where a text has a token twice, it is the same number twice
    return out


def counted(
    rows: "list[Row]", given: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """What the texts of rows hold, drafts included: rows, tokens and their counts, (N,) each."""
    table = table_of(device)
    with table.lock:
        tallies: list[Tally] = []
        new: tuple[list[int], list[int], list[int]] = [], [], []  # rows, places and tokens
        for row in rows:
            tally = row.seq.tallies.get(table)
            if tally is None:
                tally = row.seq.tallies[table] = Tally(row.seq, table)
            tallies.append(tally)
            if tally.written != row.seq.generated:
                first, missing = tally.missing(row.seq)
                new[0].extend([tally.row] * len(missing))
                new[1].extend(range(first, first + len(missing)))
                new[2].extend(missing)
        table.write(*new)
        at_rows = [tally.row for tally in tallies]
        prompts = [tally.prompt for tally in tallies]
        sizes = [n + row.seq.generated for n, row in zip(prompts, rows, strict=True)]
        if given is not None:
            table.write(at_rows, sizes, given)
            sizes = [size + 1 for size in sizes]
        for tally, size in zip(tallies, sizes, strict=True):
            tally.written = size - tally.prompt
        held = table.tokens
    row_of, prompt, size_of = numbers([at_rows, prompts, sizes], device)
    total = sum(sizes)
    which = torch.arange(len(rows), device=device).repeat_interleave(size_of, output_size=total)
    at = torch.arange(total, device=device) - (size_of.cumsum(0) - size_of)[which]
    tokens, counts = held[row_of[which], at], torch.where(at < prompt[which], PROMPT, 1)
    drafted = [(i, token, 1) for i, row in enumerate(rows) for token in row.draft]
    if drafted:
        more = zip((which, tokens, counts), numbers(drafted, device).unbind(1), strict=True)
        which, tokens, counts = (torch.cat(pair) for pair in more)
    return which, tokens.long(), counts.int()


def numbers(values: object, device: torch.device) -> Tensor:
    """Integers on a device, without waiting for it."""
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


def fixed(seq: Sequence, kind: str, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens, and what their logits change by ("bias") or become ("ends"), kept on the device."""
    key = kind, logits.device, logits.shape[1]  # a model that drafts may be elsewhere
    if key not in seq.fixed:
        ends = seq.eos | frozenset(seq.params.stop_token_ids)
        changes: Mapping[int, float] = seq.params.logit_bias
        if kind == "ends":
            changes = dict.fromkeys(ends, float("-inf"))
        tokens = [token for token in changes if token < logits.shape[1]]
        values = torch.tensor([changes[token] for token in tokens])
        seq.fixed[key] = numbers(tokens, logits.device), values.to(logits.device)
    return seq.fixed[key]


def put(
    logits: Tensor, rows: list[int], changes: list[tuple[Tensor, Tensor]], accumulate: bool = False
) -> Tensor:
    """Logits (B, V) with some of these rows replaced, or with something added to them."""
    sizes = torch.tensor([len(tokens) for tokens, _ in changes])
    index = torch.tensor(rows).repeat_interleave(sizes).to(logits.device, non_blocking=True)
    tokens, values = (torch.cat(parts) for parts in zip(*changes, strict=True))
    return logits.index_put((index, tokens), values.to(logits.dtype), accumulate=accumulate)
