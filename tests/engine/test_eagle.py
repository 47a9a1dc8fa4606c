"""Drafts by EAGLE-3 heads, as published: what they guess, and texts with them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from anybit.engine.alike import without_repeats
from anybit.engine.head_draft import HeadDraft
from anybit.engine.llm import LLM
from anybit.engine.loader import load
from anybit.engine.scheduler import Scheduled
from anybit.engine.sequence import Row, SamplingParams
from anybit.engine.structured import Structured
from anybit.errors import InvalidInput
from anybit.files.directory import write_json
from tests.engine.conftest import PICO, prompts, random_model
from tests.engine.test_engine import assert_no_block_is_held, assert_same, mixed_params
from tests.engine.test_speculation import REPETITIVE, assert_taken, drafting, same

WHOLE = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LAYERS, WORDS, SIZE = 7, 96, 64  # of the model


class Case(NamedTuple):
    """A head as config.json describes it, and which of the model's layers it reads.

    nested: of its layer, where that has a configuration of its own. borrows: tensors that it lacks.
    """

    layers: tuple[int, ...]
    config: dict[str, Any]
    nested: dict[str, Any] | None = None
    borrows: tuple[str, ...] = ()


LAYER = {
    "model_type": "llama",
    "vocab_size": WORDS,
    "hidden_size": SIZE,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "rope_theta": 500.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16,  # texts may be longer, as with the authors' own heads
}
NARROW = LAYER | {"model_type": "qwen3", "hidden_size": 32, "num_key_value_heads": 8}
CASES = {
    "authors": Case(
        (2, 3, 4),
        LAYER | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40},
        borrows=("embed_tokens.weight",),
    ),
    "speculators": Case(
        (6, 2, 7),
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": 50,
            "norm_before_residual": True,
            "norm_before_fc": True,
            "norm_output": True,
            "target_hidden_size": SIZE,
            "eagle_aux_hidden_state_layer_ids": [6, 2, 7],
        },
        NARROW,
    ),
    "outputs": Case(
        (2, 5, 6),
        LAYER
        | {
            "architectures": ["LlamaForCausalLM"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 5]},
            "fc_norm": True,
            "attention_bias": True,
        },
        borrows=("embed_tokens.weight", "lm_head.weight", "d2t"),
    ),
}


def tensors_of(case: Case) -> dict[str, Tensor]:
    """Random weights of a head, under the names of its publisher."""
    random, layer = torch.Generator().manual_seed(5), case.nested or case.config
    size, dim, inner = layer["hidden_size"], layer["head_dim"], layer["intermediate_size"]
    heads, kv = layer["num_attention_heads"], layer["num_key_value_heads"]
    words, each = layer["vocab_size"], case.config.get("target_hidden_size", size)
    few, at = case.config.get("draft_vocab_size", words), "layers.0" if case.nested else "midlayer"
    read = len(case.layers) * each
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, read),
        "norm.weight": (size,),
        "embed_tokens.weight": (words, size),
        "lm_head.weight": (few, size),
        f"{at}.input_layernorm.weight": (size,),
        f"{at}.hidden_norm.weight": (size,),
        f"{at}.post_attention_layernorm.weight": (size,),
        f"{at}.self_attn.q_proj.weight": (heads * dim, 2 * size),
        f"{at}.self_attn.k_proj.weight": (kv * dim, 2 * size),
        f"{at}.self_attn.v_proj.weight": (kv * dim, 2 * size),
        f"{at}.self_attn.o_proj.weight": (size, heads * dim),
        f"{at}.mlp.gate_proj.weight": (inner, size),
        f"{at}.mlp.up_proj.weight": (inner, size),
        f"{at}.mlp.down_proj.weight": (size, inner),
    }
    if layer["model_type"] == "qwen3":
        shapes |= {f"{at}.self_attn.{x}_norm.weight": (dim,) for x in "qk"}
    if layer.get("attention_bias"):
        widths = {"q": heads * dim, "k": kv * dim, "v": kv * dim, "o": size}
        shapes |= {f"{at}.self_attn.{x}_proj.bias": (width,) for x, width in widths.items()}
    if case.config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (read,)
    if case.config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (each,) for i in range(len(case.layers))}
    out = {
        name: torch.randn(shape, generator=random) * 0.15 + name.endswith("norm.weight")
        for name, shape in shapes.items()
    }
    chosen = torch.randperm(words, generator=random)[:few].sort().values
    out["d2t"] = chosen - torch.arange(few)
    out["t2d"] = torch.zeros(words, dtype=torch.bool).index_fill(0, chosen, True)
    return {name: tensor for name, tensor in out.items() if name not in case.borrows}


def written(out: Path, case: Case, tensors: dict[str, Tensor]) -> Path:
    """A head's directory."""
    nested = {} if case.nested is None else {"transformer_layer_config": case.nested}
    out.mkdir(exist_ok=True)
    write_json(out / "config.json", case.config | nested)
    save_file(tensors, out / "model.safetensors")
    return out


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with layers enough for those that heads read unless they say others."""
    directory = tmp_path_factory.mktemp("target")
    random_model("llama", {"num_hidden_layers": LAYERS}).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("heads")
    return lambda name: written(root / name, CASES[name], tensors_of(CASES[name]))


@torch.no_grad()
def streams(model: Any, tokens: list[int], layers: tuple[int, ...]) -> Tensor:
    """What goes into layers of transformers' model, or into its last norm, side by side."""
    seen: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0][0]))
        for module in [*model.model.layers, model.model.norm]
    ]
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.cat([seen[i] for i in layers], 1)


class Definition:
    """A head in plain torch, over whole texts."""

    def __init__(self, case: Case, tensors: dict[str, Tensor], model: Any):
        at = "layers.0." if case.nested else "midlayer."
        self.case, self.of = case, {n.removeprefix(at): t for n, t in tensors.items()}
        self.layer, self.model = case.nested or case.config, model
        self.few = tensors.get("lm_head.weight", model.lm_head.weight)
        self.words = tensors.get("embed_tokens.weight", model.model.embed_tokens.weight)
        self.tokens = torch.arange(len(self.few)) + tensors.get("d2t", torch.tensor(0))

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.layer["rms_norm_eps"]
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * self.of[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.of[f"{name}.weight"], self.of.get(f"{name}.bias"))

    def fused(self, x: Tensor) -> Tensor:
        """From the model's streams to states."""
        if self.case.config.get("fc_norm"):
            x = torch.cat([self.norm(p, f"fc_norm.{i}") for i, p in enumerate(x.split(SIZE, 1))], 1)
        if self.case.config.get("norm_before_fc"):
            x = self.norm(x, "input_norm")
        return self.linear(x, "fc")

    def attention(self, x: Tensor) -> Tensor:
        dim, count = self.layer["head_dim"], len(x)
        angles = torch.arange(count)[:, None] * self.layer["rope_theta"] ** (
            -torch.arange(0, dim, 2) / dim
        )
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        parts = []
        for name in "qkv":
            part = self.linear(x, f"self_attn.{name}_proj").view(count, -1, dim)
            if f"self_attn.{name}_norm.weight" in self.of:
                part = self.norm(part, f"self_attn.{name}_norm")
            if name != "v":
                y = torch.complex(*part.chunk(2, -1)) * turn
                part = torch.cat([y.real, y.imag], -1)
            parts.append(part.transpose(0, 1))
        q, k, v = parts
        k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v))
        scores = (q @ k.mT / math.sqrt(dim)).masked_fill(
            torch.ones(count, count).triu(1).bool(), -math.inf
        )
        return self.linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), "self_attn.o_proj")

    def outputs(self, states: Tensor, words: list[int]) -> tuple[Tensor, Tensor]:
        """What logits are made of, and the states of next places."""
        hidden = self.norm(states, "hidden_norm")
        x = hidden if self.case.config.get("norm_before_residual") else states
        e = self.norm(self.words[words], "input_layernorm")
        x = x + self.attention(torch.cat([e, hidden], 1))
        y = self.norm(x, "post_attention_layernorm")
        y = F.silu(self.linear(y, "mlp.gate_proj")) * self.linear(y, "mlp.up_proj")
        x = x + self.linear(y, "mlp.down_proj")
        y = self.norm(x, "norm")
        return y, y if self.case.config.get("norm_output") else x

    @torch.no_grad()
    def logits(self, tokens: list[int], guess: list[int]) -> list[Tensor]:
        """Of the head's few tokens, behind a text and behind each of its guesses."""
        states = self.fused(streams(self.model, tokens, self.case.layers)[:-1])
        words, out = tokens[1:], []
        for token in [*guess, 0]:
            y, following = self.outputs(states, words)
            out.append(y[-1] @ self.few.T)
            states, words = torch.cat([states, following[-1:]]), [*words, token]
        return out[:-1]


def drafter_of(llm: LLM) -> HeadDraft:
    assert llm.engine.speculation is not None
    assert not llm.engine.speculation.failed
    drafter = llm.engine.speculation.drafter
    assert isinstance(drafter, HeadDraft)
    return drafter


def watched(llm: LLM) -> list[tuple[list[int], list[int], list[Tensor]]]:
    """Texts, the guesses behind them, and the logits of these, of steps with one text."""
    drafter, seen, every = drafter_of(llm), list[Any](), list[Tensor]()
    draft, usual = drafter.draft, drafter._logits

    def logits(scheduled: list[Scheduled], given: list[int] | None) -> Tensor:
        found = usual(scheduled, given)
        every.append(found.clone())
        return found

    def note(rows: list[Row], counts: list[int]) -> list[list[int]]:
        every.clear()
        found = draft(rows, counts)
        if len(rows) == 1 and found[0]:
            seen.append((list(rows[0].seq.tokens), found[0], [own[0].cpu() for own in every]))
        return found

    drafter._logits, drafter.draft = logits, note  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_definition(
    target: Path, heads: Callable[[str], Path], name: str
) -> None:
    """Behind prompts in chunks and cached ones, and behind guesses that were right and wrong."""
    options = {"block_size": 4, "max_tokens": 16, "kv_bytes": 1 << 20}
    llm = drafting(LLM(target, draft=heads(name), **options))
    seen = watched(llm)
    first, second = prompts(2, longest=40)
    llm.generate(first, WHOLE)
    llm.generate([*first, *second], WHOLE)
    llm.generate([[*first, *second, 5], second], WHOLE)
    assert llm.engine.scheduler.prefix_hits > 0
    drafter = drafter_of(llm)
    held = sum(state.nbytes for state in (*drafter.large.states, *drafter.runner.states))
    assert 0.9 * (1 << 20) < held <= 1 << 20
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    definition = Definition(CASES[name], tensors_of(CASES[name]), model)
    assert len(seen) > 15
    for tokens, guess, logits in seen[:: len(seen) // 8]:
        for got, want in zip(logits, definition.logits(tokens, guess), strict=True):
            torch.testing.assert_close(got[definition.tokens], want, rtol=1e-4, atol=1e-4)
            assert got.isfinite().sum() == len(definition.tokens)
            assert len(got) == WORDS
        assert guess[0] == definition.tokens[definition.logits(tokens, guess)[0].argmax()]


PLAIN: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("authors", {}),
        ("authors", {"quantization": "int8", "kv_cache": "int8"}),
        ("speculators", {"max_tokens": 16, "block_size": 4, "draft_tokens": 2}),
        ("outputs", {"max_running": 3}),
    ],
)
def test_a_head_changes_no_token(
    target: Path, heads: Callable[[str], Path], name: str, options: dict[str, Any]
) -> None:
    kind = {k: v for k, v in options.items() if k in ("quantization", "kv_cache")}
    if str(kind) not in PLAIN:
        PLAIN[str(kind)] = LLM(target, **kind).generate(prompts(8), mixed_params(8))
    llm = drafting(LLM(target, draft=heads(name), **options))
    for _ in range(2):
        assert_same(llm.generate(prompts(8), mixed_params(8)), PLAIN[str(kind)])
        assert_no_block_is_held(llm.engine)
    drafter = drafter_of(llm)
    assert llm.engine.stats.draft_tokens > 20
    assert not drafter.texts
    assert drafter.blocks.holders == [0] * drafter.blocks.count
    for runner in (drafter.runner, drafter.large):
        captured = runner.graphs.graphs.values() if runner.graphs else ()
        assert not any(getattr(graph, "refused", None) for graph, _ in captured)


def test_a_head_that_was_fitted_guesses_right(target: Path, tmp_path: Path) -> None:
    """An output by least squares, for the tokens of texts that the model writes."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    outputs = LLM(target).generate(prompts(6), params)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tensors, case = tensors_of(CASES["authors"]), CASES["authors"]
    definition, rows, following = Definition(case, tensors, model), [], list[int]()
    for output in outputs:
        text, at = [*output.prompt, *output.tokens], len(output.prompt)
        states = definition.fused(streams(model, text, case.layers)[:-2])
        rows.append(definition.outputs(states, text[1:-1])[0][at - 1 :])
        following += text[at + 1 :]
    used = torch.tensor(following).unique()[: case.config["draft_vocab_size"]]
    wanted = (torch.tensor(following)[:, None] == used).float()
    tensors["lm_head.weight"] = torch.linalg.lstsq(torch.cat(rows), wanted).solution.T.contiguous()
    tensors["d2t"] = used - torch.arange(len(used))
    case = case._replace(config=case.config | {"draft_vocab_size": len(used)})
    llm = drafting(LLM(target, draft=written(tmp_path / "head", case, tensors)))
    assert_same(llm.generate(prompts(6), params), outputs)
    stats = llm.engine.stats
    assert stats.accepted_tokens > 0.5 * stats.drafts
    assert_taken(llm.engine)


def test_grammar_and_stop(tmp_path: Path) -> None:
    case = CASES["authors"]
    case = case._replace(config=case.config | {"vocab_size": 4096, "hidden_size": 256})
    head = written(tmp_path / "head", case, tensors_of(case))
    plain = LLM(PICO, dtype="float32", kv_bytes=1 << 24)
    loaded = load(PICO, plain.device, torch.float32, None, None)
    llm = drafting(LLM(loaded, kv_bytes=1 << 24, draft=head))
    for params in (
        SamplingParams(temperature=0, max_tokens=15, repetition_penalty=1.2, stop=["e"]),
        SamplingParams(seed=1, max_tokens=20, structured=Structured(json=True)),
    ):
        want = plain.generate(REPETITIVE, params)
        assert same(llm.generate(REPETITIVE, params), want)
        assert same(LLM(loaded, kv_bytes=1 << 24).generate(REPETITIVE, params), want)  # as it was
    assert llm.engine.stats.draft_tokens > 0
    drafter_of(llm)


def test_new_weights_leave_the_head(target: Path, heads: Callable[[str], Path]) -> None:
    llm = drafting(LLM(target, draft=heads("outputs"), block_size=2))
    seen, texts = watched(llm), []
    stored = load_file(target / "model.safetensors")
    for factor in (1.0, 1.2, 1.0):
        llm.load_weights((name, tensor * factor) for name, tensor in stored.items())
        llm = drafting(llm)
        seen.clear()
        llm.generate(prompts(1), WHOLE)
        texts.append([(tokens, guess) for tokens, guess, _ in seen])
    assert texts[0] == texts[2] != texts[1]


def test_a_pass_without_repeated_layers(target: Path, heads: Callable[[str], Path]) -> None:
    """It finds kernels to compile, and lacks layers whose inputs a head reads."""
    llm = LLM(target, draft=heads("speculators"))
    runner = drafter_of(llm).large
    assert runner.graphs
    few, states = without_repeats(runner.model, runner.states)
    assert len(few.layers) < max(few.read)
    tokens, batch = runner.graphs.written.batch(1)
    assert few(tokens, states, batch).shape == (1, SIZE)


def test_equal_embeddings_are_the_models(target: Path, tmp_path: Path) -> None:
    tensors = tensors_of(CASES["authors"])
    tensors["embed_tokens.weight"] = load_file(target / "model.safetensors")[
        "model.embed_tokens.weight"
    ]
    llm = LLM(target, draft=written(tmp_path / "head", CASES["authors"], tensors))
    drafter = drafter_of(llm)
    assert drafter.head.words is drafter.large.model.words


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"vocab_size": 97},
            "is for a model of 97 tokens and 64 channels, and this one has",
        ),
        ({"target_hidden_size": 128}, "is for a model of 96 tokens and 128 channels, and this one"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 9, 12]}, r"reads layers \[2, 9, 12\] of a model"),
        ({"num_hidden_layers": 2}, "is a head of 2 layers; those of one layer"),
        ({"model_type": "gemma"}, "is a head of layers like gemma's; those of one layer"),
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            "of the model's last state alone",
        ),
        ({"architectures": ["DFlashDraftModel"]}, "has a DFlash head, which anybit does not run"),
        ({"medusa_num_heads": 5}, "has Medusa heads, which anybit does not run"),
        ({"speculators_model_type": "eagle"}, "has a head of the kind 'eagle', which anybit does"),
        ({"eagle_config": [1]}, "TypeError: 'list' object is not a mapping"),
        ({"draft_vocab_size": "40"}, "draft_vocab_size is '40'; it must be a whole number"),
        ({"norm_before_fc": True}, r"tensor 'input_norm.weight' is missing"),
        ({"draft_vocab_size": 41}, r"d2t has shape \(40,\), but config.json asks for \(41,\)"),
    ],
)
def test_other_heads_are_refused(
    target: Path, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    case = CASES["authors"]
    directory = written(tmp_path, case._replace(config=case.config | change), tensors_of(case))
    with pytest.raises(InvalidInput, match=said) as error:
        LLM(target, draft=directory)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"d2t": torch.full((40,), 90)}, "d2t does not name 40 of 96 tokens"),
        ({"fc.bias": torch.zeros(64)}, "1 tensors have no place in the model .*, such as fc.bias"),
        ({"norm.weight": None}, "tensor 'norm.weight' is missing"),
        ({"midlayer.hidden_norm.weight": None}, "has an EAGLE head of version 1 or 2, which"),
    ],
)
def test_other_tensors_are_refused(
    target: Path, tmp_path: Path, change: dict[str, Tensor | None], said: str
) -> None:
    """Where config.json does not say what they are, tensors do."""
    case = CASES["authors"]
    if "version" in said:
        names = case.config.keys() - {"draft_vocab_size", "architectures"}
        case = case._replace(config={name: case.config[name] for name in names})
    tensors = tensors_of(CASES["authors"]) | change
    directory = written(tmp_path, case, {n: t for n, t in tensors.items() if t is not None})
    with pytest.raises(InvalidInput, match=said):
        LLM(target, draft=directory)


def test_models_and_files_that_cannot_be(
    target: Path, heads: Callable[[str], Path], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match="OPT gives no inputs of its layers, which an EAGLE-3"):
        LLM(checkpoint("opt"), draft=heads("authors"))
    (tmp_path / "config.json").write_bytes((heads("authors") / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InvalidInput, match="a pickle may run code, so convert one that you trust"):
        LLM(target, draft=tmp_path)
