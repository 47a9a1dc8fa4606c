"""A model's language: its tokenizer, and how conversations become prompts."""

from collections.abc import Sequence as Items
from functools import cached_property, partial
from typing import Any

from anybit.engine.plain import Plain, plain
from anybit.errors import InvalidInput, check_text


class Language:
    """Texts to tokens and back. tokenizer: transformers' or one like it; None: there is none."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    @cached_property
    def special(self) -> frozenset[int]:
        """Tokens that are no text."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return frozenset(token for token, entry in added.items() if entry.special)

    @cached_property
    def _decode(self) -> Any:
        return decoder(self.tokenizer)

    @cached_property
    def plain(self) -> Plain | None:
        """Texts of tokens that need no decoding behind others."""
        return plain(self.tokenizer)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Tokens of a text, with the special ones that the tokenizer puts around a prompt."""
        if self.tokenizer is None:
            raise InvalidInput("the model directory has no tokenizer; pass prompts as token ids")
        check_text(text)
        return self.tokenizer.encode(text, add_special_tokens=special)

    def encode_chat(self, messages: list[dict[str, Any]], **variables: Any) -> list[int]:
        """Tokens of a conversation [{"role", "content"}], see `chat_text`."""
        text = self.chat_text(messages, **variables)
        return self.encode(text, special=not self.has_template)

    def chat_text(
        self, messages: list[dict[str, Any]], answer: bool = True, **variables: Any
    ) -> str:
        """A conversation [{"role", "content"}] by the tokenizer's chat template.

        answer: whether the assistant is to speak next. variables: what else the template reads,
        such as tools. A base model has no template: it gets the contents, one below the other, and
        continues the last.
        """
        if not self.has_template:
            return "\n".join(message["content"] for message in messages)
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=answer, **variables
        )

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer says how a conversation is written."""
        return self.tokenizer is not None and bool(self.tokenizer.chat_template)

    def decode(self, tokens: list[int], shown: Items[int] = ()) -> str:
        """Text of tokens, without special ones other than those shown."""
        if shown:
            tokens = [t for t in tokens if t not in self.special or t in shown]
        return self._decode(tokens, skip_special_tokens=not shown)


def decoder(tokenizer: Any) -> Any:
    """What turns a list of tokens into text; None without a tokenizer.

    transformers' own `decode` first looks whether any of them is a tensor, which takes longer than
    the rest.
    """
    if tokenizer is None:
        return None
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    own = getattr(type(tokenizer), "decode", None) is PreTrainedTokenizerBase.decode
    fast = own and getattr(tokenizer, "is_fast", False)
    if fast and type(tokenizer)._decode is PreTrainedTokenizerFast._decode:
        return tokenizer.backend_tokenizer.decode
    return partial(
        tokenizer._decode if own else tokenizer.decode, clean_up_tokenization_spaces=False
    )
