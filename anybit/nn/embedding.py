"""`QuantEmbedding`: a table of embeddings that is stored, and looked up, in a few-bit format."""

import copy
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from anybit.core.packed import Packed
from anybit.errors import InvalidType, probing
from anybit.nn import op as ops
from anybit.nn.quantized import Quantized

IDS = (torch.int32, torch.int64)


class Factor(NamedTuple):
    """What an embedding's rows are multiplied by.

    Attributes:
        number: As the model states it.
        rounded: Whether it is rounded to the weight's dtype first (Gemma).
    """

    number: float = 1.0
    rounded: bool = False

    def on(self, rows: Tensor) -> Tensor:
        """The product, in the rows' dtype."""
        number = rounded(*self, rows.dtype)
        return rows if number == 1 else rows * number


class QuantEmbedding(Quantized):
    """Rows of a quantized weight (num_embeddings, embedding_dim) by their numbers.

    Only the rows that are asked for are decoded, by the format's definition: the result is
    `dequantize()[ids]`, bit for bit, in the dtype of the model (`weight_dtype`).

    Attributes:
        factor: What rows are multiplied by, as some subclasses of nn.Embedding do.
        kind: The class of the unquantized embedding.
        own: That one's attributes.
        constants: Names of its buffers, which hold the factor.
    """

    def __init__(self, packed: Packed, dtype: torch.dtype | None = None):
        super().__init__(packed, None, dtype or torch.get_default_dtype())
        self.num_embeddings, self.embedding_dim = packed.shape
        self.padding_idx: int | None = None
        self.factor, self.kind, self.constants = Factor(), nn.Embedding, tuple[str, ...]()
        # Without a weight it would draw numbers, for which torch imports its compiler on "meta".
        nothing = torch.empty(packed.shape, device="meta")
        self.own = public(nn.Embedding(*packed.shape, _weight=nothing))

    @classmethod
    def instead_of(cls, layer: nn.Embedding, packed: Packed) -> "QuantEmbedding":
        """An embedding in the place of an unquantized one, for which `factor_of` has a factor."""
        out, factor = cls(packed, layer.weight.dtype), factor_of(layer)
        assert factor is not None
        out.factor, out.padding_idx = factor, layer.padding_idx
        out.kind, out.own, out.constants = type(layer), public(layer), tuple(layer._buffers)
        return out

    def unquantized(self) -> nn.Embedding:
        """The embedding that this one is in the place of, with the decoded weight."""
        out, weight = self.kind.__new__(self.kind), self.dequantize(self.weight_dtype)
        nn.Module.__init__(out)
        vars(out).update(self.own)
        out.weight = nn.Parameter(weight, requires_grad=False)
        for name in self.constants:
            number = torch.tensor(self.factor.number, device=weight.device)
            out.register_buffer(name, number, persistent=False)
        return out

    def forward(self, input: Tensor) -> Tensor:
        """Token ids (...) of int32 or int64 -> rows (..., embedding_dim)."""
        if input.dtype not in IDS:
            raise InvalidType(f"ids are {input.dtype}; pass int32 or int64")
        stored = [getattr(self, name) for name in self.names]
        given = (stored, self.format.spec, *self.shape, self.weight_dtype)
        return self.factor.on(ops.run(ops.look_up, input, *given))

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, scheme={self.scheme!r}"


def public(module: nn.Module) -> dict[str, Any]:
    """The attributes that a class has given a module itself."""
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


def embedding_layers(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes (N, K) of the embeddings that can be quantized."""
    found = {n: m for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    return {name: tuple(m.weight.shape) for name, m in found.items() if factor_of(m) is not None}


def factor_of(module: nn.Embedding) -> Factor | None:
    """What a module multiplies rows by; None where it does more than that.

    A forward of a subclass is tried on few numbers, in bfloat16, where a factor that is rounded
    differs from one that is not.
    """
    kind, own = type(module), vars(module)
    if "forward" in own and "_old_forward" not in own:
        return None
    if module.max_norm is not None or kind.__call__ is not nn.Module.__call__:
        return None
    if "weight" not in module._parameters or is_parametrized(module):
        return None
    if kind.forward is nn.Embedding.forward:
        return Factor()
    other, ids = copy.copy(module), torch.tensor([[3, 0, 1], [2, 2, 5]], device="cpu")
    if (number := stated_factor(module)) is None:
        return None
    random = torch.Generator("cpu").manual_seed(0)
    with torch.device("cpu"), torch.no_grad():  # the model may be built on the meta device
        weight = torch.randn(6, 40, generator=random).bfloat16()
        other._parameters = {"weight": weight}  # type: ignore[dict-item]
        other._buffers = {
            name: torch.tensor(number) if b is None or b.is_meta else b.cpu()
            for name, b in module._buffers.items()
        }
        try:
            with probing():
                rows = kind.forward(other, ids)
        except Exception:  # it wants something else
            return None
        for factor in (Factor(number, rounded=True), Factor(number)):
            if isinstance(rows, Tensor) and torch.equal(rows, factor.on(weight[ids])):
                return factor
    return None


def stated_factor(module: nn.Module) -> float | None:
    """The number under transformers' name for it, 1 where there is none; None: it has no value."""
    found: Any = getattr(module, "embed_scale", 1.0)
    if isinstance(found, Tensor) and found.is_meta:  # not loaded yet
        found = getattr(module, "scalar_embed_scale", None)
    if isinstance(found, Tensor):
        found = found.item() if found.numel() == 1 else None
    return float(found) if isinstance(found, int | float) else None


@cache
def rounded(number: float, to_dtype: bool, dtype: torch.dtype) -> float:
    """A number, rounded to a dtype if it is to be."""
    return torch.tensor(number, dtype=dtype, device="cpu").item() if to_dtype else number
