"""How an engine runs. A field here is an argument of `LLM`, an option of commands, and documented.

Its annotation, default and text are all there is to write: `serve/options.py` makes the options.
Nothing is imported that `--help` does not need.
"""

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, wraps
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Concatenate, Literal, ParamSpec, TypeVar

if TYPE_CHECKING:
    import torch

    from anybit.engine.loader import Loaded
    from anybit.nn.multiplier import Keep
    from anybit.nn.plan import Plan, Spec

MODEL, LIMITS, ADVANCED = "Model", "Limits", "Advanced"  # groups of options in --help
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class EngineConfig:
    """What `LLM` takes.

    Fields with a group are options of commands, too; the first paragraph of their text is the
    option's help.
    """

    model: "str | Path | Loaded"
    """A directory with a Hugging Face checkpoint, quantized or not, a GGUF file, or the name of one
    on the hub (org/name, org/name:Q4_K_M); or a model that `anybit.engine.loader` has loaded or
    built already."""
    quantization: "Spec | Plan | None" = field(
        default=None, metadata={"group": MODEL, "flag": "--format"}
    )
    """Quantize an unquantized model while loading it: fp6, int4, ...

    A format, or a plan {pattern: format}."""
    _: KW_ONLY
    kv_cache: str = field(default="auto", metadata={"group": MODEL})
    """KV cache: model (its dtype), int8, k8v4 (8 bits for K, 4 for V), int4, or auto (int8 if the
    model has scales)."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = field(
        default="auto", metadata={"group": MODEL}
    )
    """auto, bfloat16, float16 or float32."""
    adapters: Mapping[str, str | Path] | None = field(
        default=None, metadata={"group": MODEL, "flag": "--lora"}
    )
    """Directories of LoRA adapters that peft has written, by the names that clients ask for as
    their model.

    In Python `SamplingParams.adapter` asks for one; each sequence of a step may have its own."""
    length: int | None = field(default=None, metadata={"group": LIMITS, "min": 2})
    """Context length: tokens of a prompt and its output.

    The model's own limit by default, beyond which only RoPE that config.json stretches may go."""
    kv_bytes: int | None = field(default=None, metadata={"group": LIMITS, "flag": "--kv-gb"})
    """Size of the KV cache; default: as much as is useful.

    That is what max_running sequences of that length need, but at most 1 GiB on a CPU and, on a
    GPU, 90 % of the free memory, or less where a step takes the rest."""
    max_running: int = field(default=256, metadata={"group": LIMITS, "min": 1})
    """Sequences that run at the same time."""
    max_itl: float | Literal["auto"] | None = field(
        default="auto", metadata={"group": LIMITS, "min": 1}
    )
    """Milliseconds that a step with a prompt may take while other sequences run, which bounds the
    time between their tokens; default: 20 on a GPU, on a CPU 1.5 times a step without prompts.

    That is "auto". On a GPU all kernels are compiled and all graphs captured before anything is
    asked, which takes seconds; on a CPU a server records steps as they come and between requests.
    With None nothing is bounded, and all of that happens at first use."""
    keep: "Keep" = field(default="auto", metadata={"group": ADVANCED})
    """Dequantized copies of layers that have no kernel: auto, packed (never) or decoded
    (always)."""
    kernels: str | Path | None = field(default=None, metadata={"group": ADVANCED})
    """A file of `anybit build --pack`: compiled kernels, so that no compiler runs. It is code: one
    that you trust."""
    deterministic: bool = field(default=False, metadata={"group": ADVANCED})
    """The same output whatever else runs; costs some speed.

    See `anybit.engine.steady`."""
    exact_answers: bool = field(default=False, metadata={"group": ADVANCED})
    """Layers of @int8 round prompts to 8 bits, and answers to 16.

    So answers are as exact as with 16-bit activations. Prompts keep 8, but for a token that a step
    reads alone. An answer's token takes two rows of products."""
    draft: "str | Path | Loaded | None" = field(default=None, metadata={"group": ADVANCED})
    """Speculative decoding: ngram (what followed earlier in the sequence), mtp (the model's own
    head for further tokens), a smaller model with the same tokenizer, or an EAGLE-3 head.

    Guessed tokens run together in a step, where that is faster. Outputs are the same as without."""
    draft_tokens: int = field(default=4, metadata={"group": ADVANCED, "min": 1})
    """Most tokens of a draft."""
    device: "str | torch.device | None" = None
    """By default the GPU, if there is one."""
    max_tokens: int = 2048
    """Tokens in one step."""
    block_size: int = 16
    """Tokens of a block of the KV cache."""
    prefix_caching: bool = True
    """Whether blocks of prompts that begin alike are shared."""


@cache
def texts() -> dict[str, str]:
    """What stands below each field of `EngineConfig`."""
    (body,) = ast.parse(dedent(inspect.getsource(EngineConfig))).body
    assert isinstance(body, ast.ClassDef)
    return {
        name.id: inspect.cleandoc(text)
        for named, said in pairwise(body.body)
        if isinstance(named, ast.AnnAssign)
        and isinstance(name := named.target, ast.Name)
        and isinstance(said, ast.Expr)
        and isinstance(said.value, ast.Constant)
        and isinstance(text := said.value.value, str)
    }


def configured(
    config: Callable[P, EngineConfig],
) -> Callable[[Callable[[T, EngineConfig], None]], Callable[Concatenate[T, P], None]]:
    """Let a method that takes an `EngineConfig` take its fields instead."""

    def decorate(method: Callable[[T, EngineConfig], None]) -> Callable[Concatenate[T, P], None]:
        @wraps(method)
        def call(self: T, /, *args: P.args, **options: P.kwargs) -> None:
            method(self, config(*args, **options))

        own, _ = inspect.signature(method).parameters.values()
        fields = inspect.signature(config).parameters.values()
        call.__signature__ = inspect.Signature([own, *fields])  # type: ignore[attr-defined]
        return call

    return decorate
