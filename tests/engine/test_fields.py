"""Fields of config.json that the engine's own families do not know never change its answers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import anybit
from anybit.engine.llm import LLM
from anybit.engine.loader import MODELS, model_class
from anybit.engine.models import UnknownModel
from anybit.engine.models.fields import (
    IDLE,
    Sources,
    asked_by,
    check_fields,
    fields,
    outline_of,
    read_by_theirs,
)
from anybit.engine.models.layers import Decoder
from anybit.engine.sequence import SamplingParams
from anybit.nn.model import outline_of as of_model
from anybit.nn.outline import Outline
from tests.engine.conftest import ARCHITECTURES, prompts, random_model, reference
from tests.engine.test_models import edit

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("published.json").read_text()
)
# Whose config.json says something of which the sources alone do not tell that it has no effect.
BUILT = {"gemma-2-9b", "phi-4-mini", "opt-125m", "lfm2.5-2.6b", "lfm2-700m", "granite-4.0-h-1b"}
BUILT |= {"mamba-codestral-7b", "nemotron-h-8b", "nemotron-3-nano-30b", "qwen3-next-80b-a3b"}
Checkpoint = Callable[[str], Path]


def bare(config: Any) -> Any:
    with torch.device("meta"):
        return getattr(transformers, config.architectures[0])._from_config(config)


def check(config: Any, name: str = "x") -> bool:
    """Whether transformers' model had to be built for that; UnknownModel where ours is another."""
    kind, built = model_class(config), []

    def theirs() -> Any:
        built.append(bare(config))
        return built[0]

    check_fields(kind, config, asked_by(kind, config).fields, theirs, name)
    return bool(built)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_families_know_all_that_transformers_reads(checkpoint: Checkpoint, name: str) -> None:
    check(AutoConfig.from_pretrained(checkpoint(name)), name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_run_in_the_engine(tmp_path: Path, name: str) -> None:
    """With what their files say beside: other tools' fields, training, tokens, versions."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config = AutoConfig.from_pretrained(tmp_path)
    assert not check(config, name) or name in BUILT


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_models_read_stands_in_their_sources(tmp_path: Path, name: str) -> None:
    """Where it does not, a field would be taken for one without effect."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    model = bare(AutoConfig.from_pretrained(tmp_path))
    names, sources = {f for f, _ in fields(vars(model.config))}, Sources(type(model.config))
    seen, kept = read_by_theirs(model)
    assert sources.known
    assert all(sources.may_read(field) for field in names & (seen | kept) - IDLE)
    assert {field for field in names - IDLE if sources.reads(field)} <= seen


def layers_of(config: Any) -> list[Any]:
    """What plans go by, as transformers' model and as ours tell it."""
    kind, model = model_class(config), bare(config)
    theirs, (ours, names) = of_model(model), outline_of(kind, config, asked_by(kind, config))
    assert not theirs.unknown
    assert not theirs.others
    assert names.keys() == ours.layers.keys() | ours.words.keys()

    def told(o: Outline) -> list[Any]:
        """Without Jamba's router, which is a linear layer in older releases, and stays dense."""
        plan = o.full_plan("q4_k_m")
        kept = [
            {name: value for name, value in part.items() if not name.endswith(".router")}
            for part in (o.layers, dict.fromkeys(o.gates), plan)
        ]
        return [*kept, o.words, o.heads, o.tied]

    return [told(theirs), told(ours)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_plans_go_by_the_same_layers(name: str) -> None:
    kind, options = ARCHITECTURES[name]
    with torch.device("meta"):
        model = random_model(str(kind), dict(options))  # type: ignore[call-overload]
    model.config.architectures = [type(model).__name__]
    theirs, ours = layers_of(model.config)
    assert ours == theirs


@pytest.mark.parametrize("name", PUBLISHED)
def test_plans_of_published_models_go_by_the_same_layers(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    theirs, ours = layers_of(AutoConfig.from_pretrained(tmp_path))
    assert ours == theirs


def test_every_family_has_a_published_model() -> None:
    assert {config["architectures"][0] for config in PUBLISHED.values()} == MODELS.keys()


@pytest.mark.parametrize(
    ("name", "field", "value", "known"),
    [
        ("llama", "is_causal", False, False),
        ("qwen3", "is_causal", False, False),
        ("llama", "is_causal", True, True),
        ("gemma2", "hidden_act", "relu", True),  # its class calls it hidden_activation
        ("gemma3", "use_bidirectional_attention", True, False),
        ("gemma3", "attn_logit_softcapping", 1.0, None),
        ("gemma3", "final_logit_softcapping", 1.0, True),
        ("llama", "use_bidirectional_attention", True, True),  # transformers' Llama has no such
        ("llama", "sliding_window", 6, False),
        ("llama", "attention_chunk_size", 6, False),
        ("llama", "partial_rotary_factor", 0.5, None),
        ("llama", "residual_multiplier", 0.3, True),
        ("llama", "logit_scale", 3.0, True),
        ("llama", "clip_qkv", 0.5, True),
        ("mistral", "attention_bias", True, True),
        # transformers reads it as Ministral then, whose class declares it.
        ("mistral", "layer_types", ["full_attention", "sliding_attention"], True),
        ("mistral", "layer_types", ["sliding_attention"] * 2, True),
        ("llama", "is_decoder", True, True),
        ("mixtral", "layer_types", ["full_attention"] * 2, False),  # its class has none
        ("olmo2", "sliding_window", 6, False),
        ("deepseek_v2", "rope_interleave", False, False),
        ("granite", "logits_scaling", 3.0, True),
        ("qwen2_moe", "norm_topk_prob", True, True),
        ("deepseek_v3", "norm_topk_prob", False, None),
        ("gpt_oss", "attention_bias", False, None),
    ],
)
def test_other_values_give_the_tokens_of_transformers(
    tmp_path: Path, name: str, field: str, value: Any, known: bool | None
) -> None:
    """known: whether the engine's own model runs it; None: either."""
    options: Any
    kind, options = ARCHITECTURES[name]
    random_model(str(kind), {**options, field: value}).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    llm = LLM(tmp_path, max_tokens=16, block_size=4)
    assert known in (
        None,
        isinstance(getattr(llm.engine.runner, "model", None), Decoder)
        and type(llm.engine.runner.model).__module__ != "anybit.engine.models.hosted",
    )
    params = SamplingParams(max_tokens=10, temperature=0)
    for prompt, output in zip(prompts(2), llm.generate(prompts(2), params), strict=True):
        assert output.tokens == reference(model, prompt, 10)[: len(output.tokens)]


def test_a_bidirectional_model_gives_no_causal_embeddings(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    llm = LLM(edit(checkpoint("qwen3"), tmp_path, is_causal=False))
    with pytest.raises(anybit.errors.Unsupported, match="embeddings need a model that the engine"):
        llm.embed([[5, 6, 7]])


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_windows_without_a_size_are_refused(tmp_path: Path, name: str) -> None:
    kind, options = ARCHITECTURES[name]
    changes = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": None}
    random_model(str(kind), {**options, **changes}).save_pretrained(tmp_path)  # type: ignore[dict-item]
    with pytest.raises(anybit.errors.InvalidInput, match=r"layer_types.1. .* no sliding_window"):
        LLM(tmp_path)


def test_the_field_and_its_value_are_named(checkpoint: Checkpoint) -> None:
    config = AutoConfig.from_pretrained(checkpoint("llama"))
    config.is_causal = False
    with pytest.raises(UnknownModel, match="is_causal is False, which the engine's Llama does not"):
        check(config)
