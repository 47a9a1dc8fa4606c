"""A dense model's pass over a text, stored once, to compare any number of models with it.

What is stored are the last hidden states at the scored tokens and the output head, both as the
model has them: two bytes for each number of the hidden size a token (1.2 KB for a model of 135
million parameters, 8 KB for one of 8 billion), and once the head. Logits would take the size of the
vocabulary instead (98 KB, 256 KB). The likeliest logits with the mass of the others would be
smaller yet, but give no more than a lower bound of the KL divergence. From hidden states it is
exact, but for the order of the head's sums.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybit.checkpoint.foreign.gguf_file import is_gguf
from anybit.errors import InvalidInput, Unsupported
from anybit.evaluate.generation import greedy_prompts
from anybit.evaluate.perplexity import all_windows, logits_of
from anybit.files.directory import check_space
from anybit.files.safetensors import Stored, read_header

KEY = "anybit_reference"
VERSION = 4
# What models do to the head's output, by the name in their config.
AFTER = {
    "final_logit_softcapping": lambda x, c: torch.tanh(x / c) * c,
    "logits_scaling": lambda x, c: x / c,
    "logit_scale": lambda x, c: x * c,
}


@dataclass
class Reference:
    """The hidden states of a pass, and what makes logits of them.

    Attributes:
        hidden: (N, H), at the positions that predict the scored tokens, in order.
        head: (V, H). bias: (V,), if there is one.
        after: Name and constant of what is done to the head's output, from `AFTER`; {} for nothing.
        documents, counted: The token ids, and which of them are scored, as `measure` takes them.
        about: What else is told of the pass: names, hashes, window, figures.
        written: (P, count), what the model writes after `greedy_prompts`, as `continuations`
            tells it; None in files of versions that did not ask for it.
    """

    hidden: Tensor
    head: Tensor
    bias: Tensor | None
    after: dict[str, float]
    documents: list[Tensor]
    counted: list[Tensor] | None
    about: dict[str, Any]
    written: Tensor | None = None

    def rows(self, start: int, stop: int) -> Tensor:
        """Logits (stop - start, V) that predict the scored tokens start..stop-1."""
        hidden = self.hidden[start:stop].to(self.head.device)
        return apply(self.after, torch.nn.functional.linear(hidden, self.head, self.bias))

    @property
    def hashes(self) -> dict[str, str]:
        """Of the model's files."""
        return self.about["hashes"]["model"]

    def continuations(self, prompts: Sequence[Tensor], count: int) -> Tensor | None:
        """As a `Candidate` tells them, for prompts of these documents."""
        return self.written

    def to(self, device: torch.device) -> "Reference":
        """With the head on a device; the hidden states follow row by row."""
        self.head = self.head.to(device)
        self.bias = None if self.bias is None else self.bias.to(device)
        return self

    def save(self, path: Path) -> None:
        """Write it to a safetensors file, whole or not at all."""
        from safetensors.torch import save_file

        tensors = {"hidden": self.hidden, "head": self.head, "ids": torch.cat(self.documents)}
        tensors["lengths"] = torch.tensor([len(ids) for ids in self.documents])
        if self.bias is not None:
            tensors["bias"] = self.bias
        if self.counted is not None:
            tensors["counted"] = torch.cat(self.counted)
        if self.written is not None:
            tensors["written"] = self.written
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        check_space(path.parent, sum(tensor.nbytes for tensor in tensors.values()))
        about = {"version": VERSION, "after": self.after} | self.about
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            save_file(tensors, part, metadata={KEY: json.dumps(about)})
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def is_stored(path: Path) -> bool:
    """Whether a path is a file that holds no model: a reference, or a mistake."""
    return path.is_file() and not is_gguf(path)


def read_reference(path: Path) -> Reference:
    """What `Reference.save` wrote.

    Raises:
        InvalidInput: The file is something else, is damaged, or is of a later version.
    """
    from safetensors import safe_open

    wrong = InvalidInput(
        f"{path} is neither a model nor a reference that `anybit eval DENSE --save-reference FILE` "
        "wrote"
    )
    stored: dict[str, Stored] = read_header(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    try:
        about = json.loads(metadata[KEY])
        if about.pop("version") != VERSION:
            raise InvalidInput(f"{path} is of another version of anybit; save it again")
        after = about.pop("after")
        if not after.keys() <= AFTER.keys():
            raise wrong
        got = {name: tensor.read() for name, tensor in stored.items()}
        lengths = got["lengths"].tolist()
        documents = list(got["ids"].split(lengths))
        counted = list(got["counted"].split(lengths)) if "counted" in got else None
        (_, width), (vocabulary, hidden) = got["hidden"].shape, got["head"].shape
        if width != hidden or vocabulary <= int(got["ids"].max()):
            raise wrong
        if not all(token.isdigit() and word == str(word) for token, word in about["words"].items()):
            raise wrong
        begin = about["begin"]
        tokens = sum(1 for _ in positions(documents, counted, about["window"]))
        if tokens != len(got["hidden"]):
            raise wrong
        prompts, count = greedy_prompts(documents, counted, about["window"], begin)
        written = got.get("written")
        if written is not None and written.shape != (len(prompts), count):
            raise wrong
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise error if isinstance(error, InvalidInput) else wrong from error
    bias = got.get("bias")
    return Reference(got["hidden"], got["head"], bias, after, documents, counted, about, written)


def positions(
    documents: Sequence[Tensor], counted: Sequence[Tensor] | None, window: int
) -> Iterator[int]:
    """The positions that are scored, window by window."""
    for _, ids, at in all_windows(documents, counted, window):
        yield from range(len(ids) - 1)[at] if isinstance(at, slice) else at.tolist()


def apply(after: dict[str, float], logits: Tensor) -> Tensor:
    for name, constant in after.items():
        logits = AFTER[name](logits, constant)
    return logits


class Recorder:
    """A model that keeps its last hidden states at the tokens that `measure` scores.

    To be given to one `measure`, with the same documents. Raises InvalidInput for a model whose
    logits do not come from a dense output head in a way that is known.
    """

    def __init__(
        self,
        model: Any,
        documents: list[Tensor],
        counted: list[Tensor] | None,
        about: dict[str, Any],
    ):
        head = model.get_output_embeddings()
        self.model, self.head, self.about = model, head, about
        self.documents, self.counted = documents, counted
        self.parts = all_windows(documents, counted, about["window"], begin=about["begin"])
        self.after: dict[str, float] | None = None
        self.hidden = list[Tensor]()
        self.seen: tuple[Tensor, Tensor] | None = None
        if not isinstance(head, torch.nn.Linear):
            kind = "no output head" if head is None else f"{type(head).__name__} as its output head"
            raise self.refused(f"it has {kind}, and torch.nn.Linear is stored")

    def refused(self, why: str) -> Unsupported:
        name = type(self.model).__name__
        return Unsupported(
            f"no reference of a {name} can be stored, since {why}; compare with the model itself: "
            "--against MODEL"
        )

    def __call__(self, ids: Tensor) -> Tensor:
        def keep(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self.seen = inputs[0], output

        hook = self.head.register_forward_hook(keep)
        try:
            logits = logits_of(self.model, ids)
        finally:
            hook.remove()
        assert self.seen is not None
        hidden, output = self.seen
        if self.after is None:
            self.after = self.way(output, logits)
        if not torch.equal(apply(self.after, output).to(logits.dtype), logits):
            raise self.refused("its logits change from call to call")
        for row in hidden:
            _, _, at = next(self.parts)
            self.hidden.append(row[:-1][at].cpu())
        return logits

    def way(self, output: Tensor, logits: Tensor) -> dict[str, float]:
        """How logits follow from the head's output."""
        config = self.model.config.get_text_config()
        known = {name: getattr(config, name, None) for name in AFTER}
        ways = [{}, *({name: float(c)} for name, c in known.items() if c)]
        for way in ways if output.shape == logits.shape else ():
            if torch.equal(apply(way, output).to(logits.dtype), logits):
                return way
        raise self.refused("it does to the head's output what is not known here")

    def reference(self) -> Reference:
        bias, weight = self.head.bias, self.head.weight.detach()
        after = self.after or {}
        return Reference(
            torch.cat(self.hidden), weight, bias, after, self.documents, self.counted, self.about
        )
