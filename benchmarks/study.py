"""The accuracy study: formats by quantizers on one model, over the same model unquantized.

Half of the scored tokens are English (topics of Python's language reference), half Python (modules
of its standard library); what calibrates is as mixed, and none of it is scored. Weights are decoded
and multiplied in fp32 (on a GPU TF32), 8-bit activations are real int8 codes: the figures hold for
every kernel that computes what the reference defines. What 16-bit products cost is the row "bf16".

    python benchmarks/study.py MODEL.gguf --out benchmarks/results/study_qwen2.5-coder-1.5b.csv
    python benchmarks/study.py MODEL.gguf --seconds 275 --keep build/study --out rows.csv
    python benchmarks/study.py MODEL --only int8/rtn int4:group=64,zero/gptq --out rows.csv

MODEL is a folder or a GGUF file, whose weights are the reference as bf16 holds them. The rows of
`CASES` are measured in that order, and written as they finish. A row that the file has is not
measured again, so that a run goes on where another was cut off. `tasks.py` takes what --keep saves.
"""

import argparse
import copy
import csv
import datetime
import gc
import json
import math
import multiprocessing
import os
import platform
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    ProcessPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from csv_rows import add_rows
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, DynamicCache

import anybit
from anybit import Calibration, QuantLinear
from anybit.checkpoint.foreign.ready import ready
from anybit.checkpoint.save_load import load_dense
from anybit.engine.models.rope import head_dim
from anybit.evaluate.corpus import calibration_text, held_out_text, prose
from anybit.evaluate.perplexity import (
    COLUMNS,
    Remembered,
    Tokens,
    mean_and_error,
    measure,
)
from anybit.kernels import between
from anybit.kernels.kv.cache import LayerCache, rms_of_heads, token_bytes
from anybit.kernels.kv.format import KvFormat
from anybit.kernels.kv.formats import KV_FORMATS
from anybit.kernels.registry import BACKENDS
from anybit.planning.allocate import plan_formats
from anybit.quantizers.calibration.block_runner import cache_argument
from anybit.quantizers.calibration.chat import before_text
from anybit.quantizers.registry import CALIBRATED, DATA_FREE

# A format and its methods: those of `anybit quantize`; dense: products in bf16; kv: a format of KV
# caches. `plan:4.5` is a format for each layer, for so many bits on average.
CASES = """
bf16 dense
int8 rtn
fp:e2m3 rtn
int4:group=64,zero rtn
trellis:bits=4,rotate=kn gptq
int4:group=64,zero gptq
int3:group=64,zero gptq
trellis:code=look,rotate=kn gptq
fp:e2m3 gptq
liquid@int8 smooth+gptq
int4:group=64,zero hqq
int4:group=128 rtn
fp6 rtn
liquid@int8 rtn
int8 kv
k8v4 kv
int4 kv
int3:group=64,zero rtn
trellis:bits=3,rotate=kn gptq
int4:group=128 gptq
int8@int8 rtn
liquid@int8 gptq
nvfp4 gptq
trellis:rotate=kn gptq
int4:group=64,zero gptq+gradients
plan:4.5 gptq
mxfp4 gptq
trellis:code=look@int8 gptq
trellis:bits=3,code=look,rotate=kn gptq
trellis:rotate=kn gptq+gradients
trellis:bits=3,rotate=kn gptq+gradients
trellis:bits=4,rotate=kn gptq+gradients
int8@int8 smooth+gptq
nvfp4 rtn
mxfp4 rtn
int4:group=128 hqq
int3:group=64,zero hqq
int4:group=32 rtn
int4:group=32 gptq
int5:group=64 rtn
int6 rtn
nf4 rtn
fp8 rtn
int4 rtn
int2:group=32,zero rtn
int2:group=32,zero gptq
"""
KEPT = (  # by --keep, for tasks
    ("int8", "rtn"),
    ("fp:e2m3", "rtn"),
    ("int4:group=64,zero", "gptq"),
    ("trellis:bits=4,rotate=kn", "gptq"),
    ("int3:group=64,zero", "gptq"),
    ("trellis:code=look,rotate=kn", "gptq"),
)
ROOT = Path(__file__).resolve().parents[1]
GRACE = 5  # seconds after the deadline in which processes end


class Settings(NamedTuple):
    """What each process is given. deadline: of `time.time()`."""

    folder: Path
    name: str
    device: str
    jobs: int
    deadline: float
    windows: int
    window: int
    samples: int
    length: int
    keep: Path | None


def main() -> None:
    began, args = time.time(), arguments()
    folder = ready(args.model)
    deadline = began + (args.seconds or math.inf)
    most = AutoConfig.from_pretrained(folder).get_text_config().max_position_embeddings
    settings = Settings(
        folder, args.model.stem if args.model.is_file() else args.model.name, args.device,
        args.jobs, deadline, args.windows // 2 * 2, min(args.window, most), args.samples,
        min(args.length, most), args.keep,
    )  # fmt: skip
    about = facts(args.device) | {"commit": commit()}

    def save(row: dict[str, Any]) -> None:
        add_rows(args.out, [row | about])
        print(f"{time.time() - began:5.0f} s", *row.values(), flush=True)

    only = [tuple(pair.split("/", 1)) for pair in args.only or ()]
    have = measured(args.out, settings, about["gpu"])
    todo = [case for case in only or cases() if case not in have]
    left = run(todo, settings, save)
    print(f"{time.time() - began:5.0f} s, left out: {left}", flush=True)
    if any(" failed: " in one for one in left):
        raise SystemExit("some rows failed")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = torch.cuda.is_available()
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="the .csv file to add rows to")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--only", nargs="+", metavar="FORMAT/METHOD", help="instead of all cases")
    parser.add_argument("--seconds", type=float, help="end after so many (with all cases)")
    parser.add_argument("--jobs", type=int, help="processes (2 on a GPU, 1 on a CPU)")
    parser.add_argument("--windows", type=int, help="to score, half English (26, on a CPU 12)")
    parser.add_argument("--window", type=int, help="tokens of one (4096, on a CPU 256)")
    parser.add_argument("--samples", type=int, help="calibration windows (128, on a CPU 16)")
    parser.add_argument("--length", type=int, help="tokens of one (1024, on a CPU 512)")
    parser.add_argument("--keep", type=Path, help="a folder for the models that `tasks.py` takes")
    args = parser.parse_args()
    if args.device == "cpu":
        usual = {"jobs": 1, "windows": 12, "window": 256, "samples": 16, "length": 512}
    else:
        usual = {"jobs": 2, "windows": 26, "window": 4096, "samples": 128, "length": 1024}
    for name, value in usual.items():
        setattr(args, name, getattr(args, name) or value)
    return args


def cases() -> list[tuple[str, ...]]:
    """(spec, method) of all rows, in the order in which they are measured."""
    lines = (line.split() for line in CASES.split("\n") if line)
    return [(spec, method) for spec, *methods in lines for method in methods]


def measured(out: Path, settings: Settings, gpu: str) -> set[tuple[str, ...]]:
    """(spec, method) of the rows that a file has of this model, these windows and this device."""
    if not out.exists():
        return set()
    same = {"model": settings.name, "windows": scored_as(settings), "gpu": gpu}
    with out.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if same.items() <= row.items()]
    return {(row["spec"], row["method"]) for row in rows}


def scored_as(settings: Settings) -> str:
    return f"{settings.windows} of {settings.window}"


def facts(device: str) -> dict[str, str]:
    """What every row says."""
    return {
        "gpu": torch.cuda.get_device_name() if device.startswith("cuda") else "CPU",
        "date": str(datetime.datetime.now(datetime.UTC).date()),
        "versions": f"anybit {anybit.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}",
    }


def commit() -> str:
    """Of the code; "" where that is no clone."""
    told = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return told.stdout.strip()


# Processes.


def run(
    todo: list[tuple[str, ...]], settings: Settings, save: Callable[[dict[str, Any]], None]
) -> list[str]:
    """Measure the cases in order, in several processes, until the deadline.

    A case is begun only if there is time for it, as far as a like one has shown.

    Returns:
        The cases without a row, and why they failed if they did.
    """
    spawn = multiprocessing.get_context("spawn")
    free = [ProcessPoolExecutor(1, spawn, begin, (settings,)) for _ in range(settings.jobs)]
    pools, failed, left = list(free), list[str](), list(todo)
    running: dict[Future[dict[str, Any]], tuple[tuple[str, ...], ProcessPoolExecutor]] = {}
    took: dict[object, float] = {}

    def in_time(case: tuple[str, ...]) -> bool:
        return time.time() + took.get(kind(*case), 0) < settings.deadline

    while True:
        while free and (case := next(filter(in_time, left), None)):
            left.remove(case)
            pool = free.pop()
            running[pool.submit(row_of, *case)] = case, pool
        end = settings.deadline + GRACE - time.time()
        done, _ = wait(running, end if end < math.inf else None, FIRST_COMPLETED)
        if not done:
            break
        for future in done:
            case, pool = running.pop(future)
            try:
                row = future.result()
                took[kind(*case)] = row.pop("took")
                save(row)
            except BrokenProcessPool:
                cut = time.time() > settings.deadline - 1
                failed.append(
                    " ".join((*case, "was cut off" if cut else "failed: its process died"))
                )
                if cut:
                    continue
                pool = ProcessPoolExecutor(1, spawn, begin, (settings,))
                pools.append(pool)
            except Exception as error:
                failed.append(f"{' '.join(case)} failed: {error!r:.500}")
                print(failed[-1], flush=True)
            free.append(pool)
    for pool in pools:
        pool.shutdown(wait=False, cancel_futures=True)
    return failed + [" ".join(case) for case in left]


def kind(spec: str, method: str) -> object:
    """What tells how long a case takes."""
    return method in CALIBRATED, "trellis" in spec, "gradients" in method, "plan" in spec


WORK: "Work"


def begin(settings: Settings) -> None:
    """In a process of its own: all that its cases share."""
    global WORK
    if settings.deadline < math.inf:
        end = threading.Timer(settings.deadline - time.time(), os._exit, (1,))
        end.daemon = True
        end.start()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in ("hopper", "mma", "triton", "native", "cpu"):
        BACKENDS.pop(name, None)  # what is left is the definition, in calibration too
    WORK = Work(settings)


def row_of(spec: str, method: str) -> dict[str, Any]:
    began = time.perf_counter()
    row = WORK.row(spec, method)
    gc.collect()
    if WORK.settings.device.startswith("cuda"):
        torch.cuda.empty_cache()
    return row | {"took": time.perf_counter() - began}


# Models.


class Work:
    """What the cases of a process share: the model, what is scored, and what the model says."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.tokenizer = AutoTokenizer.from_pretrained(settings.folder)
        self.model = dense_model(settings.folder, settings.device)
        self.window, self.length = settings.window, settings.length
        self.scored = [
            ids.to(settings.device)
            for texts in (prose(held_out=True), [text for _, text in held_out_text()])
            for ids in self.spaced(texts, settings.windows // 2, self.window)
        ]
        # fp16 keeps logits to 0.01, which is a KL of 0.00001, in half the memory.
        cuda = settings.device.startswith("cuda")
        room = torch.cuda.mem_get_info()[1] * 0.6 / settings.jobs if cuda else 2 << 30
        dtype, dense = torch.half if cuda else torch.float32, running(self.fresh())
        self.dense = Remembered(lambda ids: dense(ids).logits.to(dtype), int(room))

    def spaced(self, texts: Sequence[str], count: int, length: int) -> list[Tensor]:
        """Windows of so many tokens, evenly spaced over texts, each beginning as a text does."""
        ids = torch.cat([torch.tensor(self.tokenizer(t, verbose=False).input_ids) for t in texts])
        starts = torch.linspace(0, len(ids) - length, count).long().tolist()
        out, begins = [ids[at : at + length] for at in starts], before_text(self.tokenizer)
        for window in out:
            window[: len(begins)] = torch.tensor(begins, dtype=window.dtype)
        return out

    def calibration(self, samples: int) -> Calibration:
        halves = [prose(held_out=False), [text for _, text in calibration_text()]]
        windows = [w for t in halves for w in self.spaced(t, samples // 2, self.length)]
        return Calibration(torch.stack(windows), samples=samples, length=self.length)

    def fresh(self) -> Any:
        """A copy of the model that shares its matrices."""
        shared = {id(p): p for p in self.model.parameters() if p.ndim > 1}
        return copy.deepcopy(self.model, shared)

    def row(self, spec: str, method: str) -> dict[str, Any]:
        """Quantize a copy of the model, and score it."""
        start = time.perf_counter()
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("highest")
        if method == "kv":
            model, bits, nbytes = self.cached(spec)
        else:
            model, bits, nbytes = self.quantized(spec, method)
        if self.settings.device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        torch.set_float32_matmul_precision("high")
        batch = max(1, (8192 if self.settings.device.startswith("cuda") else 1536) // self.window)
        found = measure(model, self.scored, window=self.window, batch=batch, dense=self.dense)
        data = method in CALIBRATED
        return {
            "model": self.settings.name, "spec": spec, "method": method,
            "text": "mixed" if data else "", "samples": self.settings.samples if data else 0,
            "length": self.length if data else 0, "bits": f"{bits:.3f}",
            "gb": f"{nbytes / 1e9:.3f}", **scores(found), "seconds": f"{seconds:.1f}",
            "windows": scored_as(self.settings),
        }  # fmt: skip

    def quantized(self, spec: str, method: str) -> tuple[nn.Module, float, float]:
        """The model, stored bits a weight of its quantized layers, and bytes of the whole model."""
        model = self.fresh()
        if method == "dense":
            nbytes = sum(p.nbytes for p in model.parameters())
            return running(model, torch.bfloat16), 16.0, nbytes
        make = CALIBRATED.get(method)
        quantizer = make(self.calibration(self.settings.samples)) if make else DATA_FREE[method]()
        scheme: Any = spec
        if spec.startswith("plan:"):
            data, bits = self.calibration(self.settings.samples // 4), float(spec[5:])
            scheme = plan_formats(self.fresh(), data, bits).plan
        anybit.quantize_(model, scheme, quantizer, show_progress=False)
        if self.settings.keep and (spec, method) in KEPT:
            name = f"{spec}-{method}".translate(str.maketrans(":,=", "---"))
            anybit.save(model, self.settings.keep / name)
        layers = [layer.packed for layer in model.modules() if isinstance(layer, QuantLinear)]
        packed = sum(layer.nbytes() for layer in layers)
        bits = 8 * packed / sum(layer.shape[0] * layer.shape[1] for layer in layers)
        nbytes = packed + sum(p.nbytes for p in model.parameters())
        return running(model), bits, nbytes

    def cached(self, name: str) -> tuple[Any, float, float]:
        """The model as it is with a KV cache, and bits a number of that, scales included."""
        model = self.fresh()
        dim, nbytes = head_dim(model.config), sum(p.nbytes for p in model.parameters())
        formats = list[KvFormat]()
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias
            largest = 0.0 if bias is None else rms_of_heads(bias, dim)
            formats.append(KV_FORMATS[name].with_bias(largest, torch.bfloat16))
        bits = sum(4 * token_bytes(dim, format) / dim for format in formats) / len(formats)
        argument, model = cache_argument(model), running(model)
        return lambda ids: model(ids, **{argument: Through(formats)}), bits, nbytes


def dense_model(folder: Path, device: str) -> Any:
    """A model in bf16, decoded if it is quantized."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    if "quantization_config" in config:
        model: Any = anybit.dequantize_(anybit.load(folder, device))
    else:
        model = load_dense(folder)
    return model.to(device, torch.bfloat16).eval().requires_grad_(False)


class Decoded(nn.Module):
    """A layer whose weight is decoded in every call, and multiplied in a dtype."""

    def __init__(self, layer: Any, dtype: torch.dtype):
        super().__init__()
        self.held, self.dtype = [layer], dtype  # a list: whose weight no cast changes

    def forward(self, x: Tensor) -> Tensor:
        (layer,) = self.held
        if isinstance(layer, QuantLinear):
            x = between.seen_by(layer.packed, x, layer.activation)
            weight = layer.packed.dequantize()
        else:
            weight = layer.weight
        y = nn.functional.linear(x.to(self.dtype), weight.to(self.dtype)).float()
        return y if layer.bias is None else y + layer.bias.float()


def running(model: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A model that computes in fp32, but for products in a dtype."""
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_hook(lambda _, __, rows: rows.float())
    for path, layer in list(model.named_modules()):
        if isinstance(layer, QuantLinear | nn.Linear):
            model.set_submodule(path, Decoded(layer, dtype))
    for module in model.modules():
        if module is not embeddings:
            for name, held in (*module._parameters.items(), *module._buffers.items()):
                if held is not None and held.is_floating_point():  # others may hold it, too
                    new = held.detach().float()
                    own = nn.Parameter(new, False) if isinstance(held, nn.Parameter) else new
                    setattr(module, name, own)
    return model.eval()


class Through(DynamicCache):
    """K and V as a cache of anybit returns them."""

    def __init__(self, formats: list[KvFormat]):
        super().__init__()
        self.formats = formats

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        batch, heads, size, dim = k.shape
        cache = LayerCache.empty(batch, heads, size, dim, self.formats[layer], k.device)
        dtype = cache.k.dtype if cache.k.is_floating_point() else k.dtype
        rows = (x.transpose(1, 2).reshape(-1, heads, dim).to(dtype) for x in (k, v))
        cache.store(*rows, torch.arange(batch * size, device=k.device))
        k, v = cache.load(torch.arange(batch, device=k.device)[:, None], torch.float32)
        return cache.format.k.turn(k).float(), v.float()  # a rotation that is its own inverse


def scores(found: Tokens) -> dict[str, object]:
    """Means over tokens, and their standard errors from the spread between windows."""
    sums, counts = found.sums(found.values)
    out: dict[str, object] = {"tokens": len(found.values)}
    for name, digits in (("loss", 5), ("kl", 6), ("agreement", 4)):
        mean, error = mean_and_error(sums[:, COLUMNS.index(name)], counts)
        out |= {name: round(mean, digits), f"{name}_error": round(error, digits)}
    return out | {"perplexity": round(math.exp(float(sums[:, 0].sum() / counts.sum())), 4)}


if __name__ == "__main__":
    main()
