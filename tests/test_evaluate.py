"""Scores against sums worked out another way."""

import json
import math
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from anybit.errors import InvalidInput
from anybit.evaluate.model import encode, load_text_model
from anybit.evaluate.perplexity import Remembered, excerpts, score, windows
from anybit.evaluate.run import evaluate
from tests import tiny

PICO = tiny.short_pico()


class Bigram:
    """A model whose logits depend on the last token only: context changes nothing."""

    def __init__(self, vocabulary: int = 50, seed: int = 0, dtype: torch.dtype = torch.float32):
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(vocabulary, vocabulary, generator=generator).to(dtype) * 3
        self.calls = 0

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.table[ids]


def documents(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(50, (n,), generator=generator) for n in lengths]


@pytest.mark.parametrize(("window", "stride"), [(2, 1), (8, 1), (8, 4), (8, 7), (64, 32), (500, 9)])
def test_windows_score_every_token_once_with_the_promised_context(window: int, stride: int) -> None:
    for length in (0, 1, 2, 7, 8, 9, 63, 64, 65, 200):
        ids = torch.arange(length)
        scored = []
        for part, first in windows(ids, window, stride):
            assert len(part) <= window
            at = part[0].item()
            assert torch.equal(part, ids[at : at + len(part)])
            scored += part[first:].tolist()
            assert first >= min(window - stride, part[first].item())
        assert scored == list(range(1, length))


@pytest.mark.parametrize("stride", [0, 8, 9])
def test_a_stride_outside_the_window_is_refused(stride: int) -> None:
    with pytest.raises(ValueError, match=r"stride=\d is not in 1..7"):
        list(windows(documents(20)[0], 8, stride))


def test_score_equals_torch_on_the_whole_documents() -> None:
    model, dense, texts = Bigram(seed=1), Bigram(seed=2), documents(3, 40, 301, 1)
    got = score(model, texts, window=16, stride=5, dense=dense)
    logits = torch.cat([model.table[t[:-1]] for t in texts]).double()
    other = torch.cat([dense.table[t[:-1]] for t in texts]).double()
    target = torch.cat([t[1:] for t in texts])
    assert got.tokens == len(target) == 2 + 39 + 300
    assert got.nll == pytest.approx(cross_entropy(logits, target).item(), rel=1e-6)
    assert got.perplexity == pytest.approx(math.exp(got.nll))
    kl = kl_div(
        log_softmax(logits, -1), log_softmax(other, -1), log_target=True, reduction="batchmean"
    )
    assert got.kl == pytest.approx(kl.item(), rel=1e-5)
    assert got.agreement == (logits.argmax(-1) == other.argmax(-1)).double().mean().item()


def test_a_model_does_not_differ_from_itself() -> None:
    model = Bigram(dtype=torch.bfloat16)
    got = score(model, documents(100), window=16, dense=model)
    assert (got.kl, got.agreement) == (0.0, 1.0)
    alone = score(model, documents(100), window=16)
    assert (alone.kl, alone.agreement, alone.nll) == (None, None, got.nll)


def test_the_standard_error_covers_the_spread_of_samples() -> None:
    """Over many draws, the true mean lies within two standard errors about 95 times in 100."""
    model, generator = Bigram(vocabulary=4), torch.Generator().manual_seed(3)
    truth = score(model, [torch.randint(4, (200_000,), generator=generator)], window=1000).nll
    inside = 0
    for _ in range(200):
        got = score(model, [torch.randint(4, (640,), generator=generator)], window=16, stride=15)
        inside += abs(got.nll - truth) < 2 * got.nll_error
    assert 180 <= inside <= 199


def test_the_loss_against_a_dense_model_has_an_error_of_its_own() -> None:
    """Differences of the same documents spread less than the documents themselves."""
    dense, texts = Bigram(seed=2), documents(*range(40, 70, 2))
    near = Bigram(seed=2)
    near.table = near.table + 0.05 * Bigram(seed=3).table
    got, alone = (score(m, texts, window=100, dense=dense) for m in (near, dense))
    assert got.loss_error is not None
    assert got.nll_error is not None
    assert got.loss == pytest.approx(got.nll - alone.nll, abs=1e-6)
    assert (alone.loss, alone.loss_error) == (0.0, 0.0)
    each = [score(near, [t], window=100, dense=dense) for t in texts]
    sums, counts = torch.tensor([[e.loss * e.tokens, e.tokens] for e in each]).double().T
    rest = sums - sums.sum() / counts.sum() * counts
    want = (rest.square().sum() * 15 / 14).sqrt() / counts.sum()
    assert got.loss_error == pytest.approx(want.item(), rel=1e-4)
    assert 0 < got.loss_error < 0.2 * got.nll_error


@pytest.mark.parametrize("batch", [2, 7, 100])
def test_windows_in_batches_score_the_same(batch: int) -> None:
    model, dense, texts = Bigram(seed=1), Bigram(seed=2), documents(3, 40, 301, 1)
    one = score(model, texts, window=16, stride=5, dense=dense)
    many = score(model, texts, window=16, stride=5, dense=Remembered(dense), batch=batch)
    assert many == one
    assert many.loss == pytest.approx(many.nll - score(dense, texts, window=16, stride=5).nll)


def test_remembered_runs_the_model_once_for_each_window_within_its_limit() -> None:
    model, texts = Bigram(), documents(160)
    first = score(model, texts, window=16, dense=Bigram(seed=2))
    count = sum(len(list(windows(ids, 16))) for ids in texts)
    logits = 16 * 50 * 4
    for limit, runs in [(1 << 20, count), (0, 2 * count), (3 * logits, 2 * count - 3)]:
        dense = Bigram(seed=2)
        remembered = Remembered(dense, limit)
        for _ in range(2):
            assert score(model, texts, window=16, dense=remembered) == first
        assert dense.calls == runs


def test_nothing_to_score_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter than two tokens"):
        score(Bigram(), documents(1, 0), window=8)


def test_excerpts_take_the_middle_and_as_much_of_every_document_as_fits() -> None:
    texts = documents(5, 100, 30, 1000)
    assert [len(t) for t in excerpts(texts, 200)] == [5, 82, 30, 82]
    assert [len(t) for t in excerpts(texts, 100)] == [5, 32, 30, 32]
    assert [len(t) for t in excerpts(texts, None)] == [5, 100, 30, 1000]
    assert torch.equal(excerpts(texts, 100)[3], texts[3][484:516])
    with pytest.raises(ValueError, match="7 tokens are too few for 4 documents"):
        excerpts(texts, 7)


def test_parts_of_documents_begin_as_whole_documents_do() -> None:
    """With BOS, where the tokenizer puts it; a model without it scores far too badly."""
    with_bos = [torch.cat((torch.tensor([49]), ids % 49)) for ids in documents(5, 100, 301)]
    other = documents(90)[0] % 49
    for ids, (part, first) in [(t, w) for t in with_bos for w in windows(t, 16, 5, [49])]:
        assert part[0] == 49
        assert len(part) <= 16
        assert ids.unfold(0, len(part) - first, 1).eq(part[first:]).all(1).any()
    plain = zip(windows(other, 16, 5, [49]), windows(other, 16, 5), strict=True)
    assert all(torch.equal(a, b) for (a, _), (b, _) in plain)
    got = excerpts([*with_bos, other], 100, [49])
    assert [len(t) for t in got] == [6, 31, 31, 31]
    assert [t[0].item() for t in got[:3]] == [49, 49, 49]
    assert torch.equal(got[2][1:], excerpts(with_bos[2:], 31)[0][1:])
    seen = list[int]()

    def model(ids: torch.Tensor) -> torch.Tensor:
        seen.extend(ids[:, 0].tolist())
        return Bigram()(ids)

    whole = score(model, with_bos, window=16, begin=[49])
    assert set(seen) == {49}
    assert whole.tokens == sum(len(t) - 1 for t in with_bos)


def test_only_what_counts_is_scored_with_all_its_context() -> None:
    model, dense, texts = Bigram(seed=1), Bigram(seed=2), documents(3, 40, 301)
    generator = torch.Generator().manual_seed(5)
    masks = [torch.rand(len(t), generator=generator) < 0.3 for t in texts]
    masks[0][:] = False
    got = score(model, texts, window=16, stride=5, dense=dense, counted=masks, batch=3)
    kept = torch.cat([mask[1:] for mask in masks])
    logits = torch.cat([model.table[t[:-1]] for t in texts])[kept].double()
    target = torch.cat([t[1:] for t in texts])[kept]
    assert got.tokens == len(target)
    assert got.nll == pytest.approx(cross_entropy(logits, target).item(), rel=1e-6)
    whole = [torch.ones(len(t), dtype=torch.bool) for t in texts]
    assert score(model, texts, window=16, counted=whole) == score(model, texts, window=16)
    with pytest.raises(InvalidInput, match="every document has no answer"):
        score(model, texts[:1], window=16, counted=masks[:1])


def test_a_file_of_entries_is_scored_entry_by_entry_and_named(tmp_path: Path) -> None:
    path, plain = tmp_path / "a.json", tmp_path / "a.txt"
    texts = [f"def f{n}(x):\n    return x + {n}\n" * 4 for n in range(20)]
    path.write_text(json.dumps([{"text": t} for t in texts]))
    got = evaluate(PICO, None, path, 20 * 256)
    assert got["text"] == f"{path}, 20 entries"
    model, tokenizer = load_text_model(PICO, "cpu")
    want = score(model, [encode(tokenizer, t) for t in texts], window=1024)
    assert got["perplexity"] == pytest.approx(want.perplexity)
    some = evaluate(PICO, None, path, 5 * 256)
    assert some["text"] == f"{path}, 20 entries, of which 5 are scored"
    plain.write_text(texts[0])
    alone = evaluate(PICO, None, plain, 5 * 256)
    assert alone["text"] == str(plain)
    assert alone["standard_error"] is None  # of one window nothing tells it


def test_answers_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    pairs = [("def add(a, b", "):\n    return a + b\n"), ("class A", ":\n    pass\n")] * 3
    lines = [json.dumps({"prompt": p, "completion": c}) for p, c in pairs]
    path.write_text("\n".join(lines))
    got, whole = (evaluate(PICO, None, path, 4096, answers_only=only) for only in (True, False))
    _, tokenizer = load_text_model(PICO, "cpu")
    count = sum(len(tokenizer(p + c).input_ids) - len(tokenizer(p).input_ids) for p, c in pairs)
    assert got["tokens"] == count < whole["tokens"]
    assert got["perplexity"] != whole["perplexity"]
    assert evaluate(PICO, None, path, 12, answers_only=True)["tokens"] < 12
    with pytest.raises(InvalidInput, match="give them with --text"):
        evaluate(PICO, None, None, 4096, answers_only=True)
    (tmp_path / "a.txt").write_text("plain")
    with pytest.raises(InvalidInput, match="plain text has no answers"):
        evaluate(PICO, None, tmp_path / "a.txt", 4096, answers_only=True)


def adding_bos(folder: Path) -> Path:
    """pico with a tokenizer that puts BOS before a text."""
    shutil.copytree(PICO, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    template = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
    bos = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    template["single"] = [bos, {"Sequence": {"id": "A", "type_id": 0}}]
    entry = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    template["special_tokens"] = {"<|endoftext|>": entry}
    tokenizer["post_processor"] = template
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_every_window_begins_with_bos_where_the_tokenizer_puts_it(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 400)
    reference = tmp_path / "reference"
    for folder, bos in ((PICO, False), (adding_bos(tmp_path / "m"), True)):
        model, tokenizer = load_text_model(folder, "cpu")
        model.float()  # a CPU without instructions for bf16 takes seven times as long for it
        assert encode(tokenizer, "a").tolist() == [0] * bos + tokenizer.encode("a")[-1:]
        begins = list[int]()

        def watch(module: Any, args: Any, kwargs: Any, to: list[int] = begins) -> None:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            to.extend(ids[:, 0].tolist() * (ids.shape[1] > 1))  # not of a step that writes

        with patch("anybit.evaluate.candidate.load_text_model", return_value=(model, tokenizer)):
            model.register_forward_pre_hook(watch, with_kwargs=True)
            got = evaluate(folder, None, text, 1300, save=reference)
        assert (begins.count(0) == len(begins)) is bos
        assert evaluate(folder, reference, None, 0)["kl"] < 1e-3  # the file holds 16 bits
        assert got["tokens"] == 1299
