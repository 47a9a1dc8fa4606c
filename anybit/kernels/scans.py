"""Recurrences over tokens in plain torch: the definitions, for prompts in chunks and single tokens.

B texts of L tokens each; states and sums are fp32. With one token, each is the recurrence itself.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens whose pairs are looked at together


def convolved(
    window: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A sum over each token and those just before it, for each channel by itself.

    Args:
        window: The K - 1 inputs before these, (B, K - 1, C).
        x: (B, L, C).
        weight: (C, K), the last of which is of the token itself.
        bias: (C,) or None.

    Returns:
        Sums (B, L, C) and the next window, both in x's dtype.
    """
    whole = torch.cat([window, x], 1)
    if x.shape[1] == 1:
        out = (whole.float() * weight.T.float()).sum(1, keepdim=True)
        out = (out if bias is None else out + bias.float()).to(x.dtype)
    else:
        out = F.conv1d(whole.mT, weight[:, None], bias, groups=len(weight)).mT
    return out, whole[:, x.shape[1] :]


def state_space(
    state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """Mamba 2: state = exp(dt a) state + dt x b^T, and output = state c, for each head.

    Args:
        state: (B, G, H, P, N) of H heads in each of G groups.
        x: (B, L, G, H, P).
        dt: (B, L, G, H).
        a: Negative numbers (G, H).
        b: Of each group, (B, L, G, N).
        c: As b.

    Returns:
        Outputs (B, L, G, H, P) and the next state.
    """
    x, decay = x * dt[..., None], dt * a
    if x.shape[1] == 1:
        state = state * decay[:, 0, ..., None, None].exp()
        state = state + x[:, 0, ..., None] * b[:, 0, :, None, None]
        return (state * c[:, 0, :, None, None]).sum(-1)[:, None], state
    out = []
    for part in zip(*(t.split(CHUNK, 1) for t in (x, decay, b, c)), strict=True):
        y, state = space_chunk(state, *part)
        out.append(y)
    return torch.cat(out, 1), state


def space_chunk(
    state: Tensor, x: Tensor, decay: Tensor, b: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """`state_space` of a few tokens, by their pairs; x and decay have been multiplied by dt."""
    total = decay.cumsum(1)
    alike = torch.einsum("blgn,bsgn->bgls", c, b)[:, :, None]
    own = torch.einsum("bghls,bsghp->blghp", alike * between(total.permute(0, 2, 3, 1)), x)
    before = torch.einsum("blgn,bghpn->blghp", c, state) * total[..., None].exp()
    left = x * (total[:, -1:] - total)[..., None].exp()
    state = state * total[:, -1, ..., None, None].exp()
    return own + before, state + torch.einsum("bsghp,bsgn->bghpn", left, b)


def selective(
    state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """Mamba 1: state = exp(dt a) state + dt x b^T, and output = state c, channel by channel.

    Args:
        state: (B, C, N).
        x: (B, L, C).
        dt: As x.
        a: Negative numbers (C, N).
        b: (B, L, N).
        c: As b.

    Returns:
        Outputs (B, L, C) and the next state.
    """
    out = []
    for each, step, *both in zip(*(t.split(CHUNK, 1) for t in (x, dt, b, c)), strict=True):
        write, read = (t[:, :, None] for t in both)
        # Each token's factor and what it adds, then those of 2, 4, 8, ... tokens up to it.
        factor, added = (step[..., None] * a).exp(), (step * each)[..., None] * write
        reach = 1
        while reach < each.shape[1]:
            later, earlier = factor[:, reach:], slice(None, -reach)
            added = torch.cat([added[:, :reach], added[:, reach:] + later * added[:, earlier]], 1)
            factor = torch.cat([factor[:, :reach], later * factor[:, earlier]], 1)
            reach *= 2
        states = factor * state[:, None] + added
        out.append((states * read).sum(-1))
        state = states[:, -1]
    return torch.cat(out, 1), state


def delta_rule(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule: a state maps keys to values, and each token corrects what its key gets.

    state = exp(decay) state; state = state + beta k (v - k state); output = q state.

    Args:
        state: (B, H, K, V).
        q: (B, H, L, K).
        k: As q.
        v: (B, H, L, V).
        decay: At most 0, (B, H, L).
        beta: (B, H, L).

    Returns:
        Outputs (B, H, L, V) and the next state.
    """
    if q.shape[2] == 1:
        state = state * decay[..., None].exp()
        state = state + (beta[..., None] * k).mT @ (v - k @ state)
        return q @ state, state
    out = []
    for part in zip(*(t.split(CHUNK, 2) for t in (q, k, v, decay, beta)), strict=True):
        y, state = delta_chunk(state, *part)
        out.append(y)
    return torch.cat(out, 2), state


def delta_chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """`delta_rule` of a few tokens: what each writes depends on what those before it have written,
    so all of it is the solution of a triangular system."""
    total, beta = decay.cumsum(-1), beta[..., None]
    grown, pairs = total[..., None].exp(), between(total)
    system, wanted = beta * (k @ k.mT) * pairs, beta * (v - grown * (k @ state))
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = grown * (q @ state) + (q @ k.mT * pairs) @ written
    left = k * (total[..., -1:] - total)[..., None].exp()
    return out, state * total[..., -1:, None].exp() + left.mT @ written


def between(total: Tensor) -> Tensor:
    """Factors (..., L, L) by which what token s wrote has decayed at token t >= s; 0 elsewhere.

    total: sums (..., L) of the logarithms of each token's factor.
    """
    size = total.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
    return (total[..., None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
