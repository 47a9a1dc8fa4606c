"""The encoder of `trellis`: the sequence of states that errs least (Viterbi's algorithm).

A sequence is closed: its first state follows from its last. To find the best closed one would take
a search for every start; two passes come near (QTIP, algorithm 4). The first pass takes the last
and the first half of the sequence as one open sequence, and finds which bits the two share there.
The second pass begins and ends with these bits. Quarters instead of halves would take 3/4 of the
time, and err by 0.7 % more at 2 bits.

This is the definition; `Family.paths` of `between.py` finds kernels that do the same.
"""

import torch
from torch import Tensor

from anybit.core.format import Format

CHUNK = 64  # sequences that plain torch works on at a time


def paths(x: Tensor, table: Tensor, fmt: Format, lead: int) -> Tensor:
    """The best closed path of each sequence, nearly.

    Args:
        x: What is to be coded, (n, steps, V) fp32.
        table: Values (2**L, V) fp32 of all states, which `fmt.triton_decode` computes.
        fmt: Of `fmt.bits` a step, at most L / 2.
        lead: Steps at either end of a sequence that the first pass takes.

    Returns:
        States (n, steps) int32; each has the bits of the one before, the first those of the last.
    """
    if len(x) > CHUNK:
        return torch.cat([paths(part, table, fmt, lead) for part in x.split(CHUNK)])
    bits = fmt.bits
    seam = torch.cat((x[:, -lead:], x[:, :lead]), 1)
    pin = _pass(seam, table, bits)[:, lead] >> bits
    return _pass(x, table, bits, pin).int()


def _pass(x: Tensor, table: Tensor, bits: int, pin: Tensor | None = None) -> Tensor:
    """The best states (n, steps) int64; with `pin`, those that begin and end with its bits."""
    n, steps, width = x.shape
    tops = 1 << bits  # what the top bits of a state may be, which the next state no longer has
    ends = len(table) >> bits
    numbers = table.view(tops, ends, width)
    cost = x.new_zeros(n, ends)
    if pin is not None:
        cost.fill_(torch.inf).scatter_(1, pin[:, None], 0)
    back = []
    for t in range(steps):
        # The state top * ends + end follows those that end with (top * ends + end) >> bits.
        before = cost.view(n, tops, -1).repeat_interleave(tops, 2)
        cost, top = ((numbers - x[:, t, None, None]).square().sum(-1) + before).min(1)
        back.append(top)
    end = cost.argmin(1) if pin is None else pin
    states = []
    for top in reversed(back):
        state = end | top.gather(1, end[:, None])[:, 0] * ends
        states.append(state)
        end = state >> bits
    return torch.stack(states[::-1], 1)
