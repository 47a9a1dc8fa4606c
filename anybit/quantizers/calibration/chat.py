"""Tokens of texts and conversations, and which of them are answers."""

from itertools import takewhile
from typing import Any

from anybit.errors import InvalidInput, check_text, in_a_line
from anybit.files.texts import Conversation, Text

MARK = "\ue000"  # a private character


def tokenized(text: Text, tokenizer: Any) -> list[int]:
    """Token ids of a text, or of a conversation as the tokenizer's chat template writes it.

    Raises:
        InvalidInput: A conversation, and there is no template, or it refuses the conversation.
    """
    whole, special = written(text, tokenizer)
    return list(encoded(tokenizer, whole, special).input_ids)


def before_text(tokenizer: Any) -> list[int]:
    """Token ids that a tokenizer puts before a text: BOS, or nothing, as its own settings say."""
    special = set(getattr(tokenizer, "all_special_ids", ()))
    return list(takewhile(special.__contains__, encoded(tokenizer, "a", True).input_ids))


def answers(text: Text, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Token ids as `tokenized` gives them, and for each whether it belongs to an answer.

    An answer is all that a model writes between a prompt and the end of its turn.

    Raises:
        InvalidInput: As `tokenized`; also for a text, which has no answers, and for a template that
            writes a conversation so far in another way than the whole.
    """
    if isinstance(text, str):
        raise InvalidInput(
            "plain text has no answers to score alone; give conversations, or prompts with answers"
        )
    whole, special = written(text, tokenizer)
    found = encoded(tokenizer, whole, special, return_offsets_mapping=True)
    spans = spans_of(text, tokenizer, whole)
    inside = [
        any(start < stop and start < last and stop > first for first, last in spans)
        for start, stop in found.offset_mapping
    ]
    return list(found.input_ids), inside


def encoded(tokenizer: Any, text: str, special: bool, **options: Any) -> Any:
    """What a tokenizer makes of a text; special: with the tokens that it puts around a text."""
    check_text(text)
    if not special:
        options["add_special_tokens"] = False
    return tokenizer(text, verbose=False, **options)


def written(text: Text, tokenizer: Any) -> tuple[str, bool]:
    """A text as it is tokenized, and whether the tokenizer is to add its special tokens."""
    if isinstance(text, str):
        return text, True
    if is_plain(text, tokenizer):
        assert text.plain is not None
        whole = "".join(text.plain)
        return whole, not whole.startswith(getattr(tokenizer, "bos_token", None) or "\0")
    whole = rendered(text, tokenizer, text.messages)
    for number, message in enumerate(text.messages, 1):  # of others, templates rewrite contents
        role, content = message["role"], message["content"] or ""
        if role not in ("assistant", "tool") and content.strip() not in whole:
            raise InvalidInput(
                f"{text.where}: the chat template leaves out message {number}, of role {role!r}; "
                "remove it, or give it a role that the template knows"
            )
    return whole, False


def is_plain(conversation: Conversation, tokenizer: Any) -> bool:
    """Whether a prompt and its answer are one text: for want of a template, or written by it."""
    if conversation.plain is None:
        return False
    if not getattr(tokenizer, "chat_template", None):
        return True
    return any(len(t) > 2 and t in conversation.plain[0] for t in tokenizer.all_special_tokens)


def rendered(
    conversation: Conversation, tokenizer: Any, messages: list[dict[str, Any]], answer: bool = False
) -> str:
    """Messages by the chat template; answer: with what comes before the next answer."""
    where = conversation.where
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidInput(
            f"{where}: messages need a chat template, which this model's tokenizer does not have; "
            "give texts, or a model that was trained to chat"
        )
    try:
        return str(
            tokenizer.apply_chat_template(
                messages, tools=conversation.tools, tokenize=False, add_generation_prompt=answer
            )
        )
    except Exception as error:  # a template may raise anything
        raise InvalidInput(f"{where}: the chat template refuses it: {in_a_line(error)}") from None


def spans_of(conversation: Conversation, tokenizer: Any, whole: str) -> list[tuple[int, int]]:
    """Where in the written conversation the answers are: (first character, one after the last)."""
    if is_plain(conversation, tokenizer):
        assert conversation.plain is not None
        return [(len(conversation.plain[0]), len(whole))]
    messages, spans = conversation.messages, []
    for number, message in enumerate(messages):
        content = message["content"]
        if message["role"] != "assistant" or not number or not content:
            continue
        before = rendered(conversation, tokenizer, messages[:number], answer=True)
        if not whole.startswith(before):
            raise InvalidInput(
                f"{conversation.where}: the chat template writes message {number + 1} otherwise "
                "than after its prompt, so its answer cannot be told apart; score whole texts"
            )
        marked = [*messages]
        marked[number] = message | {"content": content.rstrip() + MARK}
        other = rendered(conversation, tokenizer, marked)
        both = enumerate(zip(whole, other, strict=False))
        spans.append((len(before), next(at for at, (a, b) in both if a != b)))
    return spans
