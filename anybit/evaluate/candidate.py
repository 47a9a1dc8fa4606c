"""What `anybit eval` scores, whatever runs it: transformers, llama.cpp, or a server.

A candidate is a `Model` of `measure` with what else a comparison needs: its tokens as text, so that
two vocabularies can be compared, its own encoding, its greedy continuations, and what a receipt
tells of it.
"""

import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from anybit.checkpoint.foreign.ready import ready
from anybit.errors import InvalidInput
from anybit.evaluate.generation import continuations
from anybit.evaluate.model import context_of, encode, load_text_model
from anybit.evaluate.receipt import model_hashes
from anybit.files.texts import Text
from anybit.kernels.processor import processor
from anybit.quantizers.calibration.chat import before_text
from anybit.version import __version__

LONGEST = 2048  # tokens in a window, for models that could see more
COMPARED = 256  # tokens of a vocabulary whose texts are compared
ALIKE = 0.95  # of them are, where two vocabularies are one


class Candidate(Protocol):
    """A model in some engine.

    Attributes:
        device: where it wants token ids.
        context: the longest sequence, in tokens.
        hashes: SHA-256 of its files, by name; what is known of it else.
        versions: of the packages that run it. hardware: "device", "threads" and "dtype".
        begin: token ids that the engine's tokenizer puts before a text.
        told: of how many tokens it tells the probability at each position; None: of all.
    """

    device: torch.device
    context: int
    hashes: dict[str, str]
    versions: dict[str, str]
    hardware: dict[str, Any]
    begin: list[int]
    told: int | None

    def __call__(self, ids: Tensor) -> Any:
        """What `measure` takes of a model, for token ids (B, T)."""

    def encode(self, text: Text) -> Tensor:
        """Token ids (T,) of a document; Unsupported where the engine cannot tell."""

    def words(self, ids: Sequence[int]) -> list[str]:
        """The text of each token by itself."""

    def continuations(self, prompts: Sequence[Tensor], count: int) -> Tensor | None:
        """As the function of this name; None where the engine does not tell its tokens."""


class Transformers:
    """A model directory, dense or quantized, through transformers on this machine's device."""

    told: int | None = None

    def __init__(self, model: str | Path):
        path = ready(model)
        self.model, self.tokenizer = load_text_model(path)
        self.device: torch.device = self.model.device
        self.begin = before_text(self.tokenizer)
        self.context = context_of(self.model)
        self.hashes = model_hashes(path)
        self.versions = {name: version(name) for name in ("transformers", "tokenizers")}
        self.hardware = here() | {"dtype": str(self.model.dtype).removeprefix("torch.")}
        if self.device.type == "cuda":
            self.hardware["device"] = torch.cuda.get_device_name(self.device)

    def __call__(self, ids: Tensor) -> Any:
        return self.model(ids.to(self.device))  # which another engine may have elsewhere

    def encode(self, text: Text) -> Tensor:
        return encode(self.tokenizer, text)

    def words(self, ids: Sequence[int]) -> list[str]:
        return [self.tokenizer.decode([token]) for token in ids]

    def continuations(self, prompts: Sequence[Tensor], count: int) -> Tensor:
        return continuations(self.model, prompts, count)


def here() -> dict[str, Any]:
    """This machine, as "hardware" has it."""
    return {"device": processor(), "threads": torch.get_num_threads()}


def circumstances(candidate: Candidate) -> dict[str, Any]:
    """Versions, and the machine."""
    own = {"anybit": __version__, "python": platform.python_version(), "torch": version("torch")}
    return {"versions": own | candidate.versions, "hardware": candidate.hardware}


def some_words(candidate: Candidate, documents: Sequence[Tensor]) -> dict[str, str]:
    """The texts of at most `COMPARED` of the tokens in documents, by token id."""
    ids = torch.cat(list(documents)).unique().tolist()
    step = -(-len(ids) // COMPARED)
    chosen = ids[::step]
    return dict(zip(map(str, chosen), candidate.words(chosen), strict=True))


def check_words(candidate: Candidate, words: dict[str, str], which: str) -> None:
    """Raise InvalidInput where tokens mean other texts to a candidate than `words` says.

    Engines differ in blanks around a token, and in those that are no text or half a character:
    these do not count, nor does one in twenty.
    """
    own = candidate.words([int(token) for token in words])
    told = [(token, a.strip(), b.strip()) for (token, a), b in zip(words.items(), own, strict=True)]
    clear = [(token, a, b) for token, a, b in told if a and b and "\ufffd" not in a + b]
    other = [each for each in clear if each[1] != each[2]]
    if len(other) > (1 - ALIKE) * len(clear):
        token, a, b = other[0]
        raise InvalidInput(
            f"{which} have different vocabularies (token {token} is {b!r} in the first, {a!r} in "
            "the second); no KL to compute"
        )
