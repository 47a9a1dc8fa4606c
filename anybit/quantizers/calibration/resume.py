"""Finished blocks on disk, so that a calibration that was killed goes on where it stopped."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from anybit.core.packed import Packed, tensor_shapes
from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput
from anybit.files.directory import read_json, write_json
from anybit.files.safetensors import ShardWriter, read_header
from anybit.nn.experts import published, unpublished
from anybit.nn.linear import QuantLinear
from anybit.nn.model import replace, weight_of
from anybit.quantizers.calibration.stored_blocks import put

SETTINGS = "settings.json"
PROBE = 4096  # numbers of each weight that go into the digest
DIGEST = re.compile(r",? ?\b[0-9a-f]{16}\b")


class FinishedBlocks:
    """A folder with one file for each finished block and the settings that they were made with.

    Args:
        folder: Made when it does not exist; None keeps nothing.
        settings: What a resumed run must have in common with the one before, by name.
        model_type: As in the model's config; decides names in checkpoints (Mixtral's differ).

    Raises:
        InvalidInput: The folder holds blocks made with other settings; names the difference.
    """

    def __init__(
        self, folder: str | Path | None, settings: dict[str, str], model_type: str | None = None
    ):
        self.folder = None if folder is None else Path(folder)
        self.model_type = model_type
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / SETTINGS
        if path.is_file():
            check_same(self.folder, read_json(path), settings)
            return
        write_json(path, settings)

    def path(self, index: int) -> Path | None:
        """The file of block `index`; None when nothing is kept."""
        return None if self.folder is None else self.folder / f"block_{index:04d}.safetensors"

    def holds(self, index: int) -> bool:
        """Whether a block was finished by a run before."""
        path = self.path(index)
        return path is not None and path.is_file()

    def save(self, index: int, block: nn.Module, prefix: str) -> None:
        """Write all tensors of a finished block, by their names in checkpoints.

        The file appears whole or not at all, and is a shard of a checkpoint as it is.
        """
        path = self.path(index)
        if path is None or path.is_file():
            return
        state = {
            published(name, self.model_type): tensor
            for name, tensor in block.state_dict(prefix=prefix).items()
        }
        with ShardWriter(path, state) as file:
            for name, tensor in state.items():
                file.add(name, tensor)

    def restore(
        self, index: int, block: nn.Module, schemes: Mapping[str, str], prefix: str
    ) -> bool:
        """Put a finished block's quantized layers and other tensors in place, if there are any."""
        path = self.path(index)
        if path is None or not self.holds(index):
            return False
        device = next(block.parameters()).device
        state = {
            unpublished(name, self.model_type).removeprefix(prefix): stored.read().to(device)
            for name, stored in read_header(path).items()
        }
        for name, scheme in schemes.items():
            layer = cast(nn.Linear, block.get_submodule(name))
            fmt, activation = parse_scheme(scheme)
            shape = cast(tuple[int, int], tuple(weight_of(layer).shape))
            own = {key: state.pop(f"{name}.{key}", None) for key in tensor_shapes(fmt, shape)}
            found = {key: tensor for key, tensor in own.items() if tensor is not None}
            packed = Packed.from_tensors(fmt, shape, found, name)
            bias = state.pop(f"{name}.bias", None)
            layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]
            dtype = layer.weight.dtype  # and as `quantize_layers` makes them
            quantized = QuantLinear.instead_of(layer, packed, activation, dtype, keep="decoded")
            replace(block, name, quantized)
        for name, tensor in state.items():
            put(block, name, tensor)
        return True


def check_same(folder: Path, then: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise InvalidInput for settings other than those that the folder was made with."""
    lines = [
        f"{key}: {difference(then.get(key, 'none'), now.get(key, 'none'))}"
        for key in sorted({*then, *now})
        if then.get(key) != now.get(key)
    ]
    if lines:
        raise InvalidInput(
            f"{folder} holds blocks that were made with other settings ({'; '.join(lines)}); use "
            f"those again, or remove the folder to start anew: rm -r {folder}"
        )


def difference(then: str, now: str) -> str:
    """How two settings differ, in short: of formats the layers, of data no digest."""
    try:
        old, new = json.loads(then), json.loads(now)
        changes = Counter(
            (old.get(name) or "none", new.get(name) or "none") for name in {**old, **new}
        )
    except (ValueError, AttributeError):  # no formats of layers
        old, new = (shortened(DIGEST.sub("", text)) for text in (then, now))
        return f"{old}, of other contents" if old == new else f"{old} then, {new} now"
    kinds = [
        f"{shortened(a)} then, {shortened(b)} now, of {count} layer{'s' * (count > 1)}"
        for (a, b), count in changes.most_common()
        if a != b
    ]
    return ", ".join([*kinds[:3], *(["..."] if kinds[3:] else [])])


def shortened(text: str) -> str:
    """A text that is no longer than a line or two."""
    return text if len(text) <= 160 else f"{text[:160]}..."


def digest(tensors: Sequence[Tensor]) -> str:
    """A short name for the contents of tensors, from evenly spaced numbers of each."""
    sha = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().flatten()
        probe = flat[:: max(1, flat.numel() // PROBE)].cpu().contiguous()
        sha.update(probe.view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]
