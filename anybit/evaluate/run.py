"""`anybit eval`: score a model directory on text, alone or against the dense model."""

from pathlib import Path
from typing import Any

from anybit.errors import InvalidInput
from anybit.evaluate.corpus import held_out_text
from anybit.evaluate.model import context_of, encode, load_text_model
from anybit.evaluate.perplexity import excerpts, score
from anybit.files.directory import read_text
from anybit.progress import progress

LONGEST = 2048  # tokens in a window, for models that could see more


def evaluate(model: Path, against: Path | None, text: Path | None, tokens: int) -> dict[str, Any]:
    """Scores by name: tokens, perplexity and its standard error; with `against` also kl, agreement,
    and by how many nats a token the loss is larger, with the standard error of that difference.

    text: a UTF-8 file, one document; the held-out modules of the standard library by default.
    tokens: the middle of each document is scored, up to so many tokens in all.

    Raises FileNotFoundError for missing files, ValueError for a text that is too short or no UTF-8,
    and for two models whose vocabularies differ.
    """
    texts = [read_text(text)] if text else [source for _, source in held_out_text()]
    loaded, tokenizer = load_text_model(model)
    dense = None
    if against:
        dense, other = load_text_model(against)
        if other.get_vocab() != tokenizer.get_vocab():
            raise InvalidInput(
                f"{model} and {against} have different vocabularies; no KL to compute"
            )
    documents = excerpts([encode(tokenizer, x).to(loaded.device) for x in texts], tokens)
    with progress("scoring", sum(len(ids) - 1 for ids in documents)) as step:
        window = min(context_of(loaded), LONGEST)
        got = score(loaded, documents, window=window, dense=dense, step=step)
    scores = {
        "model": str(model),
        "tokens": got.tokens,
        "window": window,
        "perplexity": got.perplexity,
        "standard_error": got.perplexity_error,
    }
    if against is None:
        return scores
    return scores | {
        "against": str(against),
        "kl": got.kl,
        "agreement": got.agreement,
        "loss": got.loss,
        "loss_error": got.loss_error,
    }
