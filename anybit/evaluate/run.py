"""`anybit eval`: score a model directory on text, alone or against the dense model."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybit.errors import InvalidInput, Unsupported
from anybit.evaluate.candidate import (
    LONGEST,
    Candidate,
    Transformers,
    check_words,
    circumstances,
    some_words,
)
from anybit.evaluate.corpus import held_out_text, prose
from anybit.evaluate.generation import greedy_prompts
from anybit.evaluate.llama_cpp import LlamaCpp
from anybit.evaluate.perplexity import Model, Rows, excerpts, logits_of, measure
from anybit.evaluate.receipt import figures, file_hash, token_hash, writing
from anybit.evaluate.reference import Recorder, is_stored, positions, read_reference
from anybit.evaluate.server import Server
from anybit.files.directory import without_nan
from anybit.files.texts import Text, read_texts
from anybit.progress import progress
from anybit.quantizers.calibration.chat import answers

LLAMA_CPP = "llama.cpp:"
SERVERS = ("http://", "https://")
FLOOR = 4  # windows whose noise is measured
FEWEST = 256  # tokens of an entry that are worth to be scored, if it has as many
DEFAULT = "Python standard library (default; choose with --text)"
PROSE = "Python's language reference"


def opened(model: str | Path) -> Candidate:
    """A model by its name: `llama.cpp:FILE.gguf`, `http://HOST:PORT`, or what `ready` takes."""
    name = str(model)
    if name.startswith(LLAMA_CPP):
        return LlamaCpp(Path(name.removeprefix(LLAMA_CPP)))
    if name.startswith(SERVERS):
        return Server(name.rstrip("/").removesuffix("/v1"))
    return Transformers(name)


def evaluate(
    model: str | Path,
    against: str | Path | None,
    text: Path | None,
    tokens: int,
    answers_only: bool = False,
    save: Path | None = None,
) -> dict[str, Any]:
    """A receipt: scores by name, as `figures` computes them, with all that they depend on.

    With `against`, "floor" is the mean KL of the reference against itself, when it runs two windows
    in a call instead of one: below it, the order of sums is measured. An error is None where one
    window is all there is. Both models continue some pieces of the text greedily, too, as `writing`
    compares, if both tell tokens: not all engines do, nor a stored pass of an older version.

    model: as `opened` takes it: a model directory, a file in llama.cpp, a server.
    against: the dense model, or a file that `save` wrote in an earlier call: then that call's text
        is scored, and `text`, `tokens` and `answers_only` do not count.
    text: a file as `Calibration` takes them; the held-out modules of the standard library by
        default. Of a file with many entries so many are scored, evenly spaced, that each may have
        `FEWEST` tokens.
    tokens: the middle of each document is scored, up to so many tokens in all.
    answers_only: score the answers in conversations alone, each after all that comes before it.
    save: a file to write the model's own pass to, as a reference for others.

    Raises FileNotFoundError for missing files, ValueError for a text that is too short or no text,
    and for two models whose vocabularies differ; as `opened`.
    """
    start = time.monotonic()
    if against and is_stored(Path(against)):
        dense: Any = read_reference(Path(against))
        candidate = opened(model)
        documents, counted, about = dense.documents, dense.counted, dense.about
        check_window(about["window"], candidate, str(against), str(model))
        dense.to(candidate.device)
    else:
        texts = read(text, tokens, answers_only)
        candidate = opened(model)
        dense = opened(against) if against else None
        source = dense or candidate
        documents, counted = tokenized(texts.texts, source, tokens, answers_only)
        hashes = {"model": candidate.hashes, "text": texts.sha256}
        hashes["tokens"] = token_hash(documents, counted)
        # Servers write a token after all that they score, so that a pass for them leaves it room.
        window = min(candidate.context - bool(save), LONGEST)
        about = {"text": texts.name, "window": window, "begin": source.begin, "hashes": hashes}
        if dense or save:
            about["words"] = some_words(source, documents)
    hashes = about["hashes"] | {"model": candidate.hashes}
    scores = {"model": str(model), "text": about["text"], "window": about["window"]}
    if dense:
        check_words(candidate, about["words"], f"{model} and {against}")
        hashes["against"] = dense.hashes
        scores["against"] = str(against)
    scores |= passed(candidate, dense, documents, counted, about, save)
    scores["seconds"] = round(time.monotonic() - start, 1)
    settings: dict[str, Any] = {"model": str(model), "against": against and str(against)}
    settings |= {"text": text and str(text), "tokens": tokens, "answers_only": answers_only}
    scores["receipt"] = {"settings": settings, "hashes": hashes} | circumstances(candidate)
    return without_nan(scores)


def passed(
    candidate: Candidate,
    dense: Any,
    documents: list[Tensor],
    counted: list[Tensor] | None,
    about: dict[str, Any],
    save: Path | None,
) -> dict[str, Any]:
    """Figures of a pass over documents; of what both write, too, where both tell tokens.

    dense: a `Candidate` or a `Reference`, if there is one.
    """
    scored: Any = candidate
    if save:
        if not isinstance(candidate, Transformers):
            raise Unsupported(
                "--save-reference keeps hidden states, which no other engine tells: give the dense "
                "model's directory"
            )
        scored = Recorder(candidate.model, documents, counted, about)
    on_device = [ids.to(candidate.device) for ids in documents]
    window, begin = about["window"], about["begin"]
    options: dict[str, Any] = {"window": window, "counted": counted, "begin": begin}
    with progress("scoring", sum(1 for _ in positions(documents, counted, window))) as step:
        got = measure(scored, on_device, dense=dense, step=step, **options)
    scores = figures(got, window)
    prompts, count = greedy_prompts(documents, counted, window, begin)
    if save:
        recorded = scored.reference().to(candidate.device)
        about["floor"] = floor(candidate, on_device, recorded, options)
        recorded.written = candidate.continuations(prompts, count)
        recorded.save(save)
    elif callable(dense):
        about["floor"] = floor(
            dense,
            on_device,
            lambda ids: torch.cat([logits_of(dense, row[None]) for row in ids]),
            options,
        )
    if dense:
        if candidate.told:
            likeliest = f"{candidate.told} likeliest tokens"
            scores["bound"] = f"KL of {likeliest} and the rest: no more than the whole"
        theirs = dense.continuations(prompts, count)
        own = candidate.continuations(prompts, count) if theirs is not None and prompts else None
        if own is not None:
            means, intervals = writing(own, theirs, counted is not None)
            scores |= means | {"intervals": scores["intervals"] | intervals}
    return scores | ({"floor": about["floor"]} if "floor" in about else {})


def check_window(window: int, candidate: Candidate, against: str, model: str) -> None:
    """Raise InvalidInput when a model cannot read as much at once as a stored pass did."""
    if window > candidate.context:
        raise InvalidInput(
            f"{against} was saved with windows of {window} tokens, and the context of {model} is "
            f"{candidate.context}; compare with the dense model itself"
        )


def tokenized(
    texts: Sequence[Text], source: Candidate, tokens: int, answers_only: bool
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Token ids of documents, at most `tokens` in all, and which of them are answers."""
    if not answers_only:
        return excerpts([source.encode(text) for text in texts], tokens, source.begin), None
    if not isinstance(source, Transformers):
        raise Unsupported(
            "--answers-only needs a tokenizer with a chat template: name the dense model, --against"
        )
    return with_answers(texts, source.tokenizer, tokens)


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
