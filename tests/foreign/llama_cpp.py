"""llama.cpp's library, where its folder is named by ANYBIT_LLAMA_CPP: its quantizer and its logits.

Structs are passed as bytes that are longer than they are, since only their first fields, which
have stayed, are set here. npm's package `node-llama-cpp` brings the library in
`node_modules/@node-llama-cpp/linux-x64/bins/linux-x64`.
"""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = os.environ.get("ANYBIT_LLAMA_CPP", "")
FILES = {  # llama_ftype
    "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_M": 12, "Q4_K_M": 15,
    "Q5_K_M": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ3_S": 26, "IQ4_XS": 30, "TQ1_0": 36,
    "TQ2_0": 37,
}  # fmt: skip


class Bytes(ctypes.Structure):
    """A struct of unknown length, at most this."""

    _fields_ = (("words", ctypes.c_int32 * 128),)


@cache
def library() -> Any:
    folder = Path(FOLDER)
    names = ("libggml-base", "libggml.", "libllama.")
    found = [next(iter(sorted(folder.glob(f"{name}*"))), None) for name in names]
    assert all(found), f"{folder} has no {names}"
    ggml, llama = [ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL) for path in found][1:]
    ggml.ggml_backend_load_all_from_path(str(folder).encode())
    llama.llama_backend_init()
    silence = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    llama.silent = silence(lambda *_: None)  # kept alive
    llama.llama_log_set(llama.silent, None)
    for name in ("model", "context", "model_quantize"):
        getattr(llama, f"llama_{name}_default_params").restype = Bytes
    llama.llama_batch_get_one.restype = Bytes
    llama.llama_model_load_from_file.restype = ctypes.c_void_p
    llama.llama_init_from_model.restype = ctypes.c_void_p
    llama.llama_model_get_vocab.restype = ctypes.c_void_p
    llama.llama_get_logits.restype = ctypes.POINTER(ctypes.c_float)
    return llama


def quantize(source: Path, out: Path, kind: str) -> None:
    """What `llama-quantize SOURCE OUT KIND` does."""
    params = library().llama_model_quantize_default_params()
    params.words[0], params.words[1] = 1, FILES[kind]  # nthread, ftype
    params.words[4] |= 1  # allow_requantize
    failed = library().llama_model_quantize(
        str(source).encode(), str(out).encode(), ctypes.byref(params)
    )
    assert not failed, f"llama.cpp cannot quantize {source} to {kind}"


def logits(file: Path, tokens: list[int]) -> Tensor:
    """(tokens, vocabulary) fp32."""
    llama = library()
    model = ctypes.c_void_p(
        llama.llama_model_load_from_file(str(file).encode(), llama.llama_model_default_params())
    )
    assert model, f"llama.cpp cannot read {file}"
    params = llama.llama_context_default_params()
    params.words[0] = 256  # n_ctx
    context = ctypes.c_void_p(llama.llama_init_from_model(model, params))
    llama.llama_set_n_threads(context, 1, 1)  # they spin
    size = llama.llama_vocab_n_tokens(ctypes.c_void_p(llama.llama_model_get_vocab(model)))
    out = torch.empty(len(tokens), size)
    for row, token in zip(out, tokens, strict=True):  # only the last token of a batch has logits
        one = (ctypes.c_int32 * 1)(token)
        assert llama.llama_decode(context, llama.llama_batch_get_one(one, 1)) == 0
        found = llama.llama_get_logits(context)
        row.copy_(torch.tensor(found[:size]))
    llama.llama_free(context)
    llama.llama_model_free(model)
    return out
