"""Load a model with its tokenizer, let it write, and time it: through transformers, on any device.

For many requests at once there is an engine; this is one prompt, to see what a model has to say.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybit.checkpoint.architecture import check_model, load_model
from anybit.checkpoint.foreign.ready import ready
from anybit.errors import InvalidInput, loading
from anybit.files.texts import Text
from anybit.quantizers.calibration.chat import tokenized
from anybit.quantizers.calibration.data import context_of as context


def load_text_model(model: str | Path, device: str | None = None) -> tuple[Any, Any]:
    """A model, dense or quantized, and its tokenizer, in the stored dtype.

    model: what `ready` takes. device: "cuda" where there is one, "cpu" otherwise, unless given.
    Raises FileNotFoundError for a directory that holds no model.
    """
    path = ready(model)
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    check_model(path)  # else a tokenizer's error would hide what is wrong with the model
    with loading(path):
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    loaded = load_model(path, dtype="auto")
    return loaded.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval(), tokenizer


def complete(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    max_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    show: Callable[[str], None] = lambda text: None,
) -> str:
    """What the model writes after a prompt: greedily at temperature 0, else sampled by the seed.

    show: called with each piece of text as it is written. Raises ValueError when the prompt and
    max_tokens do not fit the model's context.
    """
    from transformers import TextStreamer

    class Pieces(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            show(text)

    inputs = encode(tokenizer, prompt)[None].to(model.device)
    count, context = inputs.shape[1], context_of(model)
    if count == 0:
        raise InvalidInput("the prompt is empty, and this model's tokenizer puts nothing before it")
    if count + max_tokens > context:
        raise InvalidInput(
            f"a prompt of {count} tokens and max_tokens={max_tokens} exceed the model's context of "
            f"{context} tokens; ask for at most {max(context - count, 0)}, or shorten the prompt"
        )
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {}
    ids = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=max_tokens,
        pad_token_id=tokenizer.eos_token_id,
        streamer=Pieces(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **({"do_sample": False} | sampling),
    )
    return str(tokenizer.decode(ids[0, count:], skip_special_tokens=True))


def encode(tokenizer: Any, text: Text) -> Tensor:
    """Token ids (T,) of a text, which begins with BOS where the tokenizer puts it there.

    A conversation begins as its chat template says.
    """
    return torch.tensor(tokenized(text, tokenizer), dtype=torch.int64)


def context_of(model: Any) -> int:
    """The longest sequence, in tokens, that the model was made for."""
    return context(model) or 2048
