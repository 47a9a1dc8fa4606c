"""One text at a time in transformers' `generate`, for models that need their own caches.

Everything around the model stays the engine's: sampling, stop strings, log probabilities, aborts,
streaming. `generate` runs in a thread that stops at every token's logits until it is told which
token was chosen, so the caches of all its models (states, windows, encoders) need no other code.
"""

import queue
import threading
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PretrainedConfig

from anybit.checkpoint.architecture import POSITIONS
from anybit.engine.model_runner import Flight
from anybit.engine.sampler import rows_of, sample
from anybit.engine.scheduler import Scheduled
from anybit.engine.sequence import Sequence
from anybit.errors import AnybitError, Unsupported, in_a_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNLIMITED = 8192  # tokens of the longest sequence, for a model without a limit


class Generator:
    """Runs a transformers model for the engine, one sequence at a time.

    length: tokens of the longest sequence, prompt included.
    """

    overlaps = False
    reads_prompts = False
    repeats = False

    def __init__(self, model: "PreTrainedModel", length: int):
        self.model, self.length, self.device = model, length, model.device
        from transformers import GenerationConfig

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


class Writing:
    """`generate` of one sequence in a thread, as its processor of logits.

    tokens: the chosen ones, and None at the end.
    """

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
        from transformers import LogitsProcessorList

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


def longest(config: PretrainedConfig) -> int | None:
    """Tokens of the longest sequence that a model can hold, if it has a limit."""
    text = config.get_text_config()
    found = [getattr(text, name, None) for name in POSITIONS]
    return next((n for n in found if isinstance(n, int) and n > 1), None)
