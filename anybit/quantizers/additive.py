"""Additive codebooks, calibrated: AQLM (Egiazarian et al., 2024,
https://arxiv.org/abs/2401.06118), which CodeGEMM builds on.

The layer's squared output error ||(W - W') X||^2 = tr(E H E^T), with E = W - W' and the inputs'
second moment H, is quadratic in everything but the codes. So it is minimized in turn

  over codes:     position by position, all others fixed, by a beam search over the codebooks;
  over codebooks: conjugate gradients, codes and scales fixed (AQLM uses Adam here);
  over scales:    the same, codes and codebooks fixed.

No step adds error but the rounding of the grid to 16 bits, after which codes are chosen once more.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import embedding

from anybit.core.format import Format, Grid
from anybit.core.groups import divisor, grouped, store_scale, ungroup
from anybit.core.packed import Packed
from anybit.formats.kmeans import argmin, sums_at
from anybit.quantizers.base import Block, Quantizer
from anybit.quantizers.calibration.data import Calibration, Source
from anybit.quantizers.calibration.statistics import Statistics
from anybit.quantizers.columns import propagate
from anybit.quantizers.gptq import GPTQ, column_order, inverse_factor
from anybit.quantizers.pv_tuning import tune_block

BLOCK = 128  # columns whose changes reach the columns beyond them in one matrix product
STEPS = 16  # of conjugate gradients
SMALLEST = 0.1  # a scale, over that of the first fit


@dataclass(frozen=True)
class Additive(Quantizer):
    """Calibrated codebooks for formats that have them, GPTQ for all others.

    Attributes:
        calibration: Texts, token ids or a file, or a `Calibration` that says more about them.
        rounds: Times that codes, codebooks and scales are optimized in turn.
        beam: Candidates for the codes of a vector that are kept from one codebook to the next.
        damping: Added to H's diagonal, as a fraction of its mean. On pico 0.1 instead of 0.01 takes
            4 % off the KL on text of the kind that m2v8 was calibrated on, and 14 % on text of
            another kind (0.3: 4 % and 25 %).
        steps: Of Adam on the grids and norms of a block, after its layers are quantized, towards
            the output of the dense block for the same inputs; 0 leaves them as they are.
        rate: Adam's learning rate, as a fraction of each tensor's root mean square; it falls to
            zero along a cosine.
        seed: Of the order in which Adam sees the samples.
        gradients: As GPTQ's; codebooks only count tokens by them.
    """

    calibration: Source | Calibration | None = field(default=None, repr=False)
    rounds: int = 4
    beam: int = 8
    damping: float = 0.1
    steps: int = 50
    rate: float = 1e-3
    seed: int = 0
    gradients: bool = False

    whole_block = True  # to tune towards the output of the dense block

    @property
    def needs(self) -> tuple[str, ...]:
        """As GPTQ's."""
        return self.other.needs

    @property
    def other(self) -> GPTQ:
        """What quantizes formats without codebooks."""
        return GPTQ(damping=self.damping, gradients=self.gradients)

    def quantize_block(self, block: Block) -> None:
        """Quantize a block's layers in place, then tune what is continuous in them."""
        # As large as the activations of all data, so not on the GPU.
        targets = [output().cpu() for output in block.outputs] if self.steps else []
        super().quantize_block(block)
        if self.steps:
            tune_block(block.module, block.outputs, targets, self.steps, self.rate, self.seed)

    def quantize(self, w: Tensor, fmt: Format, statistics: Statistics | None = None) -> Packed:
        """Optimize the codes and codebooks of a weight (N, K) for its inputs' Hessian."""
        hessian = self.check_statistics(statistics).hessian
        if fmt.lookup is None:
            return self.other.quantize(w, fmt, statistics)
        layer = Layer(w.float(), fmt, hessian, self.damping)
        for number in range(self.rounds):
            layer.choose_codes(self.beam, backwards=bool(number % 2))
            layer.fit_books()
            layer.fit_scale()
        layer.round_grid()
        layer.choose_codes(self.beam)
        return layer.packed()


class Layer:
    """A weight and its codebooks, codes and scales while they are optimized, in fp32.

    Args:
        w: Weights (N, K).
        fmt: A format with codebooks.
        hessian: (K, K), or empty for a layer that saw no token.
        damping: Added to the Hessian's diagonal, as a fraction of its mean.

    Attributes:
        codes: (N, P, m) int64 with P = K / v positions.
        books: (m, 2**b, v).
        scale: (N, groups).
        h: (K, K), damped and divided by the mean of its diagonal.
    """

    def __init__(self, w: Tensor, fmt: Format, hessian: Tensor, damping: float):
        n, k = w.shape
        assert fmt.lookup is not None
        self.w, self.fmt, self.table = w, fmt, fmt.lookup
        eye = torch.eye(k, dtype=torch.float32, device=w.device)
        mean = hessian.diagonal().mean().item() if hessian.numel() else 0.0
        self.h = hessian / mean + damping * eye if mean > 0 else eye
        grid = fmt.fit(w)
        order = column_order(self.h, fmt.width)
        u = inverse_factor(self.h[order][:, order], 0.0)
        codes = propagate(w.T[order], u, order.tolist(), fmt, grid)
        self.codes = codes.long().reshape(n, -1, fmt.books)
        self.books, self.scale = grid[self.table].float(), grid["scale"].float()
        self.first_scale = self.scale

    def error(self) -> float:
        """tr(E H E^T) over tr(W H W^T)."""
        e = self.w - self.decode(self.books, self.scale)
        return float((e @ self.h).mul_(e).sum() / (self.w @ self.h).mul_(self.w).sum())

    def values(self, books: Tensor) -> Tensor:
        """(N, K) in units of the scale."""
        total = embedding(self.codes[..., 0], books[0])
        for i in range(1, len(books)):
            total += embedding(self.codes[..., i], books[i])
        return total.flatten(1)

    def decode(self, books: Tensor, scale: Tensor) -> Tensor:
        """Weights (N, K) of these codebooks and scales."""
        return ungroup(grouped(self.values(books), scale) * scale[..., None])

    def fit_books(self) -> None:
        """The codebooks of least error for these codes and scales."""
        _, count, v = self.books.shape
        each = self.w.shape[1] // self.scale.shape[1]
        factor = self.scale.repeat_interleave(each, 1)

        def adjoint(g: Tensor) -> Tensor:
            parts = (g * factor).reshape(-1, v)
            return torch.stack([sums_at(c, parts, count) for c in self.codes.flatten(0, 1).T])

        diagonal = adjoint(factor * self.h.diagonal())
        self.books = self.minimize(
            self.books, lambda books: self.decode(books, self.scale), adjoint, diagonal
        )

    def fit_scale(self) -> None:
        """The scales of least error for these codes and codebooks."""
        values = self.values(self.books)

        def forward(scale: Tensor) -> Tensor:
            return ungroup(grouped(values, scale) * scale[..., None])

        def adjoint(g: Tensor) -> Tensor:
            return grouped(g * values, self.scale).sum(-1)

        diagonal = adjoint(values * self.h.diagonal())
        scale = self.minimize(self.scale, forward, adjoint, diagonal)
        self.scale = torch.maximum(scale, SMALLEST * self.first_scale)

    def minimize(
        self,
        x: Tensor,
        forward: Callable[[Tensor], Tensor],
        adjoint: Callable[[Tensor], Tensor],
        diagonal: Tensor,
    ) -> Tensor:
        """The x of least tr(E H E^T), E = W - forward(x), by preconditioned conjugate gradients.

        Args:
            x: Where to start.
            forward: A linear map to (N, K).
            adjoint: Its transpose.
            diagonal: That of x -> adjoint(forward(x) H), of the shape of x.
        """
        rest = adjoint((self.w - forward(x)) @ self.h)
        inverse = torch.where(diagonal > 0, 1 / diagonal.clamp_min(1e-12), 0.0)
        scaled = rest * inverse
        direction, size = scaled, (rest * scaled).sum()
        for _ in range(STEPS):
            image = adjoint(forward(direction) @ self.h)
            step = size / (direction * image).sum().clamp_min(1e-20)
            x = x + step * direction
            rest = rest - step * image
            scaled = rest * inverse
            size, before = (rest * scaled).sum(), size
            direction = scaled + size / before.clamp_min(1e-20) * direction
        return x

    def choose_codes(self, beam: int, backwards: bool = False) -> None:
        """Choose the codes of every vector anew, the others fixed; never for more error."""
        k, v = self.w.shape[1], self.fmt.width
        each = k // self.scale.shape[1]
        e = self.w - self.decode(self.books, self.scale)
        order = [*range(self.fmt.books)]
        block = v * max(1, BLOCK // v)
        for start in range(0, k, block):
            stop = min(start + block, k)
            g = e @ self.h[:, start:stop]
            for at in range(start, stop, v):
                here, scale = slice(at, at + v), self.scale[:, at // each, None]
                change = scale * self.choose(
                    at // v,
                    g[:, at - start : at - start + v] / divisor(scale),
                    beam,
                    order[:: -1 if backwards else 1],
                )
                e[:, here] -= change
                g.addmm_(change, self.h[here, start:stop], alpha=-1)

    def choose(self, p: int, g: Tensor, beam: int, order: list[int]) -> Tensor:
        """Choose the codes of position p by beam search over the codebooks.

        With values x and A = H at p, the error of values y is y A y - 2 y (A x + g), up to a
        constant and in units of the squared scale.

        Args:
            p: The position.
            g: (E H) / scale at p, (N, v).
            beam: Candidates that are kept from one codebook to the next.
            order: In which the codebooks are searched.

        Returns:
            The change (N, v) of the position's values.
        """
        v, m = g.shape[1], len(order)
        a = self.h[p * v : p * v + v, p * v : p * v + v]
        codes = self.codes[:, p]
        x = sum(embedding(codes[:, i], self.books[i]) for i in order)
        assert isinstance(x, Tensor)
        target = x @ a + g
        count = self.books.shape[1]
        beams, y = codes[:, None], x[:, None]  # (N, B, m), (N, B, v)
        for last, i in zip([*[False] * (m - 1), True], order, strict=True):
            book = self.books[i]
            base = y - embedding(beams[..., i], book)
            slope = base @ a - target[:, None]
            own = (base * (slope - target[:, None])).sum(-1)
            quadratic = (book @ a).mul_(book).sum(1)
            score = torch.addmm(quadratic, slope.flatten(0, 1), book.T, alpha=2)
            score = score.view(*own.shape, count)
            if own.shape[1] > 1:
                score += own[..., None]
            score = score.flatten(1)
            if last:
                best = argmin(score)[:, None]
            else:
                best = score.topk(min(beam, score.shape[1]), largest=False).indices
            source, code = best // count, best % count
            beams = beams.gather(1, source[..., None].expand(-1, -1, m)).clone()
            beams[..., i] = code
            y = base.gather(1, source[..., None].expand(-1, -1, v)) + embedding(code, book)
        change = y[:, 0] - x
        better = ((change @ a - 2 * g) * change).sum(1) < 0
        self.codes[:, p] = torch.where(better[:, None], beams[:, 0], codes)
        return change * better[:, None]

    def round_grid(self) -> None:
        """Codebooks and scales as they are stored."""
        self.grid: Grid = {
            "scale": store_scale(self.scale, zeros=0),
            self.table: self.books.half(),
        }
        self.scale, self.books = self.grid["scale"].float(), self.grid[self.table].float()

    def packed(self) -> Packed:
        """The weight as it is stored, after `round_grid`."""
        shape = (self.w.shape[0], self.w.shape[1])
        codes = self.codes.flatten(1)
        codes = codes.int() if self.fmt.bits == 16 else codes.to(torch.uint8)
        return Packed.from_codes(self.fmt, shape, codes, self.grid)
