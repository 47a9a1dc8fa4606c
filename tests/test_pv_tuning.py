"""Tuning of grids, norms and codes: gradients against autograd, and what is promised of each."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax
from typer.testing import CliRunner

import anybit
from anybit.cli.app import app
from anybit.quantizers.pv_tuning import TunedLayer, Tuning, divergence, epochs, logits_of, pv_tune
from tests import tiny

PICO = Path(__file__).parent.parent / "models/pico"
CODEBOOK = "codebook:m=2,v=4,b=4,group=32"


def tokens(count: int = 8, seed: int = 3) -> Tensor:
    return torch.randint(256, (count, 32), generator=torch.Generator().manual_seed(seed))


def dense(**changes: Any) -> Any:
    """A random model whose logits are spread as a trained one's are."""
    model = tiny.llama(dtype=torch.float32, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter *= 4
    return model


def quantized(spec: str) -> Any:
    return anybit.quantize_(dense(), spec)


def codes_of(model: Any) -> list[Tensor]:
    return [m.packed.codes() for m in model.modules() if isinstance(m, anybit.QuantLinear)]


def kl(model: Any) -> float:
    """On text that was not tuned on."""
    ids = tokens(16, seed=99)
    with torch.no_grad():
        return float(divergence(logits_of(model, ids), logits_of(dense(), ids)))


def test_divergence_is_torchs() -> None:
    a, b = torch.randn(3, 700, 11), torch.randn(3, 700, 11)
    want = kl_div(
        log_softmax(a, -1).flatten(0, 1),
        log_softmax(b, -1).flatten(0, 1),
        log_target=True,
        reduction="batchmean",
    )
    assert torch.allclose(divergence(a, b), want, rtol=1e-5)


@pytest.mark.parametrize(
    "spec", [CODEBOOK, "int3:group=32,zero", "fp4", "liquid:group=32", f"{CODEBOOK},rotate=k"]
)
def test_gradients_reach_the_grid(spec: str) -> None:
    layer = anybit.QuantLinear(anybit.quantize_tensor(torch.randn(8, 64), spec))
    x, direction = torch.randn(5, 64), torch.randn(5, 8)
    tuned = TunedLayer(layer)
    (gradient,) = torch.autograd.grad((tuned(x) * direction).sum(), [tuned.weight])
    tuned.learn(gradient, keep=False)

    packed = layer.packed
    grid = {
        name: t.float().requires_grad_() if t.is_floating_point() else t
        for name, t in packed.grid.items()
    }
    y = x @ packed.format.decode(packed.codes(), grid).T
    for name, master in tuned.masters.items():
        want = torch.autograd.grad((y * direction).sum(), grid[name], retain_graph=True)[0]
        assert master.grad is not None
        assert torch.allclose(master.grad, want * tuned.units[name], rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("spec", [CODEBOOK, "int2:group=32", "int2:group=32,zero", "fp:e2m0"])
def test_scales_alone_recover_a_part_in_every_format(spec: str) -> None:
    model = quantized(spec)
    before, codes = kl(model), codes_of(model)
    losses = pv_tune(model, dense(), tokens(32), steps=24, rate=0.01, share=0)
    assert len(losses) == 24
    assert kl(model) < 0.9 * before
    assert all(torch.equal(a, b) for a, b in zip(codes, codes_of(model), strict=True))


def test_codes_help_and_few_of_them_move() -> None:
    grids, both = quantized(CODEBOOK), quantized(CODEBOOK)
    codes = codes_of(both)
    options: dict[str, Any] = {"steps": 32, "rate": 0.01, "every": 8}
    pv_tune(grids, dense(), tokens(32), share=0, **options)
    pv_tune(both, dense(), tokens(32), share=0.05, **options)
    moved = [
        (a != b).reshape(-1, 2).any(1).float().mean().item()
        for a, b in zip(codes, codes_of(both), strict=True)
    ]
    assert 0 < max(moved) <= 4 * 0.05
    assert kl(both) < kl(grids)


@pytest.mark.parametrize("spec", [CODEBOOK, f"{CODEBOOK},rotate=k"])
def test_a_code_moves_down_the_gradient_and_back(spec: str) -> None:
    layer = anybit.QuantLinear(anybit.quantize_tensor(torch.randn(8, 64), spec))
    tuned = TunedLayer(layer)
    assert torch.allclose(tuned.quantized().dequantize(), layer.dequantize(), atol=1e-6)
    old, before = tuned.codes.clone(), tuned.weight.detach().clone()
    # Every vector's loss falls towards its own other code, but only that of vector 3 in row 2
    # does so in every batch.
    toward = tuned.format.decode((old + 1) % 16, tuned.grid()).detach() - before
    gradient = -toward / toward.reshape(8, 16, 4).norm(dim=-1).repeat_interleave(4, 1)
    for sign in (1, 1, -1, -0.9):
        other = gradient * sign
        other[2, 12:16] = gradient[2, 12:16]
        tuned.learn(other, keep=True)
    assert tuned.move_codes(share=1.5 / 128, reach=1.0) == 1
    changed = (tuned.weight != before).reshape(8, 16, 4).any(-1).nonzero()
    assert changed.tolist() == [[2, 3]]
    assert ((tuned.weight - before) * gradient).sum() < 0
    assert torch.equal(tuned.weight, tuned.format.decode(tuned.codes, tuned.grid()))
    tuned.take_back()
    assert torch.equal(tuned.codes, old)
    assert torch.equal(tuned.weight, before)
    assert tuned.move_codes(share=1, reach=1.0) == 0  # the gradients are spent
    tuned.learn(gradient, keep=True)
    assert tuned.move_codes(share=1, reach=1e-4) == 0  # too short to reach another code


def test_tuning_is_deterministic_by_seed() -> None:
    runs = [quantized(CODEBOOK) for _ in range(3)]
    for model, seed in zip(runs, (0, 0, 1), strict=True):
        pv_tune(model, dense(), tokens(), steps=6, batch=2, every=2, share=0.05, seed=seed)
    tiny.same_state(runs[0], runs[1])
    with pytest.raises(AssertionError):
        tiny.same_state(runs[0], runs[2])


def test_epochs_see_every_sample_once() -> None:
    rows = [row for batch in epochs(6, 2, 9, seed=0) for row in batch]
    assert len(rows) == 18
    assert all(sorted(rows[at : at + 6]) == [*range(6)] for at in (0, 6, 12))
    assert [len(batch) for batch in epochs(2, 5, 3, seed=0)] == [2, 2, 2]


def test_what_is_stored_is_what_was_tuned() -> None:
    model = quantized(CODEBOOK)
    with Tuning(model, 0.01, 4) as tuning:
        for _ in range(4):
            tuning.step(logits_of(model, tokens(2)).square().mean())
        tuned = logits_of(model, tokens(2)).detach()
    assert all(isinstance(m, anybit.QuantLinear) for m in map(model.get_submodule, tuning.layers))
    assert not any(isinstance(m, TunedLayer) for m in model.modules())
    with torch.no_grad():
        stored = logits_of(model, tokens(2))
    assert (stored - tuned).norm() < 5e-3 * tuned.norm()  # fp16 grids


OF_CHECKPOINTS = (
    "mxfp4", "nvfp4", "mxfp6:e3m2", "mxfp8:e4m3", "fp8:group=32", "nf4", "q4_1", "iq4_nl:group=32",
)  # fmt: skip


@pytest.mark.parametrize("spec", OF_CHECKPOINTS)
def test_what_was_tuned_is_saved_in_the_formats_of_checkpoints(spec: str, tmp_path: Path) -> None:
    """Microscaling formats have no scales that move, and codes that do."""
    model = quantized(spec)
    before = codes_of(model)
    pv_tune(model, dense(), tokens(), steps=4, share=0.02)
    moved = any(not torch.equal(a, b) for a, b in zip(before, codes_of(model), strict=True))
    anybit.save(model, tmp_path)
    again = anybit.load(tmp_path)
    with torch.no_grad():
        assert torch.equal(logits_of(again, tokens(2)), logits_of(model, tokens(2)))
        assert moved or not torch.equal(
            logits_of(model, tokens()), logits_of(quantized(spec), tokens())
        )


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = quantized(CODEBOOK)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match="step 1 hold NaN or inf; try a lower rate"):
        pv_tune(model, dense(), tokens(), steps=4, rate=float("inf"))
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(v, after[k]) for k, v in before.items())


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="no quantized layers to tune"):
        pv_tune(dense(), dense(), tokens())
    with pytest.raises(ValueError, match=r"share=2 must be in 0\.\.1"):
        pv_tune(quantized("int4"), dense(), tokens(), share=2)


def written(model: Any, directory: Path) -> Path:
    """A directory with a model in bf16 and pico's tokenizer."""
    model = model.to(torch.bfloat16)
    if any(isinstance(m, anybit.QuantLinear) for m in model.modules()):
        anybit.save(model, directory)
    else:
        model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / name, directory)
    return directory


def run(*args: object) -> Any:
    return CliRunner().invoke(app, ["refine", *map(str, args)])


@pytest.mark.parametrize("spec", ["int2:group=32,zero", "trellis:rotate=kn"])
def test_a_checkpoint_is_refined(spec: str, tmp_path: Path) -> None:
    """The KL to the dense model falls; formats, dtype and tokenizer stay, as does the source."""
    model = dense(vocab_size=4096)
    other = written(model, tmp_path / "dense")
    source = written(anybit.quantize_(model, spec), tmp_path / "coarse")
    before = (source / "model.safetensors").read_bytes()
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n\n" * 40)
    options = ["--calibrate", text, "--length", 32, "--samples", 12, "--steps", 12]
    got = run(source, "--dense", other, "-o", tmp_path / "out", *options)
    assert got.exit_code == 0, got.output
    first, last = map(float, re.findall(r"KL on the text ([\d.]+) -> ([\d.]+)", got.output)[0])
    assert last < 0.97 * first
    coarse, fine = (anybit.load(tmp_path / name) for name in ("coarse", "out"))
    assert (source / "model.safetensors").read_bytes() == before
    assert fine.dtype == coarse.dtype == torch.bfloat16
    assert {m.scheme for m in fine.modules() if isinstance(m, anybit.QuantLinear)} == {spec}
    assert (tmp_path / "out/tokenizer.json").is_file()
    again = run(source, "--dense", other, "-o", tmp_path / "out", *options)
    assert again.exit_code == 1
    assert "exists" in again.output


def test_another_models_vocabulary_is_refused(tmp_path: Path) -> None:
    source = written(quantized("int2:group=32"), tmp_path / "coarse")
    got = run(source, "--dense", PICO, "-o", tmp_path / "out")
    assert got.exit_code == 1
    assert "name the dense model that it was made of" in got.output.replace("\n", " ")
    assert not (tmp_path / "out").exists()
