"""Embeddings in few bits: their weights are quantized by themselves, whatever the layers are by."""

from collections.abc import Mapping

from torch import Tensor, nn

from anybit.core.format import Format
from anybit.core.packed import Packed
from anybit.core.scheme import parse_scheme
from anybit.nn.embedding import QuantEmbedding, embedding_layers
from anybit.nn.linear import QuantLinear
from anybit.nn.model import linear_at, replace
from anybit.nn.tied import sharing_heads
from anybit.quantizers.base import Quantizer, quantize_weight
from anybit.quantizers.rtn import RTN


def quantize_embedding(quantizer: Quantizer, w: Tensor, fmt: Format) -> Packed:
    """An embedding's weight (N, K), in just this format.

    Rounded to nearest if the quantizer needs data or rotates weights.
    """
    plain = not quantizer.needs and quantizer.format(fmt, (len(w), w.shape[1])) == fmt
    return quantize_weight(quantizer if plain else RTN(), w, fmt)


def apart(model: nn.Module, schemes: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The schemes of linear layers with a weight of their own, and those of all others.

    Args:
        model: Unquantized; it may be on the meta device.
        schemes: Of the layers to quantize.
    """
    heads, words = sharing_heads(model, schemes), embedding_layers(model)
    others = {name: s for name, s in schemes.items() if name in heads or name in words}
    return {name: s for name, s in schemes.items() if name not in others}, others


def quantize_embeddings(model: nn.Module, schemes: Mapping[str, str], quantizer: Quantizer) -> None:
    """Quantize embeddings, and heads that share their weights, in place.

    Args:
        model: Unquantized.
        schemes: Of these, as `apart` finds them.
        quantizer: As in `quantize_embedding`.
    """
    heads = sharing_heads(model, schemes)
    for name, scheme in schemes.items():
        if name in heads:
            continue
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Embedding)
        packed = quantize_embedding(quantizer, layer.weight.detach(), parse_scheme(scheme)[0])
        replace(model, name, QuantEmbedding.instead_of(layer, packed))
    for head, words in heads.items():
        owner, activation = model.get_submodule(words), parse_scheme(schemes[head])[1]
        assert isinstance(owner, QuantEmbedding)
        shared = QuantLinear.instead_of(linear_at(model, head), owner.packed, activation)
        shared.share(owner)
        replace(model, head, shared)
