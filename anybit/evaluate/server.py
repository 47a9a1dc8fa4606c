"""A model behind a server that tells log-probabilities of prompts: ours, vLLM's, SGLang's.

A server tells the likeliest tokens of each position, not all. The loss of the text's own tokens is
exact from them, and so are agreement and top-5; the KL divergence is that of the tokens that are
told and of all others taken together, which is never more than the whole one.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anybit.errors import InvalidInput, Unsupported
from anybit.evaluate.candidate import LONGEST
from anybit.evaluate.perplexity import Likeliest
from anybit.files.server import KEY, first_model, key_header, reached
from anybit.files.texts import Text

TOLD = 20  # likeliest tokens of a position: as many as vLLM tells by default

Found = dict[int, tuple[float, str]]  # by token: log-probability and text


class Server:
    """A `Candidate` at http://HOST:PORT: the first model that it names.

    The API key is taken from `ANYBIT_API_KEY`, if it wants one. `LONGEST` is the context of those
    that do not tell theirs.
    """

    told: int | None = TOLD

    def __init__(self, url: str):
        self.headers, self.url = key_header(os.environ.get(KEY)), url
        model = first_model(self.ask("GET", "/v1/models"))
        if not model:
            raise InvalidInput(f"{url} names no model in /v1/models")
        self.name: str = model["id"]
        self.device = torch.device("cpu")
        self.context = int(model.get("max_model_len") or LONGEST + 1) - 1  # it writes one token
        self.begin = list[int]()  # it reads no text here
        self.hashes = {"server": self.name}
        self.versions = dict[str, str]()
        self.hardware = {"device": url, "threads": None, "dtype": self.name}
        self.generates = False  # SGLang tells prompts' log-probabilities in its own /generate

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON that it answers.

        Raises ConnectionError where there is no server, InvalidInput for what it refuses.
        """
        with reached(self.url):
            import httpx

            got = httpx.request(
                method, self.url + path, json=body, headers=self.headers, timeout=600
            )
        if got.status_code >= 400:
            key = f"; its key is read from {KEY}" if got.status_code == 401 else ""
            raise InvalidInput(
                f"{self.url}{path} refuses ({got.status_code}): {got.text[:300]}{key}"
            )
        try:
            return got.json()
        except ValueError:
            raise InvalidInput(f"{self.url}{path} answers no JSON: {got.text[:80]!r}") from None

    def __call__(self, ids: Tensor) -> Likeliest:
        rows = [self.likeliest(row.tolist()) for row in ids]
        return Likeliest(torch.stack([r.tokens for r in rows]), torch.stack([r.logp for r in rows]))

    def likeliest(self, ids: list[int]) -> Likeliest:
        """What is told of the T tokens of a sequence, and nothing of the one after it."""
        tokens = torch.full((len(ids), TOLD + 1), -1)
        logp = torch.full(tokens.shape, -torch.inf)
        for at, (token, found) in enumerate(zip(ids[1:], self.read(ids)[1:], strict=True)):
            if token not in found:
                raise InvalidInput(f"{self.url} does not tell the log-probability of token {token}")
            others = sorted((x for x in found if x != token), key=lambda x: -found[x][0])
            row = [token, *others[:TOLD]]
            tokens[at, : len(row)] = torch.tensor(row)
            logp[at, : len(row)] = torch.tensor([found[x][0] for x in row])
        return Likeliest(tokens, logp)

    def read(self, ids: list[int], told: int = TOLD) -> list[Found]:
        """For each token of a prompt what is told of its position; nothing of the first."""
        if not self.generates:
            body = {"model": self.name, "prompt": ids, "max_tokens": 1, "prompt_logprobs": told}
            answer = self.ask("POST", "/v1/completions", body | {"temperature": 0})
            try:
                rows = answer["choices"][0].get("prompt_logprobs")
                if rows:
                    return checked(ids, [by_token(row) for row in rows])
            except (KeyError, IndexError, TypeError, ValueError, AttributeError):
                pass
        try:
            return self.generated(ids, told)
        except (InvalidInput, KeyError, TypeError, ValueError):
            raise Unsupported(
                f"{self.url} tells no log-probabilities of a prompt. anybit serve, vLLM and SGLang "
                "do; llama.cpp's server does not: give its file as llama.cpp:FILE.gguf"
            ) from None

    def generated(self, ids: list[int], told: int) -> list[Found]:
        """As `read`, from SGLang's own route."""
        body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0}
        body |= {"top_logprobs_num": told, "return_text_in_logprobs": True}
        body["sampling_params"] = {"max_new_tokens": 1, "temperature": 0}
        about = self.ask("POST", "/generate", body)["meta_info"]
        rows = []
        tops = about["input_top_logprobs"] or [None] * len(ids)
        for own, top in zip(about["input_token_logprobs"], tops, strict=True):
            told_here = [each for each in [own, *(top or ())] if each[0] is not None]
            rows.append({int(token): (float(p), str(text)) for p, token, text in told_here})
        self.generates = True
        return checked(ids, rows)

    def encode(self, text: Text) -> Tensor:
        raise Unsupported(
            "a server is compared with the dense model, whose tokenizer reads the text: add "
            "--against MODEL, or a file of --save-reference"
        )

    def words(self, ids: Sequence[int]) -> list[str]:
        out = list[str]()
        for at in range(0, len(ids), self.context - 1):
            part = ids[at : at + self.context - 1]
            rows = self.read([part[0], *part], told=0)[1:]
            out += [found[token][1] for token, found in zip(part, rows, strict=True)]
        return out

    def continuations(self, prompts: Sequence[Tensor], count: int) -> Tensor | None:
        out = torch.full((len(prompts), count), -1)
        for row, prompt in enumerate(prompts):
            body = {"model": self.name, "prompt": prompt.tolist(), "max_tokens": count}
            body |= {"temperature": 0, "return_token_ids": True, "repetition_penalty": 1.0}
            ids = self.ask("POST", "/v1/completions", body)["choices"][0].get("token_ids")
            if ids is None:
                return None
            out[row, : len(ids)] = torch.tensor(ids)
        return out


def by_token(row: dict[str, Any] | None) -> Found:
    return {
        int(token): (float(each["logprob"]), str(each.get("decoded_token") or ""))
        for token, each in (row or {}).items()
    }


def checked(ids: list[int], rows: list[Found]) -> list[Found]:
    if len(rows) != len(ids):
        raise InvalidInput(f"a server tells of {len(rows)} tokens, and {len(ids)} were sent")
    return rows
