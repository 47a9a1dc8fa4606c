"""Scans over several texts: whatever shares them, each text's recurrence is what it is alone."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from anybit.kernels.scans import (
    CHUNK,
    Padded,
    Singles,
    Texts,
    convolved,
    delta_rule,
    selective,
    state_space,
)

Recurred = tuple[Tensor, Tensor]  # outputs, and states


def space(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Recurred:
    out = []
    for t in range(len(x)):
        state = state * (dt[t] * a).exp()[..., None, None]
        state = state + (dt[t, ..., None] * x[t])[..., None] * b[t, :, None, None]
        out.append((state * c[t, :, None, None]).sum(-1))
    return torch.stack(out), state


def channels(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Recurred:
    out = []
    for t in range(len(x)):
        state = state * (dt[t, :, None] * a).exp() + (dt[t] * x[t])[..., None] * b[t]
        out.append((state * c[t]).sum(-1))
    return torch.stack(out), state


def delta(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Recurred:
    out = []
    for t in range(len(q)):
        state = state * decay[t, :, None, None].exp()
        off = v[t] - (state * k[t, ..., None]).sum(1)
        state = state + (beta[t, :, None] * k[t])[..., None] * off[:, None]
        out.append((state * q[t, ..., None]).sum(1))
    return torch.stack(out), state


@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [2],
        [CHUNK],
        [CHUNK + 1, 3],
        [5, 3 * CHUNK - 1, CHUNK, 1, 2 * CHUNK, 2 * CHUNK],
        [1] * 9,
    ],
)
def test_scans_are_recurrences_however_texts_are_cut(lengths: list[int]) -> None:
    """From any states on, with states at places in between, and in one step or several."""
    rng, made = random.Random(len(lengths)), torch.Generator().manual_seed(sum(lengths))
    total, count = sum(lengths), len(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    def check(
        scan: Callable[..., Recurred], recurrence: Callable[..., Recurred], state: Tensor,
        parts: list[Tensor], **options: Tensor,
    ) -> None:  # fmt: skip
        for several in (False, True):
            kept = {i: {rng.randint(1, n), rng.randint(1, n)} for i, n in enumerate(lengths)}
            kept = {i: places for i, places in kept.items() if rng.random() < 0.7}
            texts = Texts.cut(lengths, kept, torch.device("cpu"))
            texts.near = rng.random() < 0.5  # elsewhere, all tokens are in hand at once
            order = texts.order.tolist()
            if several and total > count:  # all but the first token in another step
                own, after = [], state
                first = [sum(lengths[:i]) for i in range(count)]
                one = [texts_part[first] for texts_part in parts]
                out, after = scan(after, one, Singles(count), **options)
                going = [i for i, n in enumerate(lengths) if n > 1]
                rest = [t for i, n in zip(first, lengths, strict=True) for t in range(i + 1, i + n)]
                texts = Texts.cut([lengths[i] - 1 for i in going], {}, torch.device("cpu"))
                order = [going[i] for i in texts.order.tolist()]
                own, ended = scan(after[order], [part[rest] for part in parts], texts, **options)
                got = torch.empty(total, *out.shape[1:], dtype=out.dtype)
                got[first], got[rest] = out, own
                states, kept = after.clone(), {}
                states[order] = ended
                order = list(range(count))
            else:
                got, states = scan(state[order], parts, texts, **options)
            at = 0
            for i, n in enumerate(lengths):
                own = [part[at : at + n] for part in parts]
                want, end = recurrence(state[i], *own, **options)
                torch.testing.assert_close(got[at : at + n], want)
                torch.testing.assert_close(states[order.index(i)], end)
                at += n
            for found, (at, begin, passed) in zip(
                states[count:], texts.ends.T.tolist()[count:] if kept else [], strict=True
            ):
                assert begin == sum(lengths[: order[at]])
                assert passed in kept[order[at]]
                own = [part[begin : begin + passed] for part in parts]
                torch.testing.assert_close(found, recurrence(state[order[at]], *own, **options)[1])
            assert len(states) == count + sum(len(places) for places in kept.values())
        # Padded, with a text of no tokens, whose state stays.
        size = max(lengths) + 2
        padded = Padded(torch.tensor([*lengths, 0], dtype=torch.int32), size)
        at = [i * size + t for i, n in enumerate(lengths) for t in range(n)]
        wide = [
            torch.zeros((count + 1) * size, *part.shape[1:], dtype=part.dtype).index_copy(
                0, torch.tensor(at), part
            )
            for part in parts
        ]
        more = torch.cat([state, state[:1]])
        got, states = scan(more, wide, padded, **options)
        begin = 0
        for i, n in enumerate(lengths):
            want, end = recurrence(state[i], *(p[begin : begin + n] for p in parts), **options)
            torch.testing.assert_close(got[i * size : i * size + n], want)
            torch.testing.assert_close(states[i], end)
            begin += n
        torch.testing.assert_close(states[count], state[0])

    def in_pieces(function: Callable[..., Recurred]) -> Callable[..., Recurred]:
        def scan(state: Tensor, parts: list[Tensor], texts: Texts, **options: Tensor) -> Recurred:
            cut = [texts.pieces(part) for part in parts]
            out, after = function(state, cut, texts, **options)
            return texts.flat(out), after

        return scan

    x, dt, b, c = normal(total, 3, 2, 5), normal(total, 3, 2).exp(), *normal(2, total, 3, 4)
    check(
        in_pieces(lambda s, p, texts, a: state_space(s, p[0], p[1], a, p[2], p[3], texts)),
        space, normal(count, 3, 2, 5, 4), [x, dt, b, c], a=-normal(3, 2).exp(),
    )  # fmt: skip
    x, dt, b, c = normal(total, 5), normal(total, 5).exp(), *normal(2, total, 3)
    check(
        in_pieces(lambda s, p, texts, a: selective(s, p[0], p[1], a, p[2], p[3], texts)),
        channels, normal(count, 5, 3), [x, dt, b, c], a=-normal(5, 3).exp(),
    )  # fmt: skip
    q, k = normal(2, total, 3, 4) / 2
    v, decay, beta = normal(total, 3, 5), -normal(total, 3).exp(), normal(total, 3).sigmoid()
    check(
        in_pieces(lambda s, p, texts: delta_rule(s, p[0], p[1], p[2], p[3], p[4], texts)),
        delta, normal(count, 3, 4, 5), [q, k, v, decay, beta],
    )  # fmt: skip

    weight, bias = normal(6, 4), normal(6)

    def convolve(window: Tensor, parts: list[Tensor], texts: Texts) -> Recurred:
        out, after = convolved(window, parts[0], weight, bias, texts)
        return texts.flat(out).double(), after

    def convolution(window: Tensor, x: Tensor) -> Recurred:
        padded = torch.cat([window, x])
        sums = [(padded[t : t + 4] * weight.T).sum(0) + bias for t in range(len(x))]
        return torch.stack(sums), padded[len(x) :]

    window, x = normal(count, 3, 6), normal(total, 6)
    weight, bias, window, x = (t.half().double() for t in (weight, bias, window, x))
    check(convolve, convolution, window, [x])
