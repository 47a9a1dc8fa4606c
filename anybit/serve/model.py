"""What a front end knows of the model, whose weights are in the engine's process."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from anybit.engine.language import Language
from anybit.engine.structured import Grammars

if TYPE_CHECKING:
    from anybit.engine.llm import LLM


@dataclass(eq=False)
class Model(Language):
    """length: tokens of a prompt and its output. hidden: numbers of an embedding. eos: end tokens.

    adapters: names of LoRA adapters. max_running: texts at the same time. quantized: numbers of
    weights by format, which take quantized_bytes, and would take dense_bytes in dtype.
    """

    tokenizer: Any
    length: int
    vocabulary: int
    hidden: int
    eos: frozenset[int]
    adapters: tuple[str, ...]
    max_running: int
    dtype: str
    quantized: Mapping[str, int]
    quantized_bytes: int
    dense_bytes: int

    @cached_property
    def grammars(self) -> Grammars | None:
        """Tries grammars, if there is a tokenizer."""
        return Grammars(self.tokenizer, self.vocabulary, self.eos) if self.tokenizer else None


def model_of(llm: "LLM") -> Model:
    """What front ends shall know of a model."""
    engine = llm.engine
    return Model(
        tokenizer=llm.tokenizer,
        length=llm.length,
        vocabulary=engine.vocabulary,
        hidden=llm.config.get_text_config().hidden_size,
        eos=engine.eos,
        adapters=tuple(engine.adapters),
        max_running=engine.scheduler.max_running,
        dtype=str(llm.dtype).removeprefix("torch."),
        quantized=dict(llm.quantized),
        quantized_bytes=llm.quantized_bytes,
        dense_bytes=sum(llm.quantized.values()) * llm.dtype.itemsize,
    )
