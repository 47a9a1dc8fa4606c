"""`anybit eval`: score a model directory on text, alone or against the dense model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybit.errors import InvalidInput
from anybit.evaluate.corpus import held_out_text
from anybit.evaluate.model import context_of, encode, load_text_model
from anybit.evaluate.perplexity import excerpts, score
from anybit.files.directory import without_nan
from anybit.files.texts import Text, read_texts
from anybit.progress import progress
from anybit.quantizers.calibration.chat import answers

LONGEST = 2048  # tokens in a window, for models that could see more
FEWEST = 256  # tokens of an entry that are worth to be scored, if it has as many
DEFAULT = "Python standard library (default; choose with --text)"


def evaluate(
    model: Path, against: Path | None, text: Path | None, tokens: int, answers_only: bool = False
) -> dict[str, Any]:
    """Scores by name: text, tokens, perplexity and its standard error; with `against` also kl,
    agreement, and by how many nats a token the loss is larger, with that difference's standard
    error. An error is None where one window is all there is.

    text: a file as `Calibration` takes them; the held-out modules of the standard library by
        default. Of a file with many entries so many are scored, evenly spaced, that each may have
        `FEWEST` tokens.
    tokens: the middle of each document is scored, up to so many tokens in all.
    answers_only: score the answers in conversations alone, each after all that comes before it.

    Raises FileNotFoundError for missing files, ValueError for a text that is too short or no text,
    and for two models whose vocabularies differ.
    """
    texts: Sequence[Text] = [source for _, source in held_out_text()]
    name = DEFAULT
    if text:
        texts = read_texts(text)
        name = str(text) if len(texts) == 1 else f"{text}, {len(texts)} entries"
        some = spread(texts, max(1, tokens // FEWEST))
        name += f", of which {len(some)} are scored" if len(some) < len(texts) else ""
        texts = some
    elif answers_only:
        raise InvalidInput("--answers-only scores conversations: give them with --text")
    loaded, tokenizer = load_text_model(model)
    dense = None
    if against:
        dense, other = load_text_model(against)
        if other.get_vocab() != tokenizer.get_vocab():
            raise InvalidInput(
                f"{model} and {against} have different vocabularies; no KL to compute"
            )
    counted = None
    if answers_only:
        documents, counted = with_answers(texts, tokenizer, tokens)
        total = sum(int(mask[1:].sum()) for mask in counted)
    else:
        documents = excerpts([encode(tokenizer, x) for x in texts], tokens)
        total = sum(len(ids) - 1 for ids in documents)
    documents = [ids.to(loaded.device) for ids in documents]
    with progress("scoring", total) as step:
        window = min(context_of(loaded), LONGEST)
        got = score(loaded, documents, window=window, dense=dense, counted=counted, step=step)
    scores = {
        "model": str(model),
        "text": name,
        "tokens": got.tokens,
        "window": window,
        "perplexity": got.perplexity,
        "standard_error": got.perplexity_error,
    }
    if against is not None:
        scores |= {
            "against": str(against),
            "kl": got.kl,
            "agreement": got.agreement,
            "loss": got.loss,
            "loss_error": got.loss_error,
        }
    return without_nan(scores)


def spread(texts: Sequence[Text], most: int) -> Sequence[Text]:
    """At most so many texts, evenly spaced over all."""
    if len(texts) <= most:
        return texts
    return [texts[index * len(texts) // most] for index in range(most)]


def with_answers(
    texts: Sequence[Text], tokenizer: Any, tokens: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Token ids of conversations from their beginning, and which are answers, `tokens` in all."""
    documents, counted = [], []
    for text in texts:
        ids, mask = answers(text, tokenizer)
        documents.append(torch.tensor(ids[:tokens]))
        counted.append(torch.tensor(mask[:tokens]))
        tokens -= len(documents[-1])
        if tokens <= 0:
            break
    return documents, counted
