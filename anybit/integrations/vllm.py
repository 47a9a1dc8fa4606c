"""anybit as a quantization method of vLLM: the plugin that vLLM finds, and its configuration.

    vllm serve OUT                      # a checkpoint of anybit names its method in config.json
    vllm.LLM(DENSE, quantization="anybit", hf_overrides={"anybit": {"formats": "fp6"}})

Checked with vLLM 0.32 and 0.33. The plugin implements vLLM's abstract classes, and nothing of
vLLM's own methods: `vllm_linear.py` loads linear layers, `vllm_moe.py` experts, and
`vllm_products.py` multiplies.
"""

from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization import (
    get_quantization_config,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)

from anybit.core.packed import is_codes
from anybit.engine.weights import KEPT, linear_shapes, plan_text
from anybit.errors import InvalidInput
from anybit.kernels.registry import BACKENDS
from anybit.nn.plan import METHOD, is_head, patterns_for, plan_of

OVERRIDE = "anybit"  # what `hf_overrides` calls the options below
OPTIONS = ("formats", "backend")


def register() -> None:
    """Enter the method into vLLM's registry; the entry point, called in every process."""
    try:
        if get_quantization_config(METHOD) is AnybitConfig:
            return
    except ValueError:  # not there yet
        pass
    register_quantization_config(METHOD)(AnybitConfig)


class AnybitConfig(QuantizationConfig):
    """Which format each linear layer has, and which kernels multiply.

    formats: {glob: scheme or None}, as in `quantize_`; None until `maybe_update_config` finds them
        in the overrides. They describe the layers of a quantized checkpoint, or say what a dense
        one is quantized to while it is loaded (round to nearest).
    backend: a name in `registry.BACKENDS` for all layers; None lets each layer have the first that
        takes it. Part of the model's config, which vLLM's compile cache depends on, and not of the
        environment, which it does not.
    """

    def __init__(self, formats: dict[str, str | None] | None = None, backend: str | None = None):
        super().__init__()
        self.formats, self.backend = formats, backend
        self.names: dict[str, str] = {}  # vLLM's names of layers -> the checkpoint's
        self.coded: set[str] = set()  # layers that the checkpoint holds in codes
        self.dense: set[str] = set()  # layers whose weight it holds

    @classmethod
    def get_name(cls) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "AnybitConfig":
        """From a checkpoint's `quantization_config`, checked as transformers checks it."""
        from anybit.integrations.transformers import AnybitConfig as Checked

        return cls(Checked(**config).formats)

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Read `hf_overrides`, and what the checkpoint's files hold."""
        from vllm.transformers_utils.config import get_safetensors_params_metadata

        self._override(getattr(hf_config, OVERRIDE, None), model_name)
        stored = get_safetensors_params_metadata(model_name, revision=revision)
        self._survey({n: tuple(entry["shape"]) for n, entry in stored.items() if "shape" in entry})

    def _override(self, given: Any, model_name: str) -> None:
        options = {"formats": given} if isinstance(given, str) else dict(given or {})
        if unknown := set(options) - set(OPTIONS):
            raise InvalidInput(
                f"hf_overrides[{OVERRIDE!r}] has {', '.join(sorted(map(str, unknown)))}; known: "
                f"{', '.join(OPTIONS)}"
            )
        formats, backend = options.get("formats"), options.get("backend")
        if backend is not None and backend not in BACKENDS:
            raise InvalidInput(f"unknown backend {backend!r}; known: {', '.join(BACKENDS)}")
        self.backend = backend or self.backend
        if formats is not None and self.formats is not None:
            raise InvalidInput(
                f"{model_name} is quantized already ({plan_text(self.formats)}); leave out "
                "formats, or load the dense model"
            )
        if formats is not None:
            self.formats = plan_of(formats)
        if self.formats is None:
            raise InvalidInput(
                f"{model_name} is not quantized; quantization={METHOD!r} quantizes it while it is "
                f"loaded, and needs a format: hf_overrides={{{OVERRIDE!r}: {{'formats': 'fp6'}}}}"
            )

    def _survey(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Note which layers are stored in codes; patterns that match none are a ValueError."""
        self.coded = {name.rpartition(".")[0] for name in shapes if is_codes(name)}
        linear = linear_shapes({n: SimpleNamespace(shape=s) for n, s in shapes.items()})  # type: ignore[misc]
        self.dense = set(linear) - self.coded
        names = self.coded | self.dense
        self.names = {name: name for name in names}
        plan = self.formats or {}
        used = {pattern for name in names for pattern in patterns_for(name, plan)}
        idle = [p for p in plan if p not in used and p not in ("*", "lm_head")]
        if idle and names:
            raise InvalidInput(
                f"no layer matches {', '.join(map(repr, idle))}; layers are named like "
                f"{', '.join(map(repr, sorted(names)[:3]))}"
            )

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Note the names that the model gives to the checkpoint's layers."""
        mapped = {hf_to_vllm_mapper.map_name(ours): theirs for ours, theirs in self.names.items()}
        self.names = {ours: theirs for ours, theirs in mapped.items() if ours is not None}

    @property
    def quantizes(self) -> bool:
        """Whether the checkpoint is dense, and quantized while it is loaded."""
        return bool(self.dense) and not self.coded

    def scheme(self, prefix: str) -> str | None:
        """The scheme of a layer, by vLLM's name of it; None for one that is not quantized."""
        name = self.names.get(prefix, prefix)
        plan = self.formats or {}
        matches = patterns_for(name, plan)
        scheme = plan[matches[-1]] if matches else None
        if name in self.coded:
            if scheme is None:
                raise InvalidInput(
                    f"{name}: the checkpoint holds codes, but config.json names no format for it "
                    f"({plan_text(plan)}); copy it again"
                )
            return scheme
        if self.coded and name in self.dense:
            return None
        if not matches and not is_head(name) and not kept(name):
            raise InvalidInput(
                f"no pattern matches layer {name!r}; add '*': None to keep all other layers as "
                f"they are, or '*': FORMAT to quantize them (patterns: {plan_text(plan)})"
            )
        return None if kept(name) else scheme

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a layer that vLLM is about to build."""
        # Imported here, since vLLM loads plugins before it has chosen a platform.
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        if isinstance(layer, RoutedExperts):
            from anybit.integrations.vllm_moe import method_for

            return method_for(self, layer, prefix)
        if not isinstance(layer, LinearBase | ParallelLMHead):
            return None
        from anybit.integrations.vllm_linear import OnLoad, Stored

        names = self.parts(prefix)
        schemes = [self.scheme(name) for name in names]
        if any(schemes):
            method = OnLoad if self.quantizes else Stored
            return method(names, schemes, self.backend)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    def parts(self, prefix: str) -> list[str]:
        """The checkpoint's layers, by vLLM's names, that make up a layer of vLLM's."""
        parent, dot, last = prefix.rpartition(".")
        parts = [parent + dot + part for part in self.packed_modules_mapping.get(last, [])]
        if prefix in self.names and not any(part in self.names for part in parts):
            return [prefix]
        return parts or [prefix]


def kept(name: str) -> bool:
    """Whether a matrix is no linear layer to be quantized: an embedding or a router."""
    return any(fnmatchcase(name, pattern) for pattern in KEPT)
