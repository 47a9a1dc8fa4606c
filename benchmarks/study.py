"""The accuracy study: formats by quantizers on one model, against the same model in bf16.

Perplexity, KL and agreement on all held-out modules of the standard library or on a folder of
prose, and how often greedy completions of the modules' functions parse. Calibrated on other modules
("code"), on the prose of the language reference ("prose"), on both in turns ("mixed"), or on text
that the model was trained on ("train"). Weights are
decoded and multiplied in fp32, 8-bit activations are real int8 codes: the figures hold for every
kernel that computes what the reference defines.

    python benchmarks/study.py build/study-105m --jobs 2 --seconds 280 --out h200_accuracy.csv
    python benchmarks/study.py models/pico --jobs 2 --tokens 20000 --cases core --out pico.csv
    python benchmarks/study.py SmolLM2-135M-Instruct --cases published --text book/src \
        --tokens 60000 --steps 150 --out h200_published.csv

The model's folder may hold `tuning.pt`, token ids (windows, length) of its training text, on which
PV-tuning works, too. The cases are measured in order of importance, and rows written as they
finish; no row is begun when the time is up, and those that are left are named at the end.
"""

import argparse
import copy
import dataclasses
import datetime
import multiprocessing
import platform
import queue
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import transformers  # noqa: E402
from csv_rows import add_rows  # noqa: E402
from study_cases import FOLDED, KINDS, cases  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import anybit  # noqa: E402
from anybit import GPTQ, HQQ, RTN, Additive, Calibration, Clip, QuantLinear, Smooth  # noqa: E402
from anybit.core.packed import Packed  # noqa: E402
from anybit.core.scheme import parse_scheme, scheme_name  # noqa: E402
from anybit.evaluate.corpus import calibration_text, held_out_text, module_path  # noqa: E402
from anybit.evaluate.generation import function_prompts, parse_rate  # noqa: E402
from anybit.evaluate.perplexity import Remembered, excerpts, score  # noqa: E402
from anybit.kernels.between import seen_by  # noqa: E402
from anybit.kernels.registry import BACKENDS  # noqa: E402
from anybit.planning.allocate import plan_formats  # noqa: E402
from anybit.quantizers.calibration.chat import before_text  # noqa: E402

WINDOW, STRIDE = 1024, 768
SAMPLES = 128  # calibration windows, unless told
PROMPTS, COMPLETION = 128, 96  # functions to complete, and tokens of each completion
LONG = 60  # seconds that a case of calibrated codebooks wants before the time is up
PATIENCE = 600  # seconds after which rows begun before the deadline are given up


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
    parse_rate: float | None
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
        text: Path | None,
    ):
        self.texts: dict[str, Tensor] = {}
        self.tuned_on = "mixed" if text else "code"
        for name in ("hopper", "mma", "triton", "native", "cpu"):
            # What is left is the definition, in calibration too.
            BACKENDS.pop(name, None)
        torch.set_num_threads(1)  # processes share the cores
        self.folder, self.device, self.steps, self.samples = folder, device, steps, samples
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.dense = Remembered(model.to(device).eval(), 12 << 30)
        self.plans: dict[str, dict[str, str | None]] = {}
        self.window = min(WINDOW, self.dense.model.config.max_position_embeddings)
        scored = prose(text) if text else [module for _, module in held_out_text()]
        self.begin = before_text(self.tokenizer)
        documents = [torch.tensor(self.tokenizer(t, verbose=False).input_ids) for t in scored]
        self.documents = [ids.to(device) for ids in excerpts(documents, tokens, self.begin)]
        self.prompts = function_prompts(held_out_text(), prompts)

    def fresh(self) -> Any:
        """A copy of the dense model, in fp32."""
        return copy.deepcopy(self.dense.model)

    def text(self, kind: str) -> Tensor:
        """Token ids to calibrate with."""
        if kind not in self.texts:
            self.texts[kind] = self.tokenized(kind)
        return self.texts[kind]

    def tokenized(self, kind: str) -> Tensor:
        if kind == "train":
            return self.tuning_windows().flatten()
        if kind == "mixed":
            halves = [self.text(half).split(self.window) for half in ("prose", "code")]
            return torch.cat([ids for pair in zip(*halves, strict=False) for ids in pair])
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
        """Text that the model was trained on (windows, length), or what else there is."""
        path = self.folder / "tuning.pt"
        if path.is_file():
            return torch.load(path)[:, : self.window]
        ids = self.calibration(self.tuned_on, 4 * self.samples).source
        assert isinstance(ids, Tensor)
        return ids

    def quantizer(self, name: str, text: Calibration) -> Any:
        return {
            "rtn": RTN,
            "clip": Clip,
            "hqq": HQQ,
            "gptq": lambda: GPTQ(text),
            "follow": lambda: GPTQ(text, follow=True),
            "gptq-gradients": lambda: GPTQ(text, gradients=True),
            "additive-gradients": lambda: Additive(text, gradients=True),
            "smooth": lambda: Smooth(text, then=Clip()),
            "smooth+gptq": lambda: Smooth(text, then=GPTQ()),
            "additive": lambda: Additive(text),
        }[name]()

    def scheme(self, spec: str) -> str | dict[str, str | None]:
        """What `quantize_` takes; a plan is made once, from the sensitivity of clipped layers."""
        if spec.startswith(FOLDED):
            fmt, activation = parse_scheme(spec.removeprefix(FOLDED))
            rotated = dataclasses.replace(fmt, rotate="k")
            schemes = [scheme_name(f, activation) for f in (fmt, rotated)]
            return {"*": schemes[0], "*.down_proj": schemes[1]}
        name, _, bits = spec.partition("plan:")
        if name:
            return spec
        if spec not in self.plans:
            text = self.calibration(self.tuned_on, self.samples // 4)
            plan = plan_formats(self.fresh(), text, bits=float(bits), show_progress=False)
            print(plan.table(), flush=True)
            self.plans[spec] = plan.plan
        return self.plans[spec]

    def quantize(self, spec: str, method: str) -> nn.Module:
        """A quantized copy of the model, without the tuning that the method may end in."""
        name, kind, samples = parse(method, self.samples)
        torch.manual_seed(0)
        # Tuned by gradients in TF32; statistics of the others are exact.
        torch.set_float32_matmul_precision("high" if "additive" in name else "highest")
        model, text = self.fresh(), self.calibration(kind, samples)
        if spec.startswith(FOLDED):
            anybit.rotate_(model)
        scheme = self.scheme(spec)
        anybit.quantize_(model, scheme, self.quantizer(name, text), show_progress=False)
        return model

    def case(self, spec: str, methods: list[str], save: Callable[[Row], None]) -> None:
        """Measure a spec by several methods; "a+pv" goes on from what "a" has made."""
        made, model, seconds = "", self.fresh(), 0.0
        for method in methods:
            start = time.perf_counter()
            first = method.replace("+pv", "").replace("+tune", "")
            if first == made:
                start -= seconds
            elif spec != "bf16":
                model, made = self.quantize(spec, first), first
            if first != method:
                torch.manual_seed(0)
                torch.set_float32_matmul_precision("high")
                self.tune(model, share=0.002 if "+pv" in method else 0.0)
                made = method
            if self.device == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            save(self.measure(spec, method, model, seconds))

    def measure(self, spec: str, method: str, quantized: nn.Module, seconds: float) -> Row:
        name, kind, samples = parse(method, self.samples)
        model: Any = copy.deepcopy(quantized)
        bits = decode(model) if spec != "bf16" else 16.0
        # TF32 for weights alone; int8 products are exact in fp32.
        torch.set_float32_matmul_precision("highest" if "@" in spec else "high")
        batch = 16 if self.device == "cuda" else 1
        window, stride = self.window, self.window * STRIDE // WINDOW
        got = score(
            model,
            self.documents,
            window=window,
            stride=stride,
            begin=self.begin,
            dense=self.dense,
            batch=batch,
        )
        batch = 128 if self.device == "cuda" else 4
        torch.cuda.empty_cache()
        rate = None
        if self.prompts:
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
            parse_rate=None if rate is None else round(rate, 4),
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


def prose(folder: Path) -> list[str]:
    """Paragraphs of Markdown files of over 80 characters, without code; a text for each chapter.

    Files are of one chapter if their names are equal up to the first hyphen (ch01-02-more.md).
    """
    chapters: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*-*.md")):
        text = re.sub(r"```.*?```|<!--.*?-->", "", path.read_text("utf-8"), flags=re.S)
        paragraphs = [" ".join(p.split()) for p in text.split("\n\n")]
        kept = [p for p in paragraphs if len(p) > 80 and p[0] not in "<[{#"]
        chapters.setdefault(path.name.split("-")[0], []).extend(kept)
    return ["\n\n".join(paragraphs) for paragraphs in chapters.values()]


class Int8Input(nn.Linear):
    """A linear layer that quantizes its input to int8 per token, as the reference does."""

    packed: Packed

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(seen_by(self.packed, x, "int8"))


def decode(model: nn.Module) -> float:
    """Put decoded weights in place of quantized ones; bits a weight of what was there."""
    total = weights = 0
    for name, layer in list(model.named_modules()):
        if isinstance(layer, QuantLinear):
            n, k = layer.packed.shape
            total, weights = total + layer.packed.nbytes() * 8, weights + n * k
            new = (Int8Input if layer.activation else nn.Linear)(k, n, bias=False, device="meta")
            new.weight = nn.Parameter(layer.dequantize(), requires_grad=False)
            new.bias, new.packed = layer.bias, layer.packed
            model.set_submodule(name, new)
    return total / weights


def parse(method: str, default: int) -> tuple[str, str, int]:
    """`"gptq/prose:64"` -> quantizer, kind of text, samples."""
    rest, _, samples = method.partition(":")
    name, _, kind = rest.partition("/")
    return name, kind or "code", int(samples or default)


def calibrated(name: str) -> bool:
    return name not in ("dense", "rtn", "clip", "hqq")


Message = Row | tuple[str, str] | None  # a row, what failed and why, or the end of a process


def work(
    todo: "multiprocessing.Queue[tuple[str, str]]",
    done: "multiprocessing.Queue[Message]",
    deadline: float,
    settings: tuple[Any, ...],
) -> None:
    """Measure cases until there are none, or until `deadline` (of `time.time()`)."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    own = Work(*settings)
    while time.time() < deadline:
        try:
            spec, methods = todo.get(timeout=1)
        except queue.Empty:
            break
        if "codebook" in spec and "additive" in methods and time.time() + LONG > deadline:
            done.put((f"{spec} {methods}", "no time for so long a case"))
            continue
        try:
            own.case(spec, methods.split(","), done.put)
        except Exception:
            done.put((f"{spec} {methods}", traceback.format_exc()[-1500:]))
            if own.device == "cuda":
                torch.cuda.synchronize()  # an error that stays ends this process
    done.put(None)


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
    parser.add_argument("--text", type=Path, help="to score: a folder of Markdown (the modules)")
    parser.add_argument("--cases", choices=KINDS, default="all")
    parser.add_argument(
        "--part", default="1/1", help="1/2: every second case, from the first (1/1)"
    )
    parser.add_argument("--out", type=Path, required=True, help="the .csv file to add rows to")
    args = parser.parse_args()
    if missing := [str(f) for f in args.models if not (f / "config.json").is_file()]:
        parser.error(f"no config.json in {missing}; name folders of models")
    began = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    about = facts(device)

    def save(row: Row) -> None:
        add_rows(args.out, [asdict(row) | about])
        print(f"{time.perf_counter() - began:5.0f} s", *asdict(row).values(), flush=True)

    well = True
    for folder in args.models:
        settings = (folder, device, args.tokens, args.prompts, args.steps, args.samples, args.text)
        left = args.seconds - (time.perf_counter() - began)
        number, parts = map(int, args.part.split("/"))
        todo = cases(args.cases)
        own = todo[number - 1 :: parts]
        well &= run(own, args.jobs, time.time() + left, settings, save)
    if not well:
        raise SystemExit("some cases have no rows")


def facts(device: str) -> dict[str, str]:
    """What every row says."""
    return {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "date": str(datetime.datetime.now(datetime.UTC).date()),
        "versions": f"anybit {anybit.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}",
    }


def run(
    todo: list[tuple[str, str]],
    jobs: int,
    deadline: float,
    settings: tuple[Any, ...],
    save: Callable[[Row], None],
) -> bool:
    """Measure the cases in order, in several processes; after the deadline, begin no more.

    Returns:
        Whether all that began ended well.
    """
    context = multiprocessing.get_context("spawn")
    waiting: multiprocessing.Queue[tuple[str, str]] = context.Queue()
    done: multiprocessing.Queue[Message] = context.Queue()
    for case in todo:
        waiting.put(case)
    processes = [
        context.Process(target=work, args=(waiting, done, deadline, settings)) for _ in range(jobs)
    ]
    for process in processes:
        process.start()
    failed, running = [], jobs
    while running and time.time() < deadline + PATIENCE:
        try:
            message = done.get(timeout=10)
        except queue.Empty:
            if not any(process.is_alive() for process in processes):
                break
            continue
        if isinstance(message, Row):
            save(message)
        elif message is None:
            running -= 1
        else:
            failed.append(message[0])
            print(*message, flush=True)
    left = []
    while True:
        try:
            left.append(waiting.get(timeout=0.2))
        except queue.Empty:
            break
    for process in processes:
        process.join(timeout=5)
        if process.is_alive():  # it hangs, or has a row begun before the deadline
            process.kill()
            process.join()
    codes = [process.exitcode for process in processes]
    print(f"processes ended with {codes}; left out: {failed}; not begun: {left}", flush=True)
    return not failed and not any(codes) and (not left or time.time() >= deadline)


if __name__ == "__main__":
    main()
