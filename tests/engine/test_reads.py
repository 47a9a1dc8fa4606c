"""Tensors that are read before a model asks for them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from anybit.engine import reads
from anybit.engine.llm import LLM
from anybit.engine.reads import Reads
from anybit.engine.sequence import SamplingParams
from anybit.errors import InvalidInput
from anybit.files.safetensors import Stored, stored_tensors
from tests.engine.conftest import PICO

GPU = torch.device("cuda")


@pytest.fixture
def unpinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Reads as for a GPU, without its memory; sizes of what was read into pinned memory."""
    read, pinned_sizes = Stored.read, list[int]()

    def unpinned(self: Stored, pinned: bool = False) -> Tensor:
        pinned_sizes.extend([self.nbytes] * pinned)
        return read(self)

    monkeypatch.setattr(Stored, "read", unpinned)
    return pinned_sizes


def files(folder: Path, **sizes: int) -> dict[str, Tensor]:
    tensors = {name: torch.arange(size).to(torch.uint8) for name, size in sizes.items()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


def test_tensors_come_as_they_are_in_any_order(
    tmp_path: Path, unpinned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "EARLY", 100)
    monkeypatch.setattr(reads, "PINNED", 90)
    names = {"a.weight": 40, "b.codes4": 30, "b.scale": 20, "c.weight": 95, "d.weight": 200}
    tensors = files(tmp_path, **names)
    stored = stored_tensors(tmp_path)
    found = Reads(stored, ["a.weight", "b.weight", "c.weight", "none.bias", "d.weight"], GPU)
    assert torch.equal(found.take("a.weight", stored["a.weight"]), tensors["a.weight"])
    assert sorted(found._early) == ["b.codes4", "b.scale"]  # c does not fit beside them
    assert torch.equal(found.take("d.weight", stored["d.weight"]), tensors["d.weight"])
    for name in ("b.scale", "b.codes4", "c.weight", "a.weight"):
        assert torch.equal(found.take(name, stored[name]), tensors[name])
        assert found._bytes == sum(early.nbytes for early, _ in found._early.values()) <= 100
    assert sorted(unpinned) == [20, 30, 40, 40]


def test_another_tensor_of_a_name_is_read_anew(tmp_path: Path, unpinned: list[int]) -> None:
    tensors = files(tmp_path, a=10, b=20)
    stored = stored_tensors(tmp_path)
    found = Reads(stored, ["a", "b"], GPU)
    found.take("a", stored["a"])
    assert torch.equal(
        found.take("b", stored["b"]._replace(nbytes=5, shape=(5,))), tensors["b"][:5]
    )


def test_a_file_that_ends_early_is_told_where_it_is_asked_for(
    tmp_path: Path, unpinned: list[int]
) -> None:
    files(tmp_path, a=10, b=20)
    stored = stored_tensors(tmp_path)
    stored["b"] = stored["b"]._replace(start=1 << 20)
    found = Reads(stored, ["a", "b"], GPU)
    found.take("a", stored["a"])
    with pytest.raises(InvalidInput, match="ends 20 bytes early"):
        found.take("b", stored["b"])


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_an_engine_reads_each_tensor_once_in_its_order(
    quantization: str | None, unpinned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, early = list[str](), list[Any]()
    init, take = Reads.__init__, Reads.take

    def as_for_a_gpu(self: Reads, stored: Any, order: Any, device: torch.device) -> None:
        init(self, stored, order, GPU)
        early.append([name for name, _ in reversed(self._next)])

    def note(self: Reads, name: str, stored: Any) -> Tensor:
        asked.append(name)
        return take(self, name, stored)

    monkeypatch.setattr(Reads, "__init__", as_for_a_gpu)
    monkeypatch.setattr(Reads, "take", note)
    want = LLM(PICO, quantization, device="cpu").generate(
        [[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0)
    )
    assert early == [asked]
    assert sorted(unpinned) == sorted(stored_tensors(PICO)[name].nbytes for name in asked)
    monkeypatch.undo()
    same = LLM(PICO, quantization, device="cpu").generate(
        [[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0)
    )
    assert same[0].completions[0].tokens == want[0].completions[0].tokens
