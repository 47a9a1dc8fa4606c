"""The accuracy study: formats by quantizers on one model, against the same model in bf16.

Perplexity, KL and agreement on all held-out modules of the standard library, and how often greedy
completions of their functions parse. Calibrated on other modules ("code"), on the prose of the
language reference ("prose"), or on text that the model was trained on ("train"). Weights are
decoded and multiplied in fp32, 8-bit activations are real int8 codes: the figures hold for every
kernel that computes what the reference defines.

    python benchmarks/study.py build/study --jobs 2 --seconds 280 --out h200_accuracy.csv
    python benchmarks/study.py models/pico --jobs 2 --tokens 20000 --cases core --out pico.csv

The model's folder may hold `tuning.pt`, token ids (windows, length) of its training text, on which
PV-tuning works, too. Rows are written
as they finish; none is begun when the time is up.
"""

import argparse
import csv
import datetime
import multiprocessing
import platform
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import anybit  # noqa: E402
from anybit import GPTQ, HQQ, RTN, Additive, Calibration, Clip, QuantLinear, Smooth  # noqa: E402
from anybit.dispatch import BACKENDS, parse_scheme  # noqa: E402
from anybit.evaluate.corpus import calibration_text, held_out_text, module_path  # noqa: E402
from anybit.evaluate.generation import function_prompts, parse_rate  # noqa: E402
from anybit.evaluate.perplexity import Remembered, excerpts, score  # noqa: E402
from anybit.kernels.reference import quantized_activation  # noqa: E402

WINDOW, STRIDE = 1024, 768
SAMPLES = 128  # calibration windows, unless told
PROMPTS, COMPLETION = 128, 96  # functions to complete, and tokens of each completion
M2V8, M1V4, TABLE = (
    "codebook:m=2,v=8,b=8,group=128",
    "codebook:m=1,v=4,b=8,group=128",
    "codebook:m=1,v=1,b=4,group=64",
)
# Methods are "quantizer[/text][:samples]"; "+" joins two, of which the second follows the first.
CORE = {
    "int2:group=128": "gptq+pv gptq rtn clip hqq gptq/prose",
    M2V8: "additive+pv additive additive/prose rtn gptq",
    "int4:group=128": "rtn clip hqq gptq gptq/prose smooth smooth+gptq",
    "int4": "rtn clip hqq gptq gptq/prose",
    "fp6": "rtn clip hqq gptq smooth+gptq",
    "fp6:group=128": "rtn gptq",
    "int3:group=128": "rtn clip hqq gptq gptq/prose",
    "liquid@int8": "rtn clip hqq gptq smooth smooth+gptq smooth+gptq/prose",
    "int4:group=128@int8": "rtn smooth smooth+gptq",
    "int8@int8": "rtn smooth",
}
MORE = {
    "int3": "rtn clip hqq gptq gptq/prose",
    "fp5": "rtn clip hqq gptq",
    "fp5:group=128": "rtn gptq",
    "fp4": "rtn clip hqq gptq",
    "fp4:group=128": "rtn gptq",
    "sparse": "rtn gptq",
    "int4:group=64,zero": "rtn clip hqq gptq",
    "int2:group=32,zero": "rtn clip hqq gptq",
    "liquid": "rtn gptq smooth smooth+gptq",
    "int8": "rtn",
    M1V4: "rtn gptq additive",
    TABLE: "rtn gptq additive",
    M2V8: "additive+tune additive:16 additive/train:512 additive+pv/train:512",
}
LONGEST_FIRST = ("+pv", "+tune", "additive")


@dataclass
class Row:
    """One measurement. Losses are in nats per token against bf16; errors are standard errors.

    bits: stored bits a weight. parse_rate: part of the greedy completions that parse. seconds:
    that quantizing took, beside other processes on the same device.
    """

    model: str
    spec: str
    method: str
    text: str
    samples: int
    bits: float
    tokens: int
    perplexity: float
    perplexity_error: float
    loss: float
    loss_error: float
    kl: float
    agreement: float
    parse_rate: float
    seconds: float


class Work:
    """What a process needs for its rows: the model, the text, the dense model's logits."""

    def __init__(
        self,
        folder: Path,
        device: str,
        tokens: int | None,
        prompts: int,
        steps: int,
        samples: int,
    ):
        for name in ("hopper", "triton", "cpu"):  # the definition, in calibration too
            BACKENDS.pop(name, None)
        torch.set_num_threads(1)  # processes share the cores
        self.folder, self.device, self.steps, self.samples = folder, device, steps, samples
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.dense = Remembered(self.fresh(), 12 << 30)
        self.window = min(WINDOW, self.dense.model.config.max_position_embeddings)
        encoded = [self.tokenizer(t, verbose=False).input_ids for _, t in held_out_text()]
        documents = [torch.tensor([self.tokenizer.bos_token_id, *ids]) for ids in encoded]
        self.documents = [ids.to(device) for ids in excerpts(documents, tokens)]
        self.prompts = function_prompts(held_out_text(), prompts)

    def fresh(self) -> Any:
        """The dense model, in fp32."""
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        return model.to(self.device).eval()

    def text(self, kind: str) -> Tensor:
        """Token ids to calibrate with."""
        if kind == "train":
            return self.tuning_windows().flatten()
        if kind == "prose":
            path = module_path("pydoc_data.topics")
            paths = [path] if path.is_file() else sorted((ROOT / "docs").glob("*.md"))
            texts = [path.read_text("utf-8") for path in paths]
        else:
            texts = [text for _, text in calibration_text()]
        return torch.cat([torch.tensor(self.tokenizer(t, verbose=False).input_ids) for t in texts])

    def calibration(self, kind: str, samples: int) -> Calibration:
        """`samples` windows, which begin every few tokens where the text is short of that."""
        ids = self.text(kind)
        starts = torch.linspace(0, len(ids) - self.window, samples).long().tolist()
        return Calibration(torch.stack([ids[at : at + self.window] for at in starts]))

    def tuning_windows(self) -> Tensor:
        """Text that the model was trained on (windows, length); pico's is the "code"."""
        path = self.folder / "tuning.pt"
        if path.is_file():
            return torch.load(path)[:, : self.window]
        ids = self.calibration("code", 4 * self.samples).source
        assert isinstance(ids, Tensor)
        return ids

    def quantizer(self, name: str, text: Calibration) -> Any:
        return {
            "rtn": RTN,
            "clip": Clip,
            "hqq": HQQ,
            "gptq": lambda: GPTQ(text),
            "smooth": lambda: Smooth(text, then=Clip()),
            "smooth+gptq": lambda: Smooth(text, then=GPTQ()),
            "additive": lambda: Additive(text),
        }[name]()

    def measure(self, spec: str, method: str) -> Row:
        torch.manual_seed(0)
        name, kind, samples = parse(method, self.samples)
        torch.set_float32_matmul_precision("highest")
        model, start, bits = self.fresh(), time.perf_counter(), 16.0
        if spec != "bf16":
            first, _, then = name.rpartition("+") if name.endswith(("pv", "tune")) else (name, 0, 0)
            text = self.calibration(kind, samples)
            anybit.quantize_(model, spec, self.quantizer(first, text), show_progress=False)
            if then:
                torch.set_float32_matmul_precision("high")
                self.tune(model, share=0.002 if then == "pv" else 0.0)
            bits = decode(model)
        seconds = time.perf_counter() - start
        # TF32 for weights alone; int8 products are exact in fp32.
        torch.set_float32_matmul_precision("highest" if "@" in spec else "high")
        batch = 16 if self.device == "cuda" else 1
        window, stride = self.window, self.window * STRIDE // WINDOW
        got = score(
            model, self.documents, window=window, stride=stride, dense=self.dense, batch=batch
        )
        batch = 128 if self.device == "cuda" else 4
        torch.cuda.empty_cache()
        rate = parse_rate(model, self.tokenizer, self.prompts, tokens=COMPLETION, batch=batch)
        return Row(
            model=self.folder.name,
            spec=spec,
            method=name,
            text=kind if calibrated(name) else "",
            samples=samples if calibrated(name) else 0,
            bits=round(bits, 3),
            tokens=got.tokens,
            perplexity=round(got.perplexity, 4),
            perplexity_error=round(got.perplexity_error, 4),
            loss=round(got.loss or 0.0, 6),
            loss_error=round(got.loss_error or 0.0, 6),
            kl=round(got.kl or 0.0, 7),
            agreement=round(got.agreement or 0.0, 5),
            parse_rate=round(rate, 4),
            seconds=round(seconds, 1),
        )

    def tune(self, model: nn.Module, share: float) -> None:
        anybit.pv_tune(
            model,
            self.dense.model,
            Calibration(self.tuning_windows()),
            steps=self.steps,
            batch=8,
            share=share,
            show_progress=False,
        )


class Int8Input(nn.Linear):
    """A linear layer that quantizes its input to int8 per token, as the reference does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(quantized_activation(x, "int8"))


def decode(model: nn.Module) -> float:
    """Put decoded weights in place of quantized ones; bits a weight of what was there."""
    total = weights = 0
    for name, layer in list(model.named_modules()):
        if isinstance(layer, QuantLinear):
            n, k = layer.packed.shape
            total, weights = total + layer.packed.nbytes() * 8, weights + n * k
            new = (Int8Input if layer.activation else nn.Linear)(k, n, bias=False, device="meta")
            new.weight = nn.Parameter(layer.dequantize(), requires_grad=False)
            new.bias = layer.bias
            model.set_submodule(name, new)
    return total / weights


def parse(method: str, default: int) -> tuple[str, str, int]:
    """`"gptq/prose:64"` -> quantizer, kind of text, samples."""
    rest, _, samples = method.partition(":")
    name, _, kind = rest.partition("/")
    return name, kind or "code", int(samples or default)


def calibrated(name: str) -> bool:
    return name not in ("dense", "rtn", "clip", "hqq")


WORK: Work  # of this process


def start(*args: Any) -> None:
    global WORK
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    WORK = Work(*args)


def measure(spec: str, method: str) -> Row:
    return WORK.measure(spec, method)


def cases(kind: str) -> list[tuple[str, str]]:
    """(spec, method), the longest first, else format by format; MORE after CORE."""

    def of(table: dict[str, str]) -> list[tuple[str, str]]:
        return [(spec, method) for spec, methods in table.items() for method in methods.split()]

    def rank(case: tuple[str, str]) -> int:
        return next((i for i, kind in enumerate(LONGEST_FIRST) if kind in case[1]), 9)

    for spec in (*CORE, *MORE):
        parse_scheme(spec)
    if kind == "smoke":
        return [
            ("bf16", "dense"),
            ("liquid@int8", "smooth+gptq/prose"),
            (M2V8, "additive+pv/train:4"),
        ]
    core = sorted(of(CORE), key=rank)
    if kind == "light":  # what a CPU can do
        core = [case for case in core[::-1] if not case[1].endswith("+pv")]
    return [("bf16", "dense"), *core, *(of(MORE) if kind == "all" else [])]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+", help="folders, measured one after another")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--tokens", type=int, help="tokens to score, of the modules' middle (all)")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help=f"functions ({PROMPTS})")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"windows ({SAMPLES})")
    parser.add_argument("--steps", type=int, default=600, help="of PV-tuning (600)")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row after this time")
    parser.add_argument("--cases", choices=("all", "core", "light", "smoke"), default="all")
    parser.add_argument("--out", type=Path, required=True, help="the .csv file to add rows to")
    args = parser.parse_args()
    began = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    about = {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "date": str(datetime.datetime.now(datetime.UTC).date()),
        "versions": f"anybit {anybit.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}",
    }

    def save(row: Row) -> None:
        new = not args.out.exists()
        with args.out.open("a", newline="") as file:
            cells = asdict(row) | about
            writer = csv.DictWriter(file, [*cells], lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(cells)
        print(f"{time.perf_counter() - began:5.0f} s", *asdict(row).values(), flush=True)

    context = multiprocessing.get_context("spawn")
    for folder in args.models:
        settings = (folder, device, args.tokens, args.prompts, args.steps, args.samples)
        with ProcessPoolExecutor(args.jobs, context, start, settings) as pool:
            run(pool, cases(args.cases), save, lambda: time.perf_counter() - began > args.seconds)


def run(
    pool: ProcessPoolExecutor,
    todo: list[tuple[str, str]],
    save: Callable[[Row], None],
    over: Callable[[], bool],
) -> None:
    """Measure the cases in order, a few at a time; after `over`, begin no more."""
    waiting, going, failed = list(reversed(todo)), {}, []
    jobs = pool._max_workers  # type: ignore[attr-defined]
    while going or (waiting and not over()):
        while waiting and len(going) < jobs and not over():
            case = waiting.pop()
            going[pool.submit(measure, *case)] = case
        for done in wait(going, timeout=5, return_when=FIRST_COMPLETED).done:
            case = going.pop(done)
            error = done.exception()
            if error is None:
                save(done.result())
            else:
                failed.append(case)
                print(*case, "failed:", repr(error)[:500], flush=True)
    print(f"{len(failed)} failed, {len(waiting)} not begun: {failed + waiting[::-1]}", flush=True)


if __name__ == "__main__":
    main()
