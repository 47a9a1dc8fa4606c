"""`Quantized`: a module whose weight lies in its buffers, in a few-bit format."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from anybit.core.format import Format
from anybit.core.packed import Packed
from anybit.core.scheme import scheme_name
from anybit.errors import Unsupported
from anybit.nn import op as ops
from anybit.nn.weight import DecodedWeight

TRANSIENT = ("_made", "_kept")  # attributes that no copy has


class Quantized(nn.Module):
    """What `QuantLinear` and `QuantEmbedding` have in common: a weight (N, K) in few bits.

    The buffers are the canonical tensors of `Packed` (codes4, codes2, ..., scale, ...), which is
    what `state_dict`, pickles and checkpoints hold. Moving the module to another device moves them;
    casts (`.half()`, `.to(dtype)`) do not touch them, since they are not numbers of the model's
    dtype.

    `weight` is there for models that look at it: its shape, device and dtype (`weight_dtype`, that
    of the unquantized layer, which follows casts) cost nothing, and an operation on it decodes it.
    It is neither a parameter nor in `state_dict`.

    Attributes:
        format: Of the weight.
        scheme: The format's spec, and what activations are quantized to.
        shape: (N, K).
        names: Of the canonical tensors.
        sharing: Other layers that hold the same tensors.
    """

    format: Format
    sharing: "tuple[Quantized, ...]" = ()
    _kept: Mapping[str, tuple[Tensor, Tensor]] = {}  # buffers that are floats, and their contents

    def __init__(self, packed: Packed, activation: str | None, weight_dtype: torch.dtype):
        super().__init__()
        self.shape = packed.shape
        self.format = packed.format
        self.scheme = scheme_name(packed.format, activation)
        self.weight_dtype = weight_dtype
        self.names = tuple(packed.tensors())
        for name, tensor in packed.tensors().items():
            self.register_buffer(name, tensor)

    @property
    def packed(self) -> Packed:
        if not torch.compiler.is_compiling():
            self._without_casts()
        tensors = {name: getattr(self, name) for name in self.names}
        return Packed.from_tensors(self.format, self.shape, tensors)

    def _without_casts(self) -> None:
        """Undo casts of the buffers in place, by `.data`, as FSDP's mixed precision makes them."""
        kept = dict[str, tuple[Tensor, Tensor]]()
        for name in self.names:
            buffer = self._buffers[name]
            if buffer is None or not buffer.is_floating_point() or buffer.is_meta:
                continue
            before, contents = self._kept.get(name, (None, buffer))
            if before is buffer and contents.dtype != buffer.dtype:
                own = contents.to(buffer.device)
                if torch.equal(own.to(buffer.dtype), buffer):  # else they are other numbers
                    buffer.data = own
            kept[name] = buffer, buffer.detach()
        self._kept = {} if hasattr(self, "_hf_hook") else kept  # which moves them out of memory

    @property
    def weight(self) -> Tensor:
        """The decoded weight (N, K), for models that look at it; see the class."""
        if "weight" in self._parameters:  # a placeholder, while transformers loads the model
            return cast(Tensor, self._parameters["weight"])
        if torch.compiler.is_compiling():
            tensors, (n, k) = [getattr(self, name) for name in self.names], self.shape
            return ops.decode(tensors, self.format.spec, n, k, self.weight_dtype)
        dtype, device = self.weight_dtype, next(self.buffers()).device
        return DecodedWeight(
            self.shape, dtype, device, lambda: self.dequantize(dtype), self.multiply
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The decoded weight (N, K)."""
        return self.packed.dequantize().to(dtype)

    def multiply(self, factor: float) -> None:
        """Multiply the weight by a number, in place; it must be exact, as powers of two are.

        Raises:
            Unsupported: It is not, in the dtype of the scales.
        """
        before = self.packed.grid["scale"]
        scale = before * factor
        if not torch.equal(scale / factor, before):
            raise Unsupported(
                f"{self}: its weight cannot be multiplied by {factor:g}, since its scales, of "
                f"{before.dtype}, would be rounded; dequantize_ the model, change it, and quantize "
                "it again"
            )
        self.scale = scale
        self._hand_on()

    def share(self, owner: "Quantized") -> None:
        """Hold the tensors of another layer of this format, in whose place in a model they stay.

        They are no more in this layer's `state_dict`.
        """
        self._non_persistent_buffers_set.update(self.names)
        if owner not in self.sharing:
            self.sharing, owner.sharing = (*self.sharing, owner), (*owner.sharing, self)
        owner._hand_on()

    @property
    def is_copy(self) -> bool:
        """Whether the tensors belong to another layer, which `share` got them from."""
        return not self._non_persistent_buffers_set.isdisjoint(self.names)

    def forget(self) -> None:
        """Drop what was made from the tensors, and those that are no longer the layer's."""
        self._without_casts()

    def _hand_on(self) -> None:
        """Give the tensors to the layers that share them."""
        self.forget()
        for other in self.sharing:
            for name in self.names:
                other._buffers[name] = self._buffers[name]
            other.forget()

    def __getstate__(self) -> dict[str, Any]:
        """Of pickle and copy: what is right here only is left out."""
        return {name: value for name, value in vars(self).items() if name not in TRANSIENT}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.weight_dtype = fn(torch.empty(0, dtype=self.weight_dtype)).dtype
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():  # without its casts
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old if old.device == new.device else old.to(new.device)
        for other in self.sharing:  # one that was moved before has moved all
            for name in self.names:
                theirs, own = other._buffers[name], self._buffers[name]
                if theirs is not before[name] and theirs is not None and own is not None:
                    self._buffers[name] = theirs if theirs.device == own.device else own
        self._without_casts()
        return self

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        *_, errors = rest
        saved = local_metadata.get("format", self.format.spec)
        if saved != self.format.spec:  # tensors of int6 and of fp6 look alike
            errors.append(
                f"{prefix}codes are in format {saved!r}, and the layer is in {self.format.spec!r}; "
                "quantize the model to the former before loading"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        if not self.is_copy:
            self._hand_on()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._without_casts()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if notes := getattr(destination, "_metadata", None):
            notes[prefix[:-1]]["format"] = self.format.spec
