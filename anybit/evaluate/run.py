"""`anybit eval`: score a model directory on text, alone or against the dense model."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybit.checkpoint.foreign.ready import ready
from anybit.errors import InvalidInput
from anybit.evaluate.corpus import held_out_text, prose
from anybit.evaluate.generation import continuations, excerpt_prompts
from anybit.evaluate.model import context_of, encode, load_text_model
from anybit.evaluate.perplexity import Model, Rows, excerpts, logits_of, measure
from anybit.evaluate.receipt import (
    circumstances,
    figures,
    file_hash,
    model_hashes,
    token_hash,
    vocabulary_hash,
    writing,
)
from anybit.evaluate.reference import Recorder, is_stored, read_reference
from anybit.files.directory import without_nan
from anybit.files.texts import Text, read_texts
from anybit.progress import progress
from anybit.quantizers.calibration.chat import answers

LONGEST = 2048  # tokens in a window, for models that could see more
FLOOR = 4  # windows whose noise is measured
FEWEST = 256  # tokens of an entry that are worth to be scored, if it has as many
DEFAULT = "Python standard library (default; choose with --text)"
PROSE = "Python's language reference"


def evaluate(
    model: Path,
    against: Path | None,
    text: Path | None,
    tokens: int,
    answers_only: bool = False,
    save: Path | None = None,
) -> dict[str, Any]:
    """A receipt: scores by name, as `figures` computes them, with all that they depend on.

    With `against`, "floor" is the mean KL of the reference against itself, when it runs two windows
    in a call instead of one: below it, the order of sums is measured. An error is None where one
    window is all there is. Both models continue some pieces of the text greedily, too, as `writing`
    compares; a stored pass of an older version lacks that, and the scores then do.

    against: the dense model, or a file that `save` wrote in an earlier call: then that call's text
        is scored, and `text`, `tokens` and `answers_only` do not count.
    text: a file as `Calibration` takes them; the held-out modules of the standard library by
        default. Of a file with many entries so many are scored, evenly spaced, that each may have
        `FEWEST` tokens.
    tokens: the middle of each document is scored, up to so many tokens in all.
    answers_only: score the answers in conversations alone, each after all that comes before it.
    save: a file to write the model's own pass to, as a reference for others.

    Raises FileNotFoundError for missing files, ValueError for a text that is too short or no text,
    and for two models whose vocabularies differ.
    """
    begin = time.monotonic()
    stored = read_reference(against) if against and is_stored(against) else None
    texts = None if stored else read(text, tokens, answers_only)
    path = ready(model)
    loaded, tokenizer = load_text_model(path)
    context, theirs = context_of(loaded), vocabulary_hash(tokenizer)
    vocabulary, counted = theirs, None
    dense: Any = None
    hashes: dict[str, Any] = {"model": model_hashes(path)}
    if stored:
        documents, counted, about = stored.documents, stored.counted, stored.about
        dense, theirs = stored.to(loaded.device), about["vocabulary"]
        hashes |= about["hashes"] | {"model": hashes["model"], "against": about["hashes"]["model"]}
        if about["window"] > context:
            raise InvalidInput(
                f"{against} was saved with windows of {about['window']} tokens, and the context of "
                f"{model} is {context}; compare with the dense model itself"
            )
    else:
        assert texts is not None
        if against:
            dense, other = load_text_model(ready(against))
            theirs, hashes["against"] = vocabulary_hash(other), model_hashes(ready(against))
        if answers_only:
            documents, counted = with_answers(texts.texts, tokenizer, tokens)
        else:
            documents = excerpts([encode(tokenizer, x) for x in texts.texts], tokens)
        hashes |= {"text": texts.sha256, "tokens": token_hash(documents, counted)}
        about = {"text": texts.name, "window": min(context, LONGEST), "vocabulary": vocabulary}
        about["hashes"] = hashes
    if theirs != vocabulary:
        raise InvalidInput(f"{model} and {against} have different vocabularies; no KL to compute")
    scored = Recorder(loaded, documents, counted, about) if save else loaded
    on_device = [ids.to(loaded.device) for ids in documents]
    options: dict[str, Any] = {"window": about["window"], "counted": counted}
    kept = (mask[1:] for mask in counted) if counted else (ids[1:] >= 0 for ids in documents)
    with progress("scoring", sum(int(mask.sum()) for mask in kept)) as step:
        got = measure(scored, on_device, dense=dense, step=step, **options)
    if isinstance(scored, Recorder) and save:
        recorded = scored.reference().to(loaded.device)
        about["floor"] = floor(loaded, on_device, recorded, options)
        recorded.written = continuations(loaded, excerpt_prompts(documents, about["window"]))
        recorded.save(save)
    elif dense and not stored:
        about["floor"] = floor(dense, on_device, one_by_one(dense), options)
    scores = {"model": str(model), "text": about["text"], "window": about["window"]}
    scores |= {"against": str(against)} if against else {}
    scores |= figures(got, about["window"])
    if dense:
        prompts = excerpt_prompts(documents, about["window"])
        written = stored.written if stored else continuations(dense, prompts)
        if written is not None and len(written):
            means, intervals = writing(continuations(loaded, prompts), written)
            scores |= means
            scores["intervals"] |= intervals
    scores |= {"floor": about["floor"]} if "floor" in about else {}
    scores["seconds"] = round(time.monotonic() - begin, 1)
    settings = {
        "model": str(model),
        "against": against and str(against),
        "text": text and str(text),
        "tokens": tokens,
        "answers_only": answers_only,
    }
    scores["receipt"] = {"settings": settings, "hashes": hashes} | circumstances(loaded)
    return without_nan(scores)


@dataclass(frozen=True)
class Scored:
    """Texts to score, what they are in words, and the hash of all that they were taken from."""

    texts: Sequence[Text]
    name: str
    sha256: str


def read(text: Path | None, tokens: int, answers_only: bool) -> Scored:
    """The texts that `evaluate` scores."""
    if answers_only and str(text) in ("None", "prose"):
        raise InvalidInput("--answers-only scores conversations: give them with --text")
    if text is None:
        return scored([source for _, source in held_out_text()], DEFAULT)
    if str(text) == "prose":
        return scored(prose(held_out=True), PROSE)
    whole = read_texts(text)
    name = str(text) if len(whole) == 1 else f"{text}, {len(whole)} entries"
    some = spread(whole, max(1, tokens // FEWEST))
    name += f", of which {len(some)} are scored" if len(some) < len(whole) else ""
    return Scored(some, name, file_hash(text))


def scored(texts: Sequence[str], name: str) -> Scored:
    return Scored(texts, name, sha256("\0".join(texts).encode()).hexdigest())


def floor(model: Model, documents: list[Tensor], dense: Model | Rows, options: Any) -> float:
    """The mean KL of a model that runs two windows in a call, against its own run of one."""
    found = measure(model, documents, dense=dense, batch=2, most=FLOOR, **options)
    return found.score().kl or 0.0


def one_by_one(model: Model) -> Model:
    return lambda ids: torch.cat([logits_of(model, row[None]) for row in ids])


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
