"""Linear layers in vLLM: loading and tensor parallelism.

A layer of vLLM may hold several layers of the checkpoint (Q, K and V; gate and up). Each is a
`Piece`, which takes this rank's part of every stored tensor as vLLM reads it, so that they may
differ in format and have codebooks of their own. When all are read, those of one format become one
weight, and the rest stay beside it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.parameter import BasevLLMParameter, ModelWeightParameter

from anybit.core.packed import WHOLE
from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput, Unsupported
from anybit.files.safetensors import Stored as StoredTensor
from anybit.integrations import vllm_ready
from anybit.integrations.vllm_foreign import Source
from anybit.integrations.vllm_products import build, refill
from anybit.nn.grouped import Weight
from anybit.nn.linear import check_finite
from anybit.nn.sharding import Piece, check_columns, share
from anybit.quantizers.base import quantize_weight
from anybit.quantizers.rtn import RTN

logger = init_logger(__name__)
PARTS = {"q": 0, "k": 1, "v": 2}  # of a merged layer, as vLLM calls them; others by number


def numbers(shard_id: Any, count: int) -> Sequence[int]:
    """Which of a layer's `count` parts a tensor of the checkpoint fills, by what vLLM calls them.

    shard_id: None, when it fills all; a number, or a letter; consecutive numbers.

    Raises:
        Unsupported: vLLM calls them otherwise.
    """
    if shard_id is None:
        return range(count)
    given = shard_id if isinstance(shard_id, tuple) else (PARTS.get(shard_id, shard_id),)
    if not all(isinstance(at, int) and at < count for at in given):
        raise Unsupported(f"vLLM names a part {shard_id!r} of {count}, which anybit does not know")
    return given


@dataclass(eq=False, repr=False)
class AnybitLinearMethod(LinearMethodBase):
    """names: the checkpoint's layers that make up the layer; one for a single, or for one that is
    merged in the checkpoint already. schemes: of each; None for a dense one. rows: of each.
    """

    names: list[str]
    schemes: list[str | None]
    rows: list[int]
    backend: str | None

    def each(self, sizes: list[int]) -> list[tuple[str, str | None]]:
        """Name and scheme of each of the layer's parts; sizes: rows that a rank has of each."""
        layers = list(zip(self.names, self.schemes, strict=True))
        if len(layers) == 1:
            return layers * len(sizes)
        if len(layers) == len(sizes):
            return layers
        if not all(self.rows):
            raise InvalidInput(
                f"{', '.join(self.names)}: vLLM merges these layers, of which the checkpoint has "
                f"{self.rows} rows; it lacks some"
            )
        ranks, out = sum(self.rows) // sum(sizes), list[tuple[str, str | None]]()
        for layer, rows in zip(layers, self.rows, strict=True):
            first = len(out)  # a layer is as many parts as have its rows
            while len(out) < len(sizes) and sum(sizes[first : len(out) + 1]) * ranks <= rows:
                out.append(layer)
            if sum(sizes[first : len(out)]) * ranks != rows:
                raise InvalidInput(
                    f"{', '.join(self.names)}: vLLM merges these layers of {self.rows} rows into "
                    f"parts of {sizes}, which anybit does not know how to do"
                )
        return out

    def finish(self, layer: Any, weights: list[Weight]) -> None:
        """Lay the weights out for the kernels."""
        layer.parts = build(weights, self.backend, layer.params_dtype, self.names[0])
        for part in layer.parts:
            vllm_ready.register(part, getattr(layer, "bias", None) is not None)
        # vLLM's adapters look for the device of a weight, under one of a few names.
        layer.qweight = next(layer.parts.parameters()).data

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., K) -> (..., N), for this rank's K and N."""
        outputs, at = [], 0
        for part in layer.parts:
            outputs.append(part(x, None if bias is None else bias[at : at + part.n]))
            at += part.n
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def tie_weights(self, layer: Any, embed_tokens: nn.Module) -> nn.Module:
        raise InvalidInput(
            f"{self.names[0]} shares its weight with the embedding; keep it: "
            f"{{'*': ..., '{self.names[0]}': None}}"
        )


@register_weight_loader_v2_supported_method
@dataclass(eq=False, repr=False)
class Stored(AnybitLinearMethod):
    """Layers of a quantized checkpoint.

    source: of layers that another tool quantized. original: finds a layer's tensor in the files.
    """

    source: Source | None = None
    original: Callable[[str, str], StoredTensor] | None = None

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        columns = columns_of(layer, input_size_per_partition, input_size, self.names[0])
        layer.pieces = [
            Piece(name, scheme, n, input_size, columns)
            for n, (name, scheme) in zip(
                output_partition_sizes, self.each(output_partition_sizes), strict=True
            )
        ]
        loader = extra_weight_attrs["weight_loader"]
        indices = getattr(layer, "shard_indices", None)  # of a vocabulary
        first = None if indices is None else indices.org_vocab_start_index
        keys = dict.fromkeys(key for piece in layer.pieces for key in piece.keys())  # noqa: SIM118
        own = self.original if self.source is None else None
        receivers = {key: Receiver(key, layer.pieces, loader, first, own) for key in keys}
        if self.source is None:
            for key, receiver in receivers.items():
                layer.register_parameter(key, receiver)
            return
        original = None  # of a layer that is merged in the checkpoint
        if self.original is not None and len(self.names) == 1 < len(layer.pieces):
            original = partial(self.original, self.names[0])
        seen = set[str]()
        for key in self.source.keys(self.names):
            theirs = ForeignLinear(key, self.source, receivers, seen)
            theirs.stand_for(self.names[0], original)
            layer.register_parameter(key, theirs)

    def process_weights_after_loading(self, layer: Any) -> None:
        if "parts" in layer._modules:
            return
        for piece in layer.pieces:
            if piece.apart:
                logger.warning(
                    "%s: format %s cannot be divided along K; this rank's part is dense",
                    piece.name,
                    piece.format.spec,
                )
        self.finish(layer, taken(layer, layer.pieces))


@register_weight_loader_v2_supported_method
@dataclass(eq=False, repr=False)
class OnLoad(AnybitLinearMethod):
    """Layers of a dense checkpoint, each quantized as soon as it is read (round to nearest).

    A rank quantizes its own part: the same codes as in the whole weight, except where columns that
    share a scale, or rows that share a codebook, are divided. tied: whether the model's head shares
    the embeddings' weight.
    """

    tied: bool = False
    uses_meta_device = True  # vLLM makes room for one layer at a time

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        columns_of(layer, input_size_per_partition, input_size, self.names[0])
        for name, scheme in self.each(output_partition_sizes):
            if scheme is not None:
                check(name, scheme, output_size, input_size, input_size // input_size_per_partition)
        layer.sizes = output_partition_sizes
        weight = ModelWeightParameter(
            data=torch.empty(
                sum(output_partition_sizes),
                input_size_per_partition,
                dtype=params_dtype,
                device="meta",
            ),
            input_dim=1,
            output_dim=0,
            weight_loader=extra_weight_attrs["weight_loader"],
        )
        layer.register_parameter("weight", weight)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        if "weight" not in layer._parameters:
            return
        if self.tied and "parts" in layer._modules:  # and the head would keep the old weights
            raise Unsupported(
                "vLLM does not reload an output head that shares the embeddings' weight; start the "
                "engine with the new weights"
            )
        rows = layer.weight.data.split(layer.sizes)
        del layer.weight
        weights = [
            quantized(part, scheme, name)
            for part, (name, scheme) in zip(rows, self.each(layer.sizes), strict=True)
        ]
        if "parts" in layer._modules:
            refill(layer.parts, weights, self.names[0])
        else:
            self.finish(layer, weights)


def take_over(model: nn.Module, method_of: Callable[[str], Any]) -> None:
    """Give codes to layers that vLLM built unquantized: in projectors, and some towers.

    Some of its models do not tell these of a quantization, or what their merged layers are made of.

    method_of: finds a layer's method by its path.
    """
    for path, layer in [*model.named_modules()]:
        plain = type(layer) is nn.Linear
        if not plain and not is_unquantized(layer):
            continue
        method: Any = method_of(path)
        if not isinstance(method, Stored):
            continue
        rows, columns = layer.weight.shape
        sizes, n, k, loader = [rows], rows, columns, default_weight_loader
        if not plain:
            sizes, n, k = layer.output_partition_sizes, layer.output_size, layer.input_size
            loader = getattr(layer, "weight_loader_v2", layer.weight_loader)
        layer.params_dtype, layer.quant_method = layer.weight.dtype, method
        del layer.weight
        method.create_weights(layer, columns, sizes, k, n, layer.params_dtype, weight_loader=loader)
        if plain:
            layer.forward = partial(forward, layer)
        else:
            layer.update_param_tp_status()


def is_unquantized(layer: Any) -> bool:
    """Whether a layer is one of vLLM's own kinds, and has no method of anybit's."""
    own = isinstance(layer, LinearBase) and type(layer).__module__ == LinearBase.__module__
    return own and not isinstance(layer.quant_method, AnybitLinearMethod)


def forward(layer: Any, x: Tensor) -> Tensor:
    """What `nn.Linear` does, by the layer's method."""
    out: Tensor = layer.quant_method.apply(layer, x, layer.bias)
    return out


class Empty(BasevLLMParameter):
    """Stands for one kind of stored tensor of a layer while vLLM loads it; itself empty."""

    load: Any  # what a model calls with each tensor

    def __init__(self, data: Tensor, weight_loader: Any = None):
        super().__init__(data=self.data, weight_loader=weight_loader)

    def __new__(cls, data: Tensor, *args: Any) -> Any:
        return super().__new__(cls, data=data)

    @property
    def weight_loader(self) -> Any:
        return self.load

    @weight_loader.setter
    def weight_loader(self, value: Any) -> None:
        self._weight_loader = value


class Receiver(Empty):
    """Hands what vLLM loads into it, planes or scales, to the layer's pieces."""

    def __new__(cls, key: str, pieces: list[Piece], *args: Any) -> "Receiver":
        return super().__new__(cls, nothing(key, pieces))

    def __init__(
        self,
        key: str,
        pieces: list[Piece],
        weight_loader: Any,
        first: int | None,
        original: Callable[[str, str], StoredTensor] | None,
    ):
        super().__init__(self.data, weight_loader)
        self.key, self.pieces, self.first, self.original = key, pieces, first, original

    @property
    def output_dim(self) -> int | None:
        """Along which vLLM divides and rearranges layers that are merged in the checkpoint."""
        return None if self.pieces and self.pieces[0].is_table(self.key) else 0

    def load(self, param: "Receiver", loaded: Tensor, shard_id: Any = None) -> None:
        """What a model calls with each tensor. shard_id: which part of a merged layer it is."""
        check_open(self.pieces)
        pieces = [self.pieces[at] for at in numbers(shard_id, len(self.pieces))]
        name, fmt = pieces[0].name, pieces[0].format
        original = self.original if len(pieces) > 1 else None  # of one that is merged
        if original is not None and fmt is not None and not pieces[0].movable(self.key):
            remedy = f"which {fmt.spec!r} does not allow; leave it dense"
            check_unmoved(loaded, original(name, self.key), name, remedy)
        if self._weight_loader.__name__ != "weight_loader_v2":  # a replicated layer, or a head
            self.take(pieces[0], loaded, self.first or 0)
        elif not isinstance(shard_id, int | str) and pieces[0].is_table(self.key):
            for piece in pieces:  # merged in the checkpoint: vLLM would divide the table
                self.take(piece, loaded, 0)
        else:
            self._weight_loader(self, loaded, *(() if shard_id is None else (shard_id,)))

    def take(self, piece: Piece, loaded: Tensor, first: int) -> None:
        piece.take(self.key, loaded, first, self.data.device, padded=self.first is not None)

    # What vLLM's weight_loader_v2 of each kind of layer calls.

    def load_column_parallel_weight(self, loaded_weight: Tensor) -> None:
        piece = self.pieces[0]
        self.take(piece, loaded_weight, self.tp_rank * piece.shape[0])

    def load_row_parallel_weight(self, loaded_weight: Tensor) -> None:
        self.take(self.pieces[0], loaded_weight, 0)

    def load_merged_column_weight(self, loaded_weight: Tensor, **kwargs: Any) -> None:
        self.take(
            self.at(kwargs["shard_offset"]), loaded_weight, self.tp_rank * kwargs["shard_size"]
        )

    def load_qkv_weight(self, loaded_weight: Tensor, **kwargs: Any) -> None:
        rank = self.tp_rank if kwargs["shard_id"] == "q" else self.tp_rank // kwargs["num_heads"]
        self.take(self.at(kwargs["shard_offset"]), loaded_weight, rank * kwargs["shard_size"])

    def at(self, offset: int) -> Piece:
        """The piece whose rows begin at `offset`."""
        for piece in self.pieces:
            if offset == 0:
                return piece
            offset -= piece.shape[0]
        raise InvalidInput(f"{self.pieces[0].name}: no part begins there; {len(self.pieces)} parts")


class Foreign(Empty):
    """Stands for a tensor of another tool. The first one of a layer brings all of ours.

    receivers: of our tensors. seen: layers that are loaded, as all placeholders know them.
    """

    def __new__(cls, *args: Any) -> "Foreign":
        return super().__new__(cls, torch.empty(0))

    def __init__(self, key: str, source: Source, receivers: Mapping[str, Any], seen: set[str]):
        super().__init__(self.data)
        self.key, self.source, self.receivers, self.seen = key, source, receivers, seen

    @property
    def first(self) -> Any:
        """One of the receivers."""
        return next(iter(self.receivers.values()))

    def bring(self, name: str, loaded: Tensor, *where: Any) -> None:
        """Hand over what a layer becomes; of a dense one, this tensor. where: as vLLM says it."""
        tensors = {self.key: loaded}
        if self.source.has(name):
            tensors = {} if name in self.seen else self.source.tensors(name)
            self.seen.add(name)
        for key, tensor in tensors.items():
            receiver = self.receivers[key]
            receiver.load(receiver, tensor, *where)


class ForeignLinear(Foreign):
    """Of a layer that may be merged, in vLLM or in the checkpoint already."""

    original: StoredTensor | None = None

    def stand_for(self, name: str, find: Callable[[str], StoredTensor] | None) -> None:
        """name: of the first layer. find: the tensor of one that is merged in the checkpoint."""
        self.member = name
        if find is not None and self.source.has(name):
            self.original = find(self.key)

    @property
    def output_dim(self) -> int | None:
        """Along which models may rearrange a layer that is merged in the checkpoint."""
        if self.original is None:
            return None
        rows, shape = self.source.rows(self.member), self.original.shape
        return shape.index(rows) if rows in shape else None

    def load(self, param: Foreign, loaded: Tensor, shard_id: Any = None) -> None:
        pieces = self.first.pieces
        check_open(pieces)
        name = pieces[numbers(shard_id, len(pieces))[0]].name
        if self.original is not None and self.source.has(name):
            remedy = "as only a checkpoint of anybit allows; make one with `anybit convert`"
            check_unmoved(loaded, self.original, name, remedy)
        self.bring(name, loaded, *(() if shard_id is None else (shard_id,)))


def taken(layer: Any, pieces: Iterable[Piece]) -> list[Weight]:
    """The weights of pieces that are read, whose receivers the layer then no longer has."""
    # Other tools' tensors may have the names that the weights get.
    receivers = [(k, p) for k, p in layer._parameters.items() if isinstance(p, Empty)]
    weights: list[Weight] = []
    for piece in pieces:
        if is_dummy():
            fill(piece, receivers[0][1].device)
        weights.append((piece.finish(), None if piece.apart else piece.activation))
    for key, _ in receivers:
        delattr(layer, key)
    layer.pieces.clear()  # which receivers take as a sign that all is read
    del layer.pieces
    return weights


def check_open(pieces: Sized) -> None:
    """Raise Unsupported when a layer is in use, and its pieces are gone."""
    if not pieces:
        raise Unsupported(
            "a running engine takes new weights of a dense checkpoint only, which it quantizes "
            "itself (quantization='anybit'); load this one in an engine of its own"
        )


def check_unmoved(loaded: Tensor, original: StoredTensor, name: str, remedy: str) -> None:
    """Raise Unsupported when a model has moved rows of a layer that cannot be moved one by one."""
    # As bytes: there are floats that torch does not compare.
    got, wanted = (t.cpu().flatten().view(torch.uint8) for t in (loaded, original.read()))
    if loaded.shape != original.shape or not torch.equal(got, wanted):
        raise Unsupported(f"{name}: vLLM puts the rows of this layer into another order, {remedy}")


def nothing(key: str, pieces: Iterable[Piece]) -> Tensor:
    """An empty tensor of the dtype that pieces have under a key, or vLLM would warn."""
    return torch.empty(0, dtype=next(p.dtype(key) for p in pieces if key in p.keys()))  # noqa: SIM118


def quantized(weight: Tensor, scheme: str | None, name: str) -> Weight:
    """A dense weight in the scheme's format."""
    if scheme is None:
        return weight, None
    check_finite(weight, f"{name}.weight")
    fmt, activation = parse_scheme(scheme)
    return quantize_weight(RTN(), weight, fmt), activation


def check(name: str, scheme: str, n: int, k: int, ranks: int) -> None:
    """Raise ValueError when a weight (n, k) in a scheme cannot be divided along K."""
    fmt = parse_scheme(scheme)[0]
    try:
        fmt.check(n, k)
    except ValueError as error:
        raise InvalidInput(f"{name}: {error}") from None
    check_columns(fmt, k, ranks, name)


def columns_of(layer: Any, part: int, k: int, name: str) -> slice:
    """The columns of this rank: all but in a row-parallel layer."""
    return WHOLE if part == k else share(k, layer.tp_rank, k // part, name)


def is_dummy() -> bool:
    """Whether vLLM was asked for random weights (`load_format="dummy"`)."""
    config = get_current_vllm_config_or_none()
    return config is not None and config.load_config.load_format == "dummy"


def fill(piece: Piece, device: torch.device) -> None:
    """Random numbers in place of a checkpoint's."""
    weight = torch.randn(piece.shape, device=device) / piece.shape[1] ** 0.5
    if piece.format is None or piece.apart:
        piece.format, piece.apart, piece.tensors = None, False, {"weight": weight}
    else:
        piece.tensors = quantize_weight(RTN(), weight, piece.format).tensors()
