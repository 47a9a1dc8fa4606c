"""Calibration data: texts, token ids, a file or batches of a model's inputs, checked."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from operator import length_hint
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anybit.errors import InvalidInput
from anybit.files.texts import Text, is_entry, read_texts, text_of
from anybit.quantizers.calibration.chat import before_text, tokenized

Ids = Tensor | np.ndarray[Any, Any]
Source = str | Path | Ids | Iterable[Text | Mapping[str, Any]]
ARRAYS = (Tensor, np.ndarray)
MASKS = ("attention_mask", "decoder_attention_mask")


@dataclass(frozen=True)
class Calibration:
    """The data that a calibrated quantizer runs the model on.

    Attributes:
        source: Texts, a file, or token ids. A file holds plain text, or entries as JSON lines, a
            JSON array, CSV, TSV or parquet (`files/texts.py`): texts, conversations, to which the
            tokenizer's chat template is applied, or prompts with answers. Such entries may be given
            as a list as well, or as a data set of the package `datasets`. Token ids are a tensor or
            an array (T,), cut like text, or (samples, length), used as they are. For models that
            need more than token ids: batches, dicts of tensors by the names of the model's
            arguments (input_ids, attention_mask, decoder_input_ids, input_features, pixel_values,
            ...), as a processor or a DataLoader gives them, all used as they are. Positions that
            attention_mask (for a decoder decoder_attention_mask, or labels of -100) calls padding
            are not counted. An iterator that does not say its length may be endless: it is read
            until it has given `samples`.
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

    def __post_init__(self) -> None:
        if self.samples < 1 or self.length < 1:
            raise InvalidInput(
                f"samples={self.samples} and length={self.length}; both must be at least 1"
            )

    def data(self, model: nn.Module) -> Tensor | list[dict[str, Tensor]]:
        """Token ids as `tokens` gives them, or the batches that were given, checked.

        Raises:
            InvalidInput: As `tokens`; also when a batch holds anything but tensors of the kind that
                its name means.
        """
        if isinstance(self.source, (str, Path, *ARRAYS)):
            return self.tokens(model)
        if isinstance(self.source, Mapping) or not isinstance(self.source, Iterable):
            raise InvalidInput(
                "calibration data is a list of texts or of batches, token ids or a file, and no "
                f"{type(self.source).__name__}"
            )
        endless, items = is_endless(self.source), iter(self.source)
        first = next(items, None)
        items = chain([] if first is None else [first], items)
        if not is_batch(first):
            texts: Any = items if endless else list(items)
            return replace(self, source=texts).tokens(model)
        batches, seen = list[dict[str, Tensor]](), 0
        for number, item in enumerate(items):
            batches.append(checked(item, f"calibration batch {number}", model))
            seen += next((len(t) for t in batches[-1].values() if t.ndim), 1)
            if endless and seen >= self.samples:
                break
        return batches

    def tokens(self, model: nn.Module) -> Tensor:
        """Token ids (samples, length): windows evenly spaced over the data.

        A window of text begins with what the tokenizer puts before a text (BOS, for many models),
        in place of its first tokens.

        Args:
            model: Gives the context length, the vocabulary and the default tokenizer.

        Raises:
            InvalidInput: There is less data than one window, no tokenizer is found, an entry is
                neither text nor conversation, or ids are outside the model's vocabulary.
            FileNotFoundError: The source is not a file.

        Warns:
            UserWarning: There is too little data for so many windows; all of it is used.
        """
        length = min(self.length, context_of(model) or self.length)
        ids, begin = self.source, list[int]()
        if not isinstance(ids, ARRAYS):
            tokenizer = self.tokenizer or tokenizer_of(model)
            ids = self._tokenize(ids, tokenizer, self.samples * length)
            begin = before_text(tokenizer)[:length] if len(ids) else begin
        check_ids(ids)
        if ids.ndim == 2:
            return checked_ids(ids, model)
        if len(ids) < length:
            raise InvalidInput(
                f"the calibration data has {len(ids)} tokens, less than one sample of {length}; "
                "give more text, or a smaller length"
            )
        need = min(self.samples, len(ids) // length)
        if need < self.samples:
            warnings.warn(
                f"the calibration data has {len(ids)} tokens, enough for {need} samples of "
                f"{length} tokens, where {self.samples} were asked for; more text calibrates "
                "better",
                stacklevel=2,
            )
        starts = torch.linspace(0, len(ids) - length, need, dtype=torch.float64).long()
        parts = (ids[start : start + length] for start in starts.tolist())
        out = torch.stack([checked_ids(part, model) for part in parts])
        out[:, : len(begin)] = torch.tensor(begin, dtype=torch.long)
        return out

    def check_file(self) -> None:
        """Raise what is wrong with the file, if the source is one, before any model is loaded."""
        if isinstance(self.source, str | Path):
            read_texts(self.source)

    def _tokenize(self, source: Any, tokenizer: Any, enough: int) -> Tensor:
        """Token ids (T,) of all texts; of an endless source, of as many as are enough."""
        endless, out = is_endless(source), list[int]()
        for number, item in enumerate(
            read_texts(source) if isinstance(source, str | Path) else source
        ):
            text = text_of(item, f"calibration text {number}")
            out += tokenized(text, tokenizer) if text else []
            if endless and len(out) >= enough:
                break
        return torch.tensor(out, dtype=torch.long)


def calibration_from(source: Source | Calibration) -> Calibration:
    """What may be given as data, as a `Calibration`."""
    return source if isinstance(source, Calibration) else Calibration(source)


def is_endless(source: Any) -> bool:
    """Whether nothing says how much a source holds."""
    return not isinstance(source, str | Path) and length_hint(source, -1) < 0


def is_batch(item: object) -> bool:
    """Whether the first item of a source is a batch of a model's inputs, and no text."""
    return isinstance(item, Mapping) and not is_entry(item)


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
        check_ids(out["input_ids"])
        out["input_ids"] = checked_ids(out["input_ids"], model)
        if out["input_ids"].ndim != 2:
            raise InvalidInput(
                f"{name}: 'input_ids' has shape {tuple(out['input_ids'].shape)}; token ids of a "
                "batch are (samples, length)"
            )
    return out


def tokenizer_of(model: nn.Module) -> Any:
    """The tokenizer in the folder that the model was loaded from."""
    config = getattr(model, "config", None)
    folder = getattr(config, "_name_or_path", "")
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError):
        raise InvalidInput(
            f"no tokenizer at {folder!r}, where the model comes from; pass one: "
            "Calibration(texts, tokenizer=...), or pass token ids"
        ) from None


def check_ids(ids: Ids) -> None:
    """Raise InvalidInput for what cannot be token ids."""
    whole = not ids.is_floating_point() if isinstance(ids, Tensor) else ids.dtype.kind in "iu"
    empty = ids.ndim == 2 and 0 in ids.shape
    if not whole or ids.dtype == torch.bool or ids.ndim not in (1, 2) or empty:
        raise InvalidInput(
            f"token ids are integers of shape (T,) or (samples, length), found {ids.dtype} "
            f"{tuple(ids.shape)}"
        )


def checked_ids(ids: Ids, model: nn.Module) -> Tensor:
    """Token ids as int64; InvalidInput for those that the model has no embedding of."""
    if not isinstance(ids, Tensor):
        ids = torch.from_numpy(ids.astype(np.int64))
    ids = ids.long()
    size = getattr(input_embeddings(model), "num_embeddings", None)
    if size and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        bad = ids[(ids < 0) | (ids >= size)]
        raise InvalidInput(
            f"{len(bad)} calibration tokens lie outside the model's vocabulary of {size}, the "
            f"first is {int(bad[0])}; use the tokenizer that belongs to the model"
        )
    return ids


def input_embeddings(model: Any) -> Any:
    """A model's embedding of tokens; None where it names none, as CLIP does not."""
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def context_of(model: nn.Module) -> int | None:
    """Tokens that the model was made for, if it says so; no more than it has learned positions."""
    config = getattr(model, "config", None)
    with suppress(AttributeError, ValueError):  # no config of transformers, or of several texts
        config = config.get_text_config()  # type: ignore[union-attr]
    said = getattr(config, "max_position_embeddings", None)
    known = [*learned_positions(model), *([said] if said else [])]
    return min(known, default=None)


def learned_positions(model: nn.Module) -> Iterator[int]:
    """How many positions the tables beside the embedding of tokens hold, as in GPT-2 and OPT."""
    tokens = input_embeddings(model)
    for parent in model.modules():
        tables = {n: m for n, m in parent.named_children() if isinstance(m, nn.Embedding)}
        if not any(table is tokens for table in tables.values()):
            continue
        for name, table in tables.items():
            if "pos" in name or name == "wpe":
                first = 0 if table.padding_idx is None else table.padding_idx + 1  # RoBERTa's
                yield table.num_embeddings - max(first, getattr(table, "offset", 0))
