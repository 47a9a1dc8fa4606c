"""Embeddings in vLLM: they are looked up as they are stored, and heads share their weight."""

from typing import Any

from torch import Tensor, nn

from anybit.core.packed import Packed
from anybit.core.scheme import parse_scheme
from anybit.errors import Unsupported
from anybit.integrations.vllm_linear import AnybitLinearMethod, Stored
from anybit.nn import op as ops
from anybit.nn.grouped import Weight


class Embedding(Stored):
    """An embedding of a quantized checkpoint, each rank's part of the vocabulary.

    head: the scheme of a head that multiplies with the same weight; None: there is none.
    """

    def __init__(self, name: str, scheme: str, backend: str | None, head: str | None):
        super().__init__([name], [scheme], [], backend)
        self.head = head

    def finish(self, layer: Any, weights: list[Weight]) -> None:
        """Keep the stored tensors, and lay the weight out for a head's products."""
        weight = weights[0][0]
        assert isinstance(weight, Packed)
        layer.parts = nn.ModuleList()
        if self.head is not None:
            super().finish(layer, [(weight, parse_scheme(self.head)[1])])
        tensors = weight.tensors().values()
        layer.stored = nn.ParameterList(nn.Parameter(t, requires_grad=False) for t in tensors)
        layer.stored_as = weight.format.spec, *weight.shape

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        """Ids (...) -> rows (..., K)."""
        return ops.look_up(ids, list(layer.stored), *layer.stored_as, layer.params_dtype)


class Tied(AnybitLinearMethod):
    """An output head whose weight is an embedding's: vLLM puts that in its place."""

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        """There are none."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Nothing was loaded."""

    def tie_weights(self, layer: Any, embed_tokens: nn.Module) -> nn.Module:
        return embed_tokens

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        raise Unsupported(
            f"{self.names[0]}: config.json ties it to the embeddings, and vLLM's model does not; "
            "give it a format of its own (`anybit quantize`), or run the model in anybit.LLM"
        )
