"""Tiny random models that tests of checkpoints share, and a short trained one."""

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
TOKENS = torch.arange(1, 33)[None]


def llama(tied: bool = False, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """A Llama of 100 thousand random weights."""
    torch.manual_seed(0)
    options = SIZES | {"tie_word_embeddings": tied}
    # Not `.to(dtype)`, which would round the rotary frequencies; loading keeps them in fp32.
    return AutoModelForCausalLM.from_config(LlamaConfig(**options | changes), dtype=dtype).eval()


def dense(directory: Path, shard_size: str = "5GB", **options: Any) -> Path:
    """A dense checkpoint of `llama(**options)`."""
    llama(**options).save_pretrained(directory, max_shard_size=shard_size)
    return directory


@cache
def short_pico() -> Path:
    """models/pico with two of its eight blocks: its tokenizer, and real weights, in less time.

    What it writes and scores is not good. Tests of figures take models/pico itself.
    """
    pico = Path(__file__).parents[1] / "models" / "pico"
    short = Path(tempfile.mkdtemp(prefix="short_pico"))
    atexit.register(shutil.rmtree, short, ignore_errors=True)
    copied = "README.md generation_config.json tokenizer.json tokenizer_config.json"
    for name in copied.split():
        shutil.copy(pico / name, short)
    config = json.loads((pico / "config.json").read_text()) | {"num_hidden_layers": 2}
    (short / "config.json").write_text(json.dumps(config))
    tensors = load_file(pico / "model.safetensors")
    beyond = tuple(f"model.layers.{block}." for block in range(2, 8))
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(beyond)}
    save_file(kept, short / "model.safetensors", metadata={"format": "pt"})
    return short


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS.to(model.device)).logits


def same_output(a: torch.Tensor, b: torch.Tensor) -> None:
    """Fail unless two results are equal but for the rounding of sums.

    Even of the same weights, in memory of another alignment a CPU may sum in another order.
    """
    bound = {torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}[a.dtype]
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert (a.double() - b.double()).norm() <= bound * b.double().norm()


def same_state(a: torch.nn.Module, b: torch.nn.Module) -> None:
    """Fail unless two models have the same tensors, bit for bit."""
    x, y = a.state_dict(), b.state_dict()
    assert x.keys() == y.keys()
    for name in x:
        assert x[name].dtype == y[name].dtype, name
        assert torch.equal(x[name], y[name]), name
