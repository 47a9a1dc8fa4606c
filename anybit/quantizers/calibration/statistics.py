"""Statistics of the inputs of a linear layer, which calibrated quantizers go by."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from anybit.core.rotation import Rotation, block, hadamard, turned

SAMPLE = 512  # input rows that `Statistics.sample` keeps
BAND = 256  # rows of a symmetric product at a time, on a CPU


def nothing() -> Tensor:
    return torch.empty(0)


def products(x: Tensor) -> Tensor:
    """x^T x (K, K) fp32, of x (T, K)."""
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        # Of 16-bit numbers tensor cores find exact products, and add them up in fp32.
        return torch.mm(x.T, x, out_dtype=torch.float32)
    wide = x.float()
    if x.is_cuda:
        return wide.T @ wide
    out = wide.new_empty(x.shape[1], x.shape[1])
    for start in range(0, len(out), BAND):  # the lower triangle is the upper one
        rows = slice(start, start + BAND)
        out[rows, start:] = wide[:, rows].T @ wide[:, start:]
        out[rows, :start] = out[:start, rows].T
    return out


def turned_outputs(gradients: Tensor, vector: Tensor) -> Tensor:
    """Second moments (blocks, rows, rows) of H (vector * g), from those of g, vector (N,)."""
    count, rows, _ = gradients.shape
    v = gradients.new_zeros(count * rows)
    v[: len(vector)] = vector.to(v)
    v = v.view(count, rows, 1)
    h = hadamard(block(len(vector))).to(v)
    out = gradients * v * v.mT
    for _ in range(2):
        out = (out.unflatten(-1, (-1, len(h))) @ h).flatten(-2).mT
    return out.contiguous()


@dataclass
class Statistics:
    """Statistics of the inputs x (T, K) of a linear layer, on the device of x.

    Only the fields that a quantizer names in `Quantizer.needs` are collected. All others, and all
    of a layer that saw no token, are empty tensors of shape (0,).

    Attributes:
        tokens: T, the number of input rows; always counted.
        hessian: The second moment, mean of x x^T, (K, K) fp32. It is half the Hessian of the
            layer's mean squared output error (GPTQ's H, up to a factor).
        amax: max |x| of every channel, (K,) fp32.
        mean_abs: Mean |x| of every channel, (K,) fp32.
        drift: Mean of (x' - x) x^T, (K, K) fp32, where x' is what the dense model has in x's place.
        sample: About 512 rows of x, evenly spaced, (S, K) in the dtype of x.
        gradients: What `output_gradients` finds for the layer's outputs, (blocks, rows, rows) fp32.
    """

    tokens: int = 0
    hessian: Tensor = field(default_factory=nothing)
    amax: Tensor = field(default_factory=nothing)
    mean_abs: Tensor = field(default_factory=nothing)
    sample: Tensor = field(default_factory=nothing)
    drift: Tensor = field(default_factory=nothing)
    gradients: Tensor = field(default_factory=nothing)

    def add(
        self,
        x: Tensor,
        needs: tuple[str, ...],
        every: int,
        dense: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        """Update with more inputs.

        Args:
            x: Inputs (T, K) of any float dtype.
            needs: Names of the fields to update.
            every: Distance of the sampled rows.
            dense: What the dense model has in their place (T, K); the same by default.
            weights: How much each counts for the second moments (T,), 1 in the mean and by default.
        """
        before, self.tokens = self.tokens, self.tokens + len(x)
        if not len(x):
            return
        share = len(x) / self.tokens
        wide, root = x.float(), None if weights is None else weights.to(x.device).sqrt()[:, None]
        counted = x if root is None else (wide * root).to(x.dtype)
        if "hessian" in needs:
            if not self.hessian.numel():
                self.hessian = wide.new_zeros(x.shape[1], x.shape[1])
            self.hessian.mul_(1 - share).add_(products(counted), alpha=share / len(x))
        if "drift" in needs:
            if not self.drift.numel():
                self.drift = wide.new_zeros(x.shape[1], x.shape[1])
            apart = torch.zeros_like(wide) if dense is None else dense.float() - wide
            apart = apart if root is None else apart * root
            self.drift.addmm_(apart.T, counted.float(), beta=1 - share, alpha=share / len(x))
        if "amax" in needs:
            amax = wide.abs().amax(0)
            self.amax = torch.maximum(self.amax, amax) if before else amax
        if "mean_abs" in needs:
            mean = wide.abs().mean(0)
            self.mean_abs = self.mean_abs.lerp(mean, share) if before else mean
        if "sample" in needs:
            rows = x[-before % every :: every]
            self.sample = torch.cat((self.sample, rows)) if before else rows.clone()

    def divided(self, s: Tensor) -> "Statistics":
        """The statistics of x / s, for a scale s (K,) per channel."""
        return Statistics(
            self.tokens,
            self.hessian / s / s[:, None] if self.hessian.numel() else self.hessian,
            self.amax / s if self.amax.numel() else self.amax,
            self.mean_abs / s if self.mean_abs.numel() else self.mean_abs,
            (self.sample.float() / s).to(self.sample.dtype) if self.sample.numel() else self.sample,
            self.drift / s / s[:, None] if self.drift.numel() else self.drift,
            self.gradients,
        )

    def rotated(self, rotation: Rotation) -> "Statistics":
        """The statistics of a rotated layer: of H (rotate_in * x), and of its outputs before H.

        Means of magnitudes do not follow from those of x. They come from the sample, and are empty
        without one.
        """
        vector = rotation.rotate_in
        out = Statistics(self.tokens, gradients=self.gradients)
        if rotation.rotate_out is not None and self.gradients.numel():
            out.gradients = turned_outputs(self.gradients, rotation.rotate_out.flatten())
        v = vector.to(self.hessian.device).float()
        if self.hessian.numel():
            out.hessian = turned(turned(self.hessian * v * v[:, None]).T)
        if self.drift.numel():
            out.drift = turned(turned(self.drift * v * v[:, None]).T).T.contiguous()
        if self.sample.numel():
            wide = turned(self.sample.float() * vector.to(self.sample.device).float())
            out.sample = wide.to(self.sample.dtype)
            out.amax, out.mean_abs = wide.abs().amax(0), wide.abs().mean(0)
        return out

    def finite(self) -> bool:
        """Whether the inputs held neither NaN nor inf."""
        return all(
            torch.isfinite(t.sum()) for t in (self.hessian, self.drift, self.amax, self.mean_abs)
        )
