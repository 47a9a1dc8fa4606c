"""From a directory to a model, its tokenizer and what its files say about generation."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PretrainedConfig

from anybit.checkpoint.architecture import EXPERTS, bare_model, configuration
from anybit.checkpoint.foreign.ready import ready
from anybit.checkpoint.late import import_late
from anybit.checkpoint.stream import WEIGHT_DTYPES
from anybit.engine.generator import UNLIMITED, Generator, longest
from anybit.engine.lora import Adapters, read_adapter
from anybit.engine.memory import check_weights
from anybit.engine.models import UnknownModel
from anybit.engine.models.fields import Asked, asked_by, check_fields, outline_of
from anybit.engine.models.layers import Decoder
from anybit.engine.models.mtp import Head, head_of
from anybit.engine.models.rope import rope_parameters
from anybit.engine.weights import (
    IGNORED,
    Checkpoint,
    Reading,
    Weights,
    matches,
    read_as_asked,
    reading,
)
from anybit.errors import InvalidInput, Unsupported, loading
from anybit.files.directory import quantization_of, read_json, stated_quantization
from anybit.files.safetensors import Stored, stored_tensors
from anybit.nn.model import quantized_modules
from anybit.nn.multiplier import Keep
from anybit.nn.plan import METHOD, Plan, Spec, stored_plan
from anybit.nn.tied import untie
from anybit.progress import START
from anybit.quantizers.quantize import quantized_plan
from anybit.quantizers.rtn import RTN

Built = TypeVar("Built", bound=Decoder)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
MODELS = {
    "LlamaForCausalLM": "llama.Llama",
    "MistralForCausalLM": "llama.Mistral",
    "Qwen2ForCausalLM": "llama.Qwen2",
    "Qwen3ForCausalLM": "llama.Qwen3",
    "MixtralForCausalLM": "mixtral.Mixtral",
    "Qwen2MoeForCausalLM": "qwen_moe.Qwen2Moe",
    "Qwen3MoeForCausalLM": "qwen_moe.Qwen3Moe",
    "DeepseekV2ForCausalLM": "deepseek.DeepseekV2",
    "DeepseekV3ForCausalLM": "deepseek.DeepseekV3",
    "Ernie4_5ForCausalLM": "llama.Ernie",
    "Exaone4ForCausalLM": "exaone4.Exaone4",
    "GemmaForCausalLM": "gemma.Gemma",
    "Gemma2ForCausalLM": "gemma.Gemma2",
    "Gemma3ForCausalLM": "gemma.Gemma3",
    "GlmForCausalLM": "llama.Glm",
    "Glm4ForCausalLM": "llama.Glm4",
    "Glm4MoeForCausalLM": "deepseek.Glm4Moe",
    "GptOssForCausalLM": "gpt_oss.GptOss",
    "GraniteForCausalLM": "granite.Granite",
    "MinistralForCausalLM": "llama.Mistral",
    "Olmo2ForCausalLM": "llama.Olmo2",
    "Olmo3ForCausalLM": "llama.Olmo2",
    "OPTForCausalLM": "opt.OPT",
    "Phi3ForCausalLM": "llama.Phi3",
    "SeedOssForCausalLM": "llama.SeedOss",
    "SmolLM3ForCausalLM": "smollm3.SmolLM3",
    "BambaForCausalLM": "mamba.Bamba",
    "FalconH1ForCausalLM": "mamba.FalconH1",
    "GraniteMoeHybridForCausalLM": "mamba.GraniteHybrid",
    "JambaForCausalLM": "mamba.Jamba",
    "Lfm2ForCausalLM": "lfm2.Lfm2",
    "Lfm2MoeForCausalLM": "lfm2.Lfm2Moe",
    "Mamba2ForCausalLM": "mamba.PureMamba2",
    "NemotronHForCausalLM": "mamba.NemotronH",
    "Qwen3NextForCausalLM": "qwen3_next.Qwen3Next",
    "Qwen3_5ForCausalLM": "qwen3_next.Qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_next.Qwen3_5Moe",
}


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to run.

    Attributes:
        tokenizer: None when the directory has none.
        quantized: How many weights have each scheme.
        quantized_bytes: That these take, scales included.
        plan: The scheme of each quantized layer, by the checkpoint's names; None where the engine
            does not read the checkpoint itself.
        head: What guesses further tokens, if that was asked for.
    """

    model: Decoder | Generator
    tokenizer: Any
    config: PretrainedConfig
    eos: frozenset[int]
    dtype: torch.dtype
    quantized: Mapping[str, int] = field(default_factory=dict)
    quantized_bytes: int = 0
    plan: Mapping[str, str] | None = None
    head: Head | None = None


def load(
    directory: Path,
    device: torch.device,
    dtype: torch.dtype | None,
    quantization: Spec | Plan | None,
    length: int | None,
    cache_options: Iterable[str] = (),
    keep: Keep = "auto",
    adapters: Mapping[str, Path] | None = None,
    further: bool = False,
) -> Loaded:
    """Load a model directory: dense, anybit's own, or another tool's.

    length: positions to prepare; None: all.

    What the engine does not know runs as transformers has it, on the engine's KV cache where that
    is possible, and else in `generate`, unless there are cache_options: those that a user has set
    of the engine's KV cache. keep: as in `anybit.load`. adapters: directories of LoRA adapters by
    name. further: load the checkpoint's head for further tokens as well.

    Raises FileNotFoundError or ValueError with the fact and the remedy.
    """
    directory = ready(directory)
    raw = read_json(directory / "config.json")
    formats = formats_of(raw, directory)
    stored = stored_tensors(directory)
    bare = cache(partial(bare_model, directory, stored))
    model: Decoder | Generator
    plan, head = None, None
    try:
        kind, read = read_of(directory, stored, bare, formats, quantization)
        START.done("description")
        tokenizer = ThreadPoolExecutor(1).submit(tokenizer_in, directory).result  # takes a second
        config = read.config
        dtype = dtype or dtype_of(config)
        weights = Checkpoint(directory, device, dtype, read, formats, keep)
        check_weights(directory, weights.least_bytes(), device)
        if adapters:
            found = {name: read_adapter(d, config.model_type) for name, d in adapters.items()}
            weights.adapters = Adapters(found)
        check_length(config, length)
        if further:
            head = build(partial(head_of, kind), config, weights, length)
        model = build(kind, config, weights, length)
        names = kind.further(config)
        weights.check_all_read((f"{names.prefix}.*",) if names else ())
        if weights.adapters is not None:
            weights.adapters.check_all_read()
        quantized, size, plan = weights.quantized, weights.quantized_bytes, weights.plan
    except UnknownModel as reason:
        config, tokenizer = bare().config, partial(tokenizer_in, directory)
        if further:
            raise Unsupported(
                f"{reason}, and draft='mtp' needs a model that it knows; use another draft"
            ) from None
        if adapters:
            raise Unsupported(
                f"{reason}, and adapters need a model that it knows; merge them into the model"
            ) from None
        from anybit.engine import fallback  # with what transformers' models are made of

        dtype = dtype or dtype_of(config)
        model = fallback.load(
            directory,
            bare(),
            device,
            dtype,
            formats is not None,
            quantization,
            length,
            list(cache_options),
            str(reason),
            keep,
        )
        layers = [m for _, m in quantized_modules(model.model) if not m.is_copy]
        quantized, size = Counter(), sum(layer.packed.nbytes() for layer in layers)
        for layer in layers:
            quantized[layer.scheme] += math.prod(layer.shape)
    START.done("weights")
    eos = end_tokens(directory, config)
    words = tokenizer()
    START.done("tokenizer")
    return Loaded(model, words, config, eos, dtype, quantized, size, plan, head)


def dtype_of(config: PretrainedConfig) -> torch.dtype:
    """The dtype of a model's floats."""
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16


def read_of(
    directory: Path,
    stored: Mapping[str, Stored],
    bare: Callable[[], Any],
    formats: Mapping[str, str | None] | None,
    quantization: Spec | Plan | None,
) -> tuple[type[Decoder], Reading]:
    """The class of ours for a directory, and what it reads there.

    transformers' model is built only where tensors have other names than ours asks for, or fields
    of config.json other values than usual.

    Args:
        directory: Of the checkpoint.
        stored: Its tensors.
        bare: Builds that model, on the meta device.
        formats: As in `reading`.
        quantization: As in `reading`.

    Raises:
        InvalidInput: Files are damaged, or do not fit each other.
        UnknownModel: The engine does not know the model.
    """
    config, name = configuration(directory, stored)
    own = is_whole(config, name, len(stored))
    config = config if own else bare().config
    kind = model_class(config, directory)
    try:
        asked = asked_by(kind, config)
        if own and has_own_head(asked, stored):
            untie(config)
            asked = asked_by(kind, config)
    except Exception:
        bare()  # what transformers says of its fields comes first
        raise
    check_fields(kind, config, asked.fields, bare, directory)
    if own:
        further = kind.further(config)
        heads = {f"{name}.weight" for name in asked.tied}  # that are the embeddings again
        others = (*IGNORED, *asked.scales, *([f"{further.prefix}.*"] if further else ()), *heads)
        beside = partial(matches, others)
        if (read := read_as_asked(stored, asked.tensors, beside, formats)) is not None:
            read |= heads & stored.keys()
            found = Reading(
                config,
                asked.embeddings,
                stored,
                {*stored},
                read,
                formats or {},
                order=asked.tensors,
            )
            planned = planned_by_names(kind, asked, found, directory, quantization)
            if planned is not None:
                return kind, planned
    return kind, reading(directory, stored, bare, formats, quantization)


def has_own_head(asked: Asked, stored: Mapping[str, Stored]) -> bool:
    """Whether files hold another weight for a tied head than for its embedding.

    transformers then takes the head for one of its own, whatever config.json says.
    """
    pairs = ((f"{head}.weight", f"{words}.weight") for head, words in asked.tied.items())
    both = [(stored[a], stored[b]) for a, b in pairs if {a, b} <= stored.keys()]
    return any(not a.equals(b) for a, b in both)


def planned_by_names(
    kind: type[Decoder],
    asked: Asked,
    found: Reading,
    directory: Path,
    quantization: Spec | Plan | None,
) -> Reading | None:
    """What is read of a dense checkpoint, and how it is quantized meanwhile.

    None: transformers' model has to tell, as for a plan that does not fit, or for a head that gets
    a weight of its own.

    Args:
        kind: The model of ours.
        asked: What it asks for.
        found: What is read.
        directory: Of the checkpoint.
        quantization: As in `reading`.
    """
    if quantization is None:
        return found
    if stated_quantization(directory, read_json(directory / "config.json")) is not None:
        return None
    outline, names = outline_of(kind, found.config, asked)
    try:
        schemes, plan = quantized_plan(outline, quantization, RTN())
    except InvalidInput:
        return None
    sharing = outline.sharing(schemes)
    own = {name: scheme for name, scheme in schemes.items() if name not in sharing}
    if not sharing and any({*pair} & own.keys() for pair in outline.tied.items()):
        return None
    dtypes = {found.stored[f"{names[name]}.weight"].torch_dtype for name in own}
    if not dtypes <= {*WEIGHT_DTYPES}:
        return None
    return found._replace(named=plan, schemes={names[n]: scheme for n, scheme in own.items()})


def is_whole(config: PretrainedConfig, name: str, tensors: int) -> bool:
    """Whether a configuration is one of the named class, and not of a part or a composite of it.

    tensors: of the checkpoint, which has at least one for each expert.
    """
    kind = name.removesuffix("ForCausalLM")
    experts = (getattr(config, field, None) or 0 for field in EXPERTS)
    possible = all(isinstance(count, int) and count <= tensors for count in experts)
    alike = type(config).__name__ in (f"{kind}Config", f"{kind}TextConfig")
    return alike and not config.sub_configs and possible


def tokenizer_in(directory: Path) -> Any:
    """A directory's tokenizer; None if it has none."""
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        return None
    with loading(directory):
        import_late()
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)


@torch.inference_mode()
def build(
    kind: Callable[..., Built], config: PretrainedConfig, weights: Weights, length: int | None
) -> Built:
    """A model from any source of weights."""
    return kind(config, weights, length or positions(config)).eval()


def positions(config: PretrainedConfig) -> int:
    """Tokens of the longest text, unless the user says more."""
    return longest(config) or UNLIMITED


def check_length(config: PretrainedConfig, length: int | None) -> None:
    """InvalidInput for texts longer than config.json says the model's positions are good for."""
    factors = [parameters.get("factor") for parameters in rope_parameters(config)]
    stretched = max([1, *(factor for factor in factors if isinstance(factor, int | float))])
    most = longest(config) or math.inf  # a recurrence alone counts no positions
    if length is not None and not 1 <= length <= stretched * most:
        raise InvalidInput(
            f"length={length}, and the model has {most} positions; ask for fewer, or give "
            "config.json rope_parameters that stretch them"
        )


def model_class(config: PretrainedConfig, directory: Path | str = "the model") -> type[Decoder]:
    names = getattr(config, "architectures", None) or []
    name = next((n for n in names if n in MODELS), None)
    if name is None:
        raise UnknownModel(
            f"{directory}: the engine does not know {', '.join(names) or 'an unnamed architecture'}"
        )
    module, _, cls = MODELS[name].partition(".")
    return getattr(import_module(f"anybit.engine.models.{module}"), cls)


def formats_of(raw: dict[str, Any], directory: Path) -> dict[str, str | None] | None:
    """The plan {glob: format} of an anybit checkpoint, or None for a dense one."""
    quantization = quantization_of(raw, directory)
    if not quantization:
        return None
    method = quantization.get("quant_method")
    if method != METHOD:
        raise InvalidInput(
            f"{directory} is quantized by {method!r}, which the engine does not read; "
            "convert it with `anybit convert`, or load the dense model"
        )
    return stored_plan(quantization, directory)


def end_tokens(directory: Path, config: PretrainedConfig) -> frozenset[int]:
    """Tokens that end a text: generation_config.json's if it names any, else config.json's."""
    path = directory / "generation_config.json"
    found = read_json(path).get("eos_token_id") if path.is_file() else None
    if found is None:
        found = getattr(config.get_text_config(), "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])
