"""From a loaded model to an engine: its KV cache, what runs its steps, and what guesses for it."""

from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from anybit.engine.block_manager import BlockManager
from anybit.engine.draft_model import DraftModel
from anybit.engine.engine import Decode, Engine
from anybit.engine.experts import OneByOne
from anybit.engine.fallback import Generator
from anybit.engine.graphs import prompt_sizes
from anybit.engine.loader import Loaded
from anybit.engine.lookup import Lookup
from anybit.engine.memory import cache_room, step_bytes
from anybit.engine.model_runner import ModelRunner, Runner, block_bytes
from anybit.engine.models.layers import Decoder
from anybit.engine.scheduler import Scheduler
from anybit.engine.speculation import Drafter, Speculation
from anybit.engine.steady import SteadyScheduler
from anybit.engine.structured import Grammars
from anybit.errors import InvalidInput, Unsupported
from anybit.kernels.kv.format import KvFormat, plain
from anybit.kernels.kv.formats import KV_FORMATS
from anybit.nn.grouped import QuantExperts
from anybit.nn.linear import QuantLinear
from anybit.nn.multiplier import Frozen

CPU_CACHE = 1 << 30  # bytes of KV cache on a CPU at most, unless said otherwise
MOST_DRAFTED = 128  # tokens of a captured step with drafts


@dataclass(frozen=True)
class Settings:
    """How an engine runs, as `LLM` has it. draft: None, "ngram", "auto" or another model."""

    kv: KvFormat
    kv_bytes: int | None
    max_running: int
    max_tokens: int
    block_size: int
    prefix_caching: bool
    deterministic: bool
    draft: str | Path | Loaded | None
    draft_tokens: int
    exact_answers: bool = False


def kv_format(loaded: Loaded, asked: str) -> KvFormat:
    """The format of a model's KV cache. asked: "auto", "model" or one of `KV_FORMATS`."""
    model = loaded.model
    if isinstance(model, Generator):
        asked = "model"
    elif asked == "auto":
        asked = "int8" if all(scales is not None for scales in model.kv_scales) else "model"
    return KV_FORMATS.get(asked) or plain(loaded.dtype)


def assemble(
    loaded: Loaded, small: Loaded | None, settings: Settings, decode: Decode | None
) -> Engine:
    """The engine of a model.

    Args:
        loaded: The model.
        small: One that guesses for it, as `load_draft` gives it.
        settings: How it runs.
        decode: Text of tokens; None without a tokenizer.

    Raises:
        InvalidInput: The KV cache has no room for two blocks.
        Unsupported: Its format does not take the model's heads.
    """
    vocabulary = loaded.config.get_text_config().vocab_size
    runner: Runner
    drafter: Drafter | None = None
    if isinstance(loaded.model, Generator):
        runner, length = loaded.model, loaded.model.length
        blocks = -(-length // settings.block_size)
        settings = replace(settings, max_running=1, max_tokens=length, prefix_caching=False)
    else:
        if settings.exact_answers:
            check_exact(loaded.model)
            loaded.model.exact_answers = True
        runner, blocks = runner_of(loaded, small, settings)
        length = min(loaded.model.length, blocks * settings.block_size)
        if small is not None:
            drafter = draft_model(runner, small, blocks, vocabulary, settings)
        elif settings.draft is not None:
            drafter = Lookup()
    manager = BlockManager(blocks, settings.block_size, settings.prefix_caching)
    scheduler = Scheduler(manager, settings.max_running, settings.max_tokens)
    if settings.deterministic and isinstance(runner, ModelRunner):  # else one text runs at a time
        steps = settings.max_running, settings.max_tokens
        scheduler = SteadyScheduler(manager, *steps, runner.rows)
    return Engine(
        runner,
        scheduler,
        length,
        decode,
        loaded.eos,
        vocabulary,
        Grammars(loaded.tokenizer, vocabulary, loaded.eos) if loaded.tokenizer else None,
        Speculation(drafter, settings.draft_tokens) if drafter else None,
    )


def check_exact(model: nn.Module) -> None:
    """Raise Unsupported unless layers round their inputs to int8, and none of them is an expert."""
    kinds = (QuantLinear, Frozen)
    found = {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, kinds) and m.activation == "int8"
    }
    if not found:
        raise Unsupported(
            "exact_answers is for layers that round their inputs to int8, and the model has none; "
            "leave it out, or quantize to a scheme such as liquid@int8"
        )
    apart = [m for m in model.modules() if isinstance(m, OneByOne)]
    inside = {id(m) for experts in apart for m in experts.modules()}
    for name, module in found.items():
        if isinstance(module, QuantExperts) or id(module) in inside:
            raise Unsupported(
                f"exact_answers: {name} are experts, which round all tokens to int8; leave it out, "
                "or give experts a scheme without @int8"
            )


def runner_of(loaded: Loaded, small: Loaded | None, settings: Settings) -> tuple[ModelRunner, int]:
    """What runs the steps of a model that the engine runs itself, and the blocks of its cache."""
    model, most = loaded.model, settings.max_running
    assert not isinstance(model, Generator)
    models, rows = [model], most
    if settings.draft is not None:
        rows = max(most, min(most * (1 + settings.draft_tokens), MOST_DRAFTED))
    if small is not None and has_own_cache(settings):
        assert not isinstance(small.model, Generator)
        models.append(small.model)
    size, kv = settings.block_size, settings.kv
    tokens = min(settings.max_tokens, most * model.length)
    # Beside a step there is what graphs hold.
    kept = max(rows, prompt_sizes(tokens)[-1])
    if settings.deterministic or not model.capturable:
        kept = 0
    second = most * settings.exact_answers  # rows, of answers' tokens
    step = step_bytes(loaded.config.get_text_config(), tokens + kept + second, most)
    if small is not None:
        step += step_bytes(small.config.get_text_config(), kept, 0)
    blocks = cache_blocks(models, size, kv, settings.kv_bytes, most, step)
    runner = ModelRunner(model, blocks, size, kv, rows, tokens, settings.deterministic)
    return runner, blocks


def draft_model(
    runner: ModelRunner, small: Loaded, blocks: int, vocabulary: int, settings: Settings
) -> DraftModel:
    """Guesses by a smaller model for the one that a runner runs."""
    assert not isinstance(small.model, Generator)
    apart, size = has_own_cache(settings), settings.block_size
    caches = None if apart else runner.caches
    behind = ModelRunner(
        small.model, blocks, size, settings.kv, settings.max_running, settings.max_tokens,
        caches=caches,
    )  # fmt: skip
    own = BlockManager(blocks, size, settings.prefix_caching) if apart else None
    return DraftModel(behind, vocabulary, own, settings.max_tokens)


def has_own_cache(settings: Settings) -> bool:
    """Whether the model that guesses has a cache of its own: another one has."""
    return settings.draft != "auto"


def cache_blocks(
    models: list[Decoder], block_size: int, kv: KvFormat, kv_bytes: int | None, max_running: int,
    step: int,
) -> int:  # fmt: skip
    """Blocks of the KV cache; InvalidInput when kv_bytes, or what is free, does not hold two.

    models: that have caches of so many blocks, the one that decides how many are needed first.
    step: bytes that a step of theirs takes on a GPU.
    """
    for _, dim in (shape for model in models for shape in model.cache_shapes):
        kv.check(dim)
    model = models[0]
    each = sum(block_bytes(m, block_size, kv) for m in models)
    room = cache_room(model.embed_tokens.device, step if kv_bytes is None else None)
    if room is not None and kv_bytes is not None and room < kv_bytes:
        raise InvalidInput(
            f"kv_bytes={kv_bytes} does not fit: {model.embed_tokens.device} has {room} bytes for "
            f"it, of which a step takes about {step}; give at most {max(0, room - step)}, or none"
        )
    if room is not None and room < (kv_bytes or 2 * each):
        raise InvalidInput(
            f"a KV cache of two blocks of {each} bytes does not fit: beside the weights and about "
            f"{step} bytes that a step takes, the GPU has {room} bytes left; use fewer bits for "
            f"weights, kv_cache={' or '.join(map(repr, KV_FORMATS))}, or smaller max_tokens or "
            "max_running"
        )
    if kv_bytes is None:
        most = CPU_CACHE if room is None else room
        kv_bytes = min(most, -(-model.length // block_size) * max_running * each)
    blocks = kv_bytes // each
    if blocks < 2:
        raise InvalidInput(
            f"a KV cache of {kv_bytes} bytes holds {blocks} blocks of {block_size} tokens "
            f"({each} bytes each), and at least 2 are needed; raise kv_bytes"
        )
    return blocks
