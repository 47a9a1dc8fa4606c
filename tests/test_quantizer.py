"""What `Quantizer` promises to quantizers that anybit does not know."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import anybit
from anybit import GPTQ, HQQ, RTN, Additive, Calibration, Clip, Format, Packed, Smooth
from anybit.checkpoint.calibrated import calibrate_checkpoint
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.errors import InvalidInput
from anybit.nn.model import quantized_layers
from anybit.planning.allocate import plan_formats
from anybit.quantizers.base import Block, Quantizer
from anybit.quantizers.calibration.data import Source
from anybit.quantizers.calibration.statistics import Statistics
from tests.tiny import llama, same_state

IDS = torch.randint(0, 256, (8, 24), generator=torch.Generator().manual_seed(0))


class Coarse(Quantizer):
    """Data-free: nothing but the one method, and no dataclass."""

    def __repr__(self) -> str:
        return "Coarse()"

    def quantize(self, w: Tensor, fmt: Format, statistics: Statistics | None = None) -> Packed:
        grid = fmt.fit(2 * w.float())
        return Packed.from_codes(fmt, (w.shape[0], w.shape[1]), fmt.encode(w.float(), grid), grid)


@dataclass(frozen=True)
class Loud(Quantizer):
    """Calibrated: cuts the weights of quiet channels to zero."""

    calibration: Source | Calibration | None = field(default=None, repr=False)
    kept: float = 0.5

    needs = ("amax",)

    def quantize(self, w: Tensor, fmt: Format, statistics: Statistics | None = None) -> Packed:
        amax = self.check_statistics(statistics).amax
        loud = amax >= amax.quantile(1 - self.kept)
        return RTN().quantize(w.float() * loud, fmt)


def model() -> nn.Module:
    return llama().eval()


def test_data_free(tmp_path: Path) -> None:
    quantized = anybit.quantize_(model(), "int4", Coarse())
    for name, layer in quantized_layers(quantized):
        w = model().get_submodule(name).weight
        want = anybit.get_format("int4").fit(2 * w.float())["scale"]
        assert torch.equal(layer.packed.grid["scale"], want)
        assert torch.equal(
            layer.packed.codes(), anybit.quantize_tensor(w, "int4", Coarse()).codes()
        )
    model().save_pretrained(tmp_path / "dense")
    quantize_checkpoint(tmp_path / "dense", tmp_path / "out", "int4", Coarse())
    same_state(quantized, anybit.load(tmp_path / "out"))


def test_calibrated(tmp_path: Path) -> None:
    quantized = anybit.quantize_(model(), "int8", Loud(IDS))
    for _, layer in quantized_layers(quantized):
        zero = (layer.dequantize() == 0).all(0).float().mean()
        assert 0.4 < zero < 0.6
    model().save_pretrained(tmp_path / "dense")
    calibrate_checkpoint(tmp_path / "dense", tmp_path / "out", "int8", Loud(IDS))
    same_state(quantized, anybit.load(tmp_path / "out"))


def test_as_the_second_of_smooth_and_for_plans() -> None:
    assert Smooth(then=Loud()).needs == ("amax", "mean_abs", "sample", "amax")
    for then in (Coarse(), Loud()):
        assert list(quantized_layers(anybit.quantize_(model(), "int8", Smooth(IDS, then=then))))
        plan = plan_formats(model(), IDS, 6, candidates=("int4", "int8"), quantizer=then)
        exact = plan_formats(model(), IDS, 6, candidates=("int4", "int8"), quantizer=RTN())
        worst = [max(option.loss for option in group.options) for group in plan.groups]
        least = [max(option.loss for option in group.options) for group in exact.groups]
        assert sum(worst) > sum(least)


def test_smooth_leaves_blocks_to_its_second() -> None:
    calls = []

    @dataclass(frozen=True)
    class Watching(Loud):
        whole_block = True

        def quantize_block(self, block: Block) -> None:
            calls.append(sorted(block.schemes))
            super().quantize_block(block)

    quantizer = Smooth(IDS, then=Watching())
    assert quantizer.whole_block
    count = len(list(quantized_layers(anybit.quantize_(model(), "int4", quantizer))))
    assert sum(map(len, calls)) == count


@pytest.mark.parametrize("quantizer", [GPTQ(IDS), Additive(IDS), Loud(IDS), Smooth(then=GPTQ())])
def test_without_statistics(quantizer: Quantizer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs statistics of the layer's inputs"):
        anybit.quantize_tensor(torch.randn(8, 64), "int4", quantizer)
    with pytest.raises(ValueError, match="needs calibration; use calibrate_checkpoint"):
        quantize_checkpoint(tmp_path, tmp_path / "out", "int4", quantizer)


@pytest.mark.parametrize("quantizer", [GPTQ(), Additive()])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_statistics_that_are_no_numbers(quantizer: Quantizer, bad: float) -> None:
    seen = Statistics(tokens=9, hessian=torch.eye(64))
    seen.hessian[3, 3] = bad
    with pytest.raises(InvalidInput, match="statistics of the layer's inputs hold NaN or inf"):
        quantizer.quantize(torch.randn(8, 64), anybit.get_format("int4"), seen)


def test_calibration_is_asked_for_before_any_work() -> None:
    with pytest.raises(ValueError, match=r"Loud needs data to calibrate on: Loud\(calibration="):
        anybit.quantize_(nn.Linear(4, 4), "int4", Loud())


def test_settings_of_a_run_are_the_quantizers_and_not_the_data() -> None:
    settings = "damping=0.1, act_order=True, clip=True, follow=False, gradients=False"
    assert repr(GPTQ(["text"])) == f"GPTQ({settings})"
    assert repr(Smooth(["text"], then=Clip())) == "Smooth(then=Clip())"


@pytest.mark.parametrize("quantizer", [RTN(), Clip(), HQQ(), GPTQ(), Additive()], ids=repr)
@pytest.mark.parametrize("spec", ["int1:group=32", "iq4_nl:group=32", "codebook:m=1,v=8,uniform=1"])
def test_zeros_stay_zeros_where_no_code_stands_for_them(quantizer: Quantizer, spec: str) -> None:
    w = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) * 0.02
    w[3] = 0
    seen = Statistics(tokens=100, hessian=torch.eye(64))
    given = (seen,) if quantizer.needs else ()
    decoded = quantizer.quantize(w, anybit.get_format(spec), *given).dequantize()
    assert not decoded[3].any()
    assert (decoded - w).norm() < 0.7 * w.norm()
