"""Calibration data: texts, token ids, a file or batches of a model's inputs, checked."""

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anybit.errors import InvalidInput
from anybit.files.directory import read_text

Source = str | Path | Sequence[str] | Tensor | Iterable[Mapping[str, Tensor]]
MASKS = ("attention_mask", "decoder_attention_mask")
FIELDS = ("text", "content")  # where a line of a .jsonl file keeps its text


@dataclass(frozen=True)
class Calibration:
    """The data that a calibrated quantizer runs the model on.

    Attributes:
        source: Texts, a .txt or .jsonl file (objects with a "text"), or token ids: a tensor (T,),
            cut like text, or (samples, length), used as it is. For models that need more than
            token ids: batches, dicts of tensors by the names of the model's arguments (input_ids,
            attention_mask, decoder_input_ids, input_features, pixel_values, ...), as a processor
            or a DataLoader gives them, all used as they are. Positions that attention_mask (for a
            decoder decoder_attention_mask, or labels of -100) calls padding are not counted.
        samples: Number of windows.
        length: Tokens in each window, no more than the model's context.
        tokenizer: For texts; by default the one in the folder that the model was loaded from.
        work: A folder that keeps finished blocks, so that a run that was killed goes on from there.
        kv_scales: Also record static per-channel int8 scales of keys (after rotation) and values,
            as buffers k_scale and v_scale (kv_heads, head_dim) of every attention.
    """

    source: Source
    samples: int = 128
    length: int = 2048
    tokenizer: Any = None
    work: str | Path | None = None
    kv_scales: bool = False

    def data(self, model: nn.Module) -> Tensor | list[dict[str, Tensor]]:
        """Token ids as `tokens` gives them, or the batches that were given, checked.

        Raises:
            InvalidInput: As `tokens`; also when a batch holds anything but tensors of the kind that
                its name means.
        """
        if isinstance(self.source, str | Path | Tensor):
            return self.tokens(model)
        items = list(self.source)
        if not any(isinstance(item, Mapping) for item in items):
            texts = [item for item in items if not isinstance(item, Mapping)]
            return replace(self, source=texts).tokens(model)
        return [checked(item, f"calibration batch {n}", model) for n, item in enumerate(items)]

    def tokens(self, model: nn.Module) -> Tensor:
        """Token ids (samples, length): windows evenly spaced over the data.

        Args:
            model: Gives the context length, the vocabulary and the default tokenizer.

        Raises:
            InvalidInput: There is no data, no tokenizer is found, or ids are outside the model's
                vocabulary.
            FileNotFoundError: The source is no file.

        Warns:
            UserWarning: There is too little data for so many windows; all of it is used.
        """
        full = length = min(self.length, context_of(model) or self.length)
        ids = self.source
        if not isinstance(ids, Tensor):
            ids = self._tokenize(ids, model)
        check_vocabulary(ids, model)
        if ids.ndim == 2:
            return ids
        if len(ids) < 2:
            raise InvalidInput(f"the calibration data has {len(ids)} tokens; give more text")
        length = min(length, len(ids))
        need = min(self.samples, len(ids) // length)
        if need < self.samples:
            warnings.warn(
                f"the calibration data has {len(ids)} tokens, enough for {need} samples of "
                f"{length} tokens, where {self.samples} of {full} were asked for; more text "
                "calibrates better",
                stacklevel=2,
            )
        starts = torch.linspace(0, len(ids) - length, need, dtype=torch.float64).long()
        return torch.stack([ids[start : start + length] for start in starts.tolist()])

    def check_file(self) -> None:
        """Raise what is wrong with the file, if the source is one, before any model is loaded."""
        if isinstance(self.source, str | Path):
            read_texts(self.source)

    def _tokenize(self, source: Any, model: nn.Module) -> Tensor:
        texts = read_texts(source) if isinstance(source, str | Path) else list(source)
        wrong = next((t for t in texts if not isinstance(t, str)), None)
        if wrong is not None:
            raise InvalidInput(
                f"calibration texts are strings, found {type(wrong).__name__}; give a tensor for "
                "token ids"
            )
        tokenizer = self.tokenizer or tokenizer_of(model)
        ids = [torch.tensor(tokenizer(text, verbose=False).input_ids) for text in texts if text]
        return torch.cat(ids).long() if ids else torch.empty(0, dtype=torch.long)


def checked(batch: Any, name: str, model: nn.Module) -> dict[str, Tensor]:
    """A batch of a model's inputs, without those that are None; InvalidInput if it is no batch."""
    if not isinstance(batch, Mapping):
        raise InvalidInput(f"{name} is {type(batch).__name__}, others are dicts; give dicts alone")
    out = {key: value for key, value in batch.items() if value is not None}
    for key, value in out.items():
        if not isinstance(value, Tensor):
            raise InvalidInput(
                f"{name}: {key!r} is {type(value).__name__}; give tensors (return_tensors='pt')"
            )
        if key in MASKS and value.ndim != 2:
            raise InvalidInput(
                f"{name}: {key!r} has shape {tuple(value.shape)}; a mask is (samples, length)"
            )
    if not out:
        raise InvalidInput(f"{name} is empty")
    if "input_ids" in out:
        check_vocabulary(out["input_ids"], model)
        if out["input_ids"].ndim != 2:
            raise InvalidInput(
                f"{name}: 'input_ids' has shape {tuple(out['input_ids'].shape)}; token ids of a "
                "batch are (samples, length)"
            )
    return out


def read_texts(path: str | Path) -> list[str]:
    """The texts of a .txt file (one) or a .jsonl file (one a line).

    Raises:
        FileNotFoundError: There is no such file.
        InvalidInput: The file is not UTF-8, or a line is not a JSON object with a "text" or
            "content".
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is no file; give a .txt or .jsonl file, or a list of texts"
        )
    text = read_text(path)
    if path.suffix != ".jsonl":
        return [text]
    out = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            out.append(next(entry[field] for field in FIELDS if field in entry))
        except (ValueError, TypeError, StopIteration):
            raise InvalidInput(
                f'{path}, line {number}: expected a JSON object with a "text"'
            ) from None
    return out


def tokenizer_of(model: nn.Module) -> Any:
    """The tokenizer in the folder that the model was loaded from."""
    config = getattr(model, "config", None)
    folder = getattr(config, "_name_or_path", "")
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError):
        raise InvalidInput(
            f"no tokenizer at {folder!r}, where the model comes from; pass one: "
            "Calibration(texts, tokenizer=...), or pass token ids"
        ) from None


def check_vocabulary(ids: Tensor, model: nn.Module) -> None:
    """Raise InvalidInput for ids that the model has no embedding of."""
    if ids.is_floating_point() or ids.ndim not in (1, 2):
        raise InvalidInput(
            f"token ids are integers of shape (T,) or (samples, length), found {ids.dtype} "
            f"{tuple(ids.shape)}"
        )
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    size = getattr(embedding, "num_embeddings", None)
    if size and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        bad = ids[(ids < 0) | (ids >= size)]
        raise InvalidInput(
            f"{len(bad)} calibration tokens lie outside the model's vocabulary of {size}, the "
            f"first is {int(bad[0])}; use the tokenizer that belongs to the model"
        )


def context_of(model: nn.Module) -> int | None:
    """Tokens that the model was made for, if it says so."""
    return getattr(getattr(model, "config", None), "max_position_embeddings", None)
