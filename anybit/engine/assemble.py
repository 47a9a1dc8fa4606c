"""From a loaded model to an engine: its KV cache, what runs its steps, and what guesses for it."""

from dataclasses import replace

import torch

from anybit.engine.block_manager import BlockManager
from anybit.engine.config import EngineConfig
from anybit.engine.draft_model import BEHIND, DraftModel
from anybit.engine.engine import Engine
from anybit.engine.experts import OneByOne
from anybit.engine.generator import Generator
from anybit.engine.graphs import prompt_sizes
from anybit.engine.head_draft import HeadDraft
from anybit.engine.loader import Loaded
from anybit.engine.lookup import Lookup
from anybit.engine.memory import cache_room, step_bytes
from anybit.engine.model_runner import ModelRunner, Runner, state_bytes
from anybit.engine.models.layers import Decoder
from anybit.engine.models.mtp import Head, remembering
from anybit.engine.scheduler import MOST_PROMPTS, Scheduler
from anybit.engine.speculation import Drafter, Speculation
from anybit.engine.steady import SteadyScheduler
from anybit.engine.structured import Grammars
from anybit.errors import InvalidInput, Unsupported
from anybit.kernels.kv.format import KvFormat, plain
from anybit.kernels.kv.formats import KV_FORMATS
from anybit.kernels.scans import STATES
from anybit.kernels.state import Room
from anybit.nn.grouped import QuantExperts
from anybit.nn.linear import QuantLinear
from anybit.nn.multiplier import Frozen

CPU_CACHE = 1 << 30  # bytes of KV cache on a CPU at most, unless said otherwise
MOST_DRAFTED = 128  # tokens of a captured step with drafts


def kv_format(loaded: Loaded, asked: str) -> KvFormat:
    """The format of a model's KV cache. asked: "auto", "model" or one of `KV_FORMATS`."""
    model = loaded.model
    if isinstance(model, Generator):
        asked = "model"
    elif asked in KV_FORMATS and not model.heads:
        raise InvalidInput(
            f"kv_cache={asked!r}: no layer of this model has K and V; leave it out, since states "
            "of layers are kept as they are"
        )
    elif asked == "auto":
        static = [heads.scales is not None for heads in model.heads]
        asked = "int8" if static and all(static) else "model"
    return KV_FORMATS.get(asked) or plain(loaded.dtype)


def cost_of(kv: KvFormat, loaded: Loaded) -> str:
    """What a cache costs, in words; "" where that is too little to speak of."""
    heads = [] if isinstance(loaded.model, Generator) else loaded.model.heads
    kept = sum(each.format(kv) != kv for each in heads)
    if not kept or not kv.loss:
        return kv.loss
    return f"{kv.loss}; {kept} of {len(heads)} layers, whose K has a large bias, get more bits"


def assemble(loaded: Loaded, small: Loaded | None, kv: KvFormat, config: EngineConfig) -> Engine:
    """The engine of a model.

    Args:
        loaded: The model.
        small: One that guesses for it, as `load_draft` gives it.
        kv: The format of the KV cache.
        config: How it runs.

    Raises:
        InvalidInput: The KV cache has no room for two blocks, or for the states of one text.
        Unsupported: Its format does not take the model's heads.
    """
    vocabulary = loaded.config.get_text_config().vocab_size
    if small is not None and isinstance(small.model, Head):
        assert isinstance(loaded.model, Decoder)
        loaded = replace(loaded, model=remembering(loaded.model, small.model))
    runner: Runner
    drafter: Drafter | None = None
    rows = kept = 0
    each = 1 + config.exact_answers  # rows of an answer's token
    if config.exact_answers:
        check_exact(loaded.model).exact_answers = True
    if isinstance(loaded.model, Generator):
        runner, length = loaded.model, loaded.model.length
        blocks = -(-length // config.block_size)
        config = replace(config, max_running=1, max_tokens=length, prefix_caching=False)
    else:
        if config.max_tokens < each:
            raise InvalidInput(
                f"max_tokens={config.max_tokens}: an exact answer's token takes {each}"
            )
        room = room_of(loaded, small, kv, config)
        blocks, kept = room.blocks, room.kept
        rows = room.rows - 1 - kept if loaded.model.recurrent else 0
        length = min(loaded.model.length, blocks * config.block_size)
        if rows:
            config = replace(config, max_running=min(config.max_running, rows))
        runner = runner_of(loaded.model, room, config)
        if small is not None:
            drafter = draft_model(runner, small, room, vocabulary, config)
        elif config.draft is not None:
            drafter = Lookup()
    manager = BlockManager(blocks, config.block_size, config.prefix_caching, rows, kept)
    steps = config.max_running, config.max_tokens
    scheduler = Scheduler(manager, *steps, each)
    if config.deterministic and isinstance(runner, ModelRunner):  # else one text runs at a time
        scheduler = SteadyScheduler(manager, *steps, runner.rows)
    return Engine(
        runner,
        scheduler,
        length,
        loaded.eos,
        vocabulary,
        Grammars(loaded.tokenizer, vocabulary, loaded.eos) if loaded.tokenizer else None,
        Speculation(drafter, config.draft_tokens) if drafter else None,
    )


def check_exact(model: Decoder | Generator) -> Decoder:
    """Raise Unsupported unless the engine runs a model's layers, some of them round their inputs to
    int8, and none of these is an expert."""
    if isinstance(model, Generator) or model.hosted:
        raise Unsupported(
            "exact_answers is for models that the engine runs itself, and transformers' modules "
            "run this one; leave it out"
        )
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
    return model


def runner_of(model: Decoder, room: Room, config: EngineConfig) -> ModelRunner:
    """What runs the steps of a model that the engine runs itself."""
    tokens = min(config.max_tokens, config.max_running * model.length)
    return ModelRunner(
        model,
        room,
        graph_rows(config),
        tokens,
        config.deterministic,
        drafts=config.draft is not None,
    )


def graph_rows(config: EngineConfig) -> int:
    """Rows of the largest step without prompts."""
    most = config.max_running
    if config.draft is None:
        return most
    return max(most, min(most * (1 + config.draft_tokens), MOST_DRAFTED))


def draft_model(
    runner: ModelRunner, small: Loaded, room: Room, vocabulary: int, config: EngineConfig
) -> DraftModel:
    """Guesses by a smaller model for the one that a runner runs."""
    assert not isinstance(small.model, Generator)
    head = isinstance(small.model, Head)
    graphs = graph_rows(config) if head else config.max_running
    behind = ModelRunner(small.model, room, graphs, config.max_tokens)
    rows = room.rows - 1 if small.model.recurrent else 0
    own = BlockManager(room.blocks, room.block_size, config.prefix_caching, rows)
    if head:
        return HeadDraft(behind, vocabulary, own, config.max_tokens, runner)
    return DraftModel(behind, vocabulary, own, config.max_tokens)


def room_of(loaded: Loaded, small: Loaded | None, kv: KvFormat, config: EngineConfig) -> Room:
    """What layers may remember.

    Raises:
        InvalidInput: kv_bytes, or what is free, does not hold two blocks, or states of a text.
        Unsupported: The KV cache's format does not take the heads.
    """
    model, most = loaded.model, config.max_running
    assert not isinstance(model, Generator)
    models = [model]
    if small is not None:
        assert not isinstance(small.model, Generator)
        models.append(small.model)
    tokens = min(config.max_tokens, most * model.length)
    # Beside a step there is what graphs hold.
    kept = max(graph_rows(config), prompt_sizes(tokens)[-1])
    if config.deterministic or not model.capturable:
        kept = 0
    second = most * config.exact_answers  # rows, of answers' tokens
    step = step_bytes(loaded.config.get_text_config(), tokens + kept + second, most)
    if small is not None:
        step += step_bytes(small.config.get_text_config(), kept, 0)
    device, size = model.embed_tokens.device, config.block_size
    back = 0 if config.draft is None else config.draft_tokens + BEHIND
    none = Room(0, size, 0, kv, device, back=back)
    least, each, own = (
        sum(state_bytes(m, room) for m in models)
        for room in (none, none._replace(blocks=1), none._replace(rows=1))
    )
    each, own = each - least, own - least
    step += max(states_bytes(m, config, none) for m in models)
    free = cache_room(device, step if config.kv_bytes is None else None)
    given = granted(free, least + 2 * (each + own), step, config.kv_bytes, device)
    if given is None:
        whole = -(-model.length // size) * each + own
        given = min(CPU_CACHE if free is None else free, least + most * (whole + own) + own)
    given -= least
    if not own:
        return none._replace(blocks=counted(given, each, 2, f"blocks of {size} tokens"))
    # A row more takes what steps write for nobody. K and V have at least half of the memory.
    rows = counted(given // 2 if each else given, own, 2, "texts' states, one of them for padding")
    rows, kept = shared_rows(rows - 1, most, config, model.recurrent)
    blocks = rows * -(-model.length // size)
    if each:
        blocks = counted(given - (1 + rows + kept) * own, each, 2, f"blocks of {size} tokens")
    return none._replace(blocks=blocks, rows=1 + rows + kept, kept=kept)


def states_bytes(model: Decoder, config: EngineConfig, none: Room) -> int:
    """What a step takes for states on their way to new ones, of one layer after the other.

    Kernels change states in their rows; the definitions, which run prompts where there are kernels
    and else all texts, hold some for each.
    """
    if not model.recurrent:
        return 0
    one = none._replace(rows=1, device=torch.device("meta"))
    widest = max(memory.empty(one).nbytes for memory in model.memories)
    if not model.ragged:
        return 8 * max(graph_rows(config), STATES) * widest
    texts = MOST_PROMPTS + 1 if config.draft is None else config.max_running
    return 5 * min(config.max_running, texts) * widest


def shared_rows(rows: int, most: int, config: EngineConfig, recurrent: bool) -> tuple[int, int]:
    """Of rows of states, those that texts have and those for ends of prefixes.

    Prefixes get a quarter where rows are few, and as many as texts where there are enough.
    """
    # Steps that end elsewhere add up in another way.
    if config.deterministic or not config.prefix_caching or not recurrent:
        return min(rows, most), 0
    own = min(most, max(1, rows * 3 // 4))
    return own, min(rows - own, most)


def granted(
    free: int | None, least: int, step: int, kv_bytes: int | None, device: torch.device
) -> int | None:
    """What the user gives the cache, if that is said; InvalidInput where it is not there."""
    if free is not None and kv_bytes is not None and free < kv_bytes:
        most = max(0, free - step)
        raise InvalidInput(
            f"kv_bytes={kv_bytes} ({kv_bytes / 1e9:.4g} GB) does not fit: {device} has "
            f"{free / 1e9:.4g} GB for it, of which a step takes about {step / 1e9:.2g} GB; give at "
            f"most {most} ({most / 1e9:.4g} GB), or none"
        )
    if free is not None and free < (kv_bytes or least):
        raise InvalidInput(
            f"a KV cache of {least} bytes, the least there is, does not fit: beside the weights "
            f"and about {step} bytes that a step takes, the GPU has {free} bytes left; use fewer "
            f"bits for weights, kv_cache={' or '.join(map(repr, KV_FORMATS))}, or smaller "
            "max_tokens or max_running"
        )
    return kv_bytes


def counted(given: int, each: int, least: int, of: str) -> int:
    """How many parts of a cache some bytes hold; InvalidInput where those are too few."""
    count = given // each
    if count < least:
        raise InvalidInput(
            f"a KV cache of {given} bytes holds {count} {of} ({each} bytes each), and at least "
            f"{least} are needed; raise kv_bytes"
        )
    return count
