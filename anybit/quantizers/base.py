"""`Quantizer`: the one interface of all methods that choose codes, and how layers are replaced."""

from collections.abc import Callable, Mapping, Sequence
from statistics import mode
from typing import NamedTuple

import torch
from torch import Tensor, nn

from anybit.core.format import Format
from anybit.core.packed import Packed
from anybit.core.rotation import Rotation
from anybit.core.scheme import parse_scheme, scheme_name
from anybit.errors import InvalidInput
from anybit.nn.linear import QuantLinear, check_real
from anybit.nn.model import linear_at, replace
from anybit.nn.plan import patterns_for
from anybit.quantizers.calibration.data import Calibration, Source
from anybit.quantizers.calibration.statistics import Statistics


class Block(NamedTuple):
    """A decoder block whose layers are to be quantized.

    Attributes:
        module: The block, dense yet.
        schemes: Of these layers, by names relative to it.
        statistics: Of each of them.
        output: Computes the block's output, as it is then, for a little of the data.
        outputs: The same for each batch of the data.
    """

    module: nn.Module
    schemes: Mapping[str, str]
    statistics: Mapping[str, Statistics]
    output: Callable[[], Tensor]
    outputs: Sequence[Callable[[], Tensor]] = ()


class Quantizer:
    """Chooses the codes of weights. A subclass implements `quantize`; that is enough.

    A calibrated quantizer also sets `needs`, and has a field `calibration`. The model then runs on
    that data block by block, each block on the outputs of the quantized blocks before it, and
    `transform`, `quantize_block` and `quantize` are called with what was observed:

        >>> @dataclass(frozen=True)
        ... class Mine(Quantizer):
        ...     calibration: Source | Calibration | None = field(default=None, repr=False)
        ...     needs = ("hessian",)
        ...
        ...     def quantize(self, w, fmt, statistics=None): ...

    A calibration that was interrupted goes on only with a quantizer of the same `repr`, which
    should therefore name all settings, and not the calibration data.
    """

    # Properties, so that a subclass may have a field, a class attribute or a property instead.

    @property
    def calibration(self) -> Source | Calibration | None:
        """The data to calibrate on; None for a quantizer that needs none, or was given none."""
        return None

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the fields of `Statistics` to collect; none for a data-free quantizer."""
        return ()

    @property
    def whole_block(self) -> bool:
        """Whether `quantize_block` must get all layers of a block at once.

        Otherwise layers whose Hessians would take more memory than the block (experts) come in
        several calls.
        """
        return False

    def quantize(self, w: Tensor, fmt: Format, statistics: Statistics | None = None) -> Packed:
        """Choose the codes of one weight.

        Args:
            w: Weights (N, K) of any float dtype, finite, in a shape that the format can store.
            fmt: The format to store them in; never a rotated one, see `quantize_weights`.
            statistics: Of the layer's inputs, with the fields in `needs`.

        Returns:
            The packed weight, on the device of `w`.

        Raises:
            InvalidInput: A calibrated quantizer was given no statistics.
        """
        raise NotImplementedError(f"{type(self).__name__}.quantize")

    def format(self, fmt: Format, shape: tuple[int, int]) -> Format:
        """The format that a layer gets for which a plan says `fmt`: the same, but for `Rotate`.

        Args:
            fmt: A format that can store the layer.
            shape: (N, K) of the layer.
        """
        return fmt

    def transform(self, block: Block) -> Mapping[str, Statistics]:
        """Rewrite a block before its layers are quantized, without changing what it computes.

        Returns:
            The statistics after the change.
        """
        return block.statistics

    def quantize_block(self, block: Block) -> None:
        """Quantize a block's layers in place, after `transform`."""
        quantize_layers(block.module, block.schemes, self, block.statistics)

    def check_statistics(self, statistics: Statistics | None) -> Statistics:
        """The statistics; InvalidInput when there are none, or inputs held NaN or inf."""
        if statistics is None:
            raise InvalidInput(
                f"{type(self).__name__} needs statistics of the layer's inputs "
                f"({', '.join(self.needs)}); quantize the whole model with quantize_, or this "
                "weight with a data-free quantizer (RTN, Clip, HQQ)"
            )
        if not statistics.finite():
            raise InvalidInput(
                f"{type(self).__name__}: the statistics of the layer's inputs hold NaN or inf; "
                "collect them again from finite inputs"
            )
        return statistics


def planned(
    quantizer: Quantizer,
    plan: Mapping[str, str | None],
    shapes: Mapping[str, tuple[int, ...]],
    schemes: Mapping[str, str],
) -> dict[str, str | None]:
    """A plan with the formats that a quantizer makes of its own.

    Args:
        quantizer: Its `format` is asked for each layer.
        plan: {pattern: scheme or None}, for all layers.
        shapes: (N, K) of the model's linear layers, by name.
        schemes: By the plan, of those that the quantizer quantizes.

    Returns:
        The plan; layers that differ from the others of their pattern are named in it.
    """
    wanted: dict[str, dict[str, str]] = {}
    for name, scheme in schemes.items():
        fmt, activation = parse_scheme(scheme)
        n, k = shapes[name]
        made = scheme_name(quantizer.format(fmt, (n, k)), activation)
        wanted.setdefault(patterns_for(name, plan)[-1], {})[name] = made
    usual = {pattern: mode(made.values()) for pattern, made in wanted.items()}
    others = {
        name: scheme
        for pattern, made in wanted.items()
        for name, scheme in made.items()
        if scheme != usual[pattern]
    }
    return {**plan, **usual, **others}


def quantize_weight(
    quantizer: Quantizer, w: Tensor, fmt: Format, statistics: Statistics | None = None
) -> Packed:
    """A weight (N, K) in a format, which may be rotated: `quantizer.quantize` on what is stored."""
    return quantize_weights(
        quantizer, [w], quantizer.format(fmt, (len(w), w.shape[1])), statistics
    )[0]


def quantize_weights(
    quantizer: Quantizer,
    weights: Sequence[Tensor],
    fmt: Format,
    statistics: Statistics | None = None,
    rotation: Rotation | None = None,
) -> list[Packed]:
    """Weights of layers that read one input, quantized as one.

    Args:
        quantizer: Chooses the codes. Where the format is rotated, it gets rotated weights and
            statistics, and the format without rotation.
        weights: (N, K) each; several of a format whose rows are independent.
        fmt: The format to store them in.
        statistics: Of the input.
        rotation: Of the format; random signs by default.

    Returns:
        Each weight, in memory of its own.
    """
    for w in weights:
        check_real(w, "weight")
        fmt.check(*w.shape)
    rotations: list[Rotation] = []
    if fmt.rotate:
        shapes = [(w.shape[0], w.shape[1], w.device) for w in weights]
        rotations = [rotation or Rotation.random(fmt.rotate, (n, k), on) for n, k, on in shapes]
        weights = [r.rotated(w) for r, w in zip(rotations, weights, strict=True)]
        statistics = statistics and statistics.rotated(rotations[0])
    whole = weights[0] if len(weights) == 1 else torch.cat(list(weights))
    given = () if statistics is None else (statistics,)  # data-free ones need not take any
    packed, start = quantizer.quantize(whole, fmt.plain() if rotations else fmt, *given), 0
    out = [packed]
    if len(weights) > 1:  # copies, so that a checkpoint finds no tensors that share memory
        out = []
        for w in weights:
            rows = packed.rows(slice(start, start := start + len(w)))
            tensors = {key: t.clone() for key, t in rows.tensors().items()}
            out.append(Packed.from_tensors(packed.format, rows.shape, tensors))
    return [p.rotated_by(r) for p, r in zip(out, rotations, strict=True)] if rotations else out


def quantize_layers(
    parent: nn.Module,
    schemes: Mapping[str, str],
    quantizer: Quantizer,
    statistics: Mapping[str, Statistics],
) -> None:
    """Quantize linear layers below a module by their statistics, in place.

    Layers of one scheme that read the same input (whose statistics are one object) are quantized
    as one weight, since they share the costly part: GPTQ's factorization and loop over columns.
    They hold decoded weights, for the pass over all data; `forget_dtypes` is to be called after it.

    Args:
        parent: The module that holds the layers.
        schemes: Schemes of the layers, by names relative to `parent`.
        quantizer: Chooses the codes.
        statistics: Of each layer.
    """
    alike: dict[tuple[str, object], list[str]] = {}
    for name, scheme in schemes.items():
        shared = id(statistics[name]) if parse_scheme(scheme)[0].rowwise else name
        alike.setdefault((scheme, shared), []).append(name)
    for (scheme, _), names in alike.items():
        fmt, activation = parse_scheme(scheme)
        layers = [linear_at(parent, name) for name in names]
        weights = [layer.weight.detach() for layer in layers]
        parts = quantize_weights(quantizer, weights, fmt, statistics[names[0]])
        for name, layer, part in zip(names, layers, parts, strict=True):
            dtype = layer.weight.dtype
            quantized = QuantLinear.instead_of(layer, part, activation, dtype, keep="decoded")
            replace(parent, name, quantized)
