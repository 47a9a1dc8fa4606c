"""What calibration takes from endless sources and arrays, and windows that fit the model."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    OPTConfig,
    RobertaConfig,
)

from anybit import Calibration
from anybit.errors import InvalidInput
from anybit.quantizers.calibration.data import context_of
from tests import tiny
from tests.test_calibration import VOCAB, Characters, llama, tokens


def test_an_endless_source_is_read_until_there_is_enough() -> None:
    read: list[int] = []
    texts = (read.append(n) or "x" * 30 for n in itertools.count())  # type: ignore[func-returns-value]
    data = Calibration(texts, samples=3, length=40, tokenizer=Characters())
    assert data.data(llama()).shape == (3, 40)  # type: ignore[union-attr]
    assert len(read) == 4
    batches = ({"input_ids": tokens(2)} for _ in itertools.count())
    assert len(Calibration(batches, samples=5).data(llama())) == 3
    known = Calibration([{"input_ids": tokens(2)}] * 9, samples=5)
    assert len(known.data(llama())) == 9  # a list is used whole


@pytest.mark.parametrize("dtype", ["uint16", "uint8", "int32", "uint32"])
def test_token_ids_of_any_whole_dtype(dtype: str, tmp_path: Path) -> None:
    ids = tokens(4).flatten()
    want = Calibration(ids, 2, 32).tokens(llama())
    ids.numpy().astype(dtype).tofile(tmp_path / "train.bin")
    mapped = np.memmap(tmp_path / "train.bin", dtype=dtype, mode="r")
    assert torch.equal(Calibration(mapped, 2, 32).tokens(llama()), want)
    given = ids.to(getattr(torch, dtype))
    got = Calibration(given, 2, 32).tokens(llama())
    assert torch.equal(got, want)
    assert got.dtype == torch.int64
    batch = Calibration([{"input_ids": given[None]}]).data(llama())
    assert torch.equal(batch[0]["input_ids"], ids[None])  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ({"text": ["a", "b"]}, {}, "is a list of texts or of batches, .* and no dict"),
        ({"input_ids": tokens(2)}, {}, "and no dict"),
        (torch.ones(2, 8, dtype=torch.bool), {}, r"token ids are integers .* found torch.bool"),
        (torch.ones(0, 8, dtype=torch.long), {}, r"token ids are integers .* \(0, 8\)"),
        (tokens(2), {"samples": 0}, "samples=0 and length=2048; both must be at least 1"),
        (tokens(2), {"length": 0}, "samples=128 and length=0"),
    ],
)
def test_what_is_no_calibration_data(source: Any, options: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Calibration(source, **options).data(llama())


def test_a_text_is_no_path() -> None:
    with pytest.raises(
        FileNotFoundError, match=r"^x{80} is not a file; give .* or texts as a list$"
    ):
        Calibration("x" * 5000).check_file()


def test_windows_fit_the_model() -> None:
    """Of a model in a model, and with learned positions, of which OPT and RoBERTa keep some."""
    text = LlamaConfig(**tiny.SIZES | {"max_position_embeddings": 48})
    model = llama()
    model.config = LlavaConfig(text_config=text, vision_config=CLIPVisionConfig())
    assert context_of(model) == 48
    small = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 2, "ffn_dim": 32}
    opt = OPTConfig(
        **small, num_hidden_layers=1, word_embed_proj_dim=32, max_position_embeddings=20
    )
    assert context_of(AutoModelForCausalLM.from_config(opt)) == 20
    del small["ffn_dim"]
    roberta = RobertaConfig(
        **small,
        num_hidden_layers=1,
        intermediate_size=32,
        max_position_embeddings=20,
        is_decoder=True,
    )
    model = AutoModelForCausalLM.from_config(roberta)
    assert context_of(model) == 18
    model(torch.arange(18)[None] + 5)
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        model(torch.arange(19)[None] + 5)
    gpt2 = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, n_positions=24)
    assert context_of(AutoModelForCausalLM.from_config(gpt2)) == 24
    assert context_of(nn.Linear(3, 4)) is None


def test_a_model_may_name_no_embeddings() -> None:
    """As transformers' CLIP does not."""

    class Nameless(nn.Linear):
        def get_input_embeddings(self) -> nn.Module:
            raise NotImplementedError

    assert context_of(Nameless(2, 2)) is None
    assert Calibration(torch.tensor([[5]])).tokens(Nameless(2, 2)).tolist() == [[5]]


def test_text_is_cut_into_evenly_spaced_windows(tmp_path: Path) -> None:
    texts = ["abcdefgh" * 10, "", "0123" * 10]
    calibration = Calibration(texts, samples=3, length=40, tokenizer=Characters())
    ids = calibration.tokens(llama())
    flat = [ord(c) % VOCAB for c in "".join(texts)]
    assert ids.tolist() == [flat[0:40], flat[40:80], flat[80:120]]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts) + "\n")
    (tmp_path / "a.txt").write_text("".join(texts))
    for name in ("a.jsonl", "a.txt"):
        same_ids = Calibration(tmp_path / name, 3, 40, Characters()).tokens(llama())
        assert torch.equal(ids, same_ids)
    assert Calibration(texts, samples=1, tokenizer=Characters()).tokens(llama()).shape == (1, 64)


def test_little_text_is_all_used_and_less_than_a_sample_refused() -> None:
    with pytest.warns(UserWarning, match="has 200 tokens, enough for 3 samples of 64"):
        ids = Calibration(["x" * 200], tokenizer=Characters()).tokens(llama())
    assert ids.shape == (3, 64)
    with pytest.raises(InvalidInput, match="has 63 tokens, less than one sample of 64; give more"):
        Calibration(["x" * 63], tokenizer=Characters()).tokens(llama())
    with pytest.warns(UserWarning, match="has 63 tokens, enough for 1 samples of 63"):
        ids = Calibration(["x" * 63], length=63, tokenizer=Characters()).tokens(llama())
    assert ids.shape == (1, 63)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt is not a file"):
        Calibration(tmp_path / "nowhere.txt", tokenizer=Characters()).tokens(llama())
    with pytest.raises(ValueError, match="no tokenizer at"):
        Calibration(["text"]).tokens(llama())


def test_windows_of_text_begin_with_what_the_tokenizer_puts_before_a_text() -> None:
    class WithBos(Characters):
        all_special_ids = (7,)

        def __call__(self, text: str, **options: Any) -> Any:
            out = super().__call__(text, **options)
            out.input_ids[:0] = [7]
            return out

    ids = Calibration(["abcdefgh" * 20], samples=2, length=40, tokenizer=WithBos())
    got = ids.tokens(llama())
    assert got[:, 0].tolist() == [7, 7]
    flat = [7, *(ord(c) % VOCAB for c in "abcdefgh" * 20)]
    assert got[0].tolist() == flat[:40]
    assert got[1, 1:].tolist() == flat[-39:]
