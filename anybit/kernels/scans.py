"""Recurrences over tokens in plain torch: the definitions, for all texts of a step at once.

`Texts` says where the tokens of n texts lie and cuts them into P pieces of L tokens. States and
sums are fp32. Pieces of one token take the recurrence itself, longer ones products of matrices.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens whose pairs are looked at together
NEAR = 128  # tokens that are in hand at once on a CPU, so that its caches hold them
STATES = 128  # tokens of Mamba 1 that are in hand at once anywhere: each has a state of its own

Prepare = Callable[..., tuple[Tensor, ...]]
# From states of some texts and what is prepared to outputs and the states behind their pieces.
Step = Callable[..., tuple[Tensor, Tensor]]


class Texts:
    """The tokens of several texts, and the pieces that scans cut them into.

    The first pieces of all texts run together, then the second ones, and so on. The texts with the
    most pieces come first, so that those that go on are always the first ones.

    Attributes:
        order: The texts as scans have them, int32 (n,).
        counts: Pieces of each round; P together.
        kept: Of each round, texts (in `order`) whose state behind their piece is wanted, too.
        saved: Those, as they were given, and how many of their tokens have passed.
        size: L.
        table: Of each piece, int32 (4, P): its text (in `order`), the text's first token, and those
            tokens of the text where the piece begins and ends.
        ends: (3, n + kept): text, its first token, and how many tokens have passed, of each state
            that a scan gives: of the texts in `order`, then of those kept, round by round.
        places: Where each token is among all places of pieces, int32 (T,).
        near: Whether few tokens are in hand at once.
    """

    def __init__(
        self,
        counts: list[int],
        kept: list[list[int]],
        saved: list[tuple[int, int]],
        size: int,
        order: Tensor,
        table: Tensor,
        ends: Tensor,
        places: Tensor,
    ):
        self.counts, self.kept, self.saved, self.size = counts, kept, saved, size
        self.order = order
        self.table, self.ends, self.places = table, ends, places
        self.near = table.device.type == "cpu"
        at = table[2][:, None] + torch.arange(size, dtype=torch.int32, device=table.device)
        self.real = at < table[3][:, None]
        self.reads: dict[int, tuple[Tensor, Tensor]] = {}  # tokens that convolutions read

    @classmethod
    def cut(
        cls, lengths: list[int], kept: Mapping[int, Iterable[int]], device: torch.device
    ) -> "Texts":
        """Texts that lie one after the other.

        Args:
            lengths: Tokens of each, at least one.
            kept: After how many of a text's tokens its state is wanted, too, for some texts.
            device: Where tokens are.
        """
        longest = max(lengths)
        size = -(-longest // (-(-longest // CHUNK) * 8)) * 8  # pieces alike, of whole eights
        pieces: list[list[tuple[int, int]]] = []
        for i, length in enumerate(lengths):
            pieces.append([])
            begin = 0
            for edge in sorted({*kept.get(i, ()), length}):
                pieces[i] += [(at, min(at + size, edge)) for at in range(begin, edge, size)]
                begin = edge
        order = sorted(range(len(lengths)), key=lambda i: -len(pieces[i]))
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        counts, keeps, places = [], [], [0] * starts[-1]
        table: list[tuple[int, ...]] = []
        saved: list[tuple[int, int]] = []
        for depth in range(len(pieces[order[0]])):
            going = [i for i in order if len(pieces[i]) > depth]
            counts.append(len(going))
            keeps.append([n for n, i in enumerate(going) if pieces[i][depth][1] in kept.get(i, ())])
            for n, i in enumerate(going):
                first, stop = pieces[i][depth]
                at = len(table) * size
                places[starts[i] + first : starts[i] + stop] = range(at, at + stop - first)
                table.append((n, starts[i], first, stop))
            saved += [(order[n], pieces[order[n]][depth][1]) for n in keeps[-1]]
        passed = [*((i, lengths[i]) for i in order), *saved]
        place = {i: n for n, i in enumerate(order)}
        ends = [(place[i], starts[i], tokens) for i, tokens in passed]
        numbers = (order, list(zip(*table, strict=True)), list(zip(*ends, strict=True)), places)
        tensors = (torch.tensor(t, dtype=torch.int32) for t in numbers)
        return cls(counts, keeps, saved, size, *(t.to(device, non_blocking=True) for t in tensors))

    def given(self, x: Tensor) -> Tensor:
        """Inputs (T, N) of what a step hands over."""
        return x

    def flat(self, pieces: Tensor) -> Tensor:
        """What pieces (P, L, ...) say of each token, (T, ...)."""
        return pieces.flatten(0, 1).index_select(0, self.places)

    def masked(self, pieces: Tensor) -> Tensor:
        """Zero in (P, L, ...) wherever a piece has ended before."""
        return pieces * self.real.view(*self.real.shape, *[1] * (pieces.ndim - 2))

    def pieces(self, x: Tensor) -> Tensor:
        """Pieces (P, L, ...) of tokens (T, ...), with the last token again where one has ended."""
        return read(x, self._reads(0)[0])

    def windowed(self, window: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Pieces (P, K + L, C) with the K tokens before them, and windows (n + kept, K, C).

        window: the K tokens before each text, (n, K, C). x: (T, C).
        """
        before, after = self._reads(window.shape[1])
        whole = torch.cat([x, window.flatten(0, 1)])
        return read(whole, before), read(whole, after)

    def _reads(self, before: int) -> tuple[Tensor, Tensor]:
        """Rows of (T + n * before, C): each text's tokens in pieces, and those in its windows."""
        if before not in self.reads:
            device, tokens = self.table.device, len(self.places)

            def rows(text: Tensor, start: Tensor, at: Tensor) -> Tensor:
                return torch.where(at < 0, tokens + (text + 1) * before + at, start + at)

            own = torch.arange(-before, self.size, dtype=torch.int32, device=device)
            text, start, first, stop = self.table[..., None]
            least = torch.zeros_like(stop) - before
            at = torch.minimum(first + own, torch.maximum(stop - 1, least))
            texts, starts, passed = self.ends[..., None]
            self.reads[before] = (
                rows(text, start, at),
                rows(texts, starts, passed + own[:before]),
            )
        return self.reads[before]

    def scan(
        self, prepare: Prepare, step: Step, state: Tensor, parts: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Outputs of pieces (P, ...), and states (n + kept, ...), by one step for each round.

        prepare: what the step takes, of any pieces, from their parts; of all at once on a GPU.
        state: of each text, (n, ...). parts: of all pieces, (P, ...).
        """
        near, few = self.near, max(1, NEAR // self.size) if self.near else len(state)
        parts = parts if near else prepare(*parts)
        out, kept, ended = [], [], []
        each = zip(*(part.split(self.counts) for part in parts), strict=True)
        for count, keep, part in zip(self.counts, self.kept, each, strict=True):
            ended.append(state[count:])
            groups = zip(state[:count].split(few), *(t.split(few) for t in part), strict=True)
            new = []
            for own, *group in groups:
                y, after = step(own, *(prepare(*group) if near else group))
                out.append(y)
                new.append(after)
            state = joined(new)
            kept += [state[i : i + 1] for i in keep]
        return joined(out), joined([state, *reversed(ended), *kept])


class Singles(Texts):
    """Texts of one token each, which are their pieces."""

    size, near = 1, False

    def __init__(self, count: int):
        self.counts, self.kept = [count], [[]]
        self.late: dict[int, Any] = {}  # what layers share whose tokens may be taken back

    def flat(self, pieces: Tensor) -> Tensor:
        return pieces[:, 0]

    def masked(self, pieces: Tensor) -> Tensor:
        return pieces

    def pieces(self, x: Tensor) -> Tensor:
        return x[:, None]

    def windowed(self, window: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.cat([window, x[:, None]], 1)
        return whole, whole[:, 1:]


class Padded(Texts):
    """Texts of up to L tokens each, which are their pieces; what follows is padding.

    lengths: tokens of each text, int32 (n,); none are a text, too.
    """

    near = False

    def __init__(self, lengths: Tensor, size: int):
        self.counts, self.kept, self.size, self.lengths = [len(lengths)], [[]], size, lengths

    @cached_property
    def real(self) -> Tensor:  # type: ignore[override]
        """Which places are tokens, (n, L)."""
        return torch.arange(self.size, device=self.lengths.device) < self.lengths[:, None]

    def flat(self, pieces: Tensor) -> Tensor:
        return pieces.flatten(0, 1)

    def pieces(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, self.size))

    def windowed(self, window: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.cat([window, self.pieces(x)], 1)
        at = self.lengths[:, None] + torch.arange(window.shape[1], device=x.device)
        return whole, whole.gather(1, at[..., None].expand(-1, -1, whole.shape[2]).long())


class Ring(Padded):
    """Texts of up to L tokens each, which lie in rows of a ring at their positions modulo its size.

    rows: of each text, (n,). first: its first position, and stop: the one behind its last.
    """

    def __init__(self, rows: Tensor, first: Tensor, stop: Tensor, size: int):
        super().__init__(stop - first, size)
        self.rows, self.first = rows, first

    def given(self, x: Tensor) -> Tensor:
        """(n * L, N) of a ring (rows, R, N), zeros behind each text."""
        own = torch.arange(self.size, dtype=self.first.dtype, device=x.device)
        at = self.rows[:, None] * x.shape[1] + (self.first[:, None] + own) % x.shape[1]
        found = x.flatten(0, 1).index_select(0, at.flatten())
        return found.masked_fill(~self.real.view(-1, 1), 0)


class Ragged(Texts):
    """Texts whose tokens lie one after the other, known on the device alone; for kernels.

    starts: the first token of each, and the one behind the last, int32 (n + 1,). wanted: int32 (4,
    n): behind how many tokens of each its states are wanted, too, and the row that gets them, and
    both once more; row 0: none are.
    """

    size, near = 1, False

    def __init__(self, starts: Tensor, wanted: Tensor):
        self.starts, self.wanted = starts, wanted

    def passed(self, rows: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Rows that get states, each (n,), and how many tokens have passed there.

        rows: of the texts, which get those at their ends.
        """
        yield rows, self.starts[1:] - self.starts[:-1]
        for passed, to in self.wanted.unflatten(0, (2, 2)):
            yield to, passed


def read(x: Tensor, at: Tensor) -> Tensor:
    """x[at]; torch is faster at this for rows of x."""
    return x.index_select(0, at.flatten()).unflatten(0, at.shape)


def joined(parts: list[Tensor]) -> Tensor:
    """Tensors one after the other; one alone is not copied."""
    parts = [part for part in parts if len(part)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def convolved(
    window: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, texts: Texts
) -> tuple[Tensor, Tensor]:
    """A sum over each token and those just before it, for each channel by itself.

    Args:
        window: The K - 1 inputs before each text, (n, K - 1, C).
        x: (T, C).
        weight: (C, K), the last of which is of the token itself.
        bias: (C,) or None.
        texts: To which the tokens belong.

    Returns:
        Sums in pieces (P, L, C), and windows (n + kept, K - 1, C), both in x's dtype.
    """
    whole, after = texts.windowed(window, x)
    if texts.size == 1:
        out = (whole.float() * weight.T.float()).sum(1, keepdim=True)
        return (out if bias is None else out + bias.float()).to(x.dtype), after
    if x.dtype != torch.float32:
        return F.conv1d(whole.mT, weight[:, None], bias, groups=len(weight)).mT, after
    out = whole[:, : texts.size] * weight[:, 0]  # torch's own may multiply in TF32 on a GPU
    for at, factor in enumerate(weight.T[1:].unbind(), 1):
        out = torch.addcmul(out, whole[:, at : at + texts.size], factor)
    return out if bias is None else out + bias, after


def state_space(
    state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, texts: Texts
) -> tuple[Tensor, Tensor]:
    """Mamba 2: state = exp(dt a) state + dt x b^T, and output = state c, for each head.

    Args:
        state: (n, G, H, C, N) of H heads in each of G groups.
        x: In pieces, (P, L, G, H, C).
        dt: (P, L, G, H).
        a: Negative numbers (G, H).
        b: Of each group, (P, L, G, N).
        c: As b.
        texts: To which the pieces belong.

    Returns:
        Outputs (P, L, G, H, C) and states (n + kept, ...).
    """
    dt = texts.masked(dt)
    x, decay = x * dt[..., None], dt * a
    if texts.size == 1:
        state = state * decay[:, 0, ..., None, None].exp()
        state = state + x[:, 0, ..., None] * b[:, 0, :, None, None]
        return (state * c[:, 0, :, None, None]).sum(-1)[:, None], state

    def prepare(x: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        total = decay.cumsum(1)
        alike = torch.einsum("plgn,psgn->pgls", c, b)[:, :, None]
        pairs = alike * between(total.permute(0, 2, 3, 1))
        own = torch.einsum("pghls,psghc->plghc", pairs, x)
        left = x * (total[:, -1:] - total)[..., None].exp()
        return own, left, total[..., None].exp(), b, c

    def step(
        state: Tensor, own: Tensor, left: Tensor, grown: Tensor, b: Tensor, c: Tensor
    ) -> tuple[Tensor, Tensor]:
        out = own + torch.einsum("plgn,pghcn->plghc", c, state) * grown
        state = state * grown[:, -1, ..., None]
        return out, state + torch.einsum("psghc,psgn->pghcn", left, b)

    return texts.scan(prepare, step, state, (x, decay, b, c))


def selective(
    state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, texts: Texts
) -> tuple[Tensor, Tensor]:
    """Mamba 1: state = exp(dt a) state + dt x b^T, and output = state c, channel by channel.

    Args:
        state: (n, C, N).
        x: In pieces, (P, L, C).
        dt: As x.
        a: Negative numbers (C, N).
        b: (P, L, N).
        c: As b.
        texts: To which the pieces belong.

    Returns:
        Outputs (P, L, C) and states (n + kept, ...).
    """

    def step(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        out, few = [], max(1, STATES // len(x))
        for each, by, *both in zip(*(t.split(few, 1) for t in (x, dt, b, c)), strict=True):
            write, read = (t[:, :, None] for t in both)
            # Each token's factor and what it adds, then those of 2, 4, 8, ... tokens up to it.
            factor, added = (by[..., None] * a).exp(), (by * each)[..., None] * write
            reach = 1
            while reach < each.shape[1]:
                later, earlier = factor[:, reach:], slice(None, -reach)
                new = added[:, reach:] + later * added[:, earlier]
                added = torch.cat([added[:, :reach], new], 1)
                factor = torch.cat([factor[:, :reach], later * factor[:, earlier]], 1)
                reach *= 2
            states = factor * state[:, None] + added
            out.append((states * read).sum(-1))
            state = states[:, -1]
        return torch.cat(out, 1), state

    return texts.scan(lambda *parts: parts, step, state, (x, texts.masked(dt), b, c))


def delta_rule(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, texts: Texts
) -> tuple[Tensor, Tensor]:
    """The gated delta rule: a state maps keys to values, and each token corrects what its key gets.

    state = exp(decay) state; state = state + beta k (v - k state); output = q state. In a piece,
    what each token writes depends on what those before it have written, so all of it is the
    solution of a triangular system, which is linear in the state before the piece.

    Args:
        state: (n, H, K, V).
        q: In pieces, (P, L, H, K).
        k: As q.
        v: (P, L, H, V).
        decay: At most 0, (P, L, H).
        beta: (P, L, H).
        texts: To which the pieces belong.

    Returns:
        Outputs (P, L, H, V) and states (n + kept, ...).
    """
    decay, beta = texts.masked(decay), texts.masked(beta)

    def prepare(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        parts = (q, k, v, decay.cumsum(1), beta[..., None])
        q, k, v, total, beta = (t.transpose(1, 2).contiguous() for t in parts)
        pairs, grown = between(total), total[..., None].exp()
        system = beta * (k @ k.mT) * pairs
        one = torch.eye(system.shape[-1], dtype=k.dtype, device=k.device)
        inverse = torch.linalg.solve_triangular(system, one, upper=False, unitriangular=True)
        left = k * (total[..., -1:] - total)[..., None].exp()
        pairs = q @ k.mT * pairs
        return grown * q, pairs, inverse, beta * v, beta * grown * k, left, grown[:, :, -1:]

    def step(
        state: Tensor,
        q: Tensor,
        pairs: Tensor,
        inverse: Tensor,
        wanted: Tensor,
        k: Tensor,
        left: Tensor,
        grown: Tensor,
    ) -> tuple[Tensor, Tensor]:
        written = inverse @ (wanted - k @ state)
        out = (q @ state + pairs @ written).transpose(1, 2)
        return out, state * grown + left.mT @ written

    if texts.size > 1:
        return texts.scan(prepare, step, state, (q, k, v, decay, beta))
    q, k, v, beta = (t.transpose(1, 2) for t in (q, k, v, beta[..., None]))
    state = state * decay[:, 0, :, None, None].exp()
    state = state + (beta * k).mT @ (v - k @ state)
    return (q @ state).transpose(1, 2), state


def between(total: Tensor) -> Tensor:
    """Factors (..., L, L) by which what token s wrote has decayed at token t >= s; 0 elsewhere.

    total: sums (..., L) of the logarithms of each token's factor.
    """
    size = total.shape[-1]
    later = total.new_ones(size, size, dtype=torch.bool).triu(1)
    return (total[..., None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
