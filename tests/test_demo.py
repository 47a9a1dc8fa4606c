"""The demo on a part of its formats and tokens, and what must hold of its figures."""

import json
import struct
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import anybit
from anybit.cli import demo as demo_module
from anybit.cli.demo import PROMPT, Results, Row, demo
from anybit.evaluate.corpus import held_out_text
from anybit.evaluate.model import encode, load_text_model
from anybit.evaluate.perplexity import excerpts, score

TOKENS = 1024
LADDER = ("int8", "fp6", "int3")  # from the least KL divergence to the most
PICO = demo_module.pico()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Path, str]:
    """Results, directory and terminal output of one run."""
    out = tmp_path_factory.mktemp("demo")
    with (out / "terminal").open("w") as file:
        results = demo([*LADDER, "liquid"], TOKENS, out, Console(file=file, width=80))
    return results, out, (out / "terminal").read_text()


def rows(results: Results) -> dict[str, Row]:
    return {row.spec: row for row in results.rows}


def test_more_bits_diverge_less(run: tuple[Results, Path, str]) -> None:
    by_spec = rows(run[0])
    kl = [by_spec[spec].kl for spec in LADDER]
    assert kl == sorted(kl)
    assert 0 < kl[0] < 0.002
    agreement = [by_spec[spec].agreement for spec in LADDER]
    assert agreement == sorted(agreement, reverse=True)
    assert by_spec["bf16"].kl == 0
    assert by_spec["bf16"].agreement == 1


@pytest.mark.parametrize(("spec", "limit"), [("int8", 0.001), ("fp6", 0.005), ("liquid", 0.03)])
def test_perplexity_stays_within_its_limit(
    run: tuple[Results, Path, str], spec: str, limit: float
) -> None:
    by_spec = rows(run[0])
    assert by_spec[spec].perplexity / by_spec["bf16"].perplexity - 1 < limit


def test_rows_equal_the_figures_worked_out_directly(run: tuple[Results, Path, str]) -> None:
    dense, tokenizer = load_text_model(PICO, "cpu")
    documents = excerpts([encode(tokenizer, text) for _, text in held_out_text()], TOKENS)
    packed, decoded = 0, dense.float()
    count = 0
    for layer in decoded.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            weight = anybit.quantize_tensor(layer.weight, "fp6")
            layer.weight.data = weight.dequantize()
            packed, count = packed + weight.nbytes(), count + layer.weight.numel()
    got, row = score(decoded, documents, window=1024), rows(run[0])["fp6"]
    assert row.perplexity == pytest.approx(got.perplexity, rel=1e-4)
    assert row.bits == pytest.approx(packed * 8 / count)
    saved = sum(file.stat().st_size for file in (run[1] / "fp6").glob("*.safetensors"))
    assert row.bytes == saved
    kept = (decoded.num_parameters() - count) * 2
    assert packed + kept <= saved <= packed + kept + 64_000  # and the header of the file


def test_it_shows_saves_and_completes(run: tuple[Results, Path, str]) -> None:
    results, out, terminal = run
    stored = json.loads((out / "results.json").read_text())
    assert [row["spec"] for row in stored["rows"]] == ["bf16", *LADDER, "liquid"]
    assert stored["rows"][2]["kl"] == results.rows[2].kl
    for row in results.rows:
        assert f"{row.kl:.5f}" in terminal
    assert results.completion.startswith(PROMPT)
    assert len(results.completion) > len(PROMPT) + 20
    model, _ = load_text_model(out / "fp6")
    assert model.model.layers[0].mlp.up_proj.scheme == "fp6"


def test_formats_write_the_same_beginning_on(run: tuple[Results, Path, str]) -> None:
    results, _, terminal = run
    by_spec = rows(results)
    assert by_spec["bf16"].text == by_spec["int8"].text  # rounding to 8 bits leaves it as it was
    assert "ValueError" in by_spec["bf16"].text
    assert "\nbf16, int8" in terminal
    for row in results.rows:
        assert row.text.strip().splitlines()[0] in terminal


def test_the_picture_is_a_png(run: tuple[Results, Path, str]) -> None:
    _, out, _ = run
    png = (out / "size_vs_kl.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", png[16:24]) == (1440, 864)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("int9", "unknown format 'int9'"),
        ("int4:groups=3", "unknown option 'groups'"),
        ("fp6:group=96", "K=256 is not a multiple of group=96"),
    ],
)
def test_bad_formats_are_refused_before_any_work(spec: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        demo(["int8", spec], TOKENS, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_model_is_an_error_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(anybit, "__file__", str(tmp_path / "anybit" / "__init__.py"))
    with pytest.raises(FileNotFoundError, match="run `make demo`"):
        demo(LADDER, TOKENS, tmp_path / "out")


def test_missing_matplotlib_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"anybit\[plot\]"):
        demo(LADDER, TOKENS, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_process_that_cannot_load_the_checkpoint_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_module, "FRESH", "raise OSError('no such disk')")
    with pytest.raises(ChildProcessError, match=r"(?s)a fresh process could not load.*such disk"):
        demo_module.complete_afresh(tmp_path)
