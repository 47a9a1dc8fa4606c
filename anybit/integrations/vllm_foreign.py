"""Checkpoints of other tools in vLLM: their layers become ours when they are read, as by `convert`.

vLLM hands over one tensor after the other. The first one of a layer brings all tensors that ours
has, read from the files in its place; the layer's other tensors are ignored.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import huggingface_hub
import torch
from torch import Tensor

from anybit.checkpoint.foreign.convert import Conversion, opened, plan_conversion
from anybit.checkpoint.rewrite import SHARD_BYTES
from anybit.errors import Unsupported
from anybit.files.safetensors import Stored, stored_tensors


def directory_of(
    model_name: str,
    revision: str | None,
    cache: str | None = None,
    wanted: Sequence[str] = ("*.safetensors", "*.json"),
) -> Path:
    """A model's files on this machine, those that are wanted downloaded if need be.

    cache: vLLM's `download_dir`, where it puts weights alone; None for the usual cache.
    """
    if Path(model_name).is_dir():
        return Path(model_name)
    from vllm.model_executor.model_loader import weight_utils

    patterns = list(wanted)
    found = weight_utils.maybe_download_from_modelscope(
        model_name, revision, allow_patterns=patterns
    ) or huggingface_hub.snapshot_download(
        model_name,
        revision=revision,
        cache_dir=cache,
        allow_patterns=patterns,
        ignore_patterns=["tokenizer*", "vocab*"] if cache else None,  # which vLLM has already
    )
    return Path(found)


@lru_cache(maxsize=2)  # a model and a draft for it
def in_files(directory: Path) -> Mapping[str, Stored]:
    """A checkpoint's tensors as its files hold them."""
    return stored_tensors(directory)


@lru_cache(maxsize=2)
def planned(directory: Path) -> Conversion:
    """How a checkpoint becomes one of ours; the headers are read once in each process.

    vLLM reads a model with its GPU as torch's default, and converters read files.
    """
    with torch.device("cpu"), opened(directory) as found:
        return plan_conversion(found, SHARD_BYTES, for_transformers=False)


@dataclass
class Source:
    """The quantized layers of a checkpoint. It travels to vLLM's workers.

    Attributes:
        directory: With the files.
        schemes: Of each layer, by the checkpoint's names; None for one that becomes dense.
        names: The checkpoint's names by vLLM's.
    """

    directory: Path
    schemes: Mapping[str, str | None]
    names: Mapping[str, str] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return self.names.get(name) in self.schemes

    def rows(self, name: str) -> int:
        return planned(self.directory).layers[self.names[name]].shape[0]

    def keys(self, names: Iterable[str]) -> list[str]:
        """The last parts of the names of some layers' tensors, for which vLLM wants parameters."""
        each = (self._keys(self.names[n]) if self.has(n) else ["weight"] for n in names)
        return list(dict.fromkeys(key for keys in each for key in keys))

    def check(self) -> None:
        """Raise Unsupported when there are tensors that vLLM cannot hand over."""
        for layer in self.schemes:
            nested = next((key for key in self._keys(layer) if "." in key), None)
            if nested is not None:
                raise Unsupported(
                    f"{self.directory}: vLLM has no parameters with names like {layer}.{nested}; "
                    "make a checkpoint of anybit first, with `anybit convert`"
                )

    def tensors(self, name: str) -> dict[str, Tensor]:
        """What a layer becomes: tensors by their names in ours, in the host's memory."""
        with torch.device("cpu"):
            return planned(self.directory).tensors(self.names[name])

    def _keys(self, layer: str) -> list[str]:
        tensors = planned(self.directory).layers[layer].tensors
        return [tensor.removeprefix(f"{layer}.") for tensor in tensors]
