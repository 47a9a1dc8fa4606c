"""Prompts of models that fill in the middle."""

from collections.abc import Container

# Special tokens before the prefix, the suffix and the middle, of the families that have them.
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen coder, Granite, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # Code Llama
)


def infill(tokens: Container[str], prefix: str | list[int], suffix: str) -> str | None:
    """The prompt for the text between prefix and suffix; None if the model has no tokens for it."""
    marks = next((marks for marks in MARKS if all(mark in tokens for mark in marks)), None)
    if marks is None or not isinstance(prefix, str):
        return None
    before, behind, middle = marks
    return f"{before}{prefix}{behind}{suffix}{middle}"
