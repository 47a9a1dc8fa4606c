"""Attention of few tokens over a paged KV cache, in the model's dtype, int8 or int4.

Pages are read where they lie: a part of a context at a time, once for all query heads that share
a K head, and for some tokens of a text that follow each other. `combine` adds the parts up. A
token's numbers do not depend on those beside it.
"""

from dataclasses import dataclass
from functools import cache

from torch import Tensor

from anybit.kernels.attention import Part, Scores
from anybit.kernels.kv.cache import LayerCache
from anybit.kernels.native import build, ir
from anybit.kernels.native.activations import DTYPES
from anybit.kernels.native.cache import Cache, cache_of
from anybit.kernels.native.floats import BYTES, exp, largest, maximum, read, rounded
from anybit.kernels.native.fused import bits_of, level, threads
from anybit.kernels.native.ir import F32, I8, I32, Function, Value, vec
from anybit.kernels.native.isa import Isa

ATTEND = (
    "next",
    "q",
    "k",
    "v",
    "k_scale",
    "v_scale",
    "tables",
    "width",
    "contexts",
    "starts",
    "ends",
    "sums",
    "outs",
    "sequences",
    "kv_heads",
    "block",
    "parts",
    "scale",
    "window",
    "cap",
)
COMBINE = (
    "next",
    "sums",
    "outs",
    "sinks",
    "ends",
    "out",
    "first",
    "last",
    "rows",
    "heads",
    "parts",
)
PART = 256  # tokens of a context that a thread attends to at once
QUERIES = 16  # of a K head that a thread attends with at once, at least one token's
MOST_TOKENS = 64  # beside each other, of any texts
LEAST = -1e30  # a score below all others that a float can be subtracted from
NO_WINDOW = 1 << 40


def attend(
    q: Tensor,
    cache: LayerCache,
    part: Part,
    longest: int,
    scores: Scores,
    out: Tensor,
) -> Tensor:
    """Attention of the last tokens of some sequences over what the cache holds of them.

    Args:
        q: (T, heads, D), as `write` returns it; at most MOST_TOKENS, unless all are single.
        cache: what is attended to.
        part: the sequences; all of one token, if `part.longest` is 1.
        longest: tokens of the longest context that there may be.
        scores: how queries weigh keys; without a mask.
        out: (T, heads, D), of which rows before the part's are left alone; zeros where a context
            is empty, and behind the part's.

    Returns:
        `out`.
    """
    _, kv_heads, block, _ = cache.k.shape
    tokens, heads, dim = q.shape
    scale, window, softcap, sinks, _ = scores
    several, sequences = part.longest > 1, len(part.contexts)
    parts = -(-longest // PART)
    q = q.contiguous()
    rows = tokens * heads * parts
    room = build.workspace(rows * 4 * (2 + dim) + 4 * tokens)
    sums, outs = room.data_ptr(), room.data_ptr() + rows * 8
    starts = part.starts.data_ptr() if several else 0
    ends = outs + rows * 4 * dim if several else part.contexts.data_ptr()
    count = threads(tokens * heads * longest * dim)
    spec = Attend(cache_of(q, cache), heads // kv_heads, softcap is not None, several)
    tensors = q, cache.k, cache.v, cache.k_scale, cache.v_scale, part.tables
    texts = part.tables.stride(0), part.contexts.data_ptr(), starts, ends
    sizes = sequences, kv_heads, block, parts
    how = bits_of(scale), NO_WINDOW if window is None else window, bits_of(softcap or 0.0)
    attend_kernel(spec)((0, *map(build.pointer, tensors), *texts, sums, outs, *sizes, *how), count)
    sinks = None if sinks is None else sinks.float()
    last = starts + 4 * sequences
    places = sums, outs, build.pointer(sinks), ends, out.data_ptr(), starts, last
    combine_kernel(level(), DTYPES[q.dtype], dim, sinks is not None, several)(
        (0, *places, tokens * heads, heads, parts)
    )
    return out


@dataclass(frozen=True)
class Attend:
    """What the kernel is compiled for.

    group: query heads of a K head. capped: whether scores have a soft cap. several: whether
    sequences may have more than one token.
    """

    cache: Cache
    group: int
    capped: bool
    several: bool

    @property
    def tokens(self) -> int:
        """Tokens of a sequence that are attended with at once."""
        return max(1, QUERIES // self.group) if self.several else 1


@cache
def attend_kernel(spec: Attend) -> build.Kernel:
    f = _Attend(spec).function
    return build.kernel(f)


class _Attend:
    """The function under construction: a part of a context for the query heads of a K head."""

    def __init__(self, spec: Attend):
        self.spec, self.cache, self.group = spec, spec.cache, spec.group
        cache, queries = spec.cache, spec.group * spec.tokens
        self.function = f = Function("attend", ATTEND, spec.cache.isa)
        self.dim, self.lanes = cache.dim, cache.isa.floats
        self.q, self.out = (f.allocate(F32, queries * cache.dim) for _ in range(2))
        self.scores = f.allocate(F32, queries * PART)
        self.tile = f.allocate(F32, self.lanes * cache.dim)
        parts, self.kv_heads = f.number("parts"), f.number("kv_heads")
        self.heads = self.kv_heads * self.group
        longest, most = f.variable(f.integer(0)), f.variable(f.integer(1))
        there = f.variable(f.integer(0))  # sequences up to the last one that has tokens
        with f.loop(0, f.number("sequences")) as b:
            context = f.listed("contexts", b)
            longest.set(larger(longest.get(), context))
            there.set((context > 0).select(b + 1, there.get()))
            if spec.several:
                own = f.listed("starts", b + 1) - f.listed("starts", b)
                most.set(larger(most.get(), own))
        used = (longest.get() + (PART - 1)) // PART
        tiles = (most.get() + (spec.tokens - 1)) // spec.tokens
        total = there.get() * tiles * self.kv_heads * used
        with f.chunks(1, total) as (unit, _):
            part, rest = unit % used, unit // used
            self.head, rest = rest % self.kv_heads, rest // self.kv_heads
            tile, b = rest % tiles, rest // tiles
            self.table = f.at("tables", b * f.number("width") * 4)
            context = f.listed("contexts", b)
            self.row, stop = b, b + 1
            if spec.several:
                self.row, stop = (f.listed("starts", i) for i in (b, b + 1))
                # Of a token in row r the context ends at r + self.past.
                self.past = context - stop + 1
                self.row = self.row + tile * spec.tokens
                stop = (self.row + spec.tokens).smaller(stop)
                context = stop - 1 + self.past
            else:
                self.past = context - b
            self.start = part * PART
            with f.when(self.row < stop):
                self._tile(stop - self.row, (self.start + PART).smaller(context), part, parts)

    def _tile(self, tokens: Value, stop: Value, part: Value, parts: Value) -> None:
        """Attend with some tokens of a sequence."""
        f, spec = self.function, self.spec
        self.stop, self.step, group = stop, parts, f.integer(self.group)
        # Whole vectors before the first one's window are left out.
        skipped = larger(self._seen(self.row) - self.start, 0)
        self.first = self.start + skipped // self.lanes * self.lanes
        first = self.row * self.heads + self.head * self.group  # of the tile's query heads
        self.sums = f.at("sums", (first * parts + part) * 8)
        outs = f.at("outs", (first * parts + part) * (4 * self.dim))
        queries = tokens * group if spec.several else group
        if spec.several:  # for `combine`
            with f.loop(self.row, self.row + tokens) as r:
                f.store((r + self.past).cast("trunc", I32), "ends", r << 2)
        with f.when(self.first >= self.stop), f.loop(0, queries) as g:
            at = self._place(g) * parts * 8
            f.store(f.constant(LEAST, F32), self.sums, at)
            f.store(f.constant(0, F32), self.sums, at + 4)
        with f.when(self.first < self.stop):
            self._queries(queries, first)
            with f.loop(self.first, self.stop, self.lanes) as t:
                self._fetch("k", t)
                with f.loop(0, queries) as g:
                    self._score(t, g)
            with f.loop(0, queries) as g:
                self._weigh(g)
            with f.loop(self.first, self.stop, self.lanes) as t:
                self._fetch("v", t)
                with f.loop(0, queries) as g:
                    self._add(t, g)
            self._finish(queries, outs)

    def _seen(self, row: Value) -> Value:
        """The first token of a context that the token in a row sees."""
        some = row + self.past - self.function.number("window")
        return larger(some, self.function.integer(0))

    def _place(self, g: Value) -> Value:
        """Query heads between the tile's first one and its one g."""
        if not self.spec.several:
            return g
        return g // self.group * self.heads + g % self.group

    def _queries(self, queries: Value, first: Value) -> None:
        """Queries times the scale, and static scales of K's channels; outputs of zero."""
        f, size = self.function, BYTES[self.cache.dtype]
        q = f.at("q", first * (self.dim * size))
        scale = f.load(F32, f.address("scale")).splat(self.lanes)
        with f.loop(0, queries) as g:
            own = self._place(g) * (self.dim * size)
            for i in range(0, self.dim, self.lanes):
                x = read(self.cache.dtype, q, own + i * size, self.lanes)
                if self.cache.k == "static":
                    x = x * self._channels("k", i)
                f.store(x * scale, self.q, g * (4 * self.dim) + 4 * i)
                f.store(f.constant(0, x.kind), self.out, g * (4 * self.dim) + 4 * i)

    def _channels(self, which: str, i: int) -> Value:
        """Static scales of channels from i on."""
        kind, at = vec(self.lanes, F32), self.head * (4 * self.dim) + 4 * i
        return self.function.load(kind, f"{which}_scale", at)

    def _fetch(self, which: str, t: Value) -> None:
        """K or V of the tokens from t on as fp32; the last one's again behind it."""
        f, cache = self.function, self.cache
        block = f.number("block")
        with f.loop(0, self.lanes) as i:
            token = (t + i).smaller(self.stop - 1)
            page = f.load(I32, self.table, token // block << 2)
            page = page.cast("sext", ir.I64) * self.kv_heads + self.head
            place = page * block + token % block
            row, to = f.at(which, place * cache.row_bytes(which)), i * (4 * self.dim)
            if cache.kind(which) == "int4":
                self._unpack(which, row, page, token % block, to)
            else:
                self._read(which, row, place, to)

    def _read(self, which: str, row: Value, place: Value, to: Value) -> None:
        """A token's head into the tile."""
        f, stored = self.function, self.cache.stored(which)
        for j in range(0, self.dim, self.lanes):
            x = read(stored, row, j * BYTES[stored], self.lanes)
            if self.cache.kind(which) == "dynamic":
                scale = f.load(F32, f"{which}_scale", place << 2)
                x = x * scale.splat(self.lanes)
            f.store(x, self.tile, to + 4 * j)

    def _unpack(self, which: str, row: Value, page: Value, offset: Value, to: Value) -> None:
        """Both halves of a token's head in int4, into the tile."""
        f, cache, half = self.function, self.cache, self.dim // 2
        lanes, block = cache.lanes, f.number("block")
        grid = []
        for g in range(2 * cache.groups):
            at = (page * 2 * cache.groups + g) * block + offset << 2
            pair = (f.load("half", f"{which}_scale", at + 2 * n) for n in range(2))
            grid.append([x.cast("fpext", F32).splat(lanes) for x in pair])
        for j in range(0, half, lanes):
            pairs = f.load(vec(lanes, I8), row, j).cast("zext", vec(lanes, I32))
            group = j // cache.group
            for codes, place, (scale, low) in (
                (pairs & 15, j, grid[group]),
                (pairs >> 4, half + j, grid[cache.groups + group]),
            ):
                x = codes.cast("sitofp", vec(lanes, F32))
                f.store(x.fma(scale, low), self.tile, to + 4 * place)

    def _score(self, t: Value, g: Value) -> None:
        """Scores of the tile's tokens."""
        f, lanes = self.function, self.lanes
        kind = vec(self.lanes, F32)
        sums = [f.constant(0, kind)] * lanes
        for j in range(0, self.dim, self.lanes):
            q = f.load(kind, self.q, g * (4 * self.dim) + 4 * j)
            for i in range(lanes):
                k = f.load(kind, self.tile, 4 * (i * self.dim + j))
                sums[i] = q.fma(k, sums[i])
        score = add_up(sums)
        if self.spec.capped:
            cap = f.load(F32, f.address("cap")).splat(lanes)
            double = exp((score + score) // cap)
            score = cap * (1 - 2 // (double + 1))
        tokens = t.splat(lanes) + _counting(f, lanes)
        row = self.row + g // self.group if self.spec.several else self.row
        outside = [bound.splat(lanes) for bound in (self._seen(row), row + self.past)]
        least = f.constant(float("-inf"), score.kind)
        score = (tokens < outside[0]).select(least, score)
        score = (tokens >= outside[1]).select(least, score)
        f.store(score, self.scores, g * (4 * PART) + ((t - self.start) << 2))

    def _weigh(self, g: Value) -> None:
        """Scores to weights that are not divided by their sum yet; the largest score, and the sum.

        The largest starts from a finite number, so that there are no differences of infinities.
        """
        f, lanes = self.function, self.lanes
        kind = vec(lanes, F32)
        scores = f.at(self.scores, g * (4 * PART))
        most = f.variable(f.constant(LEAST, kind))
        first, stop = self.first - self.start, self.stop - self.start
        with f.loop(first, stop, lanes) as t:
            most.set(maximum(most.get(), f.load(kind, scores, t << 2)))
        top = largest(most.get())
        total = f.variable(f.constant(0, kind))
        with f.loop(first, stop, lanes) as t:
            weight = exp(f.load(kind, scores, t << 2) - top.splat(lanes))
            f.store(weight, scores, t << 2)
            total.set(total.get() + weight)
        at = self._place(g) * self.step * 8
        f.store(top, self.sums, at)
        f.store(total.get().sum(), self.sums, at + 4)

    def _add(self, t: Value, g: Value) -> None:
        """Add the tile's values times their weights."""
        f, kind = self.function, vec(self.lanes, F32)
        places = range(0, self.dim, self.lanes)
        at = g * (4 * self.dim)
        totals = [f.load(kind, self.out, at + 4 * j) for j in places]
        weights = f.at(self.scores, g * (4 * PART) + ((t - self.start) << 2))
        for i in range(self.lanes):
            weight = f.load(F32, weights, 4 * i).splat(self.lanes)
            for n, j in enumerate(places):
                v = f.load(kind, self.tile, 4 * (i * self.dim + j))
                totals[n] = weight.fma(v, totals[n])
        for total, j in zip(totals, places, strict=True):
            f.store(total, self.out, at + 4 * j)

    def _finish(self, queries: Value, outs: Value) -> None:
        f, kind = self.function, vec(self.lanes, F32)
        with f.loop(0, queries) as g:
            for j in range(0, self.dim, self.lanes):
                x = f.load(kind, self.out, g * (4 * self.dim) + 4 * j)
                if self.cache.v == "static":
                    x = x * self._channels("v", j)
                f.store(x, outs, self._place(g) * self.step * (4 * self.dim) + 4 * j)


def larger(a: Value, b: Value | int) -> Value:
    """The larger of two integers."""
    return (a > b).select(a, b)


def add_up(rows: list[Value]) -> Value:
    """The sum of each row, in the lanes of one vector; as many rows as that has lanes."""
    width = 1
    while len(rows) > 1:
        rows = [_pairs(a, b, width) for a, b in zip(rows[::2], rows[1::2], strict=True)]
        width *= 2
    return rows[0]


def _pairs(a: Value, b: Value, width: int) -> Value:
    """Runs of `width` lanes of a and b in turn, each added to the run beside it."""
    count = ir.lanes(a.kind)
    left = [
        start + side + i
        for start in range(0, count, 2 * width)
        for side in (0, count)
        for i in range(width)
    ]
    return a.shuffle(b, left) + a.shuffle(b, [i + width for i in left])


def _counting(f: Function, count: int) -> Value:
    """0, 1, 2, ... as 64-bit integers."""
    return Value(f, f"<{', '.join(f'i64 {i}' for i in range(count))}>", vec(count, ir.I64))


@cache
def combine_kernel(isa: Isa, dtype: str, dim: int, sinks: bool, several: bool) -> build.Kernel:
    """Adds up the parts of a context; several: of tokens from `first` on and before `last`."""
    f = Function("combine", COMBINE, isa)
    parts, heads, size = f.number("parts"), f.number("heads"), BYTES[dtype]
    lanes = isa.floats
    begin = stop = f.integer(0)
    if several:
        begin, stop = (
            f.load(I32, f.pointer(name)).cast("sext", ir.I64) * heads for name in ("first", "last")
        )
    count = f.number("rows") - begin
    with f.chunks(1, count) as (unit, _):
        row = unit + begin
        sums = f.at("sums", row * parts * 8)
        outs = f.at("outs", row * parts * (4 * dim))
        end = f.load(I32, "ends", row // heads << 2)
        used = (end.cast("sext", ir.I64) + (PART - 1)) // PART
        if several:
            used = (row < stop).select(used, 0)
        most = f.variable(f.constant(LEAST, F32))
        if sinks:
            sink = f.load(F32, "sinks", row % heads << 2)
            most.set(maximum(most.get(), sink))
        with f.loop(0, used) as p:
            most.set(maximum(most.get(), f.load(F32, sums, p << 3)))
        total = f.variable(exp(sink - most.get()) if sinks else f.constant(0, F32))
        kind = vec(lanes, F32)
        channels = [f.variable(f.constant(0, kind)) for _ in range(dim // lanes)]
        with f.loop(0, used) as p:
            some = f.load(F32, sums, (p << 3) + 4)
            with f.when(some.compare("une", 0)):  # NaN is not left out
                weight = exp(f.load(F32, sums, p << 3) - most.get())
                total.set(some.fma(weight, total.get()))
                for i, channel in enumerate(channels):
                    x = f.load(kind, outs, p * (4 * dim) + 4 * lanes * i)
                    channel.set(x.fma(weight.splat(lanes), channel.get()))
        some = total.get()
        nothing = some.compare("oeq", 0)
        factor = (1 // nothing.select(f.constant(1, F32), some)).splat(lanes)
        for i, channel in enumerate(channels):
            y = rounded(channel.get() * factor, dtype)
            f.store(y, "out", row * (dim * size) + size * lanes * i)
    return build.kernel(f)
