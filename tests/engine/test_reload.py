"""New weights for a running engine are those that it would have loaded at first."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import anybit
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.engine.graphs import Rows, StepGraphs
from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from anybit.errors import InvalidInput, InvalidType, Unsupported
from anybit.evaluate.corpus import calibration_text
from tests import tiny
from tests.engine.conftest import prompts

Checkpoint = Callable[[str], Path]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PLAN = {"*": "int4:group=32", "*.k_proj": "fp6", "*.v_proj": None, "*.up_proj": "int8"}
PLAN["*.o_proj"] = "int4:group=32,rotate=kn"


def changed(source: Path, directory: Path) -> Path:
    """A copy of a model with other weights."""
    model = AutoModelForCausalLM.from_pretrained(source)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1 + 0.5 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return directory


def tokens(llm: LLM) -> list[list[int]]:
    return [output.tokens for output in llm.generate(prompts(3), GREEDY)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama-round", "gemma2", "mixtral", "deepseek_v3", "phi3"])
def test_new_weights(checkpoint: Checkpoint, tmp_path: Path, name: str, dtype: str) -> None:
    """In any order; steps that were recorded and prefixes that were cached are of no more use."""
    plan = PLAN if name == "llama-round" else "int8"
    source = checkpoint(name)
    other = changed(source, tmp_path / "other")
    llm = LLM(source, plan, dtype=dtype, block_size=4)  # type: ignore[arg-type]
    wanted = tokens(LLM(other, plan, dtype=dtype, block_size=4))  # type: ignore[arg-type]
    before = tokens(llm)
    assert before != wanted
    sent = load_file(other / "model.safetensors")
    llm.load_weights(reversed(sent.items()))
    for tensor in sent.values():
        tensor.zero_()  # the engine has its own
    assert tokens(llm) == wanted
    llm.load_weights(load_file(source / "model.safetensors").items())
    assert tokens(llm) == before


TRAINED = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoehybrid", "nemotron_h",
           "lfm2_moe", "qwen3_next", "qwen3_5_moe", "jamba")  # fmt: skip


@pytest.mark.parametrize("name", TRAINED)
def test_experts_as_a_trainer_holds_them(checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    """All of a block in two tensors, which checkpoints have one by one."""
    source = checkpoint(name)
    other = changed(source, tmp_path / "other")
    llm = LLM(source, "int8", dtype="float32")
    wanted = tokens(LLM(other, "int8", dtype="float32"))
    assert tokens(llm) != wanted
    model = AutoModelForCausalLM.from_pretrained(other)
    fused = any(
        key.endswith(("experts.gate_up_proj", "experts.up_proj")) for key in model.state_dict()
    )
    assert fused or name == "nemotron_h"
    llm.load_weights(model.state_dict().items())
    assert tokens(llm) == wanted
    sent = {n: t.clone() for f in other.glob("*.safetensors") for n, t in load_file(f).items()}
    llm.load_weights(sent.items())  # and as they are stored
    assert tokens(llm) == wanted


class Graph:
    """Like a CUDA graph: its pool lasts as long as one of the graphs in it."""

    pools: ClassVar[list[weakref.WeakSet["Graph"]]] = []

    def __init__(self, pool: int | None, run: Callable[[], Tensor]) -> None:
        if pool is None:
            pool = len(self.pools)
            self.pools.append(weakref.WeakSet())
        elif not self.pools[pool]:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.pools[pool].add(self)
        self.number, self.run, self.out = pool, run, run()

    def replay(self) -> None:
        self.out.copy_(self.run())


def test_graphs_are_captured_anew(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(self: StepGraphs, rows: Rows, size: int) -> tuple[Graph, Tensor]:
        graph = Graph(self.pool, lambda: self._forward(rows, size))
        self.pool = graph.number
        return graph, graph.out

    monkeypatch.setattr(StepGraphs, "_capture", capture)
    source = checkpoint("llama-round")
    sent = load_file(changed(source, tmp_path / "other") / "model.safetensors")
    wanted = tokens(LLM(tmp_path / "other"))
    llm = LLM(source)
    assert tokens(llm) != wanted
    llm.load_weights(sent.items())
    outputs = llm.generate(prompts(3), GREEDY)
    assert [output.completions[0].error for output in outputs] == [""] * 3
    assert [output.tokens for output in outputs] == wanted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_in_codes(checkpoint: Checkpoint, tmp_path: Path, dtype: Any) -> None:
    """Codes of fp32 weights do not depend on the engine's dtype."""
    source = checkpoint("llama-round")
    other = changed(source, tmp_path / "other")
    quantize_checkpoint(source, tmp_path / "out", PLAN)
    llm = LLM(tmp_path / "out", dtype=dtype)
    assert tokens(llm) == tokens(LLM(source, PLAN, dtype=dtype))
    llm.load_weights(load_file(other / "model.safetensors").items())
    assert tokens(llm) == tokens(LLM(other, PLAN, dtype=dtype))


@pytest.mark.parametrize("stored", [False, True])
def test_a_head_in_codes_of_its_own_takes_the_embeddings(
    checkpoint: Checkpoint, tmp_path: Path, stored: bool
) -> None:
    """A trainer of a model whose head is shared has no tensor for it."""
    plan = PLAN | {"lm_head": "int4:group=32"}
    source = checkpoint("llama-biases-tied")
    other = changed(source, tmp_path / "other")
    sent = load_file(other / "model.safetensors")
    assert "lm_head.weight" not in sent
    if stored:
        quantize_checkpoint(source, tmp_path / "out", plan)
    llm = LLM(tmp_path / "out") if stored else LLM(source, plan)
    for _ in range(2):
        llm.load_weights(sent.items())
        assert tokens(llm) == tokens(LLM(other, plan))
    llm.load_weights((sent | {"lm_head.weight": sent["model.embed_tokens.weight"] * -1}).items())
    assert tokens(llm) != tokens(LLM(other, plan))
    with pytest.raises(InvalidInput, match=r"lm_head\.weight' has not come"):
        llm.load_weights(sent.items())


def test_guessing_begins_anew(checkpoint: Checkpoint) -> None:
    """Times of steps are those of graphs that are gone; a drafter that failed may work now."""
    source = checkpoint("llama-round")
    llm = LLM(source, draft="ngram")
    guessing = llm.engine.speculation
    assert guessing is not None
    for _ in range(2):  # the first one compiles
        guessing.costs.add(1, 0.1, False)
    assert guessing.costs.times
    guessing.failed = True
    llm.load_weights(load_file(source / "model.safetensors").items())
    assert not guessing.failed
    assert not guessing.costs.times
    assert not guessing.costs.known


def test_what_is_wrong_changes_nothing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    llm = LLM(checkpoint("llama-round"), "int4:group=32")
    before = tokens(llm)
    sent = load_file(changed(checkpoint("llama-round"), tmp_path / "other") / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    for wrong, message in (
        ({k: v for k, v in sent.items() if k != name}, "'.*up_proj.weight' has not come"),
        (sent | {"model.more": torch.ones(2)}, "1 tensors have no place .* model.more"),
        (sent | {name: sent[name][:, :64]}, "up_proj.weight has shape"),
        (sent | {name: sent[name][:, :63]}, "K=63 is not a multiple"),
        (sent | {name: sent[name][0]}, "a matrix is wanted"),
        (sent | {name: torch.full_like(sent[name], torch.nan)}, "values are NaN or inf"),
        (sent | {"model.norm.weight": sent["model.norm.weight"] / 0}, "values are NaN or inf"),
        (sent | {name: sent[name].int()}, "up_proj.weight holds torch.int32; floats"),
        (sent | {name: sent[name].to("meta")}, "up_proj.weight is on the meta device"),
        ({f"module.{k}": v for k, v in sent.items()}, "without the prefix 'module.' of 'module.m"),
    ):
        with pytest.raises(InvalidInput, match=message):
            llm.load_weights(wrong.items())
        assert tokens(llm) == before
    for wrong, message in (
        ([*sent.items(), (name, sent[name])], "up_proj.weight has come twice"),
        (["model"], "a pair of a name and a tensor is wanted, and 'model' came"),
        ([(name, sent[name].float().numpy())], "and one of str 'model.* and ndarray came"),
    ):
        with pytest.raises((InvalidInput, InvalidType), match=message):
            llm.load_weights(wrong)
        assert tokens(llm) == before
    llm.load_weights(sent)  # a dictionary does, too
    llm.engine.add("running", [3, 4], GREEDY)
    with pytest.raises(Unsupported, match="requests are running"):
        llm.load_weights(sent.items())


def test_models_that_the_engine_does_not_know(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(Unsupported, match="only models that the engine knows"):
        LLM(tmp_path / "gpt2").load_weights([])


def apart(model: nn.Module, llm: LLM, ids: list[int]) -> float:
    """The divergence of a trainer from an engine: half the mean square between the logs of what
    they give each token of a text."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model.eval()(input_ids=torch.tensor([ids])).logits[0, :-1].float()
    mine = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = llm.generate([ids], asked)[0].completions[0].prompt_logprobs
    assert found is not None
    theirs = torch.tensor([one.logprob for one in found if one is not None])
    return float((mine - theirs).square().mean() / 2)


@pytest.mark.parametrize("spec", ["int2:group=32", "int4:group=32,rotate=k@int8"])
def test_a_trainer_that_rounds_is_the_engine(spec: str) -> None:
    """But for the dtype's noise: fp32 weights under autocast are rounded as in the engine."""
    pico = tiny.short_pico()
    model = AutoModelForCausalLM.from_pretrained(pico, dtype=torch.float32)
    dense = LLM(pico, dtype="bfloat16")
    ids = dense.encode(calibration_text()[0][1])[:128]
    noise = apart(model, dense, ids)
    anybit.fake_quantize_(model, spec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.tensor([ids])
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            model.train()(input_ids=text, labels=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    llm = LLM(pico, spec, dtype="bfloat16")
    before = apart(model, llm, ids)
    llm.load_weights(model.state_dict().items())
    assert apart(model, llm, ids) < 3 * noise < before / 100
    anybit.quantize_(model)
    assert apart(model, llm, ids) < 3 * noise
