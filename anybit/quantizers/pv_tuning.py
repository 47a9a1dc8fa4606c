"""Fine-tuning of quantized models: grids and norms by Adam, and codes by PV-tuning.

A quantized model has continuous parameters (codebooks, scales, norms) and discrete ones (codes).
PV-tuning (Malinovskii et al., 2024, https://arxiv.org/abs/2405.14852) alternates between them:
gradient steps for the first with the codes fixed, and then new codes for few vectors, those whose
weights the gradients move the most.
Moving few of them is what allows a step that is long enough to reach another code. Here a move is
kept only if it lowers the loss on another batch; else it is taken back, and half as many codes are
tried the next time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from anybit.core.format import Grid
from anybit.core.groups import store_scale
from anybit.core.packed import Packed
from anybit.errors import InvalidInput
from anybit.nn.around import Around
from anybit.nn.linear import QuantLinear
from anybit.nn.model import check_module, restored_on_error
from anybit.progress import progress
from anybit.quantizers.calibration.data import Calibration, Source, calibration_from
from anybit.quantizers.rows import grid_at

ROWS = 1024  # positions whose log-probabilities are held in fp32 at a time
# On pico better than 0.001, 0.002 and 0.01 for 2-bit codebooks, and than 0.001 for int2.
RATE = 4e-3
BETAS = (0.9, 0.95)  # of Adam
LOOK = 50  # vectors that are encoded anew for each whose codes may change
MEMORY = 0.95  # of the mean squared gradients of weights, from one step to the next


def pv_tune(
    model: nn.Module,
    dense: nn.Module,
    calibration: Source | Calibration,
    *,
    steps: int = 200,
    batch: int = 4,
    rate: float = RATE,
    share: float = 0.002,
    reach: float = 0.3,
    every: int = 4,
    seed: int = 0,
    show_progress: bool | None = None,
) -> list[float]:
    """Tune a quantized model's grids, norms and codes in place, to predict what a dense one does.

    Minimizes the mean KL(dense || model) over all tokens. Any format's floating-point grid is tuned
    (scales, codebooks, but no powers of two, nor scales in 8 bits); activations are not quantized
    meanwhile. An error or an interrupt leaves the model as it was. Memory, on top of both models,
    for every weight: the decoded one, its gradient and, with share > 0, its accumulated change.

    Args:
        model: A quantized model.
        dense: The dense model that it should agree with; may be on another device.
        calibration: The data to tune on: texts, token ids, a file or a `Calibration`.
        steps: Of Adam, of `batch` samples each; the rates fall to zero along a cosine.
        batch: Samples in a step.
        rate: Learning rate of the grids and norms, as a fraction of each tensor's root mean square.
        share: Fraction of each layer's codes that may change at once; 0 leaves them as they are.
        reach: How far such a vector moves to be encoded anew, in the layer's root mean square.
        every: Steps from one change of codes to the next.
        seed: Of the order of the samples.
        show_progress: As in `quantize_`.

    Returns:
        The loss of every step, nats per token.

    Raises:
        InvalidInput: The model has no quantized layers, an argument is out of range, the data does
            not fit the model, or gradients hold NaN or inf.
    """
    check_arguments(model, dense, steps, batch, share, every)
    ids, losses, most = calibration_from(calibration).tokens(dense), [], share
    others = epochs(len(ids), batch, steps, seed + 1)
    with (
        restored_on_error(model),
        restored_on_error(dense),
        progress("tuning", steps, show_progress) as done,
        Tuning(model.eval(), rate, steps) as tuning,
    ):
        dense.eval()
        for number, rows in enumerate(epochs(len(ids), batch, steps, seed)):
            loss = loss_on(ids[rows], model, dense)()
            tuning.step(loss, keep=share > 0)
            if share and number % every == every - 1:
                check = loss_on(ids[next(others)], model, dense)
                share = tuning.try_codes(check, share, most, reach)
            losses.append(loss.item())
            done(1, f"KL {losses[-1]:.4f}")
    return losses


def check_arguments(
    model: nn.Module, dense: nn.Module, steps: int, batch: int, share: float, every: int
) -> None:
    """InvalidInput where `pv_tune` can do nothing with its arguments."""
    for given in (model, dense):
        check_module(given, "pv_tune")
    if not (0 <= share <= 1 and every >= 1 and batch >= 1 and steps >= 1):
        raise InvalidInput(
            f"share={share} must be in 0..1; every={every}, batch={batch} and steps={steps} 1 or "
            "more"
        )
    check_tunable(model, share > 0)


def loss_on(ids: Tensor, model: nn.Module, dense: nn.Module) -> Callable[[], Tensor]:
    """Computes how far a model is from a dense one on some tokens, when it is called."""
    home, other = next(model.parameters()).device, next(dense.parameters()).device
    with torch.no_grad():
        wanted = logits_of(dense, ids.to(other)).to(home)
    return lambda: divergence(logits_of(model, ids.to(home)), wanted)


def check_tunable(model: nn.Module, codes: bool) -> None:
    """Raise InvalidInput unless a model's layers can be tuned, and their codes if so wanted."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}
    if not layers:
        raise InvalidInput("the model has no quantized layers to tune; call quantize_ first")
    for name, layer in layers.items():
        if codes and layer.format.window:
            raise InvalidInput(
                f"{name}: single codes of format {layer.format.spec!r} cannot change, because "
                "other weights depend on them; pass share=0, which tunes scales and norms"
            )


def tune_block(
    block: nn.Module,
    outputs: Sequence[Callable[[], Tensor]],
    targets: Sequence[Tensor],
    steps: int,
    rate: float,
    seed: int,
) -> list[float]:
    """Tune a block's grids and norms in place, so that its outputs come close to `targets`.

    Args:
        block: A block with quantized layers.
        outputs: For each batch, computes the block's output as it is then.
        targets: For each batch, the output to come close to.
        steps: Of Adam, of one batch each.
        rate: Learning rate, as a fraction of each tensor's root mean square.
        seed: Of the order of the batches.

    Returns:
        The relative squared error of every step's batch.
    """
    losses = []
    power = sum(t.float().square().mean() for t in targets) / len(targets)
    with torch.enable_grad(), Tuning(block, rate, steps) as tuning:
        for rows in epochs(len(outputs), 1, steps, seed):
            at = rows[0]
            out = outputs[at]().float()
            loss = (out - targets[at].to(out)).square().mean() / power
            tuning.step(loss)
            losses.append(loss.item())
    return losses


class Tuning:
    """A context in which the quantized layers and norms of a module follow gradients.

    On leaving, the layers are quantized ones again, with what was learned. After an exception they
    and the norms are left to `restored_on_error`.

    Args:
        module: A model or a block.
        rate: Learning rate of Adam, as a fraction of each tensor's root mean square.
        steps: After which it has fallen to zero.
    """

    def __init__(self, module: nn.Module, rate: float, steps: int):
        self.module, self.rate, self.steps = module, rate, steps
        self.number = 0
        layers = [(n, m) for n, m in module.named_modules() if isinstance(m, QuantLinear)]
        self.layers = {name: TunedLayer(layer) for name, layer in layers}
        self.owners = norms_of(module)
        before = (owner.get_parameter(name) for owner, name in self.owners)
        self.norms = [nn.Parameter(p.detach().clone()) for p in before]
        self.units = [rms(p) for p in self.norms]
        self.masters = [
            (p.detach().float() / u).requires_grad_()
            for p, u in zip(self.norms, self.units, strict=True)
        ]
        own = [p for layer in self.layers.values() for p in layer.masters.values()]
        self.adam = torch.optim.Adam([*own, *self.masters], betas=BETAS)

    def __enter__(self) -> "Tuning":
        for name, layer in self.layers.items():
            self.module.set_submodule(name, layer)
        for (owner, name), norm in zip(self.owners, self.norms, strict=True):
            owner._parameters[name] = norm
        return self

    def step(self, loss: Tensor, keep: bool = False) -> None:
        """One step of Adam; the gradient of decoded weights is passed on to their grids.

        Args:
            loss: A scalar of the module's outputs.
            keep: Add the gradients to those that `move_codes` goes by.

        Raises:
            InvalidInput: Gradients hold NaN or inf.
        """
        layers = list(self.layers.values())
        gradients = torch.autograd.grad(loss, [*(t.weight for t in layers), *self.norms])
        if not all(torch.isfinite(g.sum()) for g in gradients):
            raise InvalidInput(
                f"the gradients of tuning step {self.number} hold NaN or inf; try a lower rate, "
                "or the model in bfloat16 or float32"
            )
        falling = 0.5 + 0.5 * math.cos(math.pi * self.number / self.steps)
        self.number += 1
        for layer, gradient in zip(layers, gradients, strict=False):
            layer.learn(gradient.float(), keep)
        for master, unit, gradient in zip(
            self.masters, self.units, gradients[len(layers) :], strict=True
        ):
            master.grad = gradient.float() * unit
        for group in self.adam.param_groups:
            group["lr"] = self.rate * falling
        self.adam.step()
        with torch.no_grad():
            for norm, master, unit in zip(self.norms, self.masters, self.units, strict=True):
                norm.copy_(master * unit)
        for layer in layers:
            layer.refresh()

    @torch.no_grad()
    def try_codes(
        self, loss: Callable[[], Tensor], share: float, most: float, reach: float
    ) -> float:
        """New codes for the vectors that gradients move the most, if they lower a loss.

        Args:
            loss: Computes it.
            share: As in `pv_tune`.
            most: The largest share.
            reach: As in `pv_tune`.

        Returns:
            The share to try the next time.
        """
        before = loss()
        for layer in self.layers.values():
            layer.move_codes(share, reach)
        worse = bool(loss() >= before)
        for layer in self.layers.values() if worse else ():
            layer.take_back()
        return share / 2 if worse else min(most, share * 2)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        for name, layer in self.layers.items() if kind is None else ():
            self.module.set_submodule(name, layer.quantized())


class TunedLayer(nn.Module):
    """A quantized layer that follows gradients: its grid by Adam, its codes by `move_codes`.

    Attributes:
        weight: The weight (N, K) fp32 that kernels multiply with, decoded: a leaf of the autograd
            graph.
        masters: The floating-point grid tensors, fp32, each over its root mean square.
    """

    weight: Tensor

    def __init__(self, layer: QuantLinear):
        super().__init__()
        self.around, packed = Around.of(layer.packed.grid), layer.packed.stored()
        self.outside = layer.format
        self.bias, self.activation = layer.bias, layer.activation
        self.dtype, self.keep = layer.dtype, layer.keep
        self.format, self.shape = packed.format, packed.shape
        self.codes, self.stored = packed.codes(), packed.grid
        tuned = [n for n, e in self.format.entries().items() if e.dtype == "float"]
        self.units = {name: rms(self.stored[name]) for name in tuned}
        self.masters = {
            name: (self.stored[name].float() / unit).requires_grad_()
            for name, unit in self.units.items()
        }
        self.total: Tensor | None = None  # sum of the gradients since codes were moved
        self.squares: tuple[Tensor, Tensor] | None = None  # their mean squares: rows, columns
        self.moved: tuple[Tensor, Tensor] | None = None  # vectors that were, and their old codes
        self.refresh()

    def forward(self, x: Tensor) -> Tensor:
        inside = self.around.inside(self.bias)
        y = linear(self.around.before(x), self.weight.to(x.dtype), inside)
        return self.around.after(y, self.bias)

    def grid(self) -> Grid:
        """The grid as it is now, its tuned tensors in fp32."""
        return self.stored | {n: m * self.units[n] for n, m in self.masters.items()}

    def refresh(self) -> None:
        """Decode the weight again, after its grid or codes have changed."""
        with torch.no_grad():
            weight = self.format.decode(self.codes, self.grid())
        self.weight = weight.requires_grad_()

    def learn(self, gradient: Tensor, keep: bool) -> None:
        """Pass the weight's gradient (N, K) on to the grid, and add it up for `move_codes`."""
        masters = list(self.masters.values())
        if masters:  # powers of two and the like are not tuned
            with torch.enable_grad():
                weight = self.format.decode(self.codes, self.grid())
                parts = torch.autograd.grad(weight, masters, gradient)
            for master, part in zip(masters, parts, strict=True):
                master.grad = part
        if not keep:
            return
        square = gradient.square()
        rows, columns = square.mean(1), square.mean(0)
        self.total = gradient if self.total is None else self.total + gradient
        if self.squares is None:
            self.squares = rows, columns
        else:
            self.squares[0].lerp_(rows, 1 - MEMORY)
            self.squares[1].lerp_(columns, 1 - MEMORY)

    @torch.no_grad()
    def move_codes(self, share: float, reach: float) -> int:
        """Encode anew the vectors that gradients move the most, at most `share` of all.

        Gradients are summed since the last call and divided by their root mean square, which is
        kept by row and by column (Adafactor, Shazeer and Stern, 2018). Vectors of the largest such
        updates go `reach` far, to the nearest code there. Of those whose loss falls by the
        gradient, the ones are taken whose fall is largest for the squared length of the move,
        measured in the same root mean squares: on pico, ranking by the fall alone made the loss
        rise by more than the gradient said it would fall, from 100 moves on.
        """
        if self.total is None or self.squares is None:
            return 0
        fmt, v = self.format, self.format.width
        rows, columns = self.squares
        size = (rows[:, None] * columns / rows.mean().clamp_min(1e-38)).sqrt_().clamp_min(1e-20)
        total, size = self.total.reshape(-1, v), size.reshape(-1, v)
        update = -total / size
        length = update.norm(dim=1)
        most = max(1, int(share * len(length)))
        at = length.topk(min(LOOK * most, len(length))).indices.sort().values
        here = grid_at(fmt, self.grid(), at // (self.shape[1] // v), at % (self.shape[1] // v) * v)
        step = reach * rms(self.weight) * v**0.5
        codes, weight = self.codes.view(len(length), fmt.books), self.weight.reshape(-1, v)[at]
        target = weight + update[at] * (step / length[at, None].clamp_min(1e-20))
        new = fmt.encode(target, here).to(codes.dtype)
        change = fmt.decode(new, here) - weight
        fall = -(change * total[at]).sum(1)
        good = (fall > 0) & ((weight + change - target).square().sum(1) < step**2)
        rank = torch.where(good, fall / (change * size[at]).square().sum(1).clamp_min(1e-30), 0)
        best = rank.topk(min(most, len(at))).indices
        best = best[good[best]]
        self.moved = at[best], codes[at[best]]
        codes[at[best]] = new[best]
        self.total = None
        self.refresh()
        return len(best)

    def take_back(self) -> None:
        """Undo the last `move_codes`."""
        if self.moved is not None:
            at, old = self.moved
            self.codes.view(-1, self.format.books)[at] = old
            self.refresh()

    def quantized(self) -> QuantLinear:
        """The layer with what was learned, its grid in the dtypes that it had."""
        grid = {n: t.detach() for n, t in self.grid().items()}
        for name in self.masters:
            before = self.stored[name].dtype
            half = name == "scale" and before != torch.float32
            grid[name] = store_scale(grid[name], zeros=0) if half else grid[name].to(before)
        inner = Packed.from_codes(self.format, self.shape, self.codes, grid)
        outer = {name: t for name, t in self.around._asdict().items() if t is not None}
        packed = Packed.from_tensors(self.outside, self.shape, inner.tensors() | outer)
        return QuantLinear(packed, self.bias, self.activation, self.dtype, self.keep)


def norms_of(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Owners and names of the parameters of norms, known by the names of their classes."""
    return [
        (owner, name)
        for owner in module.modules()
        if "norm" in type(owner).__name__.lower()
        for name, parameter in owner._parameters.items()
        if parameter is not None
    ]


def rms(t: Tensor) -> float:
    """Root mean square; 1 for zeros."""
    return t.detach().float().square().mean().sqrt().item() or 1.0


def epochs(count: int, batch: int, steps: int, seed: int) -> Iterator[list[int]]:
    """Indices of the samples of each step: every sample once, in random order, then again."""
    random = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for _ in range(steps):
        while len(order) < min(batch, count):
            order += torch.randperm(count, generator=random).tolist()
        yield order[:batch]
        del order[:batch]


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits (samples, length, V) of a transformers model, or of any that returns them."""
    out = model(ids)
    return cast(Tensor, out if isinstance(out, Tensor) else out.logits)


def divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """Mean KL(wanted || logits) over all positions, in nats."""
    total = logits.new_zeros((), dtype=torch.float32)
    p, q = wanted.flatten(0, -2), logits.flatten(0, -2)
    for at in range(0, len(p), ROWS):
        log_p = p[at : at + ROWS].float().log_softmax(-1)
        log_q = q[at : at + ROWS].float().log_softmax(-1)
        total = total + (log_p.exp() * (log_p - log_q)).sum()
    return total / len(p)
