"""The vocabulary of a tokenizer of transformers as metadata of a GGUF file."""

import logging
from pathlib import Path
from typing import Any

from anybit.files.directory import read_json

log = logging.getLogger(__name__)

BYTE_LEVEL, SENTENCES = "gpt2", "llama"  # llama.cpp's names for two kinds of BPE
SPLITS = {  # what regular expressions of published tokenizers are told apart by
    "llama-bpe": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    "qwen2": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*",
}


def write_vocabulary(writer: Any, directory: Path, count: int) -> None:
    """Tokens, their types, merges, special tokens and the chat template.

    Only of byte-level BPE and of BPE with bytes as a fallback, which llama.cpp calls gpt2 and
    llama; of others, a log message says that the file has no vocabulary.

    Args:
        writer: Of the `gguf` package.
        directory: With tokenizer.json.
        count: Tokens that the model has, of which the last may have no text.
    """
    from gguf import SpecialVocab, TokenType

    path = directory / "tokenizer.json"
    found = read_json(path) if path.is_file() else {}
    model = found.get("model") or {}
    if model.get("type") != "BPE":
        log.warning("%s: no BPE in tokenizer.json; the file has no vocabulary", directory)
        return
    text = str(found.get("pre_tokenizer")) + str(found.get("decoder"))
    sentences = bool(model.get("byte_fallback"))
    if not sentences and "ByteLevel" not in text:
        log.warning("%s: its tokenizer is unknown to GGUF; the file has no vocabulary", directory)
        return
    names = {index: token for token, index in model["vocab"].items()}
    types = {
        index: TokenType.BYTE if is_byte(t) else TokenType.NORMAL for index, t in names.items()
    }
    for added in found.get("added_tokens") or []:
        names[added["id"]] = added["content"]
        special = TokenType.CONTROL if added.get("special") else TokenType.USER_DEFINED
        types[added["id"]] = special
    others = SpecialVocab(directory, load_merges=not sentences, n_vocab=count)
    if sentences and "unk" in others.special_token_ids:
        types[others.special_token_ids["unk"]] = TokenType.UNKNOWN
    writer.add_tokenizer_model(SENTENCES if sentences else BYTE_LEVEL)
    writer.add_token_list([names.get(i, f"[PAD{i}]") for i in range(count)])
    writer.add_token_types([types.get(i, TokenType.UNUSED) for i in range(count)])
    if sentences:
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(scores([names.get(i, "") for i in range(count)], model["merges"]))
        writer.add_add_space_prefix("Prepend" in str(found.get("normalizer")))
    else:
        pre = next((name for name, split in SPLITS.items() if split in pattern(found)), "gpt-2")
        if pre == "gpt-2" and pattern(found):
            log.warning(
                "%s: GGUF has no name for the way its tokenizer splits text; programs that read "
                "the file may split text in another way, which the model predicts worse",
                directory,
            )
        writer.add_tokenizer_pre(pre)
    others.add_to_gguf(writer, quiet=True)


def is_byte(token: str) -> bool:
    """Whether a token stands for one byte: <0x0A>."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def scores(names: list[str], merges: list[Any]) -> list[float]:
    """Of each token: minus the rank of the first merge that makes it, as SentencePiece wants it."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault("".join(parts), rank)
    return [-float(ranks.get(name, len(merges))) for name in names]


def pattern(found: Any) -> str:
    """The regular expressions that split text before BPE."""
    steps = found.get("pre_tokenizer") or {}
    each = steps.get("pretokenizers") or [steps]
    return " ".join(str((step.get("pattern") or {}).get("Regex", "")) for step in each).strip()
