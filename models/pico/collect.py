"""Collect Python source from this machine and turn it into tokens for `train.py`.

The held-out modules of `anybit.evaluate.corpus` stay out, and so do copies of them that installed
packages carry, generated files, tables of literals, and files that repeat others.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import site
import sys
import sysconfig
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from multiprocessing import Pool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from anybit.evaluate.corpus import HELD_OUT, held_out_text, module_path

STDLIB = "standard library"
# The held-out text is standard library too, so its style counts for more than its share of bytes.
STDLIB_REPEAT = 2
MIN_BYTES, MAX_BYTES = 200, 200_000
PART = 8192  # files that are read before the next are begun
PATIENCE = 300  # seconds for a part; then collecting fails
MAX_SHARED_HELD_OUT = 0.25
MAX_SHARED_SEEN = 0.7
EOS = "<|endoftext|>"
VOCAB, CONTEXT = 4096, 1024
TOKENIZER_BYTES = 100_000_000
# One line break with the indentation that follows is one piece, so a whole indent is one token.
PIECES = (
    r"(?:[ \t]*\r?\n)+[ \t]*|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[ \t]+(?!\S)|\s+"
)
GENERATED = re.compile(r"auto(matically)?[- ]?generated|generated (by|from|with)|do not edit", re.I)
LITERAL_LINE = re.compile(r"""^\s*[\[({]*[bru]?['"\d.+-]""")


class Document(NamedTuple):
    """One source file: the package it came from, its text and hashes of its telling lines."""

    package: str
    text: str
    lines: frozenset[int]


def telling_lines(text: str) -> set[str]:
    """The lines long enough to tell one program from another."""
    return {line for raw in text.splitlines() if len(line := raw.strip()) >= 20}


class HeldOutGuard:
    """Recognizes the held-out modules and copies of them, whole or in large part."""

    def __init__(self, modules: Iterable[tuple[str, str]]) -> None:
        self.file_names = {module_path(name).name for name in HELD_OUT}
        self.lines = [frozenset(telling_lines(text)) for _, text in modules]
        self.all_lines = frozenset().union(*self.lines)

    def excludes(self, path: Path, text: str) -> bool:
        """Whether the file is named like a held-out module or shares many lines with one."""
        if path.name in self.file_names:
            return True
        lines = telling_lines(text)
        shared = lines & self.all_lines
        if len(shared) > MAX_SHARED_HELD_OUT * len(lines):
            return True
        return any(len(shared & own) > MAX_SHARED_HELD_OUT * len(own) for own in self.lines)


def is_unsuitable(text: str) -> bool:
    """Whether a file is generated, minified, or mostly a table of literals."""
    lines = text.splitlines()
    return (
        GENERATED.search(text[:2000]) is not None
        or max(map(len, lines), default=0) > 1000
        or len(text) > 90 * len(lines)
        or sum(map(str.isdigit, text)) > 0.12 * len(text)
        or len(text.encode()) > 1.1 * len(text)
        or (len(lines) > 40 and sum(bool(LITERAL_LINE.match(x)) for x in lines) > len(lines) / 2)
    )


def source_files() -> list[tuple[str, Path]]:
    """Package and path of every Python file of the standard library and of installed packages."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    found: dict[Path, str] = {}
    for root in dict.fromkeys([stdlib, *map(Path, site.getsitepackages())]):
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = sorted(set(subfolders) - {"site-packages", "dist-packages"})
            for name in sorted(names):
                if name.endswith(".py"):
                    path = Path(folder, name)
                    package = STDLIB if root == stdlib else path.relative_to(root).parts[0]
                    found.setdefault(path.resolve(), package.removesuffix(".py"))
    return [(package, path) for path, package in found.items()]


def inspect_file(source: tuple[str, Path], guard: HeldOutGuard) -> Document | str:
    """The file's document, or the reason why it is left out."""
    package, path = source
    try:
        data = path.read_bytes()
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return "unreadable"
    if not MIN_BYTES <= len(data) <= MAX_BYTES:
        return "size"
    if guard.excludes(path, text):
        return "held out"
    if is_unsuitable(text):
        return "generated or table"
    hashes = frozenset(zlib.crc32(line.encode()) for line in telling_lines(text))
    return Document(package, text, hashes)


def collect(
    sources: Sequence[tuple[str, Path]],
    guard: HeldOutGuard,
    seed: int,
    *,
    max_bytes: int | None = None,
    workers: int = 1,
) -> tuple[list[Document], Counter[str]]:
    """The documents to train on, and how many files were left out for which reason.

    The standard library comes first, so that it is the copy elsewhere that counts as duplicate.
    """
    order = random.Random(seed).sample(list(sources), len(sources))
    order.sort(key=lambda source: source[0] != STDLIB)
    inspect = partial(inspect_file, guard=guard)
    kept: list[Document] = []
    left_out: Counter[str] = Counter()
    seen: set[int] = set()
    total = 0
    with contextlib.ExitStack() as stack:
        results: Iterator[Document | str]
        if workers > 1:
            pool = stack.enter_context(Pool(workers))
            # In parts: a pool that is left with work to do may never end.
            parts = (order[i : i + PART] for i in range(0, len(order), PART))
            results = chain.from_iterable(
                pool.map_async(inspect, part, chunksize=128).get(PATIENCE) for part in parts
            )
        else:
            results = map(inspect, order)
        for result in results:
            if isinstance(result, str):
                left_out[result] += 1
            elif len(result.lines & seen) >= MAX_SHARED_SEEN * len(result.lines):
                left_out["duplicate"] += 1
            else:
                kept.append(result)
                seen |= result.lines
                total += len(result.text.encode())
                if max_bytes is not None and total > max_bytes:
                    break
    return kept, left_out


def train_tokenizer(texts: Sequence[str], seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer whose pieces suit source code; any text comes back unchanged."""
    budget, sample = TOKENIZER_BYTES, []
    for text in random.Random(seed).sample(texts, len(texts)):
        if (budget := budget - len(text)) < 0:
            break
        sample.append(text)
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[EOS],
        show_progress=False,
    )
    bpe.train_from_iterator(sample, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=EOS,
        eos_token=EOS,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def tokenize(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[np.ndarray]:
    """The tokens of each text with the end-of-text token after it, on all cores."""
    tokens = []
    for start in range(0, len(texts), 1024):
        batch = tokenizer.backend_tokenizer.encode_batch_fast(list(texts[start : start + 1024]))
        tokens += [np.array([*enc.ids, tokenizer.eos_token_id], dtype=np.int16) for enc in batch]
    return tokens


class Corpus(NamedTuple):
    """Tokenized documents, how often each appears in an epoch, and facts for the card."""

    tokenizer: PreTrainedTokenizerFast
    tokens: list[np.ndarray]
    repeats: np.ndarray
    facts: dict[str, Any]


def build_corpus(seed: int, *, max_bytes: int | None, cache: Path | None) -> Corpus:
    """Collect and tokenize the training text, or read it from `cache` if it is there."""
    if cache is not None and (cache / "corpus.npz").exists():
        data = np.load(cache / "corpus.npz")
        tokens = np.split(data["tokens"], data["ends"][:-1])
        facts = json.loads((cache / "facts.json").read_text())
        tokenizer = PreTrainedTokenizerFast.from_pretrained(cache)
        return Corpus(tokenizer, tokens, data["repeats"], facts)
    began = time.perf_counter()
    guard = HeldOutGuard(held_out_text())
    workers = os.cpu_count() or 1
    documents, left_out = collect(source_files(), guard, seed, max_bytes=max_bytes, workers=workers)
    print(f"{len(documents)} files in {time.perf_counter() - began:.0f} s; left out {left_out}")
    texts = [document.text for document in documents]
    tokenizer = train_tokenizer(texts, seed)
    print(f"tokenizer ready after {time.perf_counter() - began:.0f} s")
    tokens = tokenize(tokenizer, texts)
    in_stdlib = np.array([document.package == STDLIB for document in documents])
    sizes: Counter[str] = Counter()
    for document in documents:
        sizes[document.package] += len(document.text.encode())
    facts = {
        "files": len(documents),
        "bytes": sizes.total(),
        "tokens": sum(map(len, tokens)),
        "packages": len(sizes) - 1,
        "largest": sizes.most_common(12),
        "stdlib_bytes": sizes[STDLIB],
        "left_out": left_out.most_common(),
    }
    print(f"{facts['tokens']:,} tokens after {time.perf_counter() - began:.0f} s")
    corpus = Corpus(tokenizer, tokens, np.where(in_stdlib, STDLIB_REPEAT, 1), facts)
    if cache is not None:
        tokenizer.save_pretrained(cache)
        ends = np.cumsum([len(ids) for ids in tokens])
        np.savez(cache / "corpus", tokens=np.concatenate(tokens), ends=ends, repeats=corpus.repeats)
        (cache / "facts.json").write_text(json.dumps(facts))
    return corpus
