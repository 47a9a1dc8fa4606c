"""A GGUF file in llama.cpp's own kernels, by the package llama-cpp-python."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybit.checkpoint.foreign.gguf_file import is_gguf
from anybit.errors import InvalidInput, Unsupported
from anybit.evaluate.candidate import LONGEST, here
from anybit.evaluate.receipt import file_hash
from anybit.files.texts import Text


class LlamaCpp:
    """A `Candidate`: logits of every token, as `llama_decode` computes them, `LONGEST` at most.

    llama.cpp multiplies with tokens in int8 on CPUs, so its loss is the file's and the kernels'.
    """

    told: int | None = None

    def __init__(self, path: Path):
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; llama.cpp runs GGUF files")
        if not is_gguf(path):
            raise InvalidInput(f"{path} is no GGUF file, and llama.cpp runs no other")
        try:
            from llama_cpp import Llama
        except ImportError:
            raise ImportError(
                "llama.cpp needs the package llama-cpp-python: pip install llama-cpp-python"
            ) from None
        threads = torch.get_num_threads()
        self.llama: Any = Llama(
            str(path),
            n_ctx=LONGEST,
            logits_all=True,
            n_gpu_layers=-1,
            verbose=False,
            flash_attn=True,  # as its own programs do
            n_threads=threads,
            n_threads_batch=threads,
        )
        self.device = torch.device("cpu")
        trained = next(
            (n for key, n in self.llama.metadata.items() if key.endswith(".context_length")),
            LONGEST,
        )
        self.context = min(int(trained), LONGEST)
        self.begin: list[int] = self.llama.tokenize(b"", add_bos=True, special=False)
        self.hashes = {path.name: file_hash(path)}
        self.versions = {"llama-cpp-python": version("llama-cpp-python")}
        self.hardware = here() | {"dtype": "llama.cpp"}

    def __call__(self, ids: Tensor) -> Tensor:
        return torch.stack([self.read(row.tolist()) for row in ids])

    def read(self, ids: list[int]) -> Tensor:
        """Logits (T, V) of one sequence."""
        self.llama.reset()
        self.llama.eval(ids)
        return torch.from_numpy(self.llama.scores[: len(ids)]).clone()

    def encode(self, text: Text) -> Tensor:
        if not isinstance(text, str):
            raise Unsupported(
                "llama.cpp scores plain text by itself; for conversations give the dense model, "
                "whose template is used: --against MODEL"
            )
        return torch.tensor(self.llama.tokenize(text.encode(), add_bos=True, special=False))

    def words(self, ids: Sequence[int]) -> list[str]:
        # Some tokens lose their blank at a text's beginning.
        return [
            self.llama.detokenize([token], special=True).decode(errors="replace") for token in ids
        ]

    def continuations(self, prompts: Sequence[Tensor], count: int) -> Tensor:
        out = torch.full((len(prompts), count), -1)
        for row, prompt in enumerate(prompts):
            token = int(self.read(prompt.tolist())[-1].argmax())
            for column in range(count):
                out[row, column] = token
                if token == self.llama.token_eos():
                    break
                self.llama.eval([token])
                token = int(self.llama.scores[self.llama.n_tokens - 1].argmax())
        return out
