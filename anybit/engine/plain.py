"""What tokens stand for in the middle of a text, where that depends on no other token."""

import json
from typing import Any

UNKNOWN = "\ufffd"  # what decoders write for bytes that are no character, or not yet
# Decoders that write a token behind a text as they write it behind any other.
ALONE = {"ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}
CHANGES = {"Strip", "Replace"}  # what may look at several tokens, once they are one string


class Plain(dict[int, str | None]):
    """Texts of tokens behind whole characters; None: to be decoded with those before it.

    Such are special tokens, pieces of characters, and bytes, whose neighbours decide.
    """

    def __init__(self, backend: Any):
        super().__init__()
        self.backend, self.added = backend, backend.get_added_tokens_decoder()
        self.before = next(iter(backend.encode("a", add_special_tokens=False).ids), 0)
        self.start = backend.decode([self.before])

    def __missing__(self, token: int) -> str | None:
        self[token] = text = self._text(token)
        return text

    def _text(self, token: int) -> str | None:
        piece = self.backend.id_to_token(token)
        added = self.added.get(token)
        if piece is None or (added is not None and added.special):
            return None
        both = self.backend.decode([self.before, token])
        byte = len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
        if byte or not self.start or UNKNOWN in both or not both.startswith(self.start):
            return None
        return both[len(self.start) :] or None


def settings(part: Any) -> Any:
    """What tokenizer.json says of a part of a tokenizer, whose vocabulary may take a second."""
    return part and json.loads(part.__getstate__())


def plain(tokenizer: Any) -> Plain | None:
    """The texts of a tokenizer's tokens; None where tokens say nothing without their neighbours.

    tokenizer: transformers', whose own `decode` is used; None: there is none.
    """
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    if (
        not getattr(tokenizer, "is_fast", False)
        or kind.decode is not PreTrainedTokenizerBase.decode
        or kind._decode is not PreTrainedTokenizerFast._decode
    ):
        return None
    backend = tokenizer.backend_tokenizer
    parts = [settings(backend.decoder)]
    if parts[0] is not None and parts[0]["type"] == "Sequence":
        parts = parts[0]["decoders"]
    fused = False
    for part in parts:
        kind = part and part["type"]
        if kind not in ALONE or (kind == "Replace" and "String" not in part["pattern"]):
            return None
        if fused and kind in CHANGES and (kind == "Replace" or part["stop"]):
            return None
        fused = fused or kind in ("Fuse", "ByteLevel")
    return Plain(backend)
