"""The accuracy of formats on a model of billions of weights, on a CPU, over the same model in bf16.

Half of the scored tokens are English prose (topics of Python's language reference), half code
(modules of the standard library), on none of which anything was calibrated. The dense model's
logits, in fp32, are kept in a file. Quantized weights are decoded layer by layer, so that little
more than one model in bf16 fills memory, and multiplied in bf16; what that costs is the row "bf16".

    python benchmarks/study_large.py MODEL --out benchmarks/results/study_qwen2.5-coder-1.5b.csv
    python benchmarks/study_large.py MODEL --only int8/rtn liquid@int8/rtn --out rows.csv

MODEL is a folder of a dense model. `--prepare FILE.gguf` writes it from a GGUF file, whose weights
it holds in bf16. A row that the file has is not measured again.
"""

import argparse
import csv
import gc
import hashlib
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from csv_rows import add_rows
from study import ROOT, calibrated, facts, parse
from study_cases import cases
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import anybit
from anybit import GPTQ, HQQ, RTN, Calibration, QuantLinear, Smooth
from anybit.evaluate.corpus import calibration_text, held_out_text, prose
from anybit.evaluate.perplexity import COLUMNS, Tokens, mean_and_error, measure
from anybit.kernels.between import seen_by
from anybit.kernels.kv.cache import LayerCache, rms_of_heads, token_bytes
from anybit.kernels.kv.format import KvFormat
from anybit.kernels.kv.formats import KV_FORMATS
from anybit.kernels.registry import BACKENDS

SAMPLES, LENGTH = 16, 512  # calibration windows: those of `anybit quantize` on a CPU


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--prepare", type=Path, metavar="FILE", help="write MODEL from this GGUF")
    parser.add_argument("--out", type=Path, help="the .csv file to add rows to")
    parser.add_argument("--only", nargs="+", metavar="FORMAT/METHOD", help="instead of all cases")
    parser.add_argument("--windows", type=int, default=12, help="half prose, half code (12)")
    parser.add_argument("--window", type=int, default=256, help="tokens of a window (256)")
    args = parser.parse_args()
    if args.prepare:
        prepare(args.prepare, args.model)
    if not args.out:
        return
    for name in ("hopper", "mma", "triton", "native", "cpu"):
        BACKENDS.pop(name, None)  # what is left is the definition, in calibration too
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = [prose(held_out=True), [text for _, text in held_out_text()]]
    windows = [w for t in texts for w in spaced(tokenizer, t, args.windows // 2, args.window)]
    dense = reference(args.model, windows)
    only = [tuple(pair.split("/", 1)) for pair in args.only or ()]
    for spec, method in only or cases("large"):
        have = args.out.exists() and list(csv.DictReader(args.out.open()))
        if have and any((row["spec"], row["method"]) == (spec, method) for row in have):
            continue
        print(time.strftime("%H:%M:%S"), spec, method, flush=True)
        start = time.process_time()
        if method == "kv":
            model, bits, gigabytes = cached(args.model, spec)
        else:
            model, bits, gigabytes = quantized(args.model, spec, method, tokenizer)
        seconds = time.process_time() - start
        found = measure(model, windows, window=args.window, batch=6, dense=dense)
        row = {
            "model": args.model.name, "spec": spec, "method": method, "bits": f"{bits:.3f}",
            "gb": f"{gigabytes:.3f}", **scores(found), "cpu_seconds": round(seconds),
            "windows": f"{args.windows} of {args.window}",
        } | facts("cpu") | {"commit": commit()}  # fmt: skip
        add_rows(args.out, [row])
        print(time.strftime("%H:%M:%S"), *row.values(), flush=True)
        del model
        gc.collect()


def prepare(file: Path, out: Path) -> None:
    """A dense folder of a GGUF file's weights, in bf16."""
    with TemporaryDirectory(dir=out.parent) as folder:
        converted = Path(folder) / "converted"
        command = [sys.executable, "-m", "anybit.cli", "convert", file, "-o", converted]
        subprocess.run(command, check=True)
        model = anybit.dequantize_(anybit.load(converted)).to(torch.bfloat16)
        model.save_pretrained(out)
        AutoTokenizer.from_pretrained(converted).save_pretrained(out)


def spaced(tokenizer: Any, texts: list[str], count: int, length: int) -> list[Tensor]:
    """Windows of so many tokens, evenly spaced over the texts."""
    ids = torch.cat([torch.tensor(tokenizer(t, verbose=False).input_ids) for t in texts])
    starts = torch.linspace(0, len(ids) - length, count).long().tolist()
    return [ids[at : at + length] for at in starts]


class Kept:
    """Logits of the dense model at all scored tokens, in a file."""

    def __init__(self, logits: Tensor):
        self.logits = logits

    def rows(self, start: int, stop: int) -> Tensor:
        return self.logits[start:stop]


@torch.inference_mode()
def reference(folder: Path, windows: list[Tensor]) -> Kept:
    """The dense model's logits in fp32, from the file of an earlier run of the same windows."""
    name = hashlib.sha256(str((folder.resolve(), windows)).encode()).hexdigest()[:16]
    path = folder / f"logits-{name}.pt"
    if not path.exists():
        model = running(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), torch.float32
        )
        found = [model(ids[None]).logits[0, :-1] for ids in windows]
        torch.save(torch.cat(found), path)
    return Kept(torch.load(path, mmap=True))


class Decoded(nn.Module):
    """A layer whose weight is decoded in every call, and multiplied in a dtype."""

    def __init__(self, layer: Any, dtype: torch.dtype):
        super().__init__()
        self.held, self.dtype = [layer], dtype  # a list: whose weight no cast changes

    def forward(self, x: Tensor) -> Tensor:
        (layer,) = self.held
        if isinstance(layer, QuantLinear):
            x, weight = seen_by(layer.packed, x, layer.activation), layer.packed.dequantize()
        else:
            weight = layer.weight
        y = nn.functional.linear(x.to(self.dtype), weight.to(self.dtype)).float()
        return y if layer.bias is None else y + layer.bias.float()


def running(model: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model that computes in fp32, but for products in a dtype."""
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_hook(lambda _, __, rows: rows.float())
    for path, layer in list(model.named_modules()):
        if isinstance(layer, QuantLinear | nn.Linear):
            model.set_submodule(path, Decoded(layer, dtype))
    for module in model.modules():
        if module is not embeddings:
            module._apply(lambda t: t.float() if t.is_floating_point() else t, recurse=False)
    return model.eval()


def quantized(
    folder: Path, spec: str, method: str, tokenizer: Any
) -> tuple[nn.Module, float, float]:
    """The model, stored bits a weight of its quantized layers, and GB of the whole model."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    name, kind, samples = parse(method, SAMPLES)
    if name != "dense":
        anybit.quantize_(model, spec, quantizer(name, kind, samples, tokenizer))
    layers = [layer.packed for layer in model.modules() if isinstance(layer, QuantLinear)]
    nbytes = sum(packed.nbytes() for packed in layers)
    weights = sum(packed.shape[0] * packed.shape[1] for packed in layers)
    bits = 8 * nbytes / weights if weights else 16.0
    nbytes += sum(p.nbytes for p in model.parameters())
    return running(model), bits, nbytes / 1e9


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
        cache.store(*rows, torch.arange(batch * size))
        k, v = cache.load(torch.arange(batch)[:, None], torch.float32)
        return cache.format.k.turn(k).float(), v.float()  # a rotation that is its own inverse


def cached(folder: Path, name: str) -> tuple[Any, float, float]:
    """The model as it is with a KV cache, and bits a number of that, scales included."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    dim, nbytes = model.config.head_dim, sum(p.nbytes for p in model.parameters())
    formats = list[KvFormat]()
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias
        largest = 0.0 if bias is None else rms_of_heads(bias, dim)
        formats.append(KV_FORMATS[name].with_bias(largest, torch.bfloat16))
    model = running(model)
    bits = sum(4 * token_bytes(dim, format) / dim for format in formats) / len(formats)
    return lambda ids: model(ids, past_key_values=Through(formats)), bits, nbytes / 1e9


def quantizer(name: str, kind: str, samples: int, tokenizer: Any) -> Any:
    if not calibrated(name):
        return {"rtn": RTN, "hqq": HQQ}[name]()
    halves = [prose(held_out=False), [text for _, text in calibration_text()]]
    windows = [w for t in halves for w in spaced(tokenizer, t, samples // 2, LENGTH)]
    data = Calibration(torch.stack(windows), samples=samples, length=LENGTH)
    return {"gptq": lambda: GPTQ(data), "smooth+gptq": lambda: Smooth(data, then=GPTQ())}[name]()


def scores(found: Tokens) -> dict[str, object]:
    """Means over tokens, and their standard errors from the spread between windows."""
    sums, counts = found.sums(found.values)
    out: dict[str, object] = {"tokens": len(found.values)}
    for name, column, digits in (("loss", "loss", 5), ("kl", "kl", 6), ("top1", "agreement", 4)):
        mean, error = mean_and_error(sums[:, COLUMNS.index(column)], counts)
        out |= {name: round(mean, digits), f"{name}_error": round(error, digits)}
    return out


def commit() -> str:
    told = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return told.stdout.strip()


if __name__ == "__main__":
    main()
