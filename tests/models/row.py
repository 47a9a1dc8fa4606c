"""One architecture through anybit: each step of `STEPS`, and what became of it."""

import copy
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import anybit
from anybit.checkpoint.calibrated import calibrate_checkpoint
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.errors import AnybitError, Unsupported
from anybit.nn.model import quantized_layers
from tests.models.zoo import CAUSAL, TOKENS, Model, inputs

STEPS = ("memory", "load", "from_pretrained", "on_load", "stream", "gptq", "gptq_stream", "engine")
SPEC = "fp6"  # holds the weights of `representable` exactly
CALIBRATED = "int3"  # does not
TOLERANCE = 1e-3  # relative; the same product by another kernel sums in another order


@dataclass
class Row:
    """What became of one architecture.

    quantized: The share of its weights, those of embeddings and heads aside, that is quantized.
    cells: "equal", "refused" in words of anybit's, "wrong", which is a bug, or "-", by step.
    notes: Why a cell is refused or wrong.
    image: Whether it was given an image beside the tokens.
    unable: Why transformers cannot run its own tiny model; there are no cells then.
    """

    architecture: str
    quantized: float | None = None
    cells: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    image: bool = False
    unable: str | None = None
    seconds: float = 0.0


class Wrong(Exception):
    """Another result than the right one, without an error."""


def rows(architecture: str, folder: Path, steps: Sequence[str] = STEPS) -> Iterator[Row]:
    """The row of one architecture, after each step anew.

    Args:
        architecture: A class of transformers.
        folder: An empty directory for its checkpoints.
        steps: Which of `STEPS`; "memory" is taken in any case, since the others compare with it.
    """
    start, row = time.monotonic(), Row(architecture)
    try:
        model = Model(architecture)
        dense = representable(model.make())
        given = inputs(dense)
        expected = forward(dense, given)
        dense.save_pretrained(folder / "source")
        again = model.type.from_pretrained(folder / "source").eval()
        same_state(again, dense)
        close(forward(again, given), expected)
    except Exception as error:
        row.unable = said(error)
        yield row
        return
    row.image = {"input_ids", "pixel_values"} <= given.keys()
    run = Run(model, dense, given, expected, folder)
    for step in ("memory", *(s for s in steps if s != "memory")):
        row.cells[step], note = outcome(getattr(run, step))
        if note:
            row.notes[step] = note.replace(str(folder), "DIR")
        row.quantized, row.seconds = run.share, time.monotonic() - start
        yield row


def outcome(step: Callable[[], str | None]) -> tuple[str, str | None]:
    """The cell of one step, and why it is refused or wrong."""
    try:
        return step() or "equal", None
    except Wrong as error:
        return "wrong", str(error)
    except AnybitError as error:
        return "refused", str(error).split("\n")[0]
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return "wrong", f"{said(error)} ({Path(last.filename).name}:{last.lineno})"


class Run:
    """The steps of one architecture: each returns None when all is equal, "-", or raises."""

    def __init__(
        self,
        model: Model,
        dense: PreTrainedModel,
        given: dict[str, Tensor],
        expected: Tensor,
        folder: Path,
    ):
        self.model, self.dense, self.given, self.expected = model, dense, given, expected
        self.folder, self.source, self.saved = folder, folder / "source", folder / "saved"
        self.quantized: PreTrainedModel | None = None
        self.share: float | None = None

    def memory(self) -> None:
        quantized = anybit.quantize_(copy.deepcopy(self.dense), SPEC)
        self.share = share(quantized, self.dense)
        if not self.share:
            raise Wrong("no weight is quantized")
        with unrefused():
            close(forward(quantized, self.given), self.expected)
            close(forward(anybit.dequantize_(copy.deepcopy(quantized)), self.given), self.expected)
        self.quantized = quantized

    def load(self) -> str | None:
        if self.quantized is None:
            return "-"
        with unrefused():
            self.save()
            self.compare(anybit.load(self.saved))
        return None

    def from_pretrained(self) -> str | None:
        if self.quantized is None:
            return "-"
        with unrefused():
            self.save()
            self.compare(self.read(self.saved))
        return None

    def on_load(self) -> None:
        self.compare(self.read(self.source, quantization_config=anybit.AnybitConfig(SPEC)))

    def stream(self) -> None:
        out = self.folder / "stream"
        refused_before_work(lambda: quantize_checkpoint(self.source, out, SPEC), out)
        with unrefused():
            self.compare(self.read(out))

    def gptq(self) -> str | None:
        if "input_ids" not in self.given or self.quantized is None:
            return "-"
        self.calibrated = anybit.quantize_(copy.deepcopy(self.dense), CALIBRATED, self.quantizer())
        if names(self.calibrated) != names(self.quantized):
            raise Wrong("calibration quantizes other layers than rounding does")
        if not forward(self.calibrated, self.given).isfinite().all():
            raise Wrong("the outputs are not finite")
        return None

    def gptq_stream(self) -> str | None:
        if "input_ids" not in self.given or self.quantized is None:
            return "-"
        out, plan = self.folder / "calibrated", {"*": CALIBRATED}
        refused_before_work(
            lambda: calibrate_checkpoint(self.source, out, plan, self.quantizer()), out
        )
        with unrefused():
            same_state(self.read(out), self.calibrated)
        return None

    def engine(self) -> str | None:
        if self.model.architecture not in CAUSAL or self.quantized is None:
            return "-"
        self.save()
        prompts = [list(range(4, 12)), list(range(20, 32))]
        llm = anybit.LLM(str(self.saved), device="cpu", dtype="float32")
        out = llm.generate(prompts, anybit.SamplingParams(temperature=0, max_tokens=8))
        if errors := [o.completions[0].error for o in out if o.completions[0].error]:
            raise (Unsupported if errors[0].startswith("Unsupported: ") else Wrong)(errors[0])
        wanted = [
            self.quantized.generate(  # type: ignore[operator]
                torch.tensor([p]), max_new_tokens=8, do_sample=False
            )[0, len(p) :].tolist()
            for p in prompts
        ]
        if (found := [o.tokens for o in out]) != wanted:
            raise Wrong(f"the engine writes {found}, transformers {wanted}")
        return None

    def save(self) -> None:
        if not self.saved.exists():
            anybit.save(self.quantized, self.saved)

    def read(self, path: Path, **options: Any) -> PreTrainedModel:
        loaded: Any = self.model.type.from_pretrained(path, output_loading_info=True, **options)
        model, info = loaded
        if lost := {kind: sorted(names)[:3] for kind, names in info.items() if names}:
            raise Wrong(f"loading lost tensors: {lost}")
        return model.eval()  # type: ignore[no-any-return]

    def compare(self, found: PreTrainedModel) -> None:
        """Raise Wrong unless a model is the one that was quantized in memory."""
        if self.quantized is None:
            raise Wrong("in memory this model is refused, or wrong")
        same_state(found, self.quantized)
        close(forward(found, self.given), self.expected)

    def quantizer(self) -> Any:
        random = torch.Generator().manual_seed(2)
        return anybit.GPTQ(torch.randint(TOKENS.start, TOKENS.stop, (2, 32), generator=random))


class unrefused:
    """Turns refusals into Wrong: what anybit itself has quantized or written it must run."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, AnybitError):
            raise Wrong(f"refused after the work is done: {error}".split("\n")[0]) from error


def refused_before_work(work: Callable[[], object], out: Path) -> None:
    """Do it; a refusal must leave nothing behind."""
    try:
        work()
    except AnybitError as error:
        if left := [p.name for p in out.parent.glob(out.name + "*")]:
            raise Wrong(f"refused, but left {left}: {error}".split("\n")[0]) from error
        raise


@torch.no_grad()
def representable(model: PreTrainedModel) -> PreTrainedModel:
    """Round weights to 1.75 times powers of two, in place, which fp6 holds without error.

    So the model itself says what its quantized form must compute, whatever the layout of a weight.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for weight in model.parameters():
        if weight.ndim > 1 and id(weight) not in embeddings:
            if not weight.std() > 0:  # a constant says nothing about the order of weights
                weight.normal_()
            size = weight.abs() / weight.abs().mean()
            level = torch.bucketize(size, torch.tensor([0.5, 1.5])) - 7
            weight.copy_(1.75 * torch.where(weight < 0, -1.0, 1.0) * torch.exp2(level.float()))
    return model


@torch.no_grad()
def forward(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """The model's first output, fp32."""
    torch.manual_seed(0)
    return model(**given)[0].float()


def share(quantized: nn.Module, dense: PreTrainedModel) -> float:
    """How many weights of matrices are quantized, embeddings and heads aside."""
    apart = [m for m in dense.modules() if isinstance(m, nn.Embedding)]
    apart += [head] if (head := dense.get_output_embeddings()) is not None else []
    other = {id(weight) for module in apart for weight in module.parameters()}
    matrices = sum(p.numel() for p in dense.parameters() if p.ndim > 1 and id(p) not in other)
    layers = dict(quantized_layers(quantized)).values()
    return sum(m.out_features * m.in_features for m in layers) / max(matrices, 1)


def names(model: nn.Module) -> set[str]:
    return {name for name, _ in quantized_layers(model)}


def same_state(found: nn.Module, wanted: nn.Module) -> None:
    """Raise Wrong unless two models have the same tensors, bit for bit."""
    a, b = found.state_dict(), wanted.state_dict()
    if a.keys() != b.keys():
        raise Wrong(f"other tensors than in memory: {sorted(a.keys() ^ b.keys())[:4]}")
    other = [n for n in a if a[n].dtype != b[n].dtype or not torch.equal(a[n], b[n])]
    if other:
        raise Wrong(f"{len(other)} tensors differ from those in memory: {other[:3]}")


def close(found: Tensor, wanted: Tensor) -> None:
    """Raise Wrong unless two outputs are equal but for the order of sums."""
    if found.shape != wanted.shape:
        raise Wrong(f"the output has shape {tuple(found.shape)}, not {tuple(wanted.shape)}")
    if not (found - wanted).norm() <= TOLERANCE * wanted.norm():  # NaN is wrong, too
        cosine = nn.functional.cosine_similarity(found.flatten(), wanted.flatten(), 0)
        raise Wrong(f"cosine {cosine:.4f} to the dense model of the same weights")


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]
