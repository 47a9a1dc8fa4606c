"""`LLM`: a model to generate with, in one process and one call."""

import itertools
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Set
from collections.abc import Sequence as Items
from contextlib import contextmanager
from functools import partial
from numbers import Number
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybit.engine.assemble import assemble, cost_of, kv_format
from anybit.engine.checks import integer, wrong
from anybit.engine.config import EngineConfig, configured
from anybit.engine.draft_model import check_draft, load_draft
from anybit.engine.head_draft import HeadDraft
from anybit.engine.language import Language
from anybit.engine.loader import Loaded, load
from anybit.engine.model_runner import ModelRunner
from anybit.engine.models.mtp import remembering
from anybit.engine.output import Completion, Output
from anybit.engine.ready import make_ready
from anybit.engine.reload import rebuild
from anybit.engine.sequence import SamplingParams
from anybit.engine.transcript import Transcripts
from anybit.errors import AnybitError, InvalidInput, Unsupported, in_a_line
from anybit.files.hub import located
from anybit.kernels.ahead import expect
from anybit.kernels.archive import unpack
from anybit.kernels.cute.jit import kernel_folder
from anybit.kernels.kv.cache import LayerCache
from anybit.kernels.kv.formats import KV_FORMATS
from anybit.nn.multiplier import check_keep
from anybit.progress import START, progress

log = logging.getLogger("anybit.engine")
Prompt = str | Items[int] | Tensor
Messages = Items[Mapping[str, Any]]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class LLM(Language):
    """A language model with a paged KV cache and continuous batching.

    A model that the engine does not know runs as transformers has it, on the same cache if
    attention is its only operation across tokens. Else it runs in transformers' `generate`, one
    sequence at a time, and a warning in the log says so; then max_running, max_tokens, block_size
    and prefix_caching do not apply, and options of the engine's KV cache are refused.

    Its arguments are the fields of `EngineConfig`.

    Attributes:
        kv_cache: What the KV cache holds: A name as above, or a dtype, such as "bfloat16".
    """

    _prepares = True  # on a GPU, as soon as it is made

    @configured(EngineConfig)
    def __init__(self, config: EngineConfig):
        check_choice("dtype", config.dtype, ("auto", *DTYPES))
        check_choice("kv_cache", config.kv_cache, ("auto", "model", *KV_FORMATS))
        check_keep(config.keep)
        check_draft(config.draft, config.draft_tokens, config.deterministic)
        adapters = checked(config)
        device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if config.kernels is not None:
            unpack(Path(config.kernels), device)
        if device.type == "cuda" and config.max_itl and not any(kernel_folder().glob("*.kernel")):
            expect()  # the first start
        if isinstance(config.model, Loaded):
            loaded = config.model
        else:
            options = {
                f"kv_cache={config.kv_cache!r}": config.kv_cache in KV_FORMATS,
                "kv_bytes": config.kv_bytes is not None,
                "draft": config.draft is not None,
            }
            given = [option for option, is_given in options.items() if is_given]
            loaded = load(
                Path(config.model),
                device,
                DTYPES.get(config.dtype),
                config.quantization,
                config.length,
                given,
                config.keep,
                adapters,
                further=config.draft == "mtp",
            )
        small = load_draft(config.draft, loaded, device, config.length, config.keep)
        kv = kv_format(loaded, config.kv_cache)
        if cost := cost_of(kv, loaded):
            log.warning("kv_cache=%r: %s", kv.name, cost)
        super().__init__(loaded.tokenizer)
        self.config, self.dtype = loaded.config, loaded.dtype
        self.quantized, self.quantized_bytes = loaded.quantized, loaded.quantized_bytes
        self.plan, self.keep = loaded.plan, config.keep
        self.kv_cache = kv.name
        self.engine = assemble(loaded, small, kv, config)
        self.engine.adapters = tuple(adapters)
        START.done("KV cache")
        if config.max_itl is not None:
            limit = None if config.max_itl == "auto" else config.max_itl / 1e3
            self.engine.prepare = partial(make_ready, self.engine, limit)
        if self._prepares and self.engine.runner.overlaps:
            self.engine.prepared()
        self.length, self.device = self.engine.length, self.engine.runner.device
        self._names = itertools.count()
        self._lock, self._process, self._working = threading.RLock(), os.getpid(), False

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights of the model, which stays in use as it is if that fails.

        Layers that are quantized are quantized anew as they arrive, round to nearest, in the
        formats that they have. The new model is laid out beside the old one: that takes the memory
        of the quantized weights once more.

        Args:
            weights: Dense tensors by the names of checkpoints or of transformers' model, in any
                order: `safetensors.torch.load_file(FILE).items()`, `model.state_dict().items()`.
                They are rounded from the dtype in which they come. A head for further tokens
                (MTP, EAGLE-3) stays as it is.

        Raises:
            InvalidInput: Tensors are missing, left over, of wrong shapes, or hold NaN or inf.
            Unsupported: Requests are running, or the engine has not loaded this model itself.
        """
        with self._turn():
            self._load_weights(weights)

    def _load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        runner = self.engine.runner
        while self.engine.busy and not self.engine.requests:  # what an interrupt has left
            self.engine.step()
        if self.engine.busy:
            raise Unsupported("requests are running; load weights when they have ended")
        if not isinstance(runner, ModelRunner) or self.plan is None:
            raise Unsupported("only models that the engine knows take new weights; load it anew")
        if any(isinstance(s, LayerCache) and s.format.static for s in runner.states):
            raise Unsupported(
                "the KV cache has scales that were made for the old weights; use kv_cache='model'"
            )
        fresh = rebuild(runner.model, weights, self.plan, self.keep)
        speculation = self.engine.speculation
        drafter = speculation.drafter if speculation else None
        if isinstance(drafter, HeadDraft):  # its head stays as it is
            drafter.blocks.forget()
            drafter.head.borrow(fresh)
            fresh = remembering(fresh, drafter.head)
        self.engine.scheduler.blocks.forget()  # first: what follows may be interrupted
        runner.replace(fresh)
        if isinstance(drafter, HeadDraft):
            drafter.runner.replace(drafter.head)
        if speculation is not None:
            speculation.renew()

    def embed(self, prompts: Prompt | Items[Prompt]) -> list[list[float]]:
        """A vector (hidden,) of length 1 for each prompt: the mean of its last hidden states."""
        params = SamplingParams(max_tokens=0, embed=True)
        outputs = self.generate(prompts, params, show_progress=False)
        for completion in (output.completions[0] for output in outputs):
            if completion.embedding is None:
                raise Unsupported(f"no embedding: {completion.error}")
        return [output.completions[0].embedding or [] for output in outputs]

    def chat(
        self,
        messages: Messages | Items[Messages],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        show_progress: bool | None = None,
        **variables: Any,
    ) -> list[Output]:
        """Answer a conversation [{"role", "content"}], or each of several; as `generate` does.

        variables: what the chat template reads, such as tools; see `chat_text`.
        """
        one = one_conversation(messages) or not isinstance(messages, list | tuple)
        several: list[Any] = [messages] if one else list(messages)
        for conversation in several:
            if not one_conversation(conversation):
                want = "a list of messages, each a dict with role and content"
                raise wrong("messages", conversation, want)
        with self._turn():
            try:
                prompts = [self.encode_chat(list(each), **variables) for each in several]
            except AnybitError:
                raise
            except Exception as error:  # templates raise all kinds
                raise InvalidInput(f"a conversation: {in_a_line(error)}") from error
        return self.generate(prompts, params, show_progress)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        show_progress: bool | None = None,
    ) -> list[Output]:
        """Generate for each prompt (text or token ids); one `Output` for each, in order.

        Several threads may call it: they take turns, so give one call many prompts instead.

        Args:
            prompts: One or several; token ids also as an array or a tensor.
            params: One for all prompts, or one for each.

        Raises:
            InvalidInput: A prompt does not fit, or there are not as many params as prompts. Then
                nothing has run, as with the others.
            InvalidType: Something is no prompt, or no SamplingParams.
            Unsupported: It was called from within itself, in a forked process, or while a
                server runs its engine.
        """
        given = listed(prompts)
        each = listed_params(SamplingParams() if params is None else params)
        if params is None or isinstance(params, SamplingParams):
            each *= len(given)
        if len(each) != len(given):
            raise InvalidInput(f"{len(given)} prompts, but {len(each)} SamplingParams")
        with self._turn():  # which tokenizers need, too
            ids = [self.encode(p) if isinstance(p, str) else p for p in given]
            return self._generate(ids, each, show_progress)

    def transcripts(self) -> Transcripts:
        """What turns the engine's tokens into texts, and ends these at stop strings."""
        return Transcripts(self, self.engine.end)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait until no other thread uses the engine; Unsupported where that would be for ever."""
        if os.getpid() != self._process:
            raise Unsupported(
                f"process {os.getpid()} is a fork of the one that has made this LLM "
                f"({self._process}); make an LLM in each process, after the fork"
            )
        with self._lock:
            if self.engine.served:
                raise Unsupported("a server runs this LLM's engine; ask that, or stop it first")
            if self._working:
                raise Unsupported(
                    "this LLM is at work already, and what calls it again is a callback of that; "
                    "call it when that has returned"
                )
            self._working = True
            try:
                yield
            finally:
                self._working = False

    def _generate(
        self, prompts: list[list[int]], params: list[SamplingParams], show: bool | None
    ) -> list[Output]:
        for prompt, p in zip(prompts, params, strict=True):
            self.engine.check(prompt, p)
        out: dict[str, Output] = {}
        texts = self.transcripts()
        try:
            for prompt, p in zip(prompts, params, strict=True):
                name = f"generate-{next(self._names)}"
                out[name] = Output(prompt, [Completion(i) for i in range(p.n)])
                texts.add(name, prompt, p)
                self.engine.add(name, prompt, p)
            with progress("generating", sum(p.n for p in params), show) as step:
                while self.engine.busy:
                    for delta in texts.read(self.engine.step()):
                        out[delta.request].completions[delta.index].add(delta)
                        if delta.finish:
                            step(1)
        finally:
            for name in out:  # after an interrupt
                self.engine.abort(name)
        return list(out.values())


class Served(LLM):
    """One that its server makes ready, while front ends begin."""

    _prepares = False


def checked(config: EngineConfig) -> dict[str, Path]:
    """Directories of adapters by names; InvalidInput where they cannot be."""
    adapters = config.adapters or {}
    if "" in adapters:
        raise InvalidInput(f"adapters: {adapters['']} has an empty name; give it another")
    if adapters and (config.deterministic or isinstance(config.model, Loaded)):
        what = "deterministic=True" if config.deterministic else "a model that is loaded already"
        raise InvalidInput(f"adapters do not go with {what}; leave out one of them")
    return {name: located(adapter) for name, adapter in adapters.items()}


def listed(prompts: Any) -> list[str | list[int]]:
    """A list of prompts, from one (text, or token ids) or many."""
    if isinstance(prompts, str):
        return [prompts]
    found = entries(prompts)
    if found and (isinstance(found[0], Number) or not hasattr(found[0], "__len__")):
        found = [found]
    return [p if isinstance(p, str) else token_ids(p) for p in found]


def token_ids(prompt: Any) -> list[int]:
    """A prompt's tokens, from anything that holds integers."""
    found = entries(prompt)
    if set(map(type, found)) <= {int}:
        return found
    return [integer("prompts", token, "token ids, which are integers") for token in found]


def entries(value: Any) -> list[Any]:
    """What a list, an array, a tensor or an iterator holds."""
    if hasattr(value, "tolist"):  # of an array or a tensor
        value = value.tolist()
    if isinstance(value, str | bytes | bytearray | Mapping | Set) or not isinstance(
        value, Iterable
    ):
        raise wrong("prompts", value, "text, or token ids, or a list of such prompts")
    return list(value)


def listed_params(params: Any) -> list[SamplingParams]:
    """A list of SamplingParams; InvalidType for anything else."""
    one = isinstance(params, Mapping) or not isinstance(params, Iterable)
    found: list[Any] = [params] if one else list(params)
    for each in found:
        if not isinstance(each, SamplingParams):
            raise wrong("params", each, "SamplingParams, or a list of them")
    return found


def one_conversation(messages: Any) -> bool:
    """Whether these are messages."""
    return (
        isinstance(messages, list | tuple)
        and len(messages) > 0
        and all(isinstance(m, Mapping) and "role" in m for m in messages)
    )


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidInput(f"{name}={value!r}; choose one of {', '.join(choices)}")
