"""Tokenizers of a front end: one for all threads where that is safe, else one for each."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from anybit.serve.model import Model
from anybit.serve.texts import Job, Texts
from tests.engine.conftest import PICO

TEXT = "def sum(a, b):\n    return a + b\n"


def texts_of(tokenizer: Any) -> Texts:
    model = Model(tokenizer, 512, 4096, 64, frozenset(), (), 4, "float32", {}, 0, 0)
    return Texts(model, 8)


def asked(texts: Texts) -> list[tuple[int, list[int]]]:
    """Which tokenizer each of some threads encodes with, and to what."""

    def job(job: Job) -> tuple[int, list[int]]:
        return id(job.llm.tokenizer), job.encode(TEXT * 40)

    never = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda _: texts._do(job, never), range(6)))


def test_threads_share_a_tokenizer_that_cuts_and_pads_by_its_file(tmp_path: Path) -> None:
    whole = AutoTokenizer.from_pretrained(PICO).encode(TEXT * 40)
    found = json.loads((PICO / "tokenizer.json").read_text())
    cut = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(found | {"truncation": cut}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    texts = texts_of(tokenizer)
    assert tokenizer.backend_tokenizer.truncation is None
    assert {name for name, _ in asked(texts)} == {id(tokenizer)}
    assert all(tokens == whole for _, tokens in asked(texts))


def test_a_tokenizer_of_its_own_kind_is_copied_for_each_thread() -> None:
    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, *args: Any, **given: Any) -> Any:
            return super()._encode_plus(*args, **given)

    tokenizer = Own(tokenizer_file=str(PICO / "tokenizer.json"))
    texts = texts_of(tokenizer)
    assert id(tokenizer) not in {id(texts.words.tokenizer), *(name for name, _ in asked(texts))}
