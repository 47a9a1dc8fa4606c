"""Metrics of generated text: ROUGE-L, whether completions of Python functions parse, and how far
greedy text follows another model's and repeats itself.

ZeroQuant(4+2) shows why perplexity and zero-shot tasks are not enough: int4 loses most where a
model has to write, token after token, on its own output.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from anybit.evaluate.perplexity import begun

CONTEXT_LINES = 24  # of the module that a prompt shows before the function
PROMPTS = 16  # that models continue greedily
READ, WRITTEN = 64, 64  # tokens of such a prompt, and of what a model writes after it
ANSWER = 256  # tokens at which an answer to a message is cut
NGRAM = 4  # tokens whose repetition is counted


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L F1 by Google's reference package, without stemming."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise ImportError(
            "ROUGE needs the package rouge-score, which is in the extra `eval`: "
            "pip install rouge-score"
        ) from None
    score: float = RougeScorer(["rougeL"]).score(reference, prediction)["rougeL"].fmeasure
    return score


@dataclass(frozen=True)
class Prompt:
    """The beginning of a Python function: the lines before it, and its signature and docstring."""

    before: str
    head: str


def function_prompts(modules: Sequence[tuple[str, str]], count: int) -> list[Prompt]:
    """The first top-level functions of at least three statements, evenly over the modules."""
    each: list[list[Prompt]] = []
    for _, source in modules:
        lines, found = source.splitlines(keepends=True), []
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and len(node.body) >= 3:
                first = node.body[1 if ast.get_docstring(node) else 0]
                start = max(0, node.lineno - 1 - CONTEXT_LINES)
                # Without the line's end: tokens of Python begin with it and go on with blanks.
                head = "".join(lines[node.lineno - 1 : first.lineno - 1]).rstrip("\n")
                if head.strip():
                    found.append(Prompt("".join(lines[start : node.lineno - 1]), head))
        each.append(found)
    rounds = range(max(map(len, each), default=0))
    return [found[i] for i in rounds for found in each if i < len(found)][:count]


def parses(head: str, completion: str) -> bool:
    """Whether a function whose head is given, and then completed, is valid Python.

    The completion counts up to the first line that leaves the function. If no line does, it was
    cut off by the limit of tokens, and its last line, begun perhaps, does not count, nor do lines
    before it that open a block.
    """
    lines = completion.splitlines(keepends=True)
    end = next((i for i, line in enumerate(lines) if line[:1].strip() and i > 0), None)
    if end is None:
        end = len(lines) - 1
        while end > 0 and lines[end - 1].rstrip().endswith(":"):
            end -= 1
    body = "".join(lines[: max(end, 0)])
    if not body.strip():
        return False
    try:
        ast.parse(head + body)
    except (SyntaxError, ValueError):  # ValueError: a null byte
        return False
    return True


def greedy_prompts(
    documents: Sequence[Tensor],
    counted: Sequence[Tensor] | None,
    window: int,
    begin: Sequence[int] = (),
) -> tuple[list[Tensor], int]:
    """What models go on from greedily, and how many tokens they write at most.

    Args:
        documents: Token ids, each (T,).
        counted: Of conversations, which tokens are answers, (T,) bool each; None of plain text.
        window: Tokens, in which a prompt and what is written after it have to fit.
        begin: As `measure` takes it; pieces begin with it, as windows do.

    Returns:
        At most `PROMPTS` prompts on the CPU, evenly spaced over all: pieces of `READ` tokens, or
        all that comes before the first answer of a conversation.
    """
    if counted is None:
        count, pieces = (
            WRITTEN,
            [
                begun(piece, ids, begin)
                for ids in documents
                for piece in ids.split(READ)
                if len(piece) == READ
            ],
        )
    else:
        both = zip(documents, counted, strict=True)
        count, pieces = ANSWER, [ids[: int(mask.int().argmax())] for ids, mask in both]
    fit = [piece.cpu() for piece in pieces if 0 < len(piece) <= window - count]
    chosen = torch.linspace(0, max(len(fit) - 1, 0), min(PROMPTS, len(fit))).long().tolist()
    return [fit[at] for at in chosen], count


def continuations(model: Any, prompts: Sequence[Tensor], count: int) -> Tensor:
    """What a model writes greedily after prompts, each (T,): token ids (P, count).

    -1 stands behind the token that ends a text. What the model's own files say of sampling and of
    penalties does not count.
    """
    if not prompts:
        return torch.empty(0, count, dtype=torch.int64)
    ids = pad_sequence(list(prompts), True, -1, "left").to(model.device)
    end, mask = model.generation_config.eos_token_id, (ids >= 0).long()
    ends = torch.tensor([] if end is None else end, dtype=ids.dtype, device=ids.device).view(-1)
    out = model.generate(
        ids.clamp_min(0),
        attention_mask=mask,
        max_new_tokens=count,
        min_new_tokens=0,
        pad_token_id=int(ends[0]) if len(ends) else 0,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
    )[:, ids.shape[1] :]
    ended = torch.isin(out, ends).int()
    out = out.masked_fill(ended.cumsum(1) > ended, -1)
    return torch.nn.functional.pad(out, (0, count - out.shape[1]), value=-1).cpu()


def same_tokens(texts: Tensor, others: Tensor) -> Tensor:
    """How many tokens of each text (P, T) come before its first difference from the other, (P,).

    T where they are the same to their ends.
    """
    return (texts == others).int().cumprod(1).sum(1)


def repeated(texts: Tensor) -> Tensor:
    """The part of each text's `NGRAM`-grams that occurred before in it, (P,) fp64; 0 of a text that
    has none. Texts (P, T) are filled up with -1."""
    shares = []
    for text in texts.tolist():
        text = text[: text.index(-1)] if -1 in text else text
        grams = list(zip(*(text[start:] for start in range(NGRAM)), strict=False))
        shares.append(1 - len(set(grams)) / len(grams) if grams else 0.0)
    return torch.tensor(shares, dtype=torch.float64)
