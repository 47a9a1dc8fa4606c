"""Blocks that are loaded from a checkpoint only while they are at work."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from anybit.errors import InvalidInput
from anybit.files.safetensors import Readable
from anybit.nn.linear import QuantLinear, check_finite


def put(block: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of a block's parameter or buffer."""
    parent, _, key = name.rpartition(".")
    owner = block.get_submodule(parent)
    if key in owner._parameters:
        owner._parameters[key] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner.register_buffer(key, tensor)


@dataclass(frozen=True)
class StoredBlocks:
    """The weights of a checkpoint's blocks, for a model whose blocks are on the meta device.

    Attributes:
        tensors: The checkpoint's tensors, by their names in the model.
        identity: Names the files and their state; a run resumes only with the same.
    """

    tensors: Mapping[str, Readable]
    identity: str

    @contextmanager
    def loaded(self, block: nn.Module, prefix: str) -> Iterator[None]:
        """The block's tensors are in memory inside, and on the meta device after it.

        Args:
            block: A block on the meta device.
            prefix: The block's name in the model, with a dot at its end.

        Raises:
            InvalidInput: The checkpoint does not have a tensor under its name, or it holds NaN or
                inf.
        """
        modules = list(block.modules())  # those that are replaced may be referred to elsewhere
        stored = block.state_dict(keep_vars=True)  # without what no file holds
        for name, value in stored.items():
            if prefix + name not in self.tensors:
                raise InvalidInput(
                    f"{prefix}{name} is in no file of the checkpoint under this name, so the model "
                    "cannot be calibrated block by block from disk; load it and use quantize_"
                )
            real = self.tensors[prefix + name].read().to(value.dtype)
            check_finite(real, prefix + name)
            put(block, name, real)
        yield
        for module in (*modules, *block.modules()):
            for own in (module._parameters, module._buffers):
                for key, tensor in own.items():
                    if tensor is not None and key not in module._non_persistent_buffers_set:
                        own[key] = tensor.to("meta")  # type: ignore[assignment]
            if isinstance(module, QuantLinear):
                module.forget()
