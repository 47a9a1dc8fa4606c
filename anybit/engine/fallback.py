"""Models that the engine does not know: on its cache, or in transformers' `generate`.

With `generate`, everything around the model stays the engine's: sampling, stop strings, log
probabilities, aborts, streaming. It runs in a thread that stops at every token's logits until it is
told which token was chosen, so the caches of all its models (states, windows, encoders) need no
other code.
"""

import logging
import queue
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PretrainedConfig

from anybit.checkpoint.architecture import POSITIONS
from anybit.checkpoint.save_load import load as load_quantized
from anybit.checkpoint.save_load import load_dense
from anybit.engine.model_runner import Flight
from anybit.engine.models import UnknownModel
from anybit.engine.models.hosted import Hosted
from anybit.engine.sampler import rows_of, sample
from anybit.engine.scheduler import Scheduled
from anybit.engine.sequence import Sequence
from anybit.errors import AnybitError, InvalidInput, Unsupported, in_a_line
from anybit.nn.model import quantized_layers, set_keep
from anybit.nn.multiplier import Keep
from anybit.nn.plan import Plan, Spec
from anybit.quantizers.quantize import quantize_

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("anybit.engine")

UNLIMITED = 8192  # tokens of the longest sequence, for a model without a limit


class Generator:
    """Runs a transformers model for the engine, one sequence at a time.

    length: tokens of the longest sequence, prompt included.
    """

    overlaps = False
    reads_prompts = False

    def __init__(self, model: "PreTrainedModel", length: int):
        self.model, self.length, self.device = model, length, model.device
        # What a checkpoint says about sampling is left to the engine's parameters.
        old = model.generation_config or GenerationConfig()
        pad = old.pad_token_id
        model.generation_config = GenerationConfig(
            bos_token_id=old.bos_token_id,
            decoder_start_token_id=old.decoder_start_token_id,
            forced_bos_token_id=old.forced_bos_token_id,
            forced_eos_token_id=old.forced_eos_token_id,
            pad_token_id=0 if pad is None else pad,
            disable_compile=True,
        )
        self.writing: weakref.WeakKeyDictionary[Sequence, Writing] = weakref.WeakKeyDictionary()

    def launch(self, scheduled: list[Scheduled], previous: Flight | None = None) -> Flight:
        """Run a step: the next token's logits of each sequence, and a sample of them."""
        logits = torch.cat([self._logits(s.seq) for s in scheduled])
        rows = rows_of(scheduled)
        return Flight(scheduled, rows, *sample(logits, rows))

    def _logits(self, seq: Sequence) -> Tensor:
        """Logits (1, vocabulary) of a sequence's next token."""
        if seq.computed == 0:
            writing = self.writing[seq] = Writing(self.model, seq.tokens, seq.limit)
            weakref.finalize(seq, writing.tokens.put, None)  # however it ends
        else:
            writing = self.writing[seq]
            writing.tokens.put(seq.tokens[-1])
        answer = writing.logits.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer


class Ended(Exception):
    """Nobody waits for the rest of a sequence."""


class Writing(LogitsProcessor):
    """`generate` of one sequence in a thread. tokens: the chosen ones, and None at the end."""

    def __init__(self, model: "PreTrainedModel", tokens: list[int], limit: int):
        self.logits: queue.SimpleQueue[Tensor | BaseException] = queue.SimpleQueue()
        self.tokens: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        ids = torch.tensor([tokens], device=model.device)
        threading.Thread(
            target=self._run, args=(model, ids, limit), name="anybit-generate", daemon=True
        ).start()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.logits.put(scores)
        token = self.tokens.get()
        if token is None:
            raise Ended
        chosen = torch.full_like(scores, float("-inf"))
        chosen[:, token] = 0
        return chosen

    def _run(self, model: "PreTrainedModel", ids: Tensor, limit: int) -> None:
        try:
            with torch.accelerator.device_index(ids.device.index):
                model.generate(  # type: ignore[operator]
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=limit - ids.shape[1],
                    logits_processor=LogitsProcessorList([self]),
                )
            raise Unsupported(f"{type(model).__name__}.generate has ended too early")
        except Ended:
            pass
        except (AnybitError, MemoryError, torch.OutOfMemoryError) as error:
            self.logits.put(error)
        except Exception as error:  # of a model that transformers itself cannot run like this
            name = f"{type(model).__name__}.generate"
            failure = Unsupported(
                f"transformers' {name} fails ({in_a_line(error)}); load the model "
                "with anybit.load, and call it as transformers' documentation says"
            )
            failure.__cause__ = error
            self.logits.put(failure)


def load(
    directory: Path,
    bare: "PreTrainedModel",
    device: torch.device,
    dtype: torch.dtype,
    quantized: bool,
    quantization: Spec | Plan | None,
    length: int | None,
    cache_options: list[str],
    reason: str,
    keep: Keep,
) -> Hosted | Generator:
    """Load a model that the engine does not know: on the engine's cache if that is possible.

    Args:
        bare: The model without contents.
        cache_options: What the user has asked of the engine's KV cache.
        reason: Why the engine does not run the model itself, for the log.
        keep: As in `anybit.load`.

    Raises:
        InvalidInput: The model does not write text from text, or there are cache options for one
            that needs a cache of its own.
    """
    kind = type(bare)
    if not kind.can_generate() or kind.main_input_name != "input_ids":
        raise InvalidInput(
            f"{directory}: {kind.__name__} does not write text from text "
            f"(its input is {kind.main_input_name}); load it with anybit.load"
        )
    positions = longest(bare.config)
    if length and positions and length > positions:
        raise InvalidInput(f"{directory}: length={length}, and the model has {positions} positions")
    if cache_options and not kind._can_set_attn_implementation():
        raise no_cache_options(cache_options, reason)
    model: Any
    if quantized:
        model = load_quantized(directory, device, dtype, keep)
    else:
        model = load_dense(directory).to(device, dtype)
        if quantization is not None:
            set_keep(quantize_(model, quantization), keep)
    if device.type != "cpu" and dtype == torch.float32:  # which a GPU's kernels do not multiply
        for _, layer in quantized_layers(model):
            layer.dtype = dtype
            layer.prepare()
    length = length or positions or UNLIMITED
    try:
        hosted = Hosted(model.eval(), length)
    except UnknownModel as own:
        reason = f"{reason}; {own}"
        if cache_options:
            raise no_cache_options(cache_options, reason) from None
    else:
        log.info("%s; transformers' modules run it, on the engine's KV cache", reason)
        return hosted
    log.warning(
        "%s; transformers' generate runs it, one sequence at a time and without the engine's "
        "kernels between the layers",
        reason,
    )
    return Generator(model, length)


def no_cache_options(options: list[str], reason: str) -> InvalidInput:
    return InvalidInput(
        f"{reason}; transformers' generate would run it, with a KV cache of its own; leave out "
        f"{' and '.join(options)}"
    )


def longest(config: PretrainedConfig) -> int | None:
    """Tokens of the longest sequence that a model can hold, if it has a limit."""
    text = config.get_text_config()
    found = [getattr(text, name, None) for name in POSITIONS]
    return next((n for n in found if isinstance(n, int) and n > 1), None)
