"""Prompts in 8 bits and answers in 16, from one stored weight."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from anybit import QuantLinear, quantize_tensor
from anybit.engine.graphs import StepGraphs
from anybit.engine.llm import LLM
from anybit.engine.scheduler import Scheduled
from anybit.engine.sequence import SamplingParams, Sequence
from anybit.errors import InvalidInput, Unsupported
from anybit.kernels.backend import Pairs
from anybit.kernels.between import ANSWERS
from tests.engine.conftest import prompts, random_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PICO = Path("models/pico")
WRITTEN = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize("options", ["", ":rotate=k", ":rotate=kn"])
@pytest.mark.parametrize("bias", [False, True])
def test_first_tokens_are_as_exact_as_unquantized_ones(options: str, bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    w, offset = torch.randn(64, 256, generator=generator), torch.randn(64, generator=generator)
    x = torch.randn(7, 256, generator=generator)
    x[:, 3] *= 40  # an outlier, which takes most of int8's range
    packed = quantize_tensor(w, f"int8{options}")
    given = offset.to(DEVICE) if bias else None
    layer = QuantLinear(packed.to(DEVICE), given, "int8", dtype=torch.bfloat16)
    x = x.to(DEVICE, torch.bfloat16)
    want = x.float() @ packed.dequantize().T.to(DEVICE) + (given if bias else 0)
    plain = layer(x).float()
    with ANSWERS.within(Pairs(torch.tensor([4], dtype=torch.int32, device=DEVICE), 7, 11)):
        got = layer(x).float()
        assert torch.equal(layer(x[None])[0].float(), got)
        assert torch.equal(layer(x[:3]), layer(x[:3].clone()))  # other tokens than the step's
    # A bias is added behind the product, whose outputs are rounded then.
    assert torch.allclose(got[4:], plain[4:], rtol=2**-7 if bias else 0, atol=2**-4 if bias else 0)
    error = (got - want).norm(dim=1) / want.norm(dim=1)
    assert error[:4].max() < 2**-7  # bf16's
    assert error[:4].max() < error[4:].min() / 2 or options  # rotation has spread the outlier
    with ANSWERS.within(Pairs(torch.tensor([7], dtype=torch.int32, device=DEVICE), 7, 14)):
        assert torch.equal(layer(x)[:4].float(), got[:4])


def test_what_is_written_is_that_of_unquantized_tokens() -> None:
    """After a prompt of one token, which is no prompt to a step."""
    started = [[token] for token in (5, 40, 300, 7, 9)]
    texts = [
        LLM(PICO, scheme, dtype="float32", exact_answers=exact, prefix_caching=False).generate(
            started, WRITTEN, show_progress=False
        )
        for scheme, exact in (("int4", False), ("int4@int8", True), ("int4@int8", False))
    ]
    want, exact, rounded = ([o.completions[0] for o in text] for text in texts)
    assert [c.tokens for c in exact] == [c.tokens for c in want]

    def off(got: list) -> float:
        pairs = zip(got, want, strict=True)
        return max(abs(a.logprobs[0].logprob - b.logprobs[0].logprob) for a, b in pairs)

    assert off(exact) < 1e-3 < 10 * off(exact) < off(rounded)


def test_answers_do_not_depend_on_prompts_beside_them() -> None:
    texts = prompts(6, 60)
    llm = LLM(PICO, "int8@int8", dtype="float32", exact_answers=True, max_tokens=24)
    alone = [llm.generate([text], WRITTEN, show_progress=False)[0].tokens for text in texts]
    llm.engine.scheduler.blocks.forget()
    together = llm.generate(texts, WRITTEN, show_progress=False)
    assert [output.tokens for output in together] == alone


def test_rows_that_are_too_few_leave_out_the_last_tokens() -> None:
    """As in graphs, whose steps end with unused tokens."""
    packed = quantize_tensor(torch.randn(64, 256), "int8").to(DEVICE)
    layer = QuantLinear(packed, None, "int8", dtype=torch.bfloat16)
    x = torch.randn(9, 256).to(DEVICE, torch.bfloat16)
    count = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    with ANSWERS.within(Pairs(count, 9, 12)):
        want = layer(x)
    with ANSWERS.within(Pairs(count, 9, 9)):
        got = layer(x)
    assert got.shape == want.shape
    assert torch.equal(got[:6], want[:6])


def steps(answers: int, prompt: int) -> list[Scheduled]:
    """A step that writes a token of some texts, one with two drafts, and reads a prompt."""
    out = []
    for i, length in enumerate([5] * answers + [prompt] * bool(prompt)):
        seq = Sequence("", 0, [7] * length, WRITTEN, length)
        seq.blocks = [i, i + 1, i + 2, i + 3]
        draft = (3, 4) if i == 0 < answers else ()
        out.append(
            Scheduled(
                seq, length - 1 if i < answers else 0, prompt if i == answers else 1, True, draft
            )
        )
    return out


def test_rows_of_graphs_are_those_of_answers() -> None:
    llm = LLM(PICO, "int8@int8", length=64, max_running=4, exact_answers=True)
    runner = llm.engine.runner
    graphs = StepGraphs(runner.model, runner.states, 16, 8, 4, prompts=(16, 32, 64))
    assert graphs.prompts is not None
    for answers, prompt, size in ((0, 16, 16), (3, 6, 16), (3, 7, 32), (3, 54, 64)):
        step = steps(answers, prompt)
        assert graphs.can_read(step)
        assert graphs.prompts.size(step) == size
        graphs.prompts.fill(size, step)
        tokens, batch = graphs.prompts.batch(size)
        pairs = batch.pairs(size)
        assert pairs is not None
        assert pairs.count.tolist() == [answers + 2 * (answers > 0)]
        assert pairs.rows == pairs.tokens == len(tokens) == size
    assert not graphs.can_read(steps(3, 55))
    graphs.written.fill(8, steps(3, 0))
    pairs = graphs.written.batch(8)[1].pairs()
    assert pairs is not None
    assert (pairs.count.tolist(), pairs.tokens, pairs.rows) == ([8], 8, 16)


def test_steps_are_recorded() -> None:
    """On a CPU: nothing in them makes a recording run the model each time."""
    llm = LLM(PICO, "int8@int8", dtype="float32", exact_answers=True, max_running=2)
    llm.generate(prompts(2, 5), WRITTEN, show_progress=False)
    graphs = llm.engine.runner.graphs
    if graphs is not None and DEVICE.type == "cpu":
        assert [graph.refused for graph, _ in graphs.graphs.values()] == [None] * len(graphs.graphs)


def test_a_step_without_room_for_an_answer_is_refused() -> None:
    with pytest.raises(InvalidInput, match="max_tokens=1: an exact answer's token takes 2"):
        LLM(PICO, "int8@int8", exact_answers=True, max_tokens=1)
    llm = LLM(PICO, "int8@int8", exact_answers=True, max_tokens=2)
    assert len(llm.generate([[5, 6, 7]], WRITTEN)[0].tokens) == 12


def test_new_weights_keep_them() -> None:
    llm = LLM(PICO, "int4@int8", dtype="float32", exact_answers=True, prefix_caching=False)
    before = llm.generate([[5]], WRITTEN, show_progress=False)[0].completions[0]
    weights = load_file(PICO / "model.safetensors")
    llm.load_weights(weights.items())
    after = llm.generate([[5]], WRITTEN, show_progress=False)[0].completions[0]
    assert after.tokens == before.tokens
    assert after.logprobs == before.logprobs


@pytest.mark.parametrize(
    ("name", "scheme", "why"),
    [("llama", "int8", "the model has none"), ("mixtral", "int8@int8", "are experts")],
)
def test_models_without_such_layers(
    checkpoint: Callable[[str], Path], name: str, scheme: str, why: str
) -> None:
    with pytest.raises(Unsupported, match=why):
        LLM(checkpoint(name), scheme, exact_answers=True)


@pytest.mark.parametrize(
    ("kind", "options"), [("gpt2", {"n_embd": 64, "n_head": 4}), ("bloom", {})]
)
def test_models_that_transformers_runs(tmp_path: Path, kind: str, options: dict) -> None:
    random_model(kind, {"n_layer": 2} | options).save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match="transformers' modules run this one"):
        LLM(tmp_path, "int8@int8", exact_answers=True)
