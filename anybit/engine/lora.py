"""LoRA adapters beside layers of any format, several at once, each for the texts that ask for it.

All adapters of a layer lie side by side. Two products serve every token, whatever adapter it has:

    y += (x A^T * scales) B^T

with A (ranks, K) and B (N, ranks) of all adapters, and scales (T, ranks) that are zero at the ranks
of those that a token does not have. That suits a few adapters of small ranks.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybit.engine.scheduler import Scheduled
from anybit.errors import InvalidInput
from anybit.files.directory import read_json
from anybit.files.safetensors import Stored, read_header
from anybit.nn.experts import published
from anybit.nn.linear import check_finite

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
OTHER = (  # options of peft's that change what an adapter computes
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "alora_invocation_tokens",
    "trainable_token_indices",
    "arrow_config",
)
OWN_BASE = ("pissa", "olora", "corda", "loftq")  # ways to begin that change the model's own weights


@dataclass(frozen=True)
class Adapter:
    """An adapter's directory, as peft writes it.

    layers: of each layer that it changes, by the checkpoint's name: A (rank, K) and B (N, rank).
    scales: what B A is multiplied by.
    """

    directory: Path
    layers: Mapping[str, tuple[Stored, Stored]]
    scales: Mapping[str, float]


class Beside(NamedTuple):
    """What all adapters of a layer add to it. a (ranks, K), scales (adapters + 1, ranks).

    parts: rows of the output that some of the ranks add to, and B (rows, ranks) for these.
    """

    a: Tensor
    scales: Tensor
    parts: list[tuple[slice, slice, Tensor]]


@dataclass
class Adapters:
    """The adapters of a model.

    found: by name. ids (T,): which one each token of the step has that is being computed, counted
    from 1; 0: none. None where no token has one.
    """

    found: Mapping[str, Adapter] = field(default_factory=dict)
    ids: Tensor | None = None
    read: set[tuple[str, str]] = field(default_factory=set)  # adapters and their layers
    made: dict[tuple[str, ...], Beside | None] = field(default_factory=dict)  # by layers' names

    def of_new_weights(self) -> "Adapters":
        """These adapters, as they were read, for the same model with other weights."""
        return Adapters(self.found, made=self.made)

    def beside(
        self,
        layer: nn.Module,
        names: list[str],
        rows: list[int],
        columns: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> nn.Module:
        """The layer with what adapters add to it.

        Args:
            layer: Gives the outputs of the named layers side by side.
            names: Of the layers.
            rows: Outputs of each.
            columns: Inputs of all.
            device: Of the adapters.
            dtype: Of the adapters.
        """
        key = tuple(names)
        if key not in self.made:
            self.made[key] = self._read(names, rows, columns, device, dtype)
        made = self.made[key]
        return layer if made is None else Adapted(layer, self, made)

    def _read(
        self,
        names: list[str],
        rows: list[int],
        columns: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Beside | None:
        a: list[Tensor] = []
        scales: list[Tensor] = []
        parts: list[tuple[slice, slice, Tensor]] = []
        top = ranks = 0
        for layer_name, n in zip(names, rows, strict=True):
            b: list[Tensor] = []
            for i, (name, adapter) in enumerate(self.found.items(), 1):
                if layer_name not in adapter.layers:
                    continue
                own_a, own_b = self._tensors(name, adapter, layer_name, n, columns)
                own = torch.zeros(len(self.found) + 1, len(own_a))
                own[i] = adapter.scales[layer_name]
                a, b, scales = [*a, own_a], [*b, own_b], [*scales, own]
            if b:
                both = torch.cat(b, 1).to(device, dtype)
                parts.append((slice(top, top + n), slice(ranks, ranks + both.shape[1]), both))
                ranks += both.shape[1]
            top += n
        if not parts:
            return None
        return Beside(torch.cat(a).to(device, dtype), torch.cat(scales, 1).to(device, dtype), parts)

    def select(self, scheduled: list[Scheduled], device: torch.device) -> bool:
        """Note which adapter each token of a step has; whether any has one."""
        known = {name: i for i, name in enumerate(self.found, 1)}
        ids = [
            known.get(s.seq.params.adapter or "", 0)
            for s in scheduled
            for _ in range(s.tokens + len(s.draft))
        ]
        self.ids = torch.tensor(ids).to(device, non_blocking=True) if any(ids) else None
        return any(ids)

    def check_all_read(self) -> None:
        """InvalidInput when an adapter changes what the model has no place for."""
        for name, adapter in self.found.items():
            left = [layer for layer in adapter.layers if (name, layer) not in self.read]
            if left:
                raise InvalidInput(
                    f"{adapter.directory}: adapter {name!r} changes {', '.join(left[:3])}"
                    f"{', ...' * (len(left) > 3)}, where the engine takes no adapters (it does at "
                    "linear layers other than experts and the output head); merge it into the model"
                )

    def _tensors(
        self, name: str, adapter: Adapter, layer: str, n: int, k: int
    ) -> tuple[Tensor, Tensor]:
        a, b = adapter.layers[layer]
        rank = a.shape[0] if a.shape else 0
        if a.shape != (rank, k) or b.shape != (n, rank):
            raise InvalidInput(
                f"{adapter.directory}: {layer} has lora_A {a.shape} and lora_B {b.shape}, and the "
                f"model's layer is ({n}, {k}); this adapter belongs to another model"
            )
        self.read.add((name, layer))
        both = a.read().float(), b.read().float()
        for tensor in both:
            check_finite(tensor, f"{adapter.directory}: {layer}")
        return both


class Adapted(nn.Module):
    """A layer and its adapters."""

    a: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Module, adapters: Adapters, beside: Beside):
        super().__init__()
        self.layer, self.adapters, self.parts = layer, adapters, beside.parts
        self.register_buffer("a", beside.a)
        self.register_buffer("scales", beside.scales)

    def forward(self, x: Tensor) -> Tensor:
        """x (T, K) -> (T, N)."""
        y: Tensor = self.layer(x)
        if self.adapters.ids is None:
            return y
        scales = self.scales[self.adapters.ids]
        # Other adapters' products may overflow without harm to this one's tokens.
        small = torch.where(scales != 0, F.linear(x, self.a) * scales, 0)
        for rows, ranks, b in self.parts:
            y[:, rows] += F.linear(small[:, ranks], b)
        return y


def read_adapter(directory: Path, model_type: str | None) -> Adapter:
    """An adapter's headers, checked.

    Raises:
        InvalidInput: It is no LoRA adapter, or one that does more than add B A to weights.
        FileNotFoundError: A file is missing.
    """
    config = read_json(directory / CONFIG)
    kind = config.get("peft_type")
    given = [option for option in OTHER if config.get(option)]
    if config.get("bias", "none") != "none":
        given.append(f"bias={config['bias']!r}")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(OWN_BASE):
        given.append(f"init_lora_weights={start!r}")
    if kind != "LORA" or given:
        what = f"{', '.join(given)}" if kind == "LORA" else f"peft_type {kind!r}"
        raise InvalidInput(
            f"{directory} has {what}, and the engine adds plain LoRA only; merge the adapter into "
            "the model with peft"
        )
    found: dict[str, dict[str, Stored]] = {}
    for name, tensor in read_header(directory / WEIGHTS).items():
        match = KEY.fullmatch(name)
        if match is None or tensor.torch_dtype not in FLOATS:
            raise InvalidInput(
                f"{directory}: tensor {name} ({tensor.dtype}) is none of a linear layer's LoRA; "
                "merge the adapter into the model with peft"
            )
        found.setdefault(match[1], {})[match[2]] = tensor
    if not found:
        raise InvalidInput(f"{directory}: {WEIGHTS} holds no tensors; save the adapter again")
    for name, tensors in found.items():
        if len(tensors) < 2:
            raise InvalidInput(f"{directory}: {name} lacks lora_A or lora_B; copy it again")
    layers, scales = {}, {}
    for name, tensors in found.items():
        ours = published(name, model_type)
        layers[ours] = tensors["A"], tensors["B"]
        scales[ours] = scale(config, name, tensors["A"], directory)
    return Adapter(directory, layers, scales)


def scale(config: Mapping[str, Any], name: str, a: Stored, directory: Path) -> float:
    """What a layer's B A is multiplied by, as peft computes it."""
    alpha, rank = setting(config, "lora_alpha", "alpha_pattern", name), a.shape[0] if a.shape else 0
    if not isinstance(alpha, int | float) or not rank:
        raise InvalidInput(f"{directory}: {name} has lora_alpha {alpha!r} and rank {rank}")
    stated = setting(config, "r", "rank_pattern", name)
    if stated not in (None, rank):
        raise InvalidInput(
            f"{directory}: {name} has rank {rank}, and {CONFIG} says {stated}; copy both again"
        )
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def setting(config: Mapping[str, Any], key: str, patterns: str, name: str) -> Any:
    """A setting of a layer: of the first pattern that matches its name, or that of all."""
    for pattern, own in (config.get(patterns) or {}).items():
        if re.match(pattern if pattern.startswith("^") else rf"(.*\.)?({pattern})$", name):
            return own
    return config.get(key)
